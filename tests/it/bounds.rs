//! Faults 35 to 37 in docs/testing.md. Many identities need bounded memory. Wrong clocks of gateways change no
//! decision. During a long outage of the store, the gateways admit a bounded number of requests. The environment
//! variable `OPERATIONS=1000000` makes the tests run longer.

use std::cell::Cell;
use std::io::Write;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use crate::support::gateway::Gateway;
use crate::support::random::{operations, property};
use crate::support::redis::Redis;
use crate::support::stores::{Limit, SECOND, START, Stores, calendar, call, concurrency, every_algorithm, redis_store};
use crate::support::{SetOnDrop, eventually};
use proptest::prelude::*;
use sluicegate::clock::{Clock, monotonic, unix_us};
use sluicegate::limiter::algorithm::Status;
use sluicegate::limiter::quota::CalendarUnit;
use sluicegate::limiter::redis::batcher::ServerStore;
use sluicegate::limiter::verdict::{Charge, Operation};

#[test]
fn many_identities_take_bounded_memory_and_every_key_expires() {
    const CLIENTS: usize = 8;
    const BATCH: usize = 100;
    /// Maximum resident memory of the gateway's process in bytes.
    const MOST: u64 = 64 << 20;
    let redis = Redis::start();
    // The limit `many` admits all requests. The limit `one` denies the second request of each identity, and the gateway
    // caches this denial.
    let gateway = Gateway::start(&format!(
        "{}[limit.many]\nby = \"header:x-id\"\nquota = \"100/24h\"\n[limit.one]\nby = \"header:x-id\"\nquota = \"1/24h\"\n\
         [[route]]\nname = \"many\"\npath = \"/many\"\nlimits = [\"many\"]\nrespond = {{ status = 200 }}\n\
         [[route]]\nname = \"one\"\npath = \"/one\"\nlimits = [\"one\"]\nrespond = {{ status = 200 }}\n",
        redis.store()
    ));
    // Of the identities, 90 % use the limit `many` and 10 % the limit `one`.
    let identities = operations() / CLIENTS / BATCH * CLIENTS * BATCH;
    std::thread::scope(|scope| {
        for client in 0..CLIENTS {
            let gateway = &gateway;
            scope.spawn(move || {
                let mut connection = gateway.client();
                for batch in 0..identities / CLIENTS / BATCH {
                    let first = (client * identities / CLIENTS) + batch * BATCH;
                    let mut ask = |path: &str, expected: u16| {
                        let requests: String = (first..first + BATCH)
                            .map(|id| format!("GET {path} HTTP/1.1\r\nHost: a\r\nX-Id: {id}\r\n\r\n"))
                            .collect();
                        connection.stream.get_mut().write_all(requests.as_bytes()).unwrap();
                        for id in first..first + BATCH {
                            assert_eq!(connection.reply().unwrap().status, expected, "{path}, {id}");
                        }
                    };
                    if batch % 10 == 0 {
                        ask("/one", 200);
                        ask("/one", 429);
                    } else {
                        ask("/many", 200);
                    }
                }
            });
        }
    });
    let memory = gateway.memory();
    let (keys, expiring) = redis.keyspace();
    println!(
        "fault 35: {identities} identities, {} MiB in the gateway, {expiring} of {keys} keys expire",
        memory >> 20
    );
    let states = identities as u64;
    assert_eq!((keys, expiring), (states + 1, states + 1), "the states, and the number of gateways");
    assert!(memory <= MOST, "{memory} bytes");
}

#[test]
fn skewed_gateway_clocks_change_no_decision() {
    let redis = Redis::start();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let (hour, window) = (3600 * SECOND as i64, 3650 * 86_400 * SECOND);
    let decisions = Cell::new(0);
    // Each call has an identity, a cost, and the index of a gateway.
    let step = (0..3u128, 0..12u64, 0..5usize);
    property(operations() / 20, 30, prop::collection::vec(step, 1..60), |calls| {
        redis::cmd("FLUSHALL").exec(&mut redis.connection()).unwrap();
        let right = redis_store(&redis, "right", Clock::Store);
        // Some gateways have a clock that is wrong by an hour, which is realistic. Others have an error of a whole
        // window, which would reset each limit if the store used the clocks of the gateways.
        let gateways = [0, hour, -hour, window as i64, -(window as i64)]
            .map(|off| redis_store(&redis, "wrong", Clock::Skewed(off)));
        // Each window is ten years long, so that no window begins during the test.
        for (name, rule) in every_algorithm(50, window) {
            let limit = Limit::new(name, rule);
            for (who, cost, gateway) in &calls {
                let charge = limit.charge(*who, *cost);
                let ask = |store: &ServerStore| runtime.block_on(call(store, Operation::Check, &[charge])).unwrap();
                let verdicts = [ask(&right), ask(&gateways[*gateway])];
                let [expected, said] =
                    verdicts.each_ref().map(|verdict| (verdict.granted, verdict.outcomes[0].remaining));
                assert_eq!(said, expected, "{name}, by gateway {gateway}, {charge:?}");
                assert!(verdicts[1].now_us.abs_diff(verdicts[0].now_us) < 60 * SECOND, "{name}: {verdicts:?}");
            }
            decisions.set(decisions.get() + calls.len());
        }
        calls.len()
    });
    println!("fault 36: 0 of {} decisions changed by clocks that are off", decisions.get());
}

