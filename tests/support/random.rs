//! Random cases for property tests: limits, clock steps and operations. A run can be repeated with its seed.

use std::cell::{Cell, RefCell};
use std::io::Read;
use std::sync::Arc;

use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::{Config, RngAlgorithm, TestError, TestRng, TestRunner};
use sluicegate::limiter::algorithm::Rule;
use sluicegate::limiter::algorithm::fixed_window::{FixedWindow, WindowStart};
use sluicegate::limiter::algorithm::token_bucket::TokenBucket;
use sluicegate::limiter::quota::CalendarUnit;
use sluicegate::limiter::usage::UsageDays;
use sluicegate::limiter::verdict::{Charge, ChargeMode, Operation, Verdict};

use super::stores::{
    Limit, SECOND, START, apart, bucket, buckets, calendar, concurrency, log, quota, resize, sliding, window,
};

/// Return the number of operations of a property test: the environment variable `OPERATIONS`, or 50,000 by default.
pub fn operations() -> usize {
    std::env::var("OPERATIONS").map_or(50_000, |text| text.parse().expect("OPERATIONS is a number"))
}

/// Return and print the seed of a run: the environment variable `SEED`, or a random seed.
pub fn seed() -> [u8; 32] {
    let seed: [u8; 32] = match std::env::var("SEED") {
        Ok(text) => std::array::from_fn(|index| u8::from_str_radix(&text[2 * index..2 * index + 2], 16).unwrap()),
        Err(_) => {
            let mut seed = [0; 32];
            std::fs::File::open("/dev/urandom").unwrap().read_exact(&mut seed).unwrap();
            seed
        }
    };
    println!("SEED={}", seed.map(|byte| format!("{byte:02x}")).concat());
    seed
}

/// Test a property on random cases of about `each` operations, until at least `operations` operations have been made.
/// `test` returns the number of operations that it made. The environment variable `SEED` repeats a run.
pub fn property<S: Strategy>(operations: usize, each: usize, input: S, test: impl FnMut(S::Value) -> usize) {
    // Allow for more cases than required. The cases that are left at the end are skipped.
    let cases = 10 + 2 * operations / each;
    let config = Config { cases: cases as u32, failure_persistence: None, max_shrink_iters: 5000, ..Config::default() };
    let mut runner = TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::ChaCha, &seed()));
    let test = RefCell::new(test);
    // After a failure, proptest calls the test again to shrink the case. These calls must not be skipped, so `idle`
    // stays false.
    let (idle, done) = (Cell::new(true), Cell::new(0));
    let result = runner.run(&input, |case| {
        if idle.get() && done.get() >= operations {
            return Ok(());
        }
        let first = idle.replace(false);
        let made = (*test.borrow_mut())(case);
        idle.set(first);
        done.set(done.get() + made);
        Ok(())
    });
    match result {
        Ok(()) => assert!(done.get() >= operations, "only {} operations were made", done.get()),
        Err(TestError::Fail(reason, case)) => panic!("{reason}\nthe smallest case found: {case:?}"),
        Err(TestError::Abort(reason)) => panic!("{reason}"),
    }
}

/// The mean number of steps of a [`Case`].
pub const STEPS: usize = 100;

/// A random case: up to four limits, and steps.
#[derive(Debug, Clone)]
pub struct Case {
    pub rules: Vec<Rule>,
    /// The time zone of the days for which usage is totalled, or `None` if usage is not counted.
    pub usage: Option<&'static str>,
    pub start: u64,
    pub time: Time,
    pub steps: Vec<Step>,
}

/// How the clock of a case moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Time {
    /// The clock sometimes jumps back, and keys never expire. A state that remains after its expiry must not change a
    /// decision.
    Jumps,
    /// The clock moves forward, and keys expire as soon as they have no effect. The rate of a limit may change. The
    /// meaning of a key and its expiry depend on the rate that applied when the key was written.
    GoesOn,
}

