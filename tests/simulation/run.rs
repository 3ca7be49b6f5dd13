//! Run a schedule: load with faults, then recovery, then probes that check what the limits admit.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use sluicegate::limiter::algorithm::Rule;
use sluicegate::limiter::algorithm::concurrency::Concurrency;
use sluicegate::limiter::store::DecidedBy;
use tokio::runtime::Builder;
use tokio::task::JoinHandle;
use tokio::time::{Instant, advance, sleep, sleep_until, timeout};
use tokio_util::sync::CancellationToken;

use crate::gateway::{ClientOutcome, Gateway, LoadGenerator, ObservedRequest};
use crate::invariants::{self, Violation};
use crate::network::SimulatedNetwork;
use crate::overrides::Watch;
use crate::schedule::{Class, Fault, Incident, Request, Schedule, ScheduledLimit};
use crate::store::{StateId, charge};

/// The permit of an ended request must be released within this time, even if the first attempt to release it fails.
const RELEASED_WITHIN: Duration = Duration::from_millis(1500);

/// The maximum virtual time of a schedule.
const MAX_VIRTUAL_TIME: Duration = Duration::from_secs(24 * 3600);

/// The result of a schedule.
pub struct Played {
    pub violations: Vec<Violation>,
    pub requests: usize,
    /// Events with their virtual times.
    pub trace: Vec<(Duration, String)>,
}

thread_local! {
    /// The panics of the schedule that this thread runs, including those in tasks of the limiter.
    static PANICS: RefCell<Option<Vec<String>>> = const { RefCell::new(None) };
}

/// Collect the panics of threads that run schedules.
pub fn collect_panics() {
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        let collected = PANICS.with_borrow_mut(|panics| panics.as_mut().map(|panics| panics.push(info.to_string())));
        if collected.is_none() {
            usual(info);
        }
    }));
}

/// Run a schedule from its beginning.
pub fn play(seed: u64, trace: bool) -> Played {
    PANICS.set(Some(Vec::new()));
    let runtime = Builder::new_current_thread().enable_time().start_paused(true).build().expect("a runtime");
    let whole = || {
        let schedule = Arc::new(Schedule::new(seed));
        runtime.block_on(async {
            let play = Run::new(schedule, trace);
            let world = play.client.network.clone();
            // Without this timeout, a schedule in which all tasks wait would never end.
            timeout(MAX_VIRTUAL_TIME, play.play()).await.unwrap_or_else(|_| Played {
                violations: vec![Violation::new(
                    "no hang",
                    format!("the schedule does not end within {MAX_VIRTUAL_TIME:?}"),
                )],
                requests: 0,
                trace: world.trace(),
            })
        })
    };
    let nothing = |_| Played { violations: Vec::new(), requests: 0, trace: Vec::new() };
    let mut played = catch_unwind(AssertUnwindSafe(whole)).unwrap_or_else(nothing);
    drop(runtime);
    for panic in PANICS.take().unwrap_or_default() {
        played.violations.push(Violation::new("no panic", panic));
    }
    played
}

struct Run {
    client: Arc<LoadGenerator>,
    started_at: Instant,
    requests: Vec<ObservedRequest>,
    violations: Vec<Violation>,
}

impl Run {
    fn new(schedule: Arc<Schedule>, trace: bool) -> Run {
        let began = Instant::now();
        let world = Arc::new(SimulatedNetwork::new(&schedule, trace));
        let gateways = (0..schedule.gateways).map(|index| Gateway::start(index, &schedule, &world)).collect();
        let held = Mutex::default();
        let client = Arc::new(LoadGenerator {
            schedule,
            network: world,
            gateways,
            end_responses: CancellationToken::new(),
            held_permits: held,
        });
        Run { client, started_at: began, requests: Vec::new(), violations: Vec::new() }
    }

    fn schedule(&self) -> &Schedule {
        &self.client.schedule
    }

    fn report(&mut self, invariant: &'static str, message: String) {
        self.violations.push(Violation::new(invariant, message));
    }

