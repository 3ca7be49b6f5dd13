//! A schedule: gateways, limits, requests and faults, all derived from a seed.

use std::sync::Arc;
use std::time::Duration;

use sluicegate::limiter::algorithm::concurrency::Concurrency;
use sluicegate::limiter::algorithm::fixed_window::{FixedWindow, WindowStart};
use sluicegate::limiter::algorithm::sliding_buckets::SlidingBuckets;
use sluicegate::limiter::algorithm::sliding_log::{MAX_LOG_ENTRIES, SlidingLog};
use sluicegate::limiter::algorithm::sliding_window::SlidingWindow;
use sluicegate::limiter::algorithm::token_bucket::TokenBucket;
use sluicegate::limiter::algorithm::{MAX_REQUEST_WEIGHT, Rule};
use sluicegate::limiter::gateway_count::GatewayCount;
use sluicegate::limiter::key::{Identity, IdentityHasher};
use sluicegate::limiter::quota::{CalendarUnit, Quota};
use sluicegate::limiter::spec::{LimitSpec, LocalShare, OnStoreError};
use sluicegate::limiter::usage::UsageDays;

use crate::overrides::{self, Change};
use crate::random::Random;

/// The time zone of calendar windows. A new day begins within the schedule.
pub const TIME_ZONE: &str = "America/Los_Angeles";

/// How the store behaves while requests are sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Class {
    /// The store replies within a quarter of the timeout.
    Healthy,
    /// The store replies within half of the timeout, but connecting takes longer than the timeout.
    Far,
    /// The store replies within a quarter of the timeout, except for a period in which replies take longer than the
    /// timeout.
    Slow,
    /// The store is healthy, but gets more requests at once than it can process within the timeout.
    Overload,
    /// The store is healthy, but gets more requests with expensive checks than it can process within the timeout. Each
    /// request has its own identity for the expensive limits.
    Costly,
    /// The store is healthy and closes idle connections.
    IdleClose,
    /// The store is a healthy cluster of three masters.
    Cluster,
    /// The store is healthy, but the event loops of the gateways stall repeatedly, for longer than the timeout.
    Stalled,
    /// Each gateway has one healthy connection for calls and one for PING. On the others, replies take longer than the
    /// timeout.
    Uneven,
    /// The store fails.
    Faulty,
    /// The store is a cluster of three masters, one of which fails.
    FaultyMaster,
}

/// A fault of the store or of the network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// Commands arrive this much later.
    Delay(Duration),
    /// On the connections of each gateway except the first and the one for PING, replies take this much longer.
    DelaySome(Duration),
    /// Event loops stall for this time, then run for some milliseconds, repeatedly.
    Stall(Duration),
    /// Replies are lost on open connections and on connections opened during the fault.
    LoseReplies,
    /// Commands are lost on open connections and on connections opened during the fault.
    LoseRequests,
    /// All connections are reset. Commands that the store has not run yet are lost.
    ResetBefore,
    /// All connections are reset. Commands in flight are run, but their replies are lost.
    ResetAfter,
    /// The store stops, as with SIGSTOP. When it continues, it runs all buffered commands.
    Hang,
    /// The store restarts without its state.
    RestartEmpty,
    /// The store restarts with its state.
    RestartWithState,
    /// The store fails. A replica takes over, which lacks the writes of the last period of this length.
    Failover(Duration),
    /// Writes are rejected with OOM.
    OutOfMemory,
    /// Connections are reset, and new connections are refused.
    RefuseConnects,
    /// Connections are reset, and new connections take this long to open.
    SlowConnects(Duration),
}

