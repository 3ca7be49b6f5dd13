//! Known defects of rate limiters, and the tests that show that this one does not have them.
//!
//! | defect | test |
//! |---|---|
//! | counting and expiry are two commands: a key without a TTL | `no_gateway_that_is_killed_leaves_a_key_without_a_ttl` |
//! | every hit extends the TTL: steady traffic below the limit is locked out | `a_ttl_that_every_hit_extends_never_locks_out_steady_traffic` |
//! | denied requests are logged, too: memory grows, and it never unblocks | `a_flood_of_denials_costs_no_memory` in `invariants.rs` |
//! | the timestamp is the member: hits in one microsecond collapse | `a_burst_at_one_instant_is_counted_in_full` |
//! | the key expires between two commands: stuck for ever | `a_key_that_expires_between_two_calls_is_no_trap` |
//! | a herd passes a check before the first of it is counted | `a_herd_of_first_requests_is_admitted_once` |
//! | the key is named by the minute: an hour later it is the same | `a_window_an_hour_later_is_another_window` |
//! | each gateway goes by its own clock | `gateways_whose_clocks_differ_admit_the_limit_once` |
//! | the TTL is shorter than the refill: a fresh burst too early | `a_key_outlives_the_refill_of_its_bucket` |
//! | a month is 30 days, a week starts on Thursday | `a_month_has_its_own_days` |
//! | one limit denies, the other is charged | `a_denied_request_is_charged_nowhere` in `limits.rs` |
//! | the reply is lost and the call is sent again: charged twice | `a_call_whose_reply_is_lost_is_charged_once` in `distributed.rs` |
//! | a script that Redis has forgotten becomes an error | `forgotten_scripts_are_sent_again` in `distributed.rs` |
//! | Retry-After is rounded down: the polite client is denied again | `who_waits_as_long_as_he_is_told_is_admitted` in `limits.rs` |
//! | a refund after the window makes a negative key that never expires | `a_late_refund_makes_no_key` |
//! | the gateway dies, and what was in flight counts for ever | `a_gateway_that_dies_frees_its_slots_when_their_leases_end` in `concurrency.rs` |
//! | the store is down: errors for everyone, or seconds of waiting | `without_redis_each_limit_does_what_it_says` and `a_stopped_redis_costs_a_deadline_and_no_answer_is_crossed` in `distributed.rs`, `a_busy_redis_is_no_error_for_clients` |
//! | the identity's text is in the key: identities collide | `no_two_identities_share_a_key`, and `hostile_identities_have_buckets_of_their_own` in `identity.rs` |

use std::collections::HashMap;
use std::io::Write;
use std::net::TcpStream;

use crate::support::client::load;
use crate::support::eventually;
use crate::support::gateway::Gateway;
use crate::support::redis::Redis;
use crate::support::stores::{
    Limit, SECOND, START, Stores, bucket, calendar, call, concurrency, every_algorithm, longest_reset, redis_store,
};
use sluicegate::limiter::clock::Clock;
use sluicegate::limiter::key::{Identity, IdentityEncoder, IdentityHasher};
use sluicegate::limiter::quota::CalendarUnit;
use sluicegate::limiter::verdict::Operation;

/// A gateway with these limits on `/r`, that asks Redis for every request.
fn gateway(redis: &Redis, limits: &[&str]) -> Gateway {
    let named: String = limits.iter().enumerate().map(|(n, limit)| format!("[limit.l{n}]\n{limit}\n")).collect();
    let names: Vec<_> = (0..limits.len()).map(|n| format!("\"l{n}\"")).collect();
    Gateway::start(&format!(
        "{}denial_cache = 0\n{named}\
         [[route]]\nname = \"r\"\npath = \"/r\"\nlimits = [{}]\nrespond = {{ status = 200 }}\n",
        redis.store(),
        names.join(", ")
    ))
}

