//! Tests of the invariants of the limiter with random cases. On a virtual clock, they compare the scripts in a real
//! Redis with the Rust model.
//!
//! The message of a failed assertion contains the number of the invariant:
//!
//!  1. The scripts and the model give the same reply, field by field.
//!  2. A denied request and a peek change no state and extend no TTL. Exceptions: if the clock was set back or the rate
//!     was lowered, the first denial repairs the state.
//!  3. A request that arrives 1 µs before the end of the returned retry delay is denied. A request at the end of the
//!     delay is admitted.
//!  4. A request whose cost equals the remaining quota is admitted. A request that costs one token more is denied.
//!  5. A request is charged to all of its limits or to none. A shadow limit does not affect the other limits.
//!  6. The admitted cost stays within the formula of the algorithm.
//!  7. A client that waits for the retry delay is admitted, unless other requests of the same identity arrive
//!     meanwhile.
//!  8. If the clock is set back, clients are locked out for at most the time in which a full state resets.
//!  9. Every key has a TTL: the time until its state resets, plus half a second to one second. A call that sets a TTL
//!     adds one second.
//! 10. A call that takes k tokens has the same result and leaves the same state as k requests that cost one token each.
//! 11. A refund creates no key and gives a client no additional quota: the debt of a bucket is never less than without
//!     the charge. In each time span, the admitted cost less the refunded cost exceeds the formula by at most the
//!     refunds of charges before this span.
//! 12. Concurrent clients are admitted exactly up to the limit (`parallel_clients_are_admitted_exactly` in `store.rs`).
//! 13. Every number in the scripts is an exact integer.
//! 14. Denied requests need no memory in Redis, and Redis contains no keys after all TTLs.
//! 15. A change of the rate forgives no debt of a bucket. The debt is converted exactly, or rounded up by at most 2
//!     parts (fractions of a token). If the rate is lowered, the debt grows by at most the amount that the earlier rate
//!     repaid in half a second.
//! 16. The usage totals of the scripts equal those of the model. A total is the sum of the charges of a day, less
//!     refunds.
//!
//! `permits.rs` contains more random cases for concurrency permits. `OPERATIONS=1000000` makes the tests run longer (as
//! in `make test-long`), and `SEED=…` repeats a run.

use std::collections::HashMap;
use std::future::Future;
use std::rc::Rc;
use std::time::{Duration, Instant};

use crate::support::eventually;
use crate::support::random::{
    Case, Kind, Play, Refunded, Resizing, STEPS, Step, Time, case, operations, property, resizing, rule,
};
use crate::support::redis::Redis;
use crate::support::stores::{
    Limit, SECOND, START, Stores, apart, assert_same_totals, bucket, every_algorithm, extremes, longest_reset,
    usage_in_memory, usage_in_redis,
};
use proptest::prelude::*;
use sluicegate::clock::{Clock, monotonic};
use sluicegate::limiter::algorithm::concurrency::Concurrency;
use sluicegate::limiter::algorithm::fixed_window::{FixedWindow, WindowStart};
use sluicegate::limiter::algorithm::sliding_buckets::SlidingBuckets;
use sluicegate::limiter::algorithm::sliding_log::SlidingLog;
use sluicegate::limiter::algorithm::sliding_window::SlidingWindow;
use sluicegate::limiter::algorithm::token_bucket::TokenBucket;
use sluicegate::limiter::algorithm::{Outcome, Rule, Status};
use sluicegate::limiter::key::{Identity, IdentityHasher, StateName};
use sluicegate::limiter::memory::MemoryStore;
use sluicegate::limiter::quota::EXACT_INTEGER_LIMIT;
use sluicegate::limiter::redis::commands;
use sluicegate::limiter::verdict::{Charge, ChargeMode, Operation, Verdict};

/// Number of cases that run concurrently. Round trips to Redis take most of the time. Concurrent cases send their
/// commands together, and thus share round trips.
const AT_ONCE: usize = 24;

/// Run cases concurrently. Return the total number of operations. A panic in a case fails the test.
fn side_by_side(plays: impl IntoIterator<Item = impl Future<Output = usize> + 'static>) -> usize {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let local = tokio::task::LocalSet::new();
    local.block_on(&runtime, async {
        let mut tasks = tokio::task::JoinSet::new();
        plays.into_iter().for_each(|play| drop(tasks.spawn_local(play)));
        let mut operations = 0;
        while let Some(task) = tasks.join_next().await {
            operations += task.unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic()));
        }
        operations
    })
}

// ---- 1 to 5, 7, 9: all operations ----------------------------------------------------------------

#[test]
fn random_calls_keep_the_invariants() {
    let server = Rc::new(Redis::start());
    let batch = prop::collection::vec(case(), 1..=AT_ONCE);
    property(operations(), STEPS * AT_ONCE / 2, batch, |cases| {
        redis::cmd("FLUSHALL").exec(&mut server.connection()).unwrap();
        side_by_side(cases.into_iter().enumerate().map(|(number, case)| {
            let server = server.clone();
            async move { Trial::new(&server, &format!("case{number}"), &case).await.run(&case).await }
        }))
    });
}

struct Trial {
    server: Rc<Redis>,
    play: Play,
    stores: Stores,
    keys: Keys,
    /// A second model, which gets each charge as a separate request. It gives the result of each limit without the
    /// influence of the other limits.
    alone: MemoryStore,
    prefix: String,
    time: Time,
}

/// A peek at both stores at the time `at`, and the assertion about its result.
struct Peek<'a> {
    at: u64,
    charges: Vec<Charge<'a>>,
    holds: Box<dyn Fn(&Verdict) + 'a>,
}

impl Trial {
    async fn new(server: &Rc<Redis>, prefix: &str, case: &Case) -> Trial {
        let stores = Stores::new(server, prefix);
        let alone = MemoryStore::new(1_000_000, stores.clock.clone());
        let keys = Keys::new(server, &stores.clock).await;
        let (server, prefix) = (server.clone(), prefix.to_owned());
        Trial { server, play: Play::new(case), stores, keys, alone, prefix, time: case.time }
    }

