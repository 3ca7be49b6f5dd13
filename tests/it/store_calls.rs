//! Cached denials and coalesced checks reduce the number of Redis calls, and limits stay exact.

use std::sync::mpsc;
use std::time::Duration;

use crate::support::client::load;
use crate::support::gateway::Gateway;
use crate::support::redis::Redis;
use crate::support::upstream::Upstream;
use crate::support::{eventually, signal};
use sluicegate::clock::monotonic;

fn config(redis: &Redis, limits: &str, routes: &[(&str, &str)]) -> String {
    let routes: String = routes
        .iter()
        .map(|(name, rest)| {
            format!("[[route]]\nname = \"{name}\"\npath = \"/{name}\"\nrespond = {{ status = 200 }}\n{rest}\n")
        })
        .collect();
    format!("{}{limits}\n{routes}", redis.store())
}

fn admitted(statuses: &[u16]) -> usize {
    statuses.iter().filter(|status| **status == 200).count()
}

#[test]
fn hot_key_costs_one_call_per_round_trip_and_is_exact() {
    let redis = Redis::start();
    for (algorithm, quota) in [("token-bucket", "5000/24h"), ("sliding-log", "5000/24h"), ("fixed-window", "5000/24h")]
    {
        let limit = format!(
            "[limit.l]\nby = \"global\"\nalgorithm = \"{algorithm}\"\nquota = \"{quota}\"\non_store_error = \"deny\""
        );
        let gateway = Gateway::start(&config(&redis, &limit, &[("r", "limits = [\"l\"]")]));
        let before = redis.calls("evalsha") + redis.calls("eval");
        let statuses = load(&[gateway.address], 64, 6400, "/r", &[]);
        assert_eq!(admitted(&statuses), 5000, "{algorithm}");
        assert_eq!(statuses.iter().filter(|status| **status == 429).count(), 1400, "{algorithm}");
        let calls = redis.calls("evalsha") + redis.calls("eval") - before;
        assert!(calls < 3200, "{algorithm}: {calls} calls for 6400 requests");
    }
}

