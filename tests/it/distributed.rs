//! Several gateways that share one Redis server: exact limits, keys without personal data, and outages of Redis.

use std::process::Command;

use crate::support::admin_listener::{metric, with_admin};
use crate::support::client::load;
use crate::support::eventually;
use crate::support::gateway::Gateway;
use crate::support::http2;
use crate::support::redis::{Redis, free_port};
use crate::support::relay::Relay;
use crate::support::server::{Behaviour, Server};
use sluicegate::limiter::algorithm::Rule;
use sluicegate::limiter::algorithm::token_bucket::TokenBucket;
use sluicegate::limiter::redis::script::{AlgorithmSet, ScriptVariant, script};

/// Return a configuration with a long store timeout and `on_store_error = "deny"`. If the store fails or replies too
/// late, the gateway rejects the request with 503 instead of admitting it.
fn config(url: &str, limit: &str) -> String {
    format!(
        "[store]\nurl = \"{url}\"\ntimeout = \"5s\"\n[auth.keys]\nkind = \"api-key\"\non_unknown = \"accept\"\n\
         [limit.l]\n{limit}\non_store_error = \"deny\"\n\
         [[route]]\nname = \"r\"\npath = \"/r\"\nidentify = [\"keys\"]\nlimits = [\"l\"]\nrespond = {{ status = 200, body = \"ok\" }}\n"
    )
}

fn count(statuses: &[u16], wanted: u16) -> usize {
    statuses.iter().filter(|status| **status == wanted).count()
}

#[test]
fn two_gateways_admit_exactly_the_limit() {
    let redis = Redis::start();
    for (round, limit) in
        ["algorithm = \"fixed-window\"", "algorithm = \"sliding-log\"", "algorithm = \"token-bucket\""]
            .iter()
            .enumerate()
    {
        let config = config(&redis.url(), &format!("by = \"api-key\"\nquota = \"100/24h\"\n{limit}"));
        let gateways = [Gateway::start(&config), Gateway::start(&config)];
        let key = format!("secret-key-{round}");
        let addresses = gateways.each_ref().map(|gateway| gateway.address);
        let statuses = load(&addresses, 128, 5000, "/r", &[("x-api-key", &key)]);
        assert_eq!(statuses.len(), 5000);
        assert_eq!(count(&statuses, 503), 0, "{limit}: no store errors");
        let admitted = count(&statuses, 200);
        // A token bucket of 100 per 24 h refills one token every 864 s, so no token refills during the test.
        assert_eq!((admitted, count(&statuses, 429)), (100, 4900), "{limit}");
    }
    redis.assert_every_key_expires();
    for key in redis.keys() {
        assert!(!key.contains("secret"), "{key} shows an API key");
        assert!(key.starts_with("rl:{") && key.contains("}:"), "{key}");
    }
}

#[test]
fn two_gateways_admit_exactly_the_limit_over_http1_and_http2() {
    const RUNS: usize = 20;
    let redis = Redis::start();
    let limit = "by = \"api-key\"\nquota = \"100/24h\"\nalgorithm = \"fixed-window\"\nstart = \"first-request\"";
    let config = config(&redis.url(), limit);
    let gateways = [Gateway::start(&config), Gateway::start(&config)];
    let addresses = gateways.each_ref().map(|gateway| gateway.address);
    for run in 0..RUNS {
        let key = format!("key-{run}");
        let statuses: Vec<u16> = std::thread::scope(|scope| {
            let one = scope.spawn(|| load(&addresses, 64, 2500, "/r", &[("x-api-key", &key)]));
            let two = scope.spawn(|| http2::load(&addresses, 64, 2500, "/r", ("x-api-key", &key)));
            [one.join().unwrap(), two.join().unwrap()].concat()
        });
        let counts = (count(&statuses, 200), count(&statuses, 429), count(&statuses, 503));
        assert_eq!(counts, (100, 4900, 0), "run {run}: admitted, denied, store errors");
    }
    println!("fault 14: exactly 100 of 5000 in {RUNS} of {RUNS} runs");
}

