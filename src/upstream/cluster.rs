//! Upstream clusters: the endpoints of an upstream and their state, which all workers share.

use std::fmt::Display;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use arc_swap::{ArcSwap, Guard};
use http::{HeaderMap, HeaderValue, StatusCode};
use tokio::sync::Notify;
use tracing::{info, warn};

use crate::clock::monotonic;
use crate::http::body_limits::UsageByNetwork;
use crate::http::headers::cookie;
use crate::upstream::endpoint::{
    ClusterState, Endpoint, EndpointAddress, LoadBalancer, PickContext, RendezvousTable, RequestPermit, Rng,
    endpoint_weights, hash, select_priority,
};
use crate::upstream::health::{Contact, Health, HealthState};
use crate::upstream::metrics::UpstreamMetrics;
use crate::upstream::retry::RetryBudget;
use crate::upstream::settings::{
    EjectionSettings, HashSource, HealthSettings, LoadBalancingPolicy, StickyCookie, UpstreamSettings,
};

/// Endpoints of an upstream with their load balancer, retry budget and queue.
#[derive(Debug)]
pub struct UpstreamCluster {
    /// Settings of the upstream.
    pub settings: Arc<UpstreamSettings>,
    load_balancer: ArcSwap<LoadBalancer>,
    /// Number of load balancers that were installed before the current load balancer. Reading this number costs less
    /// than loading the `ArcSwap`.
    version: AtomicU64,
    /// This lock is held while a load balancer is built and installed.
    rebuild_lock: Mutex<()>,
    created_at: Instant,
    /// Time in ms after `created_at` at which the load balancer becomes outdated.
    rebuild_at_ms: AtomicU64,
    /// Next position of round-robin load balancing.
    round_robin_counter: AtomicU64,
    /// Retry budget of all requests that may be retried.
    pub(super) retry_budget: RetryBudget,
    pub(super) shared: ClusterState,
    /// Number of unfinished uploads of each client network.
    pub(super) uploads: Arc<UsageByNetwork>,
    /// Notifies the health checks when endpoints were added or removed.
    pub(super) endpoints_changed: Notify,
}

/// Minimum interval between log messages about an unreachable endpoint.
const UNREACHABLE_LOG_INTERVAL: Duration = Duration::from_secs(60);

/// State of an endpoint for the admin API and the metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServerState {
    /// The endpoint has accepted the last connection.
    Healthy,
    /// Health checks failed.
    Unhealthy,
    /// Requests failed, and outlier detection has ejected the endpoint.
    Ejected,
    /// The last attempt to connect failed.
    Unreachable,
    /// The gateway has not connected to the endpoint yet.
    NotChecked,
}

impl ServerState {
    /// All values of this enum.
    pub const ALL: [ServerState; 5] = [
        ServerState::Healthy,
        ServerState::Unhealthy,
        ServerState::Ejected,
        ServerState::Unreachable,
        ServerState::NotChecked,
    ];

    /// Return the name of the state.
    pub fn label(self) -> &'static str {
        match self {
            ServerState::Healthy => "healthy",
            ServerState::Unhealthy => "unhealthy",
            ServerState::Ejected => "ejected",
            ServerState::Unreachable => "unreachable",
            ServerState::NotChecked => "not checked",
        }
    }

    /// Return whether the state is a fault of the endpoint.
    pub fn is_fault(self) -> bool {
        match self {
            ServerState::Unhealthy | ServerState::Ejected | ServerState::Unreachable => true,
            ServerState::Healthy | ServerState::NotChecked => false,
        }
    }
}

/// Status of an endpoint for the admin API and the metrics.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EndpointStatus {
    /// Name of the endpoint.
    pub server: String,
    /// State of the endpoint.
    pub state: ServerState,
    /// Number of requests in flight.
    pub in_flight: usize,
}

/// Value of `rebuild_at_ms` if no rebuild is scheduled.
const NEVER: u64 = u64::MAX;

impl UpstreamCluster {
    /// Create a cluster with one endpoint per configured server.
    pub fn new(settings: Arc<UpstreamSettings>) -> Self {
        let shared = ClusterState::new(settings.max_queue);
        let endpoint = |index| {
            Arc::new(Endpoint::new(
                &settings,
                index,
                literal_address(&settings, index),
                HealthState::default(),
                shared.clone(),
            ))
        };
        let endpoints = (0..settings.servers.len()).map(endpoint).collect();
        UpstreamCluster::with_endpoints(settings, endpoints, shared)
    }

