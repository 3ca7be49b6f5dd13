//! Whether the process is fit to be sent requests.

use serde::Serialize;

use super::vitals::Vitals;

/// `/readyz`
#[derive(Debug, Serialize)]
pub(super) struct Health<'a> {
    status: Status,
    store: Store<'a>,
}

/// In a word.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Status {
    /// All works.
    Ready,
    /// Requests are served, but limits follow `on_store_error`.
    Degraded,
    /// No new requests are wanted.
    Stopping,
}

#[derive(Debug, Serialize)]
struct Store<'a> {
    name: &'a str,
    /// What of it does not answer.
    failing: Vec<String>,
}

impl Health<'_> {
    pub(super) fn is_stopping(&self) -> bool {
        self.status == Status::Stopping
    }
}

impl Vitals {
    /// As it stands now.
    pub(super) fn health(&self) -> Health<'_> {
        let failing = self.failing();
        let status = match (self.stop.is_cancelled(), failing.is_empty()) {
            (true, _) => Status::Stopping,
            (false, true) => Status::Ready,
            (false, false) => Status::Degraded,
        };
        Health { status, store: Store { name: &self.store, failing } }
    }
}