#[derive(Debug, Clone)]
pub struct Step {
    pub kind: Kind,
    pub costs: [u64; 4],
    pub modes: [ChargeMode; 4],
    pub identity: u128,
    /// The permit that is acquired, renewed or released.
    pub lease: u64,
    pub advance: Advance,
    pub size: Option<(u64, u64)>,
    /// Which admitted charge a refund cancels.
    pub refunded: Refunded,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Check,
    Peek,
    Charge,
    Refund,
    Take,
    Renew,
}

#[derive(Debug, Clone, Copy)]
pub enum Refunded {
    /// The charge of an admitted check. The field counts back from the last admitted check, which is 0.
    Ago(usize),
    /// A charge at another time, in µs relative to the current time.
    Off(i64),
    /// A charge at time 0.
    Never,
}

/// How the clock moves before an operation.
#[derive(Debug, Clone, Copy)]
pub enum Advance {
    Stands,
    /// Move by this many µs.
    By(i64),
    /// Move by this many thousandths of the window of a limit.
    Part(usize, i64),
    /// Move to the next multiple of a limit's window, plus an offset in µs.
    Boundary(usize, i64),
}

pub fn rule() -> impl Strategy<Value = Rule> {
    let windows = prop_oneof![
        Just(1_000),
        Just(250_000),
        Just(SECOND),
        Just(60 * SECOND),
        Just(90_000_900),
        Just(3600 * SECOND),
        Just(86_400 * SECOND)
    ];
    (0..8u8, 1..12u64, windows, 1..12u64, 0..3usize).prop_map(|(kind, count, length, burst, variant)| match kind {
        0 => bucket(count, length, burst),
        1 => window(count, length, WindowStart::Aligned { phase: variant as u64 * 1_234_567 }),
        2 => window(count, length, WindowStart::FirstRequest),
        3 => log(count, length),
        4 => sliding(count, length, [1, 100, length / 100][variant]),
        5 => calendar(count, [CalendarUnit::Day, CalendarUnit::Week, CalendarUnit::Month][variant], "Europe/Berlin"),
        6 => buckets(count, length, [1, 4, 10][variant]),
        _ => concurrency(count.min(5), length),
    })
}

fn advance() -> impl Strategy<Value = Advance> {
    prop_oneof![
        4 => Just(Advance::Stands),
        1 => (1..3i64).prop_map(Advance::By),
        1 => (-2_000_000..2_000_000i64).prop_map(Advance::By),
        6 => (0..4usize, 0..400i64).prop_map(|(limit, parts)| Advance::Part(limit, parts)),
        2 => (0..4usize, 0..2500i64).prop_map(|(limit, parts)| Advance::Part(limit, parts)),
        1 => (0..4usize, -3000..0i64).prop_map(|(limit, parts)| Advance::Part(limit, parts)),
        2 => (0..4usize, -1..2i64).prop_map(|(limit, off)| Advance::Boundary(limit, off)),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    let kind = prop_oneof![
        8 => Just(Kind::Check),
        1 => Just(Kind::Peek),
        2 => Just(Kind::Charge),
        2 => Just(Kind::Refund),
        2 => Just(Kind::Take),
        1 => Just(Kind::Renew),
    ];
    let others = [ChargeMode::Shadow, ChargeMode::Deferred, ChargeMode::ShadowDeferred];
    let mode = || prop_oneof![8 => Just(ChargeMode::Enforced), 2 => prop::sample::select(others.to_vec())];
    let refunded = prop_oneof![
        6 => (0..4usize).prop_map(Refunded::Ago),
        1 => (-100_000_000..10_000_000i64).prop_map(Refunded::Off),
        1 => Just(Refunded::Never),
    ];
    let cost = || prop_oneof![5 => 0..5u64, 1 => 0..16u64];
    let size = prop_oneof![12 => Just(None), 1 => (1..15u64, 1..15u64).prop_map(Some)];
    let costs = [cost(), cost(), cost(), cost()];
    (kind, costs, [mode(), mode(), mode(), mode()], 0..2u128, 0..8u64, advance(), size, refunded).prop_map(
        |(kind, costs, modes, identity, lease, advance, size, refunded)| Step {
            kind,
            costs,
            modes,
            identity,
            lease,
            advance,
            size,
            refunded,
        },
    )
}

/// Return random steps. The same seed gives the same steps.
pub fn steps(count: usize, seed: u8) -> Vec<Step> {
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &[seed; 32]);
    let mut runner = TestRunner::new_with_rng(Config::default(), rng);
    prop::collection::vec(step(), count).new_tree(&mut runner).unwrap().current()
}