#[test]
fn no_gateway_that_is_killed_leaves_a_key_without_a_ttl() {
    let redis = Redis::start();
    let limits = [
        "token-bucket",
        "fixed-window",
        "sliding-window",
        "sliding-buckets",
        "sliding-log",
        "fixed-window\"\nstart = \"first-request",
    ]
    .map(|algorithm| format!("by = \"header:x-id\"\nquota = \"1000/hour\"\nalgorithm = \"{algorithm}\""));
    let limits: Vec<_> = limits.iter().map(String::as_str).chain(["by = \"ip\"\nquota = \"1000/day\""]).collect();
    for round in 1..=5 {
        let mut gateway = gateway(&redis, &limits);
        let calls = redis.calls("evalsha");
        // Sent without waiting for replies, so that calls are under way when the gateway dies.
        let mut streams: Vec<_> = (0..8).map(|_| TcpStream::connect(gateway.address).unwrap()).collect();
        for (id, stream) in streams.iter_mut().enumerate() {
            let request = format!("GET /r HTTP/1.1\r\nHost: a\r\nX-Id: {round}-{id}\r\n\r\n");
            stream.write_all(request.repeat(500).as_bytes()).unwrap();
        }
        eventually("the gateway counts", || redis.calls("evalsha") > calls + 20 * round);
        gateway.child.kill().unwrap();
        gateway.child.wait().unwrap();
        assert!(redis.keys().len() > limits.len(), "{:?}", redis.keys());
        redis.assert_every_key_expires();
    }
}

#[tokio::test]
async fn a_ttl_that_every_hit_extends_never_locks_out_steady_traffic() {
    let redis = Redis::start();
    let stores = Stores::new(&redis, "steady");
    for (name, rule) in every_algorithm(5, SECOND).into_iter().filter(|(name, _)| *name != "calendar") {
        let limit = Limit::new(name, rule);
        // The next hit always comes before the second is over.
        for hit in 1..=500 {
            stores.clock.set(START + hit * 600_000);
            assert_eq!(stores.check(&limit).await.retry_us, 0, "{name}: hit {hit}");
            redis.age(600);
        }
    }
}

#[tokio::test]
async fn a_burst_at_one_instant_is_counted_in_full() {
    let redis = Redis::start();
    let stores = Stores::new(&redis, "burst");
    for (name, rule) in every_algorithm(20, 60 * SECOND) {
        let limit = Limit::new(name, rule);
        let mut left = Vec::new();
        for _ in 0..20 {
            left.push(stores.check(&limit).await.remaining);
        }
        assert_eq!(left, (0..20).rev().collect::<Vec<_>>(), "{name}");
        assert_ne!(stores.check(&limit).await.retry_us, 0, "{name}: one too many");
    }
}

#[test]
fn a_key_that_expires_between_two_calls_is_no_trap() {
    let redis = Redis::start();
    for limit in [
        "quota = \"5/3650d\"\nalgorithm = \"fixed-window\"",
        "quota = \"5/3650d\"\nalgorithm = \"sliding-log\"",
        "quota = \"5/3650d\"\nburst = 5",
    ] {
        let gateway = gateway(&redis, &[&format!("by = \"ip\"\n{limit}")]);
        let expire = || {
            let mut connection = redis.connection();
            for key in redis.keys() {
                redis::cmd("PEXPIRE").arg(key).arg(1).exec(&mut connection).unwrap();
            }
        };
        let (mut admitted, mut denied, mut asked) = (0, 0, 0);
        let before = redis.expired();
        std::thread::scope(|scope| {
            let expirer = scope.spawn(|| {
                while redis.expired() - before < 20 {
                    expire();
                }
            });
            while !expirer.is_finished() {
                let statuses = load(&[gateway.address], 8, 200, "/r", &[]);
                admitted += statuses.iter().filter(|status| **status == 200).count();
                denied += statuses.iter().filter(|status| **status == 429).count();
                asked += statuses.len();
            }
        });
        assert_eq!(admitted + denied, asked, "{limit}: no errors");
        // Each key that expired is a fresh limit.
        assert!(admitted >= 20, "{limit}: {admitted} admitted");
        redis.assert_every_key_expires();
        expire();
        eventually("the last key expires", || redis.keys().is_empty());
        let statuses = load(&[gateway.address], 1, 7, "/r", &[]);
        assert_eq!(statuses, [200, 200, 200, 200, 200, 429, 429], "{limit}: counted from the start");
        redis::cmd("FLUSHALL").exec(&mut redis.connection()).unwrap();
    }
}

