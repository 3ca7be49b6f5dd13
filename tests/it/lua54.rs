//! The gateway's Lua scripts, run with Lua 5.4, in which integers are not doubles. Some other servers with the Redis
//! protocol, such as Dragonfly, use this version of Lua.

#[path = "../support/lua.rs"]
mod lua;
use std::cell::RefCell;

use crate::support::random::{Case, Play, Resizing, STEPS, Time, case, operations, property, resizing};
use crate::support::stores::{
    ALIGNED, Limit, SECOND, START, Totals, assert_same_totals, bucket, buckets, extremes, longest_reset, sliding,
    usage_in_memory, window,
};
use lua::{Database, Interpreter, Replied};
use proptest::prelude::*;
use sluicegate::clock::Clock;
use sluicegate::limiter::algorithm::Rule;
use sluicegate::limiter::memory::MemoryStore;
use sluicegate::limiter::quota::EXACT_INTEGER_LIMIT;
use sluicegate::limiter::redis::StateLayout;
use sluicegate::limiter::redis::script;
use sluicegate::limiter::redis::script::{AlgorithmSet, script};
use sluicegate::limiter::redis::script::{LimitArgs, ScriptReply};
use sluicegate::limiter::usage::{UsageFields, UsageKey};
use sluicegate::limiter::verdict::{Charge, Operation, Verdict};

/// A store that runs the scripts in Lua 5.4.
struct Lua54 {
    lua: Interpreter,
    database: RefCell<Database>,
    layout: StateLayout,
}

impl Lua54 {
    fn new() -> Lua54 {
        Lua54 { lua: Interpreter::new(), database: RefCell::default(), layout: StateLayout::default() }
    }

