//! End-to-end tests of concurrency limits. The gateway releases a permit when the response body ends, the client
//! disconnects or the gateway stops. During the request, the gateway renews the permit.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::support::admin_listener::{metric, with_admin};
use crate::support::client::{Client, load};
use crate::support::gateway::Gateway;
use crate::support::redis::Redis;
use crate::support::upstream::{read_head, serve};
use crate::support::{assert_silent, eventually};
use sluicegate::clock::monotonic;

/// An upstream that sends response headers and leaves the body open. The test ends the bodies.
struct Streaming {
    address: SocketAddr,
    streams: Arc<Mutex<Receiver<TcpStream>>>,
}

impl Streaming {
    fn start() -> Streaming {
        let (sender, streams): (Sender<TcpStream>, _) = channel();
        let sender = Mutex::new(sender);
        let address = serve(move |mut stream| {
            while read_head(&mut stream).is_some() {
                stream.write_all(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n").unwrap();
                sender.lock().unwrap().send(stream.try_clone().unwrap()).unwrap();
            }
        });
        Streaming { address, streams: Arc::new(Mutex::new(streams)) }
    }

    /// Wait for the next request at the upstream. Return the upstream's side of its connection.
    fn next(&self) -> TcpStream {
        self.streams.lock().unwrap().recv_timeout(crate::support::MAX_WAIT).unwrap()
    }
}

/// Return a configuration with the limit `places`. The permit TTL is `response_timeout` plus 5 s.
fn config(store: &str, upstream: SocketAddr, quota: u64, response_timeout: &str) -> String {
    format!(
        "{store}[limit.places]\nby = \"global\"\nalgorithm = \"concurrency\"\nquota = \"{quota}\"\n\
         [upstream.u]\nservers = [\"http://{upstream}\"]\nresponse_timeout = \"{response_timeout}\"\n\
         [[route]]\nname = \"r\"\npath = \"/r\"\nlimits = [\"places\"]\nupstream = \"u\"\n\
         [[route]]\nname = \"quick\"\npath = \"/quick\"\nlimits = [\"places\"]\nrespond = {{ status = 200 }}\n"
    )
}

/// Start a request and read its response headers. The response body stays open.
fn hold(gateway: &Gateway) -> Client {
    let mut client = gateway.client();
    client.send(b"GET /r HTTP/1.1\r\nHost: a\r\n\r\n");
    assert_eq!(client.head().unwrap().status, 200);
    client
}

#[test]
fn held_permits_of_one_gateway_deny_at_the_whole_limit_without_a_call() {
    let (redis, upstream) = (Redis::start(), Streaming::start());
    // The local share of the gateway would be one of four permits.
    let store = format!("{}gateway_count = 4\n", redis.store());
    let gateway = Gateway::start(&with_admin(&config(&store, upstream.address, 4, "30s")));
    let _held = [0; 4].map(|_| hold(&gateway));
    let calls = || metric(&gateway, "sluicegate_store_calls_total");
    let before = calls();
    let mut client = gateway.client();
    for _ in 0..50 {
        assert_eq!(client.get("/quick").status, 429);
    }
    assert_eq!(calls() - before, 0.0, "the requests in flight hold all permits");
}

#[test]
fn openai_headers_of_a_concurrency_limit_have_no_reset() {
    let upstream = Streaming::start();
    let styles = "limits = [\"places\"]\nratelimit_headers = [\"openai\", \"anthropic\"]";
    let config = config("", upstream.address, 1, "30s").replace("limits = [\"places\"]", styles);
    let gateway = Gateway::start(&config);
    let _one = hold(&gateway);
    let full = gateway.get("/r");
    full.assert_problem(429, "one is in flight");
    for (name, expected) in [
        ("x-ratelimit-limit-concurrent-requests", Some("1")),
        ("x-ratelimit-remaining-concurrent-requests", Some("0")),
        ("x-ratelimit-reset-concurrent-requests", None),
        ("anthropic-ratelimit-concurrent-requests-remaining", Some("0")),
        ("anthropic-ratelimit-concurrent-requests-reset", None),
        ("retry-after", Some("1")),
        ("retry-after-ms", Some("1000")),
    ] {
        assert_eq!(full.header(name), expected, "{name}");
    }
}

#[test]
fn permit_is_held_until_the_body_ends() {
    let redis = Redis::start();
    for store in [String::new(), redis.store()] {
        let upstream = Streaming::start();
        let gateway = Gateway::start(&config(&store, upstream.address, 2, "30s"));
        let mut one = hold(&gateway);
        let _two = hold(&gateway);
        let full = gateway.get("/r");
        full.assert_problem(429, "two are in flight");
        assert_eq!(full.header("retry-after"), Some("1"));
        assert_eq!(full.header("ratelimit"), Some("\"places\";r=0"));
        assert_eq!(full.header("ratelimit-policy"), Some("\"places\";q=2;qu=\"concurrent-requests\""));
        // End the first response, and read it to the end.
        upstream.next().write_all(b"0\r\n\r\n").unwrap();
        let mut rest = Vec::new();
        while !rest.ends_with(b"0\r\n\r\n") {
            let mut byte = [0];
            one.stream.read_exact(&mut byte).unwrap();
            rest.push(byte[0]);
        }
        let mut reply = None;
        eventually("the permit is free", || {
            let quick = gateway.get("/quick");
            let free = quick.status == 200;
            reply = Some(quick);
            free
        });
        assert_eq!(reply.unwrap().header("ratelimit"), Some("\"places\";r=0"));
        redis.assert_every_key_expires();
    }
}

#[test]
fn disconnected_client_releases_its_permit() {
    let redis = Redis::start();
    for store in [String::new(), redis.store()] {
        let upstream = Streaming::start();
        let gateway = Gateway::start(&config(&store, upstream.address, 20, "30s"));
        let held: Vec<_> = (0..20).map(|_| hold(&gateway)).collect();
        assert_eq!(gateway.get("/quick").status, 429);
        drop(held);
        eventually("all permits are free", || gateway.get("/quick").header("ratelimit") == Some("\"places\";r=19"));
    }
}

#[test]
fn requests_cancelled_at_any_moment_leak_no_permit() {
    let redis = Redis::start();
    let upstream = Streaming::start();
    // With several connections to Redis, the release of a permit may overtake the call that acquires it.
    let store = redis.store() + "connections = 8\n";
    let gateway = Gateway::start(&config(&store, upstream.address, 1000, "30s"));
    std::thread::scope(|scope| {
        for pause in 0..8 {
            let gateway = &gateway;
            scope.spawn(move || {
                for _ in 0..50 {
                    let mut client = gateway.client();
                    client.send(b"GET /r HTTP/1.1\r\nHost: a\r\n\r\n");
                    // Dropping the client cancels the request. Depending on the pause, the gateway is reading, checking
                    // or forwarding the request at this time, or is sending the response.
                    std::thread::sleep(Duration::from_micros(250 * pause));
                }
            });
        }
    });
    eventually("all permits are free", || gateway.get("/quick").header("ratelimit") == Some("\"places\";r=999"));
}

#[test]
fn permits_released_while_the_store_hangs_are_free_when_it_continues() {
    let redis = Redis::start();
    let upstream = Streaming::start();
    // The permit TTL is 65 s, so no permit expires during this test.
    let store = redis.store().replace("5s", "1s");
    let gateway = Gateway::start(&config(&store, upstream.address, 5, "60s"));
    eventually("the store decides", || gateway.get("/quick").header("ratelimit") == Some("\"places\";r=4"));
    let held: Vec<_> = (0..5).map(|_| hold(&gateway)).collect();
    assert_eq!(gateway.get("/quick").status, 429);
    crate::support::signal(&redis.child, "STOP");
    drop(held);
    // Open the circuit breaker, so that the gateway decides locally. When the stopped Redis process continues, it
    // executes the calls that it has received.
    eventually("the breaker opens", || {
        // Send these requests in parallel, because each one waits for the store timeout. The timeout is long enough for
        // all checks on a busy machine.
        load(&[gateway.address], 8, 8, "/quick", &[]);
        gateway.log().contains("the store is down")
    });
    crate::support::signal(&redis.child, "CONT");
    eventually("all permits are free", || gateway.get("/quick").header("ratelimit") == Some("\"places\";r=4"));
}

#[test]
fn requests_that_made_no_store_call_release_nothing_in_the_store() {
    let port = crate::support::redis::free_port();
    let store = format!("[store]\nurl = \"redis://127.0.0.1:{port}\"\n");
    let mut gateway = Gateway::start(&config(&store, Streaming::start().address, 1000, "30s"));
    eventually("the breaker opens", || {
        gateway.get("/quick");
        gateway.log().contains("the store is down")
    });
    let mut client = gateway.client();
    for _ in 0..300 {
        assert_eq!(client.get("/quick").status, 200);
    }
    // If the gateway still had permits to release, it would send the releases to Redis as ZREM calls before its process
    // ends.
    let redis = Redis::start_on(port).expect("the port is still free");
    eventually("the store decides", || gateway.log().contains("the store answers again"));
    gateway.terminate();
    gateway.wait();
    let releases = redis.calls("zrem");
    assert!(releases < 100, "{releases} releases of permits that were never acquired");
}

#[test]
fn permits_granted_without_the_store_are_released_at_once() {
    let upstream = Streaming::start();
    let store = format!("[store]\nurl = \"redis://127.0.0.1:{}\"\n", crate::support::redis::free_port());
    let text = config(&store, upstream.address, 1, "30s").replace("[\"places\"]", "[\"open\", \"places\"]")
        + "[limit.open]\nby = \"global\"\nalgorithm = \"concurrency\"\nquota = \"5\"\non_store_error = \"allow\"\n";
    let gateway = Gateway::start(&text);
    for _ in 0..5 {
        // The permit is released right after the response, long before its TTL ends.
        eventually("the permit is free", || gateway.get("/quick").status == 200);
    }
}

#[test]
fn concurrency_is_exact_over_two_gateways() {
    let redis = Redis::start();
    let upstream = Streaming::start();
    let config = config(&redis.store(), upstream.address, 10, "30s");
    let gateways = [Gateway::start(&config), Gateway::start(&config)];
    let heads: Vec<_> = std::thread::scope(|scope| {
        let ask = |index: usize| {
            let gateway = &gateways[index % 2];
            move || {
                let mut client = gateway.client();
                client.send(b"GET /r HTTP/1.1\r\nHost: a\r\n\r\n");
                let status = client.head().unwrap().status;
                (client, status)
            }
        };
        let threads: Vec<_> = (0..60).map(|index| scope.spawn(ask(index))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(heads.iter().filter(|(_, status)| *status == 200).count(), 10);
    assert_eq!(heads.iter().filter(|(_, status)| *status == 429).count(), 50);
}

#[test]
fn killed_gateway_frees_its_permits_after_the_permit_ttl() {
    let redis = Redis::start();
    let upstream = Streaming::start();
    // The permit TTL is 6 s.
    let config = config(&redis.store(), upstream.address, 100, "1s");
    let mut dying = Gateway::start(&config);
    let other = Gateway::start(&config);
    let held: Vec<_> = (0..100).map(|_| hold(&dying)).collect();
    assert_eq!(other.get("/quick").status, 429);
    let killed = monotonic();
    dying.child.kill().unwrap();
    dying.wait();
    assert_eq!(other.get("/quick").status, 429, "a killed gateway releases no permit");
    eventually("the permits have expired", || other.get("/quick").header("ratelimit") == Some("\"places\";r=99"));
    // The gateway renewed each permit for the last time before it was killed. A permit expires one TTL after its last
    // renewal.
    assert!(killed.elapsed() < Duration::from_secs(6 + 2), "{:?}", killed.elapsed());
    drop(held);
}

#[test]
fn stream_longer_than_the_permit_ttl_keeps_its_permit() {
    let redis = Redis::start();
    std::thread::scope(|scope| {
        for store in [String::new(), redis.store()] {
            scope.spawn(move || {
                let upstream = Streaming::start();
                // The permit TTL is 6 s, and permits are renewed every 2 s.
                let gateway = Gateway::start(&config(&store, upstream.address, 2, "1s"));
                let (_one, _two) = (hold(&gateway), hold(&gateway));
                let mut streams = [upstream.next(), upstream.next()];
                let started = monotonic();
                while started.elapsed() < Duration::from_secs(13) {
                    assert_eq!(gateway.get("/quick").status, 429, "a permit is free after {:?}", started.elapsed());
                    for stream in &mut streams {
                        stream.write_all(b"1\r\nb\r\n").unwrap();
                    }
                    // The gateway must keep both requests and their permits during the loop, which takes more than two
                    // permit TTLs.
                    assert_silent(&mut streams[0], Duration::from_millis(100));
                }
                streams[0].write_all(b"0\r\n\r\n").unwrap();
                eventually("one permit is free", || gateway.get("/quick").status == 200);
            });
        }
    });
}

#[test]
fn stopped_gateway_releases_its_permits() {
    let redis = Redis::start();
    let upstream = Streaming::start();
    let config = format!("[server]\ndrain_timeout = \"100ms\"\n{}", config(&redis.store(), upstream.address, 5, "30s"));
    let mut gateway = Gateway::start(&config);
    let other = Gateway::start(&config);
    let _held: Vec<_> = (0..5).map(|_| hold(&gateway)).collect();
    assert_eq!(other.get("/quick").status, 429);
    gateway.terminate();
    gateway.wait();
    eventually("the permits are free long before the permit TTL", || {
        other.get("/quick").header("ratelimit") == Some("\"places\";r=4")
    });
}

#[test]
fn permit_is_charged_together_with_other_limits() {
    let redis = Redis::start();
    let upstream = Streaming::start();
    let text = config(&redis.store(), upstream.address, 2, "30s")
        .replace("[\"places\"]\nupstream", "[\"log\", \"places\"]\nupstream")
        + "[limit.log]\nby = \"global\"\nalgorithm = \"sliding-log\"\nquota = \"3/hour\"\n";
    let gateway = Gateway::start(&text);
    let held = [hold(&gateway), hold(&gateway)];
    for _ in 0..5 {
        assert_eq!(
            gateway.get("/r").json()["violated-policies"],
            serde_json::json!(["places"]),
            "the limit `log` is not charged"
        );
    }
    drop(held);
    eventually("the permits are free", || gateway.get("/quick").header("ratelimit") == Some("\"places\";r=1"));
    drop(hold(&gateway));
    eventually("the permit is free again", || gateway.get("/quick").header("ratelimit") == Some("\"places\";r=1"));
    assert_eq!(gateway.get("/r").json()["violated-policies"], serde_json::json!(["log"]));
    // Repeat the request, because the release of the permit of the last `/quick` may still be in flight. If the denied
    // request held a permit, the permit would stay occupied for 30 s.
    eventually("a denied request holds no permit", || {
        gateway.get("/quick").header("ratelimit") == Some("\"places\";r=1")
    });
}

#[test]
fn denial_of_a_concurrency_limit_is_not_cached() {
    let (redis, upstream) = (Redis::start(), Streaming::start());
    let [holder, other] =
        [(); 2].map(|()| Gateway::start(&with_admin(&config(&redis.store(), upstream.address, 1, "30s"))));
    let held = hold(&holder);
    let calls = redis.calls("evalsha");
    let mut client = other.client();
    for _ in 0..20 {
        assert_eq!(client.get("/quick").status, 429);
    }
    assert_eq!(redis.calls("evalsha"), calls + 20, "a permit may be released at any time, so Redis decides each time");
    assert_eq!(metric(&other, "sluicegate_checks_total{answered_by=\"denial-cache\"}"), 0.0);
    drop(held);
    eventually("the permit is free", || client.get("/quick").status == 200);
}