#[test]
fn a_herd_of_first_requests_is_admitted_once() {
    let redis = Redis::start();
    for limit in [
        "quota = \"1/24h\"",
        "quota = \"1/24h\"\nalgorithm = \"fixed-window\"\nstart = \"first-request\"",
        "quota = \"1/24h\"\nalgorithm = \"sliding-window\"",
        "quota = \"1/24h\"\nalgorithm = \"sliding-buckets\"",
        "quota = \"1/24h\"\nalgorithm = \"sliding-log\"",
    ] {
        let limits = [format!("by = \"ip\"\n{limit}")];
        let gateways = [(); 2].map(|()| gateway(&redis, &[&limits[0]]));
        let statuses = load(&gateways.each_ref().map(|gateway| gateway.address), 100, 100, "/r", &[]);
        let count = |wanted| statuses.iter().filter(|status| **status == wanted).count();
        assert_eq!((count(200), count(429)), (1, 99), "{limit}");
        redis::cmd("FLUSHALL").exec(&mut redis.connection()).unwrap();
    }
}

#[tokio::test]
async fn a_window_an_hour_later_is_another_window() {
    let redis = Redis::start();
    let stores = Stores::new(&redis, "later");
    for (name, rule) in every_algorithm(3, 60 * SECOND).into_iter().filter(|(name, _)| *name != "calendar") {
        let limit = Limit::new(name, rule);
        // The key is still there: no time has passed for Redis.
        for hour in 0..5 {
            stores.clock.set(START + hour * 3600 * SECOND);
            for left in [2, 1, 0] {
                assert_eq!(stores.check(&limit).await.remaining, left, "{name}: hour {hour}");
            }
            assert_ne!(stores.check(&limit).await.retry_us, 0, "{name}: hour {hour}");
        }
    }
    assert_eq!(redis.keys().len(), 6, "one key for each: {:?}", redis.keys());
}

#[tokio::test]
async fn gateways_whose_clocks_differ_admit_the_limit_once() {
    let redis = Redis::start();
    let hour = 3600 * SECOND as i64;
    let gateways =
        [Clock::Store, Clock::Skewed(hour), Clock::Skewed(-hour)].map(|clock| redis_store(&redis, "skew", clock));
    // Windows of ten years: none of them begins while the test runs.
    for (name, rule) in every_algorithm(50, 3650 * 86_400 * SECOND) {
        let limit = Limit::new(name, rule);
        let (mut admitted, mut last) = (0, 0);
        for _ in 0..30 {
            for gateway in &gateways {
                let verdict = call(gateway, Operation::Check, &[limit.charge(1, 1)]).await.unwrap();
                assert!(verdict.now_us >= last, "{name}: {} after {last}", verdict.now_us);
                (admitted, last) = (admitted + verdict.granted, verdict.now_us);
            }
        }
        assert_eq!(admitted, 50, "{name}");
    }
}

#[tokio::test]
async fn a_key_outlives_the_refill_of_its_bucket() {
    let redis = Redis::start();
    let stores = Stores::new(&redis, "login");
    for pause in [1, 2, 6, 12, 13, 30, 59, 60, 61] {
        let limit = Limit::new(&format!("every{pause}"), bucket(5, 60 * SECOND, 5));
        let start = stores.clock.now_us();
        // In parts of a token: one comes back each second, twelve are a token.
        let mut parts = 5 * 12;
        for burst in 0..600 / pause {
            stores.clock.set(start + burst * pause * SECOND);
            let mut admitted = 0;
            for _ in 0..6 {
                admitted += stores.call(Operation::Check, &[limit.charge(1, 1)]).await.granted;
            }
            assert_eq!(admitted, parts / 12, "burst {burst} after pauses of {pause} s");
            parts = (parts % 12 + pause).min(5 * 12);
            redis.age(pause as i64 * 1000);
        }
    }
}

