//! Endpoints: their request permits, the queue of requests that wait for a permit, and load balancing.

use std::collections::{BTreeMap, VecDeque};
use std::hash::Hasher;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use siphasher::sip::SipHasher13;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::sync::oneshot;
use uuid::Uuid;

use crate::clock::LogThrottle;
use crate::http::memory_guard::SocketBuffers;
use crate::upstream::connector::{MaybeTlsStream, TlsFailure, UpstreamStream};
use crate::upstream::health::{Contact, Health, HealthState};
use crate::upstream::metrics::{ConnectAttempt, ConnectResult, UpstreamMetrics};
use crate::upstream::settings::{LoadBalancingPolicy, SrvTarget, UpstreamServerSettings, UpstreamSettings};

/// One address of an upstream server.
#[derive(Debug, Clone)]
pub struct Endpoint {
    /// Index in `servers` of the upstream.
    pub server_index: usize,
    /// Settings of the server.
    pub server: UpstreamServerSettings,
    /// Address. `None` if the system resolves the host for each connection.
    pub address: Option<SocketAddr>,
    /// The target of the SRV record that led to the address. `None` for servers without SRV records.
    pub target: Option<Arc<SrvTarget>>,
    /// Name for logs and metrics: `host:port`, followed by the resolved address if the host is a name.
    name: Arc<str>,
    socket_buffers: Option<SocketBuffers>,
    /// State that this endpoint shares with the same endpoint in other configuration snapshots.
    pub(super) state: Arc<EndpointState>,
}

/// An address of a server, and the target of the SRV record that led to it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct EndpointAddress {
    /// IP address and port.
    pub address: SocketAddr,
    /// `None` for servers without SRV records.
    pub target: Option<Arc<SrvTarget>>,
}

/// State that all endpoints of a cluster share. It is kept across reloads.
#[derive(Debug, Clone)]
pub(super) struct ClusterState {
    pub(super) queue: Arc<PendingQueue>,
    pub(super) metrics: Arc<UpstreamMetrics>,
}

impl ClusterState {
    /// Create the state of a cluster whose queue has this maximum length.
    pub(super) fn new(max_queue: usize) -> Self {
        ClusterState { queue: Arc::new(PendingQueue::new(max_queue)), metrics: Arc::default() }
    }
}

/// State of an endpoint that is kept across reloads.
#[derive(Debug)]
pub(super) struct EndpointState {
    health_state: Mutex<HealthState>,
    /// Limits how often failed connects are logged.
    pub(super) unreachable_log: LogThrottle,
    /// Number of consecutive failed requests.
    pub(super) consecutive_errors: AtomicU32,
    /// Number of requests in flight that are not in `in_flight_by_thread`.
    in_flight: AtomicUsize,
    /// Number of requests in flight that started while neither `max_requests` nor the load balancer needed the number.
    in_flight_by_thread: CountByThread,
    max_requests: AtomicUsize,
    shared: ClusterState,
    /// Whether the load balancer sends requests to the endpoint.
    pub(super) is_usable: AtomicBool,
}

impl Endpoint {
    /// Create an endpoint without requests.
    pub(super) fn new(
        settings: &UpstreamSettings,
        index: usize,
        address: Option<EndpointAddress>,
        health_state: HealthState,
        shared: ClusterState,
    ) -> Self {
        let state = EndpointState {
            health_state: Mutex::new(health_state),
            unreachable_log: LogThrottle::new(),
            consecutive_errors: AtomicU32::new(0),
            in_flight: AtomicUsize::new(0),
            in_flight_by_thread: CountByThread::default(),
            max_requests: AtomicUsize::new(settings.max_requests),
            shared,
            is_usable: AtomicBool::new(true),
        };
        Endpoint::with_state(settings, index, address, Arc::new(state))
    }

    /// Create an endpoint with new settings, which shares the state of this endpoint.
    pub(super) fn with_settings(&self, settings: &UpstreamSettings, index: usize) -> Self {
        let state = self.state.clone();
        state.max_requests.store(settings.max_requests, Ordering::Relaxed);
        if settings.health.is_none() {
            // Reset the health if health checks are removed, because nothing would mark the endpoint as healthy again.
            self.health_state().reset_checks();
        }
        if settings.ejection.is_none() {
            self.health_state().reset_ejections();
            state.consecutive_errors.store(0, Ordering::Relaxed);
        }
        Endpoint::with_state(settings, index, self.endpoint_address(), state)
    }

