//! What a request has been through on its way to an answer.

use std::sync::Arc;

use super::member::Member;

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
    pub fn word(self) -> &'static str {
        match self {
            RetryReason::Reconnected => "stale_connection",
            RetryReason::Unwritten => "not_sent",
            RetryReason::Retried => "reset",
        }
    }
}

/// Where a request was, and how often it was sent again.
#[derive(Debug, Default)]
pub struct Trail {
    again: [u64; 3],
    server: Option<Arc<Member>>,
    /// Whether somebody wants to know where it was: all workers share the members.
    named: bool,
}

impl Trail {
    /// One that knows its server, if `named`.
    pub fn new(named: bool) -> Self {
        Trail { named, ..Trail::default() }
    }

    /// How often it was sent again, by [`Again`].
    pub fn again(&self) -> [u64; 3] {
        self.again
    }

    /// The server that it was at last.
    pub fn server(&self) -> Option<String> {
        self.server.as_ref().map(|member| member.name())
    }

    pub(super) fn at(&mut self, member: &Arc<Member>) {
        if self.named {
            self.server = Some(member.clone());
        }
    }

    pub(super) fn count(&mut self, why: RetryReason, times: u64) {
        self.again[why as usize] += times;
    }
}