#[tokio::test]
async fn a_month_has_its_own_days() {
    let redis = Redis::start();
    let stores = Stores::new(&redis, "calendar");
    let (day, hour) = (24, 1);
    for (unit, zone, start, hours) in [
        (CalendarUnit::Month, "UTC", "2027-01-01T00:00:00Z", 31 * day),
        (CalendarUnit::Month, "UTC", "2027-02-01T00:00:00Z", 28 * day),
        (CalendarUnit::Month, "UTC", "2028-02-01T00:00:00Z", 29 * day),
        (CalendarUnit::Month, "UTC", "2027-04-01T00:00:00Z", 30 * day),
        // Summer time begins and ends.
        (CalendarUnit::Month, "Europe/Berlin", "2027-02-28T23:00:00Z", 31 * day - hour),
        (CalendarUnit::Month, "Europe/Berlin", "2027-09-30T22:00:00Z", 31 * day + hour),
        (CalendarUnit::Day, "Europe/Berlin", "2027-03-27T23:00:00Z", day - hour),
        (CalendarUnit::Day, "Europe/Berlin", "2027-10-30T22:00:00Z", day + hour),
        (CalendarUnit::Day, "America/New_York", "2027-11-07T04:00:00Z", day + hour),
        // By half an hour.
        (CalendarUnit::Day, "Australia/Lord_Howe", "2027-01-01T13:00:00Z", day),
        // A Monday.
        (CalendarUnit::Week, "UTC", "2027-01-04T00:00:00Z", 7 * day),
        (CalendarUnit::Week, "Europe/Berlin", "2027-03-21T23:00:00Z", 7 * day - hour),
        (CalendarUnit::Year, "UTC", "2028-01-01T00:00:00Z", 366 * day),
        (CalendarUnit::Year, "Asia/Tokyo", "2026-12-31T15:00:00Z", 365 * day),
    ] {
        let what = format!("{unit:?} of {zone} from {start}");
        let limit = Limit::new("limit", calendar(2, unit, zone));
        let start = start.parse::<jiff::Timestamp>().unwrap().as_microsecond() as u64;
        let length = hours * 3600 * SECOND;
        let spend = async |at: u64| {
            stores.clock.set(at);
            stores.call(Operation::Check, &[limit.charge(u128::from(start), 2)]).await
        };
        assert_eq!(spend(start - 1).await.outcomes[0].reset_us, 1, "{what}: what was before ends");
        assert_eq!(spend(start).await.outcomes[0].reset_us, length, "{what}");
        let last = spend(start + length - 1).await;
        assert_eq!((last.granted, last.outcomes[0].retry_us), (0, 1), "{what}: to its last µs");
        assert_eq!(spend(start + length).await.granted, 1, "{what}: what follows begins");
    }
}

#[tokio::test]
async fn a_late_refund_makes_no_key() {
    let redis = Redis::start();
    let stores = Stores::new(&redis, "late");
    let rules = every_algorithm(5, 60 * SECOND).into_iter().chain([("concurrency", concurrency(5, 60 * SECOND))]);
    for (name, rule) in rules {
        let limit = Limit::new(name, rule);
        let refund = async || stores.call(Operation::Refund { charged_at: START }, &[limit.charge(1, 3)]).await;
        stores.clock.set(START);
        let full = stores.call(Operation::Check, &[limit.charge(1, 5)]).await;
        assert_eq!(full.granted, 1, "{name}");
        // The window is over, the key still there.
        let later = START + longest_reset(&limit.rule);
        stores.clock.set(later);
        refund().await;
        let again = stores.call(Operation::Check, &[limit.charge(2, 5)]).await;
        assert_eq!(again.outcomes[0].remaining, full.outcomes[0].remaining, "{name}: no more than the limit");
        redis.assert_every_key_expires();
        // The keys are gone.
        redis::cmd("FLUSHALL").exec(&mut redis.connection()).unwrap();
        stores.clock.set(later + longest_reset(&limit.rule));
        refund().await;
        assert!(redis.keys().is_empty(), "{name}: {:?}", redis.keys());
    }
}

