//! The Redis store and the memory store under one virtual clock, and limits for tests.

use std::collections::{BTreeMap, HashSet};
use std::future::{Future, poll_fn};
use std::sync::Arc;
use std::task::Poll;

use jiff::ToSpan;
use jiff::civil::Date;
use sluicegate::clock::{Clock, monotonic};
use sluicegate::limiter::algorithm::concurrency::Concurrency;
use sluicegate::limiter::algorithm::fixed_window::{FixedWindow, WindowStart};
use sluicegate::limiter::algorithm::sliding_buckets::SlidingBuckets;
use sluicegate::limiter::algorithm::sliding_log::SlidingLog;
use sluicegate::limiter::algorithm::sliding_window::SlidingWindow;
use sluicegate::limiter::algorithm::token_bucket::TokenBucket;
use sluicegate::limiter::algorithm::{Outcome, Rule};
use sluicegate::limiter::key::{Identity, IdentityHasher, Key, StateName};
use sluicegate::limiter::memory::MemoryStore;
use sluicegate::limiter::quota::CalendarWindows;
use sluicegate::limiter::quota::{CalendarUnit, EXACT_INTEGER_LIMIT, Quota};
use sluicegate::limiter::redis::batcher::ServerStore;
use sluicegate::limiter::redis::server::RedisEndpoint;
use sluicegate::limiter::redis::{RedisSettings, StateLayout};
use sluicegate::limiter::usage::{RETENTION_DAYS, UsageDays, UsageFields, UsageKey, UsageQuery};
use sluicegate::limiter::verdict::{Charge, ChargeMode, Operation, StoreError, Verdict};

use super::MAX_WAIT;
use super::redis::Redis;

pub const SECOND: u64 = 1_000_000;
/// A full minute, in 2027, in µs since the Unix epoch.
pub const START: u64 = 30_000_000 * 60 * SECOND;
pub const ALIGNED: WindowStart = WindowStart::Aligned { phase: 0 };

/// The Redis store and the memory store under one virtual clock.
pub struct Stores {
    pub memory: MemoryStore,
    pub redis: ServerStore,
    pub clock: Clock,
}

impl Stores {
    pub fn new(server: &Redis, prefix: &str) -> Stores {
        Stores::with_layout(server, prefix, StateLayout::default())
    }

    pub fn with_layout(server: &Redis, prefix: &str, layout: StateLayout) -> Stores {
        let clock = Clock::manual(START);
        let redis = store_with_layout(server, prefix, clock.clone(), layout);
        Stores { memory: MemoryStore::new(1_000_000, clock.clone()), redis, clock }
    }