    async fn run(mut self, case: &Case) -> usize {
        for (made, step) in case.steps.iter().enumerate() {
            self.play.advance_clock(step);
            let now = self.play.now;
            self.stores.clock.set(now);
            if self.time == Time::GoesOn {
                self.keys.expire(now).await;
            }
            let (operation, charges) = self.play.ask(step);
            let keys: Vec<_> = self.play.limits.iter().map(|limit| limit.key(&self.prefix, step.identity)).collect();
            let asked = monotonic();
            let verdict = self.stores.call(operation, &charges).await;
            assert_eq!(verdict.now_us, now, "invariant 1, the time of the decision");
            let Some(seen) = self.keys.look(&keys, asked).await else { return made };
            let elapsed_ms = asked.elapsed().as_millis() as u64 + 1;
            for (((charge, seen), key), outcome) in charges.iter().zip(&seen).zip(&keys).zip(&verdict.outcomes) {
                let what = || format!("{operation:?} at {now} of {charge:#?}: {verdict:?}");
                let lowered = self.keys.is_lowered(key, charge.rule);
                self.writes_are_due(operation, &verdict, *outcome, seen, lowered, &what);
                if let Some(ttl_ms) = seen.ttl_ms {
                    let promised = outcome.reset_us.div_ceil(1000) + 1000;
                    assert!(ttl_ms <= promised, "invariant 9, a TTL of {ttl_ms} ms is too long: {}", what());
                    let shortest = promised.saturating_sub(elapsed_ms);
                    assert!(ttl_ms >= shortest, "invariant 9, a TTL of {ttl_ms} ms is too short: {}", what());
                    if let Some(ends) = ends(charge.rule, &seen.after) {
                        assert_eq!(
                            ends,
                            now + promised * 1000,
                            "invariant 9, a state contains the expiry of its key: {}",
                            what()
                        );
                    }
                    self.keys.ends.insert(key.clone(), now + outcome.reset_us);
                    self.keys.rules.insert(key.clone(), charge.rule.clone());
                } else if !matches!(
                    (operation, charge.rule),
                    (Operation::Refund { .. }, Rule::SlidingLog(_) | Rule::Concurrency(_))
                ) {
                    // Refunds to a log or a set of permits are exempt from this check: they remove entries without
                    // changing the TTL.
                    let kept = seen.after.is_none() || seen.before == seen.after;
                    let (before, after) = (ends(charge.rule, &seen.before), ends(charge.rule, &seen.after));
                    let slack = after.map(|ends| ends.saturating_sub(now + outcome.reset_us));
                    // If the key outlives the new state by half a second to a second, the script keeps its TTL.
                    let written = before == after && slack.is_some_and(|slack| (500_000..1_001_000).contains(&slack));
                    assert!(kept || written, "invariant 9, a new state has a new TTL: {}", what());
                    // If the rate has changed, the script may write the same bytes again. The state then has a new end
                    // nevertheless.
                    let denied = verdict.granted == 0 || denies(*outcome);
                    let later = operation == Operation::Check && charge.mode.is_deferred();
                    let rewritten = written && !denied && !later && operation != Operation::Peek;
                    if !kept || rewritten {
                        self.keys.ends.insert(key.clone(), now + outcome.reset_us);
                        self.keys.rules.insert(key.clone(), charge.rule.clone());
                    }
                }
            }
            self.all_or_nothing(operation, &charges, &verdict);
            let mut peeks = self.what_remains_fits(&charges);
            if operation == Operation::Check {
                peeks.extend(self.retries_are_exact(&keys, &charges, &verdict));
            }
            peeks.sort_by_key(|peek| peek.at);
            for peeks in peeks.chunk_by(|one, other| one.at == other.at) {
                let groups: Vec<_> = peeks.iter().map(|peek| peek.charges.clone()).collect();
                for (peek, answer) in peeks.iter().zip(self.stores.peek(peeks[0].at, &groups).await) {
                    (peek.holds)(&answer);
                }
            }
            drop(peeks);
            self.play.record(operation, &verdict);
        }
        self.totals_are_equal();
        case.steps.len()
    }

    /// Assert that the usage totals of the scripts equal those of the model.
    fn totals_are_equal(&self) {
        let in_redis = usage_in_redis(&self.server, &self.prefix);
        let in_memory = usage_in_memory(&self.stores.memory, &self.play.limits);
        assert_same_totals(in_redis, in_memory, "invariant 16, the usage totals are equal");
    }

    fn writes_are_due(
        &self,
        operation: Operation,
        verdict: &Verdict,
        outcome: Outcome,
        seen: &Seen,
        lowered: bool,
        what: &dyn Fn() -> String,
    ) {
        // A denial repairs a state. It moves a time from the future to the present, and converts a state of a higher
        // rate to the lower rate.
        let moved = (self.play.behind || lowered) && denies(outcome);
        let denied = verdict.granted == 0 || denies(outcome);
        if operation == Operation::Peek || denied && !moved {
            assert_eq!(seen.before, seen.after, "invariant 2, no state is changed: {}", what());
            assert_eq!(seen.ttl_ms, None, "invariant 2, no TTL is extended: {}", what());
        }
        if matches!(operation, Operation::Refund { .. }) && seen.before.is_none() {
            assert_eq!(seen.after, None, "invariant 11, no refund creates a key: {}", what());
        }
    }

    /// Perform each charge of the request alone in the store `alone`, and compare the results. If the request is
    /// denied, check only the limits that denied it, and peek at the others. The results stay equal only if requests
    /// are charged to all limits or to none.
    fn all_or_nothing(&self, operation: Operation, charges: &[Charge<'_>], verdict: &Verdict) {
        if operation == Operation::Check {
            let mut binding = charges.iter().zip(&verdict.outcomes).filter(|(charge, _)| !charge.mode.is_shadow());
            let admitted = binding.all(|(_, outcome)| !denies(*outcome));
            assert_eq!(
                verdict.granted,
                u64::from(admitted),
                "invariant 5, all limits except shadow limits decide: {charges:#?} {verdict:?}"
            );
        }
        let wanted = charges[0].cost;
        for (charge, outcome) in charges.iter().zip(&verdict.outcomes) {
            let (same, charge) = match operation {
                Operation::TakeUpTo => {
                    assert!(verdict.granted <= wanted, "invariant 10, more than the cost: {verdict:?}");
                    let cost = verdict.granted.max(wanted.min(1));
                    let mode = if charge.mode.is_shadow() { ChargeMode::Shadow } else { ChargeMode::Enforced };
                    let same = if wanted == 0 { Operation::Peek } else { Operation::Check };
                    (same, Charge { cost, mode, ..*charge })
                }
                _ => (operation, *charge),
            };
            let own = if same == Operation::Check && verdict.granted == 0 && !denies(*outcome) {
                self.alone.decide(Operation::Peek, &[Charge { cost: needed(&charge), ..charge }])
            } else {
                self.alone.decide(same, &[charge])
            };
            assert_eq!(own.outcomes[0], *outcome, "invariant 5, all or none: {operation:?} of {charge:#?} {verdict:?}");
        }
    }

    fn what_remains_fits<'a>(&self, charges: &[Charge<'a>]) -> Vec<Peek<'a>> {
        let costing = |costs: &mut dyn Iterator<Item = u64>| -> Vec<Charge<'a>> {
            charges
                .iter()
                .zip(costs)
                .map(|(charge, cost)| Charge { cost, mode: ChargeMode::Enforced, ..*charge })
                .collect()
        };
        let idle = costing(&mut charges.iter().map(|_| 0));
        let left = self.stores.memory.decide(Operation::Peek, &idle).outcomes;
        let holds = |question: &'static str, fits: fn(&Charge<'_>, Outcome) -> bool| -> Box<dyn Fn(&Verdict) + 'a> {
            let (left, charges) = (left.clone(), charges.to_vec());
            Box::new(move |answer| {
                for ((charge, left), outcome) in charges.iter().zip(&left).zip(&answer.outcomes) {
                    let fits = fits(charge, *left);
                    assert_eq!(!denies(*outcome), fits, "invariant 4, {question}: {charge:#?} {left:?}");
                }
            })
        };
        // After an unconditional charge, or if the limit was lowered, the debt may exceed the limit. In this case, even
        // a request of cost 0 is denied.
        let even_nothing = |_: &Charge<'_>, left: Outcome| !denies(left);
        // For concurrency limits, a request needs exactly one permit, whatever its cost is.
        let a_lease =
            |charge: &Charge<'_>, left: Outcome| matches!(charge.rule, Rule::Concurrency(_)) && left.remaining > 0;
        let remaining = costing(&mut left.iter().map(|left| left.remaining));
        let more = costing(&mut left.iter().map(|left| left.remaining + 1));
        let at = self.play.now;
        vec![
            Peek { at, charges: remaining, holds: holds("a cost of the remaining quota is admitted", even_nothing) },
            Peek { at, charges: more, holds: holds("a cost of more than the remaining quota is denied", a_lease) },
        ]
    }

    fn retries_are_exact<'a>(&self, keys: &[Vec<u8>], charges: &[Charge<'a>], verdict: &Verdict) -> Vec<Peek<'a>> {
        let now = self.play.now;
        // The expiry of a key depends on the rate at which its state was written. If the rate was lowered later, a
        // retry delay may end after the key has expired.
        let reckoned = |charge: &Charge<'_>, key: &Vec<u8>, wait: u64| {
            let changed = self.time == Time::GoesOn && matches!(charge.rule, Rule::TokenBucket(_));
            self.keys.ends.get(key).filter(|_| changed).is_none_or(|ends| now + wait < *ends)
        };
        let mut peeks = Vec::new();
        for ((charge, outcome), key) in charges.iter().zip(&verdict.outcomes).zip(keys) {
            let retry_us = outcome.retry_us;
            let over = matches!(outcome.status, Status::Exceeded | Status::Saturated);
            if over && reckoned(charge, key, retry_us) {
                for (wait, expected) in [(retry_us - 1, outcome.status), (retry_us, Status::Ok)] {
                    let what = format!("invariant 3, the retry is exact: {charge:#?} {outcome:?}");
                    let alone = vec![Charge { cost: needed(charge), mode: ChargeMode::Enforced, ..*charge }];
                    let holds =
                        Box::new(move |answer: &Verdict| assert_eq!(answer.outcomes[0].status, expected, "{what}"));
                    peeks.push(Peek { at: now + wait, charges: alone, holds });
                }
            }
        }
        let binding = || {
            let all = charges.iter().zip(&verdict.outcomes).zip(keys);
            all.filter(|((charge, _), _)| !charge.mode.is_shadow())
        };
        let wait = binding().map(|((_, outcome), _)| outcome.retry_us).max().unwrap_or(0);
        let ever = binding()
            .all(|((charge, outcome), key)| outcome.status != Status::CostTooLarge && reckoned(charge, key, wait));
        // If the clock was set back, a denied request repairs only the states that denied it. Invariant 7 does not
        // apply in this case.
        if verdict.granted == 0 && ever && !self.play.behind {
            let what = format!("invariant 7, a client that waits is admitted: {charges:#?} {verdict:?}");
            let again = binding().map(|((charge, _), _)| Charge {
                cost: needed(charge),
                mode: ChargeMode::Enforced,
                ..*charge
            });
            let holds = Box::new(move |answer: &Verdict| assert_eq!(answer.granted, 1, "{what}"));
            peeks.push(Peek { at: now + wait, charges: again.collect(), holds });
        }
        peeks
    }
}

