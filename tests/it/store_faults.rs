//! Redis replies with errors, replies with something other than a verdict, or hangs: fault 19 in docs/testing.md.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use crate::support::client::Reply;
use crate::support::eventually;
use crate::support::gateway::Gateway;
use crate::support::redis::Redis;
use crate::support::reload::{metric, with_admin};
use crate::support::resp::{Answer, Command, FakeRedis, error};
use crate::support::stores::{Limit, SECOND, bucket, call};
use sluicegate::clock::monotonic;
use sluicegate::limiter::redis::RedisSettings;
use sluicegate::limiter::redis::batcher::ServerStore;
use sluicegate::limiter::redis::server::{Address, RedisEndpoint};
use sluicegate::limiter::verdict::{Operation, StoreError};

/// Start a gateway with one route per value of `on_store_error`, and one route with a shadow limit.
fn gateway(url: &str, timeout: &str) -> Gateway {
    let routes: String = ["allow", "deny", "local", "shadow"]
        .map(|name| {
            let behaviour =
                if name == "shadow" { "shadow = true".to_owned() } else { format!("on_store_error = \"{name}\"") };
            format!(
                "[limit.{name}]\nby = \"header:x-id\"\nquota = \"1000000/hour\"\n{behaviour}\n\
                 [[route]]\nname = \"{name}\"\npath = \"/{name}\"\nlimits = [\"{name}\"]\nrespond = {{ status = 200 }}\n"
            )
        })
        .concat();
    Gateway::start(&format!("[store]\nurl = \"{url}\"\ntimeout = \"{timeout}\"\n[server]\nworkers = 1\n{routes}"))
}

fn get(gateway: &Gateway, path: &str, id: &str) -> Reply {
    gateway.client().get_with(path, &[("x-id", id)])
}

/// Return whether the store decided the request and admitted it.
fn is_decided(reply: &Reply) -> bool {
    reply.status == 200 && reply.header("ratelimit").is_some()
}

fn decides(gateway: &Gateway) {
    eventually("the store decides", || is_decided(&get(gateway, "/deny", "warm")));
}

fn log_count(gateway: &Gateway, what: &str) -> usize {
    gateway.log().matches(what).count()
}

/// Start a healthy fake Redis. Once the test sets a text, this text is the reply to all script calls.
fn failing_redis() -> (FakeRedis, Arc<Mutex<Option<String>>>) {
    let fault = Arc::<Mutex<Option<String>>>::default();
    let told = fault.clone();
    let fake = FakeRedis::start(move |command| match &*told.lock().unwrap() {
        Some(text) if command.is_script() => Answer::Text(text.clone()),
        _ => Answer::Usual,
    });
    (fake, fault)
}

/// Error replies of Redis that may be temporary. If Redis sends one of them, no command of the script has run.
const PASSING: [&str; 5] = [
    "LOADING Redis is loading the dataset in memory",
    "BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.",
    "CLUSTERDOWN The cluster is down",
    "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
    "READONLY You can't write against a read only replica. script: ee5bed0f6963e93a14eebfb64f07c299c1b4313f, on @user_script:1.",
];

#[test]
fn check_that_is_late_while_the_breaker_is_closed_is_rejected_for_every_on_store_error() {
    let slow = Arc::<std::sync::atomic::AtomicBool>::default();
    let told = slow.clone();
    // The server exceeds the timeout for requests, but replies to the probes that follow. It is therefore not down.
    let fake = FakeRedis::start(move |command| {
        if command.is_script() && !command.is_probe() && told.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(400));
        }
        Answer::Usual
    });
    let gateway = gateway(&fake.url(), "300ms");
    decides(&gateway);
    for path in ["/deny", "/allow", "/local", "/shadow"] {
        slow.store(true, Ordering::SeqCst);
        let reply = get(&gateway, path, "a");
        if path == "/shadow" {
            assert_eq!(reply.status, 200, "a shadow limit rejects nothing");
        } else {
            assert_eq!((reply.status, reply.header("retry-after")), (503, Some("1")), "{path}");
        }
        // Stop the delay: if another slow call preceded the probe, the reply to the probe would be late as well.
        slow.store(false, Ordering::SeqCst);
        decides(&gateway);
    }
    assert_eq!(log_count(&gateway, "the store is down"), 0, "{}", gateway.log());
}

