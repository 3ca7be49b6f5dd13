//! One server of a fleet, at one address: how it does, and how many requests it has.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::net::TcpStream;

use crate::limiter::clock::LogThrottle;
use crate::upstream::connector::UpstreamStream;
use crate::upstream::health::HealthState;
use crate::upstream::pending_queue::{PendingQueue, RequestPermit};
use crate::upstream::{UpstreamServerSettings, UpstreamSettings};

/// One that requests can be sent to: an address of a server.
#[derive(Debug)]
pub struct Endpoint {
    /// Its place among the servers of the fleet.
    pub server_index: usize,
    /// As configured.
    pub server: UpstreamServerSettings,
    /// Where; none = the system finds it out for each connection.
    pub address: Option<SocketAddr>,
    /// One for all configurations that have it.
    pub(super) state: Arc<EndpointState>,
}

/// How a server does, whatever the configuration says of it.
#[derive(Debug)]
pub(super) struct EndpointState {
    health_state: Mutex<HealthState>,
    /// Whether it was said that it takes no connections.
    pub(super) unreachable_log: LogThrottle,
    /// Requests that failed, in a row.
    pub(super) consecutive_errors: AtomicU32,
    in_flight: AtomicUsize,
    max_requests: AtomicUsize,
    queue: Arc<PendingQueue>,
    /// Whether the table has it.
    pub(super) is_usable: AtomicBool,
}

impl Endpoint {
    /// Without requests.
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

    /// The same as other settings have it, with its condition and the requests that it has.
    pub(super) fn with_settings(&self, settings: &UpstreamSettings, index: usize) -> Self {
        let state = self.state.clone();
        state.max_requests.store(settings.max_requests, Ordering::Relaxed);
        if settings.health.is_none() {
            // Nobody would find out that it is healthy again.
            self.health_state().reset_checks();
        }
        Endpoint { server_index: index, server: settings.servers[index].clone(), address: self.address, state }
    }

    /// Whether both are one server, as the same or as different configurations have it.
    pub(super) fn is_same_as(&self, other: &Endpoint) -> bool {
        Arc::ptr_eq(&self.state, &other.state)
    }

    /// What logs call it, and what tells it from others.
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

    /// A place, if there is room for one more request.
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

    /// Gives a place back.
    pub(super) fn release(endpoint: &Arc<Endpoint>) {
        let EndpointState { in_flight, queue, is_usable: usable, .. } = &*endpoint.state;
        in_flight.fetch_sub(1, Ordering::SeqCst);
        if !queue.is_empty() && usable.load(Ordering::Relaxed) {
            queue.hand_over(endpoint);
        }
    }

    /// Connects.
    ///
    /// # Errors
    /// Nobody listens, the name has no address, or TLS fails.
    pub(super) async fn connect(&self) -> io::Result<UpstreamStream> {
        let stream = match self.address {
            Some(address) => TcpStream::connect(address).await?,
            None => TcpStream::connect((&*self.server.host, self.server.port)).await?,
        };
        UpstreamStream::handshake(stream, self.server.tls.as_ref()).await
    }
}
