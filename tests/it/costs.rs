//! End-to-end tests of costs and quotas: tiers, costs of requests and responses, refunds, wait queues, gRPC.

use std::time::Duration;

use crate::support::client::{Client, load};
use crate::support::eventually;
use crate::support::gateway::Gateway;
use crate::support::http2::{self, Answer};
use crate::support::redis::Redis;
use crate::support::tokens::{Key, in_seconds, key_set};
use crate::support::upstream::{Seen, Upstream};
use aws_lc_rs::digest::{SHA256, digest};
use serde_json::json;
use sluicegate::clock::monotonic;

const PROXY: &str = "127.0.0.9";

/// Return a consumer whose API key equals its name.
fn consumer(name: &str, rest: &str) -> String {
    let digits: String = digest(&SHA256, name.as_bytes()).as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
    format!("[[consumer]]\nname = \"{name}\"\nkeys = [\"sha256:{digits}\"]\n{rest}\n")
}

/// Return the `[store]` configurations of the in-memory store and of this Redis server.
fn stores(redis: &Redis) -> [String; 2] {
    [String::new(), redis.store()]
}

/// Return the configuration key `identify` for a route whose limit counts by API key, or an empty string for other
/// limits.
fn identify(limit: &str) -> &'static str {
    if limit.contains("api-key") { "identify = [\"keys\"]\n" } else { "" }
}

/// Return a configuration with the limit `l` and a route `/r`. The gateway itself responds (`respond`).
fn answered(limit: &str) -> String {
    format!(
        "[limit.l]\n{limit}\n[[route]]\nname = \"r\"\npath = \"/r\"\n{}limits = [\"l\"]\nrespond = {{ status = 200 }}\n",
        identify(limit)
    )
}

/// Return a configuration with the limit `l` and a route `/r` that forwards requests to an upstream.
fn proxied(limit: &str, upstream: &Upstream) -> String {
    format!(
        "[limit.l]\n{limit}\n[upstream.u]\nservers = [\"{}\"]\n\
         [[route]]\nname = \"r\"\npath = \"/r\"\n{}limits = [\"l\"]\nupstream = \"u\"\n",
        upstream.url(),
        identify(limit)
    )
}

const KEYS: &str = "[auth.keys]\nkind = \"api-key\"\nconsumers = \"consumers.toml\"\non_missing = \"anonymous\"\n";

fn admitted(gateway: &Gateway, key: Option<&str>, requests: usize) -> usize {
    let headers: Vec<_> = key.map(|key| ("x-api-key", key)).into_iter().collect();
    let mut client = gateway.client();
    (0..requests).filter(|_| client.get_with("/r", &headers).status == 200).count()
}

#[test]
fn consumer_has_the_quota_of_its_tier_or_its_own() {
    let redis = Redis::start();
    for store in stores(&redis) {
        let limit = "by = \"api-key\"\nalgorithm = \"sliding-log\"\nquota = \"3/hour\"\n\
                     tiers = { free = { quota = \"2/hour\" }, pro = { quota = \"6/hour\" }, anonymous = { quota = \"1/hour\" } }";
        let consumers = [
            consumer("plain", ""),
            consumer("poor", "tier = \"free\""),
            consumer("rich", "tier = \"pro\""),
            consumer("special", "tier = \"pro\"\nlimit.l = { quota = \"8/hour\" }"),
        ];
        let gateway =
            Gateway::start_with(&(store + KEYS + &answered(limit)), &[("consumers.toml", &consumers.concat())]);
        let told = gateway.client().get_with("/r", &[("x-api-key", "poor")]);
        assert_eq!(
            (told.status, told.header("ratelimit-policy")),
            (200, Some("\"l\";q=2;w=3600")),
            "the header has the quota of the tier"
        );
        for (key, expected) in
            [(None, 1), (Some("plain"), 3), (Some("poor"), 1), (Some("rich"), 6), (Some("special"), 8)]
        {
            assert_eq!(admitted(&gateway, key, 12), expected, "{key:?}");
        }
        let told = gateway.client().get_with("/r", &[("x-api-key", "special")]);
        assert_eq!(
            told.header("ratelimit-policy"),
            Some("\"l\";q=8;w=3600"),
            "the header has the quota of the consumer"
        );
    }
}

