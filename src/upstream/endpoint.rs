//! An endpoint and its request permits, and the queue of requests that wait for a permit of any endpoint.

use std::collections::VecDeque;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::sync::oneshot;

use crate::http::body::UpstreamLease;
use crate::limiter::clock::LogThrottle;
use crate::upstream::connector::UpstreamStream;
use crate::upstream::health::HealthState;
use crate::upstream::{UpstreamServerSettings, UpstreamSettings};

/// One address of an upstream server.
#[derive(Debug)]
pub struct Endpoint {
    /// Index in `servers` of the upstream.
    pub server_index: usize,
    /// Settings of the server.
    pub server: UpstreamServerSettings,
    /// Address. `None` if the system resolves the host for each connection.
    pub address: Option<SocketAddr>,
    /// State that the endpoints of all configuration snapshots with this server share.
    pub(super) state: Arc<EndpointState>,
}

/// State of an endpoint that is kept across reloads.
#[derive(Debug)]
pub(super) struct EndpointState {
    health_state: Mutex<HealthState>,
    /// Limits how often failed connects are logged.
    pub(super) unreachable_log: LogThrottle,
    /// Number of consecutive failed requests.
    pub(super) consecutive_errors: AtomicU32,
    in_flight: AtomicUsize,
    max_requests: AtomicUsize,
    queue: Arc<PendingQueue>,
    /// Whether the load balancer sends requests to the endpoint.
    pub(super) is_usable: AtomicBool,
}

impl Endpoint {
    /// Create an endpoint without requests.
    pub(super) fn new(
        settings: &UpstreamSettings,
        index: usize,
        address: Option<SocketAddr>,
        health_state: HealthState,
        queue: Arc<PendingQueue>,
    ) -> Self {
        let state = EndpointState {
            health_state: Mutex::new(health_state),
            unreachable_log: LogThrottle::new(),
            consecutive_errors: AtomicU32::new(0),
            in_flight: AtomicUsize::new(0),
            max_requests: AtomicUsize::new(settings.max_requests),
            queue,
            is_usable: AtomicBool::new(true),
        };
        Endpoint { server_index: index, server: settings.servers[index].clone(), address, state: Arc::new(state) }
    }

    /// Create an endpoint with other settings that shares the state of this endpoint.
    pub(super) fn with_settings(&self, settings: &UpstreamSettings, index: usize) -> Self {
        let state = self.state.clone();
        state.max_requests.store(settings.max_requests, Ordering::Relaxed);
        if settings.health.is_none() {
            // Reset the health if health checks are removed, because nothing would mark the endpoint as healthy again.
            self.health_state().reset_checks();
        }
        Endpoint { server_index: index, server: settings.servers[index].clone(), address: self.address, state }
    }

    /// Return whether both share their state, which means that they are the same endpoint in the same snapshot or in
    /// different snapshots.
    pub(super) fn is_same_as(&self, other: &Endpoint) -> bool {
        Arc::ptr_eq(&self.state, &other.state)
    }

    /// Return the name for logs and metrics: `host:port`, with the address if the host is a name.
    pub(super) fn name(&self) -> String {
        match self.address {
            Some(address) if self.server.host.parse::<IpAddr>().is_err() => {
                format!("{} ({address})", self.server.authority)
            }
            _ => self.server.authority.to_string(),
        }
    }

    pub(super) fn health_state(&self) -> MutexGuard<'_, HealthState> {
        self.state.health_state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn in_flight(&self) -> usize {
        self.state.in_flight.load(Ordering::Relaxed)
    }

    /// Acquire a request permit. Return `None` if the endpoint has `max_requests` in flight.
    pub(super) fn try_acquire(endpoint: &Arc<Endpoint>) -> Option<RequestPermit> {
        let (in_flight, max) = (&endpoint.state.in_flight, endpoint.state.max_requests.load(Ordering::Relaxed));
        if max == 0 {
            in_flight.fetch_add(1, Ordering::Relaxed);
        } else {
            let one_more = |now: usize| (now < max).then_some(now + 1);
            in_flight.fetch_update(Ordering::SeqCst, Ordering::SeqCst, one_more).ok()?;
        }
        Some(RequestPermit::new(endpoint.clone()))
    }

    /// Release a request permit. If requests are queued, pass it to the first of them.
    pub(super) fn release(endpoint: &Arc<Endpoint>) {
        let EndpointState { in_flight, queue, is_usable: usable, .. } = &*endpoint.state;
        in_flight.fetch_sub(1, Ordering::SeqCst);
        if !queue.is_empty() && usable.load(Ordering::Relaxed) {
            queue.hand_over(endpoint);
        }
    }

    /// Connect to the endpoint, including the TLS handshake. The PROXY header, if there is one, precedes the handshake.
    ///
    /// # Errors
    /// The connection fails, the name does not resolve, or the TLS handshake fails.
    pub(super) async fn connect(&self, proxy_header: Option<&[u8]>) -> io::Result<UpstreamStream> {
        let mut stream = match self.address {
            Some(address) => TcpStream::connect(address).await?,
            None => TcpStream::connect((&*self.server.host, self.server.port)).await?,
        };
        if let Some(header) = proxy_header {
            stream.write_all(header).await?;
        }
        UpstreamStream::handshake(stream, self.server.tls.as_ref()).await
    }
}

