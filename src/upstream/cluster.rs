//! The servers of an upstream, and what all workers know of them.

use std::fmt::Display;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use arc_swap::{ArcSwap, Guard};
use http::{HeaderMap, StatusCode};
use tokio::sync::Notify;
use tracing::{info, warn};

use crate::limiter::clock::monotonic;
use crate::upstream::endpoint::Endpoint;
use crate::upstream::health::{EjectionSettings, Health, HealthSettings, HealthState};
use crate::upstream::load_balancer::{
    LoadBalancer, LoadBalancingPolicy, PickContext, RendezvousTable, Rng, endpoint_weights, hash,
};
use crate::upstream::pending_queue::{PendingQueue, RequestPermit};
use crate::upstream::retry::RetryBudget;
use crate::upstream::{Upstream, UpstreamSettings};

/// The servers of an upstream.
#[derive(Debug)]
pub struct UpstreamCluster {
    /// As configured.
    pub settings: Arc<UpstreamSettings>,
    load_balancer: ArcSwap<LoadBalancer>,
    /// How many tables there were before this one: a look at it costs less than one at the table.
    version: AtomicU64,
    /// Held by whoever makes another table.
    rebuild_lock: Mutex<()>,
    created_at: Instant,
    /// ms after `opened` at which the table is out of date.
    rebuild_at_ms: AtomicU64,
    /// Turns taken in the order of the table.
    round_robin_counter: AtomicU64,
    /// What may be tried again; none = nothing.
    pub(super) retry_budget: Option<RetryBudget>,
    pub(super) queue: Arc<PendingQueue>,
    /// Told when members come and go.
    pub(super) endpoints_changed: Notify,
}

/// A server that takes no connections is mentioned this often.
const UNREACHABLE_LOG_INTERVAL: Duration = Duration::from_secs(60);

/// How a member does, for whoever looks after it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EndpointStatus {
    /// What it is called.
    pub server: String,
    /// `healthy`; `unhealthy`: it fails its health checks; `ejected`: requests failed; `unreachable`: it took no connection just now.
    pub state: &'static str,
    /// Requests that it has.
    pub in_flight: usize,
}

/// What is never out of date.
const NEVER: u64 = u64::MAX;

impl UpstreamCluster {
    /// A member for each server as the configuration has it.
    pub fn new(settings: Arc<UpstreamSettings>) -> Self {
        let queue = Arc::new(PendingQueue::new(settings.max_queue));
        let endpoint = |index| {
            Arc::new(Endpoint::new(
                &settings,
                index,
                literal_address(&settings, index),
                HealthState::default(),
                queue.clone(),
            ))
        };
        let endpoints = (0..settings.servers.len()).map(endpoint).collect();
        UpstreamCluster::with_endpoints(settings, endpoints, queue)
    }

    /// Of these members.
    pub(super) fn with_endpoints(
        settings: Arc<UpstreamSettings>,
        endpoints: Vec<Arc<Endpoint>>,
        queue: Arc<PendingQueue>,
    ) -> Self {
        let (endpoints, opened) = (Arc::new(endpoints), monotonic());
        let rendezvous = rendezvous_table(&settings, &endpoints);
        let (table, _) = LoadBalancer::new(&settings, endpoints, rendezvous, opened);
        UpstreamCluster {
            load_balancer: ArcSwap::from_pointee(table),
            version: AtomicU64::new(0),
            rebuild_lock: Mutex::default(),
            created_at: opened,
            rebuild_at_ms: AtomicU64::new(NEVER),
            round_robin_counter: AtomicU64::new(0),
            retry_budget: (settings.retries > 0).then(|| RetryBudget::new(opened)),
            queue,
            endpoints_changed: Notify::new(),
            settings,
        }
    }

    /// Who there is. It is another list after each change.
    pub fn endpoints(&self) -> Arc<Vec<Arc<Endpoint>>> {
        self.load_balancer.load().endpoints.clone()
    }

    /// Where one of its servers was found.
    pub(super) fn addresses(&self, index: usize) -> Vec<IpAddr> {
        let endpoints = self.endpoints();
        let own = endpoints.iter().filter(|endpoint| endpoint.server_index == index);
        own.filter_map(|endpoint| endpoint.address).map(|address| address.ip()).collect()
    }