fn denies(outcome: Outcome) -> bool {
    outcome.status != Status::Ok
}

/// Return the remaining quota that a request needs to be admitted.
fn needed(charge: &Charge<'_>) -> u64 {
    if charge.mode.is_deferred() { 1 } else { charge.cost }
}

/// Return whether a state consists of the expiry of its key and three numbers.
fn is_numbers(rule: &Rule) -> bool {
    !matches!(rule, Rule::SlidingBuckets(_) | Rule::SlidingLog(_) | Rule::Concurrency(_))
}

/// Return the time until which a state is kept, which is its first number.
fn ends(rule: &Rule, state: &Option<Vec<u8>>) -> Option<u64> {
    let state = state.as_deref().filter(|_| is_numbers(rule))?;
    Some(u64::from_le_bytes(state[..8].try_into().unwrap()))
}

/// Where a state with three numbers is: in the value of the key of its identity.
struct Place {
    prefix: String,
    identity: Identity,
    state: StateName,
    /// The key of the identity.
    key: Vec<u8>,
}

impl Place {
    /// Return the place of a state. `name` is the key that the state would have of its own. Return `None` if the state
    /// does not have three numbers.
    fn of(name: &[u8]) -> Option<Place> {
        let name = std::str::from_utf8(name).unwrap();
        let (prefix, rest) = name.split_once(":{").unwrap();
        let (identity, state) = rest.split_once("}:").unwrap();
        let (limit, shape) = state.split_once(':').unwrap();
        if !shape.starts_with(['b', 'f', 'k', 'w', 'x']) {
            return None;
        }
        let identity = Identity::from_hex(identity).unwrap();
        let mut key = Vec::new();
        identity.write_key(prefix, &mut key);
        let state = StateName::new(&IdentityHasher::new("test"), limit, shape);
        Some(Place { prefix: prefix.to_owned(), identity, state, key })
    }

    /// Return the numbers of the state in a value as 64-bit integers, and the latest time until which a state in the
    /// value is kept.
    fn read(&self, value: &[u8]) -> (Option<Vec<u8>>, u64) {
        let numbers: Vec<_> = value.as_chunks().0.iter().map(|bytes| f64::from_le_bytes(*bytes) as u64).collect();
        assert_eq!((numbers.len() % 5, value.len() % 8), (1, 0), "a time, and five numbers for each state");
        // Each state has two numbers in the heads, and then three in the bodies.
        let (heads, bodies) = numbers[1..].split_at((numbers.len() - 1) / 5 * 2);
        let states = || heads.chunks(2).zip(bodies.chunks(3));
        let own = states().find(|(head, _)| head[0] == self.state.id());
        let bytes = own.map(|(head, body)| {
            [body[0], body[1], body[2], head[1]].iter().flat_map(|number| number.to_le_bytes()).collect()
        });
        let longest = states().map(|(_, body)| body[0]).max().unwrap();
        assert!(numbers[0] >= longest, "the key of an identity outlives each of its states");
        (bytes, longest)
    }
}

/// The states in Redis. Redis expires keys by its own clock, not by the virtual clock of the test. After each call,
/// `look` therefore sets a TTL of years. The key stays until the test deletes it, and the test sees each TTL that a
/// call sets.
struct Keys {
    connection: redis::aio::MultiplexedConnection,
    clock: Clock,
    known: HashMap<Vec<u8>, Vec<u8>>,
    /// The instant from which each key has no effect, in µs on the virtual clock.
    ends: HashMap<Vec<u8>, u64>,
    /// The rule with which each key was written.
    rules: HashMap<Vec<u8>, Rule>,
}

const YEARS_MS: u64 = 1_000_000_000_000;

/// The shortest TTL of a key. A key gets it if its state resets at the time of the call, because the call adds one
/// second to the time until the reset.
const SHORTEST_TTL: Duration = Duration::from_secs(1);

/// The effect of a call on a key.
struct Seen {
    before: Option<Vec<u8>>,
    after: Option<Vec<u8>>,
    ttl_ms: Option<u64>,
}

impl Keys {
    async fn new(server: &Redis, clock: &Clock) -> Keys {
        let patient = redis::AsyncConnectionConfig::new().set_response_timeout(None);
        let mut connection = server.client().get_multiplexed_async_connection_with_config(&patient).await.unwrap();
        let mut plain = redis::cmd("CONFIG");
        let () = plain.arg("SET").arg("rdbcompression").arg("no").query_async(&mut connection).await.unwrap();
        let clock = clock.clone();
        Keys { connection, clock, known: HashMap::new(), ends: HashMap::new(), rules: HashMap::new() }
    }

    /// Return whether a bucket was written at a higher rate than that of this rule.
    fn is_lowered(&self, key: &[u8], rule: &Rule) -> bool {
        match (self.rules.get(key), rule) {
            (Some(Rule::TokenBucket(old)), Rule::TokenBucket(new)) => {
                u128::from(old.refill) * u128::from(new.parts) > u128::from(new.refill) * u128::from(old.parts)
            }
            _ => false,
        }
    }

