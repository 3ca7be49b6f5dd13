//! Each item describes a known defect of rate limiters, and names a test which shows that Sluicegate does not have this
//! defect:
//!
//! - Two separate commands increment the counter and set its TTL, so a crash between them leaves a key without TTL:
//!   `killed_gateway_leaves_no_key_without_ttl`.
//! - Every request extends the TTL, so steady traffic below the limit is locked out:
//!   `extended_ttl_does_not_lock_out_steady_traffic`.
//! - Denied requests are added to the log of requests, so memory grows and the lockout never ends:
//!   `denials_take_no_memory` in `invariants.rs`.
//! - The log of requests is a sorted set of timestamps, so several requests in the same microsecond count as one:
//!   `burst_at_one_instant_is_counted_in_full`.
//! - The key expires between two commands, which locks the client out permanently:
//!   `key_that_expires_between_two_calls_does_not_lock_out`.
//! - Many concurrent requests pass the check before the first one is counted:
//!   `concurrent_first_requests_admit_exactly_the_limit`.
//! - The key contains only the minute of the hour, so a window one hour later has the same key:
//!   `window_an_hour_later_has_its_own_count`.
//! - Each gateway uses its own clock, so several gateways admit more than the limit:
//!   `gateways_with_different_clocks_admit_the_limit_once`.
//! - The TTL is shorter than the refill time, so a client gets a full burst too early:
//!   `key_outlives_the_refill_of_its_bucket`.
//! - Every month is treated as 30 days, and weeks start on Thursday, the weekday of the Unix epoch:
//!   `calendar_months_have_their_own_length`.
//! - One limit denies a request, but the request is charged to another limit: `denied_request_is_charged_to_no_limit`
//!   in `limits.rs`.
//! - A reply of Redis is lost, and the repeated call is charged a second time: `call_without_reply_is_charged_once` in
//!   `distributed.rs`.
//! - Clients get errors because a script is missing after SCRIPT FLUSH: `script_flush_under_load_causes_no_error` in
//!   `distributed.rs`.
//! - Retry-After is rounded down, so a client that waits for this time is denied again:
//!   `client_that_waits_for_retry_after_is_admitted` in `limits.rs`.
//! - A refund after the end of the window creates a key with a negative count that never expires:
//!   `late_refund_creates_no_key`.
//! - The gateway crashes, and its requests in flight occupy a concurrency limit forever:
//!   `killed_gateway_frees_its_permits_after_the_permit_ttl` in `concurrency.rs`.
//! - While the store is down, all clients get errors or wait for seconds:
//!   `without_redis_each_limit_follows_on_store_error` and `stopped_redis_costs_one_timeout_and_crosses_no_replies`
//!   in `distributed.rs`, `busy_redis_causes_no_client_error`.
//! - The key contains the text of the identity, so different identities can have the same key:
//!   `no_two_identities_share_a_key`, and `hostile_identities_have_their_own_buckets` in `identity.rs`.

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
use sluicegate::clock::Clock;
use sluicegate::limiter::key::{Identity, IdentityEncoder, IdentityHasher};
use sluicegate::limiter::quota::CalendarUnit;
use sluicegate::limiter::verdict::Operation;

/// Start a gateway with these limits on `/r`. Without a denial cache, the gateway calls Redis for every request.
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
fn killed_gateway_leaves_no_key_without_ttl() {
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
        // Send requests without waiting for responses, so that calls are in flight when the gateway is killed.
        let mut streams: Vec<_> = (0..8).map(|_| TcpStream::connect(gateway.address).unwrap()).collect();
        for (id, stream) in streams.iter_mut().enumerate() {
            let request = format!("GET /r HTTP/1.1\r\nHost: a\r\nX-Id: {round}-{id}\r\n\r\n");
            stream.write_all(request.repeat(500).as_bytes()).unwrap();
        }
        eventually("the gateway counts the request", || redis.calls("evalsha") > calls + 20 * round);
        gateway.child.kill().unwrap();
        gateway.child.wait().unwrap();
        assert!(redis.keys().len() > limits.len(), "{:?}", redis.keys());
        redis.assert_every_key_expires();
    }
}

