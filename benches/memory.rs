//! Measures how much memory the state of one identity takes, for each algorithm, in Redis and in the memory store. The
//! keys and values in Redis are those of the gateway.

#[path = "../tests/support/redis.rs"]
#[allow(dead_code, unreachable_pub)] // shared with the tests
mod server;

use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use sluicegate::clock::{Clock, monotonic};
use sluicegate::limiter::algorithm::Rule;
use sluicegate::limiter::algorithm::concurrency::Concurrency;
use sluicegate::limiter::algorithm::fixed_window::{FixedWindow, WindowStart};
use sluicegate::limiter::algorithm::sliding_buckets::SlidingBuckets;
use sluicegate::limiter::algorithm::sliding_log::SlidingLog;
use sluicegate::limiter::algorithm::sliding_window::SlidingWindow;
use sluicegate::limiter::algorithm::token_bucket::TokenBucket;
use sluicegate::limiter::key::{IdentityHasher, Key, StateName};
use sluicegate::limiter::memory::MemoryStore;
use sluicegate::limiter::quota::CalendarWindows;
use sluicegate::limiter::quota::{CalendarUnit, Quota};
use sluicegate::limiter::redis::RedisSettings;
use sluicegate::limiter::redis::batcher::ServerStore;
use sluicegate::limiter::redis::server::RedisEndpoint;
use sluicegate::limiter::verdict::{Charge, ChargeMode, Operation};

// Use the allocator of the gateway, because the memory of a state depends on the allocator.
use mimalloc as _;

/// Number of identities that are created in Redis. With this number, the hash tables of Redis are about as full as with
/// a million keys, so the result can be extrapolated.
const IDENTITIES: u64 = 100_000;
const MILLION: u64 = 1_000_000;
/// Number of concurrent calls to Redis.
const TASKS: u64 = 64;
/// Time of the first charge: the start of an hour. All charges of a state are within two hours.
const START_US: u64 = 1_800_000_000_000_000;
const HOUR_US: u64 = 3_600_000_000;

/// A limit of 100 per hour, and the charges that make the limit's state as large as possible. Each charge has a time in
/// µs after [`START_US`] and a cost.
struct Subject {
    name: &'static str,
    rule: Rule,
    bucket: StateName,
    fill: Vec<(u64, u64)>,
}

fn subjects() -> Vec<Subject> {
    let quota: Quota = "100/hour".parse().unwrap();
    let month = WindowStart::Calendar(Arc::new(CalendarWindows::new(CalendarUnit::Month, "UTC").unwrap()));
    let window = |start| Rule::FixedWindow(FixedWindow::new(quota, start).unwrap());
    let parts = (0..11).map(|part| (part * HOUR_US / 10, 9)).collect();
    let subject = |name, rule: Rule, fill| {
        let bucket = StateName::new(&IdentityHasher::new("memory"), "per-key", &rule.shape());
        Subject { name, rule, bucket, fill }
    };
    vec![
        subject("token-bucket", Rule::TokenBucket(TokenBucket::new(quota, 100).unwrap()), vec![(0, 50)]),
        subject("fixed-window", window(WindowStart::Aligned { phase: 0 }), vec![(0, 50)]),
        subject("fixed-window, first-request", window(WindowStart::FirstRequest), vec![(0, 50)]),
        subject("fixed-window, month", window(month), vec![(0, 50)]),
        subject(
            "sliding-window",
            Rule::SlidingWindow(SlidingWindow::new(quota).unwrap()),
            vec![(0, 50), (HOUR_US, 50)],
        ),
        subject("sliding-buckets, 10 parts", Rule::SlidingBuckets(SlidingBuckets::new(quota, 10).unwrap()), parts),
        subject("sliding-log, 100 entries", Rule::SlidingLog(SlidingLog::new(quota).unwrap()), vec![(0, 100)]),
        subject(
            "concurrency, one in flight",
            Rule::Concurrency(Concurrency { limit: 100, ttl: HOUR_US }),
            vec![(0, 1)],
        ),
    ]
}

impl Subject {
    fn charge(&self, hasher: &IdentityHasher, identity: u64, cost: u64) -> Charge<'_> {
        let identity = hasher.hash(&identity.to_be_bytes());
        // The gateway uses random permit ids. Use a part of the hash instead, which is unique enough.
        let lease = identity.0 as u64;
        Charge {
            key: Key { identity, state_name: &self.bucket },
            rule: &self.rule,
            cost,
            mode: ChargeMode::Enforced,
            permit_id: lease,
            debt_before_us: 0,
            usage: None,
        }
    }
}