#[test]
fn retryable_error_is_retried_and_charged_once() {
    for text in PASSING {
        let (left, granted) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let (turn_away, grant) = (left.clone(), granted.clone());
        let fake = FakeRedis::start(move |command| {
            if !command.is_script() || command.is_probe() {
                return Answer::Usual;
            }
            if turn_away.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)).is_ok() {
                return error(text);
            }
            grant.fetch_add(1, Ordering::SeqCst);
            command.admitted()
        });
        let gateway = gateway(&fake.url(), "5s");
        decides(&gateway);
        let (calls, before) = (fake.calls().len(), granted.load(Ordering::SeqCst));
        left.store(3, Ordering::SeqCst);
        assert!(is_decided(&get(&gateway, "/deny", "a")), "{text}: {}", gateway.log());
        assert_eq!((fake.calls().len() - calls, granted.load(Ordering::SeqCst) - before), (4, 1), "{text}");
        assert!(!gateway.warnings().contains("the store"), "the retries are not logged: {}", gateway.log());
        let connections = if text.starts_with("READONLY") { 2 } else { 1 };
        assert_eq!(fake.call_connections(), connections, "the gateway reconnects if a replica replied: {text}");
        println!("fault 19: {text}: retried, charged once");
    }
}

#[test]
fn retried_call_without_reply_is_not_sent_again() {
    let turned_away = AtomicBool::new(false);
    let fake = FakeRedis::start(move |command| match command {
        _ if !command.is_script() || command.is_probe() => Answer::Usual,
        _ if turned_away.swap(true, Ordering::SeqCst) => Answer::Silence,
        _ => error("LOADING Redis is loading the dataset in memory"),
    });
    let gateway = gateway(&fake.url(), "500ms");
    get(&gateway, "/deny", "a").assert_problem(503, "the call gets no reply");
    assert_eq!(fake.calls().len(), 2, "a call that may have run is not repeated");
}

#[test]
fn noscript_and_stale_window_boundaries_are_sent_once_more() {
    let fake =
        FakeRedis::start(
            |command| if command.is("EVALSHA") { error("NOSCRIPT No matching script.") } else { Answer::Usual },
        );
    assert!(is_decided(&get(&gateway(&fake.url(), "5s"), "/deny", "a")));
    assert_eq!(fake.calls().iter().map(|call| call.words[0].clone()).collect::<Vec<_>>(), ["EVALSHA", "EVAL"]);
    let stale = AtomicBool::new(true);
    let fake = FakeRedis::start(move |command| {
        let first = command.is_script() && !command.is_probe() && stale.swap(false, Ordering::SeqCst);
        if first { error("RLSTALE Redis time is 1700000000000000") } else { Answer::Usual }
    });
    let gateway = Gateway::start(&format!(
        "[store]\nurl = \"{}\"\ntimeout = \"5s\"\n[limit.l]\nby = \"global\"\nalgorithm = \"fixed-window\"\nquota = \"10/day\"\non_store_error = \"deny\"\n\
         [[route]]\nname = \"r\"\npath = \"/r\"\nlimits = [\"l\"]\nrespond = {{ status = 200 }}\n",
        fake.url()
    ));
    assert_eq!(gateway.get("/r").status, 200);
    let sent: Vec<_> = fake.calls().iter().map(|call| call.words[4..].to_vec()).collect();
    assert!(sent.len() == 2 && sent[0] != sent[1], "the repeated call has other window boundaries: {sent:?}");
    println!("fault 19: NOSCRIPT, RLSTALE: sent once more");
}