#[test]
fn coalesced_requests_get_the_headers_of_separate_checks() {
    let redis = Redis::start();
    let limit = "[limit.l]\nby = \"global\"\nalgorithm = \"fixed-window\"\nquota = \"640/24h\"\n[limit.m]\nby = \"global\"\nquota = \"1000000/24h\"";
    let gateway = Gateway::start(&config(&redis, limit, &[("r", "limits = [\"l\", \"m\"]")]));
    let mut left: Vec<u64> = std::thread::scope(|scope| {
        let ask = || {
            let mut client = gateway.client();
            (0..20).map(|_| client.get("/r").remaining("l")).collect::<Vec<_>>()
        };
        let threads: Vec<_> = (0..32).map(|_| scope.spawn(ask)).collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    left.sort_unstable();
    assert_eq!(left, (0..640).collect::<Vec<_>>(), "each number once");
}

#[test]
fn cancelled_request_does_not_cancel_coalesced_waiters() {
    let redis = Redis::start();
    let limit =
        "[limit.l]\nby = \"global\"\nalgorithm = \"fixed-window\"\nquota = \"100000/24h\"\non_store_error = \"deny\"";
    let gateway = Gateway::start(&config(&redis, limit, &[("r", "limits = [\"l\"]")]));
    std::thread::scope(|scope| {
        for index in 0..32 {
            let gateway = &gateway;
            scope.spawn(move || {
                for _ in 0..50 {
                    let mut client = gateway.client();
                    client.send(b"GET /r HTTP/1.1\r\nHost: a\r\n\r\n");
                    if index % 2 == 0 {
                        assert_eq!(client.reply().unwrap().status, 200);
                    }
                }
            });
        }
    });
}

#[test]
fn denied_client_causes_no_redis_calls() {
    let redis = Redis::start();
    let limit = "[limit.l]\nby = \"global\"\nquota = \"5/hour\"\n[limit.m]\nby = \"global\"\nquota = \"1000/hour\"";
    let gateway = Gateway::start(&config(&redis, limit, &[("r", "limits = [\"m\", \"l\"]")]));
    let mut client = gateway.client();
    let replies: Vec<_> = (0..1000).map(|_| client.get("/r")).collect();
    assert_eq!(replies.iter().filter(|reply| reply.status == 200).count(), 5);
    // Five requests are admitted, Redis denies one, and the denial cache denies the rest.
    assert_eq!(redis.calls("evalsha"), 6);
    let (asked, remembered) = (&replies[5], &replies[999]);
    let retry = |reply: &crate::support::client::Reply| reply.header("retry-after").unwrap().parse::<u64>().unwrap();
    assert!(retry(remembered) <= retry(asked) && retry(remembered) > 600, "{remembered:?}");
    for reply in [asked, remembered] {
        reply.assert_problem(429, "denied");
        assert_eq!(reply.json()["violated-policies"], serde_json::json!(["l"]));
        assert_eq!(reply.header("ratelimit-policy"), Some("\"m\";q=1000;w=3600, \"l\";q=5;w=3600"));
        assert_eq!(reply.header("ratelimit"), Some(format!("\"l\";r=0;t={}", retry(reply)).as_str()));
    }
}

#[test]
fn cached_denial_applies_to_its_limit_and_cost_only() {
    let redis = Redis::start();
    let limit = "[limit.l]\nby = \"global\"\nalgorithm = \"sliding-log\"\nquota = \"10/hour\"\n[limit.m]\nby = \"global\"\nquota = \"1000/hour\"";
    let routes =
        [("dear", "limits = [\"l\", \"m\"]\ncost = 4"), ("cheap", "limits = [\"l\"]"), ("other", "limits = [\"m\"]")];
    let gateway = Gateway::start(&config(&redis, limit, &routes));
    let statuses = |path: &str, times: usize| (0..times).map(|_| gateway.get(path).status).collect::<Vec<_>>();
    assert_eq!(statuses("/dear", 4), [200, 200, 429, 429]);
    assert_eq!(statuses("/cheap", 3), [200, 200, 429]);
    assert_eq!(statuses("/dear", 1), [429]);
    assert_eq!(statuses("/other", 2), [200, 200]);
}

#[test]
fn cached_denial_has_the_retry_after_of_the_cost() {
    let redis = Redis::start();
    let limit = "[limit.l]\nby = \"global\"\nquota = \"60/hour\"\nburst = 10";
    let routes = [("cheap", "limits = [\"l\"]"), ("dear", "limits = [\"l\"]\ncost = 5")];
    let gateway = Gateway::start(&config(&redis, limit, &routes));
    let wait = |path: &str| loop {
        if let Some(wait) = gateway.get(path).header("retry-after") {
            return wait.parse::<u64>().unwrap();
        }
    };
    let (cheap, dear) = (wait("/cheap"), wait("/dear"));
    // One token refills per minute.
    assert!(cheap <= 60 && dear > 240, "retry delay of {cheap} s for one token, {dear} s for five");
}

#[test]
fn cached_denial_ends_when_redis_would_admit() {
    let redis = Redis::start();
    let limit = "[limit.l]\nby = \"global\"\nquota = \"20/s\"\nburst = 1";
    let gateway = Gateway::start(&config(&redis, limit, &[("r", "limits = [\"l\"]")]));
    let mut client = gateway.client();
    let started = monotonic();
    let mut times = Vec::new();
    while times.len() < 40 {
        let reply = client.get("/r");
        if reply.status == 200 {
            times.push(started.elapsed());
        }
    }
    // A greedy client gets one token per 50 ms. If denials were cached for too long, all pauses between admissions
    // would be longer. A busy machine makes only some of these pauses longer.
    let between: Vec<_> = times.windows(2).map(|pair| pair[1] - pair[0]).collect();
    let prompt = between.iter().filter(|pause| **pause < Duration::from_millis(75)).count();
    assert!(prompt >= 5, "{between:?}");
}

#[test]
fn refund_invalidates_a_cached_denial() {
    let redis = Redis::start();
    let (fail, failing) = std::sync::mpsc::channel();
    let failing = std::sync::Mutex::new(failing);
    let upstream = Upstream::responding(move |seen| {
        if seen.target() == "/ok" {
            return b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n".to_vec();
        }
        let () = failing.lock().unwrap().recv().unwrap();
        b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n".to_vec()
    });
    let limit = format!(
        "[limit.l]\nby = \"global\"\nalgorithm = \"sliding-log\"\nquota = \"2/hour\"\nrefund_on = [\"5xx\"]\n\
         [upstream.u]\nservers = [\"{}\"]\n[[route]]\nname = \"all\"\npath = \"/{{*rest}}\"\nupstream = \"u\"\nlimits = [\"l\"]\n",
        upstream.url()
    );
    let gateway = Gateway::start(&config(&redis, &limit, &[]));
    let mut slow = gateway.client();
    slow.send(b"GET /fail HTTP/1.1\r\nHost: a\r\n\r\n");
    eventually("the upstream has the request", || upstream.count() == 1);
    assert_eq!(["/ok", "/ok", "/ok"].map(|path| gateway.get(path).status), [200, 429, 429]);
    fail.send(()).unwrap();
    assert_eq!(slow.reply().unwrap().status, 500);
    assert_eq!(["/ok", "/ok"].map(|path| gateway.get(path).status), [200, 429], "one request was refunded");
}

#[test]
fn larger_quota_invalidates_a_cached_denial() {
    let redis = Redis::start();
    let consumer = |rest: &str| {
        // The hash is the output of `printf %s acme-key | sha256sum`.
        let hash = "sha256:afacab3575137afa4e00d9cbcafcb14c9ae25f779d964eb0ea5b2c4eb5dfd163";
        format!("[[consumer]]\nname = \"acme\"\nkeys = [\"{hash}\"]\n{rest}\n")
    };
    let limit = "[auth.keys]\nkind = \"api-key\"\nconsumers = \"consumers.toml\"\n[limit.l]\nby = \"api-key\"\nquota = \"1/hour\"";
    let text = config(&redis, limit, &[("r", "identify = [\"keys\"]\nlimits = [\"l\"]")]);
    let gateway = Gateway::start_with(&text, &[("consumers.toml", &consumer(""))]);
    let ask = || gateway.client().get_with("/r", &[("x-api-key", "acme-key")]).status;
    assert_eq!([ask(), ask(), ask()], [200, 429, 429]);
    std::fs::write(gateway.directory().join("consumers.toml"), consumer("limit.l = { quota = \"5/hour\" }")).unwrap();
    eventually("the denial has another quota", || ask() == 200);
}

#[test]
fn hanging_store_rejects_few_requests_until_the_breaker_opens() {
    let redis = Redis::start();
    let limit = "[limit.l]\nby = \"global\"\nquota = \"1000000/hour\"\non_store_error = \"allow\"";
    let gateway = Gateway::start(&config(&redis, limit, &[("r", "limits = [\"l\"]")]).replace("5s", "100ms"));
    eventually("the store decides", || gateway.get("/r").header("ratelimit").is_some());
    signal(&redis.child, "STOP");
    let statuses = load(&[gateway.address], 64, 640, "/r", &[]);
    let rejected = statuses.iter().filter(|status| **status == 503).count();
    // The circuit breaker opens after two timeouts, in which each client is rejected at most twice. On a busy machine,
    // some clients start late and add a third rejection.
    assert!((1..=3 * 64).contains(&rejected), "{rejected} rejected");
    assert_eq!(admitted(&statuses) + rejected, 640, "all other requests are admitted without the store");
    signal(&redis.child, "CONT");
    eventually("the store decides again", || gateway.get("/r").header("ratelimit").is_some());
}

#[test]
fn check_behind_a_hanging_call_waits_its_own_timeout_only() {
    let redis = Redis::start();
    let limit =
        "[server]\nworkers = 1\n[limit.l]\nby = \"global\"\nquota = \"1000000/hour\"\non_store_error = \"deny\"";
    let within = |timeout| {
        let gateway = Gateway::start(&config(&redis, limit, &[("r", "limits = [\"l\"]")]).replace("5s", timeout));
        eventually("the store decides", || gateway.get("/r").status == 200);
        gateway
    };
    // If the timeout of a check began only when the hanging call ends, the check would end after 4 s instead of 2 s. A
    // busy machine may delay each timeout by up to 1 s (`MAX_WORKER_DELAY`). The response of `later` after 3.5 s
    // therefore separates both cases.
    let (first, later) = (within("2s"), within("3500ms"));
    signal(&redis.child, "STOP");
    let (answered, order) = mpsc::channel();
    std::thread::scope(|scope| {
        for gateway in [&first, &first, &first, &later] {
            let mut client = gateway.client();
            client.send(b"GET /r HTTP/1.1\r\nHost: a\r\n\r\n");
            let answered = answered.clone();
            scope.spawn(move || answered.send((client.reply().unwrap().status, gateway.address)).unwrap());
        }
    });
    signal(&redis.child, "CONT");
    let [others @ .., last]: [_; 4] = order.try_iter().collect::<Vec<_>>().try_into().unwrap();
    assert_eq!(others, [(503, first.address); 3], "the timeout of a check begins with its request");
    assert_eq!(last, (503, later.address));
}

#[test]
fn limits_in_another_order_have_their_own_results() {
    const REQUESTS: u64 = 1200;
    let redis = Redis::start();
    for more in ["", "prefetch = 20\n"] {
        redis::cmd("FLUSHALL").exec(&mut redis.connection()).unwrap();
        let limits: String = [("a", 10_000), ("b", 20_000), ("c", 30_000)]
            .iter()
            .map(|(name, quota)| {
                format!(
                    "[limit.{name}]\nby = \"global\"\nalgorithm = \"fixed-window\"\nquota = \"{quota}/24h\"\n{more}"
                )
            })
            .collect();
        // Requests of all routes check the same states, so only the order distinguishes their groups.
        let orders =
            [["a", "b", "c"], ["a", "c", "b"], ["b", "a", "c"], ["b", "c", "a"], ["c", "a", "b"], ["c", "b", "a"]];
        let routes = orders.map(|order| (order.concat(), format!("limits = {order:?}")));
        let routes: Vec<_> = routes.iter().map(|(name, line)| (&**name, &**line)).collect();
        let gateway = Gateway::start(&config(&redis, &limits, &routes));
        std::thread::scope(|scope| {
            for thread in 0..24 {
                let (gateway, path) = (&gateway, format!("/{}", orders[thread % orders.len()].concat()));
                scope.spawn(move || {
                    let mut client = gateway.client();
                    for _ in 0..REQUESTS / 24 {
                        let reply = client.get(&path);
                        for (limit, quota) in [("a", 10_000), ("b", 20_000), ("c", 30_000)] {
                            let left = reply.remaining(limit);
                            // Each group may have prefetched tokens that no request has used.
                            let least = quota - REQUESTS - 20 * orders.len() as u64;
                            assert!((least..quota).contains(&left), "{path}, {more}: {limit} has {left} left");
                        }
                    }
                });
            }
        });
    }
}
