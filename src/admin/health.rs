//! `/readyz`: readiness of the process, its store and its upstreams.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::admin::state::AdminState;
use crate::upstream::cluster::EndpointStatus;

/// Response body of `/readyz`.
#[derive(Debug, Serialize)]
pub(super) struct ReadinessReport<'a> {
    status: ReadinessStatus,
    store: StoreReadiness<'a>,
    upstreams: BTreeMap<Box<str>, Vec<EndpointReadiness>>,
}

/// Overall status.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum ReadinessStatus {
    /// The store is available.
    Ready,
    /// A circuit breaker of the store is open: requests are served, and limits follow `on_store_error`.
    Degraded,
    /// The process drains and accepts no new requests.
    Stopping,
}

#[derive(Debug, Serialize)]
struct StoreReadiness<'a> {
    name: &'a str,
    /// The store, or the nodes of it, whose circuit breaker is open.
    failing: Vec<String>,
}

/// One endpoint of an upstream.
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
    /// Return the current readiness.
    pub(super) fn readiness(&self) -> ReadinessReport<'_> {
        let failing_stores = self.failing_stores();
        // After a hot restart (`admin_stop`) the service continues in the new process, so it is not stopping.
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