    /// Create an endpoint with a changed SRV record, which shares the state of this endpoint.
    pub(super) fn with_address(&self, settings: &UpstreamSettings, address: EndpointAddress) -> Self {
        Endpoint::with_state(settings, self.server_index, Some(address), self.state.clone())
    }

    /// Return the address. `None` if the system resolves the host for each connection.
    pub(super) fn endpoint_address(&self) -> Option<EndpointAddress> {
        self.address.map(|address| EndpointAddress { address, target: self.target.clone() })
    }

    fn with_state(
        settings: &UpstreamSettings,
        index: usize,
        address: Option<EndpointAddress>,
        state: Arc<EndpointState>,
    ) -> Self {
        let mut server = settings.servers[index].clone();
        let (address, target) = address.map_or((None, None), |found| (Some(found.address), found.target));
        if let Some(target) = &target {
            server.host = target.host.clone();
            server.port = target.port;
            server.authority = format!("{}:{}", target.host, target.port).into();
        }
        let name = match address {
            Some(address) if server.host.parse::<IpAddr>().is_err() => format!("{} ({address})", server.authority),
            _ => server.authority.to_string(),
        };
        let socket_buffers = settings.socket_buffers;
        Endpoint { server_index: index, server, address, target, name: name.into(), socket_buffers, state }
    }

    /// Return whether both values are the same endpoint, possibly in different configuration snapshots. These values
    /// share one state.
    pub(super) fn is_same_as(&self, other: &Endpoint) -> bool {
        Arc::ptr_eq(&self.state, &other.state)
    }

    /// Return a copy for one worker. Each request changes the reference counts of the endpoint and of its name, and workers
    /// must not contend for them.
    pub(super) fn for_worker(&self) -> Self {
        Endpoint { name: (*self.name).into(), ..self.clone() }
    }

    /// Return the name for logs and metrics.
    pub(super) fn name(&self) -> &Arc<str> {
        &self.name
    }

    pub(super) fn health_state(&self) -> MutexGuard<'_, HealthState> {
        self.state.health_state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn in_flight(&self) -> usize {
        self.state.in_flight.load(Ordering::Relaxed) + self.state.in_flight_by_thread.sum()
    }

    /// Acquire a request permit. Return `None` if the endpoint has `max_requests` in flight. `is_only` is true if the load
    /// balancer has no other endpoint, and therefore does not compare the numbers of requests in flight.
    pub(super) fn try_acquire(endpoint: &Arc<Endpoint>, is_only: bool) -> Option<RequestPermit> {
        let EndpointState { in_flight, in_flight_by_thread, max_requests, .. } = &*endpoint.state;
        let max = max_requests.load(Ordering::Relaxed);
        let is_counted_by_thread = max == 0 && is_only;
        if is_counted_by_thread {
            in_flight_by_thread.increment();
        } else if max == 0 {
            in_flight.fetch_add(1, Ordering::Relaxed);
        } else {
            // The requests that were counted by thread before `max_requests` was set.
            let others = in_flight_by_thread.sum();
            let one_more = |now: usize| (now + others < max).then_some(now + 1);
            in_flight.fetch_update(Ordering::SeqCst, Ordering::SeqCst, one_more).ok()?;
        }
        Some(RequestPermit { endpoint: endpoint.clone(), is_counted_by_thread })
    }

    /// Connect to the endpoint, including the TLS handshake. If `proxy_header` is set, send this header before the
    /// handshake.
    ///
    /// # Errors
    /// The connection fails, the name does not resolve, or the TLS handshake fails.
    pub(super) async fn connect(&self, proxy_header: Option<&[u8]>) -> io::Result<UpstreamStream> {
        let attempt = ConnectAttempt::start(&self.state.shared.metrics);
        let connected = self.connect_and_handshake(proxy_header).await;
        self.health_state().contact = if connected.is_ok() { Contact::Reached } else { Contact::Failed };
        let result = match &connected {
            Ok(_) => ConnectResult::Ok,
            Err(error) if TlsFailure::from_error(error).is_some() => ConnectResult::Tls,
            Err(_) => ConnectResult::Failed,
        };
        let open = attempt.finish(result);
        connected.map(|stream| UpstreamStream { stream, _open: open })
    }