#[test]
fn reloaded_consumers_keep_their_usage() {
    let limit = "by = \"api-key\"\nalgorithm = \"sliding-log\"\nquota = \"3/hour\"\n\
                 tiers = { pro = { quota = \"5/hour\" } }";
    let gateway = Gateway::start_with(&(KEYS.to_owned() + &answered(limit)), &[("consumers.toml", &consumer("a", ""))]);
    assert_eq!(admitted(&gateway, Some("a"), 9), 3);
    assert_eq!(gateway.client().get_with("/r", &[("x-api-key", "b")]).status, 401);
    // Replace the consumers file by writing a new file and renaming it, as editors and Kubernetes do.
    let replace = |text: &str| {
        let path = gateway.directory().join("consumers.toml");
        std::fs::write(path.with_extension("new"), text).unwrap();
        std::fs::rename(path.with_extension("new"), path).unwrap();
    };
    replace(&(consumer("a", "tier = \"pro\"") + &consumer("b", "")));
    eventually("the new key is known", || gateway.client().get_with("/r", &[("x-api-key", "b")]).status == 200);
    assert_eq!(admitted(&gateway, Some("a"), 9), 2, "three of five requests were used before the reload");
    // If the new consumers file is invalid, the gateway keeps the previous consumers.
    replace(&consumer("c", "tier = \"por\""));
    eventually("the fault is logged", || gateway.log().contains("did you mean `pro`?"));
    assert_eq!(gateway.client().get_with("/r", &[("x-api-key", "b")]).status, 200);
    assert_eq!(gateway.client().get_with("/r", &[("x-api-key", "c")]).status, 401);
    // An empty consumers file also counts as invalid.
    replace("");
    eventually("the fault is logged", || gateway.log().contains("no consumer has a key"));
    assert_eq!(gateway.client().get_with("/r", &[("x-api-key", "b")]).status, 200);
    replace(&consumer("c", ""));
    eventually("a valid file is used again", || gateway.client().get_with("/r", &[("x-api-key", "c")]).status == 200);
    assert_eq!(gateway.client().get_with("/r", &[("x-api-key", "b")]).status, 401, "a removed consumer is unknown");
}

#[test]
fn cost_header_is_read_from_trusted_proxies_only() {
    let upstream = Upstream::start();
    let limit = "by = \"global\"\nalgorithm = \"fixed-window\"\nstart = \"first-request\"\nquota = \"100/hour\"\n\
                 cost = { request_header = \"x-cost\", max = 10 }";
    let trusting = format!("[client_ip]\ntrusted_proxies = [\"{PROXY}/32\"]\n");
    let gateway = Gateway::start(&(trusting + &proxied(limit, &upstream)));
    let mut proxy = Client::connect_from(PROXY.parse().unwrap(), gateway.address);
    let mut untrusted = gateway.client();
    assert_eq!(proxy.get_with("/r", &[("x-cost", "7")]).remaining("l"), 93);
    assert_eq!(upstream.last().headers("x-cost"), ["7"]);
    assert_eq!(proxy.get_with("/r", &[("x-cost", "1000")]).remaining("l"), 83, "the cost is capped at the maximum");
    assert_eq!(proxy.get("/r").remaining("l"), 82, "without the header, the cost is 1");
    assert_eq!(
        untrusted.get_with("/r", &[("x-cost", "0")]).remaining("l"),
        81,
        "the header of an untrusted client is ignored"
    );
    assert_eq!(upstream.last().headers("x-cost"), [""; 0], "and the header is not forwarded");
    let seen = upstream.count();
    proxy.get_with("/r", &[("x-cost", "a lot")]).assert_problem(400, "no number");
    assert_eq!((upstream.count(), proxy.get_with("/r", &[("x-cost", "0")]).remaining("l")), (seen, 81));
}