    /// How each of them does.
    pub fn status(&self) -> Vec<EndpointStatus> {
        let now = monotonic();
        let status_of = |endpoint: &Arc<Endpoint>| {
            let health_state = endpoint.health_state();
            let state = match health_state.health(now) {
                Health::Unhealthy => "unhealthy",
                Health::Ejected => "ejected",
                Health::Healthy if health_state.is_in_connect_backoff(now) => "unreachable",
                Health::Healthy => "healthy",
            };
            EndpointStatus { server: endpoint.name(), state, in_flight: endpoint.in_flight() }
        };
        self.endpoints().iter().map(status_of).collect()
    }

    /// These are the addresses of one of its servers from now on. Members that stay are the same as before.
    pub fn set_addresses(&self, index: usize, addresses: &[SocketAddr]) {
        let rebuild_guard = self.lock_rebuild();
        let before = self.endpoints();
        let (own, others): (Vec<_>, Vec<_>) =
            before.iter().cloned().partition(|endpoint| endpoint.server_index == index);
        let mut now: Vec<_> = addresses.to_vec();
        now.sort_unstable();
        now.dedup();
        if own.len() == now.len()
            && own.iter().all(|endpoint| endpoint.address.is_some_and(|known| now.contains(&known)))
        {
            return;
        }
        let endpoint = |address| {
            let known = own.iter().find(|endpoint| endpoint.address == Some(address)).cloned();
            known.unwrap_or_else(|| {
                // The first ones have nobody to start more slowly than.
                let health_state =
                    if own.is_empty() { HealthState::default() } else { HealthState::joined_at(monotonic()) };
                Arc::new(Endpoint::new(&self.settings, index, Some(address), health_state, self.queue.clone()))
            })
        };
        let members: Arc<Vec<_>> = Arc::new(others.into_iter().chain(now.into_iter().map(endpoint)).collect());
        let rendezvous = rendezvous_table(&self.settings, &members);
        self.install(&rebuild_guard, members, rendezvous);
        self.endpoints_changed.notify_one();
    }

    /// Who can be asked now.
    pub(super) fn load_balancer(&self) -> Guard<Arc<LoadBalancer>> {
        self.version();
        self.load_balancer.load()
    }

    /// Another number with each table.
    pub(super) fn version(&self) -> u64 {
        let outdated_ms = self.rebuild_at_ms.load(Ordering::Relaxed);
        if outdated_ms != NEVER && self.created_at.elapsed().as_millis() as u64 >= outdated_ms {
            self.rebuild(&self.lock_rebuild());
        }
        self.version.load(Ordering::Acquire)
    }

    /// A place at the member whose turn it is.
    pub(super) fn pick(
        &self,
        table: &LoadBalancer,
        key: Option<u64>,
        rng: &Rng,
        tried: &[Arc<Endpoint>],
    ) -> Option<(usize, RequestPermit)> {
        table.pick(&PickContext {
            policy: &self.settings.balance,
            hash_key: key,
            rng,
            round_robin_counter: &self.round_robin_counter,
            excluded: tried,
        })
    }

    /// What decides about a request, where its header does.
    pub(super) fn hash_key(&self, headers: &HeaderMap) -> Option<u64> {
        let LoadBalancingPolicy::Hash(name) = &self.settings.balance else { return None };
        headers.get(name).map(|value| hash(value.as_bytes()))
    }

    /// Whether a request may be tried again; then that counts.
    pub(super) fn withdraw_retry(&self) -> bool {
        self.retry_budget.as_ref().is_some_and(|retry_budget| retry_budget.withdraw(monotonic()))
    }

    /// A member has answered.
    pub(super) fn report_response(&self, endpoint: &Endpoint, status: StatusCode) {
        match status {
            // What a server says of itself, or of what is behind it.
            StatusCode::BAD_GATEWAY | StatusCode::SERVICE_UNAVAILABLE | StatusCode::GATEWAY_TIMEOUT => {
                self.report_failure(endpoint, &status);
            }
            _ if endpoint.state.consecutive_errors.load(Ordering::Relaxed) != 0 => {
                endpoint.state.consecutive_errors.store(0, Ordering::Relaxed)
            }
            _ => {}
        }
    }

