//! Batching: which checks share a call to Redis.

use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use crate::support::MAX_WAIT;
use crate::support::redis::Redis;
use crate::support::resp::{Answer, FakeRedis, error};
use crate::support::stores::{
    Limit, SECOND, START, Stores, all as all_of, bucket, buckets, call, concurrency, log, quota,
};
use sluicegate::clock::{Clock, monotonic};
use sluicegate::limiter::algorithm::Rule;
use sluicegate::limiter::key::{Identity, Key};
use sluicegate::limiter::memory::MemoryStore;
use sluicegate::limiter::redis::RedisSettings;
use sluicegate::limiter::redis::batcher::ServerStore;
use sluicegate::limiter::redis::server::RedisEndpoint;
use sluicegate::limiter::settlement::{OwnedCharge, StoreHandle};
use sluicegate::limiter::singleflight::{CheckGroup, Singleflight};
use sluicegate::limiter::spec::{LimitVariant, LocalRules, LocalShare};
use sluicegate::limiter::store::{RedisStore, Store};
use sluicegate::limiter::verdict::{Charge, ChargeMode, Operation};
use tokio::task::{JoinHandle, yield_now};
use tokio::time::timeout;
use tokio_util::task::TaskTracker;

/// Start a fake Redis that delays its reply to each script call until the test sends a message through the returned
/// sender. If the test drops the sender, the fake Redis replies at once.
fn held_redis() -> (FakeRedis, mpsc::Sender<()>) {
    let (sender, words) = mpsc::channel();
    let words = Mutex::new(words);
    let fake = FakeRedis::start(move |command| {
        if command.is_script() {
            let _ = words.lock().unwrap().recv();
        }
        Answer::Usual
    });
    (fake, sender)
}

async fn connected(fake: &FakeRedis, timeout: Duration) -> ServerStore {
    store_with_connections(fake, timeout, 1).await
}

/// Return a store with this number of connections to Redis. The store uses its connections in turn.
async fn store_with_connections(fake: &FakeRedis, timeout: Duration, connections: u32) -> ServerStore {
    let settings = RedisSettings { connections, timeout, connect_timeout: MAX_WAIT, ..RedisSettings::default() };
    let server = RedisEndpoint::Single(redis::Client::open(fake.url()).unwrap());
    let store = ServerStore::new(&settings, server, Arc::default(), Arc::default());
    store.maintain_connections().await;
    store
}

/// Start `requests` checks of different identities, each in its own event-loop tick. Each returned task returns whether
/// its check got a verdict.
async fn one_by_one(store: &Arc<ServerStore>, requests: u128) -> Vec<JoinHandle<bool>> {
    let mut asked = Vec::new();
    for identity in 0..requests {
        let store = store.clone();
        asked.push(tokio::spawn(async move {
            let limit = Limit::new("l", bucket(10, SECOND, 10));
            call(&store, Operation::Check, &[limit.charge(identity, 1)]).await.is_ok()
        }));
        // Yield often enough that the check runs, its call is encoded, and the connection writes the call.
        for _ in 0..10 {
            yield_now().await;
        }
    }
    asked
}

async fn all(asked: Vec<JoinHandle<bool>>) -> bool {
    let mut decided = true;
    for one in asked {
        decided &= timeout(MAX_WAIT, one).await.expect("the check ends").unwrap();
    }
    decided
}

/// Wait until the fake Redis has received this number of requests.
async fn wait_for_requests(fake: &FakeRedis, requests: usize) {
    let all = async {
        while fake.requests() < requests {
            yield_now().await;
        }
    };
    timeout(MAX_WAIT, all).await.expect("the requests arrive");
}

/// Return the number of requests in each script call.
fn sizes(fake: &FakeRedis) -> Vec<usize> {
    fake.calls().iter().map(|call| call.requests().len()).collect()
}