    fn call(&self, now: u64, operation: Operation, charges: &[Charge<'_>]) -> Verdict {
        // A time of 0 makes the script read the time with TIME.
        let mut database = self.database.borrow_mut();
        database.now = now;
        let (mut keys, mut usage_keys, mut terms) = (Vec::new(), Vec::new(), Vec::new());
        for (index, charge) in charges.iter().enumerate() {
            let day = charge.usage_day(operation, now);
            let limit = LimitArgs::new(charges, index, now).with_usage(day);
            if limit.has_key() {
                let mut key = Vec::new();
                limit.write_key(&charge.key, "rl", &mut key);
                keys.push(key);
            }
            terms.push(limit);
            usage_keys.extend(day.map(|day| {
                let (limit, identity) = (charge.key.state_name.limit_name(), charge.key.identity.0);
                UsageKey { limit: limit.into(), identity, month: day.month(), fields: UsageFields::Days }
                    .to_redis_key("rl")
            }));
        }
        keys.append(&mut usage_keys);
        let names = charges.iter().map(|charge| &**charge.key.state_name.name());
        let counts_usage = terms.iter().any(LimitArgs::counts_usage);
        let mut argument = script::start_argument(0, &self.layout, 1, terms.len());
        script::append_group(&mut argument, 1, operation, &terms);
        let mut arguments = vec![argument, script::state_names_argument(names)];
        arguments.extend(counts_usage.then(|| script::usage_argument(std::iter::once(&*terms))));
        let parts = AlgorithmSet::for_rules(charges.iter().map(|charge| charge.rule)).with_usage(counts_usage);
        let script = script(script::script_variant(&self.layout, operation, &terms), parts);
        let reply = self.lua.run(&mut database, (&script.sha, &script.source), &keys, &arguments);
        let Replied::Array(_) = reply else { panic!("{reply:?}: {operation:?} of {charges:#?}") };
        let reply = redis::parse_redis_value(&reply.encode()).unwrap();
        ScriptReply::new(reply).unwrap().next_verdict(operation, &terms).unwrap().unwrap()
    }

    /// Return the usage totals.
    fn totals(&self) -> Totals {
        let mut totals = Totals::new();
        for (key, fields) in self.database.borrow().hashes() {
            let UsageKey { limit, identity, month, .. } = UsageKey::parse("rl", key.as_bytes()).unwrap();
            for (day, total) in fields {
                let date = month.day(day.parse().unwrap()).unwrap();
                totals.insert((limit.to_string(), identity, date.to_string()), total.parse().unwrap());
            }
        }
        totals
    }
}

#[test]
fn lua_5_4_returns_the_same_replies() {
    property(operations() / 5, STEPS, case(), |case| {
        let case = Case { time: Time::Jumps, ..case };
        let (lua, clock) = (Lua54::new(), Clock::manual(case.start));
        let model = MemoryStore::new(1_000_000, clock.clone());
        let mut play = Play::new(&case);
        for step in &case.steps {
            play.advance_clock(step);
            clock.set(play.now);
            let (operation, charges) = play.ask(step);
            let verdict = model.decide(operation, &charges);
            let script = lua.call(play.now, operation, &charges);
            assert_eq!(script, verdict, "Lua 5.4 and model differ: {operation:?} of {charges:#?}");
            play.record(operation, &verdict);
        }
        assert_same_totals(
            lua.totals(),
            usage_in_memory(&model, &play.limits),
            "Lua 5.4 and model differ in their totals",
        );
        case.steps.len()
    });
}

#[test]
fn lua_5_4_converts_debt_to_another_rate() {
    property(operations() / 5, 5, resizing(), |Resizing { old, new, cost, idle }| {
        let (lua, clock) = (Lua54::new(), Clock::manual(START));
        let model = MemoryStore::new(1000, clock.clone());
        let [before, after] = [old, new].map(|rule| Limit::new("limit", Rule::TokenBucket(rule)));
        let call = |now: u64, operation, charge: Charge<'_>| {
            clock.set(now);
            let verdict = model.decide(operation, &[charge]);
            let script = lua.call(now, operation, &[charge]);
            assert_eq!(script, verdict, "Lua 5.4 and model differ: {operation:?} of {charge:#?}");
            verdict.outcomes[0].reset_us
        };
        let lasts = call(START, Operation::Charge, before.charge(1, cost));
        let now = START + (u128::from(lasts) * u128::from(idle) / 1000) as u64;
        call(now, Operation::Check, after.charge(1, new.burst));
        call(now, Operation::Charge, after.charge(1, 0));
        call(now, Operation::Refund { charged_at: now }, before.charge(1, 1));
        call(now, Operation::Check, after.charge(1, 1));
        5
    });
}

#[test]
fn lua_5_4_counts_the_largest_limits() {
    let (lua, clock) = (Lua54::new(), Clock::manual(START));
    let model = MemoryStore::new(1_000_000, clock.clone());
    for (number, rule) in extremes().into_iter().enumerate() {
        let limit = Limit::new(&format!("limit{number}"), rule);
        let capacity = limit.rule.capacity();
        let call = |now: u64, operation, cost| {
            clock.set(now);
            let charges = [limit.charge(1, cost)];
            let verdict = model.decide(operation, &charges);
            let script = lua.call(now, operation, &charges);
            assert_eq!(script, verdict, "Lua 5.4 and model differ: {operation:?} of {charges:#?}");
            verdict.outcomes[0].retry_us
        };
        call(START, Operation::Check, capacity);
        let retry = call(START, Operation::Check, 1);
        for wait in [1, retry / 2, retry - 1, retry, longest_reset(&limit.rule) / 2] {
            call(START + wait, Operation::Peek, 1);
            call(START + wait, Operation::Peek, capacity);
        }
        call(START + retry, Operation::TakeUpTo, capacity);
        call(START + retry, Operation::Refund { charged_at: START + retry }, capacity / 2);
        if !matches!(limit.rule, Rule::SlidingLog(_)) {
            // A deferred cost can be as large as the largest number that a response may report.
            call(START + retry, Operation::Charge, EXACT_INTEGER_LIMIT - 1);
            call(START + retry + 1, Operation::Charge, EXACT_INTEGER_LIMIT - 1);
            call(START + retry + 2, Operation::Refund { charged_at: START + retry }, EXACT_INTEGER_LIMIT - 1);
        }
        // A key may still exist after its expiry. Products with the elapsed time may then exceed 64 bits.
        call(START + 3650 * 86_400 * SECOND, Operation::Check, capacity);
        call(START + 7300 * 86_400 * SECOND, Operation::Refund { charged_at: 0 }, capacity);
    }
}

