//! One contract for every store, and the proof that script and model are the same.

mod support;

use std::collections::HashSet;
use std::io::Read;
use std::sync::Arc;

use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use sluicegate::limit::algorithm::fixed_window::{FixedWindow, Start};
use sluicegate::limit::algorithm::sliding_buckets::SlidingBuckets;
use sluicegate::limit::algorithm::sliding_log::SlidingLog;
use sluicegate::limit::algorithm::sliding_window::SlidingWindow;
use sluicegate::limit::algorithm::token_bucket::TokenBucket;
use sluicegate::limit::algorithm::{Outcome, Rule, Status};
use sluicegate::limit::calendar::Windows;
use sluicegate::limit::clock::Clock;
use sluicegate::limit::key::{Bucket, Identity, IdentityHasher, Key};
use sluicegate::limit::memory::MemoryStore;
use sluicegate::limit::quota::Calendar;
use sluicegate::limit::redis::script::Parts;
use sluicegate::limit::redis::{RedisSettings, RedisStore};
use sluicegate::limit::store::{Charge, Mode, Operation, Store, Verdict};
use support::redis::Redis;

const SECOND: u64 = 1_000_000;
/// A whole number of minutes, in 2027.
const START: u64 = 30_000_000 * 60 * SECOND;

/// Both stores under one virtual clock.
struct Stores {
    memory: MemoryStore,
    redis: RedisStore,
    clock: Clock,
}

impl Stores {
    fn new(server: &Redis, prefix: &str) -> Stores {
        let clock = Clock::manual(START);
        let settings = RedisSettings {
            client: server.client(),
            prefix: prefix.to_owned(),
            connections: 1,
            connect_timeout: support::PATIENCE,
            scripts: vec![Parts::of([])],
        };
        let redis = RedisStore::new(&settings, clock.clone());
        Stores { memory: MemoryStore::new(1_000_000, clock.clone()), redis, clock }
    }

    /// Asks both; they must agree in every field.
    async fn call(&self, operation: Operation, charges: &[Charge<'_>]) -> Verdict {
        let script = self.redis.call(operation, charges).await.unwrap();
        let model = self.memory.call(operation, charges).await.unwrap();
        assert_eq!(script, model, "script and model differ: {operation:?} at {} of {charges:#?}", self.clock.now_us());
        script
    }

    /// What a single unit or more would get at another instant, without a trace.
    async fn peek_at(&self, now: u64, charge: Charge<'_>, cost: u64) -> Outcome {
        let before = self.clock.now_us();
        self.clock.set(now);
        let verdict = self.call(Operation::Peek, &[Charge { cost, mode: Mode::Binding, ..charge }]).await;
        self.clock.set(before);
        verdict.outcomes[0]
    }
}

fn bucket(count: u64, window: u64, burst: u64) -> Rule {
    let quota = sluicegate::limit::quota::Quota { count, window_us: Some(window), calendar: None };
    Rule::TokenBucket(TokenBucket::new(quota, burst).unwrap())
}

fn window(limit: u64, window: u64, start: Start) -> Rule {
    Rule::FixedWindow(FixedWindow { limit, window, start })
}

const ALIGNED: Start = Start::Aligned { phase: 0 };

/// A limit of the tests: an algorithm and a name of its own.
struct Limit {
    rule: Rule,
    bucket: Bucket,
}

impl Limit {
    fn new(name: &str, rule: Rule) -> Limit {
        let bucket = Bucket::new(&IdentityHasher::new("test"), name, &rule.shape());
        Limit { rule, bucket }
    }

    fn charge(&self, identity: u128, cost: u64) -> Charge<'_> {
        Charge {
            key: Key { identity: Identity(identity), bucket: &self.bucket },
            rule: &self.rule,
            cost,
            mode: Mode::Binding,
            lease: 0,
        }
    }
}