#[test]
fn keys_show_neither_addresses_nor_names() {
    let redis = Redis::start();
    let limits = "[limit.ip]\nby = \"ip\"\nquota = \"10/min\"\n[limit.tenant]\nby = [\"header:x-tenant\", \"ip\"]\nquota = \"10/min\"\n\
                  algorithm = \"sliding-log\"\n[limit.window]\nby = \"header:x-tenant\"\nquota = \"10/min\"\nalgorithm = \"fixed-window\"\n";
    let gateway = Gateway::start(&format!(
        "{}{limits}[[route]]\nname = \"r\"\npath = \"/r\"\nlimits = [\"ip\", \"tenant\", \"window\"]\nrespond = {{ status = 200 }}\n",
        redis.store()
    ));
    assert_eq!(gateway.client().get_with("/r", &[("x-tenant", "acme:{}corp")]).status, 200);
    let keys = redis.keys();
    assert_eq!(keys.len(), 3, "{keys:?}");
    let mut connection = redis.connection();
    for key in &keys {
        let dump: Vec<u8> = redis::cmd("DUMP").arg(key).query(&mut connection).unwrap();
        let both = format!("{key} {}", String::from_utf8_lossy(&dump));
        for secret in ["127.0.0.1", "acme", "corp"] {
            assert!(!both.contains(secret), "{key} shows {secret}");
        }
    }
    redis.assert_every_key_expires();
}

#[test]
fn another_algorithm_or_window_has_its_own_state_and_another_quota_shares_it() {
    let redis = Redis::start();
    let gateway = |limit: &str| Gateway::start(&config(&redis.url(), &format!("by = \"global\"\n{limit}")));
    let left = |gateway: &Gateway| {
        let reply = gateway.get("/r");
        assert_eq!(reply.status, 200, "{}", gateway.log());
        reply.remaining("l")
    };
    let log = gateway("algorithm = \"sliding-log\"\nquota = \"10/hour\"");
    let window = gateway("algorithm = \"fixed-window\"\nstart = \"first-request\"\nquota = \"10/hour\"");
    let larger = gateway("algorithm = \"sliding-log\"\nquota = \"20/hour\"");
    let longer = gateway("algorithm = \"sliding-log\"\nquota = \"10/2h\"");
    assert_eq!([left(&log), left(&window), left(&log), left(&window)], [9, 9, 8, 8], "each limit has its own count");
    assert_eq!([left(&larger), left(&log)], [17, 6], "a limit with another quota has the same state");
    assert_eq!(left(&longer), 9, "a limit with another window has another state");
    assert_eq!(redis.keys().len(), 3, "{:?}", redis.keys());
}

#[test]
fn hey_counts_as_many_200s_as_the_limit() {
    let redis = Redis::start();
    let gateway =
        Gateway::start(&config(&redis.url(), "by = \"ip\"\nquota = \"500/24h\"\nalgorithm = \"fixed-window\""));
    let url = format!("http://{}/r", gateway.address);
    let output = Command::new("hey")
        .args(["-n", "3000", "-c", "50", &url])
        .output()
        .expect("the test needs `hey`; `make tools` installs it");
    let report = String::from_utf8(output.stdout).unwrap();
    let responses = |status: u16| {
        let line = report.lines().find(|line| line.trim_start().starts_with(&format!("[{status}]")));
        line.map_or(0, |line| line.split_whitespace().nth(1).unwrap().parse::<u32>().unwrap())
    };
    assert_eq!((responses(200), responses(429)), (500, 2500), "{report}");
}

#[test]
fn concurrent_calls_share_connections() {
    let redis = Redis::start();
    let workers = 2;
    let config = config(&redis.url(), "by = \"header:x-id\"\nquota = \"1000000/hour\"")
        .replace("[store]", &format!("[server]\nworkers = {workers}\n[store]"));
    let gateway = Gateway::start(&config);
    std::thread::scope(|scope| {
        for id in 0..64 {
            let gateway = &gateway;
            scope.spawn(move || {
                let mut client = gateway.client();
                for _ in 0..100 {
                    assert_eq!(client.get_with("/r", &[("x-id", &id.to_string())]).status, 200);
                }
            });
        }
    });
    let clients: String = redis::cmd("CLIENT").arg("LIST").query(&mut redis.connection()).unwrap();
    // `CLIENT LIST` also lists the connection of the test, and the gateway's connection for PING.
    assert!(clients.lines().count() <= workers + 2, "{clients}");
    let calls = redis.calls("evalsha");
    assert!((1..=6400).contains(&calls), "at most one call for each request: {calls}");
}

