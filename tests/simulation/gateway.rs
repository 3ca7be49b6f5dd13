//! A gateway as the application wires it, and what its clients observe.

use std::sync::Arc;
use std::time::Duration;

use sluicegate::limit::Limiter;
use sluicegate::limit::admission::{Due, Later};
use sluicegate::limit::algorithm::Status;
use sluicegate::limit::backend::{Backend, DecidedBy, Shared};
use sluicegate::limit::clock::Clock;
use sluicegate::limit::cluster::topology::Topology;
use sluicegate::limit::decision::{Check, Decision};
use sluicegate::limit::denials::Denials;
use sluicegate::limit::guard::Breaker;
use sluicegate::limit::key::IdentityHasher;
use sluicegate::limit::memory::MemoryStore;
use sluicegate::limit::operator::Operator;
use sluicegate::limit::overrides::Overrides;
use sluicegate::limit::redis::hello::Mode;
use sluicegate::limit::redis::records;
use sluicegate::limit::redis::script::Parts;
use sluicegate::limit::redis::server::{Address, Login, Server};
use sluicegate::limit::redis::{RedisSettings, Servers};
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use crate::network::{START_US, Way, World};
use crate::schedule::{LimitSpec, Request, Schedule, Use};
use crate::store::{HOST, StateName, port_of};

/// The first part of every key.
const PREFIX: &str = "rl";

pub struct Gateway {
    breaker: Arc<Breaker>,
    /// In a cluster it has the breakers.
    topology: Arc<Topology>,
    pub workers: Vec<Arc<Limiter>>,
    pub operator: Operator,
}

impl Gateway {
    pub fn start(index: usize, schedule: &Schedule, world: &Arc<World>) -> Gateway {
        let breaker = Arc::<Breaker>::default();
        let clock = Clock::running(START_US.saturating_add_signed(schedule.skews_us[index]));
        let fallback = Arc::new(MemoryStore::new(1 << 16, clock.clone()));
        let denials = Some(Arc::new(Denials::new(10_000)));
        let limits: Vec<_> = schedule.limits.iter().map(|spec| spec.limit.clone()).collect();
        let find = move |name: &str| limits.iter().find(|limit| *limit.name == *name).cloned();
        let overrides = Arc::new(Overrides::new(IdentityHasher::new("simulation"), find, denials.clone()));
        let topology = Arc::<Topology>::default();
        let (lines, advances) = Default::default();
        let way = Arc::new(Way { gateway: index, world: world.clone() });
        let client = redis::Client::open(format!("redis://{HOST}:{}", port_of(0))).expect("a URL");
        let settings = RedisSettings {
            prefix: PREFIX.to_owned(),
            connections: schedule.connections,
            timeout: schedule.timeout,
            connect_timeout: std::time::Duration::from_secs(1),
            algorithms: Parts::of(schedule.limits.iter().map(LimitSpec::rule)),
            clock,
        };
        let servers = match schedule.nodes {
            2.. => {
                let seed = Address { host: HOST.into(), port: port_of(0) };
                Servers::Cluster { seeds: vec![seed], login: Login::of(&client).over(way) }
            }
            _ => Servers::One(Server::Dialed { client, mode: Mode::Standalone, dial: way }),
        };
        let servers = (servers, settings);
        let mut first = None;
        let worker = |worker: usize| {
            let tallies = Arc::<sluicegate::limit::tallies::Tallies>::default();
            let store = Shared::new(&servers, breaker.clone(), topology.clone(), tallies.clone());
            let connecting = store.clone();
            first.get_or_insert_with(|| store.clone());
            tokio::spawn(async move { connecting.connect().await });
            let backend = Backend::Redis { store, fallback: fallback.clone(), tallies };
            let first_lease = (index as u64) << 40 | (worker as u64 + 1) << 32;
            let (advances, lines) = (Arc::clone(&advances), Arc::clone(&lines));
            Arc::new(Limiter::new(backend, denials.clone(), advances, lines, overrides.clone(), first_lease))
        };
        let workers = (0..schedule.workers).map(worker).collect();
        let store = first.expect("a worker");
        if !schedule.overrides.is_empty() {
            let (overrides, store) = (overrides.clone(), store.clone());
            tokio::spawn(async move { overrides.follow(&store, &records::key(PREFIX)).await });
        }
        let operator = Operator { memory: fallback, shared: Some((store, PREFIX.to_owned())), overrides };
        Gateway { breaker, topology, workers, operator }
    }