    /// Call both stores. Assert that their verdicts are equal in every field.
    pub async fn call(&self, operation: Operation, charges: &[Charge<'_>]) -> Verdict {
        let script = call(&self.redis, operation, charges).await.unwrap();
        let model = self.memory.decide(operation, charges);
        assert_eq!(
            script,
            model,
            "invariant 1, script equals model: {operation:?} at {} of {charges:#?}",
            self.clock.now_us()
        );
        script
    }

    /// Check one token of one limit in both stores.
    pub async fn check(&self, limit: &Limit) -> Outcome {
        self.call(Operation::Check, &[limit.charge(1, 1)]).await.outcomes[0]
    }

    /// Check several requests at once in both stores.
    pub async fn check_all(&self, requests: &[Vec<Charge<'_>>]) -> Vec<Verdict> {
        all(requests.iter().map(|charges| self.call(Operation::Check, charges))).await
    }

    /// Peek at each group of charges at the time `at`, in µs since the Unix epoch. Return one verdict per group. The
    /// peeks run concurrently and charge nothing.
    pub async fn peek(&self, at: u64, groups: &[Vec<Charge<'_>>]) -> Vec<Verdict> {
        let now = self.clock.now_us();
        self.clock.set(at);
        let script = all(groups.iter().map(|charges| self.call(Operation::Peek, charges))).await;
        self.clock.set(now);
        script
    }
}

/// Call a Redis store, with its timeout.
pub async fn call(store: &ServerStore, operation: Operation, charges: &[Charge<'_>]) -> Result<Verdict, StoreError> {
    store.call(monotonic() + store.timeout(), false, operation, charges).await
}

/// Wait for all futures.
pub async fn all<F: Future>(futures: impl IntoIterator<Item = F>) -> Vec<F::Output> {
    let mut waiting: Vec<_> = futures.into_iter().map(|future| (Some(Box::pin(future)), None)).collect();
    poll_fn(|context| {
        for (future, output) in &mut waiting {
            if let Some(Poll::Ready(value)) = future.as_mut().map(|future| future.as_mut().poll(context)) {
                (*future, *output) = (None, Some(value));
            }
        }
        if waiting.iter().all(|(future, _)| future.is_none()) { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    waiting.into_iter().filter_map(|(_, output)| output).collect()
}

/// Return a Redis store. It loads its scripts when the server replies NOSCRIPT.
pub fn redis_store(server: &Redis, prefix: &str, clock: Clock) -> ServerStore {
    store_with_layout(server, prefix, clock, StateLayout::default())
}

/// Return a Redis store that writes states where `layout` says.
pub fn store_with_layout(server: &Redis, prefix: &str, clock: Clock, layout: StateLayout) -> ServerStore {
    let settings = RedisSettings {
        prefix: prefix.to_owned(),
        timeout: MAX_WAIT,
        connect_timeout: MAX_WAIT,
        clock,
        layout: Arc::new(layout),
        ..RedisSettings::default()
    };
    ServerStore::new(&settings, RedisEndpoint::Single(server.client()), Arc::default(), Arc::default())
}

pub fn quota(count: u64, window: u64) -> Quota {
    Quota { count, window_us: Some(window), calendar: None }
}

pub fn bucket(count: u64, window: u64, burst: u64) -> Rule {
    Rule::TokenBucket(TokenBucket::new(quota(count, window), burst).unwrap())
}

pub fn window(limit: u64, window: u64, start: WindowStart) -> Rule {
    Rule::FixedWindow(FixedWindow { limit, window, start })
}

pub fn calendar(limit: u64, unit: CalendarUnit, zone: &str) -> Rule {
    window(limit, 0, WindowStart::Calendar(Arc::new(CalendarWindows::new(unit, zone).unwrap())))
}

pub fn sliding(limit: u64, window: u64, unit: u64) -> Rule {
    Rule::SlidingWindow(SlidingWindow { limit, window, unit })
}

pub fn buckets(limit: u64, window: u64, buckets: u64) -> Rule {
    Rule::SlidingBuckets(SlidingBuckets { limit, window, buckets })
}

pub fn log(limit: u64, window: u64) -> Rule {
    Rule::SlidingLog(SlidingLog { limit, window })
}

pub fn concurrency(limit: u64, lease: u64) -> Rule {
    Rule::Concurrency(Concurrency { limit, ttl: lease })
}

/// Return each algorithm that counts over time, with this quota. The calendar window admits `limit` per year.
pub fn every_algorithm(limit: u64, length: u64) -> [(&'static str, Rule); 7] {
    [
        ("token-bucket", bucket(limit, length, limit)),
        ("fixed-window", window(limit, length, ALIGNED)),
        ("first-request", window(limit, length, WindowStart::FirstRequest)),
        ("calendar", calendar(limit, CalendarUnit::Year, "Europe/Berlin")),
        ("sliding-window", sliding(limit, length, 100)),
        ("sliding-buckets", buckets(limit, length, 10)),
        ("sliding-log", log(limit, length)),
    ]
}

/// Return the largest and the most unusual limits that the configuration accepts.
pub fn extremes() -> Vec<Rule> {
    let numbers = (0..16).map(|power| 10u64.pow(power)).chain((0..53).map(|bit| 1 << bit));
    let counts: Vec<_> = numbers.flat_map(|n| [n.saturating_sub(1), n, n + 1, n / 7 * 9]).collect();
    let windows = [1, 7, 250, 1000, 999_983, 60_000, 86_400_000, 3650 * 86_400_000].map(|ms| ms * 1000);
    let mut rules = Vec::new();
    for window in windows {
        let quotas = || {
            counts.iter().filter(|count| (1..EXACT_INTEGER_LIMIT).contains(*count)).map(|count| quota(*count, window))
        };
        // Take the largest accepted limits, because they may cause an overflow.
        let mut largest = |rule: &dyn Fn(Quota) -> Option<Rule>| {
            let mut accepted: Vec<_> = quotas().filter_map(rule).collect();
            accepted.sort_by_key(Rule::capacity);
            rules.extend(accepted.into_iter().rev().take(5));
        };
        for burst in [1, 1000, EXACT_INTEGER_LIMIT - 1] {
            let bucket = |quota: Quota| TokenBucket::new(quota, burst.min(quota.count)).ok();
            largest(&|quota| bucket(quota).map(Rule::TokenBucket));
        }
        largest(&|quota| FixedWindow::new(quota, ALIGNED).ok().map(Rule::FixedWindow));
        largest(&|quota| FixedWindow::new(quota, WindowStart::FirstRequest).ok().map(Rule::FixedWindow));
        largest(&|quota| SlidingWindow::new(quota).ok().map(Rule::SlidingWindow));
        largest(&|quota| SlidingBuckets::new(quota, 1).ok().map(Rule::SlidingBuckets));
        largest(&|quota| SlidingBuckets::new(quota, 1000).ok().map(Rule::SlidingBuckets));
        largest(&|quota| SlidingLog::new(quota).ok().map(Rule::SlidingLog));
    }
    rules
}

/// Change the quota of a rule. The shape of its state does not change.
pub fn resize(rule: &mut Rule, size: u64) {
    match rule {
        Rule::TokenBucket(rule) => rule.burst = size,
        Rule::FixedWindow(rule) => rule.limit = size,
        Rule::SlidingWindow(rule) => rule.limit = size,
        Rule::SlidingBuckets(rule) => rule.limit = size,
        Rule::SlidingLog(rule) => rule.limit = size,
        Rule::Concurrency(rule) => rule.limit = size,
    }
}

/// Return the maximum time in µs from the last charge to a state until the state has no effect, provided that its usage
/// never exceeded the limit.
pub fn longest_reset(rule: &Rule) -> u64 {
    const HOUR: u64 = 3600 * SECOND;
    match rule {
        Rule::TokenBucket(rule) => (rule.burst * rule.parts).div_ceil(rule.refill),
        Rule::FixedWindow(FixedWindow { start: WindowStart::Calendar(windows), .. }) => {
            // The end of daylight saving time makes a day, a week, a month or a year one hour longer.
            let days = match windows.to_string().split('@').next() {
                Some("day") => 1,
                Some("week") => 7,
                Some("month") => 31,
                _ => 366,
            };
            days * 24 * HOUR + HOUR
        }
        Rule::FixedWindow(rule) => rule.window,
        Rule::SlidingWindow(rule) => 2 * rule.window,
        Rule::SlidingBuckets(rule) => rule.window + rule.window / rule.buckets,
        Rule::SlidingLog(rule) => rule.window,
        Rule::Concurrency(rule) => rule.ttl,
    }
}

/// Usage totals by limit, identity and day.
pub type Totals = BTreeMap<(String, u128, String), i64>;

/// Return all usage totals in a Redis server.
pub fn usage_in_redis(server: &Redis, prefix: &str) -> Totals {
    let mut connection = server.connection();
    let mut totals = Totals::new();
    let keys: Vec<String> = redis::cmd("KEYS").arg(format!("{prefix}:*:usage:*")).query(&mut connection).unwrap();
    for key in keys {
        let UsageKey { limit, identity, month, fields } = UsageKey::parse(prefix, key.as_bytes()).unwrap();
        if fields != UsageFields::Days {
            continue;
        }
        let days: Vec<(String, String)> = redis::cmd("HGETALL").arg(&key).query(&mut connection).unwrap();
        for (day, total) in days.into_iter().filter(|(day, _)| !day.starts_with('.')) {
            let date = month.day(day.parse().unwrap()).unwrap();
            totals.insert((limit.to_string(), identity, date.to_string()), total.parse().unwrap());
        }
    }
    totals
}

/// Return the usage totals of these limits in a memory store.
pub fn usage_in_memory(store: &MemoryStore, limits: &[Limit]) -> Totals {
    let query = UsageQuery {
        limits: limits.iter().map(|limit| limit.bucket.limit_name().into()).collect(),
        identities: None,
        from: "1970-01-01".parse().unwrap(),
        to: "9999-01-01".parse().unwrap(),
        parts: UsageFields::Days,
        max_rows: usize::MAX,
    };
    let rows = store.usage.read(&query).unwrap().into_iter();
    rows.map(|row| ((row.limit.into(), row.identity, row.date.to_string()), row.cost)).collect()
}

/// Assert that the totals of the scripts equal those of the model. The model deletes totals after 400 days.
pub fn assert_same_totals(mut scripts: Totals, mut model: Totals, what: &str) {
    let date = |day: &str| day.parse::<Date>().unwrap();
    let Some(newest) = model.keys().map(|(.., day)| date(day)).max() else {
        return assert_eq!(scripts, model, "{what}");
    };
    let first = newest.saturating_sub(RETENTION_DAYS.days());
    scripts.retain(|(.., day), _| date(day) >= first);
    model.retain(|(.., day), _| date(day) >= first);
    assert_eq!(scripts, model, "{what}");
}

/// A limit for tests, with its name and its rule.
#[derive(Debug)]
pub struct Limit {
    pub rule: Rule,
    pub bucket: StateName,
    /// The days for which usage is totalled, or `None` if usage is not counted.
    pub usage: Option<Arc<UsageDays>>,
}

impl Limit {
    pub fn new(name: &str, rule: Rule) -> Limit {
        let bucket = StateName::new(&IdentityHasher::new("test"), name, &rule.shape());
        Limit { rule, bucket, usage: None }
    }

    pub fn charge(&self, identity: u128, cost: u64) -> Charge<'_> {
        Charge {
            key: Key { identity: Identity(identity), state_name: &self.bucket },
            rule: &self.rule,
            cost,
            mode: ChargeMode::Enforced,
            permit_id: 0,
            debt_before_us: 0,
            usage: self.usage.as_ref(),
        }
    }

    /// Return the Redis key of an identity's state.
    pub fn key(&self, prefix: &str, identity: u128) -> Vec<u8> {
        let mut key = Vec::new();
        self.charge(identity, 0).key.write(prefix, &mut key);
        key
    }
}

/// Return limits whose keys for the first `identities` identities are in different shards of the memory store.
/// If two keys had the same shard, a sweep of this shard could delete a state that has no effect at the current time,
/// but has an effect again after the clock is set back.
pub fn apart(rules: Vec<Rule>, identities: u128) -> Vec<Limit> {
    let mut shards = HashSet::new();
    let mut numbers = 0..;
    rules
        .into_iter()
        .map(|rule| {
            let named = numbers.by_ref().map(|number: u32| Limit::new(&format!("limit{number}"), rule.clone()));
            let mut fitting = named.filter(|limit| {
                let own: HashSet<_> = (0..identities).map(|who| limit.charge(who, 0).key.local_hash() % 64).collect();
                let fits = own.len() as u128 == identities && own.is_disjoint(&shards);
                if fits {
                    shards.extend(own);
                }
                fits
            });
            fitting.next().unwrap()
        })
        .collect()
}