    /// Return, for each key, the effect of the call that was sent after the instant `since`. Return `None` if the
    /// machine paused for so long that a key may have expired in Redis. In this case, the test case proves nothing and
    /// ends.
    async fn look(&mut self, keys: &[Vec<u8>], since: Instant) -> Option<Vec<Seen>> {
        let mut pipe = redis::pipe();
        for key in keys {
            let (read, key) = match Place::of(key) {
                Some(place) => ("GET", place.key),
                None => ("DUMP", key.clone()),
            };
            pipe.cmd(read).arg(&key).cmd("PTTL").arg(&key).cmd("PEXPIRE").arg(&key).arg(YEARS_MS).ignore();
        }
        let replies: Vec<redis::Value> = pipe.query_async(&mut self.connection).await.unwrap();
        let now = self.clock.now_us();
        let elapsed_ms = since.elapsed().as_millis() as u64 + 1;
        let seen = keys.iter().zip(replies.chunks(2)).map(|(key, reply)| {
            let mut after: Option<Vec<u8>> = redis::from_redis_value(reply[0].clone()).unwrap();
            let ttl_ms: i64 = redis::from_redis_value(reply[1].clone()).unwrap();
            assert_ne!(ttl_ms, -1, "invariant 9, a key without a TTL");
            let mut fresh = (0..YEARS_MS as i64 / 2).contains(&ttl_ms).then_some(ttl_ms as u64);
            if let (Some(place), Some(value)) = (Place::of(key), &after) {
                let (state, longest) = place.read(value);
                if let Some(ttl_ms) = fresh {
                    let least = longest.saturating_sub(now).div_ceil(1000).max(1000);
                    let range = least.saturating_sub(elapsed_ms)..=least + (least / 8).max(1000);
                    assert!(range.contains(&ttl_ms), "invariant 9, a TTL of {ttl_ms} ms is not in {range:?}");
                }
                let kept_until = |state: &Option<Vec<u8>>| {
                    state.as_ref().map(|state| u64::from_le_bytes(state[..8].try_into().unwrap()))
                };
                let is_new = kept_until(&state) != kept_until(&self.known.get(key).cloned());
                fresh = kept_until(&state).filter(|_| is_new).map(|until| until.saturating_sub(now) / 1000);
                after = state;
            }
            let before = match &after {
                Some(state) => self.known.insert(key.clone(), state.clone()),
                None => self.known.remove(key),
            };
            Seen { before, after, ttl_ms: fresh }
        });
        let seen = seen.collect();
        (since.elapsed() < SHORTEST_TTL).then_some(seen)
    }

    /// Delete the keys whose effect has ended at `now`.
    async fn expire(&mut self, now: u64) {
        let ended: Vec<_> = self.ends.extract_if(|_, end| *end <= now).map(|(key, _)| key).collect();
        if !ended.is_empty() {
            let mut pipe = redis::pipe();
            for name in &ended {
                match Place::of(name) {
                    Some(Place { prefix, identity, state, key }) => pipe
                        .add_command(commands::delete_states_command(&prefix, identity, &[&state]))
                        .ignore()
                        .cmd("PEXPIRE")
                        .arg(key)
                        .arg(YEARS_MS)
                        .ignore(),
                    None => pipe.cmd("DEL").arg(name).ignore(),
                };
            }
            let () = pipe.query_async(&mut self.connection).await.unwrap();
            ended.iter().for_each(|key| drop(self.known.remove(key)));
        }
    }
}

// ---- 6, 11: the admitted cost in a history -------------------------------------------------------

/// An admitted request and its cost per limit.
struct Admitted {
    at: u64,
    lease: u64,
    costs: Vec<u64>,
    /// The debt before the charge in µs, per limit. A refund needs it.
    debts_before_us: Vec<u64>,
}

/// A refund to one limit, with the times of the refund and of the charge.
struct Refund {
    at: u64,
    charged_at: u64,
    cost: u64,
}

#[test]
fn admitted_cost_less_refunds_stays_within_the_formula() {
    let server = Rc::new(Redis::start());
    let batch = prop::collection::vec(case(), 1..=AT_ONCE);
    property(operations() / 5, STEPS * AT_ONCE / 2, batch, |cases| {
        redis::cmd("FLUSHALL").exec(&mut server.connection()).unwrap();
        side_by_side(cases.into_iter().enumerate().map(|(number, case)| {
            let server = server.clone();
            async move { history(&server, &format!("case{number}"), case).await }
        }))
    });
}

/// Run requests, and refunds of admitted requests, on a clock that only moves forward.
async fn history(server: &Redis, prefix: &str, case: Case) -> usize {
    let stores = Stores::new(server, prefix);
    let mut keys = Keys::new(server, &stores.clock).await;
    let operations = case.steps.len();
    let mut play = Play::new(&Case { time: Time::GoesOn, usage: None, ..case.clone() });
    let names: Vec<_> = play.limits.iter().map(|limit| limit.key(prefix, 0)).collect();
    let mut admitted: Vec<Admitted> = Vec::new();
    let mut refunds: Vec<Vec<Refund>> = play.limits.iter().map(|_| Vec::new()).collect();
    let leases = play.limits.iter().any(|limit| matches!(limit.rule, Rule::Concurrency(_)));
    for (number, step) in case.steps.into_iter().enumerate() {
        play.advance_clock(&Step { size: None, ..step.clone() });
        stores.clock.set(play.now);
        let asked = monotonic();
        let charges = |lease: u64, costs: &[u64]| -> Vec<_> {
            let each = play.limits.iter().zip(costs);
            each.map(|(limit, cost)| Charge { permit_id: lease, ..limit.charge(0, *cost) }).collect()
        };
        let lease = number as u64;
        let (costs, verdict) = match step.kind {
            Kind::Refund => {
                let Refunded::Ago(ago) = step.refunded else { continue };
                let Some(index) = admitted.len().checked_sub(ago + 1) else { continue };
                let Admitted { at: charged_at, lease, costs, debts_before_us } = admitted.remove(index);
                let each = charges(lease, &costs).into_iter().zip(debts_before_us);
                let each: Vec<_> = each.map(|(charge, debt_before_us)| Charge { debt_before_us, ..charge }).collect();
                stores.call(Operation::Refund { charged_at }, &each).await;
                if keys.look(&names, asked).await.is_none() {
                    return number;
                }
                for (refunds, cost) in refunds.iter_mut().zip(costs) {
                    refunds.push(Refund { at: play.now, charged_at, cost });
                }
                continue;
            }
            Kind::Take if !leases => {
                let wanted = [step.costs[0]; 4];
                let verdict = stores.call(Operation::TakeUpTo, &charges(lease, &wanted)).await;
                ([verdict.granted; 4], verdict)
            }
            Kind::Check | Kind::Peek | Kind::Charge | Kind::Take | Kind::Renew => {
                let verdict = stores.call(Operation::Check, &charges(lease, &step.costs)).await;
                (step.costs.map(|cost| cost * verdict.granted), verdict)
            }
        };
        if keys.look(&names, asked).await.is_none() {
            return number;
        }
        let each = play.limits.iter().zip(&verdict.outcomes).zip(costs);
        let debts_before_us =
            each.map(|((limit, outcome), cost)| limit.rule.debt_before_us(outcome, 0, cost)).collect();
        admitted.push(Admitted { at: play.now, lease, costs: costs[..play.limits.len()].to_vec(), debts_before_us });
        for (index, limit) in play.limits.iter().enumerate() {
            let history: Vec<_> = admitted.iter().map(|request| (request.at, request.costs[index])).collect();
            assert_within(&limit.rule, &history, &refunds[index]);
        }
    }
    operations
}

