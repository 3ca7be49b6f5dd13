//! A simulated gateway with the same components as the application, and what its clients observe.

use std::sync::Arc;
use std::time::Duration;

use sluicegate::clock::{Clock, monotonic};
use sluicegate::limiter::Limiter;
use sluicegate::limiter::admin::LimiterAdmin;
use sluicegate::limiter::algorithm::Status;
use sluicegate::limiter::decision::{Decision, LimitCheck};
use sluicegate::limiter::denial_cache::DenialCache;
use sluicegate::limiter::key::IdentityHasher;
use sluicegate::limiter::memory::MemoryStore;
use sluicegate::limiter::overrides::Overrides;
use sluicegate::limiter::redis::circuit_breaker::CircuitBreaker;
use sluicegate::limiter::redis::cluster::topology::ClusterMap;
use sluicegate::limiter::redis::connection::ServerMode;
use sluicegate::limiter::redis::overrides;
use sluicegate::limiter::redis::script::AlgorithmSet;
use sluicegate::limiter::redis::server::{Address, Login, RedisEndpoint};
use sluicegate::limiter::redis::{RedisDeployment, RedisSettings};
use sluicegate::limiter::settlement::{Deferred, SettleAction};
use sluicegate::limiter::store::{DecidedBy, RedisStore, Store};
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use crate::network::{START_US, SimulatedDial, SimulatedNetwork};
use crate::schedule::{CostMode, Request, Schedule, ScheduledLimit};
use crate::store::{HOST, StateId, port_of};

/// The prefix of every key.
const PREFIX: &str = "rl";

pub struct Gateway {
    breaker: Arc<CircuitBreaker>,
    /// In a cluster, the topology contains the circuit breakers.
    topology: Arc<ClusterMap>,
    pub workers: Vec<Arc<Limiter>>,
    pub operator: LimiterAdmin,
}

impl Gateway {
    pub fn start(index: usize, schedule: &Schedule, world: &Arc<SimulatedNetwork>) -> Gateway {
        let breaker = Arc::<CircuitBreaker>::default();
        let clock = Clock::running(START_US.saturating_add_signed(schedule.skews_us[index]));
        let fallback = Arc::new(MemoryStore::new(1 << 16, clock.clone()));
        let denials = Some(Arc::new(DenialCache::new(10_000)));
        let limits: Vec<_> = schedule.limits.iter().map(|spec| spec.limit.clone()).collect();
        let find = move |name: &str| limits.iter().find(|limit| *limit.name == *name).cloned();
        let overrides = Arc::new(Overrides::new(IdentityHasher::new("simulation"), find, denials.clone()));
        let topology = Arc::<ClusterMap>::default();
        let (wait_queues, prefetch_pool) = Default::default();
        let dial = Arc::new(SimulatedDial { gateway: index, network: world.clone() });
        let client = redis::Client::open(format!("redis://{HOST}:{}", port_of(0))).expect("a URL");
        let settings = RedisSettings {
            prefix: PREFIX.to_owned(),
            connections: schedule.connections,
            timeout: schedule.timeout,
            algorithms: AlgorithmSet::for_rules(schedule.limits.iter().map(ScheduledLimit::rule)),
            clock,
            ..RedisSettings::default()
        };
        let deployment = match schedule.nodes {
            2.. => {
                let seed = Address { host: HOST.into(), port: port_of(0) };
                RedisDeployment::Cluster { seeds: vec![seed], login: Login::from_client(&client).with_dial(dial) }
            }
            _ => RedisDeployment::Single(RedisEndpoint::Dialed { client, mode: ServerMode::Standalone, dial }),
        };
        let mut first = None;
        let worker = |worker: usize| {
            let metrics = Arc::<sluicegate::limiter::metrics::LimiterMetrics>::default();
            let store = RedisStore::new(&deployment, &settings, breaker.clone(), topology.clone(), metrics.clone());
            let connecting_store = store.clone();
            first.get_or_insert_with(|| store.clone());
            tokio::spawn(async move { connecting_store.connect().await });
            let backend = Store::Redis { store, fallback: fallback.clone(), metrics };
            let first_permit_id = (index as u64) << 40 | (worker as u64 + 1) << 32;
            let (overrides, events) = (overrides.clone(), Arc::default());
            let (prefetch_pool, wait_queues) = (Arc::clone(&prefetch_pool), Arc::clone(&wait_queues));
            let denials = denials.clone();
            Arc::new(Limiter::new(backend, denials, prefetch_pool, wait_queues, overrides, events, first_permit_id))
        };
        let workers = (0..schedule.workers).map(worker).collect();
        let store = first.expect("a worker");
        if !schedule.overrides.is_empty() {
            let (overrides, store) = (overrides.clone(), store.clone());
            tokio::spawn(async move { overrides.poll(&store, &overrides::hash_key(PREFIX)).await });
        }
        let operator = LimiterAdmin { memory: fallback, redis: Some((store, PREFIX.to_owned())), overrides };
        Gateway { breaker, topology, workers, operator }
    }