fn main() {
    let mut arguments = std::env::args().skip_while(|argument| argument != "--embedded").skip(1);
    if let Some(name) = arguments.next() {
        return println!("{}", embedded(&name));
    }
    let server = server::Redis::start();
    let info: String = redis::cmd("INFO").arg("server").query(&mut server.connection()).unwrap();
    let version = info.lines().find_map(|line| line.strip_prefix("redis_version:")).unwrap();
    println!(
        "| `algorithm` | a million in Redis {version} | key and value, bytes | a million in the gateway |\n|---|---|---|---|"
    );
    for subject in subjects() {
        let name = subject.name;
        let (in_redis, key, value) = in_redis(&server, &Arc::new(subject));
        // Use the minimum of three runs, because freed pages that were not returned to the kernel increase the result.
        let embedded = [(); 3].map(|()| in_a_process_of_its_own(name)).into_iter().min().unwrap();
        let megabytes = |bytes: u64| format!("{} MB", (bytes + 500_000) / 1_000_000);
        println!("| {name} | {} | {key} + {value} | {} |", megabytes(in_redis), megabytes(embedded));
    }
}

/// Return three sizes in bytes: of a million states in Redis, of a key and of a value.
fn in_redis(server: &server::Redis, subject: &Arc<Subject>) -> (u64, u64, u64) {
    let mut connection = server.connection();
    redis::cmd("FLUSHALL").exec(&mut connection).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let (before, after) = runtime.block_on(async {
        let clock = Clock::manual(START_US);
        let timeout = Duration::from_secs(5);
        let settings =
            RedisSettings { timeout, connect_timeout: timeout, clock: clock.clone(), ..RedisSettings::default() };
        let endpoint = RedisEndpoint::Single(server.client());
        let store = ServerStore::new(&settings, endpoint, Arc::default(), Arc::default());
        // Connect to Redis and load the script before the memory is measured.
        store
            .call(
                monotonic() + store.timeout(),
                false,
                Operation::Peek,
                &[subject.charge(&IdentityHasher::new(""), 0, 1)],
            )
            .await
            .unwrap();
        let before = used_memory(&mut server.connection());
        for (after_us, cost) in subject.fill.clone() {
            clock.set(START_US + after_us);
            let tasks: Vec<_> = (0..TASKS)
                .map(|task| {
                    let (store, subject) = (store.clone(), subject.clone());
                    tokio::spawn(async move {
                        let hasher = IdentityHasher::new("");
                        for identity in (task..IDENTITIES).step_by(TASKS as usize) {
                            let charge = subject.charge(&hasher, identity, cost);
                            store
                                .call(monotonic() + store.timeout(), false, Operation::Charge, &[charge])
                                .await
                                .unwrap();
                        }
                    })
                })
                .collect();
            for task in tasks {
                task.await.unwrap();
            }
        }
        (before, used_memory(&mut server.connection()))
    });
    let keys: u64 = redis::cmd("DBSIZE").query(&mut connection).unwrap();
    assert_eq!(keys, IDENTITIES, "{}", subject.name);
    let key: String = redis::cmd("RANDOMKEY").query(&mut connection).unwrap();
    let value = match subject.rule {
        Rule::SlidingLog(_) => redis::cmd("LRANGE").arg(&key).arg(0).arg(-1).query::<Vec<Vec<u8>>>(&mut connection),
        Rule::Concurrency(_) => {
            redis::cmd("ZRANGE").arg(&key).arg(0).arg(-1).arg("WITHSCORES").query::<Vec<Vec<u8>>>(&mut connection)
        }
        _ => redis::cmd("GET").arg(&key).query::<Vec<u8>>(&mut connection).map(|value| vec![value]),
    };
    let value = value.unwrap().iter().map(Vec::len).sum::<usize>();
    ((after - before) * MILLION / IDENTITIES, key.len() as u64, value as u64)
}

fn used_memory(connection: &mut redis::Connection) -> u64 {
    let info: String = redis::cmd("INFO").arg("memory").query(connection).unwrap();
    info.lines().find_map(|line| line.strip_prefix("used_memory:")).unwrap().parse().unwrap()
}

/// Return the result of [`embedded`] in a new process, so that earlier measurements do not influence it.
fn in_a_process_of_its_own(name: &str) -> u64 {
    let output = Command::new(std::env::current_exe().unwrap()).args(["--embedded", name]).output().unwrap();
    String::from_utf8(output.stdout).unwrap().trim().parse().unwrap()
}

/// Return the resident memory, in bytes, of a million states in a memory store.
fn embedded(name: &str) -> u64 {
    let subject = subjects().into_iter().find(|subject| subject.name == name).unwrap();
    let store = MemoryStore::new(2 * MILLION as usize, Clock::manual(START_US));
    let hasher = IdentityHasher::new("");
    let before = resident();
    // Only the first charge is necessary, because the size of a state in the memory store does not depend on its
    // content.
    let cost = subject.fill[0].1;
    for identity in 0..MILLION {
        store.decide(Operation::Check, &[subject.charge(&hasher, identity, cost)]);
    }
    assert_eq!(store.len() as u64, MILLION);
    resident() - before
}

fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let kilobytes = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    kilobytes.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
}