/// Respond with the status and the headers that the request contains in its headers `x-status` and `x-line`.
fn respond_as_asked(request: &Seen) -> Vec<u8> {
    let status = request.headers("x-status").first().map_or("200 OK", |status| *status).to_owned();
    let lines: String = request.headers("x-line").iter().map(|line| format!("{line}\r\n")).collect();
    format!("HTTP/1.1 {status}\r\n{lines}Content-Length: 0\r\n\r\n").into_bytes()
}

#[test]
fn response_cost_becomes_debt_of_the_next_requests() {
    let redis = Redis::start();
    let upstream = Upstream::responding(respond_as_asked);
    for store in stores(&redis) {
        for algorithm in
            ["token-bucket", "fixed-window\"\nstart = \"first-request", "sliding-window", "sliding-buckets"]
        {
            let limit = format!(
                "by = \"header:x-who\"\nalgorithm = \"{algorithm}\"\nquota = \"100/hour\"\ncost.response_header = \"x-used\"\nrefund_on = [\"5xx\"]"
            );
            redis::cmd("FLUSHALL").exec(&mut redis.connection()).unwrap();
            let gateway = Gateway::start(&(store.clone() + &proxied(&limit, &upstream)));
            let mut client = gateway.client();
            let mut ask = |lines: &[(&str, &str)]| client.get_with("/r", &[&[("x-who", "me")], lines].concat());
            let first = ask(&[("x-line", "x-used: 30")]);
            assert_eq!((first.status, first.remaining("l")), (200, 70), "{algorithm}: the header follows the charge");
            assert_eq!(ask(&[]).remaining("l"), 69, "{algorithm}: without the header, the cost is 1");
            let failed = ask(&[("x-status", "503 Down"), ("x-line", "x-used: 50")]);
            assert_eq!(failed.remaining("l"), 69, "{algorithm}: a failure is refunded");
            assert_eq!(ask(&[("x-line", "x-used: 100000000000000000")]).remaining("l"), 0, "{algorithm}: a debt");
            let seen = upstream.count();
            assert_eq!(ask(&[]).status, 429, "{algorithm}");
            assert_eq!(upstream.count(), seen, "{algorithm}: the request is not forwarded");
        }
    }
}

#[test]
fn disconnected_client_is_charged_the_response_cost() {
    let redis = Redis::start();
    // The upstream never responds.
    let upstream = Upstream::responding(|_| {
        std::thread::park();
        Vec::new()
    });
    let limit = "by = \"global\"\nalgorithm = \"fixed-window\"\nstart = \"first-request\"\nquota = \"100/hour\"\ncost.response_header = \"x-used\"";
    let store = &stores(&redis)[1];
    let gateway = Gateway::start(&(store.clone() + &proxied(limit, &upstream)));
    let mut client = gateway.client();
    client.send(b"GET /r HTTP/1.1\r\nHost: a\r\n\r\n");
    eventually("the upstream has the request", || upstream.count() == 1);
    drop(client);
    eventually("one token is charged", || redis.keys().len() == 1);
    assert_eq!(redis.state(&redis.keys()[0])[1], 1);
}