    /// Return how often the circuit breakers of the gateway have opened.
    pub fn open_count(&self) -> u64 {
        self.breaker.open_count() + self.topology.open_count()
    }

    /// Return whether the breaker is open, and how often it has opened.
    fn breaker_state(&self) -> (bool, u64) {
        (self.breaker.is_open(), self.breaker.open_count())
    }
}

/// The outcome of a request from the client's point of view.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClientOutcome {
    Admitted(DecidedBy),
    Denied {
        decided_by: DecidedBy,
        is_from_cache: bool,
        retry_us: Option<u64>,
    },
    /// The response is a 503.
    Unavailable,
    /// The client disconnected before the response.
    Cancelled,
}

/// The result of a request for one of its limits.
#[derive(Debug, Clone)]
pub struct RequestLimit {
    pub limit: usize,
    pub state: StateId,
    /// Whether the limit is a shadow limit and would have denied the request.
    pub shadow_denied: bool,
    /// The cost charged after the response, or as a debt after a denial.
    pub charged_later: u64,
    pub is_refunded: bool,
}

/// A request as its client observed it.
#[derive(Debug, Clone)]
pub struct ObservedRequest {
    pub gateway: usize,
    pub started_at: Duration,
    pub elapsed: Duration,
    pub outcome: ClientOutcome,
    /// The time of the decision by the store's clock, in µs since the Unix epoch.
    pub now_us: u64,
    pub limits: Vec<RequestLimit>,
    /// Whether the breaker was closed throughout the request.
    pub breaker_closed: bool,
    /// Whether a cached denial rejected the request at a time at which the store would have admitted it.
    pub stale_denial: bool,
    /// Whether the gateway admitted the request without a check because of overload.
    pub is_overloaded: bool,
}

impl ObservedRequest {
    /// Return whether this source admitted or denied the request.
    pub fn is_decided_by(&self, source: DecidedBy) -> bool {
        match self.outcome {
            ClientOutcome::Admitted(decided_by) | ClientOutcome::Denied { decided_by, .. } => decided_by == source,
            ClientOutcome::Unavailable | ClientOutcome::Cancelled => false,
        }
    }
}

/// Everything that the simulation needs to send requests.
pub struct LoadGenerator {
    pub schedule: Arc<Schedule>,
    pub network: Arc<SimulatedNetwork>,
    pub gateways: Vec<Gateway>,
    /// A token that is cancelled to end all responses that are still running.
    pub end_responses: CancellationToken,
    /// For each state of a concurrency limit, the requests that hold a permit.
    pub held_permits: std::sync::Mutex<std::collections::BTreeMap<StateId, HeldPermits>>,
}

/// The running requests that hold a permit of one state.
#[derive(Debug, Default, Clone)]
pub struct HeldPermits {
    pub by_store: u64,
    pub by_share: u64,
    /// The times at which requests released their permits.
    pub released_at: Vec<Duration>,
    pub max: u64,
    pub max_at: Duration,
}

impl LoadGenerator {
    fn deferred(&self, limit: usize) -> Deferred {
        match self.schedule.limits[limit].cost_mode {
            CostMode::Upfront | CostMode::Always => Deferred::Nothing,
            CostMode::Refundable => Deferred::Refund,
            CostMode::Deferred => Deferred::Charge,
        }
    }