    /// Create a cluster with these endpoints.
    pub(super) fn with_endpoints(
        settings: Arc<UpstreamSettings>,
        endpoints: Vec<Arc<Endpoint>>,
        shared: ClusterState,
    ) -> Self {
        let endpoints = Arc::new(endpoints);
        let opened = monotonic();
        let rendezvous = rendezvous_table(&settings, &endpoints);
        let (table, _) = LoadBalancer::new(&settings, endpoints, rendezvous, opened);
        UpstreamCluster {
            load_balancer: ArcSwap::from_pointee(table),
            version: AtomicU64::new(0),
            rebuild_lock: Mutex::default(),
            created_at: opened,
            rebuild_at_ms: AtomicU64::new(NEVER),
            round_robin_counter: AtomicU64::new(0),
            retry_budget: RetryBudget::new(opened),
            shared,
            uploads: Arc::default(),
            endpoints_changed: Notify::new(),
            settings,
        }
    }

    /// Return the metrics of connections and DNS lookups.
    pub fn metrics(&self) -> &UpstreamMetrics {
        &self.shared.metrics
    }

    /// Return the endpoints. Each change creates a new list.
    pub fn endpoints(&self) -> Arc<Vec<Arc<Endpoint>>> {
        self.load_balancer.load().endpoints.clone()
    }

    /// Return the resolved addresses of server `index`.
    pub(super) fn addresses(&self, index: usize) -> Vec<EndpointAddress> {
        let endpoints = self.endpoints();
        let own = endpoints.iter().filter(|endpoint| endpoint.server_index == index);
        own.filter_map(|endpoint| endpoint.endpoint_address()).collect()
    }

    /// Return the status of each endpoint.
    pub fn status(&self) -> Vec<EndpointStatus> {
        let now = monotonic();
        let status_of = |endpoint: &Arc<Endpoint>| {
            let health_state = endpoint.health_state();
            let state = match health_state.health(now) {
                Health::Unhealthy => ServerState::Unhealthy,
                Health::Ejected => ServerState::Ejected,
                Health::Healthy => match health_state.contact {
                    Contact::None => ServerState::NotChecked,
                    Contact::Reached => ServerState::Healthy,
                    Contact::Failed => ServerState::Unreachable,
                },
            };
            EndpointStatus { server: endpoint.name().to_string(), state, in_flight: endpoint.in_flight() }
        };
        self.endpoints().iter().map(status_of).collect()
    }

    /// Set the addresses of server `index`. Endpoints whose address is still in the list are kept with their state.
    pub fn set_addresses(&self, index: usize, addresses: Vec<EndpointAddress>) {
        let rebuild_guard = self.lock_rebuild();
        let before = self.endpoints();
        let (own, others): (Vec<_>, Vec<_>) =
            before.iter().cloned().partition(|endpoint| endpoint.server_index == index);
        let mut now = addresses;
        // Of several targets with the same address, keep that with the lowest priority number.
        now.sort_unstable_by(|one, other| {
            let key = |each: &EndpointAddress| (each.address, each.target.as_ref().map(|target| target.priority));
            key(one).cmp(&key(other)).then_with(|| one.cmp(other))
        });
        now.dedup_by_key(|each| each.address);
        if own.len() == now.len()
            && own.iter().all(|endpoint| endpoint.endpoint_address().is_some_and(|known| now.contains(&known)))
        {
            return;
        }
        let endpoint = |address: EndpointAddress| {
            let known = own.iter().find(|endpoint| endpoint.address == Some(address.address));
            let known = known.map(|known| match known.target == address.target {
                true => known.clone(),
                false => Arc::new(known.with_address(&self.settings, address.clone())),
            });
            known.unwrap_or_else(|| {
                // Skip slow start for the first addresses of a server, because the server has no other addresses that
                // could take the load.
                let health_state =
                    if own.is_empty() { HealthState::default() } else { HealthState::joined_at(monotonic()) };
                Arc::new(Endpoint::new(&self.settings, index, Some(address), health_state, self.shared.clone()))
            })
        };
        let members: Arc<Vec<_>> = Arc::new(others.into_iter().chain(now.into_iter().map(endpoint)).collect());
        let rendezvous = rendezvous_table(&self.settings, &members);
        self.install(&rebuild_guard, members, rendezvous);
        self.endpoints_changed.notify_one();
    }