#[tokio::test]
async fn every_algorithm_admits_its_limit_and_says_when_to_come_back() {
    let server = Redis::start();
    let stores = Stores::new(&server, "contract");
    for (name, rule, retry) in [
        ("bucket", bucket(10, 60 * SECOND, 3), 6 * SECOND),
        ("aligned", window(3, 60 * SECOND, ALIGNED), 50 * SECOND),
        ("first", window(3, 60 * SECOND, Start::FirstRequest), 60 * SECOND),
        ("log", Rule::SlidingLog(SlidingLog { limit: 3, window: 60 * SECOND }), 60 * SECOND),
        // A third of the full window before has gone 20 s into the next one.
        ("window", Rule::SlidingWindow(SlidingWindow { limit: 3, window: 60 * SECOND, unit: 1 }), 70 * SECOND),
        // All in the part that began at 6 s: it is out of reach 66 s later.
        ("buckets", Rule::SlidingBuckets(SlidingBuckets { limit: 3, window: 60 * SECOND, buckets: 10 }), 62 * SECOND),
    ] {
        stores.clock.set(START + 10 * SECOND);
        let limit = Limit::new(name, rule);
        for left in [2, 1, 0] {
            let verdict = stores.call(Operation::Check, &[limit.charge(1, 1)]).await;
            assert_eq!((verdict.granted, verdict.outcomes[0].remaining), (1, left), "{name}");
        }
        let denied = stores.call(Operation::Check, &[limit.charge(1, 1)]).await;
        assert_eq!(
            (denied.granted, denied.outcomes[0].status, denied.outcomes[0].retry_us),
            (0, Status::Over, retry),
            "{name}"
        );
        let other = stores.call(Operation::Check, &[limit.charge(2, 1)]).await;
        assert_eq!(other.granted, 1, "{name}: another identity has its own");
        stores.clock.set(START + 10 * SECOND + retry - 1);
        assert_eq!(stores.call(Operation::Check, &[limit.charge(1, 1)]).await.granted, 0, "{name}: one µs too early");
        stores.clock.set(START + 10 * SECOND + retry);
        assert_eq!(stores.call(Operation::Check, &[limit.charge(1, 1)]).await.granted, 1, "{name}: as promised");
        let never = stores.call(Operation::Check, &[limit.charge(1, 4)]).await;
        assert_eq!(never.outcomes[0].status, Status::Never, "{name}: a cost beyond the limit");
    }
    server.assert_every_key_expires();
}

#[tokio::test]
async fn a_request_is_charged_to_all_limits_or_none() {
    let server = Redis::start();
    let stores = Stores::new(&server, "all-or-none");
    let broad = Limit::new("broad", bucket(100, 3600 * SECOND, 100));
    let narrow = Limit::new("narrow", window(2, 60 * SECOND, ALIGNED));
    let both = [broad.charge(1, 1), narrow.charge(1, 1)];
    for _ in 0..2 {
        assert_eq!(stores.call(Operation::Check, &both).await.granted, 1);
    }
    for _ in 0..10 {
        let denied = stores.call(Operation::Check, &both).await;
        assert_eq!((denied.granted, denied.outcomes[0].remaining, denied.outcomes[1].remaining), (0, 98, 0));
    }
}

#[tokio::test]
async fn shadow_limits_never_deny_and_post_paid_ones_are_charged_later() {
    let server = Redis::start();
    let stores = Stores::new(&server, "modes");
    let limit = Limit::new("limit", window(1, 60 * SECOND, ALIGNED));
    let shadow = Charge { mode: Mode::Shadow, ..limit.charge(1, 1) };
    for expected in [Status::Ok, Status::Over, Status::Over] {
        let verdict = stores.call(Operation::Check, &[shadow]).await;
        assert_eq!((verdict.granted, verdict.outcomes[0].status), (1, expected));
    }
    let tokens = Limit::new("tokens", bucket(100, 60 * SECOND, 100));
    let post_paid = Charge { mode: Mode::PostPaid, ..tokens.charge(1, 70) };
    for (remaining, after) in [(100, 30), (30, 0)] {
        let verdict = stores.call(Operation::Check, &[post_paid]).await;
        assert_eq!((verdict.granted, verdict.outcomes[0].remaining), (1, remaining));
        assert_eq!(stores.call(Operation::Charge, &[post_paid]).await.outcomes[0].remaining, after);
    }
    let denied = stores.call(Operation::Check, &[post_paid]).await;
    // A debt of 140 in a bucket of 100: 41 tokens until one is free, at 600 ms each.
    assert_eq!((denied.granted, denied.outcomes[0].retry_us), (0, 41 * 600_000));
}