#[tokio::test]
async fn checks_wait_and_share_a_call_while_eight_are_in_flight() {
    let (fake, words) = held_redis();
    let store = Arc::new(connected(&fake, MAX_WAIT).await);
    let asked = one_by_one(&store, 30).await;
    drop(words);
    assert!(all(asked).await);
    assert_eq!(sizes(&fake), [1, 1, 1, 1, 1, 1, 1, 1, 22]);
    // If no call is in flight, the batcher sends a check at once.
    for _ in 0..4 {
        assert!(all(one_by_one(&store, 1).await).await);
    }
}

#[tokio::test]
async fn missing_reply_delays_waiting_checks_for_a_part_of_the_timeout_only() {
    let fake = FakeRedis::start(|command| if command.is_script() { Answer::Silence } else { Answer::Usual });
    let store = Arc::new(connected(&fake, Duration::from_secs(8)).await);
    let mut asked = one_by_one(&store, 30).await;
    wait_for_requests(&fake, 30).await;
    asked.extend(one_by_one(&store, 3).await);
    wait_for_requests(&fake, 33).await;
    assert_eq!(sizes(&fake), [1, 1, 1, 1, 1, 1, 1, 1, 22, 1, 1, 1]);
    assert!(!asked.iter().any(JoinHandle::is_finished), "the timeout of the checks is not over");
}

#[tokio::test]
async fn timeout_of_waiting_checks_starts_when_they_are_made() {
    let (fake, words) = held_redis();
    let timeout = Duration::from_secs(1);
    let store = Arc::new(connected(&fake, timeout).await);
    let other = Arc::new(connected(&fake, timeout + timeout / 32).await);
    // From here on, time is virtual, so the order of the timeouts does not depend on the load of the machine.
    tokio::time::pause();
    let asked = one_by_one(&store, 9).await;
    let later = one_by_one(&other, 1).await;
    tokio::select! {
        biased;
        decided = all(asked) => assert!(!decided),
        _ = all(later) => panic!("the ninth waits longer than its timeout"),
    }
    drop(words);
}

#[tokio::test]
async fn cancelled_request_leaves_its_batch_and_the_others_keep_their_keys() {
    // Each request has two limits. Requests with an odd identity cost 2 and the others 1, so the call has two groups.
    // For each identity and limit, the fake Redis returns a different value of `remaining`.
    let key = |identity| {
        let mut key = Vec::new();
        Identity(identity).write_key("rl", &mut key);
        key.into_iter().map(char::from).collect::<String>()
    };
    let names: Vec<_> = (0..20).map(key).collect();
    let known = names.clone();
    let (sender, replies) = mpsc::channel::<()>();
    let replies = Mutex::new(replies);
    let fake = FakeRedis::start(move |command| {
        if !command.is_script() {
            return Answer::Usual;
        }
        let _ = replies.lock().unwrap().recv();
        let number = |key: &str| known.iter().position(|known| known == key).unwrap_or(99);
        command.admitted_with(|key, limit| (2 * number(key) + limit) as u64)
    });
    let store = Arc::new(connected(&fake, MAX_WAIT).await);
    let in_flight = one_by_one(&store, 8).await;
    let mut waiting = Vec::new();
    for identity in 8..18 {
        let store = store.clone();
        waiting.push(tokio::spawn(async move {
            let limits = [("a", 10), ("b", 20)].map(|(name, burst)| Limit::new(name, bucket(burst, SECOND, burst)));
            let charges = limits.each_ref().map(|limit| limit.charge(identity, 1 + identity as u64 % 2));
            let verdict = call(&store, Operation::Check, &charges).await.unwrap();
            verdict.outcomes.iter().map(|outcome| outcome.remaining as usize).collect::<Vec<_>>()
        }));
        yield_now().await;
    }
    // Cancel the first request of one group, the last request of the other group, and a request from the middle of each
    // group.
    let cancelled = [8, 11, 12, 17];
    for identity in cancelled {
        let task = &mut waiting[identity - 8];
        task.abort();
        assert!(task.await.unwrap_err().is_cancelled());
    }
    drop(sender);
    assert!(all(in_flight).await);
    for (identity, task) in (8..18).zip(waiting) {
        if !cancelled.contains(&identity) {
            let remaining = timeout(MAX_WAIT, task).await.expect("a reply").unwrap();
            assert_eq!(remaining, [2 * identity, 2 * identity + 1], "identity {identity} has its own reply");
        }
    }
    let calls = fake.calls();
    assert_eq!(sizes(&fake), [1, 1, 1, 1, 1, 1, 1, 1, 6], "one call for the requests that still wait");
    let charged = [10, 14, 16, 9, 13, 15].map(|identity: usize| names[identity].clone());
    assert_eq!(calls[8].keys(), charged, "the keys of the requests that still wait, group by group");
    assert_eq!(calls[8].requests(), [2; 6]);
}

