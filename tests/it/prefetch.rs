//! Prefetched tokens: they reduce the number of store calls, the documented bounds hold, and no tokens are lost.

use std::collections::HashSet;
use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use crate::support::admin_listener::{metric, with_admin};
use crate::support::client::{Client, load};
use crate::support::gateway::{Gateway, binary};
use crate::support::redis::Redis;
use crate::support::resp::{Answer, FakeRedis};
use crate::support::upstream::Upstream;
use crate::support::{MAX_WAIT, eventually};
use sluicegate::clock::{elapsed_since, monotonic, unix_us};

/// Return a configuration with one global limit. The store timeout is so long that no check times out: every admitted
/// request has been charged.
fn config(redis: &Redis, limit: &str) -> String {
    format!(
        "[server]\nworkers = 2\n[store]\nurl = \"{}\"\ntimeout = \"5s\"\n\
         [limit.l]\nby = \"global\"\non_store_error = \"deny\"\n{limit}\n\
         [[route]]\nname = \"r\"\npath = \"/r\"\nlimits = [\"l\"]\nrespond = {{ status = 200 }}\n",
        redis.url()
    )
}

fn admitted(statuses: &[u16]) -> u64 {
    assert!(statuses.iter().all(|status| [200, 429].contains(status)), "{statuses:?}");
    statuses.iter().filter(|status| **status == 200).count() as u64
}

fn addresses(gateways: &[Gateway]) -> Vec<SocketAddr> {
    gateways.iter().map(|gateway| gateway.address).collect()
}

/// Return how many tokens Redis has charged to the limit. The algorithm must count in whole tokens.
fn charged(redis: &Redis) -> u64 {
    let Some(key) = redis.keys().pop() else { return 0 };
    let mut connection = redis.connection();
    let kind: String = redis::cmd("TYPE").arg(&key).query(&mut connection).unwrap();
    if kind == "list" {
        return redis::cmd("LLEN").arg(&key).query(&mut connection).unwrap();
    }
    // The key may not exist: an empty log has no key.
    let state: Option<Vec<u8>> = redis::cmd("GET").arg(&key).query(&mut connection).unwrap();
    let Some(state) = state else { return 0 };
    // The state of sliding buckets is text, that of windows is binary: the count is the last number of the value.
    if state.contains(&0) {
        return f64::from_le_bytes(state[40..48].try_into().unwrap()) as u64;
    }
    let state = String::from_utf8(state).unwrap();
    let counters = state.split_once(':').unwrap().1;
    counters.split(',').map(|counter| counter.parse::<u64>().unwrap()).sum()
}

/// Send requests until Redis has charged more tokens than the gateway has admitted requests. Return both numbers.
fn until_tokens_are_prefetched(redis: &Redis, gateway: &Gateway) -> (u64, u64) {
    let mut total = 0;
    let mut counted = 0;
    eventually("tokens of a hot identity are prefetched", || {
        total += admitted(&load(&[gateway.address], 8, 16, "/r", &[]));
        counted = charged(redis);
        counted > total
    });
    (total, counted)
}

#[test]
fn three_gateways_with_prefetch_admit_exactly_a_fixed_window_with_few_calls() {
    const UNITS: u64 = 6000;
    let mut calls = Vec::new();
    for lease in [0, 100] {
        let redis = Redis::start();
        let limit = format!("algorithm = \"fixed-window\"\nquota = \"{UNITS}/24h\"\nprefetch = {lease}");
        let gateways = [(); 3].map(|()| Gateway::start(&config(&redis, &limit)));
        // The quota admits all of these requests, so that the number of calls does not depend on denials.
        let mut total = admitted(&load(&addresses(&gateways), 48, 5000, "/r", &[]));
        calls.push(redis.calls("evalsha") + redis.calls("eval"));
        eventually("all tokens are returned", || {
            total += admitted(&load(&addresses(&gateways), 12, 600, "/r", &[]));
            assert!(total <= UNITS, "{total} requests were admitted");
            total == UNITS
        });
        assert_eq!(admitted(&load(&addresses(&gateways), 12, 120, "/r", &[])), 0);
        assert_eq!(charged(&redis), UNITS);
        redis.assert_every_key_expires();
    }
    assert!(calls[1] * 3 < calls[0], "calls without and with prefetch: {calls:?}");
}

