//! ACME certificates of several gateways that share a Redis store: one order per renewal, fencing, outages.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use crate::support::acme::{
    Balancer, ROUTES, is_ready, kill, listed, request_renewal, restart, served, start_as, trusting,
};
use crate::support::ca_proxy::{CaProxy, Fault};
use crate::support::cluster::Cluster;
use crate::support::gateway::Gateway;
use crate::support::pebble::Pebble;
use crate::support::redis::Redis;
use crate::support::reload::{ask, with_admin};
use crate::support::sentinel::Sentinels;
use crate::support::{SetOnDrop, eventually, signal};

/// Pause between two handshakes of a client. It leaves processor time to the gateways and the CA.
const HANDSHAKE_INTERVAL: Duration = Duration::from_millis(5);

/// Return the configuration of a gateway that uses a Redis store and listens on free ports.
fn config(pebble: &Pebble, store: &str, secret: &str) -> String {
    with_admin(&format!(
        "{}[store]\nurl = \"{store}\"\nsecret = \"{secret}\"\n[[listener]]\naddress = \"127.0.0.1:0\"\n\
         [[listener]]\naddress = \"127.0.0.1:0\"\ntls = {{ acme = true, names = [\"one.test\"] }}\n{ROUTES}",
        pebble.table(),
    ))
}

/// Start a gateway with each configuration. Start a load balancer at each of the two ports to which the CA connects for
/// validations (TLS-ALPN-01 and HTTP-01). Return the gateways and the balancer for HTTP-01.
fn start(pebble: &Pebble, configs: &[String]) -> (Vec<Gateway>, Arc<Balancer>) {
    let (gateways, balancer) = start_without_validation(pebble, configs);
    balancer.set(gateways.iter().map(|gateway| gateway.address));
    (gateways, balancer)
}

/// Like [`start`], but the balancer for HTTP-01 has no gateways, so that validations wait.
fn start_without_validation(pebble: &Pebble, configs: &[String]) -> (Vec<Gateway>, Arc<Balancer>) {
    let balancer = Balancer::start(pebble.http_port, Vec::new());
    let gateways: Vec<_> = configs.iter().map(|config| start_as(pebble, config)).collect();
    Balancer::start(pebble.tls_port, gateways.iter().map(|gateway| gateway.addresses()[1]).collect());
    (gateways, balancer)
}

/// Start `count` gateways that share the store at the URL `store`.
fn start_on(pebble: &Pebble, store: &str, count: usize) -> (Vec<Gateway>, Arc<Balancer>) {
    start(pebble, &vec![config(pebble, store, "s3cret"); count])
}

/// Return the Redis key that contains the shared ACME records.
fn records(keys: Vec<String>) -> String {
    keys.into_iter().find(|key| key.contains(":acme:")).unwrap()
}

/// Return a field of the ACME lock in Redis: its fencing token (`.token`), or its expiry time in microseconds since the
/// Unix epoch (`.until`).
fn lock(redis: &Redis, field: &str) -> u64 {
    redis::cmd("HGET").arg(records(redis.keys())).arg(field).query(&mut redis.connection()).unwrap()
}

/// Wait until one of the two gateways has begun an ACME order. Return both gateways, first the one that began the
/// order.
fn holder_first(mut gateways: Vec<Gateway>, has_begun: impl Fn() -> bool) -> [Gateway; 2] {
    eventually("an order has begun", has_begun);
    gateways.sort_by_key(|gateway| !gateway.log().contains("ACME account created"));
    let gateways: [Gateway; 2] = gateways.try_into().ok().unwrap();
    assert!(gateways[0].log().contains("ACME account created") && !gateways[1].log().contains("ACME account created"));
    gateways
}

