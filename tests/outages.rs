//! Outages of the store under load: clients notice a deadline at most, and nobody gets somebody else's answer.

mod support;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use sluicegate::limit::clock::monotonic;
use support::gateway::Gateway;
use support::redis::{Redis, free_port};
use support::upstream::serve;
use support::{Raise, eventually, signal};

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
            let reply = gateway.get("/r");
            slowest = slowest.max(asked.elapsed());
            if on_error == "deny" {
                reply.assert_problem(503, on_error);
                let id = reply.header("x-request-id").expect("an id");
                assert_eq!(reply.json()["request_id"], id, "it can be found in the access log");
            } else {
                assert_eq!(reply.status, 200, "{on_error}");
            }
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
    let (over, decided, alone) = (AtomicBool::new(false), AtomicUsize::new(0), AtomicUsize::new(0));
    let (back, slowest, total) = std::thread::scope(|scope| {
        let raise = Raise(&over);
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
        // Some seconds of them: the longer it lasts, the longer the pauses between probes.
        eventually("thousands are answered without the store", || alone.load(Ordering::SeqCst) > 3000);
        let before = decided.load(Ordering::SeqCst);
        let _redis = Redis::start_on(port).expect("the port is still free");
        let back = monotonic();
        eventually("the store decides again", || decided.load(Ordering::SeqCst) > before);
        let back = back.elapsed();
        eventually("all go on", || decides(before));
        drop(raise);
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
    let (over, answered, alone) = (AtomicBool::new(false), AtomicUsize::new(0), AtomicUsize::new(0));
    let crossed: usize = std::thread::scope(|scope| {
        let raise = Raise(&over);
        let threads: Vec<_> = (0..CLIENTS)
            .map(|id| {
                let (gateway, over, answered, alone) = (&gateway, &over, &answered, &alone);
                scope.spawn(move || {
                    let mut client = gateway.client();
                    let (path, name) = (format!("/{id}"), format!("l{id}"));
                    let (mut sent, mut counted, mut crossed, mut rejected) = (0, 0, 0, 0);
                    while !over.load(Ordering::SeqCst) {
                        let reply = client.get(&path);
                        sent += 1;
                        if reply.status == 503 {
                            // Until it is known whether the store is late or gone.
                            assert_eq!(reply.header("retry-after"), Some("1"));
                            rejected += 1;
                            assert!(rejected <= 6, "{rejected} rejected of {sent}");
                            continue;
                        }
                        assert_eq!(reply.status, 200);
                        if reply.header("ratelimit").is_none() {
                            alone.fetch_add(1, Ordering::SeqCst);
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
        // Calls that wait for their replies, those after them, and those that are not even made.
        eventually("thousands are answered without the store", || alone.load(Ordering::SeqCst) > 20_000);
        signal(&redis.child, "CONT");
        eventually("the store decides again", || answered.load(Ordering::SeqCst) > 10_000);
        drop(raise);
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    println!("row 18: {crossed} crossed of {}", answered.load(Ordering::SeqCst));
    assert_eq!(crossed, 0);
}
