//! Outages of the store under load: clients notice a deadline at most, and nobody gets somebody else's answer.

mod support;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use sluicegate::limit::clock::monotonic;
use support::gateway::Gateway;
use support::redis::{Redis, free_port};
use support::relay::Relay;
use support::upstream::serve;
use support::{eventually, signal};

/// A gateway on this store, with these limits on `/r`.
fn gateway(store: &str, limits: &[&str]) -> Gateway {
    let named: String = limits.iter().enumerate().map(|(n, limit)| format!("[limit.l{n}]\n{limit}\n")).collect();
    let names: Vec<_> = (0..limits.len()).map(|n| format!("l{n}")).collect();
    Gateway::start(&format!(
        "[store]\n{store}\n{named}\
         [[route]]\nname = \"r\"\npath = \"/r\"\nlimits = {names:?}\nrespond = {{ status = 200 }}\n"
    ))
}

#[test]
fn a_store_that_is_not_there_at_the_start_delays_nobody() {
    // One that accepts and stays silent is worse than one that refuses.
    let silent = serve(|mut stream| drop(std::io::copy(&mut stream, &mut std::io::sink())));
    let mut slowest = Duration::ZERO;
    for port in [free_port(), silent.port()] {
        for on_error in ["local", "allow", "deny"] {
            let store = format!("url = \"redis://127.0.0.1:{port}\"");
            let limit = format!("by = \"ip\"\nquota = \"10/hour\"\non_store_error = \"{on_error}\"");
            let gateway = gateway(&store, &[&limit]);
            let asked = monotonic();
            let status = gateway.get("/r").status;
            slowest = slowest.max(asked.elapsed());
            assert_eq!(status, if on_error == "deny" { 503 } else { 200 }, "{on_error}");
        }
    }
    assert!(slowest <= Duration::from_secs(1), "the first answer after {slowest:?}");
    println!("row 16: first answer after {slowest:?} at most");
}