/// For each admitted request: when the client sent it, and when it received the response.
type Times = Vec<(Instant, Instant)>;

/// Send `total` requests over 8 connections to each gateway.
fn burst(addresses: &[SocketAddr], total: usize) -> Times {
    let connections = addresses.len() * 8;
    std::thread::scope(|scope| {
        let ask = |address: SocketAddr| {
            let mut client = Client::connect(address);
            let mut times = Times::new();
            for _ in 0..total / connections {
                let sent = monotonic();
                if client.get("/r").status == 200 {
                    times.push((sent, monotonic()));
                }
            }
            times
        };
        let threads: Vec<_> =
            (0..connections).map(|index| scope.spawn(move || ask(addresses[index % addresses.len()]))).collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    })
}

/// For each time span from the sending of a request to the arrival of a response, assert that at most `allowed(span)`
/// admitted requests were sent and answered within this span.
fn assert_bound(what: &str, times: &Times, allowed: impl Fn(Duration) -> u64) {
    for (from, _) in times {
        let mut ends: Vec<_> = times.iter().filter(|(sent, _)| sent >= from).map(|(_, answered)| *answered).collect();
        ends.sort();
        for (index, until) in ends.iter().enumerate() {
            let (count, span) = (index as u64 + 1, *until - *from);
            assert!(count <= allowed(span), "{what}: {count} within {span:?}");
        }
    }
}

#[test]
fn prefetch_grows_a_burst_by_at_most_one_prefetch_per_gateway() {
    const LEASE: u64 = 15;
    const UNITS: f64 = 100.0;
    const WINDOW: Duration = Duration::from_millis(500);
    let redis = Redis::start();
    for (limit, refilled) in [
        ("quota = \"100/500ms\"", true),
        ("algorithm = \"sliding-log\"\nquota = \"100/500ms\"", false),
        ("algorithm = \"sliding-buckets\"\nquota = \"100/500ms\"", false),
    ] {
        let config = config(&redis, &format!("{limit}\nprefetch = {LEASE}"));
        let gateways = [Gateway::start(&config), Gateway::start(&config)];
        let mut times = Times::new();
        for _ in 0..4 {
            // After the first burst, the gateway holds prefetched tokens. When the full quota is available again, the
            // second burst uses all of it.
            times.extend(burst(&addresses(&gateways), 32));
            let whole = monotonic() + WINDOW + WINDOW / 10;
            eventually("the limit is full", || monotonic() > whole);
            times.extend(burst(&addresses(&gateways), 320));
        }
        assert!(times.len() > 4 * UNITS as usize, "{limit}: {} admitted", times.len());
        assert_bound(limit, &times, |span| {
            let windows = span.as_secs_f64() / WINDOW.as_secs_f64();
            let admitted = UNITS + UNITS * if refilled { windows } else { windows.floor() };
            admitted as u64 + 2 * LEASE + u64::from(refilled)
        });
    }
}

#[test]
fn limit_shared_by_many_clients_is_exceeded_by_at_most_one_prefetch() {
    const PREFETCH: u64 = 20;
    const UNITS: u64 = 200;
    const CLIENTS: usize = 20;
    const WINDOW: Duration = Duration::from_millis(500);
    let redis = Redis::start();
    for algorithm in ["sliding-log", "token-bucket"] {
        let gateway = Gateway::start(&format!(
            "[server]\nworkers = 2\n{}\
             [limit.all]\nby = \"global\"\nalgorithm = \"{algorithm}\"\nquota = \"{UNITS}/500ms\"\nprefetch = {PREFETCH}\n\
             [limit.own]\nby = \"header:x-id\"\nquota = \"100000/s\"\nprefetch = {PREFETCH}\n\
             [[route]]\nname = \"r\"\npath = \"/r\"\nlimits = [\"all\", \"own\"]\nrespond = {{ status = 200 }}\n",
            redis.store()
        ));
        // Each client sends requests over two connections, often enough that the gateway prefetches tokens for it. When
        // the full quota is available again, the gateway holds prefetched tokens of many clients.
        let (began, admitted) = (monotonic(), AtomicU64::new(0));
        // Continue for at least 5 windows and until more than 3 × `UNITS` requests are admitted, but at most for
        // `MAX_WAIT`. On a busy machine, this takes more than 5 windows.
        let is_over = || {
            let elapsed = elapsed_since(began);
            elapsed > MAX_WAIT || elapsed > 5 * WINDOW && admitted.load(Ordering::Relaxed) > 3 * UNITS
        };
        let ask = |id: usize| {
            let (mut client, mut times) = (gateway.client(), Times::new());
            while !is_over() {
                let sent = monotonic();
                if client.get_with("/r", &[("x-id", &id.to_string())]).status == 200 {
                    times.push((sent, monotonic()));
                    admitted.fetch_add(1, Ordering::Relaxed);
                }
            }
            times
        };
        let times: Times = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..2 * CLIENTS).map(|id| scope.spawn(move || ask(id % CLIENTS))).collect();
            threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
        });
        assert!(times.len() as u64 > 3 * UNITS, "{algorithm}: {} admitted", times.len());
        let refills = algorithm == "token-bucket";
        assert_bound(algorithm, &times, |span| {
            let windows = span.as_secs_f64() / WINDOW.as_secs_f64();
            let units = UNITS as f64 * (1.0 + if refills { windows } else { windows.floor() });
            units as u64 + PREFETCH + u64::from(refills)
        });
    }
}