#[test]
fn failed_upstream_responses_are_refunded() {
    let redis = Redis::start();
    let upstream = Upstream::responding(respond_as_asked);
    for store in stores(&redis) {
        for algorithm in ["token-bucket", "fixed-window", "sliding-window", "sliding-buckets", "sliding-log"] {
            // The route has two limits. Only the limit `back` has `refund_on`.
            let config = format!(
                "{store}[limit.back]\nby = \"header:x-who\"\nalgorithm = \"{algorithm}\"\nquota = \"10/10h\"\nrefund_on = [\"5xx\", \"404\"]\n{}",
                proxied("by = \"header:x-who\"\nquota = \"10/10h\"\nalgorithm = \"sliding-log\"", &upstream)
                    .replace("[\"l\"]", "[\"back\", \"l\"]\ncost = 2")
            );
            redis::cmd("FLUSHALL").exec(&mut redis.connection()).unwrap();
            let gateway = Gateway::start(&config);
            let mut client = gateway.client();
            for (status, back, kept) in [("200 OK", 8, 8), ("500 No", 8, 6), ("404 Gone", 8, 4), ("403 No", 6, 2)] {
                let reply = client.get_with("/r", &[("x-who", "me"), ("x-status", status)]);
                assert_eq!((reply.remaining("back"), reply.remaining("l")), (back, kept), "{algorithm}: {status}");
            }
        }
    }
    // The gateway also refunds a request to which it responds with 502 itself.
    let free_port = crate::support::redis::free_port();
    let limit = "by = \"global\"\nalgorithm = \"sliding-log\"\nquota = \"1/hour\"\nrefund_on = [\"502\"]";
    let gateway =
        Gateway::start(&proxied(limit, &upstream).replace(&upstream.url(), &format!("http://127.0.0.1:{free_port}")));
    assert_eq!([gateway.get("/r").status, gateway.get("/r").status], [502, 502]);
}

#[test]
fn refunds_of_slow_failures_cause_no_denials() {
    let redis = Redis::start();
    let upstream = Upstream::responding(|_| {
        std::thread::sleep(Duration::from_millis(200));
        b"HTTP/1.1 503 Down\r\nContent-Length: 0\r\n\r\n".to_vec()
    });
    for store in stores(&redis) {
        // While the upstream delays a response by 200 ms, four tokens refill. They first repay the debt of other
        // requests, so they do not replace the refund of this request.
        let limit = "by = \"global\"\nalgorithm = \"token-bucket\"\nquota = \"20/s\"\nrefund_on = [\"503\"]";
        let gateway = Gateway::start(&(store + &proxied(limit, &upstream)));
        let statuses = load(&[gateway.address], 12, 120, "/r", &[]);
        assert_eq!(statuses, [503; 120], "each failure is refunded: at most twelve of twenty tokens are in use");
        assert!(gateway.get("/r").remaining("l") >= 19, "no token was lost");
    }
}

#[test]
fn request_with_max_wait_is_delayed_until_admitted() {
    let redis = Redis::start();
    for store in stores(&redis) {
        let limit = "by = \"global\"\nquota = \"20/s\"\nburst = 1\nmax_wait = \"10s\"";
        let gateway = Gateway::start(&(store + &answered(limit)));
        let started = monotonic();
        let statuses = load(&[gateway.address], 10, 30, "/r", &[]);
        assert_eq!(statuses, [200; 30], "no request is denied");
        // The gateway admits the first request at once, and the other 29 at a rate of one per 50 ms.
        assert!(started.elapsed() >= Duration::from_millis(29 * 50), "{:?}", started.elapsed());
    }
}

#[test]
fn wait_queue_is_first_in_first_out() {
    // The log has the records in the order in which the single worker completes the requests. With an upstream, each
    // connection would have a thread, and the threads would record the requests in any order.
    let config = "[server]\nworkers = 1\n[log]\nformat = \"json\"\naccess = \"access.log\"\n\
                  [limit.l]\nby = \"global\"\nquota = \"10/s\"\nburst = 1\nmax_wait = \"20s\"\n\
                  [[route]]\nname = \"r\"\npath = \"/r/{n}\"\nlimits = [\"l\"]\nrespond = { status = 200 }\n";
    let gateway = Gateway::start(config);
    let mut clients: Vec<_> = (0..8).map(|_| gateway.client()).collect();
    assert_eq!(clients[0].get("/r/first").status, 200);
    for (index, client) in clients.iter_mut().enumerate() {
        client.send(format!("GET /r/{index} HTTP/1.1\r\nHost: a\r\n\r\n").as_bytes());
        // The test cannot see the queue. The single worker reads connections in the order in which their bytes arrive.
        // So when the gateway has responded to `/nowhere`, it has already queued the request to `/r`.
        assert_eq!(gateway.client().get("/nowhere").status, 404);
    }
    for client in &mut clients {
        assert_eq!(client.reply().unwrap().status, 200);
    }
    let log = || std::fs::read_to_string(gateway.directory().join("access.log")).unwrap_or_default();
    eventually("all records are written", || log().lines().count() == 17);
    let records = log().lines().map(|line| serde_json::from_str(line).unwrap()).collect::<Vec<serde_json::Value>>();
    let paths = records.iter().filter_map(|record| record["path"].as_str()?.strip_prefix("/r/"));
    assert_eq!(paths.skip(1).collect::<Vec<_>>(), ["0", "1", "2", "3", "4", "5", "6", "7"]);
}