#[test]
fn scripts_are_loaded_when_a_connection_opens() {
    let redis = Redis::start();
    let gateway = Gateway::start(&config(&redis.url(), "by = \"ip\"\nquota = \"5/min\""));
    let bucket = TokenBucket::new("5/min".parse().unwrap(), 5).unwrap();
    let sha = &script(ScriptVariant::Single, AlgorithmSet::for_rules([&Rule::TokenBucket(bucket)])).sha;
    let mut connection = redis.connection();
    eventually("the script is loaded before any request", || {
        let exists: Vec<bool> = redis::cmd("SCRIPT").arg("EXISTS").arg(sha).query(&mut connection).unwrap();
        exists == [true]
    });
    drop(gateway);
}

#[test]
fn script_flush_under_load_causes_no_error() {
    let redis = Redis::start();
    let gateway =
        Gateway::start(&config(&redis.url(), "by = \"ip\"\nquota = \"200/24h\"\nalgorithm = \"fixed-window\""));
    let mut flusher = redis.connection();
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                redis::cmd("SCRIPT").arg("FLUSH").exec(&mut flusher).unwrap();
            }
        });
        let statuses = load(&[gateway.address], 16, 1600, "/r", &[]);
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        assert_eq!((count(&statuses, 200), count(&statuses, 429)), (200, 1400), "no errors, an exact count");
        println!("fault 20: 0 errors, exactly 200 of 1600");
    });
}

#[test]
fn refund_of_a_cancelled_request_is_sent_again_with_a_script_that_is_not_loaded() {
    let redis = Redis::start();
    let limit = "by = \"ip\"\nquota = \"3/24h\"\nalgorithm = \"fixed-window\"";
    let config = config(&redis.url(), limit);
    let gateway = Gateway::start(&with_admin(&format!("[server]\nhalf_close_timeout = \"0s\"\n{config}")));
    let mut client = gateway.client();
    let command = |name: &str, arguments: &[&str]| {
        redis::cmd(name).arg(arguments).query::<String>(&mut redis.connection()).unwrap()
    };
    assert_eq!(client.get("/r").status, 200);
    command("SCRIPT", &["FLUSH"]);
    // This request loads the script for checks. The script for refunds stays unloaded.
    assert_eq!(client.get("/r").status, 200);
    command("CLIENT", &["PAUSE", "60000", "WRITE"]);
    client.send(b"GET /r HTTP/1.1\r\nHost: a\r\n\r\n");
    let is_blocked = || command("CLIENT", &["LIST"]).contains("flags=b");
    eventually("Redis has the check", is_blocked);
    drop(client);
    eventually("the client has disconnected", || {
        metric(&gateway, "sluicegate_http_responses_total{route=\"r\",status=\"499\"}") == 1.0
    });
    command("CLIENT", &["UNPAUSE"]);
    eventually("the third token is refunded", || gateway.get("/r").status == 200);
    assert_eq!(gateway.get("/r").status, 429, "no other token is refunded");
}

#[test]
fn without_redis_each_limit_follows_on_store_error() {
    let nowhere = format!("redis://127.0.0.1:{}", free_port());
    for (on_error, instances, expected) in
        [("deny", 1, (0, 0, 40)), ("allow", 1, (40, 0, 0)), ("local", 1, (20, 20, 0)), ("local", 4, (5, 35, 0))]
    {
        let gateway = Gateway::start(&format!(
            "[store]\nurl = \"{nowhere}\"\ngateway_count = {instances}\n\
             [limit.l]\nby = \"ip\"\nquota = \"20/24h\"\nalgorithm = \"fixed-window\"\non_store_error = \"{on_error}\"\n\
             [[route]]\nname = \"r\"\npath = \"/r\"\nlimits = [\"l\"]\nrespond = {{ status = 200 }}\n"
        ));
        let statuses = load(&[gateway.address], 4, 40, "/r", &[]);
        let counts = (count(&statuses, 200), count(&statuses, 429), count(&statuses, 503));
        assert_eq!(counts, expected, "on_store_error = {on_error}, {instances} instances");
        eventually("the outage is logged", || gateway.log().contains("the store is down"));
        assert_eq!(gateway.log().matches("the store is down").count(), 1, "logged once:\n{}", gateway.log());
    }
}