    /// A member took no connection, or not in time.
    pub(super) fn report_connect_failure(&self, endpoint: &Endpoint, error: &dyn Display) {
        let is_new = {
            // Whoever finds it out at the same time waits for the table that says so.
            let rebuild_guard = self.lock_rebuild();
            let news = endpoint.health_state().start_connect_backoff(monotonic());
            if news {
                self.rebuild(&rebuild_guard);
            }
            news
        };
        if is_new && endpoint.state.unreachable_log.should_log(UNREACHABLE_LOG_INTERVAL) {
            let (upstream, server) = (&self.settings.name, endpoint.name());
            warn!(%upstream, %server, %error, "a server takes no connection and is passed over");
        }
        self.report_failure(endpoint, error);
    }

    /// A member has failed a request.
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
        let (upstream, server) = (&self.settings.name, endpoint.name());
        self.rebuild(&self.lock_rebuild());
        warn!(%upstream, %server, ejected_for = ?time, %error, "a server is ejected after {errors} errors in a row");
    }

    /// A member has passed a health check, or why it has not.
    pub(super) fn report_check(&self, endpoint: &Endpoint, health: &HealthSettings, result: Result<(), String>) {
        let passed = result.is_ok();
        let changed =
            endpoint.health_state().record_check(passed, monotonic(), health.unhealthy_after, health.healthy_after);
        if changed.is_none() {
            return;
        }
        self.rebuild(&self.lock_rebuild());
        let (upstream, server) = (&self.settings.name, endpoint.name());
        match result {
            Ok(()) => info!(%upstream, %server, "a server is healthy again"),
            Err(reason) => warn!(%upstream, %server, %reason, "a server is not healthy"),
        }
    }

    /// Makes a table of what is known now.
    pub(super) fn rebuild(&self, rebuild_guard: &MutexGuard<'_, ()>) {
        let (endpoints, rendezvous) = {
            let table = self.load_balancer.load();
            (table.endpoints.clone(), table.rendezvous.clone())
        };
        let now = monotonic();
        for endpoint in endpoints.iter().filter(|endpoint| endpoint.health_state().end_ejection_if_due(now)) {
            info!(upstream = %self.settings.name, server = %endpoint.name(), "a server that was ejected is used again");
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
                true => warn!(%upstream, "more than half of the servers are out: ejected ones are used all the same"),
                false => info!(%upstream, "half of the servers are in again"),
            }
        }
        let table = Arc::new(table);
        // Those that are gone as well.
        let before = self.load_balancer.swap(table.clone());
        self.version.fetch_add(1, Ordering::Release);
        before.endpoints.iter().for_each(|endpoint| endpoint.state.is_usable.store(false, Ordering::Relaxed));
        table.usable.iter().for_each(|index| table.endpoints[*index].state.is_usable.store(true, Ordering::Relaxed));
        let next = next.map_or(NEVER, |next| next.saturating_duration_since(self.created_at).as_millis() as u64 + 1);
        self.rebuild_at_ms.store(next, Ordering::Relaxed);
        table.usable.iter().for_each(|index| self.queue.hand_over(&table.endpoints[*index]));
    }

    pub(super) fn lock_rebuild(&self) -> MutexGuard<'_, ()> {
        self.rebuild_lock.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The address of a server that has no name.
pub(super) fn literal_address(settings: &UpstreamSettings, index: usize) -> Option<SocketAddr> {
    let server = &settings.servers[index];
    server.host.parse::<IpAddr>().ok().map(|host| SocketAddr::new(host, server.port))
}

fn rendezvous_table(settings: &UpstreamSettings, endpoints: &[Arc<Endpoint>]) -> Option<Arc<RendezvousTable>> {
    let weights = endpoint_weights(endpoints);
    if !matches!(settings.balance, LoadBalancingPolicy::Hash(_)) || weights.iter().all(|weight| *weight == 0) {
        return None;
    }
    let names = endpoints.iter().map(|endpoint| hash(endpoint.name().as_bytes()));
    Some(Arc::new(RendezvousTable::new(&names.zip(weights.iter().map(|weight| *weight as f64)).collect::<Vec<_>>())))
}

