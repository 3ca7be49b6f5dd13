//! What goes on on one downstream connection, for its deadlines.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use http::header::{CONNECTION, HeaderValue};
use http::{Response, StatusCode, Version};

use super::body::Body;
use super::flow::Flow;
use crate::limit::clock::monotonic;

/// References of a connection to its activity: its own, and that of the stream that is watched. Each request has one more.
const CONNECTION_HAS: usize = 2;

/// Whether requests are in flight on a connection, and since when there are none. Each refers to it, and so is counted.
#[derive(Debug)]
pub struct Activity {
    opened: Instant,
    /// ms after `opened` at which the last response ended; 0 before the first.
    ended_ms: AtomicU64,
    /// Twice the number of request heads that have begun; one less while one has not come to its end.
    heads: AtomicU64,
    /// Whether the next answer is the last one.
    farewell: AtomicBool,
    /// The tunnel that the connection becomes.
    switched: Mutex<Option<Box<Body>>>,
}

/// A request in flight: from its head until the response body is gone.
#[derive(Debug)]
pub struct InFlight(Arc<Activity>);

impl Activity {
    /// Of a connection that opens now.
    pub fn new() -> Arc<Self> {
        let (ended_ms, heads, farewell, switched) = Default::default();
        Arc::new(Activity { opened: monotonic(), ended_ms, heads, farewell, switched })
    }

    /// A request starts.
    pub fn enter(self: &Arc<Self>) -> InFlight {
        self.head_came(false);
        InFlight(self.clone())
    }

    /// Bytes came from the client; whether a part of a head is among them. What comes while a request is in flight belongs to that.
    pub fn head_came(&self, part: bool) {
        let heads = self.heads.load(Ordering::Relaxed);
        if part != (heads & 1 == 1) {
            self.heads.store(heads + 1, Ordering::Relaxed);
        }
    }

    /// The head that has begun after an earlier request and is not complete, while no request is in flight.
    pub fn partial_head(self: &Arc<Self>) -> Option<u64> {
        let heads = self.heads.load(Ordering::Relaxed);
        let is_kept_alive = || self.ended_ms.load(Ordering::Relaxed) > 0;
        // The connection has two references, and each request one.
        (heads & 1 == 1 && Arc::strong_count(self) <= CONNECTION_HAS && is_kept_alive()).then_some(heads)
    }

    /// Whether answers from now on say that the connection ends with them (RFC 9112 §9.6).
    pub fn say_farewell(&self, say: bool) {
        self.farewell.store(say, Ordering::Relaxed);
    }

    /// What the connection goes on as, when HTTP is over.
    pub fn switched(&self) -> Option<Box<Body>> {
        self.switched.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// How long the connection may stay as it is, by its two deadlines; none = it is over.
    pub fn grace(self: &Arc<Self>, header_timeout: Duration, idle_timeout: Duration) -> Option<Duration> {
        if Arc::strong_count(self) > CONNECTION_HAS {
            return Some(idle_timeout);
        }
        // The last one that is gone has left its time.
        fence(Ordering::Acquire);
        let age = self.opened.elapsed();
        let left = match self.ended_ms.load(Ordering::Relaxed) {
            0 => header_timeout.checked_sub(age),
            ended => (Duration::from_millis(ended) + idle_timeout).checked_sub(age),
        };
        left.filter(|left| !left.is_zero())
    }
}

impl InFlight {
    /// For another part of the same request.
    pub(super) fn another(&self) -> Self {
        InFlight(self.0.clone())
    }

    /// Lasts until the body of the response is gone. A switch of protocols stays with the connection instead.
    pub fn answer(self, mut response: Response<Body>) -> Response<Body> {
        if response.version() == Version::HTTP_10
            && let Some(flow) = Flow::current()
        {
            flow.ends_with_connection();
        }
        if response.status() != StatusCode::SWITCHING_PROTOCOLS {
            if self.0.farewell.load(Ordering::Relaxed) {
                response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
            }
            response.body_mut().hold(self);
            return response;
        }
        response.map(|body| {
            *self.0.switched.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::new(body));
            Body::full("")
        })
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        let ended = self.0.opened.elapsed().as_millis() as u64;
        self.0.ended_ms.store(ended.max(1), Ordering::Relaxed);
        // Of HTTP/1.x a part of the body may have come last.
        self.0.head_came(false);
    }
}