/// Assert that the admitted costs are within the formula of the algorithm at the time of the last entry. An entry of
/// `history` is a time in µs and a cost.
fn assert_within(rule: &Rule, history: &[(u64, u64)], refunds: &[Refund]) {
    let refunded = !refunds.is_empty();
    let now = history.last().unwrap().0;
    let since = |from: u64| -> u64 { history.iter().filter(|(at, _)| *at >= from).map(|(_, cost)| cost).sum() };
    let any_window = |window: u64| since((now + 1).saturating_sub(window));
    let name = if refunded { "invariant 11, refunds gain nothing" } else { "invariant 6, the formula" };
    match rule {
        Rule::TokenBucket(bucket) => {
            for &(from, _) in history {
                let used = u128::from(since(from)) * u128::from(bucket.parts);
                let refilled = u128::from(bucket.refill) * u128::from(now - from);
                // If a charge before `from` was refunded after `from`, its quota may be used again.
                let earlier = refunds.iter().filter(|refund| refund.at >= from && refund.charged_at < from);
                let again: u64 = earlier.map(|refund| refund.cost).sum();
                let most = u128::from(bucket.burst + again) * u128::from(bucket.parts) + refilled;
                assert!(used <= most, "{name}: burst and refill since {from}: {rule:?} {history:?}");
            }
        }
        Rule::FixedWindow(FixedWindow { limit, window, start: WindowStart::Aligned { phase } }) => {
            let used = since(now - (now - phase) % window);
            assert!(used <= *limit, "{name}: at most the limit in a window: {rule:?} {history:?}");
        }
        Rule::FixedWindow(FixedWindow { limit, start: WindowStart::Calendar(windows), .. }) => {
            let used = since(calendar_start(&windows.to_string(), now));
            assert!(used <= *limit, "{name}: at most the limit in a window: {rule:?} {history:?}");
        }
        Rule::FixedWindow(FixedWindow { limit, window, start: WindowStart::FirstRequest }) => {
            // If the request that opened a window was refunded, the history does not show where windows begin.
            let mut opened = 0;
            for &(at, _) in history.iter().filter(|(_, cost)| *cost > 0 && !refunded) {
                opened = if at >= opened + window { at } else { opened };
            }
            let (used, most) = if refunded { (any_window(*window), 2 * limit) } else { (since(opened), *limit) };
            assert!(used <= most, "{name}: at most the limit in a window: {rule:?} {history:?}");
        }
        Rule::SlidingWindow(SlidingWindow { limit, window, .. }) => {
            let start = now - now % window;
            let (current, both) = (since(start), since(start - window));
            let weighed = u128::from(both - current) * u128::from(start + window - now);
            let used = weighed + u128::from(current) * u128::from(*window);
            assert!(used <= u128::from(limit * window), "{name}: two windows, weighted: {rule:?} {history:?}");
            assert!(any_window(*window) <= 2 * limit, "{name}: at most twice the limit: {rule:?} {history:?}");
        }
        Rule::SlidingBuckets(SlidingBuckets { limit, window, .. }) | Rule::SlidingLog(SlidingLog { limit, window }) => {
            assert!(any_window(*window) <= *limit, "{name}: at most the limit in any window: {rule:?} {history:?}");
        }
        Rule::Concurrency(Concurrency { limit, ttl: lease }) => {
            let live = history.iter().filter(|(at, cost)| *cost > 0 && at + lease > now).count() as u64;
            assert!(live <= *limit, "{name}: at most the limit at once: {rule:?} {history:?}");
        }
    }
}

// ---- 11: a refund between other charges ----------------------------------------------------------

/// Charges to a bucket, some of which are refunded.
#[derive(Debug, Clone)]
struct Refunding {
    rule: Rule,
    /// Other charges: before the refunded charge, between this charge and its refund, and after the refund. Each one
    /// has a pause before it, in thousandths of the time in which a full bucket refills, and a cost.
    around: [Vec<(u64, u64)>; 3],
    cost: u64,
    how: How,
}

/// Which part of a charge is refunded, and when.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum How {
    /// Refund the whole cost before any other charge.
    AtOnce,
    /// Refund the whole cost after other charges.
    Late,
    /// Refund one of the tokens that one call took. The field is the number of tokens that the call took after it.
    One(u64),
    /// Refund all tokens that one call took, with one refund per token.
    Each,
    /// Refund the last tokens that one call took. The field is the number of these tokens.
    Last(u64),
}

fn refunding() -> impl Strategy<Value = Refunding> {
    let windows = prop_oneof![Just(1_000), Just(250_000), Just(SECOND), Just(90_000_900), Just(3600 * SECOND)];
    let rule = (1..5000u64, windows, 1..12u64).prop_map(|(count, window, burst)| bucket(count, window, burst));
    let others = || prop::collection::vec((0..300u64, prop_oneof![2 => Just(0), 3 => 0..4u64]), 0..5);
    let how = prop_oneof![
        Just(How::AtOnce),
        Just(How::Late),
        (0..12u64).prop_map(How::One),
        Just(How::Each),
        (0..12u64).prop_map(How::Last),
    ];
    (rule, [others(), others(), others()], 1..12u64, how).prop_map(|(rule, around, cost, how)| Refunding {
        rule,
        around,
        cost,
        how,
    })
}

#[test]
fn refund_leaves_no_less_debt_than_without_the_charge() {
    let server = Rc::new(Redis::start());
    let batch = prop::collection::vec(refunding(), 1..=AT_ONCE);
    property(operations() / 5, 20 * AT_ONCE / 2, batch, |cases| {
        redis::cmd("FLUSHALL").exec(&mut server.connection()).unwrap();
        side_by_side(cases.into_iter().enumerate().map(|(number, case)| {
            let server = server.clone();
            async move { refunded(&server, &format!("case{number}"), &case).await.unwrap_or(0) }
        }))
    });
}