#[test]
fn prefetched_tokens_are_not_used_in_the_next_window() {
    const UNITS: u64 = 60;
    const SECOND: u64 = 1_000_000;
    let redis = Redis::start();
    let limit = format!("algorithm = \"fixed-window\"\nquota = \"{UNITS}/1s\"\nprefetch = 20");
    let gateways = [(); 2].map(|()| Gateway::start(&config(&redis, &limit)));
    let phase = |wanted: RangeInclusive<u64>| {
        eventually("the time has passed", || wanted.contains(&(unix_us() % SECOND)));
    };
    let mut seen = 0;
    for _ in 0..4 {
        phase(800_000..=900_000);
        burst(&addresses(&gateways), 32);
        phase(0..=100_000);
        let from = monotonic();
        let start = unix_us() % SECOND;
        let end = from + Duration::from_micros(SECOND - start);
        let times = burst(&addresses(&gateways), 320);
        seen += times.len();
        let inside = times.iter().filter(|(_, answered)| *answered < end).count() as u64;
        assert!(inside <= UNITS, "{inside} in one window");
    }
    assert!(seen > 2 * UNITS as usize, "{seen} admitted");
}

#[test]
fn unused_prefetched_tokens_are_returned() {
    for algorithm in ["fixed-window", "sliding-log", "sliding-buckets"] {
        let redis = Redis::start();
        let limit = format!("algorithm = \"{algorithm}\"\nquota = \"10000/24h\"\nprefetch = 50");
        let gateway = Gateway::start(&config(&redis, &limit));
        let (total, _) = until_tokens_are_prefetched(&redis, &gateway);
        eventually("unused tokens are returned", || charged(&redis) == total);
    }
}

#[test]
fn bucket_is_credited_only_with_tokens_that_have_not_refilled() {
    const UNITS: u64 = 1_000_000;
    let redis = Redis::start();
    let config = config(&redis, "quota = \"1000000/1000h\"\nprefetch = 50");
    let (hot, other) = (Gateway::start(&config), Gateway::start(&config));
    let (mut total, mut least) = (0, UNITS);
    eventually("tokens of a hot identity are prefetched", || {
        total += admitted(&load(&[hot.address], 8, 16, "/r", &[]));
        total += 1;
        least = other.get("/r").remaining("l");
        least + 10 < UNITS - total
    });
    eventually("the tokens are returned", || {
        total += 1;
        // Allow for a difference of two tokens. One token refills in 3.6 s, and returned tokens are credited only if
        // they have not refilled since the charge.
        other.get("/r").remaining("l") + 2 >= UNITS - total
    });
}

#[test]
fn stopped_gateway_returns_tokens_and_killed_one_loses_at_most_one_prefetch() {
    for killed in [false, true] {
        let redis = Redis::start();
        let limit = "algorithm = \"sliding-log\"\nquota = \"10000/24h\"\nprefetch = 50";
        let mut gateway = Gateway::start(&config(&redis, limit));
        let (total, _) = until_tokens_are_prefetched(&redis, &gateway);
        if killed {
            gateway.child.kill().unwrap();
            gateway.wait();
            let stranded = charged(&redis) - total;
            assert!(stranded <= 50, "{stranded}");
        } else {
            gateway.terminate();
            assert_eq!(gateway.wait().code(), Some(0), "{}", gateway.log());
            assert_eq!(charged(&redis), total);
        }
    }
}