#[test]
fn wait_queue_is_bounded_and_a_disconnected_client_leaves_it() {
    let limit = "by = \"global\"\nquota = \"1/3s\"\nburst = 1\nmax_wait = \"20s\"\nmax_queue = 1";
    let server = "[server]\nworkers = 1\nhalf_close_timeout = \"0s\"\n";
    let gateway = Gateway::start(&(server.to_owned() + &answered(limit)));
    let mut first = gateway.client();
    assert_eq!(first.get("/r").status, 200);
    let mut waiting = gateway.client();
    waiting.send(b"GET /r HTTP/1.1\r\nHost: a\r\n\r\n");
    eventually("the queue is full", || {
        let started = monotonic();
        let denied = gateway.client().get("/r");
        // The request is denied at once. A queued request would wait for seconds.
        denied.status == 429 && started.elapsed() < Duration::from_secs(1)
    });
    drop(waiting);
    let mut next = gateway.client();
    next.send(b"GET /r HTTP/1.1\r\nHost: a\r\n\r\n");
    assert_eq!(next.reply().unwrap().status, 200, "the queue slot was free");
}

#[test]
fn request_rejected_by_a_full_queue_takes_no_tokens() {
    let redis = Redis::start();
    let limit = "by = \"global\"\nquota = \"1/3s\"\nburst = 1\nmax_wait = \"20s\"\nmax_queue = 1";
    let gateway = Gateway::start(&(stores(&redis)[1].clone() + "denial_cache = 0\n" + &answered(limit)));
    assert_eq!(gateway.get("/r").status, 200);
    let mut waiting = gateway.client();
    waiting.send(b"GET /r HTTP/1.1\r\nHost: a\r\n\r\n");
    // The queue is full after three calls to Redis: one for the first request, and two for the queued request.
    eventually("the queue is full", || redis.calls("evalsha") == 3);
    for _ in 0..10 {
        let full = gateway.get("/r");
        full.assert_problem(429, "the queue is full");
        assert_eq!(full.header("retry-after"), Some("20"), "the client must wait until the queue is empty");
    }
    assert_eq!(redis.calls("evalsha"), 3, "requests that find the queue full cause no call");
    assert_eq!(waiting.reply().unwrap().status, 200);
}

#[test]
fn request_that_would_exceed_max_wait_is_denied_at_once() {
    let limit = "by = \"global\"\nquota = \"1/hour\"\nmax_wait = \"20s\"";
    let gateway = Gateway::start(&answered(limit));
    assert_eq!(gateway.get("/r").status, 200);
    let started = monotonic();
    assert_eq!(gateway.get("/r").status, 429);
    assert!(started.elapsed() < Duration::from_secs(10), "{:?}", started.elapsed());
}