#[test]
fn a_store_that_dies_under_load_is_no_error_for_clients() {
    const CLIENTS: usize = 20;
    const TIMEOUT: Duration = Duration::from_millis(250);
    let port = free_port();
    let mut redis = Redis::start_on(port).expect("the port is still free");
    let store = format!("url = \"{}\"\ntimeout = \"{}ms\"", redis.url(), TIMEOUT.as_millis());
    let limit = "by = \"header:x-id\"\nquota = \"1000000/hour\"\non_store_error = \"allow\"";
    let gateway = gateway(&store, &[limit]);
    let (over, decided) = (AtomicBool::new(false), AtomicUsize::new(0));
    let (back, slowest, total) = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..CLIENTS)
            .map(|id| {
                let (gateway, over, decided) = (&gateway, &over, &decided);
                scope.spawn(move || {
                    let mut client = gateway.client();
                    let (mut slowest, mut total) = (Duration::ZERO, 0);
                    while !over.load(Ordering::SeqCst) {
                        let asked = monotonic();
                        let reply = client.get_with("/r", &[("x-id", &id.to_string())]);
                        assert_eq!(reply.status, 200, "request {total} of client {id}");
                        (slowest, total) = (slowest.max(asked.elapsed()), total + 1);
                        decided.fetch_add(usize::from(reply.header("ratelimit").is_some()), Ordering::SeqCst);
                        // All of them together ask a thousand times a second.
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
        // What is tested is time: the longer it lasts, the longer the pauses between probes.
        std::thread::sleep(Duration::from_secs(3));
        let before = decided.load(Ordering::SeqCst);
        let _redis = Redis::start_on(port).expect("the port is still free");
        let back = monotonic();
        eventually("the store decides again", || decided.load(Ordering::SeqCst) > before);
        let back = back.elapsed();
        eventually("all go on", || decides(before));
        over.store(true, Ordering::SeqCst);
        let each: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        let slowest = each.iter().map(|(slowest, _)| *slowest).max().unwrap();
        (back, slowest, each.iter().map(|(_, total)| *total).sum::<usize>())
    });
    println!("row 17: 0 errors of {total}, slowest {slowest:?}, the store decides {back:?} after it is there");
    // The deadline, and a second for whatever else the machine does.
    assert!(slowest <= TIMEOUT + Duration::from_secs(1), "{slowest:?}");
    assert!(back <= Duration::from_millis(1500), "{back:?}");
}

#[test]
fn a_store_that_stands_still_and_goes_on_crosses_no_replies() {
    const CLIENTS: usize = 8;
    let redis = Redis::start();
    let store = format!("url = \"{}\"\ntimeout = \"50ms\"", redis.url());
    // Numbers that no two clients have in common.
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
    let (over, answered) = (AtomicBool::new(false), AtomicUsize::new(0));
    let crossed: usize = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..CLIENTS)
            .map(|id| {
                let (gateway, over, answered) = (&gateway, &over, &answered);
                scope.spawn(move || {
                    let mut client = gateway.client();
                    let (path, name) = (format!("/{id}"), format!("l{id}"));
                    let (mut sent, mut counted, mut crossed) = (0, 0, 0);
                    while !over.load(Ordering::SeqCst) {
                        let reply = client.get(&path);
                        sent += 1;
                        assert_eq!(reply.status, 200);
                        if reply.header("ratelimit").is_none() {
                            continue;
                        }
                        // Those in between without an answer may have been counted; no other client's ever is.
                        let spent = quota(id) as u64 - reply.remaining(&name).min(quota(id) as u64);
                        crossed += usize::from(spent <= counted || spent > sent);
                        counted = spent;
                        answered.fetch_add(1, Ordering::SeqCst);
                    }
                    crossed
                })
            })
            .collect();
        eventually("the store decides", || answered.load(Ordering::SeqCst) > 3000);
        signal(&redis.child, "STOP");
        // What is tested is time: calls that wait for their replies, and those after them.
        std::thread::sleep(Duration::from_secs(3));
        signal(&redis.child, "CONT");
        eventually("the store decides again", || answered.load(Ordering::SeqCst) > 10_000);
        over.store(true, Ordering::SeqCst);
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    println!("row 18: {crossed} crossed of {}", answered.load(Ordering::SeqCst));
    assert_eq!(crossed, 0);
}

/// Asks for each of so many identities so often, in turns over all gateways, and calls `midway` when half is done; how
/// many requests of each were admitted.
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
        eventually("half is asked", || half.load(Ordering::SeqCst) >= identities * each / 2);
        midway();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Two gateways that ask for each request, and whose errors admit nobody.
fn strict(url: &str) -> [Gateway; 2] {
    let store = format!("url = \"{url}\"\ntimeout = \"5s\"\ndenial_cache = 0");
    let limit = "by = \"header:x-id\"\nquota = \"10/24h\"\nalgorithm = \"sliding-log\"\non_store_error = \"deny\"";
    [gateway(&store, &[limit]), gateway(&store, &[limit])]
}

#[test]
fn a_store_that_forgets_everything_gives_each_identity_one_fresh_limit() {
    let redis = Redis::start();
    let gateways = strict(&redis.url());
    let admitted = spend(&gateways, 10, 200, || {
        redis::cmd("FLUSHALL").exec(&mut redis.connection()).unwrap();
    });
    println!("row 21: of 10, FLUSHALL: {admitted:?}");
    assert!(admitted.iter().all(|count| (10..=20).contains(count)), "{admitted:?}");
    assert!(admitted.contains(&20), "somebody had spent all: {admitted:?}");
    redis.assert_every_key_expires();
}

#[test]
fn a_replica_that_is_promoted_gives_each_identity_one_fresh_limit_at_most() {
    // One that has heard everything, and one that has heard nothing.
    for in_sync in [true, false] {
        let (master, directory) = (Redis::start(), tempfile::tempdir().unwrap());
        let replica = if in_sync { Redis::start_replica_of(&master, directory.path()) } else { Redis::start() };
        let relay = Relay::start(master.port);
        let gateways = strict(&relay.url());
        let admitted = spend(&gateways, 10, 200, || {
            if in_sync {
                // Nothing is asked any more, and all that was answered has arrived.
                relay.turn_to(free_port());
                eventually("the replica has heard all", || {
                    let heard = |server: &Redis| server.figure("replication", "master_repl_offset:");
                    heard(&master) == heard(&replica)
                });
            }
            redis::cmd("REPLICAOF").arg("NO").arg("ONE").exec(&mut replica.connection()).unwrap();
            relay.turn_to(replica.port);
        });
        println!(
            "row 21: of 10, a replica {} promoted: {admitted:?}",
            if in_sync { "in sync" } else { "that knows nothing" }
        );
        let most = if in_sync { 10 } else { 20 };
        assert!(admitted.iter().all(|count| *count <= most), "{admitted:?}");
        assert!(admitted.contains(&most), "{admitted:?}");
    }
}