    /// Return the current load balancer. If the load balancer is outdated, rebuild it first.
    pub(super) fn load_balancer(&self) -> Guard<Arc<LoadBalancer>> {
        self.version();
        self.load_balancer.load()
    }

    /// Return the version of the load balancer. If the load balancer is outdated, rebuild it first.
    pub(super) fn version(&self) -> u64 {
        let outdated_ms = self.rebuild_at_ms.load(Ordering::Relaxed);
        if outdated_ms != NEVER && self.created_at.elapsed().as_millis() as u64 >= outdated_ms {
            self.rebuild(&self.lock_rebuild());
        }
        self.version.load(Ordering::Acquire)
    }

    /// Pick an endpoint of `table` and acquire a request permit. `endpoints` are the endpoints of `table`, as copies of the
    /// worker.
    pub(super) fn pick(
        &self,
        table: &LoadBalancer,
        endpoints: &[Arc<Endpoint>],
        key: Option<u64>,
        rng: &Rng,
        tried: &[Arc<Endpoint>],
    ) -> Option<(usize, RequestPermit)> {
        table.pick(&PickContext {
            policy: &self.settings.balance,
            endpoints,
            hash_key: key,
            rng,
            round_robin_counter: &self.round_robin_counter,
            excluded: tried,
        })
    }

    /// Return the hash of the header or cookie that selects the endpoint, or the token in the cookie of a sticky
    /// session. Return `None` if the policy uses no header, or if the header or cookie is missing.
    pub(super) fn hash_key(&self, headers: &HeaderMap) -> Option<u64> {
        match &self.settings.balance {
            LoadBalancingPolicy::LeastRequests | LoadBalancingPolicy::RoundRobin | LoadBalancingPolicy::Random => None,
            LoadBalancingPolicy::Hash(HashSource::Header(name)) => {
                headers.get(name).map(|value| hash(value.as_bytes()))
            }
            LoadBalancingPolicy::Hash(HashSource::Cookie(name)) => cookie(headers, name).map(hash),
            LoadBalancingPolicy::Sticky(sticky) => cookie(headers, &sticky.name).and_then(StickyCookie::parse),
        }
    }

    /// Return `Set-Cookie` for the response of `endpoint` if sessions are sticky, and the request has no cookie of a
    /// usable endpoint. `key` is the [`hash_key`](Self::hash_key) of the request.
    pub(super) fn sticky_cookie(&self, key: Option<u64>, endpoint: &Endpoint) -> Option<HeaderValue> {
        let LoadBalancingPolicy::Sticky(cookie) = &self.settings.balance else { return None };
        let token = cookie.token(endpoint.name());
        let keeps_cookie = |key| key == token || self.load_balancer().sticky_endpoint(key).is_some();
        if key.is_some_and(keeps_cookie) { None } else { cookie.set_cookie(token) }
    }

    /// Withdraw a retry from the retry budget. Return whether the budget allows the retry.
    pub(super) fn withdraw_retry(&self) -> bool {
        self.retry_budget.withdraw(monotonic())
    }

    /// Record the status of a response: 502, 503 and 504 count as errors. All other statuses reset the number of
    /// consecutive errors to 0.
    pub(super) fn report_response(&self, endpoint: &Endpoint, status: StatusCode) {
        match status {
            // With these statuses, a server reports that the server itself or its own upstream has failed.
            StatusCode::BAD_GATEWAY | StatusCode::SERVICE_UNAVAILABLE | StatusCode::GATEWAY_TIMEOUT => {
                self.report_failure(endpoint, &status);
            }
            _ if endpoint.state.consecutive_errors.load(Ordering::Relaxed) != 0 => {
                endpoint.state.consecutive_errors.store(0, Ordering::Relaxed)
            }
            _ => {}
        }
    }

    /// Record that connecting to an endpoint failed or timed out, and start its connect backoff.
    pub(super) fn report_connect_failure(&self, endpoint: &Endpoint, error: &dyn Display) {
        let is_new = {
            // Start the backoff under the lock, so that only the first of several concurrent failures rebuilds the load
            // balancer.
            let rebuild_guard = self.lock_rebuild();
            let news = endpoint.health_state().start_connect_backoff(monotonic());
            if news {
                self.rebuild(&rebuild_guard);
            }
            news
        };
        if is_new && endpoint.state.unreachable_log.should_log(UNREACHABLE_LOG_INTERVAL) {
            let upstream = &self.settings.name;
            let server = endpoint.name();
            warn!(%upstream, %server, %error, "server is unreachable");
        }
        self.report_failure(endpoint, error);
    }