#[test]
fn persistent_errors_open_the_breaker_and_are_logged_once() {
    let lasting = [
        "MOVED 866 127.0.0.1:7001",
        "ASK 866 127.0.0.1:7001",
        "TRYAGAIN Multiple keys request during rehashing of slot",
        "CROSSSLOT Keys in request don't hash to the same slot",
        "NOPERM this user has no permissions to run the 'evalsha' command",
        "NOAUTH Authentication required.",
        "WRONGPASS invalid username-password pair or user is disabled.",
        "ERR unknown command 'EVALSHA', with args beginning with: ",
    ];
    let garbage = [
        ("+OK\r\n", "the reply of the store is malformed"),
        ("*2\r\n:1\r\n:2\r\n", "the reply of the store is malformed"),
        ("$8\r\n12345678\r\n", "the reply of the store is malformed"),
        // Decoded as doubles, these bytes are tiny numbers.
        ("$48\r\n012345670123456701234567012345670123456701234567\r\n", "the reply of the store is malformed"),
        ("HTTP/1.1 400 Bad Request\r\n\r\n", "reached"),
    ];
    let replies = PASSING.iter().chain(&lasting).map(|text| (format!("-{text}\r\n"), text.split(' ').next().unwrap()));
    let cases: Vec<_> = replies.chain(garbage.map(|(reply, reason)| (reply.to_owned(), reason))).collect();
    // The cases mostly wait, so four of them run concurrently, each with its own gateway.
    for some in cases.chunks(4) {
        std::thread::scope(|scope| {
            for (reply, reason) in some {
                scope.spawn(move || assert_breaker_opens_once(reply, reason));
            }
        });
    }
}

/// Assert that the breaker opens when the store begins to send `reply`, and that the log reports this once, with
/// `reason`.
fn assert_breaker_opens_once(reply: &str, reason: &str) {
    let (fake, fault) = failing_redis();
    let gateway = gateway(&fake.url(), "1s");
    decides(&gateway);
    // On a busy machine, the first connection may take longer than the timeout. Wait until such an outage has ended.
    let outages = log_count(&gateway, "the store is down");
    eventually("the end of the outage is logged", || log_count(&gateway, "the store answers again") == outages);
    let calls = fake.calls().len();
    *fault.lock().unwrap() = Some(reply.to_owned());
    let requests = AtomicUsize::new(0);
    let request = || {
        requests.fetch_add(1, Ordering::Relaxed);
        get(&gateway, "/deny", "a").assert_problem(503, reason);
    };
    (0..5).for_each(|_| request());
    eventually("the breaker opens", || {
        let is_open = log_count(&gateway, "the store is down") == outages + 1;
        if !is_open {
            // If a busy worker is late, the check does not count as a failure of the store. Send another request.
            request();
        }
        is_open
    });
    assert!(gateway.log().contains(reason), "{reason}: {}", gateway.log());
    let made = fake.calls().len() - calls;
    if PASSING.iter().any(|text| text.starts_with(reason)) {
        assert!(made > 5, "{reason}: {made} calls, including retries");
    } else {
        assert!((5..=requests.into_inner()).contains(&made), "{reason}: {made} calls, including retries");
    }
    // While the breaker is open, only probes are sent.
    assert_eq!(get(&gateway, "/allow", "a").header("ratelimit"), None, "{reason}");
    assert_eq!(get(&gateway, "/allow", "a").status, 200, "{reason}");
    assert_eq!(get(&gateway, "/local", "a").status, 200, "{reason}");
    let probes = fake.probes();
    eventually("probes are sent", || fake.probes() >= probes + 3);
    assert_eq!(fake.calls().len() - calls, made, "{reason}: no request calls the store");
    assert_eq!(log_count(&gateway, "the store is down"), outages + 1, "{reason}: {}", gateway.log());
    assert_eq!(log_count(&gateway, "the store answers again"), outages, "{reason}: {}", gateway.log());
    *fault.lock().unwrap() = None;
    decides(&gateway);
    eventually("the end of the outage is logged", || log_count(&gateway, "the store answers again") == outages + 1);
    println!("fault 19: {reason}: breaker opened, logged once, closed again");
}