#[test]
fn each_pair_of_limits_follows_both_on_store_error_without_redis() {
    let kinds = ["local", "allow", "deny"];
    let mut config = format!("[store]\nurl = \"redis://127.0.0.1:{}\"\n", free_port());
    let mut cases = Vec::new();
    for one in kinds {
        for other in kinds {
            for shadow in [false, true] {
                let name = format!("{one}-{other}-{shadow}");
                let limit = |name: &str, quota: u64, rest: &str| {
                    format!(
                        "[limit.{name}]\nby = \"ip\"\nquota = \"{quota}/24h\"\nalgorithm = \"sliding-log\"\n{rest}\n"
                    )
                };
                let first = limit(&format!("a-{name}"), 3, &format!("on_store_error = \"{one}\""));
                let second = format!("on_store_error = \"{other}\"\nshadow = {shadow}");
                let second = limit(&format!("b-{name}"), 5, &second);
                let route = |path: &str, limits: &str| {
                    format!(
                        "[[route]]\nname = \"{path}-{name}\"\npath = \"/{path}-{name}\"\nlimits = [{limits}]\nrespond = {{ status = 200 }}\n"
                    )
                };
                let both = route("both", &format!("\"a-{name}\", \"b-{name}\""));
                let reversed = route("reversed", &format!("\"b-{name}\", \"a-{name}\""));
                config += &[first, second, both, reversed, route("first", &format!("\"a-{name}\""))].concat();
                cases.push((name, one, other, shadow));
            }
        }
    }
    let gateway = Gateway::start(&config);
    let mut client = gateway.client();
    for (name, one, other, shadow) in cases {
        let mut count = |path: &str, requests: usize| {
            let statuses: Vec<_> = (0..requests).map(|_| client.get(&format!("/{path}-{name}")).status).collect();
            [200, 429, 503].map(|status| statuses.iter().filter(|found| **found == status).count())
        };
        let fails_closed = one == "deny" || other == "deny" && !shadow;
        let first_is_local = one == "local";
        // The local share of the first limit is 3, and that of the second limit is 5.
        let quota = match (first_is_local, other == "local" && !shadow) {
            (true, _) => 3,
            (false, true) => 5,
            (false, false) => 8,
        };
        let expected = if fails_closed { [0, 0, 8] } else { [quota, 8 - quota, 0] };
        let [one_order, other_order] = [count("both", 4), count("reversed", 4)];
        let sum = std::array::from_fn(|index| one_order[index] + other_order[index]);
        assert_eq!(sum, expected, "{name}: admitted, denied and rejected");
        // A request that another limit rejects is charged to no local share.
        let rest = match (fails_closed, one) {
            (_, "deny") => [0, 0, 4],
            (_, "allow") => [4, 0, 0],
            (true, _) => [3, 1, 0],
            (false, _) => [0, 4, 0],
        };
        assert_eq!(count("first", 4), rest, "{name}: the first limit alone");
    }
}

#[test]
fn log_says_why_redis_is_unusable() {
    let redis = Redis::start();
    redis::cmd("CONFIG").arg("SET").arg("requirepass").arg("sesame").exec(&mut redis.connection()).unwrap();
    for (url, reason) in [
        (format!("redis://127.0.0.1:{}", free_port()), "nothing listens at"),
        (format!("redis://:wrong@127.0.0.1:{}", redis.port), "Redis rejects this user or password"),
    ] {
        let gateway = Gateway::start(&config(&url, "by = \"ip\"\nquota = \"1/min\"").replace("\"5s\"", "\"2s\""));
        eventually("the breaker opens", || gateway.log().contains("the store is down"));
        assert!(gateway.log().contains(reason), "{url}: {}", gateway.log());
    }
}

