//! Why the store fails, in the log: each reason of an outage once.

use tracing::field::display;
use tracing::{info, warn};

use crate::limit::redis::advice::diagnose_call;
use crate::limit::redis::server::Address;
use crate::limit::store::StoreError;

/// Reasons of one outage that are logged. More than one: the first may be that of a slow moment, and not what is to be mended.
const MAX_REASONS: usize = 8;

/// What was said of one outage.
#[derive(Debug)]
pub(super) struct OutageLog {
    /// Where the store is, if it is one of several.
    node: Option<Address>,
    logged: Vec<String>,
}

impl OutageLog {
    /// Nothing, as yet.
    pub(super) fn new(node: Option<Address>) -> Self {
        OutageLog { node, logged: Vec::new() }
    }

    /// Says why a call failed, if that is new.
    pub(super) fn log_failure(&mut self, error: &StoreError) {
        let reason = error.to_string();
        if self.logged.len() == MAX_REASONS || self.logged.contains(&reason) {
            return;
        }
        let (node, advice) = (self.node.as_ref().map(display), error.error_reply().map(diagnose_call));
        if self.logged.is_empty() {
            warn!(%error, advice, node, "the store fails: limits follow on_store_error until it answers again");
        } else {
            warn!(%error, advice, node, "the store still fails, for another reason");
        }
        self.logged.push(reason);
    }

    /// Says that it is over.
    pub(super) fn log_recovery(self) {
        info!(node = self.node.as_ref().map(display), "the store answers again");
    }
}
