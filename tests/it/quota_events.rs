//! Quota events, tested over the wire. All gateways together send one signed event per threshold and window, even if
//! webhooks and Redis fail in between.

use std::collections::BTreeMap;
use std::io::Write;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use crate::support::admin_listener::{ask as ask_admin, metric, with_admin};
use crate::support::certificates::{Authority, NOW};
use crate::support::client::{Client, load};
use crate::support::cluster::Cluster;
use crate::support::eventually;
use crate::support::gateway::{Gateway, binary};
use crate::support::redis::{Redis, free_port};
use crate::support::tls_upstream::{self, TlsUpstream};
use crate::support::upstream::{Seen, Upstream, read_request};
use aws_lc_rs::digest::{SHA256, digest};
use aws_lc_rs::hmac::{HMAC_SHA256, Key, verify};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use jiff::Timestamp;
use serde_json::Value;

/// The signing key: 32 bytes with the value `k`, encoded in Base64.
const SECRET: &str = "whsec_a2tra2tra2tra2tra2tra2tra2tra2tra2tra2tra2s=";

const DAY: &str = "algorithm = \"fixed-window\"\nquota = \"10/day\"";

/// A server that receives webhooks.
struct Hook {
    server: Upstream,
    /// The status that the server responds with.
    status: Arc<AtomicU16>,
}

impl Hook {
    fn start() -> Hook {
        let status = Arc::new(AtomicU16::new(204));
        let shared = status.clone();
        let server = Upstream::responding(move |_| {
            format!("HTTP/1.1 {} X\r\nContent-Length: 0\r\n\r\n", shared.load(Ordering::SeqCst)).into_bytes()
        });
        Hook { server, status }
    }

    fn config(&self) -> String {
        destination(&format!("{}/hook", self.server.url()), "")
    }

    fn requests(&self) -> Vec<Seen> {
        self.server.seen.lock().unwrap().clone()
    }

    fn events(&self) -> Vec<Value> {
        self.requests().iter().map(verified).collect()
    }
}

fn destination(url: &str, keys: &str) -> String {
    format!("[notify.hook]\nwebhook = \"{url}\"\nsecret = \"{SECRET}\"\n{keys}\n")
}

/// Verify the signature of a request. Return its event.
fn verified(request: &Seen) -> Value {
    let header = |name| request.headers(name)[0].to_owned();
    let key = Key::new(HMAC_SHA256, &[b'k'; 32]);
    let signed = format!("{}.{}.", header("webhook-id"), header("webhook-timestamp"));
    let signature = STANDARD.decode(header("webhook-signature").strip_prefix("v1,").unwrap()).unwrap();
    verify(&key, &[signed.as_bytes(), &request.body].concat(), &signature).expect("a signature");
    let age = Timestamp::now().as_second() - header("webhook-timestamp").parse::<i64>().unwrap();
    assert!((0..60).contains(&age) && header("content-type") == "application/json", "{request:?}");
    assert!(request.head.starts_with("POST /hook HTTP/1.1\r\n"), "{request:?}");
    serde_json::from_slice(&request.body).unwrap()
}

/// A configuration with a limit `l` by IP address on `/r`.
fn by_ip(store: &str, limit: &str, rest: &str) -> String {
    with_admin(&format!(
        "[server]\nworkers = 2\n{store}\n[limit.l]\nby = \"ip\"\nnotify = \"hook\"\n{limit}\n\
         [[route]]\nname = \"r\"\npath = \"/r\"\nlimits = [\"l\"]\nrespond = {{ status = 200 }}\n{rest}"
    ))
}

fn thresholds(events: &[Value]) -> Vec<u64> {
    let mut found: Vec<_> = events.iter().map(|event| event["data"]["threshold"].as_u64().unwrap()).collect();
    found.sort_unstable();
    found
}

/// Return the value of an event counter of the destination `hook`, or 0 if it has no events yet.
fn results(gateway: &Gateway, result: &str) -> f64 {
    let page = ask_admin(gateway, "/metrics");
    let line = format!("sluicegate_quota_events_total{{destination=\"hook\",result=\"{result}\"}} ");
    page.text().lines().find_map(|each| each.strip_prefix(&line)).map_or(0.0, |value| value.parse().unwrap())
}

/// Return the number of events that the gateway has not delivered. An event that has reached the webhook is pending
/// until the gateway has read the webhook's response.
fn pending(gateway: &Gateway) -> f64 {
    metric(gateway, "sluicegate_quota_events_pending{destination=\"hook\"}")
}

fn sum(gateways: &[Gateway], result: &str) -> f64 {
    gateways.iter().map(|gateway| results(gateway, result)).sum()
}

fn statuses(gateway: &Gateway, requests: usize) -> Vec<u16> {
    let mut client = gateway.client();
    (0..requests).map(|_| client.get("/r").status).collect()
}

