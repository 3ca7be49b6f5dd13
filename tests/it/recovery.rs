//! Redis returns after an outage that affected several gateways: without its data, or as another server. Fault 21 in
//! docs/testing.md.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use crate::support::gateway::Gateway;
use crate::support::redis::{Redis, free_port};
use crate::support::relay::Relay;
use crate::support::sentinel::replica_of;
use crate::support::{SetOnDrop, eventually, signal};

/// Send `each` requests for each identity, over all gateways in turn, and call `midway` after half of them. Return how
/// many requests of each identity were admitted.
fn spend(gateways: &[Gateway], identities: usize, each: usize, midway: impl FnOnce() + Send) -> Vec<usize> {
    let half = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..identities)
            .map(|id| {
                let half = &half;
                scope.spawn(move || {
                    let mut clients: Vec<_> = gateways.iter().map(Gateway::client).collect();
                    let mut admitted = 0;
                    for request in 0..each {
                        let client = &mut clients[request % gateways.len()];
                        let status = client.get_with("/r", &[("x-id", &id.to_string())]).status;
                        assert!([200, 429, 503].contains(&status), "{status}");
                        admitted += usize::from(status == 200);
                        half.fetch_add(1, Ordering::SeqCst);
                    }
                    admitted
                })
            })
            .collect();
        eventually("half of the requests are sent", || half.load(Ordering::SeqCst) >= identities * each / 2);
        midway();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Start two gateways that call Redis for every request and deny requests on store errors.
fn denying_gateways(url: &str) -> [Gateway; 2] {
    let config = format!(
        "[store]\nurl = \"{url}\"\ntimeout = \"5s\"\ndenial_cache = 0\n\
         [limit.l]\nby = \"header:x-id\"\nquota = \"10/24h\"\nalgorithm = \"sliding-log\"\non_store_error = \"deny\"\n\
         [[route]]\nname = \"r\"\npath = \"/r\"\nlimits = [\"l\"]\nrespond = {{ status = 200 }}\n"
    );
    [Gateway::start(&config), Gateway::start(&config)]
}

#[test]
fn flushall_gives_each_identity_at_most_one_fresh_limit() {
    let redis = Redis::start();
    let gateways = denying_gateways(&redis.url());
    let admitted = spend(&gateways, 10, 200, || {
        redis::cmd("FLUSHALL").exec(&mut redis.connection()).unwrap();
    });
    println!("fault 21: of 10, FLUSHALL: {admitted:?}");
    assert!(admitted.iter().all(|count| (10..=20).contains(count)), "{admitted:?}");
    assert!(admitted.contains(&20), "at least one identity has used its quota: {admitted:?}");
    redis.assert_every_key_expires();
}

#[test]
fn store_restarted_with_its_data_gives_no_fresh_limit() {
    const QUOTA: usize = 10;
    let directory = tempfile::tempdir().unwrap();
    let data = ["--dir", directory.path().to_str().unwrap()];
    let mut redis = Redis::start_as(&data);
    let gateways = denying_gateways(&redis.url());
    let admitted = spend(&gateways, 10, 200, || {
        // SHUTDOWN returns an error, because the connection ends without a reply.
        let _ = redis::cmd("SHUTDOWN").arg("SAVE").exec(&mut redis.connection());
        redis.child.wait().unwrap();
        let port = redis.port.to_string();
        redis = Redis::start_with(redis.port, &[&data[..], &["--port", &port]].concat()).expect("the port is free");
    });
    println!("of {QUOTA}, restarted with its data: {admitted:?}");
    // If the reply to a charge is lost, the gateway denies the request although its cost was charged.
    assert!(admitted.iter().all(|count| *count <= QUOTA) && admitted.contains(&QUOTA), "{admitted:?}");
    for (id, admitted) in admitted.into_iter().enumerate() {
        let mut client = gateways[0].client();
        let mut more = 0;
        eventually("the store denies", || {
            let status = client.get_with("/r", &[("x-id", &id.to_string())]).status;
            more += usize::from(status == 200);
            status == 429
        });
        assert!(
            admitted + more <= QUOTA,
            "identity {id}: {admitted} requests admitted before the outage and {more} after it"
        );
    }
}