    /// How often a breaker has opened.
    pub fn openings(&self) -> u64 {
        self.breaker.openings() + self.topology.openings()
    }

    /// How often the breaker has changed.
    fn era(&self) -> (bool, u64) {
        (self.breaker.is_open(), self.breaker.openings())
    }
}

/// What the client of a request is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Told {
    Admitted(DecidedBy),
    Denied {
        source: DecidedBy,
        remembered: bool,
        retry_us: Option<u64>,
    },
    /// 503
    Unavailable,
    /// The client left before.
    Nothing,
}

/// One limit of a request, with what became of it.
#[derive(Debug, Clone)]
pub struct Part {
    pub limit: usize,
    pub state: StateName,
    /// Whether a shadow limit would have denied.
    pub shadow_denied: bool,
    /// What was charged after the response.
    pub paid: u64,
    pub refunded: bool,
}

/// A request as its client saw it.
#[derive(Debug, Clone)]
pub struct Observed {
    pub gateway: usize,
    pub began: Duration,
    pub took: Duration,
    pub told: Told,
    /// The instant of the decision by the store's clock.
    pub now_us: u64,
    pub parts: Vec<Part>,
    /// Whether the breaker was closed all the time.
    pub breaker_closed: bool,
    /// A remembered denial, at an instant at which the store would have admitted the request.
    pub stale_denial: bool,
}

/// Who sends requests: all that a request needs.
pub struct Client {
    pub schedule: Arc<Schedule>,
    pub world: Arc<World>,
    pub gateways: Vec<Gateway>,
    /// Ends all responses.
    pub ends: CancellationToken,
    /// For each limit on permits those that hold one: as many as are there, at each instant.
    pub held: std::sync::Mutex<std::collections::BTreeMap<StateName, Held>>,
}

/// The requests that run and hold a permit of a state.
#[derive(Debug, Default, Clone)]
pub struct Held {
    pub by_store: u64,
    pub by_share: u64,
    /// When requests ended.
    pub ended: Vec<Duration>,
    pub most: u64,
    pub most_at: Duration,
}

impl Client {
    fn later(&self, limit: usize) -> Later {
        match self.schedule.limits[limit].used {
            Use::Plain => Later::Nothing,
            Use::Refundable => Later::Refund,
            Use::PostPaid => Later::Pay,
        }
    }

    pub fn checks(&self, route: &[usize], client: u64) -> Vec<Check<'_, '_>> {
        let check = |(place, index): (usize, &usize)| {
            let LimitSpec { limit, cost, .. } = &self.schedule.limits[*index];
            let identity = self.schedule.limits[*index].identity(client);
            Check { place, limit, plan: &limit.standard, identity, cost: *cost, later: self.later(*index) }
        };
        route.iter().enumerate().map(check).collect()
    }

    pub fn state(&self, limit: usize, client: u64) -> StateName {
        let spec = &self.schedule.limits[limit];
        (spec.limit.name.to_string(), spec.identity(client).0)
    }

    /// Send a request and go on until its response has ended.
    pub async fn request(&self, request: &Request) -> Observed {
        let gateway = &self.gateways[request.gateway];
        let limiter = &gateway.workers[request.worker];
        let checks = self.checks(&request.route, request.client);
        let (began, before) = (self.world.now(), gateway.era());
        let check = Box::pin(limiter.check(&checks));
        // A check that hangs is given up long after its time.
        let most = request.leaves.unwrap_or(self.schedule.timeout + Duration::from_secs(5));
        let answer = timeout(most, check).await.ok();
        let part = |limit: &usize| {
            let state = self.state(*limit, request.client);
            Part { limit: *limit, state, shadow_denied: false, paid: 0, refunded: false }
        };
        let mut observed = Observed {
            gateway: request.gateway,
            began,
            took: self.world.now() - began,
            told: Told::Nothing,
            now_us: 0,
            parts: request.route.iter().map(part).collect(),
            breaker_closed: !before.0 && before == gateway.era(),
            stale_denial: false,
        };
        let mut reason = String::new();
        match answer {
            None => {}
            Some(Err(error)) => {
                observed.told = Told::Unavailable;
                reason = error.to_string();
            }
            Some(Ok(decision)) if decision.admitted => {
                observed.told = Told::Admitted(decision.source);
                self.note(request, &observed, "");
                self.respond(request, decision, &mut observed).await;
                return observed;
            }
            Some(Ok(decision)) => {
                let (source, remembered, retry_us) = (decision.source, decision.remembered, decision.retry_us());
                observed.told = Told::Denied { source, remembered, retry_us };
                observed.stale_denial = remembered && self.is_stale(&checks, &decision);
            }
        }
        self.note(request, &observed, &reason);
        observed
    }

