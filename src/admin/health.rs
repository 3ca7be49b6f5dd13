//! Whether the process is fit to be sent requests.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::admin::state::AdminState;
use crate::upstream::cluster::EndpointStatus;

/// `/readyz`
#[derive(Debug, Serialize)]
pub(super) struct ReadinessReport<'a> {
    status: ReadinessStatus,
    store: StoreReadiness<'a>,
    upstreams: BTreeMap<Box<str>, Vec<EndpointReadiness>>,
}

/// In a word.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum ReadinessStatus {
    /// All works.
    Ready,
    /// Requests are served, but limits follow `on_store_error`.
    Degraded,
    /// No new requests are wanted.
    Stopping,
}

#[derive(Debug, Serialize)]
struct StoreReadiness<'a> {
    name: &'a str,
    /// What of it does not answer.
    failing: Vec<String>,
}

/// One server of an upstream.
#[derive(Debug, Serialize)]
struct EndpointReadiness {
    server: String,
    state: &'static str,
    in_flight: usize,
}

impl ReadinessReport<'_> {
    pub(super) fn is_stopping(&self) -> bool {
        self.status == ReadinessStatus::Stopping
    }
}

impl AdminState {
    /// As it stands now.
    pub(super) fn readiness(&self) -> ReadinessReport<'_> {
        let failing_stores = self.failing_stores();
        // The service does not stop when another process goes on with it.
        let is_draining = self.drain.is_cancelled() && !self.admin_stop.is_cancelled();
        let status = match (is_draining, failing_stores.is_empty()) {
            (true, _) => ReadinessStatus::Stopping,
            (false, true) => ReadinessStatus::Ready,
            (false, false) => ReadinessStatus::Degraded,
        };
        let to_server = |EndpointStatus { server, state, in_flight }| EndpointReadiness { server, state, in_flight };
        let clusters = self.config_handle.active().clusters.clone();
        let upstreams = clusters.iter().map(|cluster| {
            let servers = cluster.status().into_iter().map(to_server).collect();
            (cluster.settings.name.clone(), servers)
        });
        ReadinessReport {
            status,
            store: StoreReadiness { name: &self.store_name, failing: failing_stores },
            upstreams: upstreams.collect(),
        }
    }
}
