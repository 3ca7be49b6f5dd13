//! What a request has been through on its way to an answer.

use std::sync::Arc;

use super::member::Endpoint;

/// Why a request was sent again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RetryReason {
    /// The connection that was kept had died: to the same server, on a fresh one.
    Reconnected,
    /// Nothing of it was written: to another server.
    Unwritten,
    /// It may be repeated, and the budget had something left: to another server.
    Retried,
}

impl RetryReason {
    /// All, in the order of their counts.
    pub const ALL: [RetryReason; 3] = [RetryReason::Reconnected, RetryReason::Unwritten, RetryReason::Retried];

    /// One word for labels.
    pub fn label(self) -> &'static str {
        match self {
            RetryReason::Reconnected => "stale_connection",
            RetryReason::Unwritten => "not_sent",
            RetryReason::Retried => "reset",
        }
    }
}

/// Where a request was, and how often it was sent again.
#[derive(Debug, Default)]
pub struct AttemptLog {
    retries: [u64; 3],
    endpoint: Option<Arc<Endpoint>>,
    /// Whether somebody wants to know where it was: all workers share the members.
    records_endpoint: bool,
}

impl AttemptLog {
    /// One that knows its server, if `named`.
    pub fn new(records_endpoint: bool) -> Self {
        AttemptLog { records_endpoint, ..AttemptLog::default() }
    }

    /// How often it was sent again, by [`Again`].
    pub fn retries(&self) -> [u64; 3] {
        self.retries
    }

    /// The server that it was at last.
    pub fn endpoint_name(&self) -> Option<String> {
        self.endpoint.as_ref().map(|endpoint| endpoint.name())
    }

    pub(super) fn record_endpoint(&mut self, endpoint: &Arc<Endpoint>) {
        if self.records_endpoint {
            self.endpoint = Some(endpoint.clone());
        }
    }

    pub(super) fn record_retries(&mut self, reason: RetryReason, times: u64) {
        self.retries[reason as usize] += times;
    }
}