#[test]
fn three_gateways_send_one_event_for_each_threshold() {
    let (redis, hook) = (Redis::start(), Hook::start());
    let config = by_ip(&redis.store(), DAY, &hook.config());
    let gateways = [0; 3].map(|_| Gateway::start(&config));
    for request in 0..15 {
        let expected = if request < 10 { 200 } else { 429 };
        assert_eq!(gateways[request % 3].get("/r").status, expected, "{request}");
    }
    // Each of the three gateways has detected both thresholds.
    eventually("all events are delivered or claimed by the other gateway", || {
        sum(&gateways, "delivered") + sum(&gateways, "claimed") == 6.0
    });
    assert_eq!((sum(&gateways, "delivered"), sum(&gateways, "failed")), (2.0, 0.0));
    let events = hook.events();
    assert_eq!(thresholds(&events), [80, 100]);
    let event = events.iter().find(|event| event["data"]["threshold"] == 80).unwrap();
    assert_eq!(event["type"], "quota.threshold_reached");
    let data = &event["data"];
    assert_eq!((&data["limit"], &data["quota"], &data["unit"]), (&"l".into(), &"10/day".into(), &"requests".into()));
    assert_eq!((&data["capacity"], &data["decided_by"], &data["shadow"]), (&10.into(), &"store".into(), &false.into()));
    assert!(data["used"].as_u64().unwrap() >= 8 && data["consumer"].is_null(), "{event}");
    assert_eq!(data["identity"].as_str().unwrap().len(), 32);
    assert!(data["resets_at"].as_str().unwrap().ends_with("T00:00:00Z"), "{event}");
    redis.assert_every_key_expires();
    assert!(!hook.requests().iter().any(|request| String::from_utf8_lossy(&request.body).contains("127.0.0.1")));
}

#[test]
fn each_window_has_one_event_under_load() {
    let (redis, hook) = (Redis::start(), Hook::start());
    let limit = "algorithm = \"fixed-window\"\nquota = \"20/1s\"";
    let gateways = [0; 3].map(|_| Gateway::start(&by_ip(&redis.store(), limit, &hook.config())));
    let addresses: Vec<SocketAddr> = gateways.iter().map(|gateway| gateway.address).collect();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::SeqCst) {
                load(&addresses, 6, 60, "/r", &[]);
            }
        });
        let windows = || {
            let mut windows = BTreeMap::<String, Vec<u64>>::new();
            for event in hook.events() {
                let data = &event["data"];
                let window = windows.entry(data["resets_at"].as_str().unwrap().to_owned()).or_default();
                window.push(data["threshold"].as_u64().unwrap());
            }
            windows
        };
        eventually("four windows have events", || windows().len() >= 5);
        done.store(true, Ordering::SeqCst);
        // In the first and the last window, one of the two events may be missing.
        let windows = windows();
        for (window, thresholds) in &windows {
            let mut sorted = thresholds.clone();
            sorted.sort_unstable();
            assert!([vec![80], vec![100], vec![80, 100]].contains(&sorted), "{window}: {windows:?}");
        }
        assert!(windows.values().filter(|thresholds| thresholds.len() == 2).count() >= 3, "{windows:?}");
    });
}

#[test]
fn stream_gets_the_events_of_all_gateways_once() {
    let redis = Redis::start();
    let stream = "[notify.hook]\nstream = \"sluicegate:events\"\nmax_length = 100\n";
    let config = by_ip(&redis.store(), DAY, stream);
    let gateways = [0; 3].map(|_| Gateway::start(&config));
    (0..15).for_each(|request| drop(gateways[request % 3].get("/r")));
    eventually("all events are delivered or claimed", || {
        sum(&gateways, "delivered") + sum(&gateways, "claimed") == 6.0
    });
    let range = redis::cmd("XRANGE").arg("sluicegate:events").arg("-").arg("+").to_owned();
    let entries: Vec<(String, BTreeMap<String, String>)> = range.query(&mut redis.connection()).unwrap();
    let event = |(_, fields): &(String, BTreeMap<String, String>)| {
        assert!(fields["id"].starts_with("evt_"), "{fields:?}");
        serde_json::from_str(&fields["event"]).unwrap()
    };
    let events: Vec<Value> = entries.iter().map(event).collect();
    assert_eq!(thresholds(&events), [80, 100]);
}