#[test]
fn call_without_reply_is_charged_once() {
    let redis = Redis::start();
    let relay = Relay::start(redis.port);
    // The gateway has only one worker. A second worker could still be connecting to Redis when the relay drops replies.
    // This would open the circuit breaker.
    let gateway = Gateway::start(&format!(
        "[server]\nworkers = 1\n[store]\nurl = \"{}\"\ntimeout = \"1s\"\n\
         [limit.l]\nby = \"ip\"\nquota = \"100/hour\"\nalgorithm = \"fixed-window\"\nstart = \"first-request\"\non_store_error = \"allow\"\n\
         [[route]]\nname = \"r\"\npath = \"/r\"\nlimits = [\"l\"]\nrespond = {{ status = 200 }}\n",
        relay.url()
    ));
    let mut client = gateway.client();
    assert!(client.get("/r").header("ratelimit").unwrap().contains("r=99"));
    relay.drop_replies(true);
    // These calls are too few to open the breaker. Redis executes each call, but the relay drops the reply.
    for _ in 0..2 {
        let reply = client.get("/r");
        assert_eq!(
            (reply.status, reply.header("retry-after")),
            (503, Some("1")),
            "no reply, and the breaker is closed"
        );
    }
    relay.drop_replies(false);
    let keys = redis.keys();
    let key = keys.iter().find(|key| !key.contains("~probe")).unwrap();
    assert_eq!(redis.state(key)[1], 3, "each call was charged once");
    println!("fault 22: 2 of 2 calls without a reply charged once");
}

#[test]
fn unchecked_request_is_503_with_a_problem_document() {
    let gateway =
        Gateway::start(&config(&format!("redis://127.0.0.1:{}", free_port()), "by = \"ip\"\nquota = \"1/min\""));
    let reply = gateway.get("/r");
    assert_eq!(reply.status, 503);
    assert_eq!(reply.header("retry-after"), Some("1"));
    assert_eq!(reply.json()["type"], "https://iana.org/assignments/http-problem-types#temporary-reduced-capacity");
}

#[test]
fn recovered_redis_is_used_again() {
    let port = free_port();
    let url = format!("redis://127.0.0.1:{port}");
    let gateway = Gateway::start(&format!(
        "[store]\nurl = \"{url}\"\n[limit.l]\nby = \"header:x-id\"\nquota = \"5/24h\"\nalgorithm = \"fixed-window\"\non_store_error = \"allow\"\n\
         [[route]]\nname = \"r\"\npath = \"/r\"\nlimits = [\"l\"]\nrespond = {{ status = 200 }}\n"
    ));
    let mut client = gateway.client();
    for _ in 0..10 {
        assert_eq!(client.get_with("/r", &[("x-id", "0")]).status, 200);
    }
    for round in 0..2 {
        let mut redis = Redis::start_on(port).expect("the port is still free");
        let id = format!("one-{round}");
        let mut ask = |id: &str| client.get_with("/r", &[("x-id", id)]);
        eventually("the store performs the checks", || ask(&id).header("ratelimit").is_some());
        eventually("the limit is enforced", || ask(&id).status == 429);
        redis.child.kill().unwrap();
        redis.child.wait().unwrap();
        // Use another identity, because a cached denial also applies during an outage.
        eventually("requests are admitted without the store", || ask("other").header("ratelimit").is_none());
    }
}