#[tokio::test]
async fn extended_ttl_does_not_lock_out_steady_traffic() {
    let redis = Redis::start();
    let stores = Stores::new(&redis, "steady");
    for (name, rule) in every_algorithm(5, SECOND).into_iter().filter(|(name, _)| *name != "calendar") {
        let limit = Limit::new(name, rule);
        // The requests are 600 ms apart, so each one arrives before the window of 1 s ends.
        for hit in 1..=500 {
            stores.clock.set(START + hit * 600_000);
            assert_eq!(stores.check(&limit).await.retry_us, 0, "{name}: hit {hit}");
            redis.age(600);
        }
    }
}

#[tokio::test]
async fn burst_at_one_instant_is_counted_in_full() {
    let redis = Redis::start();
    let stores = Stores::new(&redis, "burst");
    for (name, rule) in every_algorithm(20, 60 * SECOND) {
        let limit = Limit::new(name, rule);
        let mut left = Vec::new();
        for _ in 0..20 {
            left.push(stores.check(&limit).await.remaining);
        }
        assert_eq!(left, (0..20).rev().collect::<Vec<_>>(), "{name}");
        assert_ne!(stores.check(&limit).await.retry_us, 0, "{name}: one request too many");
    }
}

#[test]
fn key_that_expires_between_two_calls_does_not_lock_out() {
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
        // After the key expires, the limit starts with its full quota.
        assert!(admitted >= 20, "{limit}: {admitted} admitted");
        redis.assert_every_key_expires();
        expire();
        eventually("the last key expires", || redis.keys().is_empty());
        let statuses = load(&[gateway.address], 1, 7, "/r", &[]);
        assert_eq!(statuses, [200, 200, 200, 200, 200, 429, 429], "{limit}: a new key starts with the full quota");
        redis::cmd("FLUSHALL").exec(&mut redis.connection()).unwrap();
    }
}