#[test]
fn event_that_cannot_be_added_to_its_stream_is_added_later() {
    let redis = Redis::start();
    // The key `events` is not a stream, so the gateway's XADD fails, as it would without permission.
    redis::cmd("SET").arg("events").arg("1").exec(&mut redis.connection()).unwrap();
    let gateway = Gateway::start(&by_ip(&redis.store(), DAY, "[notify.hook]\nstream = \"events\"\n"));
    assert_eq!(statuses(&gateway, 8), [200; 8]);
    let failed = "sluicegate_quota_event_failed_attempts_total{destination=\"hook\"}";
    let has_failed = || crate::support::admin_listener::ask(&gateway, "/metrics").text().contains(failed);
    eventually("two attempts fail", || has_failed() && metric(&gateway, failed) >= 2.0);
    assert_eq!((results(&gateway, "delivered"), results(&gateway, "claimed")), (0.0, 0.0));
    redis::cmd("DEL").arg("events").exec(&mut redis.connection()).unwrap();
    eventually("the event is delivered", || results(&gateway, "delivered") == 1.0);
    let length: u64 = redis::cmd("XLEN").arg("events").query(&mut redis.connection()).unwrap();
    assert_eq!(length, 1);
}

#[test]
fn cluster_adds_an_event_and_its_claim_in_one_call() {
    let cluster = Cluster::start(3, 0);
    let store = format!("[store]\nurl = \"{}\"\ntimeout = \"5s\"\n", cluster.url());
    let config = by_ip(&store, DAY, "[notify.hook]\nstream = \"events\"\n");
    let gateways = [0; 2].map(|_| Gateway::start(&config));
    (0..14).for_each(|request| drop(gateways[request % 2].get("/r")));
    eventually("all events are delivered or claimed", || {
        sum(&gateways, "delivered") + sum(&gateways, "claimed") == 4.0
    });
    let owner = cluster.owner(cluster.slot("events"));
    let length: u64 = redis::cmd("XLEN").arg("events").query(&mut owner.connection()).unwrap();
    assert_eq!((length, sum(&gateways, "delivered")), (2, 2.0));
}

#[test]
fn failing_webhook_gets_the_same_event_again() {
    let hook = Hook::start();
    hook.status.store(500, Ordering::SeqCst);
    let gateway = Gateway::start(&by_ip("", "quota = \"2/hour\"\nburst = 10", &hook.config()));
    assert_eq!(statuses(&gateway, 8), [200; 8]);
    eventually("two attempts fail", || hook.requests().len() >= 2);
    let failed = "sluicegate_quota_event_failed_attempts_total{destination=\"hook\"}";
    eventually("the attempts are counted", || metric(&gateway, failed) >= 2.0);
    assert_eq!(pending(&gateway), 1.0);
    hook.status.store(200, Ordering::SeqCst);
    eventually("the event is delivered", || results(&gateway, "delivered") == 1.0);
    let requests = hook.requests();
    let sent = |seen: &Seen| (seen.headers("webhook-id")[0].to_owned(), seen.body.clone());
    assert!(requests.iter().all(|seen| sent(seen) == sent(&requests[0])), "{requests:?}");
    assert_eq!(hook.events()[0]["data"]["capacity"], 10, "thresholds are percentages of the burst");
    assert!(gateway.log().contains("cannot deliver a quota event"), "{}", gateway.log());
    assert!(!gateway.log().contains("/hook"), "the URL may be a secret: {}", gateway.log());
    // An event of a bucket is repeated only after the time in which the bucket can become full again.
    assert_eq!(statuses(&gateway, 1), [200]);
    assert_eq!(hook.requests().len(), requests.len());
}

#[test]
fn reload_corrects_the_destination_of_pending_events() {
    let hook = Hook::start();
    let config = |url: &str| by_ip("", DAY, &destination(url, ""));
    let gateway = Gateway::start(&config(&format!("http://127.0.0.1:{}/hook", free_port())));
    assert_eq!(statuses(&gateway, 8), [200; 8]);
    let failed = "sluicegate_quota_event_failed_attempts_total{destination=\"hook\"}";
    let has_failed = || crate::support::admin_listener::ask(&gateway, "/metrics").text().contains(failed);
    eventually("an attempt fails", || has_failed() && metric(&gateway, failed) >= 1.0);
    gateway.put(&config(&format!("{}/hook", hook.server.url())));
    eventually("the event is delivered", || hook.events().len() == 1);
    // The pending event survives the reload, and the window gets no second event for this threshold.
    assert_eq!(statuses(&gateway, 1), [200]);
    assert_eq!(statuses(&gateway, 1), [200]);
    eventually("the next threshold has an event", || hook.events().len() == 2);
    assert_eq!(thresholds(&hook.events()), [80, 100]);
}

#[test]
fn outage_of_redis_does_not_hold_events_back() {
    let (redis, hook) = (Redis::start(), Hook::start());
    let gateway = Gateway::start(&by_ip(&redis.store(), DAY, &hook.config()));
    drop(redis);
    assert_eq!(statuses(&gateway, 8), [200; 8]);
    eventually("the event arrives", || hook.events().len() == 1);
    assert_eq!(hook.events()[0]["data"]["decided_by"], "local");
}