#[test]
fn evicted_state_gives_a_fresh_limit_for_each_eviction_and_no_error() {
    const QUOTA: u64 = 10;
    const IDENTITIES: u64 = 50;
    const PADDING: u64 = 10_000;
    for policy in ["allkeys-lru", "volatile-ttl", "volatile-random"] {
        let redis = Redis::start();
        let config = format!(
            "{}denial_cache = 0\n[limit.l]\nby = \"header:x-id\"\nquota = \"{QUOTA}/3650d\"\nalgorithm = \"fixed-window\"\non_store_error = \"deny\"\n\
             [[route]]\nname = \"r\"\npath = \"/r\"\nlimits = [\"l\"]\nrespond = {{ status = 200 }}\n",
            redis.store()
        );
        let gateways = [Gateway::start(&config), Gateway::start(&config)];
        let mut connection = redis.connection();
        let mut written = 0;
        // Write padding keys whose TTL is longer than that of the limit's keys.
        let mut pad = |count: u64| {
            for _ in 0..count / 100 {
                let mut pipe = redis::pipe();
                for key in written..written + 100 {
                    pipe.cmd("SET").arg(format!("pad:{key}")).arg("0".repeat(64)).arg("EX").arg(8000 * 86400).ignore();
                }
                pipe.exec(&mut connection).unwrap();
                written += 100;
            }
            written
        };
        pad(PADDING);
        let set = |name: &str, value: &str| {
            redis::cmd("CONFIG").arg("SET").arg(name).arg(value).exec(&mut redis.connection()).unwrap();
        };
        set("maxmemory-policy", policy);
        set("maxmemory", &redis.info_number("memory", "used_memory:").to_string());
        let evicted = || redis.info_number("stats", "evicted_keys:");
        // Return the number of evicted states of limits: all evictions minus those of padding keys.
        let evicted_states = |written: u64| {
            let states: Vec<String> = redis::cmd("KEYS").arg("rl:*").query(&mut redis.connection()).unwrap();
            (evicted() + redis.keyspace().0 - states.len() as u64).saturating_sub(written)
        };
        let over = AtomicBool::new(false);
        let admitted = AtomicUsize::new(0);
        let all_padding = std::thread::scope(|scope| {
            let raise = SetOnDrop(&over);
            for gateway in &gateways {
                let (over, admitted) = (&over, &admitted);
                scope.spawn(move || {
                    let mut client = gateway.client();
                    for request in 0.. {
                        if over.load(Ordering::SeqCst) {
                            return;
                        }
                        let id = (request % IDENTITIES).to_string();
                        match client.get_with("/r", &[("x-id", &id)]).status {
                            200 => drop(admitted.fetch_add(1, Ordering::SeqCst)),
                            status => assert_eq!(status, 429),
                        }
                    }
                });
            }
            let mut all = PADDING;
            eventually("states are evicted, and identities use their fresh limits", || {
                all = pad(1000);
                evicted_states(all) > IDENTITIES && admitted.load(Ordering::SeqCst) as u64 > QUOTA * IDENTITIES
            });
            drop(raise);
            all
        });
        // Stop the eviction before the final count.
        set("maxmemory", "0");
        let (mut client, mut admitted) = (gateways[0].client(), admitted.into_inner() as u64);
        for id in 0..IDENTITIES {
            let ask = |_| client.get_with("/r", &[("x-id", &id.to_string())]).status;
            let statuses: Vec<_> = (0..=QUOTA).map(ask).collect();
            assert_eq!(statuses.last(), Some(&429), "{policy}: {statuses:?}");
            admitted += statuses.iter().filter(|status| **status == 200).count() as u64;
        }
        let evictions = evicted_states(all_padding);
        println!("{policy}: {admitted} admitted to {IDENTITIES} identities with {evictions} evictions");
        assert!(
            admitted <= QUOTA * (IDENTITIES + evictions),
            "{policy}: {admitted} admitted with {evictions} evictions"
        );
        assert!(
            admitted > QUOTA * IDENTITIES,
            "{policy}: {admitted} admitted; after an eviction the limit starts anew"
        );
    }
}

