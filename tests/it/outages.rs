//! Store outages under load: requests are delayed by at most the timeout, and no request gets the reply of another
//! request. Faults 16 to 18 in docs/testing.md.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use crate::support::client::{Client, load};
use crate::support::gateway::Gateway;
use crate::support::redis::{Redis, free_port};
use crate::support::relay::Relay;
use crate::support::upstream::{endless, serve};
use crate::support::{SetOnDrop, eventually, signal};
use sluicegate::clock::monotonic;

/// Start a gateway with this store and these limits on `/r`.
fn gateway(store: &str, limits: &[&str]) -> Gateway {
    let named: String = limits.iter().enumerate().map(|(n, limit)| format!("[limit.l{n}]\n{limit}\n")).collect();
    let names: Vec<_> = (0..limits.len()).map(|n| format!("l{n}")).collect();
    Gateway::start(&format!(
        "[store]\n{store}\n{named}\
         [[route]]\nname = \"r\"\npath = \"/r\"\nlimits = {names:?}\nrespond = {{ status = 200 }}\n"
    ))
}

#[test]
fn missing_store_at_start_delays_no_response() {
    // A server that accepts connections and never responds delays requests more than one that refuses connections.
    let silent = serve(|mut stream| drop(std::io::copy(&mut stream, &mut std::io::sink())));
    let mut slowest = Duration::ZERO;
    for port in [free_port(), silent.port()] {
        for on_error in ["local", "allow", "deny"] {
            let store = format!("url = \"redis://127.0.0.1:{port}\"");
            let limit = format!("by = \"ip\"\nquota = \"10/hour\"\non_store_error = \"{on_error}\"");
            let gateway = gateway(&store, &[&limit]);
            let asked = monotonic();
            let reply = gateway.get("/r");
            slowest = slowest.max(asked.elapsed());
            if on_error == "deny" {
                reply.assert_problem(503, on_error);
                let id = reply.header("x-request-id").expect("an id");
                assert_eq!(reply.json()["request_id"], id, "the access log has the same request id");
            } else {
                assert_eq!(reply.status, 200, "{on_error}");
            }
        }
    }
    assert!(slowest <= Duration::from_secs(1), "the first response after {slowest:?}");
    println!("fault 16: first answer after {slowest:?} at most");
}

#[test]
fn store_killed_under_load_causes_no_client_error() {
    const CLIENTS: usize = 20;
    const TIMEOUT: Duration = Duration::from_millis(250);
    let port = free_port();
    let mut redis = Redis::start_on(port).expect("the port is still free");
    let store = format!("url = \"{}\"\ntimeout = \"{}ms\"", redis.url(), TIMEOUT.as_millis());
    let limit = "by = \"header:x-id\"\nquota = \"1000000/hour\"\non_store_error = \"allow\"";
    let gateway = gateway(&store, &[limit]);
    let (over, decided, alone) = (AtomicBool::new(false), AtomicUsize::new(0), AtomicUsize::new(0));
    let (back, slowest, total) = std::thread::scope(|scope| {
        let raise = SetOnDrop(&over);
        let threads: Vec<_> = (0..CLIENTS)
            .map(|id| {
                let (gateway, over, decided, alone) = (&gateway, &over, &decided, &alone);
                scope.spawn(move || {
                    let mut client = gateway.client();
                    let (mut slowest, mut total) = (Duration::ZERO, 0);
                    while !over.load(Ordering::SeqCst) {
                        let asked = monotonic();
                        let reply = client.get_with("/r", &[("x-id", &id.to_string())]);
                        assert_eq!(reply.status, 200, "request {total} of client {id}");
                        (slowest, total) = (slowest.max(asked.elapsed()), total + 1);
                        let count = if reply.header("ratelimit").is_some() { decided } else { alone };
                        count.fetch_add(1, Ordering::SeqCst);
                        // All clients together send 1,000 requests per second.
                        std::thread::sleep(Duration::from_millis(CLIENTS as u64).saturating_sub(asked.elapsed()));
                    }
                    (slowest, total)
                })
            })
            .collect();
        let decides = |from: usize| decided.load(Ordering::SeqCst) > from + CLIENTS;
        eventually("the store decides", || decides(0));
        redis.child.kill().unwrap();
        redis.child.wait().unwrap();
        // The outage lasts several seconds, in which the interval between the gateway's probes of the store grows.
        eventually("thousands of responses without the store", || alone.load(Ordering::SeqCst) > 3000);
        let before = decided.load(Ordering::SeqCst);
        let _redis = Redis::start_on(port).expect("the port is still free");
        let back = monotonic();
        eventually("the store decides again", || decided.load(Ordering::SeqCst) > before);
        let back = back.elapsed();
        eventually("all clients continue", || decides(before));
        drop(raise);
        let each: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        let slowest = each.iter().map(|(slowest, _)| *slowest).max().unwrap();
        (back, slowest, each.iter().map(|(_, total)| *total).sum::<usize>())
    });
    println!("fault 17: 0 errors of {total}, slowest {slowest:?}, the store decides {back:?} after its start");
    // The maximum is the timeout plus 1 s for a busy machine.
    assert!(slowest <= TIMEOUT + Duration::from_secs(1), "{slowest:?}");
    assert!(back <= Duration::from_millis(1500), "{back:?}");
}