#[test]
fn shutdown_delivers_events_that_are_on_their_way() {
    let gate = Arc::new((Mutex::new(false), Condvar::new()));
    let inner = gate.clone();
    let server = Upstream::responding(move |_| {
        drop(inner.1.wait_while(inner.0.lock().unwrap(), |open| !*open).unwrap());
        b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n".to_vec()
    });
    let config = by_ip("", DAY, &destination(&format!("{}/hook", server.url()), "timeout = \"1m\""));
    let mut gateway = Gateway::start(&config);
    assert_eq!(statuses(&gateway, 8), [200; 8]);
    eventually("the request is in flight", || server.count() == 1);
    gateway.terminate();
    eventually("the gateway stops", || std::net::TcpStream::connect(gateway.address).is_err());
    *gate.0.lock().unwrap() = true;
    gate.1.notify_all();
    assert!(gateway.wait().success());
    assert!(!gateway.log().contains("quota events are lost"), "{}", gateway.log());
    // A webhook that never responds does not prevent the process from exiting.
    *gate.0.lock().unwrap() = false;
    let mut gateway = Gateway::start(&config);
    assert_eq!(statuses(&gateway, 8), [200; 8]);
    eventually("the request is in flight", || server.count() == 2);
    gateway.terminate();
    assert!(gateway.wait().success());
    assert!(gateway.log().contains("quota events are lost"), "{}", gateway.log());
}

#[test]
fn consumers_are_named_and_tiers_have_their_own_percentages() {
    let (redis, hook) = (Redis::start(), Hook::start());
    let hash = |name: &str| {
        let bytes = digest(&SHA256, name.as_bytes());
        bytes.as_ref().iter().map(|byte| format!("{byte:02x}")).collect::<String>()
    };
    let consumer = |name: &str, tier: &str| {
        format!(
            "[[consumer]]\nname = \"{name}\"\ntier = \"{tier}\"\nkeys = [\"sha256:{}\"]\n",
            hash(&format!("key-{name}"))
        )
    };
    let small = "sm\u{202e}all";
    let consumers = consumer(small, "free") + &consumer("large", "paid");
    let config = with_admin(&format!(
        "{}[auth.keys]\nkind = \"api-key\"\nconsumers = \"consumers.toml\"\non_unknown = \"accept\"\n\
         [limit.l]\nby = \"api-key\"\nalgorithm = \"fixed-window\"\nquota = \"10/day\"\nshadow = true\n\
         tiers = {{ free = {{ quota = \"5/day\" }}, paid = {{ quota = \"100/day\" }} }}\n\
         notify = {{ to = \"hook\", at = [80] }}\n{}\
         [[route]]\nname = \"r\"\npath = \"/r\"\nidentify = [\"keys\"]\nlimits = [\"l\"]\nrespond = {{ status = 200 }}\n",
        redis.store(),
        hook.config()
    ));
    let gateway = Gateway::start_with(&config, &[("consumers.toml", &consumers)]);
    let mut client = gateway.client();
    for key in ["key-large", &format!("key-{small}"), "some-secret"] {
        for _ in 0..9 {
            assert_eq!(client.get_with("/r", &[("x-api-key", key)]).status, 200, "a shadow limit");
        }
    }
    eventually("two events arrive", || hook.events().len() == 2);
    let events = hook.events();
    let of = |capacity: u64| &events.iter().find(|event| event["data"]["capacity"] == capacity).unwrap()["data"];
    assert_eq!((&of(5)["consumer"], &of(5)["quota"], &of(5)["shadow"]), (&small.into(), &"5/day".into(), &true.into()));
    assert!(of(10)["consumer"].is_null(), "an unknown key is no consumer, only a hash: {events:?}");
    let bodies: Vec<_> = hook.requests().iter().map(|seen| String::from_utf8(seen.body.clone()).unwrap()).collect();
    assert!(bodies.iter().all(|body| !body.contains("secret") && !body.contains("key-")), "{bodies:?}");
    assert!(bodies.iter().any(|body| body.contains("sm\\u202eall")), "a direction mark is escaped: {bodies:?}");
}

#[test]
fn cost_of_a_response_causes_an_event_without_another_request() {
    let hook = Hook::start();
    let upstream =
        Upstream::responding(|_| b"HTTP/1.1 200 OK\r\nx-tokens-used: 90\r\nContent-Length: 0\r\n\r\n".to_vec());
    let config = with_admin(&format!(
        "[limit.l]\nby = \"ip\"\nquota = \"100/day\"\ncost.response_header = \"x-tokens-used\"\nnotify = \"hook\"\n{}\
         [upstream.api]\nservers = [\"{}\"]\n\
         [[route]]\nname = \"r\"\npath = \"/r\"\nlimits = [\"l\"]\nupstream = \"api\"\n",
        hook.config(),
        upstream.url()
    ));
    let gateway = Gateway::start(&config);
    assert_eq!(statuses(&gateway, 1), [200]);
    eventually("the event arrives", || hook.events().len() == 1);
    assert_eq!((&hook.events()[0]["data"]["used"], thresholds(&hook.events())), (&90.into(), vec![80]));
}