#[tokio::test]
async fn redis_clock_set_back_locks_out_no_longer_than_a_full_state() {
    const MINUTE: u64 = 60 * SECOND;
    let redis = Redis::start();
    let stores = Stores::new(&redis, "back");
    let of_a_minute = every_algorithm(10, MINUTE).into_iter().filter(|(name, _)| *name != "calendar");
    let others = [("calendar", calendar(10, CalendarUnit::Day, "UTC")), ("concurrency", concurrency(10, MINUTE))];
    for (name, rule) in of_a_minute.chain(others) {
        let mut longest = 0;
        for offset in (0..60).step_by(7).map(|seconds| seconds * SECOND) {
            let limit = Limit::new(&format!("{name}{offset}"), rule.clone());
            let ask = async |who: u128, permit_id: u64| {
                stores.call(Operation::Check, &[Charge { permit_id, ..limit.charge(who, 1) }]).await.outcomes[0]
            };
            let spend = async |who: u128| {
                for lease in 0..10 {
                    assert_eq!(ask(who, lease).await.status, Status::Ok, "{name}");
                }
            };
            let back = START + 24 * 60 * MINUTE + offset;
            stores.clock.set(back + 60 * MINUTE);
            spend(1).await;
            stores.clock.set(back);
            let locked_out = ask(1, 10).await;
            assert_ne!(locked_out.status, Status::Ok, "{name}: a clock that is set back admits nothing");
            // At the same time, another identity uses its whole quota.
            spend(2).await;
            let spent = ask(2, 10).await;
            assert!(locked_out.retry_us <= spent.retry_us, "{name}: {locked_out:?} instead of {spent:?}");
            stores.clock.set(back + locked_out.retry_us);
            assert_eq!(ask(1, 11).await.status, Status::Ok, "{name}: the lock-out ends");
            longest = longest.max(locked_out.retry_us);
        }
        println!("fault 36: {name}, a lock-out of {} s at most after a step back of an hour", longest / SECOND);
    }
}

#[test]
fn two_gateways_in_an_outage_admit_at_most_the_documented_bound() {
    const LIMIT: u64 = 51;
    // The sum of the local shares of both gateways. Each share is rounded up.
    const SHARES: u64 = 52;
    const WINDOW: u64 = 2;
    let algorithms = [
        "token-bucket",
        "fixed-window",
        "fixed-window\"\nstart = \"first-request",
        "sliding-window",
        "sliding-buckets",
        "sliding-log",
    ];
    let limits: String = algorithms
        .iter()
        .enumerate()
        .map(|(n, algorithm)| {
            format!(
                "[limit.l{n}]\nby = \"global\"\nquota = \"{LIMIT}/{WINDOW}s\"\nalgorithm = \"{algorithm}\"\non_store_error = \"local\"\n\
                 [[route]]\nname = \"r{n}\"\npath = \"/{n}\"\nlimits = [\"l{n}\"]\nrespond = {{ status = 200 }}\n"
            )
        })
        .collect();
    let mut redis = Redis::start();
    let config = format!("[store]\nurl = \"{}\"\ntimeout = \"250ms\"\ngateway_count = 2\n{limits}", redis.url());
    let gateways = [Gateway::start(&config), Gateway::start(&config)];
    let over = AtomicBool::new(false);
    let (began, began_us) = (monotonic(), unix_us());
    let admitted: Vec<[AtomicU64; 2]> = algorithms.iter().map(|_| Default::default()).collect();
    std::thread::scope(|scope| {
        let _raise = SetOnDrop(&over);
        for (n, admitted) in admitted.iter().enumerate() {
            for (gateway, admitted) in gateways.iter().zip(admitted) {
                let over = &over;
                scope.spawn(move || {
                    let mut client = gateway.client();
                    while !over.load(Ordering::SeqCst) {
                        let status = client.get(&format!("/{n}")).status;
                        assert!([200, 429].contains(&status), "{status}");
                        admitted.fetch_add(u64::from(status == 200), Ordering::SeqCst);
                        // With this pause, the clients still send more requests than the limits admit, but do not use
                        // the whole processor.
                        std::thread::sleep(Duration::from_millis(2));
                    }
                });
            }
        }
        let have_admitted = |least: u64| {
            admitted.iter().all(|each| each.iter().map(|count| count.load(Ordering::SeqCst)).sum::<u64>() >= least)
        };
        eventually("all quotas are used up", || have_admitted(LIMIT));
        redis.child.kill().unwrap();
        redis.child.wait().unwrap();
        // Keep Redis down for this time.
        std::thread::sleep(Duration::from_secs(operations() as u64 / 12_500));
        eventually("the gateways admit their local shares", || have_admitted(2 * LIMIT));
    });
    let (seconds, ended_us) = (began.elapsed().as_secs_f64(), unix_us());
    let begun = ended_us / (WINDOW * SECOND) - began_us / (WINDOW * SECOND);
    for (algorithm, admitted) in algorithms.iter().zip(&admitted) {
        let admitted: u64 = admitted.iter().map(|count| count.load(Ordering::SeqCst)).sum();
        let back = match *algorithm {
            "fixed-window" => begun * SHARES,
            // The rate of a token bucket is divided between the gateways without rounding.
            "token-bucket" => (LIMIT as f64 * seconds / WINDOW as f64).ceil() as u64,
            _ => (SHARES as f64 * seconds / WINDOW as f64).ceil() as u64,
        };
        let most = 2 * LIMIT + back + 2;
        println!("fault 37: {algorithm:?}, {admitted} admitted in {seconds:.1} s of at most {most}");
        assert!(admitted <= most, "{algorithm:?}");
    }
}