/// A gRPC call is a POST over HTTP/2 with the content type of gRPC. All other rejected requests get an HTTP error
/// status, because a shared cache would store a 200.
#[test]
fn only_grpc_calls_are_rejected_by_grpc_status() {
    let gateway = Gateway::start(&answered("by = \"global\"\nalgorithm = \"sliding-log\"\nquota = \"1/hour\""));
    assert_eq!(gateway.get("/r").status, 200);
    let mut checked = 0;
    for (kind, is_grpc) in [
        (Some("application/grpc"), true),
        (Some("application/grpc+proto"), true),
        (Some("application/grpc;x=y"), true),
        (Some("application/grpc-web"), false),
        (Some("application/grpc-web+proto"), false),
        (Some("application/grpcx"), false),
        (Some("application/json"), false),
        (None, false),
    ] {
        for method in ["POST", "GET", "HEAD", "PUT", "OPTIONS", "DELETE", "CUSTOM"] {
            let mut client = gateway.client();
            let headers: Vec<_> = kind.iter().map(|kind| ("content-type", *kind)).collect();
            let reply = client.request(method, "/r", &headers, b"");
            let what = format!("{method} with {kind:?}");
            assert_eq!((reply.status, reply.header("grpc-status")), (429, None), "{what} over HTTP/1.1");
            assert_eq!(reply.header("cache-control"), Some("no-store"), "{what} over HTTP/1.1");
            let mut request = http::Request::builder().method(method).uri("http://a.test/r");
            if let Some(kind) = kind {
                request = request.header("content-type", kind);
            }
            let answers = http2::ask(gateway.address, [request.body(&b""[..]).unwrap()]);
            let [Answer::Response(status, headers, body)] = &answers[..] else { panic!("{what}: {answers:?}") };
            let call = is_grpc && method == "POST";
            let expected = if call { (200, Some("8")) } else { (429, None) };
            let field = |name| headers.get(name).map(|value| value.to_str().unwrap());
            assert_eq!((status.as_u16(), field("grpc-status")), expected, "{what} over HTTP/2");
            assert_eq!(field("cache-control"), Some("no-store"), "{what} over HTTP/2");
            assert_eq!(field("content-length").is_some_and(|length| length != "0"), !call, "{what} over HTTP/2");
            assert_eq!(body.is_empty(), call || method == "HEAD", "{what} over HTTP/2");
            assert!(field("retry-after").is_some() && field("ratelimit").is_some(), "{what}: {headers:?}");
            if call {
                assert_eq!(field("content-type"), Some("application/grpc"), "{what}");
                assert!(field("grpc-message").unwrap().contains("try again in") && body.is_empty(), "{what}");
            }
            checked += 2;
        }
    }
    assert_eq!(checked, 8 * 7 * 2);
}

#[test]
fn ratelimit_headers_of_the_upstream_are_kept() {
    let upstream = Upstream::responding(respond_as_asked);
    let gateway = Gateway::start(&proxied("by = \"global\"\nquota = \"10/hour\"", &upstream));
    let line = ("x-line", "RateLimit: \"theirs\";r=3;t=5");
    let reply = gateway.client().get_with("/r", &[line]);
    let fields: Vec<_> =
        reply.headers.iter().filter(|(name, _)| name == "ratelimit").map(|(_, value)| value.as_str()).collect();
    assert_eq!(fields[0], "\"theirs\";r=3;t=5");
    assert!(fields.len() == 2 && fields[1].starts_with("\"l\";r=9"), "the gateway appends its header: {fields:?}");
}

#[test]
fn openai_and_anthropic_headers_replace_those_of_the_upstream() {
    let upstream = Upstream::responding(respond_as_asked);
    let styles = "limits = [\"l\"]\nratelimit_headers = [\"openai\", \"anthropic\"]";
    let limit = "by = \"global\"\nquota = \"10/hour\"";
    let gateway = Gateway::start(&proxied(limit, &upstream).replace("limits = [\"l\"]", styles));
    let theirs = [
        ("x-line", "x-ratelimit-remaining-requests: 4999"),
        ("x-line", "x-ratelimit-remaining-tokens: 120000"),
        ("x-line", "anthropic-ratelimit-requests-limit: 5000"),
    ];
    let reply = gateway.client().get_with("/r", &theirs);
    let values = |name: &str| -> Vec<&str> {
        reply.headers.iter().filter(|(other, _)| other == name).map(|(_, value)| value.as_str()).collect()
    };
    // Client libraries of OpenAI and Anthropic expect a single number in each of these headers, so the gateway replaces
    // the upstream's value.
    assert_eq!(values("x-ratelimit-remaining-requests"), ["9"]);
    assert_eq!(values("anthropic-ratelimit-requests-limit"), ["10"]);
    assert_eq!(values("x-ratelimit-remaining-tokens"), ["120000"], "the gateway has no limit of tokens");
}

