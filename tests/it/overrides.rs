//! Overrides survive the loss of Redis data: gateways write back the newest records that they know.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::support::client::{Client, Reply};
use crate::support::gateway::Gateway;
use crate::support::redis::Redis;
use crate::support::{eventually, signal};
use serde_json::{Value, json};
use sluicegate::clock::monotonic;
use sluicegate::limiter::redis::overrides;
use sluicegate::limiter::redis::overrides::{
    KnownRevision, OverrideEntry, OverrideWrite, WriteStatus, parse_restore_reply,
};

const HASH: &str = "rl:overrides";

/// Maximum time until an override applies again after Redis has returned. It covers a probe of the circuit breaker, a
/// poll of the overrides, and delays on a busy machine.
const SOON: Duration = Duration::from_secs(5);

fn config(redis: &Redis) -> String {
    format!(
        "{}[admin]\naddress = \"127.0.0.1:0\"\ntoken = \"open-sesame\"\n\
         [limit.one]\nby = \"header:x-id\"\nalgorithm = \"fixed-window\"\nquota = \"3/day\"\n\
         [[route]]\nname = \"r\"\npath = \"/r\"\nlimits = [\"one\"]\nrespond = {{ status = 200 }}\n",
        redis.store()
    )
}

fn request(gateway: &Gateway, method: &str, path: &str, body: &str) -> Reply {
    let headers = [("authorization", "Bearer open-sesame"), ("content-type", "application/json")];
    Client::connect(gateway.admin()).request(method, path, &headers, body.as_bytes())
}

fn set(gateway: &Gateway, identity: u128, quota: &str, lasts: &str) -> Reply {
    let body = json!({"limit": "one", "identity": format!("{identity:032x}"), "quota": quota, "ttl": lasts});
    request(gateway, "POST", "/api/overrides", &body.to_string())
}

fn remove(gateway: &Gateway, identity: u128) -> bool {
    let reply = request(gateway, "DELETE", &format!("/api/overrides?limit=one&identity={identity:032x}"), "");
    assert_eq!(reply.status, 200, "{}", reply.text());
    reply.json()["removed"].as_bool().unwrap()
}

/// Return the response of `GET /api/overrides`.
fn all(gateway: &Gateway) -> Value {
    let reply = request(gateway, "GET", "/api/overrides", "");
    assert_eq!(reply.status, 200, "{}", reply.text());
    reply.json()
}

/// Return the quotas of all overrides, keyed by the identity as a number.
fn quotas(all: &Value) -> BTreeMap<u128, String> {
    let quota = |one: &Value| {
        let identity = u128::from_str_radix(one["identity"].as_str().unwrap(), 16).unwrap();
        (identity, one["quota"].as_str().unwrap().to_owned())
    };
    all["overrides"].as_array().unwrap().iter().map(quota).collect()
}

fn expected(quotas: &[(u128, &str)]) -> BTreeMap<u128, String> {
    quotas.iter().map(|(identity, quota)| (*identity, (*quota).to_owned())).collect()
}

fn field(identity: u128) -> String {
    format!("size/one/{identity:032x}")
}

/// Return all fields and values of the overrides hash in Redis.
fn stored(redis: &Redis) -> BTreeMap<String, String> {
    redis::cmd("HGETALL").arg(HASH).query(&mut redis.connection()).unwrap()
}

/// Return the three numbers of a record: its expiry, its revision, and the time until which the record is kept.
fn numbers(value: &str) -> [u64; 3] {
    let mut words = value.split(' ').map(|word| word.parse().unwrap());
    std::array::from_fn(|_| words.next().unwrap())
}

fn command(redis: &Redis, words: &[&str]) {
    redis::cmd(words[0]).arg(&words[1..]).exec(&mut redis.connection()).unwrap();
}

/// Kill Redis and start an empty server on its port.
fn restart_empty(redis: &mut Redis) {
    redis.child.kill().unwrap();
    redis.child.wait().unwrap();
    start_again(redis);
}

fn start_again(redis: &mut Redis) {
    *redis = Redis::start_on(redis.port).expect("the port is free again");
    assert_eq!(redis.keys(), Vec::<String>::new());
}