// === Reservations that are settled to an actual cost, like those of LLM requests ===

/// A step of a client that reserves quota before it knows the cost.
#[derive(Debug, Clone)]
enum Step {
    /// Reserve this cost. A later step settles it to `actual`.
    Reserve { reserved: u64, actual: u64 },
    /// Settle the reservation with this index, modulo the number of reservations in flight.
    Settle(usize),
}

/// A reservation in flight.
struct InFlight {
    /// Number of reservations made before this one.
    order: usize,
    reserved: u64,
    actual: u64,
    charged_at: u64,
    debt_before_us: u64,
}

fn reserving() -> impl Strategy<Value = (Rule, Vec<(u64, Step)>)> {
    let sizes = (20..5000u64, prop_oneof![Just(SECOND), Just(60 * SECOND), Just(3600 * SECOND)], 0..4usize);
    let rule = sizes.prop_map(|(count, length, algorithm)| match algorithm {
        0 => bucket(count, length, count),
        1 => window(count, length, ALIGNED),
        2 => sliding(count, length, length / 100),
        _ => buckets(count, length, 10),
    });
    let reserve = (1..2000u64, 0..3000u64).prop_map(|(reserved, actual)| Step::Reserve { reserved, actual });
    let step = prop_oneof![1 => reserve, 1 => (0..4usize).prop_map(Step::Settle)];
    // The pause before a step, in thousandths of the window.
    let pause = prop_oneof![3 => Just(0), 6 => 0..80u64, 1 => 0..1500u64];
    (rule, prop::collection::vec((pause, step), 1..2 * STEPS))
}

/// A refund to a token bucket.
struct Refunded {
    /// The number of reservations made before the refunded one.
    order: usize,
    at: u64,
    tokens: u64,
}

/// Return how many tokens a refund of `tokens` to this reservation can credit beyond the correct number. The refund
/// assumes that refill repaid the debt that existed before the reservation. If other refunds have cancelled a part of
/// this debt since the reservation, this part is credited in excess.
fn max_gain(refunded: &[Refunded], settled: &InFlight, tokens: u64) -> u64 {
    let cancels_debt_before = |refund: &&Refunded| refund.order < settled.order && refund.at >= settled.charged_at;
    refunded.iter().filter(cancels_debt_before).map(|refund| refund.tokens).sum::<u64>().min(tokens)
}