#[test]
fn cost_above_the_burst_is_denied_without_retry_after_and_check_warns() {
    let consumers = consumer("small", "limit.l = { quota = \"2/hour\" }");
    let limit = "by = \"api-key\"\nquota = \"100/hour\"\ncost = { request_header = \"x-cost\", max = 500 }\ntiers = { free = { quota = \"5/hour\" } }";
    let config = format!("[client_ip]\ntrusted_proxies = [\"{PROXY}/32\"]\n{KEYS}{}", answered(limit));
    let gateway = Gateway::start_with(&config, &[("consumers.toml", &consumers)]);
    let mut proxy = Client::connect_from(PROXY.parse().unwrap(), gateway.address);
    let never = proxy.get_with("/r", &[("x-cost", "101")]);
    never.assert_problem(429, "the cost exceeds the burst");
    assert_eq!(never.header("retry-after"), None);
    assert_eq!(proxy.get_with("/r", &[("x-api-key", "small"), ("x-cost", "3")]).header("retry-after"), None);
    let check = crate::support::gateway::binary()
        .args(["check", "--config"])
        .arg(gateway.directory().join("gateway.toml"))
        .output()
        .unwrap();
    let out = String::from_utf8(check.stdout).unwrap();
    for warning in ["the capacity of `l` (100)", "in the tier `free` (5)", "for the consumer `small` (2)"] {
        assert!(out.contains(warning), "{warning} is missing in\n{out}");
    }
    assert!(out.contains("l: at most 199 in any 60 minutes, 100 at once"), "{out}");
    assert!(out.contains("l, tier free: at most 9 in any 60 minutes, 5 at once"), "{out}");
}

#[test]
fn request_that_the_queue_cannot_admit_in_time_for_its_cost_is_denied_at_once() {
    // In `max_wait` (2 minutes), 20 tokens refill. Only two requests of cost 10 can wait, although `max_queue` is 1000
    // by default.
    let limit = "by = \"global\"\nquota = \"10/min\"\nburst = 10\ncost = 10\nmax_wait = \"2m\"";
    let gateway = Gateway::start(&("[server]\nworkers = 1\n".to_owned() + &answered(limit)));
    assert_eq!(gateway.get("/r").status, 200);
    let mut clients = [(); 3].map(|()| gateway.client());
    for client in &mut clients {
        client.send(b"GET /r HTTP/1.1\r\nHost: a\r\n\r\n");
        client.stream.get_mut().set_nonblocking(true).unwrap();
    }
    eventually("one of three is denied", || {
        clients.iter().any(|client| client.stream.get_ref().peek(&mut [0]).is_ok())
    });
    for client in &mut clients {
        if client.stream.get_ref().peek(&mut [0]).is_ok() {
            client.stream.get_mut().set_nonblocking(false).unwrap();
            assert_eq!(client.reply().unwrap().status, 429);
        }
    }
}