    async fn connect_and_handshake(&self, proxy_header: Option<&[u8]>) -> io::Result<MaybeTlsStream> {
        let mut stream = match self.address {
            Some(address) => TcpStream::connect(address).await?,
            None => TcpStream::connect((&*self.server.host, self.server.port)).await?,
        };
        if let Some(buffers) = self.socket_buffers {
            buffers.apply_to(&stream)?;
        }
        if let Some(header) = proxy_header {
            stream.write_all(header).await?;
        }
        MaybeTlsStream::handshake(stream, self.server.tls.as_ref()).await
    }
}

// === Pending requests: a bounded queue, first come, first served ===

/// Permit of one request in flight to an endpoint. The permit is released when the value is dropped, after the response
/// body.
#[derive(Debug)]
pub(super) struct RequestPermit {
    endpoint: Arc<Endpoint>,
    is_counted_by_thread: bool,
}

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
    /// The queued requests, sorted by id.
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
    pub(super) fn endpoint(&self) -> &Arc<Endpoint> {
        &self.endpoint
    }
}

impl Drop for RequestPermit {
    /// Release the permit. If requests are queued, pass the permit to the first queued request.
    fn drop(&mut self) {
        let EndpointState { in_flight, in_flight_by_thread, shared, is_usable, .. } = &*self.endpoint.state;
        if self.is_counted_by_thread {
            in_flight_by_thread.decrement();
        } else {
            in_flight.fetch_sub(1, Ordering::SeqCst);
        }
        if !shared.queue.is_empty() && is_usable.load(Ordering::Relaxed) {
            shared.queue.hand_over(&self.endpoint);
        }
    }
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

    /// Append a request to the queue. Return `None` if the queue is full.
    pub(super) fn enqueue(self: &Arc<Self>) -> Option<Waiter> {
        let (sender, receiver) = oneshot::channel();
        let mut state = self.lock();
        if state.waiters.len() >= self.max.load(Ordering::Relaxed) {
            return None;
        }
        let id = state.next_id;
        let is_first = state.waiters.is_empty();
        state.next_id += 1;
        state.waiters.push_back((id, sender));
        // Publish the length before the caller looks for a free permit again, so that every later release of a permit
        // sees the waiter.
        self.length.store(state.waiters.len(), Ordering::SeqCst);
        Some(Waiter { queue: self.clone(), id, permit: receiver, is_first })
    }

