//! Activity of a downstream connection, for its header and idle timeouts.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use http::header::{CONNECTION, HeaderValue};
use http::{Response, StatusCode, Version};

use crate::http::body::Body;
use crate::http::write_watchdog::StreamFlow;
use crate::limiter::clock::monotonic;

/// References of a connection to its activity: its own, and that of the watched stream. Each request in flight adds
/// one.
const CONNECTION_REFS: usize = 2;

/// Whether requests are in flight on a connection, and since when it is idle. The reference count is the count of
/// requests: each holds one.
#[derive(Debug)]
pub struct ConnectionActivity {
    opened_at: Instant,
    /// End of the last response in ms after `opened_at`; 0 before the first.
    last_response_end_ms: AtomicU64,
    /// Twice the number of request headers that have begun, minus one while the last are incomplete.
    headers_counter: AtomicU64,
    /// Whether responses announce that the connection closes.
    announces_close: AtomicBool,
    /// The tunnel that the connection becomes after a protocol upgrade.
    tunnel: Mutex<Option<Box<Body>>>,
}

/// A request in flight, from its headers until the response body is dropped.
#[derive(Debug)]
pub struct InFlightRequest {
    activity: Arc<ConnectionActivity>,
    flow: Arc<StreamFlow>,
}

impl ConnectionActivity {
    /// Create the activity of a connection that opens now.
    pub fn new() -> Arc<Self> {
        let (last_response_end_ms, headers_counter, announces_close, tunnel) = Default::default();
        Arc::new(ConnectionActivity {
            opened_at: monotonic(),
            last_response_end_ms,
            headers_counter,
            announces_close,
            tunnel,
        })
    }

    /// Record that a request starts on `flow`.
    pub fn start_request(self: &Arc<Self>, flow: Arc<StreamFlow>) -> InFlightRequest {
        self.record_headers(false);
        InFlightRequest { activity: self.clone(), flow }
    }

    /// Record bytes from the client. `is_partial` says whether they include a part of incomplete request headers. Bytes
    /// received while a request is in flight belong to that request.
    pub fn record_headers(&self, is_partial: bool) {
        let counter = self.headers_counter.load(Ordering::Relaxed);
        if is_partial != (counter & 1 == 1) {
            self.headers_counter.store(counter + 1, Ordering::Relaxed);
        }
    }

    /// Return the counter of incomplete request headers on a kept-alive connection without a request in flight, or
    /// `None` if there are none.
    pub fn partial_headers(self: &Arc<Self>) -> Option<u64> {
        let counter = self.headers_counter.load(Ordering::Relaxed);
        let is_kept_alive = || self.last_response_end_ms.load(Ordering::Relaxed) > 0;
        // The connection holds two references, and each request one.
        (counter & 1 == 1 && Arc::strong_count(self) <= CONNECTION_REFS && is_kept_alive()).then_some(counter)
    }

    /// Set whether responses announce from now on that the connection closes (RFC 9112 §9.6).
    pub fn announce_close(&self, announce: bool) {
        self.announces_close.store(announce, Ordering::Relaxed);
    }

    /// Take the tunnel that continues the connection after HTTP has ended.
    pub fn take_tunnel(&self) -> Option<Box<Body>> {
        self.tunnel.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Return the time until the header timeout or idle timeout of the connection, or `None` if it has expired.
    pub fn time_left(self: &Arc<Self>, header_timeout: Duration, idle_timeout: Duration) -> Option<Duration> {
        if Arc::strong_count(self) > CONNECTION_REFS {
            return Some(idle_timeout);
        }
        // Acquire: the end time stored by the drop of the last request is visible.
        fence(Ordering::Acquire);
        let age = self.opened_at.elapsed();
        let time_left = match self.last_response_end_ms.load(Ordering::Relaxed) {
            0 => header_timeout.checked_sub(age),
            last_end_ms => (Duration::from_millis(last_end_ms) + idle_timeout).checked_sub(age),
        };
        time_left.filter(|time_left| !time_left.is_zero())
    }
}

impl InFlightRequest {
    /// Return another handle for a part of the same request.
    pub(super) fn share(&self) -> Self {
        InFlightRequest { activity: self.activity.clone(), flow: self.flow.clone() }
    }

    /// Return the flow of the request.
    pub fn flow(&self) -> &Arc<StreamFlow> {
        &self.flow
    }

    /// Keep the request in flight until the response body is dropped. After a protocol upgrade, the body moves to the
    /// connection as its tunnel.
    pub fn attach_to(self, mut response: Response<Body>) -> Response<Body> {
        if response.version() == Version::HTTP_10 {
            self.flow.mark_close_delimited();
        }
        if response.status() != StatusCode::SWITCHING_PROTOCOLS {
            if self.activity.announces_close.load(Ordering::Relaxed) {
                response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
            }
            response.body_mut().track_in_flight(self);
            return response;
        }
        response.map(|body| {
            *self.activity.tunnel.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::new(body));
            Body::full("")
        })
    }
}

impl Drop for InFlightRequest {
    fn drop(&mut self) {
        let ended_at_ms = self.activity.opened_at.elapsed().as_millis() as u64;
        self.activity.last_response_end_ms.store(ended_at_ms.max(1), Ordering::Relaxed);
        // With HTTP/1.x, the last bytes received may have been a part of the body.
        self.activity.record_headers(false);
    }
}