pub fn case() -> impl Strategy<Value = Case> {
    let time = prop_oneof![Just(Time::Jumps), Just(Time::GoesOn)];
    let usage = prop_oneof![Just(None), Just(Some("UTC")), Just(Some("Europe/Berlin"))];
    (
        prop::collection::vec(rule(), 1..5),
        0..8 * 86_400 * SECOND,
        time,
        usage,
        prop::collection::vec(step(), 1..=2 * STEPS),
    )
        .prop_map(|(rules, offset, time, usage, steps)| Case {
            rules,
            usage,
            start: START + 365 * 86_400 * SECOND + offset,
            time,
            steps,
        })
}

/// Return the limit with usage counting by the days of a time zone.
fn counted(limit: Limit, zone: Option<&str>) -> Limit {
    let zone = zone.filter(|_| !matches!(limit.rule, Rule::Concurrency(_)));
    Limit { usage: zone.map(|zone| Arc::new(UsageDays::new(zone).unwrap())), ..limit }
}

/// A token bucket whose rate changes.
#[derive(Debug, Clone)]
pub struct Resizing {
    pub old: TokenBucket,
    pub new: TokenBucket,
    /// The cost that is charged at the old rate.
    pub cost: u64,
    /// The time from the charge to the change of the rate, in thousandths of the refill time of the bucket.
    pub idle: u64,
}

pub fn resizing() -> impl Strategy<Value = Resizing> {
    const DAY: u64 = 86_400 * SECOND;
    let bucket = || {
        // Long windows give buckets with as many parts of a token as allowed, mostly without a common divisor.
        let windows = prop_oneof![
            prop::sample::select(vec![1000, SECOND, 60 * SECOND, 90_000_900, DAY, 3650 * DAY]),
            (1..3650 * DAY / 1000).prop_map(|ms| ms * 1000),
        ];
        let accepted = |(count, window, burst)| TokenBucket::new(quota(count, window), burst).ok();
        (1..5000u64, windows, 1..12u64).prop_filter_map("a bucket that can be counted", accepted)
    };
    (
        bucket(),
        prop_oneof![1 => Just(None), 9 => bucket().prop_map(Some)],
        1..12u64,
        prop_oneof![1 => Just(0), 3 => 0..1000u64],
    )
        .prop_map(|(old, new, cost, idle)| Resizing {
            old,
            new: new.unwrap_or(old),
            cost: cost.min(old.burst),
            idle,
        })
}

/// Return a time in µs: the refill time of a full token bucket, one day for calendar windows, the length of one sliding
/// bucket, the permit TTL, or the window of the other algorithms.
fn length(rule: &Rule) -> u64 {
    match rule {
        Rule::TokenBucket(rule) => (rule.burst * rule.parts / rule.refill).max(1),
        Rule::FixedWindow(FixedWindow { start: WindowStart::Calendar(_), .. }) => 86_400 * SECOND,
        Rule::FixedWindow(rule) => rule.window,
        Rule::SlidingWindow(rule) => rule.window,
        Rule::SlidingBuckets(rule) => rule.window / rule.buckets,
        Rule::SlidingLog(rule) => rule.window,
        Rule::Concurrency(rule) => rule.ttl,
    }
}