    async fn play(mut self) -> Played {
        let client = self.client.clone();
        let schedule = client.schedule.clone();
        let requests: Vec<_> = schedule.requests.iter().map(|request| self.send_at(request.clone())).collect();
        let watch = Watch::start(&client);
        let faults = tokio::spawn(play_faults(client.network.clone(), schedule.incidents.clone()));
        sleep_until(self.started_at + schedule.last_request() + 2 * schedule.timeout).await;
        faults.await.expect("the faults end");
        if !schedule.is_up() || matches!(schedule.class, Class::Slow | Class::Stalled | Class::Uneven) {
            self.recover().await;
        }
        if self.has_permits() {
            if schedule.is_up() {
                // Wait until the permits of late calls are released.
                sleep(Duration::from_secs(3)).await;
            }
            self.check_permits("recovery");
            if !schedule.is_up() {
                let longest = schedule.limits.iter().filter_map(|spec| spec.concurrency()).map(|rule| rule.ttl).max();
                sleep(Duration::from_micros(longest.unwrap_or_default()) + Duration::from_secs(2)).await;
                self.check_permits("one permit TTL after recovery");
            }
        }
        client.end_responses.cancel();
        for request in requests {
            // If this task panicked, the panic hook has recorded the panic.
            self.requests.extend(request.await);
        }
        // Unused tokens are returned after 1 s, and failed releases are retried after 1 s.
        sleep(Duration::from_millis(2500) + 4 * schedule.timeout).await;
        if self.has_permits() {
            self.check_permits("the end of all requests");
        }
        let checked = invariants::History {
            schedule: &schedule,
            now_us: client.network.now_us(),
            store: &client.network.state().store,
            requests: &self.requests,
            held_permits: &client.held_permits.lock().unwrap(),
            open_counts: client.gateways.iter().map(|gateway| gateway.open_count()).collect(),
        }
        .check();
        self.violations.extend(checked);
        self.violations.extend(watch.finish(&client).await);
        self.probe().await;
        for (index, limiter) in client.gateways.iter().flat_map(|gateway| &gateway.workers).enumerate() {
            if timeout(Duration::from_secs(60), limiter.flush_pending()).await.is_err() {
                self.report("no hang", format!("limiter {index} does not settle within 60 s"));
            }
        }
        Played { violations: self.violations, requests: self.requests.len(), trace: client.network.trace() }
    }

    fn send_at(&self, request: Request) -> JoinHandle<ObservedRequest> {
        let (client, at) = (self.client.clone(), self.started_at + request.at);
        tokio::spawn(async move {
            sleep_until(at).await;
            client.request(&request).await
        })
    }

    fn has_permits(&self) -> bool {
        self.schedule().limits.iter().any(|spec| spec.concurrency().is_some())
    }

    /// Send some requests from each worker, so that breakers close and lost connections are replaced.
    async fn recover(&mut self) {
        let schedule = self.client.schedule.clone();
        let has_dead_connections =
            |incident: &Incident| matches!(incident.fault, Fault::LoseReplies | Fault::LoseRequests);
        let seconds = if schedule.incidents.iter().any(has_dead_connections) { 15 } else { 4 };
        let heartbeat = schedule.limits.len() - 1;
        for _ in 0..10 * seconds {
            for gateway in 0..schedule.gateways {
                for worker in 0..schedule.workers {
                    let request = self.single_request(heartbeat, gateway, worker, 0, Some(Duration::ZERO));
                    let client = self.client.clone();
                    drop(tokio::spawn(async move { client.request(&request).await }));
                }
            }
            sleep(Duration::from_millis(100)).await;
        }
    }

    fn single_request(
        &self,
        limit: usize,
        gateway: usize,
        worker: usize,
        client: u64,
        holds: Option<Duration>,
    ) -> Request {
        let (at, route) = (Duration::ZERO, vec![limit]);
        Request {
            at,
            gateway,
            worker,
            route,
            client,
            response_time: holds,
            client_timeout: None,
            response_cost: 1,
            is_refunded: false,
        }
    }

    /// Check that the store counts exactly the permits of running requests.
    fn check_permits(&mut self, when: &str) {
        let permits: BTreeMap<_, _> = self.client.held_permits.lock().unwrap().clone();
        for (state, held) in permits {
            let live = self.live_permits(&state);
            let running = held.by_store + held.by_share;
            let now = self.client.network.now();
            let ttl_us = self.permit_ttl_us(&state);
            let brought_back =
                self.client.network.state().store.brought_back(&state, ttl_us, self.client.network.now_us());
            let ending = held.released_at.iter().filter(|ended| **ended + RELEASED_WITHIN > now).count() as u64;
            if live > running + ending + brought_back {
                let message = format!("{when}: the store counts {live} permits of {state:x?}, {running} requests run");
                self.report("permits of requests that have ended are released", message);
            }
            // Permits may expire during an outage.
            let may_be_lost = when == "recovery" && !self.schedule().is_up();
            if live < held.by_store && !may_be_lost {
                let message = format!(
                    "{when}: the store counts {live} permits of {state:x?}, {} requests run that it admitted",
                    held.by_store
                );
                self.report("permits of running requests are kept", message);
            }
        }
    }