#[test]
fn three_gateways_on_one_redis_place_one_order_per_renewal() {
    let (pebble, redis) = (Pebble::start_with(&[("PEBBLE_WFE_NONCEREJECT", "50")], ""), Redis::start());
    let proxy = CaProxy::start(&pebble, |_| None);
    let config = |secret: &str| config(&pebble, &redis.url(), secret).replace(&pebble.directory, &proxy.directory);
    let (gateways, _) = start(&pebble, &vec![config("s3cret"); 3]);
    eventually("a certificate at all gateways", || gateways.iter().all(is_ready));
    assert_eq!(pebble.orders(), 1, "{}", pebble.log());
    let client = trusting(&pebble);
    let all = || gateways.iter().map(|gateway| served(gateway, &client, "one.test").unwrap()).collect::<Vec<_>>();
    let first = all();
    assert!(first.iter().all(|leaf| *leaf == first[0]), "all serve the same certificate");
    // The records are encrypted with `store.secret`: Redis contains no readable key, certificate or name.
    let key = records(redis.keys());
    let stored: Vec<Vec<u8>> = redis::cmd("HVALS").arg(&key).query(&mut redis.connection()).unwrap();
    for word in [&b"PRIVATE KEY"[..], b"key_pkcs8", b"CERTIFICATE", b"one.test"] {
        assert!(!stored.iter().any(|value| value.windows(word.len()).any(|part| part == word)), "{word:?}");
    }
    let other = start_as(&pebble, &config("another"));
    eventually("the error is logged", || other.log().contains("is `store.secret` the same on all gateways?"));

    // Request a renewal from all three gateways, before one of them can renew the certificate.
    proxy.set_fault(Fault::HeldOrders);
    gateways.iter().for_each(|gateway| request_renewal(gateway, "one.test"));
    proxy.set_fault(Fault::None);
    eventually("the new certificate at all gateways", || {
        let now = all();
        now.iter().all(|leaf| *leaf == now[0] && *leaf != first[0])
    });
    let metrics = ask(&gateways[0], "GET", "/metrics");
    assert!(
        metrics
            .text()
            .contains("sluicegate_tls_certificate_not_after_timestamp_seconds{name=\"one.test\",source=\"acme\"} ")
    );
    assert_eq!(pebble.orders(), 2, "{}", pebble.log());
}

#[test]
fn renewals_fail_no_handshake_and_need_one_order_each() {
    let (pebble, redis) = (Pebble::start(), Redis::start());
    let proxy = CaProxy::start(&pebble, |_| None);
    let config = config(&pebble, &redis.url(), "s3cret").replace(&pebble.directory, &proxy.directory);
    let (gateways, _) = start(&pebble, &vec![config; 3]);
    eventually("a certificate at all gateways", || gateways.iter().all(is_ready));
    let client = trusting(&pebble);
    let first = served(&gateways[0], &client, "one.test").unwrap();
    let (done, handshakes) = (AtomicBool::new(false), AtomicUsize::new(0));
    // The clients that have seen the first certificate, and those that have seen another one later.
    let seen = [AtomicUsize::new(0), AtomicUsize::new(0)];
    std::thread::scope(|scope| {
        let clients = gateways.iter().cycle().take(2 * gateways.len());
        let count = clients.clone().count();
        for gateway in clients {
            scope.spawn(|| {
                let mut has_seen = [false; 2];
                while !done.load(Ordering::SeqCst) {
                    let leaf = served(gateway, &client, "one.test").expect("the handshake succeeds");
                    let index = usize::from(leaf != first);
                    if !std::mem::replace(&mut has_seen[index], true) {
                        seen[index].fetch_add(1, Ordering::SeqCst);
                    }
                    handshakes.fetch_add(1, Ordering::SeqCst);
                    std::thread::sleep(HANDSHAKE_INTERVAL);
                }
            });
        }
        let _stop = SetOnDrop(&done);
        eventually("all clients have the first certificate", || seen[0].load(Ordering::SeqCst) == count);
        // Request a renewal from all three gateways, before one of them can renew the certificate.
        proxy.set_fault(Fault::HeldOrders);
        gateways.iter().for_each(|gateway| request_renewal(gateway, "one.test"));
        proxy.set_fault(Fault::None);
        eventually("all clients have the next certificate", || seen[1].load(Ordering::SeqCst) == count);
    });
    println!("renewal: {} handshakes, none failed", handshakes.into_inner());
    assert_eq!(pebble.orders(), 2, "{}", pebble.log());
}