// How an upstream that has other settings takes the place of the one before: its servers stay what they are.

impl UpstreamCluster {
    /// The same with other settings: servers that both have are as they were, with the requests that they have.
    pub fn from_previous(settings: Arc<UpstreamSettings>, previous: &UpstreamCluster) -> Self {
        let queue = previous.queue.clone();
        queue.resize(settings.max_queue);
        let known = previous.endpoints();
        let mut endpoints = Vec::new();
        for (index, server) in settings.servers.iter().enumerate() {
            let same = known.iter().filter(|endpoint| endpoint.server.is_same_server(server));
            let first = endpoints.len();
            endpoints.extend(same.map(|endpoint| Arc::new(endpoint.with_settings(&settings, index))));
            if endpoints.len() == first {
                let health_state = HealthState::joined_at(monotonic());
                endpoints.push(Arc::new(Endpoint::new(
                    &settings,
                    index,
                    literal_address(&settings, index),
                    health_state,
                    queue.clone(),
                )));
            }
        }
        for removed in known.iter().filter(|known| !endpoints.iter().any(|endpoint| endpoint.is_same_as(known))) {
            removed.state.is_usable.store(false, Ordering::Relaxed);
        }
        let cluster = UpstreamCluster::with_endpoints(settings, endpoints, queue);
        // Some may be out, and come back.
        cluster.rebuild(&cluster.lock_rebuild());
        cluster
    }
}

impl Upstream {
    /// The way to a fleet that has taken the place of another. Connections to servers that both have stay.
    pub fn from_previous(cluster: Arc<UpstreamCluster>, previous: &Upstream) -> Self {
        let speaks = |cluster: &UpstreamCluster| (cluster.settings.protocol, cluster.settings.pool_idle_timeout);
        let (pools, endpoints) = (previous.pools.load(), cluster.endpoints());
        let known = pools.pools.iter().filter(|_| speaks(&cluster) == speaks(&previous.cluster));
        let known =
            known.filter_map(|pool| endpoints.iter().find_map(|endpoint| pool.reuse_for(endpoint))).map(Arc::new);
        let known: Vec<_> = known.collect();
        Upstream::with_pools(cluster, &known)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::upstream::Protocol;
    use crate::upstream::UpstreamServerSettings;

    fn fleet(servers: &[&str]) -> UpstreamCluster {
        let server = |host: &&str| UpstreamServerSettings {
            authority: (*host).into(),
            host: (*host).into(),
            port: 80,
            tls: None,
            weight: 1,
        };
        let second = Duration::from_secs(1);
        UpstreamCluster::new(Arc::new(UpstreamSettings {
            name: "api".into(),
            servers: servers.iter().map(server).collect(),
            protocol: Protocol::Http1,
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
        }))
    }

    #[test]
    fn members_that_stay_are_the_same() {
        let cluster = fleet(&["name", "10.0.0.9"]);
        let [one, two, three] = ["10.0.0.1:80", "10.0.0.2:80", "10.0.0.3:80"].map(|text| text.parse().unwrap());
        let of = |address| cluster.endpoints().iter().find(|endpoint| endpoint.address == Some(address)).cloned();
        let literal = of("10.0.0.9:80".parse().unwrap()).expect("an address has a member from the start");
        cluster.set_addresses(0, &[one, two, one]);
        let kept = of(two).unwrap();
        assert_eq!(cluster.endpoints().len(), 3, "each address once, and the other server");
        cluster.set_addresses(0, &[three, two]);
        assert!(Arc::ptr_eq(&kept, &of(two).unwrap()) && of(one).is_none() && of(three).is_some());
        let before = cluster.endpoints();
        cluster.set_addresses(0, &[two, three]);
        assert!(Arc::ptr_eq(&before, &cluster.endpoints()), "nothing has changed");
        cluster.set_addresses(0, &[]);
        assert!(
            cluster.endpoints().iter().all(|endpoint| Arc::ptr_eq(endpoint, &literal)),
            "{:?}",
            cluster.endpoints()
        );
    }
}
