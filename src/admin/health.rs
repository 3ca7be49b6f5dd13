//! `/readyz`: readiness of the process, its store and its upstreams.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::admin::AdminState;
use crate::snapshot::Listener;
use crate::upstream::cluster::EndpointStatus;

/// Response body of `/readyz`.
#[derive(Debug, Serialize)]
pub(super) struct ReadinessReport<'a> {
    status: ReadinessStatus,
    store: StoreReadiness<'a>,
    upstreams: BTreeMap<Box<str>, Vec<EndpointReadiness>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    certificates: Option<CertificateReadiness>,
}

/// Certificates that are obtained by ACME.
#[derive(Debug, Serialize)]
struct CertificateReadiness {
    /// Names without a certificate.
    missing: Vec<Box<str>>,
}

/// Overall status.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum ReadinessStatus {
    /// The store is available.
    Ready,
    /// A circuit breaker of the store is open: the gateway serves requests, and limits follow `on_store_error`.
    Degraded,
    /// A listener has no certificate from the CA yet, and serves a self-signed certificate.
    Pending,
    /// The process has received a signal to stop, and waits for `accept_grace` or drains connections.
    Stopping,
}

#[derive(Debug, Serialize)]
struct StoreReadiness<'a> {
    name: &'a str,
    /// The store, or its nodes, whose circuit breaker is open.
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
    /// Return whether load balancers should send requests.
    pub(super) fn is_ready(&self) -> bool {
        matches!(self.status, ReadinessStatus::Ready | ReadinessStatus::Degraded)
    }
}

impl AdminState {
    /// Return the current readiness.
    pub(super) fn readiness(&self) -> ReadinessReport<'_> {
        let failing_stores = self.failing_stores();
        let active = self.config_handle.active();
        let lacks_certificates = active.config.listeners.iter().any(lacks_certificates);
        let status = match (self.stopping.is_cancelled(), lacks_certificates, failing_stores.is_empty()) {
            (true, ..) => ReadinessStatus::Stopping,
            (false, true, _) => ReadinessStatus::Pending,
            (false, false, true) => ReadinessStatus::Ready,
            (false, false, false) => ReadinessStatus::Degraded,
        };
        let to_server = |EndpointStatus { server, state, in_flight }| EndpointReadiness { server, state, in_flight };
        let certificates = active.config.acme.as_ref().map(|acme| {
            let missing = acme.names.iter().filter(|name| acme.certificates.get(name).certificate.is_none());
            CertificateReadiness { missing: missing.cloned().collect() }
        });
        let upstreams = active.clusters.iter().map(|cluster| {
            let servers = cluster.status().into_iter().map(to_server).collect();
            (cluster.settings.name.clone(), servers)
        });
        ReadinessReport {
            status,
            store: StoreReadiness { name: &self.store_name, failing: failing_stores },
            upstreams: upstreams.collect(),
            certificates,
        }
    }
}

/// Return whether a listener waits for its first certificate by ACME.
fn lacks_certificates(listener: &Listener) -> bool {
    let managed = listener.tls.as_ref().and_then(|tls| tls.tls.managed());
    managed.is_some_and(|(names, certificates)| names.iter().all(|name| certificates.get(name).certificate.is_none()))
}
