//! `/api/status`: version, uptime, listeners, store and requests of the last minute.

use serde::Serialize;

use crate::admin::AdminResponse;
use crate::admin::api::{ApiContext, json_response};
use crate::admin::configuration::format_rfc3339;
use crate::admin::events::PeriodStats;
use crate::limiter::clock::unix_us;

#[derive(Serialize)]
struct StatusResponse<'a> {
    version: &'static str,
    commit: &'static str,
    /// Process id.
    pid: u32,
    /// Time of this response by the clock of the gateway, in RFC 3339.
    time: String,
    started_at: String,
    uptime_seconds: u64,
    connections: ConnectionCounts,
    listeners: Vec<ListenerStatus<'a>>,
    store: StoreStatus<'a>,
    /// Requests of the last minute.
    last_minute: PeriodStats,
}

#[derive(Serialize)]
struct ConnectionCounts {
    open: usize,
    max: usize,
}

#[derive(Serialize)]
struct ListenerStatus<'a> {
    /// Name of the listener, if it has one.
    name: Option<&'a str>,
    /// The bound address.
    address: String,
    tls: bool,
    proxy_protocol: bool,
    /// Open connections.
    connections: usize,
}

#[derive(Serialize)]
struct StoreStatus<'a> {
    /// The store, without credentials.
    name: &'a str,
    /// `closed`, or `open` if one of several circuit breakers is open. `None` for the store in the memory of this
    /// process.
    circuit_breaker: Option<&'static str>,
    /// The store, or the cluster nodes, whose circuit breaker is open.
    failing: Vec<String>,
    /// How often a circuit breaker has opened since the start.
    circuit_breaker_openings: u64,
}

/// Return the status of the process.
pub(super) fn show(context: &ApiContext<'_>) -> AdminResponse {
    let ApiContext { config, state, .. } = context;
    let (open, max) = state.connection_limits.open_and_max();
    let connections = state.listener_addresses.iter().zip(state.connection_limits.open_by_listener());
    let listeners = config.listeners.iter().zip(connections).map(|(listener, (address, connections))| ListenerStatus {
        name: listener.name.as_deref(),
        address: address.to_string(),
        tls: listener.tls.is_some(),
        proxy_protocol: listener.proxy_protocol,
        connections,
    });
    let failing = state.failing_stores();
    let breaker_state = if failing.is_empty() { "closed" } else { "open" };
    let now_us = unix_us();
    json_response(&StatusResponse {
        version: env!("CARGO_PKG_VERSION"),
        commit: env!("SLUICEGATE_COMMIT"),
        pid: std::process::id(),
        time: format_rfc3339(now_us),
        started_at: format_rfc3339(state.started_at_s * 1_000_000),
        uptime_seconds: (now_us / 1_000_000).saturating_sub(state.started_at_s),
        connections: ConnectionCounts { open, max },
        listeners: listeners.collect(),
        store: StoreStatus {
            name: &state.store_name,
            circuit_breaker: config.store.redis.as_ref().map(|_| breaker_state),
            failing,
            circuit_breaker_openings: state.breaker_open_count(),
        },
        last_minute: context.event_stream.last_minute(state),
    })
}