#[test]
fn another_gateway_resumes_the_order_of_one_that_was_killed() {
    let (pebble, redis) = (Pebble::start(), Redis::start());
    let configs = vec![config(&pebble, &redis.url(), "s3cret"); 2];
    // While the CA's validation waits, kill the gateway that placed the order.
    let (gateways, balancer) = start_without_validation(&pebble, &configs);
    let [mut holder, other] = holder_first(gateways, || balancer.is_used());
    eventually("the other gateway knows the challenge", || balancer.can_be_answered_by(&other));
    kill(&mut holder);
    balancer.set([other.address]);
    eventually("a certificate", || is_ready(&other));
    assert!(other.log().contains("resuming an interrupted ACME order"), "{}", other.log());
    assert_eq!((pebble.orders(), pebble.issued()), (1, 1), "{}", pebble.log());
}

#[test]
fn gateway_that_was_stopped_in_an_order_finds_it_finished_by_another() {
    let (pebble, redis) = (Pebble::start(), Redis::start());
    let configs = vec![config(&pebble, &redis.url(), "s3cret"); 2];
    let (gateways, balancer) = start_without_validation(&pebble, &configs);
    let [holder, other] = holder_first(gateways, || balancer.is_used());
    eventually("the other gateway knows the challenge", || balancer.can_be_answered_by(&other));
    let token = lock(&redis, ".token");
    signal(&holder.child, "STOP");
    balancer.set([other.address]);
    eventually("the other takes the lock", || lock(&redis, ".token") > token);
    eventually("a certificate", || is_ready(&other));
    assert!(other.log().contains("resuming an interrupted ACME order"), "{}", other.log());
    let client = trusting(&pebble);
    let leaf = served(&other, &client, "one.test").unwrap();
    signal(&holder.child, "CONT");
    eventually("its writes are rejected", || holder.log().contains("another gateway has taken over"));
    eventually("it serves the certificate", || served(&holder, &client, "one.test").as_ref() == Some(&leaf));
    for gateway in [&holder, &other] {
        let entry = listed(gateway, "one.test");
        assert_eq!((&entry["failures"], &entry["error"]), (&0.into(), &serde_json::Value::Null), "{entry}");
    }
    assert_eq!((pebble.orders(), pebble.issued()), (1, 1), "{}", pebble.log());
}

#[test]
fn order_of_a_gateway_that_was_stopped_before_it_stored_it_is_abandoned() {
    let (pebble, redis) = (Pebble::start(), Redis::start());
    let proxy = CaProxy::start(&pebble, |_| None);
    proxy.set_fault(Fault::HeldOrders);
    let config = config(&pebble, &redis.url(), "s3cret").replace(&pebble.directory, &proxy.directory);
    let (gateways, balancer) = start(&pebble, &vec![config; 2]);
    let [holder, other] = holder_first(gateways, || pebble.orders() == 1);
    let token = lock(&redis, ".token");
    signal(&holder.child, "STOP");
    balancer.set([other.address]);
    // The CA's response to the order stays unread in the socket of the stopped process.
    proxy.set_fault(Fault::None);
    eventually("the other takes the lock", || lock(&redis, ".token") > token);
    eventually("a certificate", || is_ready(&other));
    assert!(!other.log().contains("resuming"), "{}", other.log());
    let client = trusting(&pebble);
    let leaf = served(&other, &client, "one.test").unwrap();
    signal(&holder.child, "CONT");
    eventually("its writes are rejected", || holder.log().contains("another gateway has taken over"));
    eventually("it serves the certificate", || served(&holder, &client, "one.test").as_ref() == Some(&leaf));
    assert_eq!(served(&other, &client, "one.test"), Some(leaf));
    assert_eq!((pebble.orders(), pebble.issued()), (2, 1), "the first order is abandoned: {}", pebble.log());
}