impl Fault {
    /// Return whether the store loses writes.
    pub fn loses_state(self) -> bool {
        matches!(self, Fault::RestartEmpty | Fault::Failover(_))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Incident {
    pub at: Duration,
    pub duration: Duration,
    pub fault: Fault,
    /// The affected server, or `None` if all servers are affected.
    pub node: Option<usize>,
}

impl Incident {
    pub fn affects(&self, node: usize) -> bool {
        self.node.is_none_or(|own| own == node)
    }
}

/// When the cost of a request is charged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CostMode {
    /// The check charges the cost.
    Upfront,
    /// The check charges the cost, which may be refunded later.
    Refundable,
    /// The cost is charged after the response.
    Deferred,
    /// The check charges the cost. If the limit denies the request, the cost is charged as a debt.
    Always,
}

#[derive(Debug)]
pub struct ScheduledLimit {
    pub limit: Arc<LimitSpec>,
    pub cost_mode: CostMode,
    /// Whether all clients share one state.
    pub is_global: bool,
    pub cost: u64,
}

impl ScheduledLimit {
    pub fn rule(&self) -> &Rule {
        &self.limit.default_variant.rule
    }

    pub fn window_us(&self) -> u64 {
        self.limit.default_variant.quota.window_us.unwrap_or(0)
    }

    pub fn identity(&self, client: u64) -> Identity {
        let client = if self.is_global { u64::MAX } else { client };
        IdentityHasher::new("simulation").hash(&client.to_le_bytes())
    }

    /// Return whether a request may charge more than the limit has left.
    pub fn goes_into_debt(&self) -> bool {
        matches!(self.cost_mode, CostMode::Deferred | CostMode::Always)
    }

    /// Return whether the limit has calendar windows.
    pub fn is_calendar(&self) -> bool {
        matches!(self.rule(), Rule::FixedWindow(FixedWindow { start: WindowStart::Calendar(_), .. }))
    }

    pub fn concurrency(&self) -> Option<&Concurrency> {
        if let Rule::Concurrency(rule) = self.rule() { Some(rule) } else { None }
    }

    /// Return the time after which a state has no effect, in µs.
    pub fn reset_us(&self) -> u64 {
        match self.rule() {
            Rule::TokenBucket(rule) => (rule.burst * rule.parts).div_ceil(rule.refill),
            Rule::Concurrency(rule) => rule.ttl,
            _ if self.is_calendar() => 0,
            _ => 2 * self.window_us(),
        }
    }
}

#[derive(Debug, Clone)]
pub struct Request {
    pub at: Duration,
    pub gateway: usize,
    pub worker: usize,
    /// The indices of the limits that apply to the request.
    pub route: Vec<usize>,
    pub client: u64,
    /// The duration of the response. With `None`, it lasts until the end of the schedule.
    pub response_time: Option<Duration>,
    /// The time from the request until the client disconnects, or `None` if the client does not disconnect.
    pub client_timeout: Option<Duration>,
    /// The deferred cost that the response reports.
    pub response_cost: u64,
    /// Whether the request is refunded after the response.
    pub is_refunded: bool,
}

#[derive(Debug)]
pub struct Schedule {
    pub seed: u64,
    pub class: Class,
    pub gateways: usize,
    pub workers: usize,
    /// The number of servers of the store.
    pub nodes: usize,
    pub connections: u32,
    pub timeout: Duration,
    /// The round-trip time between a gateway and the store.
    pub round_trip: Duration,
    /// The maximum random addition to the round-trip time.
    pub jitter: Duration,
    /// The time in which the store decides a token bucket, µs. Other algorithms need a multiple of this time.
    pub service_us: u64,
    /// The idle time after which the store closes a connection.
    pub idle_close: Option<Duration>,
    /// Whether the store runs the Lua scripts instead of their Rust implementation.
    pub lua: bool,
    /// The offset of each gateway's clock, µs.
    pub skews_us: Vec<i64>,
    pub limits: Vec<ScheduledLimit>,
    pub requests: Vec<Request>,
    pub incidents: Vec<Incident>,
    /// The changes of overrides by administrators, in order of time.
    pub overrides: Vec<Change>,
}

/// The feature that most limits of a schedule test.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Theme {
    Mixed,
    Denials,
    Prefetch,
    Permits,
    Refunds,
}

