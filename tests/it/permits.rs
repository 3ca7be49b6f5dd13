//! Concurrency permits in random cases: the script, the Rust model and an independent list of permits in flight must
//! agree.

use std::collections::BTreeMap;

use crate::support::random::{operations, property};
use crate::support::redis::Redis;
use crate::support::stores::{Limit, SECOND, START, Stores, apart, log};
use proptest::prelude::*;
use sluicegate::limiter::algorithm::Rule;
use sluicegate::limiter::algorithm::Status;
use sluicegate::limiter::algorithm::concurrency::Concurrency;
use sluicegate::limiter::verdict::{Charge, Operation};

const LEASE: u64 = 6 * SECOND;

#[derive(Debug, Clone, Copy)]
enum Act {
    /// A request acquires a permit, alone or together with an entry of a sliding log.
    Acquire { with_log: bool },
    /// The n-th last request releases its permit.
    Release(u64),
    /// The n-th last request renews its permit.
    Renew(u64),
    /// A client reads the remaining permits without a charge.
    Peek,
    /// A permit is charged without a check.
    Force,
    /// The quota of the limit changes to this number of permits.
    Resize(u64),
}

/// An action after a pause in µs. The pause is negative if the clock is set back.
fn step(back: bool) -> impl Strategy<Value = (i64, Act)> {
    let act = prop_oneof![
        6 => any::<bool>().prop_map(|with_log| Act::Acquire { with_log }),
        3 => (0..8u64).prop_map(Act::Release),
        3 => (0..8u64).prop_map(Act::Renew),
        1 => Just(Act::Peek),
        1 => Just(Act::Force),
        1 => (1..6u64).prop_map(Act::Resize),
    ];
    let lease = LEASE as i64;
    let earliest = if back { -3 * lease } else { 0 };
    let pause = prop_oneof![3 => Just(0), 3 => 0..lease / 3, 1 => 0..2 * lease, 1 => earliest..lease, 1 => Just(lease)];
    (pause, act)
}

#[test]
fn live_permits_never_exceed_the_limit() {
    let case = (any::<bool>(), 1..5u64)
        .prop_flat_map(|(back, limit)| (Just(back), Just(limit), prop::collection::vec(step(back), 1..60)));
    let server = Redis::start();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let mut number = 0;
    property(operations() / 5, 30, case, |(back, limit, steps)| {
        number += 1;
        runtime.block_on(play(&server, &format!("case{number}"), back, limit, &steps))
    });
}

async fn play(server: &Redis, prefix: &str, back: bool, limit: u64, steps: &[(i64, Act)]) -> usize {
    let stores = Stores::new(server, prefix);
    let rules = vec![Rule::Concurrency(Concurrency { limit, ttl: LEASE }), log(20, 30 * SECOND)];
    let mut limits = apart(rules, 1);
    let mut connection = server.connection();
    let key = limits[0].key(prefix, 0);
    // The permits in flight and their expiry times. This list is exact while the clock moves forward.
    let mut in_flight: BTreeMap<u64, u64> = BTreeMap::new();
    let (mut now, mut latest, mut next) = (START + 1000 * SECOND, 0, 100);
    for &(pause, act) in steps {
        now = now.saturating_add_signed(pause);
        latest = latest.max(now);
        stores.clock.set(now);
        in_flight.retain(|_, ends| *ends > now);
        if let Act::Resize(size) = act {
            crate::support::stores::resize(&mut limits[0].rule, size);
        }
        let (slots, units) = (&limits[0], &limits[1]);
        let most = slots.rule.capacity();
        let dump = |connection: &mut redis::Connection| -> Option<Vec<u8>> {
            redis::cmd("DUMP").arg(&key).query(connection).unwrap()
        };
        let before = dump(&mut connection);
        let what = format!("{act:?} at {now}, {in_flight:?}");
        match act {
            Act::Acquire { with_log } => {
                next += 1;
                let charges = [held(slots, next), units.charge(0, 1)];
                let verdict = stores.call(Operation::Check, &charges[..1 + usize::from(with_log)]).await;
                let slot = verdict.outcomes[0];
                if !back {
                    let free = (in_flight.len() as u64) < most;
                    assert_eq!(
                        slot.status == Status::Ok,
                        free,
                        "a permit is granted if and only if one is free: {what}"
                    );
                }
                if verdict.granted > 0 {
                    in_flight.insert(next, now + LEASE);
                } else if now == latest {
                    assert_eq!(dump(&mut connection), before, "a denied request changes nothing: {what}");
                }
                if slot.status == Status::Saturated {
                    assert!(slot.retry_us <= LEASE, "permits expire, even if the clock was set back: {what}");
                    let later = stores.peek(now + slot.retry_us, &[vec![held(slots, 1)]]).await;
                    assert_eq!(later[0].granted, 1, "a permit is free after the stated time: {what}");
                }
            }
            Act::Force => {
                next += 1;
                stores.call(Operation::Charge, &[held(slots, next)]).await;
                in_flight.insert(next, now + LEASE);
            }
            Act::Release(ago) => {
                stores.call(Operation::Refund { charged_at: 0 }, &[held(slots, next - ago)]).await;
                in_flight.remove(&(next - ago));
            }
            Act::Renew(ago) => {
                stores.call(Operation::Renew, &[held(slots, next - ago)]).await;
                in_flight.insert(next - ago, now + LEASE);
                if !back {
                    let live = stores.call(Operation::Peek, &[held(slots, 1)]).await.outcomes[0];
                    let left = most.saturating_sub(in_flight.len() as u64);
                    assert_eq!(live.remaining, left, "a renewal restores a lost permit: {what}");
                }
            }
            Act::Peek | Act::Resize(_) => {
                let outcome = stores.call(Operation::Peek, &[held(slots, 1)]).await.outcomes[0];
                if !back {
                    assert_eq!(outcome.remaining, most.saturating_sub(in_flight.len() as u64), "{what}");
                }
                assert_eq!(dump(&mut connection), before, "a peek changes nothing: {what}");
            }
        }
        let ttl: i64 = redis::cmd("PTTL").arg(&key).query(&mut connection).unwrap();
        assert!(ttl == -2 || (0..=(LEASE / 1000 + 1000) as i64).contains(&ttl), "a TTL of {ttl} ms: {what}");
    }
    steps.len()
}

fn held(limit: &Limit, lease: u64) -> Charge<'_> {
    Charge { permit_id: lease, ..limit.charge(0, 1) }
}