#[tokio::test]
async fn readonly_inside_the_reply_of_a_batch_replaces_the_connection() {
    const READONLY: &str = "READONLY You can't write against a read only replica.";
    for all_fail in [true, false] {
        // The first connection leads to a replica. A replica rejects requests that write: the reply to the call
        // contains an error for each of them. Requests that write nothing succeed.
        let fake = FakeRedis::start(move |command| match command.connection {
            1 if !command.is_script() => Answer::Usual,
            1 if all_fail => command.refused(READONLY),
            1 => command.first_refused(READONLY),
            _ => Answer::Usual,
        });
        let store = connected(&fake, MAX_WAIT).await;
        let limit = Limit::new("l", bucket(10, SECOND, 10));
        let charges = [1, 2, 3].map(|identity| [limit.charge(identity, 1)]);
        let verdicts = all_of(charges.iter().map(|charges| call(&store, Operation::Check, charges))).await;
        assert!(verdicts.iter().all(Result::is_ok), "the master has decided: {verdicts:?}");
        let calls = fake.calls();
        let by: Vec<_> = calls.iter().map(|call| (call.connection, call.requests().len())).collect();
        let repeated = if all_fail { 3 } else { 1 };
        assert_eq!(by[0], (1, 3), "one call for all");
        assert!(by[1..].iter().all(|(connection, _)| *connection == 2), "no further call to the replica: {by:?}");
        assert_eq!(
            by[1..].iter().map(|(_, requests)| requests).sum::<usize>(),
            repeated,
            "each failed request is sent once more"
        );
        assert_eq!(fake.connections(), 2);
    }
}

#[tokio::test]
async fn call_for_a_hot_key_coalesces_checks_of_a_busy_worker() {
    let (fake, words) = held_redis();
    let hot = Hot::new(connected(&fake, MAX_WAIT).await, MAX_WAIT);
    let check = move || {
        let hot = hot.clone();
        async move { hot.check().await }
    };
    let another = check.clone();
    let first = tokio::spawn(async move {
        assert!(check().await);
        let mut asked = Vec::new();
        // Start one check per event-loop tick, like a worker that is busy with reading requests.
        for _ in 0..8 {
            asked.push(tokio::spawn(check()));
            yield_now().await;
        }
        asked
    });
    wait_for_requests(&fake, 1).await;
    let second = tokio::spawn(another());
    yield_now().await;
    drop(words);
    let later = timeout(MAX_WAIT, first).await.expect("a response").unwrap();
    assert!(all([second].into_iter().chain(later).collect()).await);
    assert_eq!(fake.calls()[1].cost(), 5, "the check that waited, and the checks of four ticks");
}

/// Performs checks of one identity. Concurrent checks are coalesced into one call.
#[derive(Clone)]
struct Hot {
    store_handle: Arc<StoreHandle>,
    singleflight: Arc<Singleflight>,
    plan: Arc<LimitVariant>,
}

impl Hot {
    fn new(store: ServerStore, timeout: Duration) -> Hot {
        let store = RedisStore::Single(store);
        let fallback = Arc::new(MemoryStore::new(1, Clock::Store));
        let backend = Store::Redis { store, fallback, metrics: Arc::default() };
        Hot {
            store_handle: Arc::new(StoreHandle {
                store: backend,
                denials: None,
                events: Arc::default(),
                tasks: TaskTracker::new(),
            }),
            singleflight: Arc::new(Singleflight::new(timeout, Arc::default())),
            plan: Arc::new(plan()),
        }
    }