#[tokio::test]
async fn calendar_windows_open_when_the_calendar_says() {
    let server = Redis::start();
    let stores = Stores::new(&server, "calendar");
    let month = Start::Calendar(Arc::new(Windows::new(Calendar::Month, "Europe/Berlin").unwrap()));
    let limit = Limit::new("month", Rule::FixedWindow(FixedWindow { limit: 2, window: 0, start: month }));
    let at = |text: &str| stores.clock.set(text.parse::<jiff::Timestamp>().unwrap().as_microsecond() as u64);
    at("2027-01-31T22:59:58Z");
    let last = stores.call(Operation::Check, &[limit.charge(1, 2)]).await;
    assert_eq!(
        (last.granted, last.outcomes[0].reset_us),
        (1, 2 * SECOND),
        "January in Berlin ends an hour before UTC's"
    );
    at("2027-01-31T22:59:59Z");
    assert_eq!(stores.call(Operation::Check, &[limit.charge(1, 1)]).await.outcomes[0].retry_us, SECOND);
    at("2027-01-31T23:00:00Z");
    let february = stores.call(Operation::Check, &[limit.charge(1, 1)]).await;
    assert_eq!((february.granted, february.outcomes[0].reset_us), (1, 28 * 86_400 * SECOND));
    assert!(server.keys()[0].ends_with(":month:kmonth@Europe/Berlin"), "{:?}", server.keys());
}

#[tokio::test]
async fn a_gateway_whose_clock_is_days_off_asks_redis_for_the_time() {
    let server = Redis::start();
    // The boundaries are reckoned for a year ago, the server has the time of today.
    let settings = RedisSettings {
        client: server.client(),
        prefix: "off".to_owned(),
        connections: 1,
        connect_timeout: support::PATIENCE,
        scripts: Vec::new(),
    };
    let clock = Clock::Skewed(-365 * 86_400 * SECOND as i64);
    let store = RedisStore::new(&settings, clock);
    let day = Start::Calendar(Arc::new(Windows::new(Calendar::Day, "UTC").unwrap()));
    let limit = Limit::new("day", Rule::FixedWindow(FixedWindow { limit: 2, window: 0, start: day }));
    for left in [1, 0] {
        let verdict = store.call(Operation::Check, &[limit.charge(1, 1)]).await.unwrap();
        assert_eq!((verdict.granted, verdict.outcomes[0].remaining), (1, left));
    }
    assert_eq!(store.call(Operation::Check, &[limit.charge(1, 1)]).await.unwrap().granted, 0);
}