    fn note(&self, request: &Request, observed: &Observed, reason: &str) {
        self.world.note(|| {
            let Request { gateway, worker, route, client, leaves, .. } = request;
            let Observed { began, told, breaker_closed, .. } = observed;
            let leaves = leaves.map(|_| ", the client may leave").unwrap_or_default();
            let breaker = if *breaker_closed { "" } else { ", breaker open" };
            format!("gateway {gateway}, worker {worker}: request of {began:?} by client {client} on limits {route:?}{leaves}: {told:?}{breaker} {reason}")
        });
    }

    /// Whether the store would admit what a remembered denial denies.
    fn is_stale(&self, checks: &[Check<'_, '_>], decision: &Decision<'_>) -> bool {
        let denying = |check: &&Check<'_, '_>| {
            decision.limits.iter().any(|judged| judged.place == check.place && judged.outcome.status != Status::Ok)
        };
        let gives_back = |check: &&Check<'_, '_>| check.later == Later::Refund || check.limit.advance > 0;
        if checks.iter().filter(denying).any(|check| gives_back(&check)) {
            return false;
        }
        let charges: Vec<_> = checks.iter().filter(denying).map(|check| check.charge(DecidedBy::Store, 0)).collect();
        let now_us = self.world.now_us();
        let state = self.world.state();
        // Post-paid limits admit while one unit is left.
        charges.iter().all(|charge| {
            let outcome = state.store.peek(now_us, *charge);
            if charge.mode.is_post_paid() { outcome.remaining > 0 } else { outcome.status == Status::Ok }
        })
    }

    async fn respond(&self, request: &Request, mut decision: Decision<'_>, observed: &mut Observed) {
        observed.now_us = decision.now_us;
        for part in &mut observed.parts {
            let limit = &self.schedule.limits[part.limit].limit;
            part.shadow_denied = decision.shadow_denied.iter().any(|denied| std::ptr::eq(*denied, &**limit));
        }
        let source = decision.source;
        self.hold(observed, source, true);
        let response = async {
            match request.holds {
                Some(holds) => sleep(holds).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            () = response => {}
            () = self.ends.cancelled() => {}
        }
        if let Some(debts) = decision.debts.take() {
            let settled = std::cell::RefCell::new(Vec::new());
            let settling = debts.settle(|place, later| {
                let due = match later {
                    Later::Pay if request.pays > 0 => Due::Pay(request.pays),
                    Later::Refund if request.refunds => Due::Refund,
                    _ => Due::Nothing,
                };
                settled.borrow_mut().push((place, due));
                due
            });
            for (place, due) in settled.into_inner() {
                match due {
                    Due::Pay(units) => observed.parts[place].paid = units,
                    Due::Refund => observed.parts[place].refunded = true,
                    Due::Nothing => {}
                }
            }
            if let Some(settling) = settling {
                let result = settling.await;
                self.world.note(|| {
                    format!("gateway {}: response of {:?} settled: {}", request.gateway, observed.began, result.is_ok())
                });
            }
        }
        // As the gateway does: the permits are released when the request has ended.
        self.hold(observed, source, false);
        drop(decision.leases.take());
    }

    fn hold(&self, observed: &Observed, source: DecidedBy, begins: bool) {
        let mut held = self.held.lock().unwrap();
        for part in &observed.parts {
            let spec = &self.schedule.limits[part.limit];
            if spec.permits().is_none() || part.shadow_denied {
                continue;
            }
            let held = held.entry(part.state.clone()).or_default();
            let count = if source == DecidedBy::Store { &mut held.by_store } else { &mut held.by_share };
            *count = if begins { *count + 1 } else { *count - 1 };
            if !begins {
                held.ended.push(self.world.now());
            }
            let running = held.by_store + held.by_share;
            if running > held.most {
                (held.most, held.most_at) = (running, self.world.now());
            }
        }
    }
}