#[test]
fn certificate_of_a_webhook_is_verified() {
    let authority = Authority::new("ca");
    let pair = authority.server(&["127.0.0.1"], NOW);
    let seen = Arc::<Mutex<Vec<Seen>>>::default();
    let record = seen.clone();
    let server = TlsUpstream::serve(
        tls_upstream::server(&pair, None, &["http/1.1"], rustls::ALL_VERSIONS),
        move |mut stream| {
            while let Some(request) = read_request(&mut stream) {
                record.lock().unwrap().push(request);
                if stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").is_err() {
                    return;
                }
            }
        },
    );
    let config = by_ip("", DAY, &destination(&format!("https://{}/hook", server.address), "ca = \"ca.pem\""));
    let run = |command: &str, ca: &str| {
        let directory = tempfile::tempdir().unwrap();
        let text = format!("{config}[[listener]]\naddress = \"127.0.0.1:0\"\n");
        std::fs::write(directory.path().join("gateway.toml"), text).unwrap();
        std::fs::write(directory.path().join("ca.pem"), ca).unwrap();
        let mut process = binary();
        let output = process.arg(command).arg("--config").arg(directory.path().join("gateway.toml")).output().unwrap();
        (output.status.code(), String::from_utf8([output.stdout, output.stderr].concat()).unwrap())
    };
    let other = Authority::new("other").pem();
    let (code, report) = run("doctor", &authority.pem());
    assert!(
        code == Some(0) && report.contains("webhook at 127.0.0.1") && report.contains("nothing was sent"),
        "{report}"
    );
    let (code, report) = run("doctor", &other);
    assert!(code == Some(1) && report.contains("TLS handshake failed") && !report.contains("/hook"), "{report}");
    let (code, report) = run("check", &other);
    assert!(code == Some(0) && report.contains("[notify.hook]: TLS handshake failed"), "{report}");
    assert!(seen.lock().unwrap().is_empty());
    let gateway = Gateway::start_with(&config, &[("ca.pem", &other)]);
    assert_eq!(statuses(&gateway, 8), [200; 8]);
    eventually("the handshake fails", || gateway.log().contains("TLS handshake failed"));
    assert!(seen.lock().unwrap().is_empty());
    gateway.put_file("ca.pem", &authority.pem());
    eventually("the event arrives with the new CA", || seen.lock().unwrap().len() == 1);
    verified(&seen.lock().unwrap()[0]);
}

#[test]
fn routes_without_notify_queue_nothing() {
    let hook = Hook::start();
    let config = with_admin(&format!(
        "[limit.quiet]\nby = \"ip\"\nquota = \"1/day\"\n[limit.l]\nby = \"ip\"\n{DAY}\nnotify = \"hook\"\n{}\
         [[route]]\nname = \"q\"\npath = \"/q\"\nlimits = [\"quiet\"]\nrespond = {{ status = 200 }}\n\
         [[route]]\nname = \"r\"\npath = \"/r\"\nlimits = [\"l\"]\nrespond = {{ status = 200 }}\n",
        hook.config()
    ));
    let gateway = Gateway::start(&config);
    let mut client: Client = gateway.client();
    assert_eq!([(); 3].map(|()| client.get("/q").status), [200, 429, 429]);
    assert_eq!(statuses(&gateway, 8), [200; 8]);
    eventually("the event arrives", || hook.events().len() == 1);
    assert_eq!(hook.events()[0]["data"]["limit"], "l");
    assert_eq!(metric(&gateway, "sluicegate_quota_events_dropped_total"), 0.0);
}

// === Events without a separate check in Redis, overrides, and rolling windows ===

/// A configuration with a limit `l` by the header `x-id` on `/r`.
fn by_header(begin: &str, limit: &str, hook: &str) -> String {
    with_admin(&format!(
        "{begin}\n[limit.l]\nby = \"header:x-id\"\nalgorithm = \"fixed-window\"\n{limit}\n{hook}\
         [[route]]\nname = \"r\"\npath = \"/r\"\nlimits = [\"l\"]\nrespond = {{ status = 200 }}\n"
    ))
}