const fn millis(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// Requests begin after this time. By then, the gateways have connected.
pub const WARM_UP: Duration = millis(2000);

impl Schedule {
    pub fn new(seed: u64) -> Schedule {
        let random = &mut Random::new(seed);
        let class = match random.in_range(0..100) {
            0..28 => Class::Healthy,
            28..32 => Class::Costly,
            32..36 => Class::Far,
            36..44 => Class::Slow,
            44..46 => Class::Overload,
            46..51 => Class::IdleClose,
            51..60 => Class::Cluster,
            60..63 => Class::Stalled,
            63..66 => Class::Uneven,
            66..74 => Class::FaultyMaster,
            _ => Class::Faulty,
        };
        let theme = match random.in_range(0..100) {
            // In a cluster, half of the schedules have two limits whose states are often on different masters.
            0..50 if matches!(class, Class::Cluster | Class::FaultyMaster) => Theme::Denials,
            0..25 => Theme::Mixed,
            25..50 => Theme::Prefetch,
            50..75 => Theme::Permits,
            _ => Theme::Refunds,
        };
        let timeout = match class {
            // Use short timeouts, so that connecting takes at most 1 s even while the store is slow.
            Class::Slow => millis(random.pick(&[50, 100])),
            _ => millis(random.pick(&[50, 50, 100, 250])),
        };
        let (round_trip, jitter) = match class {
            Class::Far => (timeout * 35 / 100, Duration::ZERO),
            // A check that one master charges and another master denies takes two round trips. Connecting takes four.
            Class::Cluster | Class::FaultyMaster | Class::IdleClose | Class::Uneven => {
                (timeout / 100 * random.in_range(0..12) as u32, Duration::ZERO)
            }
            _ => (timeout / 100 * random.in_range(0..20) as u32, timeout / 100 * random.pick(&[0, 0, 5])),
        };
        let mut schedule = Schedule {
            seed,
            class,
            gateways: if class == Class::Uneven { 1 } else { random.in_range(1..4) as usize },
            workers: if class == Class::Uneven { 1 } else { random.in_range(1..3) as usize },
            nodes: if matches!(class, Class::Cluster | Class::FaultyMaster) { 3 } else { 1 },
            connections: if class == Class::Uneven { 3 } else { random.in_range(1..3) as u32 },
            timeout,
            round_trip,
            jitter,
            service_us: match class {
                Class::Overload => 20,
                Class::Costly => random.in_range(3..7),
                _ => random.pick(&[0, 5]),
            },
            idle_close: (class == Class::IdleClose).then(|| millis(random.in_range(50..1500))),
            lua: false,
            skews_us: Vec::new(),
            limits: Vec::new(),
            requests: Vec::new(),
            incidents: Vec::new(),
            overrides: Vec::new(),
        };
        // Use a separate random generator, so that additions here do not change the rest of a schedule.
        let more = &mut Random::new(seed.rotate_left(32));
        schedule.lua = more.is_chosen(15);
        let calendar = schedule.lua && more.is_chosen(40);
        schedule.skews_us = vec![0; schedule.gateways];
        if calendar {
            // The clock of some gateways may be wrong by 4 s or by more than two days. The store then corrects the
            // window boundaries, which takes two round trips.
            schedule.round_trip /= 2;
            schedule.skews_us.fill_with(|| more.pick(&[0, 4_000_000, -4_000_000, 200_000_000_000]));
        }
        if class == Class::Costly {
            schedule.add_costly_limits(random);
        } else {
            schedule.add_limits(random, theme, calendar);
        }
        schedule.add_requests(random, theme);
        match class {
            Class::Overload => schedule.add_overload(random),
            Class::Costly => schedule.add_costly_requests(random),
            Class::Slow => {
                let fault = Fault::Delay(timeout + millis(random.in_range(1..50)));
                schedule.incidents.push(Incident {
                    at: schedule.random_time(random),
                    duration: millis(random.in_range(20..1500)),
                    fault,
                    node: None,
                });
            }
            Class::Stalled => schedule.add_under_load(random, 2, Fault::Stall),
            Class::Uneven => schedule.add_under_load(random, 4, Fault::DelaySome),
            Class::Faulty => schedule.add_faults(random),
            Class::FaultyMaster => schedule.add_master_fault(random),
            Class::Healthy | Class::Far | Class::IdleClose | Class::Cluster => {}
        }
        let share = match class {
            Class::Healthy | Class::Cluster => 5,
            Class::FaultyMaster => 20,
            Class::Faulty => 35,
            Class::Far
            | Class::Slow
            | Class::Overload
            | Class::Costly
            | Class::IdleClose
            | Class::Stalled
            | Class::Uneven => 0,
        };
        if more.is_chosen(share) {
            schedule.add_overrides(more);
        }
        // The Rust implementation does not know the order of writes, so it cannot simulate a lack of memory.
        schedule.lua |= schedule.incidents.iter().any(|incident| incident.fault == Fault::OutOfMemory);
        let usage = &mut Random::new(seed.rotate_left(16));
        for spec in schedule.limits.iter_mut().filter(|spec| spec.concurrency().is_none()) {
            if usage.is_chosen(50) {
                let limit = Arc::get_mut(&mut spec.limit).expect("no other owner");
                limit.usage = Some(Arc::new(UsageDays::new(TIME_ZONE).expect("a zone")));
            }
        }
        schedule.requests.sort_by_key(|request| request.at);
        schedule.limits.push(heartbeat_limit(schedule.gateways as u64));
        schedule
    }

    /// Return a description of the schedule.
    pub fn summary(&self) -> Vec<String> {
        let Schedule { class, gateways, workers, connections, timeout, round_trip, jitter, .. } = self;
        let decided_by = if self.lua { "Lua" } else { "the twin" };
        let mut lines = vec![format!(
            "{class:?}, decided by {decided_by}: {gateways} gateways with {workers} workers of {connections} connections, timeout {timeout:?}, \
             round trip {round_trip:?} + {jitter:?}, idle connections closed after {:?}",
            self.idle_close
        )];
        for ScheduledLimit { limit, cost_mode: used, is_global: global, cost } in &self.limits {
            let (scope, shadow) =
                (if *global { "all" } else { "each client" }, if limit.shadow { ", shadow" } else { "" });
            let (name, on_store_error, advance) = (&limit.name, limit.on_store_error, limit.prefetch);
            let rule = &limit.default_variant.rule;
            lines.push(format!(
                "{name} of {scope}{shadow}: {rule:?}, {used:?} cost {cost}, {on_store_error:?}, prefetch {advance}, usage {}",
                limit.usage.is_some()
            ));
        }
        lines.extend(self.incidents.iter().map(|incident| format!("{incident:?}")));
        lines
    }

    /// Return the time of the last request.
    pub fn last_request(&self) -> Duration {
        self.requests.iter().map(|request| request.at).max().unwrap_or(WARM_UP)
    }

    /// Return whether the store is always reachable, even if it is slow.
    pub fn is_up(&self) -> bool {
        !matches!(self.class, Class::Faulty | Class::FaultyMaster)
    }

    /// Return whether the store can decide every check within the timeout.
    pub fn is_prompt(&self) -> bool {
        matches!(self.class, Class::Healthy | Class::IdleClose | Class::Cluster)
    }

    pub fn state_losses(&self) -> u64 {
        self.incidents.iter().filter(|incident| incident.fault.loses_state()).count() as u64
    }

    fn random_time(&self, random: &mut Random) -> Duration {
        WARM_UP + millis(random.in_range(0..(self.last_request() - WARM_UP).as_millis() as u64 + 1))
    }

    fn add_limits(&mut self, random: &mut Random, theme: Theme, calendar: bool) {
        let count = match theme {
            Theme::Prefetch => random.pick(&[1, 2, 2]),
            Theme::Denials => 2,
            Theme::Mixed | Theme::Permits | Theme::Refunds => random.in_range(1..4),
        };
        for index in 0..count {
            let is_concurrency = match theme {
                Theme::Permits => index == 0,
                Theme::Mixed => random.is_chosen(15),
                Theme::Prefetch | Theme::Refunds | Theme::Denials => false,
            };
            let cost_mode = match theme {
                _ if is_concurrency || theme == Theme::Denials => CostMode::Upfront,
                Theme::Refunds => random.pick(&[CostMode::Refundable, CostMode::Refundable, CostMode::Deferred]),
                Theme::Prefetch => random.pick(&[CostMode::Upfront, CostMode::Upfront, CostMode::Refundable]),
                _ => random.pick(&[
                    CostMode::Upfront,
                    CostMode::Upfront,
                    CostMode::Refundable,
                    CostMode::Deferred,
                    CostMode::Always,
                ]),
            };
            let cost = match (theme, is_concurrency) {
                (_, true) | (Theme::Prefetch | Theme::Denials, _) => 1,
                _ => random.pick(&[1, 1, 2, 3]),
            };
            let (quota, rule) = match is_concurrency {
                true => random_concurrency_rule(random),
                false => random_counting_rule(random, cost, theme),
            };
            let (quota, rule) = if calendar { by_calendar(quota, rule) } else { (quota, rule) };
            let prefetch = match theme {
                Theme::Prefetch => random.in_range(1..5).min(rule.capacity()),
                _ => 0,
            };
            // If there are two limits, the first is global and the second is per client.
            let is_global = match theme {
                Theme::Prefetch | Theme::Denials => index == 0,
                _ => random.is_chosen(50),
            };
            let local_share =
                LocalShare { gateways: Arc::new(GatewayCount::at_least(self.gateways as u64)), max_cost: cost };
            let (name, hasher) = (format!("limit{index}"), IdentityHasher::new("simulation"));
            let limit = LimitSpec::new(&hasher, &name, quota, rule, local_share);
            let limit = LimitSpec {
                on_store_error: random.pick(&[
                    OnStoreError::Local,
                    OnStoreError::Local,
                    OnStoreError::Allow,
                    OnStoreError::Deny,
                ]),
                shadow: theme != Theme::Prefetch && random.is_chosen(8),
                prefetch,
                ..limit
            };
            self.limits.push(ScheduledLimit { limit: Arc::new(limit), cost_mode, is_global, cost });
        }
    }

    /// Add a limit that all requests share, and expensive limits. Together, they are as expensive as a route may be.
    fn add_costly_limits(&mut self, random: &mut Random) {
        let quota = |count, window_ms: u64| Quota { count, window_us: Some(window_ms * 1000), calendar: None };
        let shared = quota(random.in_range(50..500), 30_000);
        let shared_rule = match random.in_range(0..3) {
            0 => Rule::FixedWindow(FixedWindow::new(shared, WindowStart::Aligned { phase: 0 }).unwrap()),
            1 => Rule::SlidingLog(SlidingLog::new(shared).unwrap()),
            _ => Rule::TokenBucket(TokenBucket::new(shared, shared.count).unwrap()),
        };
        let mut weight = shared_rule.weight(shared_rule.capacity());
        self.push_costly_limit(random, shared, shared_rule, 1, true);
        let cost = random.pick(&[1, 1, 200, 1000, 10_000]);
        for _ in 0..random.in_range(1..9) {
            let own = quota(cost * random.in_range(1..3).min(MAX_LOG_ENTRIES / cost), random.pick(&[2000, 60_000]));
            let rule = match random.in_range(0..4) {
                0 => Rule::SlidingBuckets(SlidingBuckets::new(own, 1000).unwrap()),
                1 => Rule::TokenBucket(TokenBucket::new(own, own.count).unwrap()),
                _ => Rule::SlidingLog(SlidingLog::new(own).unwrap()),
            };
            weight += rule.weight(rule.capacity());
            if weight <= MAX_REQUEST_WEIGHT {
                self.push_costly_limit(random, own, rule, cost, false);
            }
        }
    }

    fn push_costly_limit(&mut self, random: &mut Random, quota: Quota, rule: Rule, cost: u64, is_global: bool) {
        let local_share =
            LocalShare { gateways: Arc::new(GatewayCount::at_least(self.gateways as u64)), max_cost: cost };
        let (name, hasher) = (format!("limit{}", self.limits.len()), IdentityHasher::new("simulation"));
        let limit = LimitSpec::new(&hasher, &name, quota, rule, local_share);
        let on_store_error = random.pick(&[OnStoreError::Local, OnStoreError::Allow, OnStoreError::Deny]);
        let limit = Arc::new(LimitSpec { on_store_error, ..limit });
        self.limits.push(ScheduledLimit { limit, cost_mode: CostMode::Upfront, is_global, cost });
    }

    /// Send requests with new identities to the first gateway, up to 20 each millisecond, for some hundred milliseconds.
    fn add_costly_requests(&mut self, random: &mut Random) {
        let (at, route) = (self.random_time(random), (0..self.limits.len()).collect::<Vec<_>>());
        let per_ms = random.in_range(1..21);
        for client in 0..random.in_range(500..3000) {
            self.requests.push(Request {
                at: at + millis(client / per_ms),
                gateway: 0,
                worker: random.in_range(0..self.workers as u64) as usize,
                route: route.clone(),
                client: 1000 + client,
                response_time: Some(millis(10)),
                client_timeout: None,
                response_cost: 1,
                is_refunded: false,
            });
        }
    }

    fn add_requests(&mut self, random: &mut Random, theme: Theme) {
        let clients = if theme == Theme::Prefetch { random.in_range(2..10) } else { random.in_range(1..6) };
        let duration_ms = random.pick(&[500, 2000, 4000, 8000]);
        let groups = if theme == Theme::Prefetch { random.in_range(10..60) } else { random.in_range(5..40) };
        let bursts = random.pick(&[0, 20, 60]).max(if theme == Theme::Prefetch { 60 } else { 0 });
        let cancel_percent = random.pick(&[0, 0, 0, 20]);
        let all: Vec<usize> = (0..self.limits.len()).collect();
        let all_limits_percent = if theme == Theme::Denials { random.pick(&[70, 100]) } else { 70 };
        for _ in 0..groups {
            let at = WARM_UP + millis(random.in_range(0..duration_ms));
            let client = random.in_range(0..clients);
            let (gateway, worker) =
                (random.in_range(0..self.gateways as u64) as usize, random.in_range(0..self.workers as u64) as usize);
            // Most requests have all limits of the schedule. The others have one of them.
            let route = if random.is_chosen(all_limits_percent) {
                all.clone()
            } else {
                vec![random.in_range(0..all.len() as u64) as usize]
            };
            let burst = if random.is_chosen(bursts) { random.in_range(2..9) } else { 1 };
            for _ in 0..burst {
                let response_time = match random.in_range(0..10) {
                    0 if theme == Theme::Permits => None,
                    0..3 if theme == Theme::Permits => Some(millis(random.in_range(500..12_000))),
                    _ => Some(millis(random.in_range(0..400))),
                };
                self.requests.push(Request {
                    at,
                    gateway,
                    worker,
                    route: route.clone(),
                    client,
                    response_time,
                    client_timeout: random
                        .is_chosen(cancel_percent)
                        .then(|| millis(random.in_range(0..self.timeout.as_millis() as u64))),
                    response_cost: random.in_range(0..4),
                    is_refunded: random.is_chosen(50),
                });
            }
        }
    }

    /// Add more requests at one time than the store can decide within the timeout. Each has its own client.
    fn add_overload(&mut self, random: &mut Random) {
        let (at, route) = (self.random_time(random), vec![0]);
        for client in 0..random.in_range(1100..2500) {
            self.requests.push(Request {
                at,
                gateway: 0,
                worker: 0,
                route: route.clone(),
                client: 1000 + client,
                response_time: Some(millis(10)),
                client_timeout: None,
                response_cost: 1,
                is_refunded: false,
            });
        }
    }

    /// Add a fault that lasts longer than the timeout, and a request every `gap_ms` during the fault.
    fn add_under_load(&mut self, random: &mut Random, gap_ms: u64, fault: impl Fn(Duration) -> Fault) {
        let (at, duration) = (self.random_time(random), millis(random.in_range(300..1500)));
        self.incidents.push(Incident {
            at,
            duration,
            fault: fault(self.timeout + millis(random.in_range(1..50))),
            node: None,
        });
        for index in 0..duration.as_millis() as u64 / gap_ms {
            self.requests.push(Request {
                at: at + millis(gap_ms * index),
                gateway: 0,
                worker: 0,
                route: vec![0],
                client: 1000 + index,
                response_time: Some(millis(10)),
                client_timeout: None,
                response_cost: 1,
                is_refunded: false,
            });
        }
    }

    fn add_faults(&mut self, random: &mut Random) {
        let mut earliest = WARM_UP;
        for _ in 0..random.in_range(1..3) {
            let at = earliest.max(self.random_time(random));
            let fault = match random.in_range(0..12) {
                0 => Fault::Delay(self.timeout + millis(random.in_range(1..500))),
                1 => Fault::LoseReplies,
                2 => Fault::LoseRequests,
                3 => Fault::ResetBefore,
                4 => Fault::ResetAfter,
                5 | 6 => Fault::Hang,
                7 => Fault::RestartEmpty,
                8 => Fault::RestartWithState,
                9 => Fault::Failover(millis(random.in_range(10..1000))),
                10 => Fault::OutOfMemory,
                _ if random.is_chosen(50) => Fault::RefuseConnects,
                _ => Fault::SlowConnects(millis(random.in_range(20..900))),
            };
            let duration = match fault {
                Fault::ResetBefore | Fault::ResetAfter => Duration::ZERO,
                Fault::Hang => millis(random.pick(&[
                    random.clone().in_range(10..300),
                    random.clone().in_range(300..4000),
                    random.clone().in_range(4000..15_000),
                ])),
                _ => millis(random.pick(&[
                    random.clone().in_range(10..300),
                    random.clone().in_range(300..2000),
                    random.clone().in_range(2000..9000),
                ])),
            };
            self.incidents.push(Incident { at, duration, fault, node: None });
            earliest = at + duration + millis(random.in_range(10..3000));
        }
    }

    /// Add changes of overrides. If the store is faulty, it also loses writes after its other faults.
    fn add_overrides(&mut self, random: &mut Random) {
        let mut end = self.last_request().max(WARM_UP + millis(3000));
        if let Some(last) = self.incidents.iter().map(|each| each.at + each.duration).max() {
            end = end.max(last);
            if self.class == Class::Faulty {
                let fault = match random.is_chosen(50) {
                    true => Fault::RestartEmpty,
                    false => Fault::Failover(millis(random.in_range(10..4000))),
                };
                let at = last + millis(random.in_range(10..4000));
                self.incidents.push(Incident { at, duration: millis(random.in_range(10..2000)), fault, node: None });
                end = end.max(at);
            }
        }
        for _ in 0..random.in_range(3..12) {
            let at = WARM_UP + millis(random.in_range(0..(end - WARM_UP).as_millis() as u64));
            let lasts = match random.in_range(0..10) {
                0..3 => None,
                3..6 => Some(millis(random.in_range(1000..8000))),
                _ => Some(millis(random.in_range(60_000..600_000))),
            };
            let gateway = random.in_range(0..self.gateways as u64) as usize;
            self.overrides.push(Change { at, gateway, client: random.in_range(0..overrides::CLIENTS), lasts });
        }
        self.overrides.sort_by_key(|change| change.at);
    }

    /// Add a fault of one master: it hangs, loses messages, or resets or refuses connections. It keeps its state.
    fn add_master_fault(&mut self, random: &mut Random) {
        let fault = random.pick(&[
            Fault::Hang,
            Fault::LoseReplies,
            Fault::LoseRequests,
            Fault::ResetBefore,
            Fault::ResetAfter,
            Fault::RefuseConnects,
        ]);
        let duration = match fault {
            Fault::ResetBefore | Fault::ResetAfter => Duration::ZERO,
            _ => millis(random.in_range(10..4000)),
        };
        let (at, node) = (self.random_time(random), Some(random.in_range(0..self.nodes as u64) as usize));
        self.incidents.push(Incident { at, duration, fault, node });
    }
}

/// Return a limit that is never exceeded. Its requests show that gateways use the store.
fn heartbeat_limit(gateways: u64) -> ScheduledLimit {
    let quota = Quota { count: 1_000_000, window_us: Some(1_000_000), calendar: None };
    let rule = Rule::FixedWindow(FixedWindow::new(quota, WindowStart::Aligned { phase: 0 }).unwrap());
    let local_share = LocalShare { gateways: Arc::new(GatewayCount::at_least(gateways)), max_cost: 1 };
    let hasher = IdentityHasher::new("simulation");
    let limit = LimitSpec::new(&hasher, "heartbeat", quota, rule, local_share);
    let limit = LimitSpec { on_store_error: OnStoreError::Deny, ..limit };
    ScheduledLimit { limit: Arc::new(limit), cost_mode: CostMode::Upfront, is_global: true, cost: 1 }
}

/// Turn an aligned fixed window into a calendar day.
fn by_calendar(quota: Quota, rule: Rule) -> (Quota, Rule) {
    match rule {
        Rule::FixedWindow(FixedWindow { start: WindowStart::Aligned { .. }, .. }) => {
            let quota = Quota { window_us: Some(86_400_000_000), calendar: Some(CalendarUnit::Day), ..quota };
            let start = WindowStart::calendar(CalendarUnit::Day, TIME_ZONE).expect("a zone");
            (quota, Rule::FixedWindow(FixedWindow::new(quota, start).unwrap()))
        }
        rule => (quota, rule),
    }
}

fn random_concurrency_rule(random: &mut Random) -> (Quota, Rule) {
    let limit = random.in_range(1..6);
    let ttl = random.pick(&[3, 6, 12]) * 1_000_000;
    (Quota { count: limit, window_us: None, calendar: None }, Rule::Concurrency(Concurrency { limit, ttl }))
}

fn random_counting_rule(random: &mut Random, cost: u64, theme: Theme) -> (Quota, Rule) {
    let count = match theme {
        Theme::Prefetch => {
            let most = random.pick(&[10, 30, 30]);
            random.in_range(4..most)
        }
        _ => random.in_range(cost..cost * 12 + 1),
    };
    let window = match theme {
        Theme::Prefetch => random.pick(&[500, 1000, 2000, 10_000]),
        Theme::Refunds => random.pick(&[1000, 10_000, 30_000]),
        Theme::Mixed | Theme::Permits | Theme::Denials => random.pick(&[500, 1000, 2000, 10_000, 30_000]),
    } * 1000;
    let quota = Quota { count, window_us: Some(window), calendar: None };
    let rule = match random.in_range(0..if theme == Theme::Refunds { 9 } else { 6 }) {
        1 => Rule::FixedWindow(FixedWindow::new(quota, WindowStart::Aligned { phase: 0 }).unwrap()),
        2 => Rule::FixedWindow(FixedWindow::new(quota, WindowStart::FirstRequest).unwrap()),
        3 => Rule::SlidingWindow(SlidingWindow::new(quota).unwrap()),
        4 => Rule::SlidingBuckets(SlidingBuckets::new(quota, random.pick(&[1, 4, 10])).unwrap()),
        5 => Rule::SlidingLog(SlidingLog::new(quota).unwrap()),
        _ => Rule::TokenBucket(TokenBucket::new(quota, random.in_range(cost..count.max(cost) + 1)).unwrap()),
    };
    (quota, rule)
}