#[test]
fn returned_tokens_admit_an_identity_that_was_denied() {
    let redis = Redis::start();
    let config = config(&redis, "algorithm = \"sliding-log\"\nquota = \"2000/24h\"\nprefetch = 2000");
    let (hot, other) = (Gateway::start(&config), Gateway::start(&config));
    let (total, counted) = until_tokens_are_prefetched(&redis, &hot);
    assert_eq!(counted, 2000, "all tokens were taken");
    let mut left = 2000 - total;
    // The other gateway first denies requests and caches the denial.
    let mut client = other.client();
    eventually("the other gateway gets the rest", || {
        left -= u64::from(client.get("/r").status == 200);
        left == 0
    });
    assert_eq!(client.get("/r").status, 429);
}

#[test]
fn remaining_counts_every_request_and_at_most_one_prefetch() {
    let redis = Redis::start();
    let gateway = Gateway::start(&config(&redis, "algorithm = \"fixed-window\"\nquota = \"5000/24h\"\nprefetch = 100"));
    const EACH: u64 = 100;
    let told: Vec<Vec<u64>> = std::thread::scope(|scope| {
        let ask = || {
            let mut client = gateway.client();
            (0..EACH).map(|_| client.get("/r").remaining("l")).collect()
        };
        let threads: Vec<_> = (0..16).map(|_| scope.spawn(ask)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    for told in told {
        for (asked, left) in (1..).zip(told) {
            assert!(left <= 5000 - asked, "{left} tokens remain after {asked} requests of this client alone");
            // A worker cannot use the tokens that another worker has prefetched.
            assert!(left >= 5000 - 16 * EACH - 100, "{left} tokens remain after {asked} requests");
        }
    }
    eventually("unused tokens are returned", || charged(&redis) == 16 * EACH);
    assert_eq!(gateway.get("/r").remaining("l"), 5000 - 16 * EACH - 1);
}

#[test]
fn prefetched_token_is_refunded_where_it_was_charged() {
    let redis = Redis::start();
    let upstream = Upstream::responding(|_| b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n".to_vec());
    let route = format!("upstream = \"u\"\n[upstream.u]\nservers = [\"{}\"]\n", upstream.url());
    let limit = "algorithm = \"sliding-log\"\nquota = \"10000/24h\"\nprefetch = 50\nrefund_on = [\"5xx\"]";
    let gateway = Gateway::start(&config(&redis, limit).replace("respond = { status = 200 }\n", &route));
    let mut most = 0;
    eventually("tokens of a hot identity are prefetched", || {
        let statuses = load(&[gateway.address], 8, 160, "/r", &[]);
        assert_eq!(statuses, [500; 160]);
        most = most.max(charged(&redis));
        most > 8
    });
    // A refund to a sliding log deletes only entries with the timestamp of the charge.
    eventually("all tokens are returned", || charged(&redis) == 0);
}

#[test]
fn check_reports_the_cost_of_prefetch_and_where_it_has_no_effect() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("gateway.toml");
    let check = |store: &str| {
        let limit = |name: &str, rest: &str| format!("[limit.{name}]\nby = \"global\"\nquota = \"100/min\"\n{rest}\n");
        let limits = [
            limit("bucket", "burst = 10\nprefetch = 5"),
            limit("window", "algorithm = \"fixed-window\"\nprefetch = 5"),
            limit("plain", ""),
        ];
        let route = |name: &str, limits: &str| {
            format!(
                "[[route]]\nname = \"{name}\"\npath = \"/{name}\"\nlimits = {limits}\nrespond = {{ status = 200 }}\n"
            )
        };
        let routes = [route("both", "[\"bucket\", \"window\"]"), route("mixed", "[\"window\", \"plain\"]")];
        let listener = "[[listener]]\naddress = \"127.0.0.1:0\"\n";
        let text = [listener, &format!("[store]\nurl = \"{store}\"\n"), &limits.concat(), &routes.concat()].concat();
        std::fs::write(&path, text).unwrap();
        let output = binary().arg("check").arg("--config").arg(&path).output().unwrap();
        assert_eq!(output.status.code(), Some(0));
        String::from_utf8(output.stdout).unwrap()
    };
    let said = check("redis://127.0.0.1:1");
    for line in [
        "  bucket: at most 109 in any 60 s, 10 at once, plus up to 5 prefetched by each gateway\n",
        "  window: at most 200 in any 60 s, 100 at once\n",
        "warning: the `prefetch` of `window` has no effect on requests of `mixed` that also count against `plain`, which has no `prefetch`\n",
    ] {
        assert!(said.contains(line), "{line} is missing in\n{said}");
    }
    assert_eq!(said.matches("has no effect").count(), 1, "{said}");
    let said = check("memory:");
    assert!(
        said.contains(
            "the `prefetch` of `bucket` has no effect: prefetching saves calls to Redis, but the store is in memory"
        ),
        "{said}"
    );
}

/// Redis denies a request that has another limit, because all tokens are prefetched. The gateway caches this denial.
/// Requests that can use the prefetched tokens are still admitted.
#[test]
fn prefetched_tokens_are_used_before_the_denial_cache() {
    // The fake Redis delays its reply to the first call of each identity until the test continues. It admits calls with
    // one limit. It denies calls with two limits and reports a retry delay of one hour.
    let (word, words) = mpsc::channel::<()>();
    let (words, known) = (Mutex::new(words), Arc::new(Mutex::new(HashSet::new())));
    let fake = FakeRedis::start(move |command| {
        if !command.is_script() || command.is_probe() {
            return Answer::Usual;
        }
        if known.lock().unwrap().insert(command.keys()[0].clone()) {
            let _ = words.lock().unwrap().recv();
        }
        match command.requests()[..] {
            [1] => command.granted_in_full(),
            _ => command.denied_for(3600),
        }
    });
    let gateway = Gateway::start(&with_admin(&format!(
        "[server]\nworkers = 1\n[store]\nurl = \"{}\"\ntimeout = \"60s\"\n\
         [limit.l]\nby = \"header:x-id\"\nalgorithm = \"sliding-log\"\nquota = \"60/24h\"\nprefetch = 50\n\
         [limit.m]\nby = \"header:x-id\"\nalgorithm = \"sliding-log\"\nquota = \"60/24h\"\n\
         [[route]]\nname = \"one\"\npath = \"/one\"\nlimits = [\"l\"]\nrespond = {{ status = 200 }}\n\
         [[route]]\nname = \"both\"\npath = \"/both\"\nlimits = [\"l\", \"m\"]\nrespond = {{ status = 200 }}\n",
        fake.url()
    )));
    let mut clients = [gateway.client(), gateway.client()];
    let mut numbers = 0..;
    // Prefetched tokens are usable for 1 s. If the five requests take longer, the attempt proves nothing and is
    // repeated.
    eventually("five requests within the second of a prefetch", || {
        let id = format!("id-{}", numbers.next().unwrap());
        let request = format!("GET /one HTTP/1.1\r\nHost: a\r\nX-Id: {id}\r\n\r\n");
        let (calls, waiting) =
            (fake.calls().len(), || metric(&gateway, "sluicegate_checks_total{answered_by=\"coalesced\"}"));
        let before = waiting();
        clients[0].send(request.as_bytes());
        eventually("the first request is in flight", || fake.calls().len() > calls);
        clients[1].send(request.as_bytes());
        eventually("the second request waits", || waiting() > before);
        let prefetched = monotonic();
        word.send(()).unwrap();
        for client in &mut clients {
            assert_eq!(client.reply().unwrap().status, 200);
        }
        let denied = clients[0].get_with("/both", &[("x-id", &id)]).status;
        let calls = fake.calls().len();
        let denied_again = clients[0].get_with("/both", &[("x-id", &id)]).status;
        let called = fake.calls().len() - calls;
        let status = clients[0].get_with("/one", &[("x-id", &id)]).status;
        let in_time = prefetched.elapsed() < Duration::from_secs(1);
        if in_time {
            assert_eq!((denied, denied_again, called), (429, 429, 0), "the denial is cached, without a further call");
            assert_eq!(status, 200, "a prefetched token is available");
        }
        in_time
    });
}