#[test]
fn prefetched_tokens_cause_each_event_at_most_one_prefetch_early() {
    let (redis, hook) = (Redis::start(), Hook::start());
    let limit = "quota = \"400/day\"\nprefetch = 40\nnotify = { to = \"hook\", at = [80] }";
    let gateway = Gateway::start(&by_header(&redis.store(), limit, &hook.config()));
    let prefetched = || metric(&gateway, "sluicegate_checks_total{answered_by=\"prefetch\"}");
    let hot = |identity: &str, requests: usize| {
        let statuses = load(&[gateway.address], 8, requests, "/r", &[("x-id", identity)]);
        assert_eq!(statuses, vec![200; requests]);
    };
    // 279 requests and 40 prefetched tokens are 319 of 400, one less than the threshold of 80 %.
    ["a", "b", "c", "d"].iter().for_each(|identity| hot(identity, 279));
    hot("z", 320);
    eventually("the event arrives", || results(&gateway, "delivered") == 1.0);
    eventually("no event is pending", || pending(&gateway) == 0.0);
    // The prefetched tokens suffice for the requests up to the threshold, so the gateway makes no further check in
    // Redis.
    let mut client = gateway.client();
    for identity in ["e", "f", "g", "h"] {
        hot(identity, 279);
        (0..41).for_each(|_| assert_eq!(client.get_with("/r", &[("x-id", identity)]).status, 200));
    }
    eventually("each identity has an event", || hook.events().len() == 5);
    for event in &hook.events() {
        assert!((320..=360).contains(&event["data"]["used"].as_u64().unwrap()), "{event}");
    }
    assert!(prefetched() > 100.0, "{} of 2716 requests took prefetched tokens", prefetched());
}

#[test]
fn last_token_of_a_quota_causes_an_event_if_it_was_prefetched() {
    let (redis, hook) = (Redis::start(), Hook::start());
    let limit = "quota = \"400/day\"\nprefetch = 40\nnotify = { to = \"hook\", at = [100] }";
    let gateway = Gateway::start(&by_header(&redis.store(), limit, &hook.config()));
    let prefetched = || metric(&gateway, "sluicegate_checks_total{answered_by=\"prefetch\"}");
    let mut client = gateway.client();
    let mut identities = 0;
    // All prefetched tokens are used, so no refund follows, and no further check in Redis either. Only the use of the
    // last token can cause the event.
    let last_was_prefetched = (0..100).any(|identity| {
        identities += 1;
        let header = [("x-id", &*format!("client-{identity}"))];
        assert_eq!(load(&[gateway.address], 8, 396, "/r", &header), vec![200; 396]);
        let mut get = || assert_eq!(client.get_with("/r", &header).status, 200);
        (0..3).for_each(|_| get());
        let before = prefetched();
        get();
        prefetched() > before
    });
    assert!(last_was_prefetched, "in no case was the last token prefetched");
    eventually("each identity has an event", || hook.events().len() == identities);
    assert!(hook.events().iter().all(|event| event["data"]["used"] == 400), "{:?}", hook.events());
}

#[test]
fn thresholds_are_percentages_of_an_override() {
    const TOKEN: (&str, &str) = ("authorization", "Bearer sesame");
    let (redis, hook) = (Redis::start(), Hook::start());
    let config = by_ip(&redis.store(), DAY, &hook.config()).replace("[admin]\n", "[admin]\ntoken = \"sesame\"\n");
    let gateway = Gateway::start(&config);
    let set = |quota: &str| {
        let body = format!(
            "{{\"limit\": \"l\", \"identity\": {{\"ip\": \"127.0.0.1\"}}, \"quota\": \"{quota}\", \"ttl\": \"1h\"}}"
        );
        let headers = [TOKEN, ("content-type", "application/json")];
        let reply = Client::connect(gateway.admin()).request("POST", "/api/overrides", &headers, body.as_bytes());
        assert_eq!(reply.status, 200, "{}", reply.text());
    };
    set("20/day");
    assert_eq!(statuses(&gateway, 16), [200; 16]);
    eventually("the event arrives", || hook.events().len() == 1);
    let data = &hook.events()[0]["data"];
    assert_eq!((&data["quota"], &data["capacity"], &data["used"]), (&"20/day".into(), &20.into(), &16.into()));
    // 17 of 18 is beyond the threshold of 80 %. This threshold already had its event in this window.
    set("18/day");
    assert_eq!(statuses(&gateway, 3), [200, 200, 429]);
    eventually("the other threshold has an event", || hook.events().len() == 2);
    let data = &hook.events()[1]["data"];
    assert_eq!((&data["threshold"], &data["quota"], &data["used"]), (&100.into(), &"18/day".into(), &18.into()));
    eventually("no event is pending", || {
        let page = Client::connect(gateway.admin()).get_with("/metrics", &[TOKEN]);
        page.text().contains("sluicegate_quota_events_pending{destination=\"hook\"} 0\n")
    });
}