#[test]
fn a_busy_redis_is_no_error_for_clients() {
    let redis = Redis::start();
    let mut connection = redis.connection();
    redis::cmd("CONFIG").arg("SET").arg("lua-time-limit").arg(20).exec(&mut connection).unwrap();
    let gateway = Gateway::start(&format!(
        "[store]\nurl = \"{}\"\ntimeout = \"50ms\"\n[limit.l]\nby = \"ip\"\nquota = \"100000/24h\"\non_store_error = \"allow\"\n\
         [[route]]\nname = \"r\"\npath = \"/r\"\nlimits = [\"l\"]\nrespond = {{ status = 200 }}\n",
        redis.url()
    ));
    let mut client = gateway.client();
    let mut decided_by_store = || loop {
        let reply = client.get("/r");
        // Until it is known whether Redis is late or gone.
        if reply.status != 503 {
            assert_eq!(reply.status, 200);
            return reply.header("ratelimit").is_some();
        }
        assert_eq!(reply.header("retry-after"), Some("1"));
    };
    eventually("Redis decides", &mut decided_by_store);
    std::thread::scope(|scope| {
        let mut blocker = redis.connection();
        let script = scope.spawn(move || redis::cmd("EVAL").arg("while true do end").arg(0).exec(&mut blocker));
        // First it is silent, then it answers that it is busy.
        eventually("requests pass without it", || !decided_by_store());
        let killed = || redis::cmd("SCRIPT").arg("KILL").exec(&mut redis.connection()).is_ok();
        eventually("the script is killed", killed);
        assert!(script.join().unwrap().is_err(), "it did not end by itself");
    });
    eventually("Redis decides again", &mut decided_by_store);
}

#[test]
fn no_two_identities_share_a_key() {
    // What keys are made of, the tag of a header's value, and the first bytes of a length.
    const LETTERS: [&str; 5] = ["h", "{", "}", ":", "\0"];
    /// All texts of up to so many of the letters.
    fn texts(length: u32) -> Vec<String> {
        let mut all = vec![String::new()];
        let mut last = all.clone();
        for _ in 0..length {
            last = last.iter().flat_map(|text| LETTERS.map(|letter| format!("{text}{letter}"))).collect();
            all.extend_from_slice(&last);
        }
        all
    }
    let hasher = IdentityHasher::new("test");
    let mut seen: HashMap<Identity, Vec<(u8, String)>> = HashMap::new();
    let mut encoder = IdentityEncoder::default();
    let mut add = |parts: &[(u8, &str)]| {
        encoder.clear();
        parts.iter().for_each(|(tag, text)| encoder.push(*tag, text.as_bytes()));
        let parts = parts.iter().map(|(tag, text)| (*tag, (*text).to_owned())).collect();
        if let Some(other) = seen.insert(hasher.hash(encoder.as_bytes()), parts) {
            panic!("{other:?} shares its key with another");
        }
    };
    let (short, middle, long) = (texts(2), texts(3), texts(6));
    for text in &long {
        for tag in [b'h', b'k', b'i'] {
            add(&[(tag, text)]);
        }
    }
    for one in &middle {
        for other in &middle {
            add(&[(b'h', one), (b'h', other)]);
            add(&[(b'h', one), (b'q', other)]);
        }
    }
    for one in &short {
        for two in &short {
            for three in &short {
                add(&[(b'h', one), (b'h', two), (b'h', three)]);
            }
        }
    }
    assert!(seen.len() > 100_000, "{} identities", seen.len());
}
