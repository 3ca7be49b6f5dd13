//! Single cases of the contract that every store fulfils. `invariants.rs` tests this contract in random cases.

use std::sync::Arc;
use std::task::{Context, Waker};

use crate::support::MAX_WAIT;
use crate::support::redis::Redis;
use crate::support::stores::{
    ALIGNED, Limit, SECOND, START, Stores, all, bucket, buckets, calendar, call, concurrency, every_algorithm, log,
    quota, redis_store, sliding, window,
};
use redis::ConnectionLike;
use sluicegate::clock::{Clock, monotonic};
use sluicegate::limiter::algorithm::fixed_window::WindowStart;
use sluicegate::limiter::algorithm::{Rule, Status};
use sluicegate::limiter::key::{Identity, IdentityHasher, Key};
use sluicegate::limiter::memory::MemoryStore;
use sluicegate::limiter::quota::CalendarUnit;
use sluicegate::limiter::redis::StateLayout;
use sluicegate::limiter::redis::script;
use sluicegate::limiter::redis::script::{AlgorithmSet, ScriptVariant, script};
use sluicegate::limiter::redis::script::{LimitArgs, ScriptReply};
use sluicegate::limiter::settlement::{OwnedCharge, StoreHandle};
use sluicegate::limiter::singleflight::{CheckGroup, Singleflight};
use sluicegate::limiter::spec::{LimitVariant, LocalRules, LocalShare};
use sluicegate::limiter::store::{RedisStore, Store};
use sluicegate::limiter::verdict::{Charge, ChargeMode, Operation, StoreError};
use tokio_util::task::TaskTracker;

#[tokio::test]
async fn every_algorithm_admits_its_limit_and_returns_the_retry_delay() {
    let server = Redis::start();
    let stores = Stores::new(&server, "contract");
    for (name, rule, retry) in [
        ("bucket", bucket(10, 60 * SECOND, 3), 6 * SECOND),
        ("aligned", window(3, 60 * SECOND, ALIGNED), 50 * SECOND),
        ("first", window(3, 60 * SECOND, WindowStart::FirstRequest), 60 * SECOND),
        ("log", log(3, 60 * SECOND), 60 * SECOND),
        // 20 s into the next window, the previous window has a weight of two thirds: 2 of its 3 tokens still count.
        ("window", sliding(3, 60 * SECOND, 1), 70 * SECOND),
        // All requests are in the bucket from 6 s to 12 s. This bucket leaves the window at 72 s, 62 s after the
        // requests.
        ("buckets", buckets(3, 60 * SECOND, 10), 62 * SECOND),
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
            (0, Status::Exceeded, retry),
            "{name}"
        );
        let other = stores.call(Operation::Check, &[limit.charge(2, 1)]).await;
        assert_eq!(other.granted, 1, "{name}: another identity has its own quota");
        stores.clock.set(START + 10 * SECOND + retry - 1);
        assert_eq!(
            stores.call(Operation::Check, &[limit.charge(1, 1)]).await.granted,
            0,
            "{name}: denied 1 µs before the end of the retry delay"
        );
        stores.clock.set(START + 10 * SECOND + retry);
        assert_eq!(
            stores.call(Operation::Check, &[limit.charge(1, 1)]).await.granted,
            1,
            "{name}: admitted after the retry delay"
        );
        let never = stores.call(Operation::Check, &[limit.charge(1, 4)]).await;
        assert_eq!(never.outcomes[0].status, Status::CostTooLarge, "{name}: a cost beyond the limit");
    }
    server.assert_every_key_expires();
}