#[test]
fn restart_without_persistence_keeps_the_newest_overrides() {
    let mut redis = Redis::start();
    let config = config(&redis);
    let gateways = [Gateway::start(&config), Gateway::start(&config)];
    for identity in 1..=3 {
        assert_eq!(set(&gateways[0], identity, "10/day", "1h").status, 200);
    }
    let first = expected(&[(1, "10/day"), (2, "10/day"), (3, "10/day")]);
    eventually("both gateways have all overrides", || gateways.iter().all(|gateway| quotas(&all(gateway)) == first));
    // Stop the second gateway, so that it misses the last changes before Redis loses its data.
    signal(&gateways[1].child, "STOP");
    assert!(remove(&gateways[0], 2));
    assert_eq!(set(&gateways[0], 3, "20/day", "1h").status, 200);
    let before = stored(&redis);
    redis.child.kill().unwrap();
    redis.child.wait().unwrap();
    let newest = expected(&[(1, "10/day"), (3, "20/day")]);
    let without_store = all(&gateways[0]);
    assert_eq!(quotas(&without_store), newest, "the overrides apply without the store");
    assert!(without_store["store_error"].as_str().unwrap().contains("store"), "{without_store}");
    // Only the second gateway, which has the old records, reaches the empty Redis server.
    signal(&gateways[0].child, "STOP");
    start_again(&mut redis);
    signal(&gateways[1].child, "CONT");
    let has = |redis: &Redis, identity: u128, text: &str| {
        stored(redis).get(&field(identity)).is_some_and(|value| value.contains(text))
    };
    eventually("the second gateway restores its records", || has(&redis, 2, "10/day") && has(&redis, 3, "10/day"));
    signal(&gateways[0].child, "CONT");
    eventually("the newest revision wins", || gateways.iter().all(|gateway| quotas(&all(gateway)) == newest));
    let after = stored(&redis);
    assert_eq!(after.keys().collect::<Vec<_>>(), before.keys().collect::<Vec<_>>());
    for (field, value) in &after {
        let (now, was) = (numbers(value), numbers(&before[field]));
        assert_eq!(now[1], was[1], "{field}: the revision does not change");
        assert!(now[0] <= was[0] && now[2] <= was[2], "{field}: the expiry is not extended: {now:?} {was:?}");
    }
    redis.assert_every_key_expires();
    // Both gateways have the newest records, so the order in which they restore the records does not matter.
    restart_empty(&mut redis);
    let back = monotonic();
    eventually("all records are restored", || stored(&redis).len() == 3);
    assert!(back.elapsed() < SOON, "{:?}", back.elapsed());
    let third = Gateway::start(&config);
    eventually("a new gateway has the override", || quotas(&all(&third)) == newest);
    assert!(gateways.iter().all(|gateway| quotas(&all(gateway)) == newest));
    assert!(gateways.iter().any(|gateway| gateway.log().contains("restored overrides that the store lost")));
}

#[test]
fn flush_keeps_overrides_and_removals() {
    let redis = Redis::start();
    let config = config(&redis);
    let gateways = [Gateway::start(&config), Gateway::start(&config)];
    assert_eq!(set(&gateways[0], 1, "10/day", "1h").status, 200);
    assert_eq!(set(&gateways[0], 2, "10/day", "1h").status, 200);
    eventually("both gateways have the overrides", || gateways.iter().all(|gateway| quotas(&all(gateway)).len() == 2));
    assert!(remove(&gateways[1], 2));
    assert!(!remove(&gateways[1], 2), "once");
    let revisions = |redis: &Redis| -> Vec<_> {
        stored(redis).into_iter().map(|(field, value)| (field, numbers(&value)[1])).collect()
    };
    let before = revisions(&redis);
    for _ in 0..2 {
        command(&redis, &["FLUSHALL"]);
        // The first gateway may restore the removed override until the second gateway writes the removal.
        eventually("both records are restored", || revisions(&redis) == before);
    }
    let rest = expected(&[(1, "10/day")]);
    eventually("one override applies", || gateways.iter().all(|gateway| quotas(&all(gateway)) == rest));
    // Remove an override whose record Redis has just lost.
    command(&redis, &["FLUSHALL"]);
    assert!(remove(&gateways[0], 1));
    eventually("the override is removed on both gateways", || {
        gateways.iter().all(|gateway| quotas(&all(gateway)).is_empty())
    });
    // A removed override can be set again.
    assert_eq!(set(&gateways[0], 2, "30/day", "1h").status, 200);
    eventually("the override applies", || quotas(&all(&gateways[1])) == expected(&[(2, "30/day")]));
}