    /// Perform a check, and return whether it got a verdict.
    async fn check(&self) -> bool {
        let Hot { store_handle, singleflight, plan } = self;
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
        let charge = Charge { key, rule: &plan.rule, cost: 1, mode, permit_id: 0, debt_before_us: 0, usage };
        let set = CheckGroup { id: 1, prefetch: 0 };
        singleflight.check(store_handle, set, &[charge], monotonic(), || vec![pending.clone()]).await.is_ok()
    }
}

#[tokio::test]
async fn checks_without_a_token_do_not_wait_for_the_refund_of_a_cancelled_one() {
    let (words, held_redis) = mpsc::channel::<()>();
    let held = Mutex::new(held_redis);
    // The fake Redis replies to a check only when the test sends a message or drops the sender `words`. Each reply
    // grants one token. Refunds get no reply.
    let fake = FakeRedis::start(move |command| match command.operation() {
        Some('R') => Answer::Silence,
        Some(_) => {
            let _ = held.lock().unwrap().recv();
            command.admitted()
        }
        None => Answer::Usual,
    });
    // If a call is in flight, new checks wait for its reply for at most a sixteenth of the store timeout.
    let timeout = 16 * MAX_WAIT;
    let hot = Hot::new(store_with_connections(&fake, timeout, 2).await, timeout);
    let check = || {
        let hot = hot.clone();
        tokio::spawn(async move { hot.check().await })
    };
    let first = check();
    wait_for_requests(&fake, 1).await;
    let (cancelled, other) = (check(), check());
    yield_now().await;
    words.send(()).unwrap();
    wait_for_requests(&fake, 2).await;
    assert_eq!(fake.calls()[1].cost(), 2, "one call for both");
    cancelled.abort();
    assert!(cancelled.await.is_err());
    drop(words);
    assert!(all(vec![first, other]).await);
    wait_for_requests(&fake, 4).await;
    assert_eq!(fake.calls().iter().filter(|call| call.operation() == Some('R')).count(), 1);
}

#[tokio::test]
async fn refund_whose_script_is_not_loaded_is_sent_with_its_source() {
    let (words, held_redis) = mpsc::channel::<()>();
    let held = Mutex::new(held_redis);
    let fake = FakeRedis::start(move |command| match command.operation() {
        Some('R') if command.is("EVALSHA") => error("NOSCRIPT No matching script. Please use EVAL."),
        Some('R') | None => Answer::Usual,
        Some(_) => {
            let _ = held.lock().unwrap().recv();
            command.admitted()
        }
    });
    let store = Arc::new(connected(&fake, MAX_WAIT).await);
    let asked = one_by_one(&store, 1).await;
    wait_for_requests(&fake, 1).await;
    for cancelled in asked {
        cancelled.abort();
        assert!(cancelled.await.is_err());
    }
    drop(words);
    wait_for_requests(&fake, 3).await;
    let calls: Vec<_> = fake.calls().iter().map(|call| (call.words[0].clone(), call.operation())).collect();
    let refund = Some('R');
    assert_eq!(calls[1..], [("EVALSHA".to_owned(), refund), ("EVAL".to_owned(), refund)]);
}

fn plan() -> LimitVariant {
    let Limit { rule, bucket, .. } = Limit::new("l", bucket(10, SECOND, 10));
    let local_rules = LocalRules::new(LocalShare::default());
    LimitVariant { id: 1, quota: quota(10, SECOND), local_rules, rule, state_name: bucket }
}

/// Return the CPU time that the main thread of Redis has used, in µs.
fn cpu_time_us(connection: &mut redis::Connection) -> u64 {
    let info: String = redis::cmd("INFO").arg("cpu").query(connection).unwrap();
    let seconds = ["used_cpu_user_main_thread:", "used_cpu_sys_main_thread:"]
        .map(|name| info.lines().find_map(|line| line.strip_prefix(name)).unwrap().parse::<f64>().unwrap());
    (seconds.iter().sum::<f64>() * 1e6) as u64
}