    pub fn checks(&self, route: &[usize], client: u64) -> Vec<LimitCheck<'_, '_>> {
        let check = |(limit_index, index): (usize, &usize)| {
            let ScheduledLimit { limit, cost, .. } = &self.schedule.limits[*index];
            let identity = self.schedule.limits[*index].identity(client);
            let (cost, deferred) = (*cost, self.deferred(*index));
            LimitCheck { limit_index, cost, deferred, ..LimitCheck::new(limit, identity) }
        };
        route.iter().enumerate().map(check).collect()
    }

    pub fn state(&self, limit: usize, client: u64) -> StateId {
        let spec = &self.schedule.limits[limit];
        (spec.limit.name.to_string(), spec.identity(client).0)
    }

    /// Send a request and wait until its response has ended.
    pub async fn request(&self, request: &Request) -> ObservedRequest {
        let gateway = &self.gateways[request.gateway];
        let limiter = &gateway.workers[request.worker];
        let checks = self.checks(&request.route, request.client);
        let (started_at, before) = (self.network.now(), gateway.breaker_state());
        let check = Box::pin(limiter.check(&checks));
        // If a check hangs, cancel it 5 s after its timeout.
        let max_wait = request.client_timeout.unwrap_or(self.schedule.timeout + Duration::from_secs(5));
        let result = timeout(max_wait, check).await.ok();
        let request_limit = |limit: &usize| {
            let state = self.state(*limit, request.client);
            RequestLimit { limit: *limit, state, shadow_denied: false, charged_later: 0, is_refunded: false }
        };
        let mut observed = ObservedRequest {
            gateway: request.gateway,
            started_at,
            elapsed: self.network.now() - started_at,
            outcome: ClientOutcome::Cancelled,
            now_us: 0,
            limits: request.route.iter().map(request_limit).collect(),
            breaker_closed: !before.0 && before == gateway.breaker_state(),
            stale_denial: false,
            is_overloaded: false,
        };
        let mut reason = String::new();
        match result {
            None => {}
            Some(Err(error)) => {
                observed.outcome = ClientOutcome::Unavailable;
                reason = error.to_string();
            }
            Some(Ok(decision)) if decision.admitted => {
                observed.outcome = ClientOutcome::Admitted(decision.decided_by);
                self.note(request, &observed, "");
                self.respond(request, decision, &mut observed).await;
                return observed;
            }
            Some(Ok(decision)) => {
                let (source, is_from_cache, retry_us) =
                    (decision.decided_by, decision.is_from_cache, decision.retry_us());
                observed.outcome = ClientOutcome::Denied { decided_by: source, is_from_cache, retry_us };
                observed.stale_denial =
                    is_from_cache && !self.are_permits_held(&observed) && self.is_stale(&checks, &decision);
                self.charge_debts(request, limiter, &checks, &decision, &mut observed).await;
            }
        }
        self.note(request, &observed, &reason);
        observed
    }

    /// Charge what a denied request nevertheless charges, as the rate limit service does for `charge = "always"`.
    async fn charge_debts(
        &self,
        request: &Request,
        limiter: &Limiter,
        checks: &[LimitCheck<'_, '_>],
        decision: &Decision<'_>,
        observed: &mut ObservedRequest,
    ) {
        let denies = |index: usize| decision.violated().any(|result| result.limit_index == index);
        let is_always_charged =
            |index: &usize| self.schedule.limits[request.route[*index]].cost_mode == CostMode::Always;
        let debts: Vec<_> = (0..checks.len()).filter(is_always_charged).filter(|index| denies(*index)).collect();
        for index in &debts {
            observed.limits[*index].charged_later = checks[*index].cost;
        }
        let debts: Vec<_> = debts.into_iter().map(|index| &checks[index]).collect();
        if !debts.is_empty() {
            limiter.charge_before(&debts, decision.decided_by, monotonic() + self.schedule.timeout).await;
        }
    }

    fn note(&self, request: &Request, observed: &ObservedRequest, reason: &str) {
        self.network.note(|| {
            let Request { gateway, worker, route, client, client_timeout: may_cancel, .. } = request;
            let ObservedRequest { started_at: began, outcome: told, breaker_closed, .. } = observed;
            let leaves = may_cancel.map(|_| ", the client may leave").unwrap_or_default();
            let breaker = if *breaker_closed { "" } else { ", breaker open" };
            format!("gateway {gateway}, worker {worker}: request of {began:?} by client {client} on limits {route:?}{leaves}: {told:?}{breaker} {reason}")
        });
    }