#[test]
fn denials_from_the_denial_cache_have_the_event_of_the_first_denial() {
    let (redis, hook) = (Redis::start(), Hook::start());
    let config = by_ip(&redis.store(), DAY, &format!("cost = 4\n{}", hook.config()));
    let gateway = Gateway::start(&config);
    let statuses = statuses(&gateway, 50);
    assert_eq!((&statuses[..2], &statuses[2..]), (&[200, 200][..], &[429; 48][..]));
    let cached = metric(&gateway, "sluicegate_checks_total{answered_by=\"denial-cache\"}");
    assert!(cached >= 30.0, "{cached} denials came from the denial cache");
    eventually("both events arrive", || hook.events().len() == 2);
    assert_eq!(thresholds(&hook.events()), [80, 100]);
    let events = hook.events();
    let of = |threshold: u64| &events.iter().find(|event| event["data"]["threshold"] == threshold).unwrap()["data"];
    assert_eq!((&of(80)["used"], &of(80)["denied"]), (&8.into(), &false.into()));
    assert_eq!(
        (&of(100)["used"], &of(100)["denied"]),
        (&8.into(), &true.into()),
        "the 2 remaining tokens do not suffice for a cost of 4"
    );
    eventually("no event is pending", || pending(&gateway) == 0.0);
}

#[test]
fn rolling_windows_of_two_gateways_have_one_event_for_each_threshold() {
    for algorithm in ["sliding-window", "sliding-buckets", "sliding-log", "token-bucket"] {
        let (redis, hook) = (Redis::start(), Hook::start());
        let limit = format!("algorithm = \"{algorithm}\"\nquota = \"10/day\"");
        let gateways = [0; 2].map(|_| Gateway::start(&by_ip(&redis.store(), &limit, &hook.config())));
        for request in 0..15 {
            let expected = if request < 10 { 200 } else { 429 };
            assert_eq!(gateways[request % 2].get("/r").status, expected, "{algorithm}: {request}");
        }
        eventually("all events are delivered or claimed", || {
            sum(&gateways, "delivered") + sum(&gateways, "claimed") == 4.0
        });
        assert_eq!((thresholds(&hook.events()), sum(&gateways, "delivered")), (vec![80, 100], 2.0), "{algorithm}");
    }
}

#[test]
fn rolling_window_of_two_gateways_has_its_next_event_after_its_length() {
    const WINDOW: Duration = Duration::from_secs(2);
    let (redis, hook) = (Redis::start(), Hook::start());
    let limit = "algorithm = \"sliding-window\"\nquota = \"20/2s\"";
    let gateways = [0; 2].map(|_| Gateway::start(&by_ip(&redis.store(), limit, &hook.config())));
    let mut clients = gateways.each_ref().map(Gateway::client);
    let times = |threshold: u64| {
        let events = hook.events();
        let of = events.iter().filter(|event| event["data"]["threshold"] == threshold);
        let mut times: Vec<Timestamp> = of.map(|event| event["timestamp"].as_str().unwrap().parse().unwrap()).collect();
        times.sort_unstable();
        times
    };
    eventually("each threshold has three events", || {
        clients.iter_mut().for_each(|client| drop(client.get("/r")));
        [80, 100].iter().all(|threshold| times(*threshold).len() >= 3)
    });
    for threshold in [80, 100] {
        let times = times(threshold);
        for pair in times.windows(2) {
            // A gateway may claim the event of the next window up to a tenth of a window early.
            assert!(pair[1].duration_since(pair[0]) >= (WINDOW * 9 / 10).try_into().unwrap(), "{threshold}: {times:?}");
        }
    }
}

#[test]
fn undelivered_events_of_a_destination_are_bounded_and_counted() {
    let gate = Arc::new((Mutex::new(false), Condvar::new()));
    let inner = gate.clone();
    let server = Upstream::responding(move |_| {
        drop(inner.1.wait_while(inner.0.lock().unwrap(), |open| !*open).unwrap());
        b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n".to_vec()
    });
    let hook = destination(&format!("{}/hook", server.url()), "timeout = \"1m\"");
    let limit = "quota = \"1/day\"\nnotify = { to = \"hook\", at = [100] }";
    let other = "[limit.other]\nby = \"global\"\nquota = \"1/day\"\nnotify = { to = \"hook\", at = [100] }\n\
                 [[route]]\nname = \"o\"\npath = \"/o\"\nlimits = [\"other\"]\nrespond = { status = 200 }\n";
    let gateway = Gateway::start(&(by_header("", limit, &hook) + other));
    let pending = || pending(&gateway);
    let mut client = gateway.client();
    let mut request = |identity: u64| client.get_with("/r", &[("x-id", &identity.to_string())]).status;
    for identity in 0..1200 {
        assert_eq!(request(identity), 200, "requests do not wait for the webhook");
    }
    eventually("the events above the bound are dropped", || results(&gateway, "dropped") == 700.0);
    assert_eq!((pending(), gateway.get("/o").status), (500.0, 200));
    eventually("another limit has room", || pending() == 501.0);
    eventually("it is logged", || gateway.log().contains("too many undelivered quota events"));
    *gate.0.lock().unwrap() = true;
    gate.1.notify_all();
    eventually("all other events are delivered", || results(&gateway, "delivered") == 501.0 && pending() == 0.0);
    assert_eq!((request(1200), request(0), request(1199)), (200, 429, 429));
    eventually("a new event and one that was dropped are delivered", || results(&gateway, "delivered") == 503.0);
    assert_eq!((server.count(), results(&gateway, "dropped")), (503, 700.0));
}