#[test]
fn override_that_replaced_a_longer_one_does_not_bring_it_back() {
    let redis = Redis::start();
    let config = config(&redis);
    let gateways = [Gateway::start(&config), Gateway::start(&config)];
    assert_eq!(set(&gateways[0], 1, "10/day", "1h").status, 200);
    eventually("both gateways have the override", || gateways.iter().all(|gateway| quotas(&all(gateway)).len() == 1));
    signal(&gateways[1].child, "STOP");
    assert_eq!(set(&gateways[0], 1, "20/day", "5s").status, 200);
    eventually("the override expires", || quotas(&all(&gateways[0])).is_empty());
    let [expiry, revision, kept] = numbers(&stored(&redis)[&field(1)]);
    assert!(kept > expiry + 3_000_000_000, "kept as long as the record that it replaced: {expiry} {kept}");
    // The second gateway restores its older record, then the first gateway replaces this record with the newer one.
    signal(&gateways[0].child, "STOP");
    command(&redis, &["FLUSHALL"]);
    signal(&gateways[1].child, "CONT");
    eventually("the older record is restored", || {
        stored(&redis).get(&field(1)).is_some_and(|value| value.contains("10/day"))
    });
    signal(&gateways[0].child, "CONT");
    eventually("the newer record is restored", || numbers(&stored(&redis)[&field(1)])[1] == revision);
    eventually("no override applies", || gateways.iter().all(|gateway| quotas(&all(gateway)).is_empty()));
}

/// Write a record for each identity: expiry, revision, and the time until which the record is kept.
fn plant(redis: &Redis, records: impl Iterator<Item = (u128, [u64; 3])>) {
    let mut command = redis::cmd("HSET");
    command.arg(HASH);
    for (identity, [expiry, revision, kept]) in records {
        let text = if expiry == 0 { String::new() } else { json!({"quota": "5/day"}).to_string() };
        command.arg(field(identity)).arg(format!("{expiry} {revision} {kept} {text}"));
    }
    command.exec(&mut redis.connection()).unwrap();
}

const FAR: u64 = 4_000_000_000_000_000;

#[test]
fn all_overrides_are_written_back_and_removals_are_bounded() {
    let redis = Redis::start();
    let gateway = Gateway::start(&config(&redis));
    plant(&redis, (0..1000).map(|identity| (identity, [FAR, 5, FAR])));
    // Write more removal records than the gateway keeps. The records with the lowest identities have the lowest
    // revisions, so they are the oldest.
    plant(&redis, (2000..3002).map(|identity| (identity, [0, identity as u64, FAR])));
    eventually("the gateway knows all overrides", || quotas(&all(&gateway)).len() == 1000);
    assert_eq!(
        set(&gateway, 1500, "5/day", "1h").status,
        409,
        "1000 overrides are the maximum, without counting removals"
    );
    assert_eq!(set(&gateway, 999, "6/day", "1h").status, 200, "an existing override can be replaced");
    assert!(remove(&gateway, 7));
    let removed = |redis: &Redis| {
        let removed = stored(redis).into_iter().filter(|(_, value)| value.starts_with("0 "));
        removed.map(|(field, _)| field).collect::<Vec<_>>()
    };
    let now = removed(&redis);
    assert_eq!(now.len(), 1000);
    assert!(now.contains(&field(7)) && now.contains(&field(3001)));
    assert!((2000..=2002).all(|oldest| !now.contains(&field(oldest))), "the oldest removals are deleted");
    let before = stored(&redis).into_keys().collect::<Vec<_>>();
    command(&redis, &["FLUSHALL"]);
    eventually("the gateway restores all overrides", || stored(&redis).into_keys().collect::<Vec<_>>() == before);
    assert_eq!(quotas(&all(&gateway)).len(), 999);
    assert_eq!(removed(&redis), now);
}

#[test]
fn records_without_a_revision_apply_and_are_replaced() {
    let redis = Redis::start();
    let gateways = [Gateway::start(&config(&redis)), Gateway::start(&config(&redis))];
    for identity in [1, 2] {
        command(&redis, &["HSET", HASH, &field(identity), &format!("{FAR} {}", json!({"quota": "10/day"}))]);
    }
    let both = expected(&[(1, "10/day"), (2, "10/day")]);
    eventually("both overrides apply", || gateways.iter().all(|gateway| quotas(&all(gateway)) == both));
    // A record without a revision is removed by deleting its field.
    command(&redis, &["HDEL", HASH, &field(2)]);
    assert_eq!(set(&gateways[0], 1, "20/day", "1h").status, 200);
    let newest = expected(&[(1, "20/day")]);
    eventually("the change applies", || gateways.iter().all(|gateway| quotas(&all(gateway)) == newest));
    assert!(numbers(&stored(&redis)[&field(1)])[1] > 0);
    command(&redis, &["FLUSHALL"]);
    eventually("the override is restored", || stored(&redis).into_keys().eq([field(1)]));
}