    /// Give the free permits of an endpoint to queued requests, in the order of the queue.
    pub(super) fn hand_over(&self, endpoint: &Arc<Endpoint>) {
        while !self.is_empty() {
            let Some(mut permit) = Endpoint::try_acquire(endpoint, false) else { return };
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

// === A count to which each thread adds in its own cache line ===

/// Number of cache lines of a [`CountByThread`]. If there are more threads, some of them share a cache line.
const COUNT_LINES: usize = 16;

/// A count that many threads change and that is seldom read.
#[derive(Debug, Default)]
struct CountByThread([CacheLine; COUNT_LINES]);

/// What the threads of one cache line have added, modulo 2^64: a thread may subtract what another one has added.
#[derive(Debug, Default)]
#[repr(align(64))]
struct CacheLine(AtomicUsize);

impl CountByThread {
    fn of_thread(&self) -> &AtomicUsize {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        thread_local! {
            static INDEX: usize = NEXT.fetch_add(1, Ordering::Relaxed) % COUNT_LINES;
        }
        &self.0[INDEX.with(|index| *index)].0
    }

    fn increment(&self) {
        self.of_thread().fetch_add(1, Ordering::SeqCst);
    }

    fn decrement(&self) {
        self.of_thread().fetch_sub(1, Ordering::SeqCst);
    }

    fn sum(&self) -> usize {
        self.0.iter().fold(0, |sum, line| sum.wrapping_add(line.0.load(Ordering::SeqCst)))
    }
}

// === Load balancing: tables of usable endpoints, built when the health or the addresses of a cluster change ===

/// Maximum number of endpoints that the policy draws for one request. If no drawn endpoint has a free permit, all
/// usable endpoints are tried one after the other.
const MAX_DRAWS: u32 = 8;

/// All weights are multiplied by this factor, so that the weight of a server can be divided equally among its
/// addresses. The factor is divisible by every number from 1 to 12.
const WEIGHT_UNIT: u64 = 55_440;

/// The endpoints of a cluster, and the tables that were built from the health and the weights of these endpoints.
#[derive(Debug)]
pub(super) struct LoadBalancer {
    pub(super) endpoints: Arc<Vec<Arc<Endpoint>>>,
    /// Indices of the endpoints that receive requests.
    pub(super) usable: Box<[usize]>,
    /// Indices of the endpoints in connect backoff. These endpoints serve retries if no usable endpoint is left.
    backup: Box<[usize]>,
    pub(super) weighted_slots: WeightedSlots,
    pub(super) rendezvous: Option<Arc<RendezvousTable>>,
    /// The token of each endpoint for sticky sessions. Empty for other policies.
    sticky_tokens: Box<[u64]>,
    /// Whether ejections are ignored because more than half of the endpoints are not healthy.
    pub(super) is_in_panic_mode: bool,
}

/// Parameters of one endpoint selection.
pub(super) struct PickContext<'a> {
    pub(super) policy: &'a LoadBalancingPolicy,
    /// The endpoints of the load balancer, as copies of the worker.
    pub(super) endpoints: &'a [Arc<Endpoint>],
    /// Hash of the header or cookie that selects the endpoint, or the token of the endpoint of a sticky session.
    pub(super) hash_key: Option<u64>,
    pub(super) rng: &'a Rng,
    /// Round-robin position, shared by all workers.
    pub(super) round_robin_counter: &'a AtomicU64,
    /// Endpoints that must not be picked.
    pub(super) excluded: &'a [Arc<Endpoint>],
}

impl LoadBalancer {
    /// Build the tables from the current health of the endpoints. Also return the time at which the tables become
    /// outdated, unless an event requires a rebuild earlier.
    pub(super) fn new(
        settings: &UpstreamSettings,
        endpoints: Arc<Vec<Arc<Endpoint>>>,
        rendezvous: Option<Arc<RendezvousTable>>,
        now: Instant,
    ) -> (Self, Option<Instant>) {
        let mut next = None;
        let shared = endpoint_weights(&endpoints);
        let mut weights = Vec::with_capacity(endpoints.len());
        let mut healths = Vec::with_capacity(endpoints.len());
        for endpoint in endpoints.iter() {
            let health_state = endpoint.health_state();
            let steps = u64::from(health_state.weight_steps(now, settings.slow_start));
            weights.push(shared[weights.len()] * steps);
            healths.push((health_state.health(now), health_state.is_in_connect_backoff(now)));
            next = [next, health_state.next_change(now, settings.slow_start)].into_iter().flatten().min();
        }
        let counts = |wanted: &dyn Fn(Health) -> bool| {
            healths.iter().zip(&weights).filter(|((health, _), weight)| **weight > 0 && wanted(*health)).count()
        };
        let ejected = counts(&|health| health == Health::Ejected);
        let is_in_panic_mode = ejected > 0 && counts(&|health| health != Health::Healthy) * 2 > counts(&|_| true);
        // In panic mode, ignore only ejections, which result from failed requests. Failed health checks always exclude
        // an endpoint, even if no other endpoint is left.
        let is_eligible = |health| health == Health::Healthy || (is_in_panic_mode && health == Health::Ejected);
        let any_reachable = healths
            .iter()
            .zip(&weights)
            .any(|((standing, passed), weight)| *weight > 0 && is_eligible(*standing) && !passed);
        let mut backup = Vec::new();
        for (index, ((standing, passed), weight)) in healths.iter().zip(&mut weights).enumerate() {
            let passed = *passed && any_reachable;
            if passed && is_eligible(*standing) && *weight > 0 {
                backup.push(index);
            }
            if passed || !is_eligible(*standing) {
                *weight = 0;
            }
        }
        select_priority(&endpoints, &mut weights);
        let sticky_tokens = match &settings.balance {
            LoadBalancingPolicy::Sticky(cookie) => {
                endpoints.iter().map(|endpoint| cookie.token(endpoint.name())).collect()
            }
            LoadBalancingPolicy::LeastRequests
            | LoadBalancingPolicy::RoundRobin
            | LoadBalancingPolicy::Random
            | LoadBalancingPolicy::Hash(_) => Box::default(),
        };
        let usable = (0..endpoints.len()).filter(|index| weights[*index] > 0).collect();
        (
            LoadBalancer {
                endpoints,
                usable,
                backup: backup.into(),
                weighted_slots: WeightedSlots::new(&weights),
                rendezvous,
                sticky_tokens,
                is_in_panic_mode,
            },
            next,
        )
    }

    /// Pick an endpoint and acquire a request permit. Return `None` if no endpoint is usable or all have `max_requests`
    /// in flight.
    pub(super) fn pick(&self, context: &PickContext<'_>) -> Option<(usize, RequestPermit)> {
        let is_only = self.endpoints.len() == 1;
        let try_acquire = |index: usize| {
            let endpoint = &context.endpoints[index];
            let tried = context.excluded.iter().any(|tried| tried.is_same_as(endpoint));
            let permit = if tried { None } else { Endpoint::try_acquire(endpoint, is_only) };
            permit.map(|permit| (index, permit))
        };
        let try_backup =
            || self.backup.iter().filter(|_| !context.excluded.is_empty()).find_map(|index| try_acquire(*index));
        if let [only] = self.usable[..] {
            return try_acquire(only).or_else(try_backup);
        }
        for attempt in 0..MAX_DRAWS {
            if let Some(found) = try_acquire(self.pick_index(context, attempt)?) {
                return Some(found);
            }
        }
        let first = context.hash_key.unwrap_or_else(|| context.rng.next_u64()) as usize % self.usable.len();
        let (before, after) = self.usable.split_at(first);
        after.iter().chain(before).find_map(|index| try_acquire(*index)).or_else(try_backup)
    }

    fn pick_index(&self, context: &PickContext<'_>, attempt: u32) -> Option<usize> {
        match (context.policy, &self.rendezvous, context.hash_key) {
            (LoadBalancingPolicy::RoundRobin, ..) => {
                self.weighted_slots.endpoint_at(context.round_robin_counter.fetch_add(1, Ordering::Relaxed))
            }
            (LoadBalancingPolicy::Random, ..) => self.weighted_slots.endpoint_at(context.rng.next_u64()),
            (LoadBalancingPolicy::Hash(_), Some(rendezvous), Some(key)) => {
                // If the owner is not usable, choose its replacement by the key as well, so that requests with the same
                // key go to the same replacement. When the owner recovers, it owns its keys again.
                let mut usable = (0..2 * MAX_DRAWS)
                    .map(|draw| rendezvous.lookup(key, draw))
                    .filter(|owner| self.weighted_slots.share(*owner) > 0);
                usable.nth(attempt as usize).or_else(|| self.weighted_slots.endpoint_at(key))
            }
            (LoadBalancingPolicy::Sticky(_), _, Some(token)) if attempt == 0 => {
                self.sticky_endpoint(token).or_else(|| self.less_loaded_of_two(context.rng))
            }
            (
                LoadBalancingPolicy::LeastRequests | LoadBalancingPolicy::Hash(_) | LoadBalancingPolicy::Sticky(_),
                ..,
            ) => self.less_loaded_of_two(context.rng),
        }
    }

    /// Return the usable endpoint that has this token.
    pub(super) fn sticky_endpoint(&self, token: u64) -> Option<usize> {
        let index = self.sticky_tokens.iter().position(|known| *known == token)?;
        (self.weighted_slots.share(index) > 0).then_some(index)
    }

    /// Power of two choices (Mitzenmacher 2001): draw two endpoints by weight, and take the endpoint with the lower
    /// load relative to its weight. If both loads are equal, take the first endpoint.
    fn less_loaded_of_two(&self, rng: &Rng) -> Option<usize> {
        let one = self.weighted_slots.endpoint_at(rng.next_u64())?;
        let mut others = (0..4).filter_map(|_| self.weighted_slots.endpoint_at(rng.next_u64()));
        let other = others.find(|other| *other != one).unwrap_or_else(|| self.any_other(one, rng));
        let load = |index: usize| self.endpoints[index].in_flight() as u64;
        let of_one = load(one) * self.weighted_slots.share(other);
        let of_other = load(other) * self.weighted_slots.share(one);
        Some(if of_one <= of_other { one } else { other })
    }

    /// Return a random usable endpoint other than `one`. At least two endpoints must be usable.
    fn any_other(&self, one: usize, rng: &Rng) -> usize {
        let position = rng.next_u64() as usize % self.usable.len();
        if self.usable[position] == one {
            self.usable[(position + 1) % self.usable.len()]
        } else {
            self.usable[position]
        }
    }
}

/// Return the weight of each endpoint. The addresses of a server share its weight.
pub(super) fn endpoint_weights(endpoints: &[Arc<Endpoint>]) -> Vec<u64> {
    let share = |endpoint: &Endpoint| endpoint.target.as_ref().map_or(1, |target| target.share());
    let priority = |endpoint: &Endpoint| endpoint.target.as_ref().map_or(0, |target| target.priority);
    // The number of addresses of each target, and the sum of the shares of all targets with the same priority. A server
    // without SRV records is its only target.
    let mut addresses = BTreeMap::<(usize, Option<&SrvTarget>), u64>::new();
    let mut totals = BTreeMap::<(usize, u16), u64>::new();
    for endpoint in endpoints {
        let count = addresses.entry((endpoint.server_index, endpoint.target.as_deref())).or_default();
        if *count == 0 {
            *totals.entry((endpoint.server_index, priority(endpoint))).or_default() += share(endpoint);
        }
        *count += 1;
    }
    let weight = |endpoint: &Arc<Endpoint>| {
        let total = totals[&(endpoint.server_index, priority(endpoint))];
        let count = addresses[&(endpoint.server_index, endpoint.target.as_deref())];
        let weight = u64::from(endpoint.server.weight) * WEIGHT_UNIT;
        // The server has a weight, so none of its addresses may have weight 0.
        if weight == 0 { 0 } else { (weight * share(endpoint) / total / count).max(1) }
    };
    endpoints.iter().map(weight).collect()
}

/// Set the weights of the targets of SRV records to 0 that have a higher priority number than another target with a
/// weight.
pub(super) fn select_priority(endpoints: &[Arc<Endpoint>], weights: &mut [u64]) {
    let mut lowest = BTreeMap::<usize, u16>::new();
    let targets = || endpoints.iter().map(|endpoint| (endpoint.server_index, endpoint.target.as_deref()));
    for ((server, target), weight) in targets().zip(&*weights) {
        if let Some(target) = target.filter(|_| *weight > 0) {
            let lowest = lowest.entry(server).or_insert(target.priority);
            *lowest = target.priority.min(*lowest);
        }
    }
    for ((server, target), weight) in targets().zip(weights) {
        if target.is_some_and(|target| lowest.get(&server).is_some_and(|lowest| target.priority > *lowest)) {
            *weight = 0;
        }
    }
}

// Policies and their tables. The CPU time of a selection does not depend on the number of endpoints.

/// Maximum number of slots. Weights are exact if their sum, after division by their greatest common divisor, is at most
/// this number.
const MAX_SLOTS: u64 = 16_384;

/// Weighted schedule: each endpoint has slots in proportion to its weight, evenly distributed.
#[derive(Debug)]
pub(super) struct WeightedSlots {
    slots: Box<[u32]>,
    shares: Box<[u32]>,
}

impl WeightedSlots {
    /// Build the schedule. Endpoints with weight 0 get no slot.
    pub(super) fn new(weights: &[u64]) -> Self {
        let divisor = weights.iter().copied().fold(0, gcd).max(1);
        let sum = weights.iter().sum::<u64>() / divisor;
        let share = |weight: &u64| match weight / divisor {
            0 => 0,
            share if sum <= MAX_SLOTS => share,
            share => (u128::from(share) * u128::from(MAX_SLOTS) / u128::from(sum)).max(1) as u64,
        };
        let shares: Box<[_]> = weights.iter().map(|weight| share(weight) as u32).collect();
        // Slot k of an endpoint with n slots is in the middle of the k-th of n equal parts of the schedule.
        let turns = |(index, share): (usize, &u32)| {
            let share = u64::from(*share);
            (0..share).map(move |k| (((2 * k + 1) << 32) / (2 * share), index as u32))
        };
        let mut turns: Vec<_> = shares.iter().enumerate().flat_map(turns).collect();
        turns.sort_unstable();
        WeightedSlots { slots: turns.into_iter().map(|(_, index)| index).collect(), shares }
    }

    /// Return the endpoint of slot `turn`, modulo the number of slots. Return `None` if all weights are 0.
    pub(super) fn endpoint_at(&self, turn: u64) -> Option<usize> {
        match self.slots.len() {
            0 => None,
            1 => Some(self.slots[0] as usize),
            length => Some(self.slots[(turn % length as u64) as usize] as usize),
        }
    }

    pub(super) fn share(&self, index: usize) -> u64 {
        u64::from(self.shares[index])
    }
}

fn gcd(one: u64, other: u64) -> u64 {
    if other == 0 { one } else { gcd(other, one % other) }
}

/// Number of slots to which hash keys are mapped.
const HASH_SLOTS: usize = 16_384;

/// The endpoint that owns each slot, by weighted rendezvous hashing (highest random weight, Thaler and Ravishankar
/// 1998). If an endpoint is removed, only the slots of this endpoint get new owners. A new endpoint takes only its
/// share of the slots.
#[derive(Debug)]
pub(super) struct RendezvousTable(Box<[u32]>);

impl RendezvousTable {
    /// Build the table from the name hash and the weight of each endpoint. At least one weight must not be 0.
    pub(super) fn new(endpoints: &[(u64, f64)]) -> Self {
        let score = |slot: u64, name: u64, weight: f64| {
            // `draw` is uniformly distributed in (0, 1], with 53 random bits.
            let draw = ((mix(name ^ mix(slot)) >> 11) + 1) as f64 / (1_u64 << 53) as f64;
            -draw.ln() / weight
        };
        let owner = |slot: usize| {
            let scores = endpoints.iter().enumerate().filter(|(_, (_, weight))| *weight > 0.0);
            let scores = scores.map(|(index, (name, weight))| (score(slot as u64, *name, *weight), index as u32));
            scores.min_by(|one, other| one.0.total_cmp(&other.0)).map_or(0, |(_, index)| index)
        };
        RendezvousTable((0..HASH_SLOTS).map(owner).collect())
    }

    /// Return the endpoint that owns `key`. With `attempt` > 0, return a replacement that depends only on `key` and
    /// `attempt`. The replacement may be the owner itself.
    pub(super) fn lookup(&self, key: u64, attempt: u32) -> usize {
        let key = (0..attempt).fold(key, |key, _| mix(key));
        self.0[(key % HASH_SLOTS as u64) as usize] as usize
    }
}

/// Return a hash of `bytes`, which is equal on all gateways.
pub fn hash(bytes: &[u8]) -> u64 {
    let mut hasher = SipHasher13::new();
    hasher.write(bytes);
    hasher.finish()
}

/// Finalizer of SplitMix64 (Steele, Lea and Flood 2014).
fn mix(mut value: u64) -> u64 {
    value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

/// SplitMix64 random number generator. The generator is not suitable for cryptography.
#[derive(Debug)]
pub(super) struct Rng(AtomicU64);

impl Rng {
    pub(super) fn from_seed(seed: u64) -> Self {
        Rng(AtomicU64::new(seed))
    }

    /// Use a random seed, which differs between processes and workers.
    pub(super) fn from_random_seed() -> Self {
        Rng::from_seed(Uuid::new_v4().as_u64_pair().0)
    }

    pub(super) fn next_u64(&self) -> u64 {
        mix(self.0.fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;
    use crate::upstream::cluster::tests::settings;

    #[test]
    fn permit_refused_by_a_request_that_has_ended_goes_to_the_next_one() {
        let shared = ClusterState::new(3);
        let queue = shared.queue.clone();
        let settings = UpstreamSettings { max_requests: 1, ..settings(&["10.0.0.1"]) };
        let endpoint = Arc::new(Endpoint::new(&settings, 0, None, HealthState::default(), shared));
        let held = Endpoint::try_acquire(&endpoint, false).unwrap();
        assert!(Endpoint::try_acquire(&endpoint, false).is_none(), "`max_requests` allows one request in flight");
        let [mut ended, mut next, mut last] = [(); 3].map(|()| queue.enqueue().unwrap());
        // Simulate a client that disconnects on another worker after `release` has taken its request from the queue.
        ended.permit.close();
        drop(held);
        let permit = next.permit.try_recv().expect("the next request gets the permit");
        assert!(last.permit.try_recv().is_err(), "`max_requests` allows one request in flight");
        assert_eq!(endpoint.in_flight(), 1);
        last.permit.close();
        drop(permit);
        assert_eq!(endpoint.in_flight(), 0, "no request is left to take the permit");
        assert!(queue.is_empty());
    }

    #[test]
    fn requests_that_were_counted_by_thread_count_against_a_new_maximum() {
        let unlimited = settings(&["10.0.0.1"]);
        let endpoint = Arc::new(Endpoint::new(&unlimited, 0, None, HealthState::default(), ClusterState::new(0)));
        let acquire = |endpoint: &Arc<Endpoint>| Endpoint::try_acquire(endpoint, true);
        let [first, second] =
            [(); 2].map(|()| thread::scope(|scope| scope.spawn(|| acquire(&endpoint)).join().unwrap()));
        let third = acquire(&endpoint).unwrap();
        assert_eq!(endpoint.in_flight(), 3);
        // Another thread than the one that acquired the permit releases it.
        drop(first);
        assert_eq!(endpoint.in_flight(), 2);
        let limited = Arc::new(endpoint.with_settings(&UpstreamSettings { max_requests: 3, ..unlimited }, 0));
        let fourth = acquire(&limited).unwrap();
        assert!(acquire(&limited).is_none(), "two requests from before and one new request are in flight");
        drop(second);
        let fifth = acquire(&limited).unwrap();
        assert!(acquire(&limited).is_none(), "`max_requests` allows three requests in flight");
        drop([third, fourth, fifth]);
        assert_eq!(limited.in_flight(), 0);
    }

    fn counts(slots: &WeightedSlots, endpoints: usize, turns: impl Iterator<Item = u64>) -> Vec<u32> {
        let mut counts = vec![0; endpoints];
        turns.for_each(|turn| counts[slots.endpoint_at(turn).unwrap()] += 1);
        counts
    }

    #[test]
    fn slots_follow_weights_exactly_and_evenly() {
        let slots = WeightedSlots::new(&[1, 1, 1]);
        assert_eq!((0..6).map(|turn| slots.endpoint_at(turn).unwrap()).collect::<Vec<_>>(), [0, 1, 2, 0, 1, 2]);
        let slots = WeightedSlots::new(&[10, 0, 30, 20]);
        assert_eq!(counts(&slots, 4, 0..600), [100, 0, 300, 200]);
        // In every interval, each endpoint has its fair share, with a deviation of less than two requests.
        for (from, length) in (0..6).flat_map(|from| (1..30).map(move |length| (from, length))) {
            for (count, weight) in counts(&slots, 4, from..from + length).into_iter().zip([1.0, 0.0, 3.0, 2.0]) {
                let fair = weight / 6.0 * length as f64;
                assert!((f64::from(count) - fair).abs() < 2.0, "{count} of {length} from {from}, fair is {fair}");
            }
        }
        assert_eq!(WeightedSlots::new(&[0, 0]).endpoint_at(7), None);
    }

    #[test]
    fn large_weights_are_approximated_within_two_percent() {
        let weights: Vec<u64> = (0..40).map(|index| 7919 + 6151 * index).collect();
        let slots = WeightedSlots::new(&weights);
        let sum = weights.iter().sum::<u64>() as f64;
        let all = slots.slots.len() as f64;
        for (index, weight) in weights.iter().enumerate() {
            let (has, fair) = (slots.share(index) as f64 / all, *weight as f64 / sum);
            assert!((has / fair - 1.0).abs() < 0.02, "endpoint {index}: share {has}, fair is {fair}");
        }
        assert!(WeightedSlots::new(&[1, 1_000_000]).share(0) > 0, "every positive weight has a slot");
    }

    #[test]
    fn random_slots_follow_weights() {
        let slots = WeightedSlots::new(&[1, 2, 5]);
        let rng = Rng::from_seed(7);
        let counts = counts(&slots, 3, (0..80_000).map(|_| rng.next_u64()));
        for (count, fair) in counts.into_iter().zip([10_000, 20_000, 50_000]) {
            // The test uses a fixed seed, so the result is deterministic.
            assert!(
                f64::from(count).mul_add(1.0, -f64::from(fair)).abs() < 0.02 * f64::from(fair),
                "{count} of {fair}"
            );
        }
    }

    #[test]
    fn only_keys_of_changed_endpoint_move() {
        let names: Vec<u64> = (0..10_u64).map(|name| hash(&name.to_be_bytes())).collect();
        let endpoints = |weight: &dyn Fn(usize) -> f64| -> Vec<_> {
            names.iter().enumerate().map(|(index, name)| (*name, weight(index))).collect()
        };
        let all = RendezvousTable::new(&endpoints(&|_| 1.0));
        let without_3 = RendezvousTable::new(&endpoints(&|index| if index == 3 { 0.0 } else { 1.0 }));
        let heavy_3 = RendezvousTable::new(&endpoints(&|index| if index == 3 { 3.0 } else { 1.0 }));
        let mut kept_by = [0_u32; 10];
        for key in (0..100_000_u64).map(|key| hash(&key.to_be_bytes())) {
            let owner = all.lookup(key, 0);
            kept_by[owner] += 1;
            if owner != 3 {
                assert_eq!(without_3.lookup(key, 0), owner, "only keys of the removed endpoint move");
                assert!([3, owner].contains(&heavy_3.lookup(key, 0)), "keys must move only to endpoint 3");
            } else {
                assert_eq!(heavy_3.lookup(key, 0), 3);
            }
        }
        for (index, count) in kept_by.into_iter().enumerate() {
            assert!((8_500..11_500).contains(&count), "endpoint {index} has {count} of 100,000 keys");
        }
    }
}
