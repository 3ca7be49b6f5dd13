//! Metrics of the connections and the DNS lookups of an upstream.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::limiter::metrics::Counter;

/// Metrics of an upstream, which all workers share. Connections are rare, because most requests reuse one.
#[derive(Debug, Default)]
pub struct UpstreamMetrics {
    /// Attempts to connect, by [`ConnectResult`].
    pub connects: Counter<{ ConnectResult::ALL.len() }>,
    /// Lookups of host names: successful and failed ones.
    pub lookups: Counter<2>,
    open: AtomicUsize,
}

/// The result of an attempt to connect to a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConnectResult {
    /// The connection was opened.
    Ok,
    /// No TCP connection could be made.
    Failed,
    /// The TLS handshake failed.
    Tls,
    /// The connection took too long: the timeout expired, or another server accepted a parallel connection first.
    Abandoned,
}

impl ConnectResult {
    /// All values of this enum. The counters are stored in the order of this list.
    pub const ALL: [ConnectResult; 4] =
        [ConnectResult::Ok, ConnectResult::Failed, ConnectResult::Tls, ConnectResult::Abandoned];

    /// Return the value of the metric label.
    pub fn label(self) -> &'static str {
        match self {
            ConnectResult::Ok => "ok",
            ConnectResult::Failed => "failed",
            ConnectResult::Tls => "tls",
            ConnectResult::Abandoned => "abandoned",
        }
    }
}

impl UpstreamMetrics {
    /// Return the number of open connections.
    pub fn open_connections(&self) -> usize {
        self.open.load(Ordering::Relaxed)
    }
}

/// An attempt to connect. If it is dropped before [`finish`](Self::finish), the caller has abandoned it.
#[derive(Debug)]
pub(super) struct ConnectAttempt(Option<Arc<UpstreamMetrics>>);

impl ConnectAttempt {
    pub(super) fn start(metrics: &Arc<UpstreamMetrics>) -> Self {
        ConnectAttempt(Some(metrics.clone()))
    }

    /// Record the result. Return what counts the connection as open if there is one.
    pub(super) fn finish(mut self, result: ConnectResult) -> Option<OpenConnection> {
        let metrics = self.0.take()?;
        metrics.connects.increment(result as usize);
        (result == ConnectResult::Ok).then(|| {
            metrics.open.fetch_add(1, Ordering::Relaxed);
            OpenConnection(metrics)
        })
    }
}

impl Drop for ConnectAttempt {
    fn drop(&mut self) {
        if let Some(metrics) = self.0.take() {
            metrics.connects.increment(ConnectResult::Abandoned as usize);
        }
    }
}

/// Counts a connection as open until it is dropped.
#[derive(Debug)]
pub(super) struct OpenConnection(Arc<UpstreamMetrics>);

impl Drop for OpenConnection {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Ordering::Relaxed);
    }
}