#[test]
fn breaker_opens_when_half_of_the_calls_fail() {
    let calls = AtomicUsize::new(0);
    let fake = FakeRedis::start(move |command| {
        let odd = || calls.fetch_add(1, Ordering::SeqCst) % 2 == 1;
        let fails = command.is_script() && !command.keys().is_empty() && (command.is_probe() || odd());
        if fails { error("NOPERM this user has no permissions") } else { Answer::Usual }
    });
    let gateway = gateway(&fake.url(), "5s");
    for _ in 0..1000 {
        get(&gateway, "/allow", "a");
        if log_count(&gateway, "the store is down") > 0 {
            break;
        }
    }
    assert_eq!(log_count(&gateway, "the store is down"), 1);
    assert!(fake.calls().len() >= 20, "{} calls", fake.calls().len());
}

#[test]
fn store_that_rejects_writes_still_decides_denials() {
    let script = "script: ee5bed0f6963e93a14eebfb64f07c299c1b4313f, on @user_script:1.";
    for text in [
        format!("OOM command not allowed when used memory > 'maxmemory'. {script}"),
        "MISCONF Redis is configured to save RDB snapshots, but it's currently unable to persist to disk.".to_owned(),
        format!("NOREPLICAS Not enough good replicas to write. {script}"),
    ] {
        let (full, over) = (Arc::new(AtomicBool::new(false)), Arc::<Mutex<Vec<String>>>::default());
        let (refuses, denied, reply) = (full.clone(), over.clone(), text.clone());
        let fake = FakeRedis::start(move |command| {
            if !command.is_script() {
                Answer::Usual
            } else if denied.lock().unwrap().iter().any(|key| command.keys().contains(key)) {
                // A denial writes nothing, so Redis does not reject it.
                command.denied()
            } else if refuses.load(Ordering::SeqCst) {
                error(&reply)
            } else {
                Answer::Usual
            }
        });
        let gateway = gateway(&fake.url(), "5s");
        decides(&gateway);
        assert!(is_decided(&get(&gateway, "/deny", "over")));
        over.lock().unwrap().push(fake.calls().last().unwrap().keys()[0].clone());
        full.store(true, Ordering::SeqCst);
        let calls = fake.calls().len();
        for _ in 0..30 {
            get(&gateway, "/deny", "a").assert_problem(503, &text);
            let allowed = get(&gateway, "/allow", "a");
            assert_eq!((allowed.status, allowed.header("ratelimit")), (200, None), "{text}");
            assert_eq!(get(&gateway, "/local", "a").status, 200, "{text}");
            assert_eq!(get(&gateway, "/deny", "over").status, 429, "{text}: denied by the store");
        }
        assert_eq!(fake.calls().len() - calls, 120, "{text}: the breaker stays closed, no call is retried");
        eventually("the change is logged", || log_count(&gateway, "the store rejects writes: checks") > 0);
        assert_eq!(log_count(&gateway, "the store rejects writes: checks"), 1, "{text}: {}", gateway.log());
        full.store(false, Ordering::SeqCst);
        eventually("accepted writes are logged", || {
            decides(&gateway);
            log_count(&gateway, "the store accepts writes again") == 1
        });
        assert_eq!(log_count(&gateway, "the store is down"), 0, "{text}: {}", gateway.log());
        full.store(true, Ordering::SeqCst);
        get(&gateway, "/allow", "a");
        eventually("the next change is logged as well", || {
            log_count(&gateway, "the store rejects writes: checks") == 2
        });
        println!("fault 19: {text}: by on_store_error, denials by the store, logged once");
    }
}