#[tokio::test]
async fn bad_arguments_write_nothing() {
    let server = Redis::start();
    let text = &sluicegate::limit::redis::script::script(Parts::of([&bucket(1, SECOND, 1)])).text;
    let mut connection = server.connection();
    for arguments in [
        &["C", "0", "0", "B", "-", "1", "1", "1", "1"][..],
        &["Z", "0", "0", "B", "-", "1", "1", "1", "1", "0"],
        &["C", "0", "0", "Q", "-", "1", "1", "1", "1", "0"],
        &["C", "0", "0", "B", "-", "x", "1", "1", "1", "0"],
        &["C", "soon", "0", "B", "-", "1", "1", "1", "1", "0"],
    ] {
        let reply: Result<redis::Value, _> =
            redis::cmd("EVAL").arg(text).arg(1).arg("k").arg(arguments).query(&mut connection);
        assert_eq!(reply.unwrap_err().code(), Some("RLARG"), "{arguments:?}");
    }
    assert!(server.keys().is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn parallel_clients_are_admitted_exactly() {
    let server = Redis::start();
    let stores = Arc::new(Stores::new(&server, "parallel"));
    for (name, rule) in [
        ("bucket", bucket(50, 3600 * SECOND, 50)),
        ("aligned", window(50, 3600 * SECOND, ALIGNED)),
        ("log", Rule::SlidingLog(SlidingLog { limit: 50, window: 3600 * SECOND })),
    ] {
        let (limit, other) = (Limit::new(name, rule), Limit::new("other", bucket(1000, SECOND, 1000)));
        let limits = Arc::new((limit, other));
        let tasks: Vec<_> = (0..16)
            .map(|_| {
                let (stores, limits) = (stores.clone(), limits.clone());
                tokio::spawn(async move {
                    let (mut memory, mut redis) = (0, 0);
                    for _ in 0..50 {
                        let charges = [limits.0.charge(1, 1), limits.1.charge(1, 1)];
                        memory += stores.memory.call(Operation::Check, &charges).await.unwrap().granted;
                        redis += stores.redis.call(Operation::Check, &charges).await.unwrap().granted;
                    }
                    (memory, redis)
                })
            })
            .collect();
        let mut sum = (0, 0);
        for task in tasks {
            let (memory, redis) = task.await.unwrap();
            sum = (sum.0 + memory, sum.1 + redis);
        }
        assert_eq!(sum, (50, 50), "{name}: memory and Redis");
    }
}

#[test]
fn the_memory_store_is_bounded_and_forgets() {
    let clock = Clock::manual(START);
    let store = MemoryStore::new(1000, clock.clone());
    let limit = Limit::new("limit", window(10, 60 * SECOND, ALIGNED));
    // Spread over all shards as hashes are.
    let identity = |number: u64| IdentityHasher::new("test").hash(&number.to_be_bytes()).0;
    for number in 0..20_000 {
        store.decide(Operation::Check, &[limit.charge(identity(number), 1)]);
        assert!(store.len() <= 1024, "{} states", store.len());
    }
    clock.set(START + 120 * SECOND);
    for number in 0..2000 {
        store.decide(Operation::Check, &[limit.charge(identity(number % 50), 1)]);
    }
    let live = store.len();
    assert!(live < 1024, "sweeping makes room: {live}");
}

/// Most admitted in any 60 s (half open) to a client that knows the algorithm: `first` units at `start`, everything it can
/// get from `greedy` on. Instants in ms after a whole minute.
fn most_admitted(rule: &Rule, start: u64, first: u64, greedy: u64) -> usize {
    let clock = Clock::manual(START);
    let store = MemoryStore::new(1000, clock.clone());
    let limit = Limit::new("limit", rule.clone());
    let mut admitted = std::collections::VecDeque::new();
    let mut most = 0;
    let mut ask = |ms: u64| {
        clock.set(START + ms * 1000);
        if store.decide(Operation::Check, &[limit.charge(1, 1)]).granted == 0 {
            return false;
        }
        admitted.push_back(ms);
        while admitted[0] + 60_000 <= ms {
            admitted.pop_front();
        }
        most = most.max(admitted.len());
        true
    };
    for _ in 0..first {
        ask(start);
    }
    for ms in (greedy..greedy + 130_000).step_by(5) {
        while ask(ms) {}
    }
    most
}

#[test]
fn the_worst_case_table_is_what_a_greedy_client_gets() {
    let log = SlidingLog { limit: 100, window: 60 * SECOND };
    let sliding = SlidingWindow { limit: 100, window: 60 * SECOND, unit: 1 };
    let buckets = SlidingBuckets { limit: 100, window: 60 * SECOND, buckets: 10 };
    for (name, rule, expected) in [
        ("fixed-window", window(100, 60 * SECOND, ALIGNED), 200),
        ("first-request", window(100, 60 * SECOND, Start::FirstRequest), 199),
        ("sliding-window", Rule::SlidingWindow(sliding), 199),
        ("token-bucket, burst 100", bucket(100, 60 * SECOND, 100), 199),
        ("token-bucket, burst 10", bucket(100, 60 * SECOND, 10), 109),
        ("sliding-buckets", Rule::SlidingBuckets(buckets), 100),
        ("sliding-log", Rule::SlidingLog(log), 100),
    ] {
        // Greedy from the start of a window, from its end, and greedy at its end after a request that opened it.
        let strategies = [(0, 0, 0), (0, 0, 59_995), (0, 1, 59_995), (30_000, 1, 89_995), (0, 50, 30_000)];
        let most = strategies.map(|(start, first, greedy)| most_admitted(&rule, start, first, greedy));
        assert_eq!(most.iter().max(), Some(&expected), "{name}: {most:?}");
    }
}

// ---- the property test: script against model, virtual clock --------------------------------------

#[derive(Debug, Clone)]
struct Step {
    operation: u8,
    costs: [u64; 3],
    advance: i64,
    identity: u128,
    modes: [u8; 3],
    burst: Option<u64>,
}

fn rule() -> impl Strategy<Value = Rule> {
    // Windows long enough that no key expires in real time while a case runs.
    let windows = prop_oneof![Just(60 * SECOND), Just(90_000_900), Just(3600 * SECOND), Just(86_400 * SECOND)];
    (0..7u8, 1..12u64, windows, 1..12u64, 0..3u64).prop_map(|(kind, count, length, burst, phase)| match kind {
        0 => bucket(count, length.max(count * 6 * SECOND), burst),
        1 => window(count, length, Start::Aligned { phase: phase * 1_234_567 }),
        2 => window(count, length, Start::FirstRequest),
        3 => Rule::SlidingLog(SlidingLog { limit: count, window: length }),
        4 => Rule::SlidingWindow(SlidingWindow {
            limit: count,
            window: length,
            unit: [1, 100, length / 100][phase as usize],
        }),
        5 => Rule::FixedWindow(FixedWindow {
            limit: count,
            window: 0,
            start: Start::Calendar(Arc::new(
                Windows::new([Calendar::Day, Calendar::Week][phase as usize % 2], "Europe/Berlin").unwrap(),
            )),
        }),
        _ => Rule::SlidingBuckets(SlidingBuckets { limit: count, window: length, buckets: [1, 4, 12][phase as usize] }),
    })
}

fn step() -> impl Strategy<Value = Step> {
    let advance = prop_oneof![
        4 => Just(0i64),
        6 => 0..20_000_000i64,
        3 => 0..100_000_000i64,
        1 => 0..90_000_000_000i64,
        1 => -200_000_000..0i64,
    ];
    let operation = prop_oneof![8 => Just(0u8), 2 => Just(1), 2 => Just(2), 2 => Just(3), 2 => Just(4)];
    let modes = [0, 1, 2].map(|_| prop_oneof![8 => Just(0u8), 1 => Just(1), 1 => Just(2)]);
    let burst = prop_oneof![12 => Just(None), 1 => (1..15u64).prop_map(Some)];
    (operation, [0..5u64, 0..5, 0..14], advance, 0..2u128, modes, burst).prop_map(
        |(operation, costs, advance, identity, modes, burst)| Step {
            operation,
            costs,
            advance,
            identity,
            modes,
            burst,
        },
    )
}

/// Changes a limit's size, never its shape.
fn resize(rule: &mut Rule, size: u64) {
    match rule {
        Rule::TokenBucket(rule) => rule.burst = size,
        Rule::FixedWindow(rule) => rule.limit = size,
        Rule::SlidingWindow(rule) => rule.limit = size,
        Rule::SlidingBuckets(rule) => rule.limit = size,
        Rule::SlidingLog(rule) => rule.limit = size,
        Rule::Concurrency(rule) => rule.limit = size,
    }
}

#[test]
fn script_equals_model() {
    let server = Redis::start();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let seed: [u8; 32] = match std::env::var("SEED") {
        Ok(text) => std::array::from_fn(|index| u8::from_str_radix(&text[2 * index..2 * index + 2], 16).unwrap()),
        Err(_) => {
            let mut seed = [0; 32];
            std::fs::File::open("/dev/urandom").unwrap().read_exact(&mut seed).unwrap();
            seed
        }
    };
    println!("SEED={}", seed.map(|byte| format!("{byte:02x}")).concat());
    let config = Config { cases: 200, failure_persistence: None, ..Config::default() };
    let mut runner = TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::ChaCha, &seed));
    let mut case = 0;
    let cases = std::cell::RefCell::new(&mut case);
    let input = (prop::collection::vec(rule(), 1..4), prop::collection::vec(step(), 80));
    let result = runner.run(&input, |(rules, steps)| {
        let prefix = {
            let mut case = cases.borrow_mut();
            **case += 1;
            format!("case{case}")
        };
        runtime.block_on(run_case(&server, &prefix, rules, &steps));
        Ok(())
    });
    result.unwrap_or_else(|error| panic!("{error}"));
}