/// A case while it runs: the current limits, the time and the admitted charges.
pub struct Play {
    pub limits: Vec<Limit>,
    pub now: u64,
    /// Whether the clock is behind an earlier time, so that states may be in the future.
    pub behind: bool,
    time: Time,
    latest: u64,
    windows: Vec<u64>,
    /// For each admitted request: its time and, per limit, the debt that existed before it, in µs. A refund requires
    /// both.
    admitted: Vec<(u64, Vec<u64>)>,
}

impl Play {
    pub fn new(case: &Case) -> Play {
        Play {
            limits: apart(case.rules.clone(), 2).into_iter().map(|limit| counted(limit, case.usage)).collect(),
            now: case.start,
            behind: false,
            time: case.time,
            latest: case.start,
            windows: case.rules.iter().map(length).collect(),
            admitted: Vec::new(),
        }
    }

    /// Move the clock and change the quotas of the limits.
    pub fn advance_clock(&mut self, step: &Step) {
        let window = |limit: usize| self.windows[limit % self.windows.len()] as i64;
        let now = self.now as i64;
        let next = match step.advance {
            Advance::Stands => now,
            Advance::By(us) => now + us,
            Advance::Part(limit, parts) => now + window(limit) / 1000 * parts,
            Advance::Boundary(limit, off) => now - now % window(limit) + window(limit) + off,
        };
        self.now = if self.time == Time::GoesOn { next.max(now) } else { next } as u64;
        self.behind = self.now < self.latest;
        self.latest = self.latest.max(self.now);
        let Some((size, count)) = step.size else { return };
        for (limit, window) in self.limits.iter_mut().zip(&self.windows) {
            match &mut limit.rule {
                Rule::TokenBucket(rule) if self.time == Time::GoesOn => {
                    *rule = TokenBucket::new(quota(count, *window), size).unwrap();
                }
                rule => resize(rule, size),
            }
        }
    }

    /// Return the operation and the charges of a step. `Take` charges the same cost to every limit. With a concurrency
    /// limit, `Take` becomes a check. `Renew` becomes a check unless all limits are concurrency limits.
    pub fn ask(&self, step: &Step) -> (Operation, Vec<Charge<'_>>) {
        let charged = match step.refunded {
            Refunded::Ago(count) => self.admitted.iter().rev().nth(count),
            Refunded::Off(_) | Refunded::Never => None,
        };
        let charged_at = match step.refunded {
            Refunded::Ago(_) => charged.map_or(self.now, |(charged_at, _)| *charged_at),
            Refunded::Off(us) => self.now.saturating_add_signed(us),
            Refunded::Never => 0,
        };
        let leases = self.limits.iter().filter(|limit| matches!(limit.rule, Rule::Concurrency(_))).count();
        let operation = match step.kind {
            Kind::Take if leases > 0 => Operation::Check,
            Kind::Renew if leases == self.limits.len() => Operation::Renew,
            Kind::Check | Kind::Renew => Operation::Check,
            Kind::Peek => Operation::Peek,
            Kind::Charge => Operation::Charge,
            Kind::Refund => Operation::Refund { charged_at },
            Kind::Take => Operation::TakeUpTo,
        };
        let each = self.limits.iter().zip(step.costs).zip(step.modes).enumerate();
        let charges = each.map(|(index, ((limit, cost), mode))| {
            let charged = charged.filter(|_| step.kind == Kind::Refund);
            let debt_before_us = charged.and_then(|(_, debts)| debts.get(index)).copied().unwrap_or_default();
            let cost = if operation == Operation::TakeUpTo { step.costs[0] } else { cost };
            Charge { mode, permit_id: step.lease, debt_before_us, ..limit.charge(step.identity, cost) }
        });
        (operation, charges.collect())
    }

    /// Record the charges of an admitted check, which may be refunded later.
    pub fn record(&mut self, operation: Operation, verdict: &Verdict) {
        if operation == Operation::Check && verdict.granted > 0 {
            let each = self.limits.iter().zip(&verdict.outcomes);
            let debts = each.map(|(limit, outcome)| limit.rule.debt_before_us(outcome, 0, 1)).collect();
            self.admitted.push((verdict.now_us, debts));
        }
    }
}