/// Run a case with two identities. The first identity gets all charges and the refunds, the second one only the charges
/// that are not refunded. Return `None` if the machine paused for too long.
async fn refunded(server: &Redis, prefix: &str, case: &Refunding) -> Option<usize> {
    let stores = Stores::new(server, prefix);
    let mut keys = Keys::new(server, &stores.clock).await;
    let limit = apart(vec![case.rule.clone()], 2).remove(0);
    let Rule::TokenBucket(bucket) = limit.rule else { unreachable!() };
    let names = [0, 1].map(|who| limit.key(prefix, who));
    let full_us = bucket.burst * bucket.parts / bucket.refill;
    let (mut now, mut operations) = (START, 0);
    let mut call = async |now: u64, operation: Operation, charge: Charge<'_>| {
        stores.clock.set(now);
        let asked = monotonic();
        let verdict = stores.call(operation, &[charge]).await;
        operations += 1;
        keys.look(&names, asked).await.map(|_| verdict)
    };
    // The debt of an identity according to a reply, rounded to µs.
    let owed_us = |verdict: &Verdict| verdict.outcomes[0].reset_us;

    for (parts, cost) in &case.around[0] {
        now += full_us * parts / 1000;
        for who in [0, 1] {
            call(now, Operation::Charge, limit.charge(who, *cost)).await?;
        }
    }
    let charged_at = now;
    let before = call(now, Operation::Peek, limit.charge(0, 0)).await?;
    let operation = if matches!(case.how, How::AtOnce | How::Late) { Operation::Check } else { Operation::TakeUpTo };
    let charged = call(now, operation, limit.charge(0, case.cost)).await?;
    let granted = if operation == Operation::Check { case.cost * charged.granted } else { charged.granted };
    // `refunds` contains the cost of each refund, and the number of tokens that the same call took after it. `kept` is
    // the cost that is not refunded.
    let (refunds, kept) = match case.how {
        How::AtOnce | How::Late => (vec![(granted, 0)], 0),
        How::One(after) => (vec![(granted.min(1), after.min(granted.saturating_sub(1)))], granted.saturating_sub(1)),
        How::Each => ((0..granted).map(|after| (1, after)).collect(), 0),
        How::Last(units) => (vec![(units.min(granted), 0)], granted - units.min(granted)),
    };
    call(now, Operation::Charge, limit.charge(1, kept)).await?;
    let between = if case.how == How::AtOnce { &[][..] } else { &case.around[1] };
    for (parts, cost) in between {
        now += full_us * parts / 1000;
        for who in [0, 1] {
            call(now, Operation::Charge, limit.charge(who, *cost)).await?;
        }
    }
    for (cost, after) in &refunds {
        let debt_before_us = limit.rule.debt_before_us(&charged.outcomes[0], 0, cost + after);
        let charge = Charge { debt_before_us, ..limit.charge(0, *cost) };
        call(now, Operation::Refund { charged_at }, charge).await?;
    }
    let [with, without] = [0, 1].map(|who| limit.charge(who, 0));
    let with = owed_us(&call(now, Operation::Peek, with).await?);
    let without = owed_us(&call(now, Operation::Peek, without).await?);
    assert!(with >= without, "invariant 11, a refund gains nothing: {case:?}: {with} and {without} µs");
    // If one call took several tokens and only an earlier one is refunded, the refund ignores that the later tokens
    // keep the bucket from filling. In this case, the refund is incomplete.
    let last = !matches!(case.how, How::One(1..));
    if last && between.iter().all(|(_, cost)| *cost == 0) {
        // Refunds are rounded to whole µs, to the disadvantage of the client.
        let most = without + 2 * refunds.len() as u64;
        assert!(with <= most, "invariant 11, the refund is complete: {case:?}: {with} and {without} µs");
    }
    if case.how == How::AtOnce {
        assert_eq!(with, owed_us(&before), "invariant 11, a refund at once leaves no trace: {case:?}");
    }
    for (parts, cost) in &case.around[2] {
        now += full_us * parts / 1000;
        let with = owed_us(&call(now, Operation::Charge, limit.charge(0, *cost)).await?);
        let without = owed_us(&call(now, Operation::Charge, limit.charge(1, *cost)).await?);
        assert!(with >= without, "invariant 11, nothing is gained later: {case:?}: {with} and {without} µs");
    }
    Some(operations)
}

/// Return the start of the day, week or month that contains the time `now`, computed from its calendar date.
fn calendar_start(windows: &str, now: u64) -> u64 {
    let (unit, zone) = windows.split_once('@').unwrap();
    let zone = jiff::tz::TimeZone::get(zone).unwrap();
    let date = zone.to_datetime(jiff::Timestamp::from_microsecond(now as i64).unwrap()).date();
    let back = match unit {
        "day" => 0,
        "week" => date.weekday().to_monday_zero_offset(),
        "month" => date.day() - 1,
        _ => unreachable!("{unit}"),
    };
    let first = date.checked_sub(jiff::Span::new().days(i64::from(back))).unwrap();
    first.to_zoned(zone).unwrap().timestamp().as_microsecond() as u64
}

// ---- 8: the clock is set back --------------------------------------------------------------------

#[test]
fn clock_set_back_locks_out_no_longer_than_a_full_state() {
    let server = Rc::new(Redis::start());
    // The clock is set back by 1 µs to about 8 years.
    let back = (0..6usize, 1..100u64).prop_map(|(unit, count)| {
        count * [1, 1000, SECOND, 3600 * SECOND, 86_400 * SECOND, 31 * 86_400 * SECOND][unit]
    });
    let step = (prop_oneof![9 => Just(0), 1 => back], 0..400u64, 1..6u64);
    let case = (rule(), 0..86_400 * SECOND, prop::collection::vec(step, 1..60));
    property(operations() / 5, 30 * AT_ONCE / 2, prop::collection::vec(case, 1..=AT_ONCE), |cases| {
        redis::cmd("FLUSHALL").exec(&mut server.connection()).unwrap();
        side_by_side(cases.into_iter().enumerate().map(|(number, (rule, offset, steps))| {
            let (server, prefix) = (server.clone(), format!("case{number}"));
            async move {
                let stores = Stores::new(&server, &prefix);
                let mut keys = Keys::new(&server, &stores.clock).await;
                let limit = apart(vec![rule], 1).remove(0);
                let name = [limit.key(&prefix, 0)];
                let longest = longest_reset(&limit.rule);
                let mut now = START + 20 * 366 * 86_400 * SECOND + offset;
                for (lease, (back, parts, cost)) in steps.iter().enumerate() {
                    now = now + longest / 1000 * parts - back;
                    stores.clock.set(now);
                    let cost = (*cost).min(limit.rule.capacity());
                    let charge = Charge { permit_id: lease as u64, ..limit.charge(0, cost) };
                    let asked = monotonic();
                    let outcome = stores.call(Operation::Check, &[charge]).await.outcomes[0];
                    if keys.look(&name, asked).await.is_none() {
                        return lease;
                    }
                    let what = format!("{charge:#?} {outcome:?}, a step back of {back} µs");
                    assert!(outcome.retry_us <= longest, "invariant 8, a lock-out of at most {longest} µs: {what}");
                    if denies(outcome) {
                        let waited = stores.peek(now + outcome.retry_us, &[vec![charge]]).await;
                        assert_eq!(waited[0].granted, 1, "invariant 8, the lock-out ends: {what}");
                    }
                }
                steps.len()
            }
        }))
    });
}

// ---- 10: tokens taken together -------------------------------------------------------------------

#[test]
fn taking_k_tokens_equals_k_checks_of_one() {
    let server = Rc::new(Redis::start());
    let batch = prop::collection::vec((case(), prop::collection::vec(0..9u64, 1..60)), 1..=AT_ONCE);
    property(operations() / 5, 5 * 30 * AT_ONCE / 2, batch, |cases| {
        redis::cmd("FLUSHALL").exec(&mut server.connection()).unwrap();
        side_by_side(cases.into_iter().enumerate().map(|(number, (case, takes))| {
            let server = server.clone();
            async move { together(&server, &format!("case{number}"), case, &takes).await }
        }))
    });
}