    /// Return whether the requests in flight hold all permits of a limit of this request. The store may have lost these
    /// permits, or may not know them yet.
    fn are_permits_held(&self, observed: &ObservedRequest) -> bool {
        let held_permits = self.held_permits.lock().unwrap();
        observed.limits.iter().any(|part| {
            let limit = self.schedule.limits[part.limit].concurrency().map(|rule| rule.limit);
            let held = held_permits.get(&part.state).map_or(0, |held| held.by_store + held.by_share);
            limit.is_some_and(|limit| held >= limit)
        })
    }

    /// Return whether the store would admit a request that a cached denial denies.
    fn is_stale(&self, checks: &[LimitCheck<'_, '_>], decision: &Decision<'_>) -> bool {
        let is_denying = |check: &&LimitCheck<'_, '_>| {
            decision
                .results
                .iter()
                .any(|result| result.limit_index == check.limit_index && result.outcome.status != Status::Ok)
        };
        let is_refundable =
            |check: &&LimitCheck<'_, '_>| check.deferred == Deferred::Refund || check.limit.prefetch > 0;
        if checks.iter().filter(is_denying).any(|check| is_refundable(&check)) {
            return false;
        }
        let charges: Vec<_> = checks.iter().filter(is_denying).map(|check| check.charge(DecidedBy::Store, 0)).collect();
        let now_us = self.network.now_us();
        let state = self.network.state();
        // A limit with deferred costs admits a request as long as one token remains.
        charges.iter().all(|charge| {
            let outcome = state.store.peek(now_us, *charge);
            if charge.mode.is_deferred() { outcome.remaining > 0 } else { outcome.status == Status::Ok }
        })
    }

    async fn respond(&self, request: &Request, mut decision: Decision<'_>, observed: &mut ObservedRequest) {
        observed.now_us = decision.now_us;
        observed.is_overloaded = decision.is_overloaded;
        for part in &mut observed.limits {
            let limit = &self.schedule.limits[part.limit].limit;
            part.shadow_denied = decision.shadow_denied.iter().any(|denied| std::ptr::eq(*denied, &**limit));
        }
        let source = decision.decided_by;
        self.count_permits(observed, source, true);
        let response = async {
            match request.response_time {
                Some(response_time) => sleep(response_time).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            () = response => {}
            () = self.end_responses.cancelled() => {}
        }
        if let Some(charges) = decision.deferred_charges.take() {
            let actions = std::cell::RefCell::new(Vec::new());
            let settling = charges.settle(|limit_index, later| {
                let action = match later {
                    Deferred::Charge if request.response_cost > 0 => SettleAction::Charge(request.response_cost),
                    Deferred::Refund if request.is_refunded => SettleAction::Refund,
                    _ => SettleAction::Nothing,
                };
                actions.borrow_mut().push((limit_index, action));
                action
            });
            for (place, due) in actions.into_inner() {
                match due {
                    SettleAction::Charge(units) => observed.limits[place].charged_later = units,
                    SettleAction::Refund => observed.limits[place].is_refunded = true,
                    // Schedules contain no reservations.
                    SettleAction::Nothing | SettleAction::Settle(_) => {}
                }
            }
            if let Some(settling) = settling {
                let result = settling.await;
                self.network.note(|| {
                    format!(
                        "gateway {}: response of {:?} settled: {}",
                        request.gateway,
                        observed.started_at,
                        result.is_ok()
                    )
                });
            }
        }
        // Release the permits at the end of the request, as the gateway does.
        self.count_permits(observed, source, false);
        drop(decision.permits.take());
    }

    fn count_permits(&self, observed: &ObservedRequest, source: DecidedBy, is_start: bool) {
        let mut held_permits = self.held_permits.lock().unwrap();
        for part in &observed.limits {
            let spec = &self.schedule.limits[part.limit];
            if spec.concurrency().is_none() || part.shadow_denied {
                continue;
            }
            let held = held_permits.entry(part.state.clone()).or_default();
            let count = if source == DecidedBy::Store { &mut held.by_store } else { &mut held.by_share };
            *count = if is_start { *count + 1 } else { *count - 1 };
            if !is_start {
                held.released_at.push(self.network.now());
            }
            let running = held.by_store + held.by_share;
            if running > held.max {
                (held.max, held.max_at) = (running, self.network.now());
            }
        }
    }
}