#[test]
fn stopped_redis_costs_one_timeout_and_crosses_no_replies() {
    let redis = Redis::start();
    let limits = "[limit.l]\nby = \"header:x-id\"\nquota = \"100000/24h\"\nalgorithm = \"fixed-window\"\non_store_error = \"allow\"\n";
    let gateway = Gateway::start(&format!(
        "[store]\nurl = \"{}\"\ntimeout = \"20ms\"\n{limits}\
         [[route]]\nname = \"r\"\npath = \"/r\"\nlimits = [\"l\"]\nrespond = {{ status = 200 }}\n",
        redis.url()
    ));
    let mut client = gateway.client();
    let mut standing = |id: &str| {
        let reply = loop {
            let reply = client.get_with("/r", &[("x-id", id)]);
            // The gateway responds with 503 until the breaker opens.
            if reply.status != 503 {
                break reply;
            }
        };
        assert_eq!(reply.status, 200);
        reply
            .header("ratelimit")
            .map(|field| field.split("r=").nth(1).unwrap().split(';').next().unwrap().parse::<u32>().unwrap())
    };
    eventually("the store performs the checks", || standing("warm").is_some());
    for round in 0..3 {
        crate::support::signal(&redis.child, "STOP");
        eventually("requests are admitted without the store", || standing("other").is_none());
        crate::support::signal(&redis.child, "CONT");
        let id = format!("fresh-{round}");
        let mut before = None;
        eventually("the store decides again", || {
            before = standing(&id);
            before.is_some()
        });
        // If replies were crossed, a response would contain the remaining quota of another identity.
        for step in 1..200 {
            if let Some(left) = standing(&id) {
                assert!(left <= before.unwrap() - step, "{left} after {before:?} and {step} requests");
            }
        }
    }
}

#[test]
fn local_share_that_does_not_divide_evenly_is_rounded_up() {
    let nowhere = format!("redis://127.0.0.1:{}", free_port());
    let algorithms = ["token-bucket", "fixed-window", "sliding-window", "sliding-buckets", "sliding-log"];
    for (instances, share) in [(3, 7), (20, 1), (21, 1), (19, 2)] {
        let limits = algorithms.map(|name| {
            format!(
                "[limit.{name}]\nby = \"ip\"\nquota = \"20/24h\"\nalgorithm = \"{name}\"\n\
                 [[route]]\nname = \"{name}\"\npath = \"/{name}\"\nlimits = [\"{name}\"]\nrespond = {{ status = 200 }}\n"
            )
        });
        let store = format!("[store]\nurl = \"{nowhere}\"\ngateway_count = {instances}\n");
        let gateway = Gateway::start(&(store + &limits.concat()));
        for name in algorithms {
            let statuses = load(&[gateway.address], 1, 21, &format!("/{name}"), &[]);
            let counts = (count(&statuses, 200), count(&statuses, 429));
            assert_eq!(counts, (share, 21 - share), "{name}, {instances} gateways");
        }
    }
}

#[test]
fn local_share_of_requests_in_flight_is_rounded_up() {
    let server = Server::start();
    server.set(Behaviour::Hang);
    let gateway = Gateway::start(&format!(
        "[store]\nurl = \"redis://127.0.0.1:{}\"\ngateway_count = 3\n\
         [limit.l]\nby = \"global\"\nalgorithm = \"concurrency\"\nquota = \"20\"\n\
         [upstream.u]\nservers = [\"{}\"]\n[[route]]\nname = \"r\"\npath = \"/r\"\nlimits = [\"l\"]\nupstream = \"u\"\n",
        free_port(),
        server.url()
    ));
    let mut clients: Vec<_> = (0..7).map(|_| gateway.client()).collect();
    clients.iter_mut().for_each(|client| client.send(b"GET /r HTTP/1.1\r\nHost: a\r\n\r\n"));
    eventually("seven are in flight", || server.running() == 7);
    assert_eq!(gateway.get("/r").status, 429, "a third of 20, rounded up");
    server.set(Behaviour::Respond(200));
    assert!(clients.iter_mut().all(|client| client.reply().unwrap().status == 200));
}

#[test]
fn shadow_limit_denies_nothing_in_an_outage() {
    for on_error in ["local", "allow", "deny"] {
        let gateway = Gateway::start(&format!(
            "[store]\nurl = \"redis://127.0.0.1:{}\"\n\
             [limit.l]\nby = \"ip\"\nquota = \"1/24h\"\nshadow = true\non_store_error = \"{on_error}\"\n\
             [[route]]\nname = \"r\"\npath = \"/r\"\nlimits = [\"l\"]\nrespond = {{ status = 200 }}\n",
            free_port()
        ));
        assert_eq!(load(&[gateway.address], 2, 10, "/r", &[]), [200; 10], "{on_error}");
    }
}