/// Return the command that sets a field for an hour. The hash may have at most two overrides.
fn set_field(field: &str, value: &str, known: KnownRevision) -> redis::Cmd {
    OverrideWrite { field, known, record: Some((value, Duration::from_secs(3600))) }.command(HASH, 2)
}

#[test]
fn script_does_not_overwrite_a_newer_revision() {
    let redis = Redis::start();
    let mut connection = redis.connection();
    let mut run = |command: redis::Cmd| command.query::<redis::Value>(&mut connection).unwrap();
    let record = |identity: u128, text: &str, revision: u64, expiry_us: u64| OverrideEntry {
        key: field(identity),
        value: text.to_owned(),
        revision,
        expires_at_us: expiry_us,
        keep_until_us: expiry_us.max(1),
    };
    // A gateway that missed the change tries to restore its older record.
    run(set_field(&field(1), "new", KnownRevision::default()));
    let [_, newest, _] = numbers(&stored(&redis)[&field(1)]);
    let before = stored(&redis);
    let older = [record(1, "old", newest - 1, FAR), record(1, "same", newest, FAR)];
    let results = parse_restore_reply(run(overrides::restore_command(HASH, &older, 2))).unwrap();
    assert_eq!((results, stored(&redis)), (vec![WriteStatus::Unchanged; 2], before));
    // Restore four records: one newer than that in Redis, one that Redis has lost, one that has expired, and one beyond
    // the maximum number of overrides.
    let expired = 1_000_000;
    let four = [
        record(1, "newer", newest + 1, FAR),
        record(2, "lost", 5, FAR),
        record(3, "over", 5, expired),
        record(4, "more", 5, FAR),
    ];
    let results = parse_restore_reply(run(overrides::restore_command(HASH, &four, 2))).unwrap();
    assert_eq!(results, [WriteStatus::Written, WriteStatus::Written, WriteStatus::Unchanged, WriteStatus::TooMany]);
    assert_eq!(stored(&redis).into_keys().collect::<Vec<_>>(), [field(1), field(2)]);
    // A change gets a newer revision even if the clock of Redis was set back.
    let known = KnownRevision { revision: FAR, keep_until_us: FAR, is_in_force: true };
    run(set_field(&field(2), "changed", known));
    assert_eq!(numbers(&stored(&redis)[&field(2)])[1..], [FAR + 1, FAR]);
    // The removal of an override is written even if Redis has lost the override.
    let field_5 = field(5);
    let removal = OverrideWrite { field: &field_5, known, record: None };
    let reply = run(removal.command(HASH, 2));
    assert_eq!(removal.parse_reply(reply).unwrap().0, WriteStatus::Written);
    assert_eq!(numbers(&stored(&redis)[&field(5)]), [0, FAR + 1, FAR]);
    // If another gateway has already removed the override, the removal changes nothing.
    let reply = run(removal.command(HASH, 2));
    assert_eq!(removal.parse_reply(reply).unwrap().0, WriteStatus::Unchanged);
}

#[test]
fn record_that_replaces_an_expired_one_is_kept() {
    let redis = Redis::start();
    let mut connection = redis.connection();
    let mut run = |command: redis::Cmd| drop(command.query::<redis::Value>(&mut connection).unwrap());
    // All planted records have expired. Fields 1 and 2 get new records, and field 3 is only deleted.
    plant(&redis, (1..=3).map(|identity| (identity, [1, 1, 1])));
    run(set_field(&field(1), "new", KnownRevision::default()));
    plant(&redis, [2, 3].into_iter().map(|identity| (identity, [1, 1, 1])));
    let lost =
        OverrideEntry { key: field(2), value: "lost".to_owned(), revision: 5, expires_at_us: FAR, keep_until_us: FAR };
    run(overrides::restore_command(HASH, &[lost], 2));
    assert_eq!(stored(&redis).into_keys().collect::<Vec<_>>(), [field(1), field(2)]);
}