#[tokio::test]
async fn longest_script_call_takes_at_most_5_ms() {
    const CALLS: u128 = 60;
    let server = Redis::start();
    let stores = Stores::new(&server, "rl");
    let mut connection = server.connection();
    let limits = |count: usize, rule: Rule| -> Vec<_> {
        (0..count).map(|number| Limit::new(&format!("l{number}"), rule.clone())).collect()
    };
    // A busy machine slows down some of the calls, also in CPU time.
    let within_bound = |what: &str, calls_us: &[u64]| {
        let (least, most) = (calls_us.iter().min().unwrap(), calls_us.iter().max().unwrap());
        println!("{what}: {least} to {most} µs of CPU time");
        assert!(*least <= 5000, "{what}: {least} µs");
    };

    // The most expensive limits that a route may have.
    let eight = limits(8, buckets(1 << 50, 1000 * SECOND, 1000));
    let full = format!("{}:{}", START / SECOND, vec!["123456"; 1001].join(","));
    for limit in &eight {
        redis::cmd("SET").arg(limit.key("rl", 1)).arg(&full).exec(&mut server.connection()).unwrap();
    }
    let refund = Operation::Refund { charged_at: START - 500 * SECOND };
    for operation in [Operation::Check, Operation::TakeUpTo, refund] {
        let mut calls_us = Vec::new();
        for _ in 0..CALLS {
            let charges: Vec<_> = eight.iter().map(|limit| limit.charge(1, 2)).collect();
            let before = cpu_time_us(&mut connection);
            assert_eq!(call(&stores.redis, operation, &charges).await.unwrap().outcomes.len(), 8);
            calls_us.push(cpu_time_us(&mut connection) - before);
        }
        within_bound(&format!("{operation:?} of eight limits with 1,000 buckets"), &calls_us);
    }
    let three = limits(3, log(10_000, 3600 * SECOND));
    let refund = Operation::Refund { charged_at: START + 7200 * SECOND };
    for (operation, now) in [(Operation::Check, 0), (Operation::Check, 7200), (refund, 7300)] {
        stores.clock.set(START + now * SECOND);
        let mut calls_us = Vec::new();
        for identity in 0..CALLS {
            let charges: Vec<_> = three.iter().map(|limit| limit.charge(identity, 10_000)).collect();
            let before = cpu_time_us(&mut connection);
            let verdict = call(&stores.redis, operation, &charges).await.unwrap();
            calls_us.push(cpu_time_us(&mut connection) - before);
            assert_eq!(verdict.outcomes[2].remaining, if operation == refund { 10_000 } else { 0 });
        }
        within_bound(&format!("{operation:?} of 10,000 tokens in three sliding logs after {now} s"), &calls_us);
    }

    // Full batches.
    let rules = [
        ("token-bucket", bucket(1000, SECOND, 1000), 1),
        ("sliding-log", log(10_000, SECOND), 200),
        ("sliding-log", log(10_000, SECOND), 10_000),
        ("sliding-buckets", buckets(10_000, 1000 * SECOND, 1000), 200),
        ("concurrency", concurrency(10_000, SECOND), 1),
    ];
    for (name, rule, cost) in rules {
        let limit = Limit::new(&format!("{name}{cost}"), rule);
        let checks: Vec<_> = (0..1000).map(|identity| [limit.charge(identity, cost)]).collect();
        let (before, calls) = (cpu_time_us(&mut connection), server.calls("evalsha"));
        let verdicts = all_of(checks.iter().map(|charges| call(&stores.redis, Operation::Check, charges))).await;
        assert!(verdicts.into_iter().all(|verdict| verdict.unwrap().granted == 1));
        let mean_us = (cpu_time_us(&mut connection) - before) / (server.calls("evalsha") - calls);
        within_bound(&format!("calls with checks of {name} with a cost of {cost}"), &[mean_us]);
    }
}