#[test]
fn stopped_and_continued_store_crosses_no_replies() {
    const CLIENTS: usize = 8;
    let redis = Redis::start();
    let store = format!("url = \"{}\"\ntimeout = \"250ms\"", redis.url());
    // Each client has its own limit, whose quota is far from all other quotas. If a client got the reply of another
    // client, the remaining quota would be far from the expected number.
    let quota = |client: usize| (client + 1) * 1_000_000;
    let limits: String = (0..CLIENTS)
        .map(|client| {
            format!(
                "[limit.l{client}]\nby = \"global\"\nquota = \"{}/24h\"\nalgorithm = \"sliding-window\"\non_store_error = \"allow\"\n\
                 [[route]]\nname = \"r{client}\"\npath = \"/{client}\"\nlimits = [\"l{client}\"]\nrespond = {{ status = 200 }}\n",
                quota(client)
            )
        })
        .collect();
    let gateway = Gateway::start(&format!("[store]\n{store}\n{limits}"));
    let (over, answered, alone) = (AtomicBool::new(false), AtomicUsize::new(0), AtomicUsize::new(0));
    let stopped = AtomicBool::new(false);
    let crossed: usize = std::thread::scope(|scope| {
        let raise = SetOnDrop(&over);
        let threads: Vec<_> = (0..CLIENTS)
            .map(|id| {
                let (gateway, over, answered, alone, stopped) = (&gateway, &over, &answered, &alone, &stopped);
                scope.spawn(move || {
                    let mut client = gateway.client();
                    let (path, name) = (format!("/{id}"), format!("l{id}"));
                    let (mut sent, mut counted, mut crossed, mut rejected, mut unanswered, mut refunded) =
                        (0, 0, 0, 0, 0, 0);
                    // `at_stop` is the number of rejections from the stop of Redis until the first request that is
                    // admitted without the store.
                    let (mut at_stop, mut breaker_opened) = (0, false);
                    while !over.load(Ordering::SeqCst) {
                        let reply = client.get(&path);
                        sent += 1;
                        if reply.status == 503 {
                            // Requests get 503 until the circuit breaker opens, after two timeouts. On a busy machine,
                            // a client may start late and add a third rejection.
                            assert_eq!(reply.header("retry-after"), Some("1"));
                            rejected += 1;
                            at_stop += usize::from(stopped.load(Ordering::SeqCst) && !breaker_opened);
                            assert!(at_stop <= 3, "{at_stop} rejected at the stop, {rejected} of {sent} in total");
                            continue;
                        }
                        assert_eq!(reply.status, 200);
                        if reply.header("ratelimit").is_none() {
                            breaker_opened |= stopped.load(Ordering::SeqCst);
                            unanswered += 1;
                            alone.fetch_add(1, Ordering::SeqCst);
                            continue;
                        }
                        // A request whose call got no reply may have been charged. Requests of other clients are never
                        // charged to this limit. Therefore, `spent` must not exceed `sent`.
                        let spent = quota(id) as u64 - reply.remaining(&name).min(quota(id) as u64);
                        // The charge of a request that was decided without the store is refunded once its late reply
                        // arrives, perhaps after later requests have been charged.
                        refunded += (counted + 1_u64).saturating_sub(spent);
                        crossed += usize::from(refunded > rejected + unanswered || spent > sent);
                        counted = spent;
                        answered.fetch_add(1, Ordering::SeqCst);
                    }
                    crossed
                })
            })
            .collect();
        eventually("the store decides", || answered.load(Ordering::SeqCst) > 3000);
        stopped.store(true, Ordering::SeqCst);
        signal(&redis.child, "STOP");
        // The stop affects calls in flight and calls that are sent while Redis is stopped. Requests make no call while
        // the circuit breaker is open.
        eventually("thousands of responses without the store", || alone.load(Ordering::SeqCst) > 20_000);
        signal(&redis.child, "CONT");
        eventually("the store decides again", || answered.load(Ordering::SeqCst) > 10_000);
        drop(raise);
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    println!("fault 18: {crossed} crossed of {}", answered.load(Ordering::SeqCst));
    assert_eq!(crossed, 0);
}

#[test]
fn one_request_to_a_silent_store_opens_the_breaker_within_a_few_timeouts() {
    let redis = Redis::start();
    let limit = "by = \"global\"\nquota = \"1000/hour\"\non_store_error = \"allow\"";
    const TIMEOUT: Duration = Duration::from_millis(500);
    let store = format!("url = \"{}\"\ntimeout = \"{}ms\"", redis.url(), TIMEOUT.as_millis());
    let gateway = gateway(&store, &[limit]);
    eventually("the store decides", || gateway.get("/r").header("ratelimit").is_some());
    signal(&redis.child, "STOP");
    let asked = monotonic();
    // 503, or 200 if the breaker has opened before the gateway answers.
    let status = gateway.get("/r").status;
    assert!([200, 503].contains(&status), "{status}");
    // Without a further request, the gateway probes the store by itself.
    eventually("the breaker is open", || gateway.log().contains("the store is down"));
    let opened = asked.elapsed();
    println!("the breaker is open {opened:?} after a single request");
    // The breaker opens after six timeouts. The maximum allows for a busy machine.
    assert!(opened < 20 * TIMEOUT, "{opened:?}");
    let reply = gateway.get("/r");
    assert_eq!((reply.status, reply.header("ratelimit")), (200, None), "the response follows on_store_error");
}

/// Start three gateways. The first one is connected to Redis through a relay.
fn three_gateways(relay: &Relay, redis: &Redis, limit: &str, route: &str) -> [Gateway; 3] {
    [relay.url(), redis.url(), redis.url()].map(|url| {
        Gateway::start(&format!(
            "[server]\nhalf_close_timeout = \"0s\"\n\
             [store]\nurl = \"{url}\"\ntimeout = \"250ms\"\ngateway_count = 3\ndenial_cache = 0\n[limit.l]\nby = \"global\"\n{limit}\n\
             [[route]]\nname = \"r\"\npath = \"/r\"\nlimits = [\"l\"]\n{route}\n"
        ))
    })
}

#[test]
fn isolated_gateway_admits_its_share_and_the_others_stay_exact() {
    const LIMIT: usize = 30;
    // A bucket refills one token in about 121 days.
    for algorithm in ["token-bucket", "fixed-window", "sliding-window", "sliding-buckets", "sliding-log"] {
        let redis = Redis::start();
        let relay = Relay::start(redis.port);
        let limit = format!("algorithm = \"{algorithm}\"\nquota = \"{LIMIT}/3650d\"");
        let gateways = three_gateways(&relay, &redis, &limit, "respond = { status = 200 }");
        let admitted = |gateway: &Gateway, requests| {
            let statuses = load(&[gateway.address], 4, requests, "/r", &[]);
            assert!(statuses.iter().all(|status| [200, 429].contains(status)), "{algorithm}: {statuses:?}");
            statuses.iter().filter(|status| **status == 200).count()
        };
        let by_store: usize = gateways.iter().map(|gateway| admitted(gateway, 2)).sum();
        assert_eq!(by_store, 6, "{algorithm}");
        let [isolated, others @ ..] = &gateways;
        relay.redirect_to(free_port());
        let share = admitted(isolated, 100);
        assert!((LIMIT / 3..=LIMIT / 3 + 1).contains(&share), "{algorithm}: the isolated gateway admits {share}");
        eventually("the breaker of the isolated gateway is open", || {
            assert_eq!(isolated.get("/r").status, 429, "{algorithm}: the share of the isolated gateway is used up");
            isolated.log().contains("the store is down")
        });
        let rest: usize = others.iter().map(|gateway| admitted(gateway, LIMIT)).sum();
        assert_eq!(by_store + rest, LIMIT, "{algorithm}: all requests that the store admitted");
        relay.redirect_to(redis.port);
        eventually("the isolated gateway reaches the store again", || isolated.log().contains("the store answers"));
        assert_eq!(gateways.iter().map(|gateway| admitted(gateway, 10)).sum::<usize>(), 0, "{algorithm}: afterwards");
        assert!(others.iter().all(|gateway| !gateway.log().contains("the store is down")), "{algorithm}");
    }
}

/// A permit of the local share that the store rejects after an outage is registered again soon, not at the next
/// renewal. Until then, the other gateways would admit more requests than the limit.
#[test]
fn permit_that_the_store_rejects_after_an_outage_is_registered_soon() {
    let redis = Redis::start();
    let relay = Relay::start(redis.port);
    // A permit lives for more than 90 s, so renewals are more than 30 s apart.
    let gateway = Gateway::start(&format!(
        "[server]\nhalf_close_timeout = \"0s\"\n[store]\nurl = \"{}\"\n\
         [limit.l]\nby = \"global\"\nalgorithm = \"concurrency\"\nquota = \"1\"\n\
         [upstream.u]\nservers = [\"http://{}\"]\nresponse_timeout = \"90s\"\n\
         [[route]]\nname = \"r\"\npath = \"/r\"\nlimits = [\"l\"]\nupstream = \"u\"\n",
        relay.url(),
        endless()
    ));
    let ask = || {
        let mut client = gateway.client();
        client.send(b"GET /r HTTP/1.1\r\nHost: a\r\n\r\n");
        (client.head().unwrap().status == 200).then_some(client)
    };
    let command =
        |value: &str| redis::cmd("CONFIG").arg(&["SET", "min-replicas-to-write", value]).exec(&mut redis.connection());
    relay.redirect_to(free_port());
    eventually("the breaker opens", || {
        drop(ask());
        gateway.log().contains("the store is down")
    });
    let mut held = None;
    eventually("the local share grants a permit", || {
        held = ask();
        held.is_some()
    });
    command("1").unwrap();
    relay.redirect_to(redis.port);
    eventually("the store answers", || gateway.log().contains("the store answers"));
    eventually("a write was rejected", || redis.errors("NOREPLICAS") > 0);
    command("0").unwrap();
    eventually("the permit is registered", || redis.keys().iter().any(|key| !key.contains("~probe")));
    drop(held);
}

#[test]
fn requests_of_an_isolated_gateway_count_again_when_it_reaches_the_store() {
    const LIMIT: usize = 12;
    let redis = Redis::start();
    let relay = Relay::start(redis.port);
    let limit = format!("algorithm = \"concurrency\"\nquota = \"{LIMIT}\"");
    // The `response_timeout` of 60 s makes the permit TTL so long that no permit expires during the test.
    let upstream = format!("[upstream.u]\nservers = [\"http://{}\"]\nresponse_timeout = \"60s\"", endless());
    let gateways = three_gateways(&relay, &redis, &limit, &format!("upstream = \"u\"\n{upstream}"));
    let open = |gateway: &Gateway, tries: usize| -> Vec<Client> {
        let asked = (0..tries).filter_map(|_| {
            let mut client = gateway.client();
            client.send(b"GET /r HTTP/1.1\r\nHost: a\r\n\r\n");
            let status = client.head().unwrap().status;
            assert!([200, 429].contains(&status), "{status}");
            (status == 200).then_some(client)
        });
        asked.collect()
    };
    let permits = || {
        let key = redis.keys().into_iter().find(|key| !key.contains("~probe"));
        key.map_or(0, |key| redis::cmd("ZCARD").arg(key).query::<usize>(&mut redis.connection()).unwrap())
    };
    let mut running: Vec<_> = gateways.iter().flat_map(|gateway| open(gateway, 1)).collect();
    assert_eq!((running.len(), permits()), (3, 3));
    let [isolated, others @ ..] = &gateways;
    relay.redirect_to(free_port());
    let share = open(isolated, LIMIT);
    assert_eq!(share.len(), LIMIT / 3 - 1, "the share minus the request that already runs");
    eventually("the breaker of the isolated gateway is open", || {
        assert!(open(isolated, 1).is_empty(), "the share of the isolated gateway is used up");
        isolated.log().contains("the store is down")
    });
    running.extend(others.iter().flat_map(|gateway| open(gateway, LIMIT)));
    assert_eq!((running.len(), permits()), (LIMIT, LIMIT), "the store admits up to the limit");
    running.extend(share);
    relay.redirect_to(redis.port);
    eventually("all running requests are counted", || permits() == running.len());
    for gateway in &gateways {
        assert!(open(gateway, LIMIT).is_empty(), "more requests than the limit are already running");
    }
    running.clear();
    eventually("all permits are released", || permits() == 0);
    eventually("only the store decides again", || {
        let running: Vec<_> = gateways.iter().flat_map(|gateway| open(gateway, LIMIT)).collect();
        assert!(running.len() <= LIMIT, "{} run", running.len());
        running.len() == LIMIT
    });
}