#[test]
fn own_quota_of_a_consumer_precedes_the_tier_of_every_source() {
    let (redis, key) = (Redis::start(), Key::ed("k"));
    let server = Upstream::responding(|seen| {
        let plan = seen.headers("cookie")[0];
        format!("HTTP/1.1 200 OK\r\nX-User: u\r\nX-Plan: {plan}\r\nContent-Length: 0\r\n\r\n").into_bytes()
    });
    // Each consumer is used once, so that its requests do not count towards the next row.
    let all = ["own-a", "own-b", "none-a", "none-b", "none-c"];
    for (source, by, require) in [
        ("api-key", "[\"api-key\"]", "[\"keys\"]"),
        ("jwt:plan", "[\"api-key\", \"jwt:sub\"]", "[[\"keys\", \"tokens\"]]"),
        ("auth:x-plan", "[\"api-key\", \"auth:x-user\"]", "[[\"keys\", \"sso\"]]"),
    ] {
        for store in stores(&redis) {
            redis::cmd("FLUSHALL").exec(&mut redis.connection()).unwrap();
            let config = format!(
                "{store}[tiers]\nfrom = \"{source}\"\n[auth.keys]\nkind = \"api-key\"\nconsumers = \"consumers.toml\"\n\
                 [auth.tokens]\nkind = \"jwt\"\njwks_file = \"jwks.json\"\n\
                 [auth.sso]\nkind = \"forward\"\nurl = \"{}\"\nresponse_headers = [\"x-user\", \"x-plan\"]\n\
                 [limit.l]\nby = {by}\nalgorithm = \"sliding-log\"\nquota = \"3/hour\"\n\
                 tiers = {{ free = {{ quota = \"1/hour\" }}, pro = {{ quota = \"6/hour\" }} }}\n\
                 [[route]]\nname = \"r\"\npath = \"/r\"\nrequire = {require}\nlimits = [\"l\"]\nrespond = {{ status = 200 }}\n",
                server.url()
            );
            let tier = |name: &str| match (source, name) {
                ("api-key", "own-b" | "none-b") => "tier = \"free\"\n",
                ("api-key", "own-a" | "none-a") => "tier = \"pro\"\n",
                _ => "",
            };
            let own = |name: &str| if name.starts_with("own") { "limit.l = { quota = \"8/hour\" }" } else { "" };
            let consumers: String =
                all.iter().map(|name| consumer(name, &format!("{}{}", tier(name), own(name)))).collect();
            let files = [("consumers.toml", &*consumers), ("jwks.json", &*key_set(&[&key]))];
            let gateway = Gateway::start_with(&config, &files);
            let admitted = |name: &str, plan: &str| {
                let claims = json!({ "sub": "u", "plan": plan, "exp": in_seconds(300) });
                let token = format!("Bearer {}", key.token(&claims));
                let headers = [("x-api-key", name), ("authorization", &token), ("cookie", plan)];
                let mut client = gateway.client();
                (0..12).filter(|_| client.get_with("/r", &headers).status == 200).count()
            };
            for (name, plan, expected) in [
                ("own-a", "pro", 8),
                ("own-b", "free", 8),
                ("none-a", "pro", 6),
                ("none-b", "free", 1),
                ("none-c", "x", 3),
            ] {
                assert_eq!(admitted(name, plan), expected, "{source}: {name} with the tier {plan}, {store}");
            }
        }
    }
}

#[test]
fn unusable_cost_of_a_response_is_the_default() {
    let upstream = Upstream::responding(respond_as_asked);
    let limit = "by = \"global\"\nalgorithm = \"fixed-window\"\nstart = \"first-request\"\nquota = \"1000/hour\"\n\
                 cost.response_header = \"x-used\"";
    let gateway = Gateway::start(&proxied(limit, &upstream).replace("limits = [\"l\"]", "limits = [\"l\"]\ncost = 7"));
    let mut client = gateway.client();
    let mut left = 1000;
    for (values, cost) in [
        (&["x-used: 5"][..], 5),
        (&["x-used: 0"], 0),
        (&[], 7),
        (&["x-used: many"], 7),
        (&["x-used: -3"], 7),
        (&["x-used: 1.5"], 7),
        (&["x-used: 1", "x-used: 2"], 7),
    ] {
        let headers: Vec<_> = values.iter().map(|value| ("x-line", *value)).collect();
        left -= cost;
        assert_eq!(client.get_with("/r", &headers).remaining("l"), left, "{values:?}");
    }
}
