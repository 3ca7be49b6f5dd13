//! Claims of quota events in Redis, so that only one of several gateways sends an event.

use std::time::Duration;

use redis::Cmd;

const SCRIPT: &str = include_str!("../../../lua/event_claim.lua");

/// The claim with which one of several gateways gets the right to send an event.
#[derive(Debug)]
pub struct EventClaim<'a> {
    /// Key of the claim, without the prefix of the store.
    pub key: &'a str,
    /// Id of the event.
    pub id: &'a str,
    /// Time for which no other event can get the claim.
    pub ttl: Duration,
    /// The stream to which the event is added.
    pub entry: Option<StreamEntry<'a>>,
}

/// An entry of a stream.
#[derive(Debug)]
pub struct StreamEntry<'a> {
    /// Key of the stream. The hash tag of the claim is the name of the stream, so both keys are in one slot.
    pub stream: &'a str,
    /// Approximate number of entries to keep.
    pub max_length: u64,
    /// The event as JSON.
    pub body: &'a [u8],
}

/// Return the command that claims an event. The reply is 1, or 0 if another event has the claim.
pub fn claim_command(key: &str, claim: &EventClaim<'_>) -> Cmd {
    let mut command = redis::cmd("EVAL");
    command.arg(SCRIPT).arg(1 + usize::from(claim.entry.is_some())).arg(key);
    if let Some(entry) = &claim.entry {
        command.arg(entry.stream);
    }
    command.arg(claim.id).arg(claim.ttl.as_millis().max(1) as u64);
    if let Some(entry) = &claim.entry {
        command.arg(entry.max_length).arg(entry.body);
    }
    command
}