// === Pending requests: a bounded queue, first come, first served ===

/// One request in flight at an endpoint. The permit is released when the value is dropped, after the response body.
#[derive(Debug)]
pub(super) struct RequestPermit(Arc<Endpoint>);

/// Requests that wait for a request permit of any endpoint of a cluster.
#[derive(Debug, Default)]
pub(super) struct PendingQueue {
    max: AtomicUsize,
    /// Length of the queue, which can be read without the lock.
    length: AtomicUsize,
    state: Mutex<QueueState>,
}

#[derive(Debug, Default)]
struct QueueState {
    next_id: u64,
    /// The requests are sorted by id.
    waiters: VecDeque<(u64, oneshot::Sender<RequestPermit>)>,
}

/// A queued request. Dropping the value removes the request from the queue.
#[derive(Debug)]
pub(super) struct Waiter {
    queue: Arc<PendingQueue>,
    id: u64,
    permit: oneshot::Receiver<RequestPermit>,
    /// Whether the queue was empty before this request joined it.
    pub(super) is_first: bool,
}

impl RequestPermit {
    /// Wrap a permit that the endpoint has already counted.
    pub(super) fn new(endpoint: Arc<Endpoint>) -> Self {
        RequestPermit(endpoint)
    }

    pub(super) fn endpoint(&self) -> &Arc<Endpoint> {
        &self.0
    }
}

impl Drop for RequestPermit {
    fn drop(&mut self) {
        Endpoint::release(&self.0);
    }
}

impl UpstreamLease for RequestPermit {
    fn release(self: Box<Self>) {}
}

impl PendingQueue {
    /// Create a queue for at most `max` requests.
    pub(super) fn new(max: usize) -> Self {
        PendingQueue { max: max.into(), ..PendingQueue::default() }
    }

    /// Set the maximum length. Requests that are already in the queue stay.
    pub(super) fn resize(&self, max: usize) {
        self.max.store(max, Ordering::Relaxed);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.length.load(Ordering::SeqCst) == 0
    }

    /// Append a request. Return `None` if the queue is full.
    pub(super) fn enqueue(self: &Arc<Self>) -> Option<Waiter> {
        let (sender, receiver) = oneshot::channel();
        let mut state = self.lock();
        if state.waiters.len() >= self.max.load(Ordering::Relaxed) {
            return None;
        }
        let (id, is_first) = (state.next_id, state.waiters.is_empty());
        state.next_id += 1;
        state.waiters.push_back((id, sender));
        // The length is published before the caller looks for a free permit again, so that every later release sees the
        // waiter.
        self.length.store(state.waiters.len(), Ordering::SeqCst);
        Some(Waiter { queue: self.clone(), id, permit: receiver, is_first })
    }

    /// Give free permits of an endpoint to waiters, in order.
    pub(super) fn hand_over(&self, endpoint: &Arc<Endpoint>) {
        while !self.is_empty() {
            let Some(mut permit) = Endpoint::try_acquire(endpoint) else { return };
            loop {
                let next = {
                    let mut state = self.lock();
                    let next = state.waiters.pop_front();
                    self.length.store(state.waiters.len(), Ordering::SeqCst);
                    next
                };
                let Some((_, sender)) = next else { return };
                match sender.send(permit) {
                    Ok(()) => break,
                    Err(returned) => permit = returned,
                }
            }
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, QueueState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Waiter {
    /// Wait for a permit to send a request to an endpoint.
    pub(super) async fn ready(&mut self) -> Option<RequestPermit> {
        (&mut self.permit).await.ok()
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        let mut state = self.queue.lock();
        if let Ok(index) = state.waiters.binary_search_by_key(&self.id, |(number, _)| *number) {
            state.waiters.remove(index);
            self.queue.length.store(state.waiters.len(), Ordering::SeqCst);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::upstream::cluster::tests::settings;

    #[test]
    fn permit_refused_by_a_request_that_has_ended_goes_to_the_next_one() {
        let queue = Arc::new(PendingQueue::new(3));
        let settings = UpstreamSettings { max_requests: 1, ..settings(&["10.0.0.1"]) };
        let endpoint = Arc::new(Endpoint::new(&settings, 0, None, HealthState::default(), queue.clone()));
        let held = Endpoint::try_acquire(&endpoint).unwrap();
        assert!(Endpoint::try_acquire(&endpoint).is_none(), "one request at a time");
        let [mut ended, mut next, mut last] = [(); 3].map(|()| queue.enqueue().unwrap());
        // The test covers a client that disconnects on another worker after the release has taken its request from the
        // queue.
        ended.permit.close();
        drop(held);
        let permit = next.permit.try_recv().expect("the next request gets the permit");
        assert!(last.permit.try_recv().is_err(), "one request at a time");
        assert_eq!(endpoint.in_flight(), 1);
        last.permit.close();
        drop(permit);
        assert_eq!(endpoint.in_flight(), 0, "no request is left to take the permit");
        assert!(queue.is_empty());
    }
}
