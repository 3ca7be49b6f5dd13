//! What goes on on one downstream connection, for its deadlines.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use http::header::{CONNECTION, HeaderValue};
use http::{Response, StatusCode, Version};

use crate::http::body::Body;
use crate::http::write_watchdog::StreamFlow;
use crate::limiter::clock::monotonic;

/// References of a connection to its activity: its own, and that of the stream that is watched. Each request has one more.
const CONNECTION_REFS: usize = 2;

/// Whether requests are in flight on a connection, and since when there are none. Each refers to it, and so is counted.
#[derive(Debug)]
pub struct ConnectionActivity {
    opened_at: Instant,
    /// ms after `opened` at which the last response ended; 0 before the first.
    last_response_end_ms: AtomicU64,
    /// Twice the number of request heads that have begun; one less while one has not come to its end.
    headers_counter: AtomicU64,
    /// Whether the next answer is the last one.
    announces_close: AtomicBool,
    /// The tunnel that the connection becomes.
    tunnel: Mutex<Option<Box<Body>>>,
}

/// A request in flight: from its head until the response body is gone.
#[derive(Debug)]
pub struct InFlightRequest(Arc<ConnectionActivity>);

impl ConnectionActivity {
    /// Of a connection that opens now.
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

    /// A request starts.
    pub fn start_request(self: &Arc<Self>) -> InFlightRequest {
        self.record_headers(false);
        InFlightRequest(self.clone())
    }

    /// Bytes came from the client; whether a part of a head is among them. What comes while a request is in flight belongs to that.
    pub fn record_headers(&self, is_partial: bool) {
        let counter = self.headers_counter.load(Ordering::Relaxed);
        if is_partial != (counter & 1 == 1) {
            self.headers_counter.store(counter + 1, Ordering::Relaxed);
        }
    }

    /// The head that has begun after an earlier request and is not complete, while no request is in flight.
    pub fn partial_headers(self: &Arc<Self>) -> Option<u64> {
        let counter = self.headers_counter.load(Ordering::Relaxed);
        let is_kept_alive = || self.last_response_end_ms.load(Ordering::Relaxed) > 0;
        // The connection has two references, and each request one.
        (counter & 1 == 1 && Arc::strong_count(self) <= CONNECTION_REFS && is_kept_alive()).then_some(counter)
    }

    /// Whether answers from now on say that the connection ends with them (RFC 9112 §9.6).
    pub fn announce_close(&self, announce: bool) {
        self.announces_close.store(announce, Ordering::Relaxed);
    }

    /// What the connection goes on as, when HTTP is over.
    pub fn take_tunnel(&self) -> Option<Box<Body>> {
        self.tunnel.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// How long the connection may stay as it is, by its two deadlines; none = it is over.
    pub fn time_left(self: &Arc<Self>, header_timeout: Duration, idle_timeout: Duration) -> Option<Duration> {
        if Arc::strong_count(self) > CONNECTION_REFS {
            return Some(idle_timeout);
        }
        // The last one that is gone has left its time.
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
    /// For another part of the same request.
    pub(super) fn share(&self) -> Self {
        InFlightRequest(self.0.clone())
    }

    /// Lasts until the body of the response is gone. A switch of protocols stays with the connection instead.
    pub fn attach_to(self, mut response: Response<Body>) -> Response<Body> {
        if response.version() == Version::HTTP_10
            && let Some(flow) = StreamFlow::current()
        {
            flow.mark_close_delimited();
        }
        if response.status() != StatusCode::SWITCHING_PROTOCOLS {
            if self.0.announces_close.load(Ordering::Relaxed) {
                response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
            }
            response.body_mut().track_in_flight(self);
            return response;
        }
        response.map(|body| {
            *self.0.tunnel.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::new(body));
            Body::full("")
        })
    }
}

impl Drop for InFlightRequest {
    fn drop(&mut self) {
        let ended_at_ms = self.0.opened_at.elapsed().as_millis() as u64;
        self.0.last_response_end_ms.store(ended_at_ms.max(1), Ordering::Relaxed);
        // Of HTTP/1.x a part of the body may have come last.
        self.0.record_headers(false);
    }
}