    fn spec(&self, state: &StateId) -> &ScheduledLimit {
        self.schedule().limits.iter().find(|spec| *spec.limit.name == *state.0).expect("a limit")
    }

    fn permit_ttl_us(&self, state: &StateId) -> u64 {
        self.spec(state).concurrency().expect("permits").ttl
    }

    fn live_permits(&self, state: &StateId) -> u64 {
        const MANY: u64 = 1 << 20;
        let (spec, ttl) = (self.spec(state), self.permit_ttl_us(state));
        let rule = Rule::Concurrency(Concurrency { limit: MANY, ttl });
        let now_us = self.client.network.now_us();
        MANY - self
            .client
            .network
            .state()
            .store
            .peek(now_us, charge(state, &spec.limit.default_variant.state_name, &rule, 1))
            .remaining
    }

    /// Check that every limit admits its quota after all windows have ended, and admits a client that has waited for
    /// the retry delay.
    async fn probe(&mut self) {
        let schedule = self.client.schedule.clone();
        let longest = schedule.limits.iter().map(|spec| spec.reset_us()).max().unwrap_or_default();
        sleep(Duration::from_micros(longest) + Duration::from_secs(2)).await;
        for (index, spec) in schedule.limits.iter().enumerate() {
            if spec.limit.shadow
                || spec.is_calendar()
                || spec.goes_into_debt()
                || spec.limit.name.starts_with("heartbeat")
            {
                continue;
            }
            let is_concurrency = spec.concurrency().is_some();
            let max_requests = (spec.rule().capacity() / spec.cost).min(40);
            for number in 0..max_requests {
                let outcome = self.check_once(index).await;
                if outcome != ClientOutcome::Admitted(DecidedBy::Store) {
                    let message =
                        format!("request {number} of {max_requests} on limit {index} in an empty window: {outcome:?}");
                    self.report("no client starves", message);
                    break;
                }
            }
            // The second denial usually comes from the denial cache.
            sleep(Duration::from_millis(3)).await;
            self.check_once(index).await;
            let ClientOutcome::Denied { retry_us: Some(retry_us), .. } = self.check_once(index).await else { continue };
            if is_concurrency {
                continue;
            }
            sleep(Duration::from_micros(retry_us)).await;
            let told = self.check_once(index).await;
            if told != ClientOutcome::Admitted(DecidedBy::Store) {
                let message =
                    format!("limit {index}: denied for {retry_us} µs, after which the same client is told {told:?}");
                self.report("a denial is not longer than told", message);
            }
        }
    }

    /// Send a request of a new client to a limit. Return the outcome. An admitted request holds a permit for 1 s.
    async fn check_once(&self, limit: usize) -> ClientOutcome {
        let checks = self.client.checks(&[limit], 0);
        match self.client.gateways[0].workers[0].check(&checks).await {
            Ok(decision) if decision.admitted => {
                let permits = decision.permits;
                tokio::spawn(async move {
                    sleep(Duration::from_secs(1)).await;
                    drop(permits);
                });
                ClientOutcome::Admitted(decision.decided_by)
            }
            Ok(decision) => {
                let (source, remembered, retry_us) = (decision.decided_by, decision.is_from_cache, decision.retry_us());
                ClientOutcome::Denied { decided_by: source, is_from_cache: remembered, retry_us }
            }
            Err(_) => ClientOutcome::Unavailable,
        }
    }
}

async fn play_faults(world: Arc<SimulatedNetwork>, mut incidents: Vec<Incident>) {
    incidents.sort_by_key(|incident| incident.at);
    let started_at = Instant::now() - world.now();
    for incident in incidents {
        sleep_until(started_at + incident.at).await;
        world.begin_fault(incident);
        match incident.fault {
            Fault::Stall(length) => {
                let end = Instant::now() + incident.duration;
                while Instant::now() < end {
                    // No task runs during this time, so timers and replies are late together.
                    advance(length).await;
                    sleep(Duration::from_millis(5)).await;
                }
            }
            _ => sleep(incident.duration).await,
        }
        world.end_fault(incident);
    }
}