/// A client that reserves and settles never has more quota than a client that is charged the actual costs at once. The
/// documented gain by overlapping refunds of a token bucket is the only exception. Both clients have the same quota if
/// no reservations of a bucket overlap and no window ends between a reservation and its settlement. In the end, both
/// have the full quota. The memory store and the scripts return equal verdicts.
#[test]
fn settled_reservations_never_drift_a_state() {
    // Run at least 100,000 steps.
    property(operations().max(100_000), STEPS, reserving(), |(rule, steps)| {
        let (lua, clock) = (Lua54::new(), Clock::manual(START));
        let model = MemoryStore::new(1000, clock.clone());
        let limit = Limit::new("limit", rule);
        let length = match &limit.rule {
            Rule::TokenBucket(bucket) => bucket.burst * bucket.parts / bucket.refill,
            Rule::FixedWindow(_) => longest_reset(&limit.rule),
            Rule::SlidingWindow(_) => longest_reset(&limit.rule) / 2,
            _ => longest_reset(&limit.rule),
        };
        let call = |now: u64, operation, charge: Charge<'_>| {
            clock.set(now);
            let verdict = model.decide(operation, &[charge]);
            let script = lua.call(now, operation, &[charge]);
            assert_eq!(script, verdict, "script and model differ: {operation:?} of {charge:#?}");
            verdict
        };
        const SETTLING: u128 = 1;
        const CHARGED: u128 = 2;
        let mut now = START;
        let mut in_flight: Vec<InFlight> = Vec::new();
        // `is_exact`: whether both clients must have the same quota. `refunds`: the number of refunds, each of which
        // may be rounded.
        let (mut is_exact, mut refunds) = (true, 0);
        let (mut reservations, mut refunded, mut gain) = (0, Vec::new(), 0);
        let ends = (0..steps.len()).map(|_| (1, Step::Settle(0)));
        for (pause, step) in steps.iter().cloned().chain(ends) {
            now += length * pause / 1000;
            match step {
                Step::Reserve { reserved, actual } => {
                    let verdict = call(now, Operation::Check, limit.charge(SETTLING, reserved));
                    if verdict.granted == 0 {
                        continue;
                    }
                    call(now, Operation::Charge, limit.charge(CHARGED, actual.min(reserved)));
                    is_exact &= in_flight.is_empty() || !matches!(limit.rule, Rule::TokenBucket(_));
                    let debt_before_us = limit.rule.debt_before_us(&verdict.outcomes[0], 0, reserved);
                    in_flight.push(InFlight { order: reservations, reserved, actual, charged_at: now, debt_before_us });
                    reservations += 1;
                }
                Step::Settle(_) if in_flight.is_empty() => continue,
                Step::Settle(index) => {
                    let settled = in_flight.swap_remove(index % in_flight.len());
                    let InFlight { order, reserved, actual, charged_at, debt_before_us } = settled;
                    if actual < reserved {
                        if matches!(limit.rule, Rule::TokenBucket(_)) {
                            let tokens = reserved - actual;
                            gain += max_gain(&refunded, &settled, tokens);
                            refunded.push(Refunded { order, at: now, tokens });
                        }
                        // The refunded tokens count as the last tokens of the reservation. The debt before them
                        // therefore includes the actual cost.
                        let debt_before_us = debt_before_us + limit.rule.refill_time_us(actual);
                        let charge = Charge { debt_before_us, ..limit.charge(SETTLING, reserved - actual) };
                        call(now, Operation::Refund { charged_at }, charge);
                        refunds += 1;
                        // A refund has no effect if its window has ended. In a sliding window, however, the charge
                        // still counts in part.
                        is_exact &=
                            !matches!(limit.rule, Rule::SlidingWindow(_)) || charged_at / length == now / length;
                    } else {
                        call(now, Operation::Charge, limit.charge(SETTLING, actual - reserved));
                        call(now, Operation::Charge, limit.charge(CHARGED, actual - reserved));
                    }
                }
            }
            let [settling, charged] =
                [SETTLING, CHARGED].map(|client| call(now, Operation::Peek, limit.charge(client, 0)).outcomes[0]);
            let what = format!("{:?} at {now}: {settling:?} and {charged:?}", limit.rule);
            assert!(settling.remaining <= charged.remaining + gain, "at most {gain} tokens are gained: {what}");
            if settling.reset_us == 0 && charged.reset_us == 0 {
                // Both buckets are full.
                gain = 0;
            }
            if in_flight.is_empty() && is_exact {
                match &limit.rule {
                    Rule::TokenBucket(_) => {
                        let drift = settling.reset_us.abs_diff(charged.reset_us);
                        assert!(drift <= 4 * refunds + 2, "only rounding may cause a difference: {what}");
                    }
                    _ => assert_eq!(settling.remaining, charged.remaining, "both clients have the same quota: {what}"),
                }
            }
        }
        assert!(in_flight.is_empty(), "all reservations are settled");
        // If the client owes more than its quota, the reset takes longer than `longest_reset`.
        let owed = call(now, Operation::Peek, limit.charge(SETTLING, 0)).outcomes[0].reset_us;
        now += owed.max(longest_reset(&limit.rule)) + 1;
        let full = call(now, Operation::Peek, limit.charge(SETTLING, 0)).outcomes[0].remaining;
        assert_eq!(full, limit.rule.capacity(), "{:?}", limit.rule);
        steps.len()
    });
}