#[tokio::test]
async fn request_is_charged_to_all_limits_or_none() {
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

/// Requests have different limits of the same identities, in any order and number, so that states are added to values
/// that have other states.
#[tokio::test]
async fn requests_with_different_limits_of_an_identity_are_charged_exactly() {
    const HOUR: u64 = 3600 * SECOND;
    let server = Redis::start();
    let stores = Stores::new(&server, "mixed");
    let mut connection = server.connection();
    let rules =
        |size| [bucket(size, HOUR, size), window(size, HOUR, ALIGNED), sliding(size, HOUR, SECOND), log(size, HOUR)];
    let rules: Vec<_> = (3..15).flat_map(rules).collect();
    let limits: Vec<_> =
        rules.into_iter().enumerate().map(|(number, rule)| Limit::new(&format!("l{number}"), rule)).collect();
    let mut seed = 1;
    let mut random = |bound: usize| {
        seed = u64::wrapping_mul(seed, 6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (seed >> 33) as usize % bound
    };
    let (mut longest, mut separate) = (0, 0);
    for step in 0..600 {
        stores.clock.set(START + step * 20 * SECOND);
        // Four of the limits are in most requests.
        let mut chosen: Vec<(usize, u128)> = Vec::new();
        for _ in 0..=random(6) {
            let bound = if random(2) == 0 { limits.len() } else { 4 };
            let pair = (random(bound), random(2) as u128);
            if !chosen.contains(&pair) {
                chosen.push(pair);
            }
        }
        let charges: Vec<_> = chosen.iter().map(|(limit, identity)| limits[*limit].charge(*identity, 1)).collect();
        let operation = [Operation::Check, Operation::Check, Operation::Check, Operation::Charge][random(4)];
        let verdict = stores.call(operation, &charges).await;
        if verdict.granted == 1 && random(4) == 0 {
            stores.call(Operation::Refund { charged_at: verdict.now_us }, &charges).await;
        }
        // Redis expires keys in real time, not by the clock of the test.
        for key in server.keys() {
            redis::cmd("PERSIST").arg(&key).exec(&mut connection).unwrap();
            separate += usize::from([":b", ":f3600000000", ":w3600000000"].iter().any(|shape| key.ends_with(shape)));
            if key.ends_with(":states") {
                let value: Vec<u8> = redis::cmd("GET").arg(&key).query(&mut connection).unwrap();
                longest = longest.max(value.len());
            }
        }
    }
    // 36 of the limits have states with three numbers, and a request adds at most 6 states.
    assert!((8 + 16 * 40..8 + 22 * 40).contains(&longest), "{longest} bytes");
    assert!(separate > 0, "a full value makes states get separate keys");
}

#[tokio::test]
async fn shadow_limits_never_deny_and_deferred_ones_are_charged_later() {
    let server = Redis::start();
    let stores = Stores::new(&server, "modes");
    let limit = Limit::new("limit", window(1, 60 * SECOND, ALIGNED));
    let shadow = Charge { mode: ChargeMode::Shadow, ..limit.charge(1, 1) };
    for expected in [Status::Ok, Status::Exceeded, Status::Exceeded] {
        let verdict = stores.call(Operation::Check, &[shadow]).await;
        assert_eq!((verdict.granted, verdict.outcomes[0].status), (1, expected));
    }
    let tokens = Limit::new("tokens", bucket(100, 60 * SECOND, 100));
    let post_paid = Charge { mode: ChargeMode::Deferred, ..tokens.charge(1, 70) };
    for (remaining, after) in [(100, 30), (30, 0)] {
        let verdict = stores.call(Operation::Check, &[post_paid]).await;
        assert_eq!((verdict.granted, verdict.outcomes[0].remaining), (1, remaining));
        assert_eq!(stores.call(Operation::Charge, &[post_paid]).await.outcomes[0].remaining, after);
    }
    let denied = stores.call(Operation::Check, &[post_paid]).await;
    // The bucket of 100 tokens was charged 140. Until one token is free, 41 tokens must refill, at 600 ms each.
    assert_eq!((denied.granted, denied.outcomes[0].retry_us), (0, 41 * 600_000));
}

#[tokio::test]
async fn lower_rate_does_not_revive_repaid_debt() {
    let server = Redis::start();
    let stores = Stores::new(&server, "lowered");
    let [fast, slow] = [100, 1].map(|rate| Limit::new("limit", bucket(rate, SECOND, 100)));
    assert_eq!(stores.call(Operation::Check, &[fast.charge(1, 100)]).await.granted, 1);
    // At the old rate of 100 tokens per second, 99 of 100 tokens have refilled. The state does not contain this rate.
    // From the key's expiry, the script can only conclude that the bucket refills within 1.5 s. After 0.99 s, it
    // therefore counts 0.99/1.5 of the 100 tokens as refilled, which is 66 tokens.
    stores.clock.set(START + 990_000);
    let verdict = stores.call(Operation::Check, &[slow.charge(1, 1)]).await;
    assert_eq!((verdict.granted, verdict.outcomes[0].remaining), (1, 65));
    // From this time on, tokens refill at the lower rate.
    stores.clock.set(START + 990_000 + 3 * SECOND);
    let verdict = stores.call(Operation::Check, &[slow.charge(1, 1)]).await;
    assert_eq!((verdict.granted, verdict.outcomes[0].remaining), (1, 67));
}

#[tokio::test]
async fn calendar_windows_begin_with_their_calendar_unit() {
    let server = Redis::start();
    let stores = Stores::new(&server, "calendar");
    let limit = Limit::new("month", calendar(2, CalendarUnit::Month, "Europe/Berlin"));
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
    assert_eq!(**limit.bucket.name(), *"month:kmonth@Europe/Berlin", "the unit and the zone distinguish states");
}

#[tokio::test]
async fn gateway_with_a_wrong_clock_takes_the_time_of_redis() {
    let server = Redis::start();
    // The gateway's clock is a year behind: it sends the window boundaries of a year ago. The server has the current
    // time.
    let store = redis_store(&server, "off", Clock::Skewed(-365 * 86_400 * SECOND as i64));
    let limit = Limit::new("day", calendar(2, CalendarUnit::Day, "UTC"));
    for left in [1, 0] {
        let verdict = call(&store, Operation::Check, &[limit.charge(1, 1)]).await.unwrap();
        assert_eq!((verdict.granted, verdict.outcomes[0].remaining), (1, left));
    }
    assert_eq!(call(&store, Operation::Check, &[limit.charge(1, 1)]).await.unwrap().granted, 0);
}

#[tokio::test]
async fn invalid_script_arguments_write_nothing() {
    let server = Redis::start();
    let parts = AlgorithmSet::for_rules([&bucket(1, SECOND, 1)]);
    let mut connection = server.connection();
    let limit = Limit::new("l", bucket(1, SECOND, 1));
    let terms = LimitArgs::new(&[limit.charge(1, 1)], 0, 0);
    let ask = |requests, terms: &[LimitArgs]| {
        let mut argument = script::start_argument(0, &StateLayout::default(), 1, terms.len());
        script::append_group(&mut argument, requests, Operation::Check, terms);
        argument
    };
    let good = ask(1, &[terms]);
    let with = |at: usize, bytes: &[u8]| {
        let mut argument = good.clone();
        argument[at..at + bytes.len()].copy_from_slice(bytes);
        argument
    };
    for argument in [
        vec![],
        good[..8].to_vec(),
        good[..good.len() - 1].to_vec(),
        [&good[..], b"1"].concat(),
        ask(2, &[terms]),
        ask(0, &[terms]),
        ask(1, &[terms; 2]),
        ask(1, &[]),
        with(8, b"Z"),
        with(9, &f64::NAN.to_le_bytes()),
        with(17, b"Z"),
        with(26, &1e300_f64.to_le_bytes()),
        with(34, b"Z"),
        with(36, b"s"),
    ] {
        for frame in ScriptVariant::ALL {
            let text = &script(frame, parts).source;
            let mut call = redis::cmd("EVAL");
            let reply: Result<redis::Value, _> =
                call.arg(text).arg(1).arg("k:states").arg(&argument).arg("l:b\n").query(&mut connection);
            let error = match reply.and_then(|reply| reply.extract_error()) {
                Ok(redis::Value::Array(mut parts)) => parts.pop().unwrap().extract_error().unwrap_err(),
                reply => reply.unwrap_err(),
            };
            assert_eq!(error.code(), Some("RLARG"), "{argument:?}");
        }
    }
    assert!(server.keys().is_empty());
}

/// Length in bytes of the group of arguments of a request with one limit.
const GROUP: usize = 25 + 51;

/// Number of bytes before the groups.
const START_BYTES: usize = 9;

#[tokio::test]
async fn invalid_group_after_a_valid_one_charges_nothing() {
    let server = Redis::start();
    let mut connection = server.connection();
    let limit = Limit::new("l", bucket(5, SECOND, 5));
    let parts = AlgorithmSet::for_rules([&limit.rule]);
    let terms = [LimitArgs::new(&[limit.charge(1, 1)], 0, 0)];
    let mut good = script::start_argument(0, &StateLayout::default(), 2, 2);
    script::append_group(&mut good, 1, Operation::Check, &terms);
    script::append_group(&mut good, 1, Operation::Check, &terms);
    // Replace bytes of the second group from the offset `at`. Offsets of its fields: number of requests 0, operation 8,
    // number of limits 17, kind 25, flags 26, place 27, cost 36.
    let with = |at: usize, bytes: &[u8]| {
        let mut argument = good.clone();
        let at = START_BYTES + GROUP + at;
        argument[at..at + bytes.len()].copy_from_slice(bytes);
        argument
    };
    let number = |at: usize, number: f64| with(at, &number.to_le_bytes());
    let bad = [
        ("truncated", good[..good.len() - 1].to_vec()),
        ("header only", good[..START_BYTES + GROUP + 25].to_vec()),
        ("a part of a header", good[..START_BYTES + GROUP + 7].to_vec()),
        ("bytes after the end", [&good[..], b"1"].concat()),
        ("no requests", number(0, 0.0)),
        ("part of a request", number(0, 0.5)),
        ("more requests than keys", number(0, 2.0)),
        ("requests are no number", number(0, f64::NAN)),
        ("requests without end", number(0, f64::INFINITY)),
        ("unknown operation", with(8, b"Z")),
        ("another operation", with(8, b"N")),
        ("no limits", number(17, 0.0)),
        ("part of a limit", number(17, 1.5)),
        ("more limits than bytes", number(17, 2.0)),
        ("far more limits than bytes", number(17, 1e300)),
        ("limits are no number", number(17, f64::NAN)),
        ("unknown kind", with(25, b"Z")),
        ("kind without three numbers", with(25, b"L")),
        ("shadow", with(26, b"s")),
        ("post-paid", with(26, b"p")),
        (
            "takes nothing",
            [&with(8, b"T")[..START_BYTES + GROUP + 36], &0f64.to_le_bytes(), &good[START_BYTES + GROUP + 44..]]
                .concat(),
        ),
    ];
    for (what, argument) in bad {
        for frame in ScriptVariant::ALL {
            let text = &script(frame, parts).source;
            let mut call = redis::cmd("EVAL");
            let call = call.arg(text).arg(2).arg("good:states").arg("bad:states").arg(&argument).arg("l:b\nl:b\n");
            // Do not use `query`: it reports an error of one request in an array as an error of the whole call.
            match connection.req_packed_command(&call.get_packed_command()).unwrap() {
                redis::Value::ServerError(error) => {
                    assert_eq!(error.code(), "RLARG", "{what}, {frame:?}: {error}");
                    assert!(server.keys().is_empty(), "{what}, {frame:?}: an error of the whole call writes nothing");
                }
                // Only the generic script supports shadow and deferred limits. For an unknown kind, it reports an error
                // of the single request instead of the whole call.
                _ => assert_eq!(frame, ScriptVariant::Generic, "{what}"),
            }
            redis::cmd("FLUSHALL").exec(&mut connection).unwrap();
        }
    }
    for frame in ScriptVariant::ALL {
        let mut call = redis::cmd("EVAL");
        let call = call
            .arg(&script(frame, parts).source)
            .arg(2)
            .arg("one:states")
            .arg("other:states")
            .arg(&good)
            .arg("l:b\nl:b\n");
        call.exec(&mut connection).unwrap();
        assert_eq!(server.keys().len(), 2, "{frame:?}: good groups are charged");
        redis::cmd("FLUSHALL").exec(&mut connection).unwrap();
    }
}

#[tokio::test]
async fn request_with_a_corrupt_value_leaves_the_other_requests_of_the_call_alone() {
    let server = Redis::start();
    let mut connection = server.connection();
    let limits = [Limit::new("l", bucket(5, SECOND, 5)), Limit::new("m", window(5, SECOND, ALIGNED))];
    let parts = AlgorithmSet::for_rules(limits.iter().map(|limit| &limit.rule));
    // The two limits of a request have different identities, so each request has two keys.
    let charges = [limits[0].charge(1, 1), limits[1].charge(2, 1)];
    let terms = [0, 1].map(|index| LimitArgs::new(&charges, index, 0));
    let mut argument = script::start_argument(0, &StateLayout::default(), 1, 2);
    script::append_group(&mut argument, 2, Operation::Check, &terms);
    for variant in ScriptVariant::ALL.into_iter().filter(|variant| *variant != ScriptVariant::Single) {
        for corrupt in ["a:states", "b:states"] {
            redis::cmd("SET").arg(corrupt).arg("corrupt").exec(&mut connection).unwrap();
            let mut call = redis::cmd("EVAL");
            let keys = ["a:states", "b:states", "c:states", "d:states"];
            call.arg(&script(variant, parts).source).arg(4).arg(&keys).arg(&argument).arg("l:b\nm:f1\n");
            // `query` would report the error of one request as an error of the whole call.
            let reply = connection.req_packed_command(&call.get_packed_command()).unwrap();
            let mut reply = ScriptReply::new(reply).unwrap();
            let mut next = || reply.next_verdict(Operation::Check, &terms).unwrap();
            assert_eq!(next().unwrap_err().code(), "WRONGTYPE", "{variant:?}");
            assert_eq!(next().unwrap().granted, 1, "{variant:?}");
            let mut keys = server.keys();
            keys.sort();
            assert_eq!(keys, [corrupt, "c:states", "d:states"], "{variant:?}");
            redis::cmd("FLUSHALL").exec(&mut connection).unwrap();
        }
    }
}

/// Check several requests in one tick of the event loop, with every algorithm and with several limits. Compare the
/// verdicts with the model.
async fn check_in_one_tick(server: &Redis, stores: &Stores, alone: &[Limit], together: &[Limit], rounds: u64) {
    let store = redis_store(server, "round", stores.clock.clone());
    let model = MemoryStore::new(1_000_000, stores.clock.clone());
    for round in 0..rounds {
        stores.clock.set(START + round * SECOND);
        // No two limits share an identity, so that the order of groups does not matter.
        let of = |place: usize| (0..6).map(move |number| (number, (place as u128) << 64 | u128::from(number % 3)));
        let mut asked: Vec<Vec<Charge<'_>>> = Vec::new();
        for (place, limit) in alone.iter().enumerate() {
            asked.extend(of(place).map(|(number, id)| {
                vec![Charge { permit_id: (place as u64) << 32 | round << 8 | number, ..limit.charge(id, 1) }]
            }));
        }
        asked.extend(of(alone.len()).map(|(_, id)| together.iter().map(|limit| limit.charge(id, 1)).collect()));
        let expected: Vec<_> = asked.iter().map(|charges| model.decide(Operation::Check, charges)).collect();
        let before = server.calls("evalsha") + server.calls("eval");
        let verdicts = all(asked.iter().map(|charges| call(&store, Operation::Check, charges))).await;
        let calls = server.calls("evalsha") + server.calls("eval") - before;
        let verdicts: Vec<_> = verdicts.into_iter().map(Result::unwrap).collect();
        assert_eq!(verdicts, expected, "round {round}");
        // In the first round, EVALSHA fails with NOSCRIPT and the call is repeated.
        assert_eq!(calls, if round == 0 { 2 } else { 1 }, "calls for {} requests in round {round}", asked.len());
    }
}

#[tokio::test]
async fn checks_of_one_tick_are_one_call_and_decided_separately() {
    let server = Redis::start();
    let stores = Stores::new(&server, "unused");
    let rules = every_algorithm(7, 60 * SECOND).into_iter().chain([("leases", concurrency(7, 60 * SECOND))]);
    let alone: Vec<_> = rules.map(|(name, rule)| Limit::new(name, rule)).collect();
    let pair =
        [Limit::new("broad", bucket(20, 60 * SECOND, 20)), Limit::new("narrow", window(7, 60 * SECOND, ALIGNED))];
    check_in_one_tick(&server, &stores, &alone, &pair, 10).await;
}

#[tokio::test]
async fn batched_checks_of_few_limits_are_decided_separately() {
    let server = Redis::start();
    for most in 2..=5 {
        let stores = Stores::new(&server, "unused");
        let few = |number| {
            let name = format!("few-{most}-{number}");
            match number % 4 {
                0 => Limit::new(&name, bucket(20, 60 * SECOND, 20)),
                1 => Limit::new(&name, window(7, 60 * SECOND, ALIGNED)),
                2 => Limit::new(&name, window(9, 5 * SECOND, WindowStart::FirstRequest)),
                _ => Limit::new(&name, sliding(11, 20 * SECOND, 100)),
            }
        };
        let together: Vec<_> = (0..most).map(few).collect();
        let alone: Vec<_> = (10..14).map(few).collect();
        check_in_one_tick(&server, &stores, &alone, &together, 30).await;
    }
}

#[tokio::test]
async fn broken_state_fails_its_request_alone_in_a_batch() {
    let server = Redis::start();
    let store = redis_store(&server, "broken", Clock::Store);
    let limits = [Limit::new("a", bucket(3, SECOND, 3)), Limit::new("b", window(3, 3600 * SECOND, ALIGNED))];
    redis::cmd("RPUSH").arg(limits[0].key("broken", 2)).arg("x").exec(&mut server.connection()).unwrap();
    redis::cmd("SET").arg(limits[1].key("broken", 3)).arg("what?").exec(&mut server.connection()).unwrap();
    for (identity, value) in [(4, "what?"), (5, "")] {
        let mut key = Vec::new();
        Identity(identity).write_key("broken", &mut key);
        redis::cmd("SET").arg(key).arg(value).exec(&mut server.connection()).unwrap();
    }
    for round in 0..2 {
        let asked: Vec<_> = (0..7).map(|id| limits.each_ref().map(|limit| limit.charge(id, 1))).collect();
        let verdicts = all(asked.iter().map(|charges| call(&store, Operation::Check, charges))).await;
        for (id, verdict) in verdicts.into_iter().enumerate() {
            match (id, verdict) {
                (2..=5, verdict) => assert!(matches!(verdict, Err(StoreError::CorruptState(_))), "{id}: {verdict:?}"),
                (_, verdict) => {
                    let remaining: Vec<_> = verdict.unwrap().outcomes.iter().map(|outcome| outcome.remaining).collect();
                    assert_eq!(remaining[1], 2 - round, "{id}");
                }
            }
        }
    }
    // A request is charged to all of its limits or to none: the request that failed was not charged to its other limit.
    let verdict = call(&store, Operation::Peek, &[limits[1].charge(2, 1)]).await.unwrap();
    assert_eq!(verdict.outcomes[0].remaining, 3);
}

#[tokio::test]
async fn rejected_write_fails_its_request_alone() {
    let server = Redis::start();
    let store = redis_store(&server, "full", Clock::Store);
    let limits: Vec<_> =
        (0..5).map(|number| Limit::new(&format!("l{number}"), window(9, 3600 * SECOND, ALIGNED))).collect();
    let memory = |most: &str| {
        let set: () = redis::cmd("CONFIG").arg(&["SET", "maxmemory", most]).query(&mut server.connection()).unwrap();
        set
    };
    for count in 1..=limits.len() {
        let charges: Vec<_> = limits[..count].iter().map(|limit| limit.charge(count as u128, 1)).collect();
        // The first round creates the state, the second updates it.
        for left in [9, 8] {
            memory("1");
            let refused = call(&store, Operation::Check, &charges).await;
            assert!(matches!(refused, Err(StoreError::WritesRejected(_))), "{count}: {refused:?}");
            memory("0");
            let verdict = call(&store, Operation::Check, &charges).await.unwrap();
            assert!(verdict.outcomes.iter().all(|outcome| outcome.remaining == left - 1), "{count}: {verdict:?}");
        }
    }
}

/// Set `maxmemory`. 0 means no limit.
fn max_memory(server: &Redis, bytes: &str) {
    redis::cmd("CONFIG").arg(&["SET", "maxmemory", bytes]).exec(&mut server.connection()).unwrap();
}

/// Return all keys with their serialized values.
fn content(server: &Redis) -> Vec<(String, Vec<u8>)> {
    let mut keys = server.keys();
    keys.sort();
    let dump = |key: &String| redis::cmd("DUMP").arg(key).query(&mut server.connection()).unwrap();
    keys.iter().map(|key| (key.clone(), dump(key))).collect()
}

fn every_limit(size: u64, length: u64) -> Vec<Limit> {
    let rules = every_algorithm(size, length).into_iter().chain([("concurrency", concurrency(size, length))]);
    rules.map(|(name, rule)| Limit::new(name, rule)).collect()
}

#[tokio::test]
async fn charge_beyond_maxmemory_fails_and_writes_nothing() {
    let server = Redis::start();
    let clock = Clock::manual(START + 365 * 86_400 * SECOND);
    let store = redis_store(&server, "full", clock.clone());
    for limit in every_limit(9, 60 * SECOND) {
        let start = clock.now_us();
        let shape = limit.rule.shape();
        let charge = |permit_id| Charge { permit_id, ..limit.charge(1, 1) };
        for lease in 1..=3 {
            call(&store, Operation::Check, &[charge(lease)]).await.unwrap();
        }
        // Charge an existing state, then again after its first entries have expired, and then after the clock was set
        // back.
        for now in [start + SECOND, start + 61 * SECOND, start - 10 * SECOND] {
            clock.set(now);
            let before = content(&server);
            max_memory(&server, "1");
            for (operation, identity) in
                [(Operation::Check, 1), (Operation::Check, 2), (Operation::Charge, 1), (Operation::Charge, 2)]
            {
                let charge = Charge { permit_id: 9, ..limit.charge(identity, 1) };
                let refused = call(&store, operation, &[charge]).await;
                assert!(
                    matches!(refused, Err(StoreError::WritesRejected(_))),
                    "{shape} at {now}: {operation:?} {refused:?}"
                );
            }
            max_memory(&server, "0");
            assert_eq!(content(&server), before, "{shape} at {now}: rejected charges write nothing");
        }
        // The clock is set back, so the timestamp of the state is in the future. A denied check must not write even
        // then, for example to set the timestamp to the present.
        clock.set(start - 1000);
        let before = content(&server);
        max_memory(&server, "1");
        let refused = call(&store, Operation::Check, &[Charge { cost: 9, ..charge(9) }]).await;
        max_memory(&server, "0");
        assert_eq!(content(&server), before, "{shape}: {refused:?}");
        assert!(refused.as_ref().map_or(true, |verdict| verdict.granted == 0), "{shape}: {refused:?}");
        clock.set(start);
        redis::cmd("FLUSHALL").exec(&mut server.connection()).unwrap();
    }
}

#[tokio::test]
async fn release_in_a_call_lets_no_charge_write_beyond_maxmemory() {
    let server = Redis::start();
    let clock = Clock::manual(START);
    let store = redis_store(&server, "full", clock.clone());
    let limits = every_limit(9, 3600 * SECOND);
    let concurrency = limits.last().unwrap();
    for limit in &limits {
        let held = |permit_id| Charge { permit_id, ..concurrency.charge(1, 1) };
        for lease in 1..=3 {
            call(&store, Operation::Check, &[held(lease)]).await.unwrap();
        }
        call(&store, Operation::Check, &[limit.charge(2, 3)]).await.unwrap();
        let keys = server.keys().len();
        max_memory(&server, "1");
        let calls = server.calls("evalsha") + server.calls("eval");
        let release = Operation::Refund { charged_at: 0 };
        let asked = [
            (release, held(1)),
            (Operation::Renew, held(2)),
            (Operation::Check, limit.charge(3, 1)),
            (release, held(3)),
            (Operation::Charge, limit.charge(4, 1)),
            (Operation::Peek, Charge { cost: 0, ..held(9) }),
            (Operation::Check, limit.charge(2, 1)),
        ];
        let asked = asked.map(|(operation, charge)| (operation, [charge]));
        let answers = all(asked.iter().map(|(operation, charges)| call(&store, *operation, charges))).await;
        let calls = server.calls("evalsha") + server.calls("eval") - calls;
        max_memory(&server, "0");
        let shape = limit.rule.shape();
        // Releases, renewals and charges are in one call, checks and peeks in another. The first call with a combination
        // of algorithms gets NOSCRIPT and is repeated.
        assert!(calls <= 4, "{shape}: the requests are in two calls: {calls}");
        for ((operation, charges), answer) in asked.iter().zip(&answers) {
            let what = format!("{shape}: {operation:?} of {charges:?}: {answer:?}");
            match operation {
                Operation::Check | Operation::Charge => {
                    assert!(matches!(answer, Err(StoreError::WritesRejected(_))), "{what}");
                }
                // The script handles releases, renewals and peeks after the charges, one after the other.
                _ => assert_eq!(answer.as_ref().unwrap().granted, 1, "{what}"),
            }
        }
        assert_eq!(server.keys().len(), keys, "{shape}: no key was added");
        let left = call(&store, Operation::Peek, &[held(9)]).await.unwrap().outcomes[0].remaining;
        assert_eq!(left, 8, "{shape}: two of three permits were released, the third was renewed");
        redis::cmd("FLUSHALL").exec(&mut server.connection()).unwrap();
    }
}

#[test]
fn override_beyond_maxmemory_fails_and_deletes_nothing() {
    let server = Redis::start();
    let put = |field: &str| -> redis::RedisResult<i64> {
        let mut call = redis::cmd("EVAL");
        call.arg(include_str!("../../lua/overrides.lua")).arg(1).arg("overrides").arg("set").arg(10);
        call.arg(field).arg(60 * SECOND).arg(0).arg(0).arg("1/s");
        call.query::<Vec<i64>>(&mut server.connection()).map(|reply| reply[0])
    };
    put("limit one").unwrap();
    // This override expired in 1970.
    redis::cmd("HSET").arg(&["overrides", "limit ended", "1 1/s"]).exec(&mut server.connection()).unwrap();
    let before = content(&server);
    max_memory(&server, "1");
    let refused = put("limit two").unwrap_err();
    max_memory(&server, "0");
    assert!(refused.to_string().contains("OOM"), "{refused}");
    assert_eq!(content(&server), before);
    put("limit two").unwrap();
    let fields: Vec<String> = redis::cmd("HKEYS").arg("overrides").query(&mut server.connection()).unwrap();
    assert_eq!(fields, ["limit one", "limit two"]);
}

#[tokio::test]
async fn coalesced_tokens_return_the_debt_before_each() {
    let server = Redis::start();
    let clock = Clock::manual(START);
    let store = RedisStore::Single(redis_store(&server, "coalesced", clock.clone()));
    let fallback = Arc::new(MemoryStore::new(1, clock));
    let backend = Store::Redis { store, fallback, metrics: Arc::default() };
    let store_handle =
        Arc::new(StoreHandle { store: backend, denials: None, events: Arc::default(), tasks: TaskTracker::new() });
    let singleflight = Arc::new(Singleflight::new(MAX_WAIT, Arc::default()));
    let Limit { rule, bucket, .. } = Limit::new("l", bucket(10, SECOND, 10));
    let plan = Arc::new(LimitVariant {
        id: 1,
        quota: quota(10, SECOND),
        local_rules: LocalRules::new(LocalShare::default()),
        rule: rule.clone(),
        state_name: bucket,
    });
    let pending = OwnedCharge {
        limit_index: 0,
        variant: plan.clone(),
        identity: Identity(1),
        cost: 1,
        permit_id: 0,
        prefetch: 0,
        debt_before_us: 0,
        usage: None,
        notify: None,
    };
    let key = Key { identity: Identity(1), state_name: &plan.state_name };
    let (mode, usage) = (ChargeMode::Enforced, None);
    let charge = [Charge { key, rule: &plan.rule, cost: 1, mode, permit_id: 0, debt_before_us: 0, usage }];
    let pending = || vec![pending.clone()];
    let set = CheckGroup { id: 1, prefetch: 0 };
    // The first check is sent alone. The other checks are coalesced when its reply has arrived.
    let checks = (0..6).map(|_| singleflight.check(&store_handle, set, &charge, monotonic(), pending));
    let verdicts: Vec<_> = all(checks).await.into_iter().map(Result::unwrap).collect();
    assert_eq!(verdicts.iter().map(|verdict| verdict.charged_later).collect::<Vec<_>>(), [0, 4, 3, 2, 1, 0]);
    let before = verdicts.iter().map(|verdict| rule.debt_before_us(&verdict.outcomes[0], 0, 1 + verdict.charged_later));
    // A token refills in 100 ms.
    assert_eq!(before.collect::<Vec<_>>(), [0, 100_000, 200_000, 300_000, 400_000, 500_000]);
}

#[tokio::test]
async fn request_cancelled_before_its_call_is_not_charged() {
    let server = Redis::start();
    let store = redis_store(&server, "left", Clock::Store);
    let limit = Limit::new("limit", window(100, 3600 * SECOND, ALIGNED));
    let charges = [[limit.charge(1, 1)], [limit.charge(2, 1)], [limit.charge(3, 1)]];
    let mut calls = charges.each_ref().map(|charges| Box::pin(call(&store, Operation::Check, charges)));
    for call in &mut calls {
        assert!(call.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    }
    let [first, second, third] = calls;
    drop(second);
    assert_eq!((first.await.unwrap().granted, third.await.unwrap().granted), (1, 1));
    for (identity, left) in [(1, 99), (2, 100), (3, 99)] {
        let verdict = call(&store, Operation::Peek, &[limit.charge(identity, 1)]).await.unwrap();
        assert_eq!(verdict.outcomes[0].remaining, left, "{identity}");
    }
}

#[tokio::test]
async fn large_batch_is_split_into_several_calls() {
    let server = Redis::start();
    let store = redis_store(&server, "long", Clock::Store);
    let limit = Limit::new("limit", window(1000, 3600 * SECOND, ALIGNED));
    let charge = [limit.charge(1, 1)];
    call(&store, Operation::Check, &charge).await.unwrap();
    let before = server.calls("evalsha");
    let verdicts = all((0..300).map(|_| call(&store, Operation::Check, &charge))).await;
    let mut remaining: Vec<_> = verdicts.into_iter().map(|verdict| verdict.unwrap().outcomes[0].remaining).collect();
    remaining.sort_unstable();
    assert_eq!(remaining, (699..999).collect::<Vec<_>>(), "each token was granted once");
    assert_eq!(server.calls("evalsha") - before, 3, "each call has at most 128 keys");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn parallel_clients_are_admitted_exactly() {
    let server = Redis::start();
    let stores = Arc::new(Stores::new(&server, "parallel"));
    let leases = ("concurrency", concurrency(50, 3600 * SECOND));
    for (name, rule) in every_algorithm(50, 3600 * SECOND).into_iter().chain([leases]) {
        let (limit, other) = (Limit::new(name, rule), Limit::new("other", bucket(1000, SECOND, 1000)));
        let limits = Arc::new((limit, other));
        let tasks: Vec<_> = (0..16)
            .map(|task| {
                let (stores, limits) = (stores.clone(), limits.clone());
                tokio::spawn(async move {
                    let (mut memory, mut redis) = (0, 0);
                    for number in 0..50 {
                        let charges =
                            [Charge { permit_id: task * 50 + number, ..limits.0.charge(1, 1) }, limits.1.charge(1, 1)];
                        memory += stores.memory.decide(Operation::Check, &charges).granted;
                        redis += call(&stores.redis, Operation::Check, &charges).await.unwrap().granted;
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
        assert_eq!(sum, (50, 50), "invariant 12, parallel clients are admitted exactly: {name}, memory and Redis");
    }
}

#[test]
fn memory_store_is_bounded_and_evicts() {
    let clock = Clock::manual(START);
    let store = MemoryStore::new(1000, clock.clone());
    let limit = Limit::new("limit", window(10, 60 * SECOND, ALIGNED));
    // The identities are distributed over all shards of the memory store.
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
    assert!(live < 1024, "sweeping deletes expired states: {live} remain");
}

/// Return the maximum number of tokens that a client gets within any half-open interval of 60 s. The client takes
/// `first` tokens at the time `start`, and every available token from the time `greedy` on. Times are in ms after a
/// full minute.
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
fn greedy_client_gets_the_documented_worst_case() {
    for (name, rule, expected) in [
        ("fixed-window", window(100, 60 * SECOND, ALIGNED), 200),
        ("first-request", window(100, 60 * SECOND, WindowStart::FirstRequest), 199),
        ("sliding-window", sliding(100, 60 * SECOND, 1), 199),
        ("token-bucket, burst 100", bucket(100, 60 * SECOND, 100), 199),
        ("token-bucket, burst 10", bucket(100, 60 * SECOND, 10), 109),
        ("sliding-buckets", buckets(100, 60 * SECOND, 10), 100),
        ("sliding-log", log(100, 60 * SECOND), 100),
    ] {
        // Each strategy is `start`, `first` and `greedy`. The client takes every available token, for example, from the
        // start of a window, from its end, or from its end after one request at its start.
        let strategies = [(0, 0, 0), (0, 0, 59_995), (0, 1, 59_995), (30_000, 1, 89_995), (0, 50, 30_000)];
        let most = strategies.map(|(start, first, greedy)| most_admitted(&rule, start, first, greedy));
        assert_eq!(most.iter().max(), Some(&expected), "{name}: {most:?}");
    }
}