#[test]
fn broken_state_rejects_its_identity_and_no_other() {
    for text in [
        "WRONGTYPE Operation against a key holding the wrong kind of value script: ee5bed, on @user_script:1.",
        "ERR user_script:1: attempt to perform arithmetic on a nil value script: ee5bed, on @user_script:1.",
        "ERR Error running script (call to f_0a9a51ee): @user_script:41: user_script:41: bad argument",
        "RLARG not a number",
    ] {
        let broken = Arc::<Mutex<Vec<String>>>::default();
        let keys = broken.clone();
        let fake = FakeRedis::start(move |command| {
            let is_broken = |command: &Command| command.keys().iter().any(|key| keys.lock().unwrap().contains(key));
            if command.is_script() && is_broken(command) { error(text) } else { Answer::Usual }
        });
        let gateway = gateway(&fake.url(), "5s");
        let paths = ["/allow", "/local", "/shadow"];
        let keys = paths.map(|path| {
            assert_eq!(get(&gateway, path, "broken").status, 200);
            fake.calls().last().unwrap().keys()[0].clone()
        });
        broken.lock().unwrap().extend(keys);
        for _ in 0..10 {
            for path in ["/allow", "/local"] {
                let refused = get(&gateway, path, "broken");
                refused.assert_problem(503, text);
                assert_eq!(refused.header("retry-after"), Some("1"), "{text}");
                assert!(is_decided(&get(&gateway, path, "other")), "{text}: {}", gateway.log());
            }
            assert_eq!(get(&gateway, "/shadow", "broken").status, 200, "{text}: shadow limits reject nothing");
        }
        let said_broken = log_count(&gateway, "rejecting requests of an identity");
        assert!((1..4).contains(&said_broken), "{text}: logged at intervals: {}", gateway.log());
        assert!(gateway.log().contains(r#"[\"allow\"]"#), "{text}: the log names the limits: {}", gateway.log());
        assert_eq!(log_count(&gateway, "the store is down"), 0, "{text}: {}", gateway.log());
        println!("fault 19: {text}: 503 for one identity");
    }
}

#[test]
fn errors_of_a_real_redis_are_handled_alike() {
    let redis = Redis::start();
    let gateway = gateway(&redis.url(), "300ms");
    let mut connection = redis.connection();
    let mut tell = |words: &str| {
        let words: Vec<_> = words.split(' ').collect();
        redis::cmd(words[0]).arg(&words[1..]).exec(&mut connection).unwrap();
    };
    decides(&gateway);
    let rows = [
        ("OOM", "CONFIG SET maxmemory 1", "CONFIG SET maxmemory 0"),
        ("NOREPLICAS", "CONFIG SET min-replicas-to-write 1", "CONFIG SET min-replicas-to-write 0"),
    ];
    for (times, (row, on, off)) in rows.into_iter().enumerate() {
        tell(on);
        assert_eq!(get(&gateway, "/deny", "a").status, 503, "{row}");
        eventually("writes are rejected", || gateway.log().contains(row));
        tell(off);
        eventually("accepted writes are logged", || {
            decides(&gateway);
            log_count(&gateway, "the store accepts writes again") == times + 1
        });
        assert_eq!(log_count(&gateway, "the store is down"), 0, "{row}: {}", gateway.log());
    }
    let replica = format!("REPLICAOF 127.0.0.1 {}", crate::support::redis::free_port());
    for (times, (row, calls, on, off)) in [
        // If a server rejects writes, the gateway opens a new connection to it and detects the reason.
        ("is a replica; give the address of its master", 3, &*replica, "REPLICAOF NO ONE"),
        (
            "lacks a permission that the gateway needs",
            3,
            "ACL SETUSER default -set -setrange",
            "ACL SETUSER default +set +setrange",
        ),
        ("no permissions", 3, "ACL SETUSER default resetkeys ~other:*", "ACL SETUSER default allkeys"),
    ]
    .into_iter()
    .enumerate()
    {
        tell(on);
        eventually("the breaker opens", || {
            assert_eq!(get(&gateway, "/deny", "a").status, 503, "{row}");
            log_count(&gateway, "the store is down") == times + 1
        });
        assert!(gateway.log().contains(row), "{row}: {}", gateway.log());
        let asked = || redis.calls("evalsha") + redis.rejections("evalsha") + redis.calls("hello");
        let before = asked();
        eventually("probes are sent", || asked() >= before + calls);
        assert_eq!(log_count(&gateway, "the store is down"), times + 1, "{row}: {}", gateway.log());
        tell(off);
        decides(&gateway);
        eventually("the end of the outage is logged", || log_count(&gateway, "the store answers again") == times + 1);
    }
    let before = redis.keys();
    assert!(is_decided(&get(&gateway, "/allow", "broken")));
    let key = redis.keys().into_iter().find(|key| !before.contains(key)).unwrap();
    tell(&format!("DEL {key}"));
    tell(&format!("LPUSH {key} x"));
    get(&gateway, "/allow", "broken").assert_problem(503, "WRONGTYPE");
    assert!(gateway.log().contains("WRONGTYPE"), "{}", gateway.log());
    assert!(is_decided(&get(&gateway, "/allow", "other")));
    tell(&format!("DEL {key}"));
    redis.assert_every_key_expires();
}

#[test]
fn server_that_closes_connections_receives_two_per_second() {
    let accepted = Arc::<AtomicUsize>::default();
    let count = accepted.clone();
    let address = crate::support::upstream::serve(move |stream| {
        count.fetch_add(1, Ordering::SeqCst);
        drop(stream);
    });
    let started = monotonic();
    let gateway = gateway(&format!("redis://{address}"), "50ms");
    eventually("the gateway has connected four times", || {
        assert_eq!(get(&gateway, "/allow", "a").status, 200);
        accepted.load(Ordering::SeqCst) >= 4
    });
    assert!(started.elapsed() >= Duration::from_millis(1500), "{:?}", started.elapsed());
    assert_eq!(log_count(&gateway, "the store is down"), 1, "{}", gateway.log());
}

#[test]
fn server_that_stays_a_replica_receives_few_connections() {
    let (fake, fault) = failing_redis();
    let gateway = gateway(&fake.url(), "5s");
    decides(&gateway);
    let started = monotonic();
    *fault.lock().unwrap() = Some(format!("-{}\r\n", PASSING[4]));
    std::thread::scope(|scope| {
        for id in 0..16 {
            let gateway = &gateway;
            scope.spawn(move || assert_eq!(get(gateway, "/deny", &id.to_string()).status, 503));
        }
    });
    let most = 2 + 2 * started.elapsed().as_secs() as usize + 1;
    let connections = fake.call_connections();
    assert!(connections <= most, "{connections} connections in {:?}", started.elapsed());
    assert!(fake.requests() > 16 * 10, "all requests are retried many times: {}", fake.requests());
}

#[test]
fn connection_not_established_in_time_is_abandoned() {
    let fake = FakeRedis::start(|command| {
        let hangs = command.connection == 1 && command.is("SCRIPT");
        if hangs { Answer::Silence } else { Answer::Usual }
    });
    decides(&gateway(&fake.url(), "100ms"));
    assert!(fake.call_connections() >= 2);
}

#[test]
fn broken_connection_fails_its_calls_and_is_replaced() {
    let fake = FakeRedis::start(|command| {
        let breaks = command.connection == 1 && command.is_script() && !command.is_probe();
        if breaks { Answer::Close } else { Answer::Usual }
    });
    let gateway = gateway(&fake.url(), "5s");
    get(&gateway, "/deny", "a").assert_problem(503, "the reply to the call is lost");
    assert_eq!(fake.calls().len(), 1, "a call that may have run is not repeated");
    assert!(is_decided(&get(&gateway, "/deny", "a")));
}

#[tokio::test]
async fn a_full_queue_rejects_further_checks_and_does_not_open_the_breaker() {
    const ASKED: usize = 20_000;
    // The length of the queue, and the possible numbers of checks in flight.
    const QUEUED: usize = 16_384;
    const IN_FLIGHT: std::ops::RangeInclusive<usize> = 0..=16 * 128;
    let (release, released) = mpsc::channel::<()>();
    let released = Mutex::new(released);
    let fake = FakeRedis::start(move |command| {
        if command.is_script() {
            // Block until the sender is dropped.
            let _ = released.lock().unwrap().recv();
        }
        Answer::Usual
    });
    let timeout = Duration::from_secs(60);
    let store = ServerStore::new(&settings(timeout), endpoint(&fake), Arc::default(), Arc::default());
    let limit = Arc::new(Limit::new("l", bucket(10, SECOND, 10)));
    let (asked, overloaded) = (Arc::<AtomicUsize>::default(), Arc::<AtomicUsize>::default());
    let tasks: Vec<_> = (0..ASKED as u128)
        .map(|identity| {
            let (store, limit) = (store.clone(), limit.clone());
            let (asked, overloaded) = (asked.clone(), overloaded.clone());
            tokio::spawn(async move {
                asked.fetch_add(1, Ordering::SeqCst);
                match call(&store, Operation::Check, &[limit.charge(identity, 1)]).await {
                    Ok(_) => true,
                    Err(StoreError::Overloaded) => {
                        overloaded.fetch_add(1, Ordering::SeqCst);
                        false
                    }
                    Err(error) => panic!("{error}"),
                }
            })
        })
        .collect();
    while asked.load(Ordering::SeqCst) < ASKED {
        tokio::task::yield_now().await;
    }
    tokio::task::yield_now().await;
    let rejected = overloaded.load(Ordering::SeqCst);
    assert!(IN_FLIGHT.contains(&(ASKED - QUEUED - rejected)), "{rejected} checks rejected by the full queue");
    drop(release);
    let mut answered = 0;
    for task in tasks {
        answered += usize::from(task.await.unwrap());
    }
    assert_eq!((answered, overloaded.load(Ordering::SeqCst)), (ASKED - rejected, rejected));
    assert_eq!(fake.requests(), answered, "rejected checks were not sent");
    assert!(!store.is_open());
}

#[tokio::test]
async fn redirects_of_a_cluster_node_do_not_open_its_breaker() {
    let fake =
        FakeRedis::start(|command| if command.is_script() { error("MOVED 866 127.0.0.1:7001") } else { Answer::Usual });
    let timeout = Duration::from_secs(60);
    let address = Address::parse("127.0.0.1:1").unwrap();
    let store = ServerStore::for_node(&settings(timeout), endpoint(&fake), Arc::default(), address, Arc::default());
    let limit = Limit::new("l", bucket(10, SECOND, 10));
    for _ in 0..100 {
        match call(&store, Operation::Check, &[limit.charge(1, 1)]).await {
            Err(StoreError::Redirected(reply)) => assert_eq!(reply.to_string(), "MOVED 866 127.0.0.1:7001"),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(fake.calls().len(), 100, "a redirected call is not repeated on this node");
}

fn settings(timeout: Duration) -> RedisSettings {
    RedisSettings { timeout, ..RedisSettings::default() }
}

fn endpoint(fake: &FakeRedis) -> RedisEndpoint {
    RedisEndpoint::Single(redis::Client::open(fake.url()).unwrap())
}

#[test]
fn checks_that_a_full_redis_rejects_are_counted_separately() {
    let redis = Redis::start();
    let limit = "[limit.l]\nby = \"ip\"\nquota = \"100/hour\"\n";
    let route = "[[route]]\nname = \"r\"\npath = \"/r\"\nlimits = [\"l\"]\nrespond = { status = 200 }\n";
    let gateway = Gateway::start(&with_admin(&format!("{}{limit}{route}", redis.store())));
    assert!(is_decided(&gateway.get("/r")));
    redis::cmd("CONFIG").arg(&["SET", "maxmemory", "1"][..]).exec(&mut redis.connection()).unwrap();
    eventually("writes are rejected", || {
        assert_eq!(gateway.get("/r").status, 200, "the local share decides");
        metric(&gateway, "store_failures_total{kind=\"writes_rejected\"}") > 0.0
    });
    assert_eq!(metric(&gateway, "store_up"), 1.0, "the circuit breaker stays closed");
}