    /// Record a failed request. Eject the endpoint after `consecutive_errors` failed requests in succession.
    pub(super) fn report_failure(&self, endpoint: &Endpoint, error: &dyn Display) {
        let Some(EjectionSettings { consecutive_errors: errors, base_ejection_time: time }) = self.settings.ejection
        else {
            return;
        };
        if endpoint.state.consecutive_errors.fetch_add(1, Ordering::Relaxed) + 1 < errors {
            return;
        }
        endpoint.state.consecutive_errors.store(0, Ordering::Relaxed);
        let Some(time) = endpoint.health_state().eject(monotonic(), time) else { return };
        let upstream = &self.settings.name;
        let server = endpoint.name();
        self.rebuild(&self.lock_rebuild());
        warn!(%upstream, %server, ejected_for = ?time, errors, %error, "server is ejected after consecutive errors");
    }

    /// Record the result of a health check. An error contains the reason of the failure.
    pub(super) fn report_check(&self, endpoint: &Endpoint, health: &HealthSettings, result: Result<(), String>) {
        let passed = result.is_ok();
        let changed =
            endpoint.health_state().record_check(passed, monotonic(), health.unhealthy_after, health.healthy_after);
        if changed.is_none() {
            return;
        }
        self.rebuild(&self.lock_rebuild());
        let upstream = &self.settings.name;
        let server = endpoint.name();
        match result {
            Ok(()) => info!(%upstream, %server, "server is healthy again"),
            Err(reason) => warn!(%upstream, %server, %reason, "server is unhealthy"),
        }
    }

    /// Build the load balancer from the current state of the endpoints, and install it.
    pub(super) fn rebuild(&self, rebuild_guard: &MutexGuard<'_, ()>) {
        let (endpoints, rendezvous) = {
            let table = self.load_balancer.load();
            (table.endpoints.clone(), table.rendezvous.clone())
        };
        let now = monotonic();
        for endpoint in endpoints.iter().filter(|endpoint| endpoint.health_state().end_ejection_if_due(now)) {
            info!(upstream = %self.settings.name, server = %endpoint.name(), "ejection of server ended");
        }
        self.install(rebuild_guard, endpoints, rendezvous);
    }

    fn install(
        &self,
        _rebuild_guard: &MutexGuard<'_, ()>,
        endpoints: Arc<Vec<Arc<Endpoint>>>,
        rendezvous: Option<Arc<RendezvousTable>>,
    ) {
        let (table, next) = LoadBalancer::new(&self.settings, endpoints, rendezvous, monotonic());
        let was_in_panic_mode = self.load_balancer.load().is_in_panic_mode;
        if table.is_in_panic_mode != was_in_panic_mode {
            let upstream = &self.settings.name;
            match table.is_in_panic_mode {
                true => {
                    warn!(%upstream, "more than half of the servers are ejected or unhealthy; ejections are ignored")
                }
                false => info!(%upstream, "ejections of servers are no longer ignored"),
            }
        }
        let table = Arc::new(table);
        // Clear `is_usable` of all previous endpoints, because some of them may have been removed.
        let before = self.load_balancer.swap(table.clone());
        self.version.fetch_add(1, Ordering::Release);
        before.endpoints.iter().for_each(|endpoint| endpoint.state.is_usable.store(false, Ordering::Relaxed));
        table.usable.iter().for_each(|index| table.endpoints[*index].state.is_usable.store(true, Ordering::Relaxed));
        let next = next.map_or(NEVER, |next| next.saturating_duration_since(self.created_at).as_millis() as u64 + 1);
        self.rebuild_at_ms.store(next, Ordering::Relaxed);
        table.usable.iter().for_each(|index| self.shared.queue.hand_over(&table.endpoints[*index]));
    }