async fn run_case(server: &Redis, prefix: &str, rules: Vec<Rule>, steps: &[Step]) {
    let stores = Stores::new(server, prefix);
    let mut connection = server.connection();
    // No two keys in one shard of the memory store: sweeping one would forget another for good, and the clock may go back.
    let mut shards = HashSet::new();
    let mut names = (0..).map(|number| format!("limit{number}"));
    let mut limits: Vec<Limit> = Vec::new();
    for rule in rules {
        let limit = names.by_ref().map(|name| Limit::new(&name, rule.clone())).find(|limit| {
            let own = [0, 1].map(|identity| limit.charge(identity, 1).key.local() % 64);
            own[0] != own[1] && own.iter().all(|shard| shards.insert(*shard))
        });
        limits.extend(limit);
    }
    let mut admitted_at = START;
    for step in steps {
        if let Some(size) = step.burst {
            limits.iter_mut().for_each(|limit| resize(&mut limit.rule, size));
        }
        let now = (stores.clock.now_us() as i64 + step.advance) as u64;
        stores.clock.set(now);
        let charges: Vec<Charge<'_>> = limits
            .iter()
            .enumerate()
            .map(|(index, limit)| Charge {
                mode: [Mode::Binding, Mode::Shadow, Mode::PostPaid][usize::from(step.modes[index])],
                ..limit.charge(step.identity, step.costs[index])
            })
            .collect();
        let units: Vec<_> =
            charges.iter().map(|charge| Charge { cost: step.costs[2], mode: Mode::Binding, ..*charge }).collect();
        let before = dump(&mut connection, prefix);
        let verdict = match step.operation {
            0 => stores.call(Operation::Check, &charges).await,
            1 => stores.call(Operation::Peek, &charges).await,
            2 => stores.call(Operation::Charge, &charges).await,
            3 => stores.call(Operation::Refund { charged_at: admitted_at }, &charges).await,
            _ => stores.call(Operation::Take, &units).await,
        };
        assert_eq!(verdict.now_us, now);
        let wrote_nothing = step.operation == 1 || (verdict.granted == 0 && step.advance >= 0);
        if verdict.granted > 0 && step.operation == 0 {
            admitted_at = now;
        }
        if wrote_nothing && !went_back(steps, step) {
            assert_eq!(before, dump(&mut connection, prefix), "denied or peeked, yet something was written");
        }
        for (charge, outcome) in charges.iter().zip(&verdict.outcomes) {
            if step.operation == 0 && outcome.status == Status::Over && charge.mode == Mode::Binding {
                let early = stores.peek_at(now + outcome.retry_us - 1, *charge, charge.cost).await;
                let right = stores.peek_at(now + outcome.retry_us, *charge, charge.cost).await;
                assert_eq!(
                    (early.status, right.status),
                    (Status::Over, Status::Ok),
                    "the retry is exact: {charge:?} {outcome:?}"
                );
            }
            let state = stores.peek_at(now, *charge, 0).await;
            let fits = stores.peek_at(now, *charge, state.remaining).await;
            let beyond = stores.peek_at(now, *charge, state.remaining + 1).await;
            // A debt left by an unconditional charge, or by a smaller limit, has no room even for nothing.
            assert_eq!(
                fits.status == Status::Ok,
                state.status == Status::Ok,
                "what remains fits: {charge:?} {state:?}"
            );
            assert_ne!(beyond.status, Status::Ok, "more than remains does not fit: {charge:?} {state:?}");
            let mut key = Vec::new();
            charge.key.write(prefix, &mut key);
            let ttl: i64 = redis::cmd("PTTL").arg(&key[..]).query(&mut connection).unwrap();
            assert!(ttl != -1, "a key that never expires");
            let bound = match step.advance < 0 || went_back(steps, step) {
                true => i64::MAX,
                false => (longest_reset(&charge.rule.clone(), &state) / 1000 + 1001) as i64,
            };
            assert!(ttl <= bound, "the TTL {ttl} ms is more than the reset {bound} ms: {charge:?} {state:?}");
        }
    }
}