async fn together(server: &Redis, prefix: &str, mut case: Case, takes: &[u64]) -> usize {
    // One call cannot take several permits, so leave out concurrency limits.
    case.rules.retain(|rule| !matches!(rule, Rule::Concurrency(_)));
    if case.rules.is_empty() {
        return 0;
    }
    let stores = Stores::new(server, prefix);
    let mut keys = Keys::new(server, &stores.clock).await;
    let mut play = Play::new(&case);
    let mut operations = 0;
    for (step, &wanted) in case.steps.iter().zip(takes) {
        play.advance_clock(&Step { size: None, ..step.clone() });
        stores.clock.set(play.now);
        let charges =
            |who: u128, cost: u64| -> Vec<_> { play.limits.iter().map(|limit| limit.charge(who, cost)).collect() };
        let mut call = async |operation, who, cost| {
            let asked = monotonic();
            let verdict = stores.call(operation, &charges(who, cost)).await;
            let names: Vec<_> = play.limits.iter().map(|limit| limit.key(prefix, who)).collect();
            keys.look(&names, asked).await.map(|_| verdict)
        };
        let Some(taken) = call(Operation::TakeUpTo, 0, wanted).await else { return operations };
        let mut singles = Vec::new();
        for _ in 0..wanted {
            let Some(single) = call(Operation::Check, 1, 1).await else { return operations };
            singles.push(single);
        }
        let granted: u64 = singles.iter().map(|single| single.granted).sum();
        assert_eq!(taken.granted, granted, "invariant 10, as many tokens: {:#?}", charges(0, wanted));
        // The reply to the call must equal the reply to the last admitted request, or to the first request if none was
        // admitted.
        if let Some(told) = singles.get((granted as usize).saturating_sub(1)) {
            assert_eq!(taken.outcomes, told.outcomes, "invariant 10, the same reply");
        }
        for limit in &play.limits {
            let together = keys.state(&limit.rule, &limit.key(prefix, 0)).await;
            let one_by_one = keys.state(&limit.rule, &limit.key(prefix, 1)).await;
            assert_eq!(together, one_by_one, "invariant 10, the same state: {:?}", limit.rule);
        }
        operations += 1 + singles.len();
    }
    operations
}

impl Keys {
    /// Return the content of a key of any Redis type, without the expiry time that a state may contain.
    async fn state(&mut self, rule: &Rule, key: &[u8]) -> Vec<Vec<u8>> {
        if let Some(place) = Place::of(key) {
            let value: Option<Vec<u8>> =
                redis::cmd("GET").arg(&place.key).query_async(&mut self.connection).await.unwrap();
            return value.and_then(|value| place.read(&value).0).map(|state| state[8..].to_vec()).into_iter().collect();
        }
        let mut command = match rule {
            Rule::SlidingLog(_) => redis::cmd("LRANGE"),
            _ => redis::cmd("GET"),
        };
        command.arg(key);
        if let Rule::SlidingLog(_) = rule {
            command.arg(0).arg(-1);
        }
        let value: redis::Value = command.query_async(&mut self.connection).await.unwrap();
        match value {
            redis::Value::Nil => Vec::new(),
            value @ redis::Value::Array(_) => redis::from_redis_value(value).unwrap(),
            value => {
                let state: Vec<u8> = redis::from_redis_value(value).unwrap();
                vec![state]
            }
        }
    }
}

// ---- 13: the largest numbers ---------------------------------------------------------------------

/// An instant in the year 2200, in µs since the Unix epoch.
const LATE: u64 = 7_258_118_400_000_003;

/// Return the largest numbers that the scripts compute while no state exceeds twice its limit.
fn largest_numbers(rule: &Rule, now: u64) -> Vec<u128> {
    let now = u128::from(now);
    match *rule {
        Rule::TokenBucket(TokenBucket { burst, refill, parts }) => {
            let debt = 2 * u128::from(burst) * u128::from(parts);
            vec![debt, u128::from(refill), debt.div_ceil(u128::from(refill))]
        }
        Rule::FixedWindow(FixedWindow { limit, window, .. }) => vec![2 * u128::from(limit), now + u128::from(window)],
        Rule::SlidingWindow(SlidingWindow { limit, window, unit }) => {
            vec![2 * u128::from(limit) * u128::from(window / unit), now + 3 * u128::from(window)]
        }
        Rule::SlidingBuckets(SlidingBuckets { limit, window, .. }) => {
            vec![2 * u128::from(limit), now + 2 * u128::from(window)]
        }
        Rule::SlidingLog(SlidingLog { limit, window }) => vec![2 * u128::from(limit), now + u128::from(window)],
        Rule::Concurrency(Concurrency { limit, ttl: lease }) => vec![2 * u128::from(limit), now + u128::from(lease)],
    }
}

#[test]
fn largest_limits_are_counted_exactly() {
    let server = Redis::start();
    let stores = Stores::new(&server, "extremes");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let rules = extremes();
    assert!(rules.len() > 200, "{} rules are accepted", rules.len());
    for (number, rule) in rules.into_iter().enumerate() {
        for largest in largest_numbers(&rule, LATE) {
            assert!(
                largest < u128::from(EXACT_INTEGER_LIMIT),
                "invariant 13, every number stays exact: {largest} of {rule:?}"
            );
        }
        let limit = Limit::new(&format!("limit{number}"), rule);
        let capacity = limit.rule.capacity();
        for (who, now) in [(1, START + 1), (2, LATE)] {
            let call = |now: u64, operation, cost| {
                stores.clock.set(now);
                runtime.block_on(stores.call(operation, &[limit.charge(who, cost)]))
            };
            let full = call(now, Operation::Check, capacity);
            assert_eq!((full.granted, full.outcomes[0].remaining), (1, 0), "invariant 13, all of {:?}", limit.rule);
            let denied = call(now, Operation::Check, 1);
            let retry = denied.outcomes[0].retry_us;
            assert_eq!(denied.granted, 0, "invariant 13, not one more than {:?}", limit.rule);
            for wait in [1, retry / 2, retry.saturating_sub(1)] {
                call(now + wait, Operation::Peek, 1);
                call(now + wait, Operation::Peek, capacity);
                call(now + wait, Operation::Peek, capacity + 1);
            }
            assert_eq!(
                call(now + retry, Operation::Check, 1).granted,
                1,
                "invariant 13, the retry of {:?}",
                limit.rule
            );
            call(now + retry, Operation::Refund { charged_at: now + retry }, 1);
            call(now + retry, Operation::TakeUpTo, capacity);
            call(now + retry + 1, Operation::Charge, capacity / 2);
            call(now + retry + 1, Operation::Check, 1);
            call(now + retry + longest_reset(&limit.rule) / 2, Operation::Check, capacity / 2);
            call(now + retry + 400 * 86_400 * SECOND, Operation::Check, capacity);
            if !matches!(limit.rule, Rule::SlidingLog(_)) {
                // A response may state any number as a deferred cost.
                let later = now + retry + 400 * 86_400 * SECOND;
                call(later, Operation::Charge, EXACT_INTEGER_LIMIT - 1);
                call(later + 1, Operation::Charge, EXACT_INTEGER_LIMIT - 1);
                call(later + 2, Operation::Refund { charged_at: later }, EXACT_INTEGER_LIMIT - 1);
                call(later + 2, Operation::Check, 1);
            }
        }
    }
}

// ---- 15: another rate ----------------------------------------------------------------------------

#[test]
fn new_rate_converts_debt_exactly_and_revives_none() {
    let server = Rc::new(Redis::start());
    let batch = prop::collection::vec(resizing(), 1..=AT_ONCE);
    property(operations() / 5, 3 * AT_ONCE / 2, batch, |cases| {
        redis::cmd("FLUSHALL").exec(&mut server.connection()).unwrap();
        side_by_side(cases.into_iter().enumerate().map(|(number, case)| {
            let server = server.clone();
            async move { resized(&server, &format!("case{number}"), &case).await.unwrap_or(0) }
        }))
    });
}