#[test]
fn concurrent_first_requests_admit_exactly_the_limit() {
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
async fn window_an_hour_later_has_its_own_count() {
    let redis = Redis::start();
    let stores = Stores::new(&redis, "later");
    for (name, rule) in every_algorithm(3, 60 * SECOND).into_iter().filter(|(name, _)| *name != "calendar") {
        let limit = Limit::new(name, rule);
        // Only the clock of the scripts advances, so the key still exists in Redis.
        for hour in 0..5 {
            stores.clock.set(START + hour * 3600 * SECOND);
            for left in [2, 1, 0] {
                assert_eq!(stores.check(&limit).await.remaining, left, "{name}: hour {hour}");
            }
            assert_ne!(stores.check(&limit).await.retry_us, 0, "{name}: hour {hour}");
        }
    }
    assert_eq!(redis.keys().len(), 3, "one key for the states with three numbers: {:?}", redis.keys());
}

#[tokio::test]
async fn gateways_with_different_clocks_admit_the_limit_once() {
    let redis = Redis::start();
    let hour = 3600 * SECOND as i64;
    let gateways =
        [Clock::Store, Clock::Skewed(hour), Clock::Skewed(-hour)].map(|clock| redis_store(&redis, "skew", clock));
    // Each window is ten years long, so that no window begins during the test.
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
async fn key_outlives_the_refill_of_its_bucket() {
    let redis = Redis::start();
    let stores = Stores::new(&redis, "login");
    for pause in [1, 2, 6, 12, 13, 30, 59, 60, 61] {
        let limit = Limit::new(&format!("every{pause}"), bucket(5, 60 * SECOND, 5));
        let start = stores.clock.now_us();
        // The content of the bucket in twelfths of a token. One twelfth refills per second.
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
async fn calendar_months_have_their_own_length() {
    let redis = Redis::start();
    let stores = Stores::new(&redis, "calendar");
    // In minutes.
    let (day, hour) = (24 * 60, 60);
    for (unit, zone, start, minutes) in [
        (CalendarUnit::Month, "UTC", "2027-01-01T00:00:00Z", 31 * day),
        (CalendarUnit::Month, "UTC", "2027-02-01T00:00:00Z", 28 * day),
        (CalendarUnit::Month, "UTC", "2028-02-01T00:00:00Z", 29 * day),
        (CalendarUnit::Month, "UTC", "2027-04-01T00:00:00Z", 30 * day),
        // Daylight saving time begins or ends in these windows.
        (CalendarUnit::Month, "Europe/Berlin", "2027-02-28T23:00:00Z", 31 * day - hour),
        (CalendarUnit::Month, "Europe/Berlin", "2027-09-30T22:00:00Z", 31 * day + hour),
        (CalendarUnit::Day, "Europe/Berlin", "2027-03-27T23:00:00Z", day - hour),
        (CalendarUnit::Day, "Europe/Berlin", "2027-10-30T22:00:00Z", day + hour),
        (CalendarUnit::Day, "America/New_York", "2027-11-07T04:00:00Z", day + hour),
        // In this time zone, the clock is set back by only half an hour.
        (CalendarUnit::Day, "Australia/Lord_Howe", "2027-04-03T13:00:00Z", day + hour / 2),
        // Weeks start on Monday.
        (CalendarUnit::Week, "UTC", "2027-01-04T00:00:00Z", 7 * day),
        (CalendarUnit::Week, "Europe/Berlin", "2027-03-21T23:00:00Z", 7 * day - hour),
        (CalendarUnit::Year, "UTC", "2028-01-01T00:00:00Z", 366 * day),
        (CalendarUnit::Year, "Asia/Tokyo", "2026-12-31T15:00:00Z", 365 * day),
    ] {
        let what = format!("{unit:?} of {zone} from {start}");
        let limit = Limit::new("limit", calendar(2, unit, zone));
        let start = start.parse::<jiff::Timestamp>().unwrap().as_microsecond() as u64;
        let length = minutes * 60 * SECOND;
        let spend = async |at: u64| {
            stores.clock.set(at);
            stores.call(Operation::Check, &[limit.charge(u128::from(start), 2)]).await
        };
        assert_eq!(spend(start - 1).await.outcomes[0].reset_us, 1, "{what}: the previous window ends");
        assert_eq!(spend(start).await.outcomes[0].reset_us, length, "{what}");
        let last = spend(start + length - 1).await;
        assert_eq!((last.granted, last.outcomes[0].retry_us), (0, 1), "{what}: the last µs of the window");
        assert_eq!(spend(start + length).await.granted, 1, "{what}: the next window begins");
    }
}

#[tokio::test]
async fn late_refund_creates_no_key() {
    let redis = Redis::start();
    let stores = Stores::new(&redis, "late");
    let rules = every_algorithm(5, 60 * SECOND).into_iter().chain([("concurrency", concurrency(5, 60 * SECOND))]);
    for (name, rule) in rules {
        let limit = Limit::new(name, rule);
        let refund = async || stores.call(Operation::Refund { charged_at: START }, &[limit.charge(1, 3)]).await;
        stores.clock.set(START);
        let full = stores.call(Operation::Check, &[limit.charge(1, 5)]).await;
        assert_eq!(full.granted, 1, "{name}");
        // The window has ended, but the key still exists.
        let later = START + longest_reset(&limit.rule);
        stores.clock.set(later);
        refund().await;
        let again = stores.call(Operation::Check, &[limit.charge(2, 5)]).await;
        assert_eq!(again.outcomes[0].remaining, full.outcomes[0].remaining, "{name}: no more than the limit");
        redis.assert_every_key_expires();
        // Refund again after the keys are deleted.
        redis::cmd("FLUSHALL").exec(&mut redis.connection()).unwrap();
        stores.clock.set(later + longest_reset(&limit.rule));
        refund().await;
        assert!(redis.keys().is_empty(), "{name}: {:?}", redis.keys());
    }
}

#[test]
fn busy_redis_causes_no_client_error() {
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
        // The gateway responds with 503 until the breaker opens.
        if reply.status != 503 {
            assert_eq!(reply.status, 200);
            return reply.header("ratelimit").is_some();
        }
        assert_eq!(reply.header("retry-after"), Some("1"));
    };
    eventually("Redis performs the checks", &mut decided_by_store);
    std::thread::scope(|scope| {
        let mut blocker = redis.connection();
        let script = scope.spawn(move || redis::cmd("EVAL").arg("while true do end").arg(0).exec(&mut blocker));
        // While the script runs, Redis does not reply at first. Later, it replies with the error BUSY.
        eventually("requests are admitted without the store", || !decided_by_store());
        let killed = || redis::cmd("SCRIPT").arg("KILL").exec(&mut redis.connection()).is_ok();
        eventually("the script is killed", killed);
        assert!(script.join().unwrap().is_err(), "the script ended by itself");
    });
    eventually("Redis performs the checks again", &mut decided_by_store);
}

#[test]
fn no_two_identities_share_a_key() {
    // Characters that have a meaning in keys: `h` tags a header value, `{`, `}` and `:` are delimiters, and NUL is a
    // byte of an encoded length.
    const LETTERS: [&str; 5] = ["h", "{", "}", ":", "\0"];
    /// Return all strings of at most `length` of these characters.
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