    pub(super) fn lock_rebuild(&self) -> MutexGuard<'_, ()> {
        self.rebuild_lock.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Return the address of server `index` if its host is an IP address.
pub(super) fn literal_address(settings: &UpstreamSettings, index: usize) -> Option<EndpointAddress> {
    let server = &settings.servers[index];
    let address = SocketAddr::new(server.host.parse().ok()?, server.port);
    Some(EndpointAddress { address, target: None })
}

fn rendezvous_table(settings: &UpstreamSettings, endpoints: &[Arc<Endpoint>]) -> Option<Arc<RendezvousTable>> {
    let mut weights = endpoint_weights(endpoints);
    select_priority(endpoints, &mut weights);
    if !matches!(settings.balance, LoadBalancingPolicy::Hash(_)) || weights.iter().all(|weight| *weight == 0) {
        return None;
    }
    let names = endpoints.iter().map(|endpoint| hash(endpoint.name().as_bytes()));
    Some(Arc::new(RendezvousTable::new(&names.zip(weights.iter().map(|weight| *weight as f64)).collect::<Vec<_>>())))
}

// When the configuration is reloaded, a cluster with new settings takes over the state of the previous cluster.

impl UpstreamCluster {
    /// Create a cluster with new settings. For servers that are in both clusters, keep the endpoints with their state
    /// and requests in flight.
    pub fn from_previous(settings: Arc<UpstreamSettings>, previous: &UpstreamCluster) -> Self {
        let shared = previous.shared.clone();
        shared.queue.resize(settings.max_queue);
        let known = previous.endpoints();
        let mut endpoints = Vec::new();
        for (index, server) in settings.servers.iter().enumerate() {
            let same =
                known.iter().filter(|endpoint| previous.settings.servers[endpoint.server_index].is_same_server(server));
            let first = endpoints.len();
            endpoints.extend(same.map(|endpoint| Arc::new(endpoint.with_settings(&settings, index))));
            if endpoints.len() == first {
                let health_state = HealthState::joined_at(monotonic());
                endpoints.push(Arc::new(Endpoint::new(
                    &settings,
                    index,
                    literal_address(&settings, index),
                    health_state,
                    shared.clone(),
                )));
            }
        }
        for removed in known.iter().filter(|known| !endpoints.iter().any(|endpoint| endpoint.is_same_as(known))) {
            removed.state.is_usable.store(false, Ordering::Relaxed);
        }
        let mut cluster = UpstreamCluster::with_endpoints(settings, endpoints, shared);
        cluster.uploads = previous.uploads.clone();
        // Build the load balancer, which also schedules the next rebuild for ejections and slow starts that were
        // carried over.
        cluster.rebuild(&cluster.lock_rebuild());
        cluster
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::upstream::connector::Protocol;
    use crate::upstream::settings::{AddressFamilies, HostPolicy, SrvTarget, UpstreamServerSettings};

    pub(in crate::upstream) fn settings(servers: &[&str]) -> UpstreamSettings {
        let server = |host: &&str| UpstreamServerSettings {
            authority: (*host).into(),
            host: (*host).into(),
            port: 80,
            tls: None,
            weight: 1,
            is_srv: false,
        };
        let second = Duration::from_secs(1);
        UpstreamSettings {
            name: "api".into(),
            servers: servers.iter().map(server).collect(),
            protocol: Protocol::Http1,
            resolve: AddressFamilies::Both,
            host: HostPolicy::Client,
            connect_timeout: second,
            response_timeout: second,
            pool_idle_timeout: second,
            balance: LoadBalancingPolicy::RoundRobin,
            max_requests: 0,
            max_queue: 0,
            health: None,
            ejection: None,
            slow_start: Duration::ZERO,
            retries: 0,
            proxy_protocol: false,
            client_cert_header: false,
            includes_usage: true,
            aws: None,
            google: None,
            socket_buffers: None,
        }
    }

    fn cluster(servers: &[&str]) -> UpstreamCluster {
        UpstreamCluster::new(Arc::new(settings(servers)))
    }

    #[test]
    fn ignored_ejections_bring_no_unhealthy_server_back() {
        // The health of three servers (H: healthy, E: ejected, U: unhealthy), and the indices of the servers that
        // receive requests.
        let cases = [
            ("HHH", &[0, 1, 2][..]),
            ("EHH", &[1, 2]),
            ("UEH", &[1, 2]),
            ("EUE", &[0, 2]),
            ("UUE", &[2]),
            ("UUH", &[2]),
            ("UUU", &[]),
        ];
        for (healths, usable) in cases {
            let cluster = cluster(&["10.0.0.1", "10.0.0.2", "10.0.0.3"]);
            for (endpoint, health) in cluster.endpoints().iter().zip(healths.bytes()) {
                match health {
                    b'E' => drop(endpoint.health_state().eject(monotonic(), Duration::from_secs(60))),
                    b'U' => drop(endpoint.health_state().record_check(false, monotonic(), 1, 1)),
                    _ => {}
                }
            }
            cluster.rebuild(&cluster.lock_rebuild());
            assert_eq!(*cluster.load_balancer.load().usable, *usable, "{healths}");
        }
    }

    #[test]
    fn targets_of_srv_records_share_by_weight_and_fail_over_by_priority() {
        let cluster = cluster(&["_http._tcp.test", "10.0.0.9"]);
        let target =
            |host: &str, priority, weight| Some(Arc::new(SrvTarget { host: host.into(), port: 80, priority, weight }));
        let (a, b, c) = (target("a", 10, 3), target("b", 10, 1), target("c", 20, 0));
        let addresses = [("10.0.0.1:80", &a), ("10.0.0.2:80", &a), ("10.0.0.3:80", &b), ("10.0.0.4:80", &c)];
        let address = |(address, target): (&str, &Option<Arc<SrvTarget>>)| EndpointAddress {
            address: address.parse().unwrap(),
            target: target.clone(),
        };
        cluster.set_addresses(0, addresses.map(address).to_vec());
        // The shares of the literal address, of the addresses of `a` and `b`, and of `c`.
        let shares = || {
            let table = cluster.load_balancer.load();
            let share = |ip: &str| {
                let is_own = |endpoint: &Arc<Endpoint>| endpoint.address.is_some_and(|own| own.ip().to_string() == ip);
                let index = table.endpoints.iter().position(is_own).unwrap();
                table.weighted_slots.share(index)
            };
            ["10.0.0.9", "10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4"].map(share)
        };
        assert_eq!(shares(), [8, 3, 3, 2, 0]);
        let fail = |ip: &str, passed| {
            let endpoints = cluster.endpoints();
            let endpoint =
                endpoints.iter().find(|one| one.address.is_some_and(|own| own.ip().to_string() == ip)).unwrap();
            endpoint.health_state().record_check(passed, monotonic(), 1, 1);
            cluster.rebuild(&cluster.lock_rebuild());
        };
        fail("10.0.0.1", false);
        fail("10.0.0.2", false);
        assert_eq!(shares(), [4, 0, 0, 1, 0], "targets of the same priority remain");
        fail("10.0.0.3", false);
        assert_eq!(shares(), [1, 0, 0, 0, 1], "the next priority takes over");
        fail("10.0.0.2", true);
        assert_eq!(shares(), [8, 0, 3, 0, 0], "the first priority is back");
    }

    fn addresses(addresses: &[SocketAddr]) -> Vec<EndpointAddress> {
        addresses.iter().map(|address| EndpointAddress { address: *address, target: None }).collect()
    }

    #[test]
    fn set_addresses_keeps_remaining_endpoints() {
        let cluster = cluster(&["name", "10.0.0.9"]);
        let [one, two, three] = ["10.0.0.1:80", "10.0.0.2:80", "10.0.0.3:80"].map(|text| text.parse().unwrap());
        let of = |address| cluster.endpoints().iter().find(|endpoint| endpoint.address == Some(address)).cloned();
        let literal = of("10.0.0.9:80".parse().unwrap()).expect("an IP address has an endpoint from the start");
        cluster.set_addresses(0, addresses(&[one, two, one]));
        let kept = of(two).unwrap();
        assert_eq!(cluster.endpoints().len(), 3, "the name has two distinct addresses, and the other server has one");
        cluster.set_addresses(0, addresses(&[three, two]));
        assert!(Arc::ptr_eq(&kept, &of(two).unwrap()) && of(one).is_none() && of(three).is_some());
        let before = cluster.endpoints();
        cluster.set_addresses(0, addresses(&[two, three]));
        assert!(Arc::ptr_eq(&before, &cluster.endpoints()), "the order of addresses is irrelevant");
        cluster.set_addresses(0, addresses(&[]));
        assert!(
            cluster.endpoints().iter().all(|endpoint| Arc::ptr_eq(endpoint, &literal)),
            "{:?}",
            cluster.endpoints()
        );
    }
}