/// Run a case with both stores. Return `None` if the machine paused for too long.
async fn resized(server: &Redis, prefix: &str, case: &Resizing) -> Option<usize> {
    let Resizing { old, new, cost, .. } = *case;
    let stores = Stores::new(server, prefix);
    let mut keys = Keys::new(server, &stores.clock).await;
    // Both limits have the same state, because the key of a bucket does not contain its rate.
    let [before, after] = [old, new].map(|rule| Limit::new("limit", Rule::TokenBucket(rule)));
    let name = before.key(prefix, 0);
    let call = async |keys: &mut Keys, now: u64, operation: Operation, charge: Charge<'_>| {
        stores.clock.set(now);
        let asked = monotonic();
        let verdict = stores.call(operation, &[charge]).await;
        keys.look(std::slice::from_ref(&name), asked).await.map(|_| verdict)
    };
    let charged = call(&mut keys, START, Operation::Charge, before.charge(0, cost)).await?;
    // Charge one more token after a seventh of the reset time, so that the debt may contain a fraction of a token.
    let charged_at = START + charged.outcomes[0].reset_us / 7;
    let charged = call(&mut keys, charged_at, Operation::Charge, before.charge(0, 1)).await?;
    let lasts = charged.outcomes[0].reset_us;
    let passed = (u128::from(lasts) * u128::from(case.idle) / 1000) as u64;
    let now = charged_at + passed;
    let state = keys.state(&before.rule, &name).await;
    let owed = u128::from(u64::from_le_bytes(state[0][8..16].try_into().unwrap()));
    let ends = ends(&before.rule, &keys.known.get(&name).cloned()).unwrap();
    let whole = [after.charge(0, new.burst)];
    let verdict = call(&mut keys, now, Operation::Check, whole[0]).await?;
    let to_new = |parts: u128| (parts * u128::from(new.parts)).div_ceil(u128::from(old.parts));
    let repaid = |rule: &TokenBucket| u128::from(passed) * u128::from(rule.refill);
    let (converted, refill) = (to_new(owed), u128::from(new.refill));
    let at_old_rate = to_new(owed.saturating_sub(repaid(&old)));
    let at_new_rate = converted.saturating_sub(repaid(&new));
    // The old rate may have applied until half a second before the expiry of the key.
    let span = u128::from(ends - SECOND / 2 - charged_at);
    let lowered = converted.div_ceil(refill) > span;
    let denied = verdict.outcomes[0];
    if lowered && denied.status == Status::Exceeded {
        for (wait, granted) in [(denied.retry_us - 1, 0), (denied.retry_us, 1)] {
            let answer = &stores.peek(now + wait, &[whole.to_vec()]).await[0];
            assert_eq!(answer.granted, granted, "invariant 15, the retry delay follows the new rate: {case:?}");
        }
    }
    call(&mut keys, now, Operation::Charge, after.charge(0, 0)).await?;
    let state = keys.state(&after.rule, &name).await;
    let numbers: Vec<_> = state[0].as_chunks().0.iter().map(|bytes| u128::from(u64::from_le_bytes(*bytes))).collect();
    // If the check of the whole burst was admitted, the debt was 0.
    let debt = if verdict.granted == 0 { numbers[1] } else { 0 };

    let what = format!("{case:?}: {debt} parts, {at_old_rate} with the old rate, {at_new_rate} with the new one");
    let least = if lowered { at_old_rate } else { at_new_rate };
    // The converted debt may be rounded up by 2 parts. If the rate counts as lowered only because of these parts, the
    // debt at the old rate and the debt at the new rate are both correct.
    let certain = lowered || (converted + 2).div_ceil(refill) <= span;
    assert!(debt >= least || !certain, "invariant 15, no debt is forgiven: {what}");
    assert!(debt <= (converted + 2).saturating_sub(repaid(&new)), "invariant 15, at most 2 parts more: {what}");
    if new == old {
        assert_eq!(debt, at_new_rate, "invariant 15, the same rate needs no conversion: {what}");
    }
    if lowered {
        let half_a_second = to_new(u128::from(old.refill) * u128::from(SECOND / 2 + 1000));
        assert!(debt <= at_old_rate + half_a_second + 4, "invariant 15, no more debt is restored: {what}");
    }
    Some(4)
}

// ---- 14: many denials ----------------------------------------------------------------------------

#[test]
fn denials_take_no_memory() {
    let server = Redis::start();
    let stores = Stores::new(&server, "flood");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let limits = every_algorithm(5, 3600 * SECOND).map(|(name, rule)| Limit::new(name, rule));
    let own = Limit::new("own", bucket(5, 3600 * SECOND, 5));
    let ask = |charges: &[Charge<'_>]| runtime.block_on(stores.call(Operation::Check, charges));
    for limit in &limits {
        assert_eq!(ask(&[limit.charge(0, 5)]).granted, 1);
    }
    // In each request, the limit `own` has a new identity with its full quota, and another limit denies.
    let denials = operations().max(100_000);
    let flood = |from: usize, count: usize| {
        for chunk in (from..from + count).collect::<Vec<_>>().chunks(128) {
            let charges = |number: &usize| {
                let exhausted = &limits[number % limits.len()];
                vec![own.charge(1 + *number as u128, 1), exhausted.charge(0, 1)]
            };
            let requests: Vec<_> = chunk.iter().map(charges).collect();
            for verdict in runtime.block_on(stores.check_all(&requests)) {
                assert_eq!(verdict.granted, 0);
            }
        }
    };
    // Measure the memory after the first 5,000 requests, because they let the buffers of connections grow.
    flood(0, 5000);
    let before = (memory(&server), server.keys().len(), stores.memory.len());
    flood(5000, denials);
    let after = (memory(&server), server.keys().len(), stores.memory.len());
    assert_eq!((before.1, before.2), (after.1, after.2), "invariant 14, {denials} denials and no new state");
    // The size of buffers varies. A key per denial would take at least 50 bytes per denial.
    assert!(after.0 < before.0 + 200_000, "invariant 14, {denials} denials: {} and then {} bytes", before.0, after.0);

    let opened = stores.clock.now_us();
    for limit in &limits {
        stores.clock.set(opened);
        let retry = ask(&[limit.charge(0, 1)]).outcomes[0].retry_us;
        stores.clock.set(opened + retry);
        assert_eq!(ask(&[limit.charge(0, 1)]).granted, 1, "invariant 14, the window opens on time: {:?}", limit.rule);
    }
}

/// Return the number of bytes that Redis has allocated.
fn memory(server: &Redis) -> u64 {
    let info: String = redis::cmd("INFO").arg("memory").query(&mut server.connection()).unwrap();
    info.lines().find_map(|line| line.strip_prefix("used_memory:")).unwrap().parse().unwrap()
}

#[test]
fn database_is_empty_after_all_ttls() {
    let server = Redis::start();
    let stores = Stores::new(&server, "end");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    // Start 50 ms before the end of the year in Berlin, so that the calendar window ends about as early as the other
    // windows.
    stores.clock.set("2027-12-31T22:59:59.95Z".parse::<jiff::Timestamp>().unwrap().as_microsecond() as u64);
    let limits = every_algorithm(5, 100_000).map(|(name, rule)| Limit::new(name, rule));
    let charges: Vec<_> = limits.iter().map(|limit| limit.charge(0, 5)).collect();
    assert_eq!(runtime.block_on(stores.call(Operation::Check, &charges)).granted, 1);
    assert_eq!(runtime.block_on(stores.call(Operation::Check, &charges)).granted, 0);
    let mut connection = server.connection();
    let mut size = || redis::cmd("DBSIZE").query::<u64>(&mut connection).unwrap();
    assert_eq!(size(), 3, "a key for the states with three numbers, and one for each other state");
    eventually("invariant 14, the database is empty after all TTLs", || size() == 0);
}