#[test]
fn promoted_replica_gives_each_identity_at_most_one_fresh_limit() {
    // One replica has all writes of the master, the other has none.
    for in_sync in [true, false] {
        let (master, directory) = (Redis::start(), tempfile::tempdir().unwrap());
        let replica = if in_sync { replica_of(&master, directory.path()) } else { Redis::start() };
        let relay = Relay::start(master.port);
        let gateways = denying_gateways(&relay.url());
        let admitted = spend(&gateways, 10, 200, || {
            if in_sync {
                // Cut the gateways off from the master, then wait until the replica has received all writes.
                relay.redirect_to(free_port());
                eventually("the replica has all writes", || {
                    let heard = |server: &Redis| server.info_number("replication", "master_repl_offset:");
                    heard(&master) == heard(&replica)
                });
            }
            redis::cmd("REPLICAOF").arg("NO").arg("ONE").exec(&mut replica.connection()).unwrap();
            relay.redirect_to(replica.port);
        });
        println!(
            "fault 21: of 10, a replica {} promoted: {admitted:?}",
            if in_sync { "in sync" } else { "that knows nothing" }
        );
        let most = if in_sync { 10 } else { 20 };
        assert!(admitted.iter().all(|count| *count <= most), "{admitted:?}");
        assert!(admitted.contains(&most), "{admitted:?}");
    }
}

#[test]
fn gateways_reconnect_to_a_recovered_store_without_a_connection_storm() {
    const GATEWAYS: usize = 4;
    const WORKERS: usize = 2;
    const CLIENTS: usize = 8;
    let port = free_port();
    let mut redis = Redis::start_on(port).expect("the port is still free");
    let config = format!(
        "[server]\nworkers = {WORKERS}\n[store]\nurl = \"{}\"\ntimeout = \"250ms\"\n\
         [limit.l]\nby = \"header:x-id\"\nquota = \"1000000/hour\"\non_store_error = \"allow\"\n\
         [[route]]\nname = \"r\"\npath = \"/r\"\nlimits = [\"l\"]\nrespond = {{ status = 200 }}\n",
        redis.url()
    );
    let gateways: Vec<_> = (0..GATEWAYS).map(|_| Gateway::start(&config)).collect();
    let over = AtomicBool::new(false);
    // For each client: the number of requests that were admitted without the store, and the number of requests that the
    // store admitted.
    let answers: Vec<[AtomicUsize; 2]> = (0..GATEWAYS * CLIENTS).map(|_| Default::default()).collect();
    std::thread::scope(|scope| {
        let _raise = SetOnDrop(&over);
        for (id, answers) in answers.iter().enumerate() {
            let (gateway, over) = (&gateways[id % GATEWAYS], &over);
            scope.spawn(move || {
                let (mut client, mut rejected) = (gateway.client(), 0);
                while !over.load(Ordering::SeqCst) {
                    let reply = client.get_with("/r", &[("x-id", &id.to_string())]);
                    if reply.status == 503 {
                        // Requests get 503 until the circuit breaker opens.
                        rejected += 1;
                        assert!(rejected <= 6, "{rejected} rejected");
                        continue;
                    }
                    assert_eq!(reply.status, 200);
                    answers[usize::from(reply.header("ratelimit").is_some())].fetch_add(1, Ordering::SeqCst);
                    std::thread::sleep(Duration::from_millis(10));
                }
            });
        }
        let all_clients = |what: &str, by_store: bool, times: usize| {
            let so_far = || answers.iter().map(|of| of[usize::from(by_store)].load(Ordering::SeqCst));
            let before: Vec<_> = so_far().collect();
            eventually(what, || so_far().zip(&before).all(|(now, before)| now > before + times));
        };
        let all_decide = |what: &str| all_clients(what, true, 50);
        // Each client gets 250 responses, which takes some seconds at 100 per second.
        let all_miss_it = || all_clients("all clients are served without the store for a while", false, 250);
        // Subtract 1 for the connection that this test itself opens.
        let connections = |redis: &Redis| redis.info_number("stats", "total_connections_received:") - 1;
        // Each worker has one connection, and each gateway has one more for PING.
        let fresh = (GATEWAYS * (WORKERS + 1)) as u64;
        all_decide("the store decides");

        redis.child.kill().unwrap();
        redis.child.wait().unwrap();
        all_miss_it();
        redis = Redis::start_on(port).expect("the port is still free");
        all_decide("the new store decides");
        let after_restart = connections(&redis);

        let before = connections(&redis) + 1;
        signal(&redis.child, "STOP");
        all_miss_it();
        signal(&redis.child, "CONT");
        all_decide("the store decides again");
        let after_stop = connections(&redis) - before;
        println!(
            "{GATEWAYS} gateways of {WORKERS} workers: {after_restart} connections after a restart, {after_stop} after a stop"
        );
        assert!(after_restart <= 2 * fresh, "{after_restart} connections instead of {fresh}");
        assert!(after_stop <= 3 * fresh, "{after_stop} connections instead of {fresh}");
    });
}