#[test]
fn reservation_causes_an_event_only_when_it_is_settled() {
    let redis = Redis::start();
    let usage = |used: u64| format!("{{\"usage\":{{\"prompt_tokens\":0,\"completion_tokens\":{used}}}}}");
    let provider = Upstream::responding(move |seen| {
        let used = serde_json::from_slice::<Value>(&seen.body).unwrap()["use"].as_u64().unwrap();
        let body = usage(used);
        let length = body.len();
        format!("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n{body}")
            .into_bytes()
    });
    for algorithm in ["token-bucket", "fixed-window", "sliding-window", "sliding-buckets"] {
        for store in ["", &redis.store()] {
            redis::cmd("FLUSHALL").exec(&mut redis.connection()).unwrap();
            let hook = Hook::start();
            let config = with_admin(&format!(
                "{store}\n[limit.l]\nby = \"ip\"\nalgorithm = \"{algorithm}\"\nquota = \"100000/24h\"\nunit = \"tokens\"\n\
                 notify = \"hook\"\ncost = {{ llm = \"auto\" }}\n{}[upstream.api]\nservers = [\"{}\"]\n\
                 [[route]]\nname = \"r\"\npath = \"/{{*rest}}\"\nlimits = [\"l\"]\nupstream = \"api\"\n",
                hook.config(),
                provider.url()
            ));
            let gateway = Gateway::start(&config);
            let ask = |used: u64| {
                let body = serde_json::json!({"max_tokens": 95_000, "use": used}).to_string();
                gateway.client().request("POST", "/v1/chat/completions", &[], body.as_bytes()).status
            };
            // Read the usage without a check, because a check would count the reservation as usage.
            let is_settled = || {
                let usage = ask_admin(&gateway, "/api/identities?limit=l&ip=127.0.0.1").json();
                usage["limits"][0]["remaining"].as_u64().unwrap() >= 99_900
            };
            for used in [10, 20] {
                assert_eq!(ask(used), 200, "{algorithm}");
                eventually("the reservation is refunded", is_settled);
            }
            assert_eq!(ask(85_000), 200, "{algorithm}");
            eventually("the event arrives", || !hook.events().is_empty());
            let data = hook.events()[0]["data"].clone();
            let used = data["used"].as_u64().unwrap();
            assert!((84_900..=85_100).contains(&used), "{algorithm}: the settled cost, not the reservation: {data}");
            assert_eq!(thresholds(&hook.events()), [80], "{algorithm}: {data}");
        }
    }
}

#[test]
fn limit_beside_the_one_that_denies_has_no_event() {
    const CLIENTS: usize = 4;
    let (redis, cluster) = (Redis::start(), Cluster::start(3, 0));
    // In a cluster, the states of the two identities of a request may be on different masters.
    let in_cluster = format!("[store]\nurl = \"{}\"\ntimeout = \"5s\"\n", cluster.url());
    for store in ["", &redis.store(), &in_cluster] {
        for (order, name) in [("\"used\", \"idle\"", "x"), ("\"idle\", \"used\"", "y")] {
            let hook = Hook::start();
            let limit = |name: &str, by: &str, quota: u64| {
                format!(
                    "[limit.{name}]\nby = \"header:{by}\"\nalgorithm = \"fixed-window\"\nquota = \"{quota}/day\"\n\
                     notify = \"hook\"\n"
                )
            };
            let gateway = Gateway::start(&with_admin(&format!(
                "{store}{}{}{}[[route]]\nname = \"r\"\npath = \"/r\"\nlimits = [{order}]\nrespond = {{ status = 200 }}\n",
                limit("used", "x-a", 2),
                limit("idle", "x-b", 1000),
                hook.config()
            )));
            let mut client = gateway.client();
            for id in (0..CLIENTS).map(|id| format!("{name}-{id}")) {
                let mut ask = || client.get_with("/r", &[("x-a", &id), ("x-b", &id)]).status;
                assert_eq!([(); 5].map(|()| ask()), [200, 200, 429, 429, 429], "{order}, {store}");
            }
            eventually("the events of the used limit arrive", || {
                hook.events().len() >= 2 * CLIENTS && pending(&gateway) == 0.0
            });
            let events = hook.events();
            assert!(events.iter().all(|event| event["data"]["limit"] == "used"), "{order}, {store}: {events:?}");
            assert_eq!(thresholds(&events), [[80; CLIENTS], [100; CLIENTS]].concat(), "{order}, {store}");
        }
    }
}
