//! Whether the process is fit to be sent requests.

use std::collections::BTreeMap;

use serde::Serialize;

use super::vitals::Vitals;
use crate::upstream::fleet::EndpointStatus;

/// `/readyz`
#[derive(Debug, Serialize)]
pub(super) struct Health<'a> {
    status: Status,
    store: Store<'a>,
    upstreams: BTreeMap<Box<str>, Vec<Server>>,
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

/// One server of an upstream.
#[derive(Debug, Serialize)]
struct Server {
    server: String,
    state: &'static str,
    in_flight: usize,
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
        // The service does not stop when another process goes on with it.
        let stops = self.stop.is_cancelled() && !self.end.is_cancelled();
        let status = match (stops, failing.is_empty()) {
            (true, _) => Status::Stopping,
            (false, true) => Status::Ready,
            (false, false) => Status::Degraded,
        };
        let server = |EndpointStatus { server, state, in_flight }| Server { server, state, in_flight };
        let fleets = self.configuration.active().clusters.clone();
        let upstreams = fleets.iter().map(|fleet| {
            let servers = fleet.status().into_iter().map(server).collect();
            (fleet.settings.name.clone(), servers)
        });
        Health { status, store: Store { name: &self.store, failing }, upstreams: upstreams.collect() }
    }
}