/// A log keeps its TTL from its last write: at most a window from then.
fn longest_reset(rule: &Rule, state: &Outcome) -> u64 {
    match rule {
        Rule::SlidingLog(rule) => rule.window,
        Rule::Concurrency(rule) => rule.lease,
        Rule::SlidingWindow(rule) => 2 * rule.window,
        Rule::SlidingBuckets(rule) => 2 * rule.window,
        Rule::FixedWindow(FixedWindow { start: Start::Calendar(_), .. }) => 7 * 25 * 3600 * SECOND,
        // A key that holds an old window may outlive it: garbage, not state.
        Rule::FixedWindow(rule) => rule.window.max(state.reset_us),
        Rule::TokenBucket(_) => u64::MAX / 4000,
    }
}

/// Whether the clock was set back at some step up to this one: states may then lie in the future and be mended.
fn went_back(steps: &[Step], until: &Step) -> bool {
    steps.iter().take_while(|step| !std::ptr::eq(*step, until)).chain([until]).any(|step| step.advance < 0)
}

/// Every key with its value.
fn dump(connection: &mut redis::Connection, prefix: &str) -> Vec<(String, Vec<u8>)> {
    let mut keys: Vec<String> = redis::cmd("KEYS").arg(format!("{prefix}:*")).query(connection).unwrap();
    keys.sort();
    keys.into_iter()
        .map(|key| {
            let value: Option<Vec<u8>> = redis::cmd("DUMP").arg(&key).query(connection).unwrap();
            (key, value.unwrap_or_default())
        })
        .collect()
}