#[test]
fn lock_is_kept_while_the_ca_is_slow() {
    let (pebble, redis) = (Pebble::start(), Redis::start());
    let proxy = CaProxy::start(&pebble, |_| None);
    proxy.set_fault(Fault::HeldOrders);
    let config = config(&pebble, &redis.url(), "s3cret").replace(&pebble.directory, &proxy.directory);
    let (gateways, _) = start(&pebble, &vec![config; 2]);
    eventually("an order", || pebble.orders() == 1);
    let (token, until) = (lock(&redis, ".token"), lock(&redis, ".until"));
    eventually("the lock is renewed beyond its first end", || lock(&redis, ".until") > until + 10_000_000);
    assert_eq!(lock(&redis, ".token"), token, "it is the same lock");
    proxy.set_fault(Fault::None);
    eventually("a certificate at both gateways", || gateways.iter().all(is_ready));
    assert_eq!((pebble.orders(), pebble.issued()), (1, 1), "{}", pebble.log());
}

/// Check that two gateways with the same store use the same certificate, and that both use the renewed certificate
/// after a failover of the store.
fn check_sharing(url: &str, fail_over: impl FnOnce()) {
    let pebble = Pebble::start();
    let (gateways, _) = start_on(&pebble, url, 2);
    eventually("a certificate at both gateways", || gateways.iter().all(is_ready));
    let client = trusting(&pebble);
    let both = || [0, 1].map(|index| served(&gateways[index], &client, "one.test").unwrap());
    let first = both();
    assert_eq!(first[0], first[1]);
    assert_eq!(pebble.orders(), 1, "{}", pebble.log());
    fail_over();
    assert_eq!(both(), first);
    request_renewal(&gateways[1], "one.test");
    eventually("the new certificate at both gateways", || {
        let now = both();
        now[0] == now[1] && now[0] != first[0]
    });
    assert_eq!(pebble.orders(), 2, "{}", pebble.log());
}

#[test]
fn gateways_on_a_redis_cluster_share_certificates_also_after_a_failover() {
    let mut cluster = Cluster::start(3, 1);
    check_sharing(&cluster.url(), || {
        let owner = cluster.owner(cluster.slot(&records(cluster.keys()))).port;
        let index = cluster.masters().iter().position(|master| master.port == owner).unwrap();
        cluster.kill_master(index);
        cluster.wait_for_promotion();
    });
}

#[test]
fn gateways_on_sentinel_share_certificates_also_after_a_failover() {
    let mut sentinels = Sentinels::start();
    check_sharing(&sentinels.url(), || {
        sentinels.fail_over_by_kill();
    });
}

#[test]
fn certificates_stay_in_use_without_redis_and_return_to_an_empty_one() {
    let (pebble, mut redis) = (Pebble::start(), Redis::start());
    let (mut gateways, balancer) = start_on(&pebble, &redis.url(), 3);
    eventually("a certificate at all gateways", || gateways.iter().all(is_ready));
    let client = trusting(&pebble);
    let leaf = served(&gateways[0], &client, "one.test").unwrap();
    let port = redis.port;
    redis.child.kill().unwrap();
    redis.child.wait().unwrap();
    request_renewal(&gateways[0], "one.test");
    eventually("the error is logged", || gateways[0].log().contains("no certificate is renewed"));
    let restarted = restart(&mut gateways[1]);
    balancer.set([gateways[0].address, restarted.address, gateways[2].address]);
    for gateway in [&gateways[0], &restarted] {
        assert_eq!(served(gateway, &client, "one.test"), Some(leaf.clone()));
        assert_eq!(ask(gateway, "GET", "/readyz").status, 200);
    }
    assert_eq!(pebble.orders(), 1, "without Redis, no gateway may place an order");
    let redis = Redis::start_with(port, &["--port", &port.to_string()]).unwrap();
    eventually("the requested renewal", || served(&gateways[2], &client, "one.test").unwrap() != leaf);
    eventually("all have it", || served(&gateways[0], &client, "one.test") == served(&restarted, &client, "one.test"));
    assert_eq!(pebble.orders(), 2, "{}", pebble.log());
    drop(redis);
}
