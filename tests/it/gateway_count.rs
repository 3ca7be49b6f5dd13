//! Gateways count themselves in Redis, so that their local shares of a limit together are the limit.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;

use crate::support::admin_listener::{metric, with_admin};
use crate::support::client::{Client, load};
use crate::support::cluster::Cluster;
use crate::support::gateway::Gateway;
use crate::support::redis::Redis;
use crate::support::{MAX_WAIT, eventually, signal};
use sluicegate::limiter::gateway_count::ENTRY_TTL;
use sluicegate::limiter::redis::server::RedisEndpoint;
use sluicegate::limiter::redis::{RedisDeployment, RedisSettings};
use sluicegate::limiter::shared_data::SharedData;
use sluicegate::limiter::store::RedisStore;

const KEY: &str = "rl:gateways";

fn config(url: &str, store: &str) -> String {
    with_admin(&format!(
        "[store]\nurl = \"{url}\"\n{store}\n\
         [limit.l]\nby = \"global\"\nquota = \"40/24h\"\nalgorithm = \"sliding-log\"\n\
         [[route]]\nname = \"r\"\npath = \"/r\"\nlimits = [\"l\"]\nrespond = {{ status = 200 }}\n"
    ))
}

fn counted(gateway: &Gateway) -> u64 {
    metric(gateway, "sluicegate_store_gateways") as u64
}

fn admitted(gateway: &Gateway) -> usize {
    load(&[gateway.address], 1, 41, "/r", &[]).iter().filter(|status| **status == 200).count()
}

fn entries(redis: &Redis) -> u64 {
    redis::cmd("ZCARD").arg(KEY).query(&mut redis.connection()).unwrap()
}

#[test]
fn shares_of_gateways_that_start_and_stop_are_together_the_limit() {
    let redis = Redis::start();
    let port = redis.port;
    let text = config(&redis.url(), "");
    let mut gateways: Vec<_> = [(); 3].map(|()| Gateway::start(&text)).into();
    eventually("three are counted", || gateways.iter().all(|gateway| counted(gateway) == 3));
    redis.assert_every_key_expires();
    drop(redis);
    // 14 + 14 + 14: a third of 40, rounded up.
    assert_eq!(gateways.iter().map(admitted).collect::<Vec<_>>(), [14, 14, 14]);
    // A gateway that starts during the outage knows only the minimum.
    let late = Gateway::start(&config(&format!("redis://127.0.0.1:{port}"), "gateway_count = 8"));
    assert_eq!((counted(&late), admitted(&late)), (8, 5));
    drop(late);

    let redis = Redis::start_on(port).expect("the port is still free");
    gateways.push(Gateway::start(&text));
    eventually("four are counted", || gateways.iter().all(|gateway| counted(gateway) == 4));
    // A reload keeps the number, and applies a new minimum.
    gateways[0].put(&config(&redis.url(), "gateway_count = 2"));
    signal(&gateways[0].child, "HUP");
    eventually("the configuration is reloaded", || gateways[0].log().contains("configuration reloaded"));
    assert_eq!(counted(&gateways[0]), 4);
    let mut stopped = gateways.pop().unwrap();
    stopped.terminate();
    stopped.wait();
    assert_eq!(entries(&redis), 3, "a gateway that stops removes its entry");
    let mut killed = gateways.pop().unwrap();
    signal(&killed.child, "KILL");
    killed.wait();
    assert_eq!(entries(&redis), 3, "the entry of a killed gateway remains until it expires");
    let ttl_ms: u64 = redis::cmd("PTTL").arg(KEY).query(&mut redis.connection()).unwrap();
    assert!(ttl_ms <= ENTRY_TTL.as_millis() as u64, "{ttl_ms}");
    drop(redis);
    assert!(gateways.iter().all(|gateway| counted(gateway) == 4), "a smaller number is used only after a minute");
    let shares: Vec<_> = gateways.iter().map(admitted).collect();
    assert_eq!(shares, [0, 0], "a quarter is less than was used");
}

#[test]
fn gateways_without_the_permission_use_the_configured_number() {
    let redis = Redis::start();
    let rules = ["SETUSER", "g", "on", ">p", "~*", "&*", "+@all", "-zadd"];
    redis::cmd("ACL").arg(&rules).exec(&mut redis.connection()).unwrap();
    let gateway = Gateway::start(&config(&redis.url(), "username = \"g\"\npassword = \"p\"\ngateway_count = 4"));
    eventually("the gateway warns", || gateway.log().contains("cannot count the gateways"));
    assert_eq!(counted(&gateway), 4);
    drop(redis);
    assert_eq!(admitted(&gateway), 10);
}

/// A gateway of an earlier version finds only states with separate keys.
#[test]
fn states_move_to_the_key_of_their_identity_while_there_is_no_gateway_of_an_earlier_version() {
    let redis = Redis::start();
    let mut connection = redis.connection();
    let expires_at_s: (u64, u64) = redis::cmd("TIME").query(&mut connection).unwrap();
    let expires_at_us = (expires_at_s.0 + ENTRY_TTL.as_secs()) * 1_000_000;
    redis::cmd("ZADD").arg(KEY).arg(expires_at_us).arg("0123456789abcdef").exec(&mut connection).unwrap();
    let text = config(&redis.url(), "").replace("sliding-log", "fixed-window").replace("40/24h", "1000000/24h");
    let text = text.replace("\"global\"", "\"ip\"");
    let gateways = [(); 2].map(|()| Gateway::start(&text));
    let remaining = |gateway: &Gateway| gateway.client().get("/r").remaining("l");
    let has_key = |end: &str| redis.keys().iter().any(|key| key.ends_with(end));
    assert_eq!((remaining(&gateways[0]), remaining(&gateways[1])), (999_999, 999_998));
    assert!(has_key("}:l:f86400000000") && !has_key("}:states"), "{:?}", redis.keys());

    redis::cmd("ZREM").arg(KEY).arg("0123456789abcdef").exec(&mut connection).unwrap();
    let mut expected = 999_998;
    eventually("the state has moved", || {
        expected -= 1;
        assert_eq!(remaining(&gateways[expected as usize % 2]), expected, "the count continues");
        has_key("}:states")
    });
    assert!(!has_key("}:l:f86400000000"), "{:?}", redis.keys());
    assert_eq!(gateways.each_ref().map(remaining), [expected - 1, expected - 2], "both gateways find the state");

    redis::cmd("ZADD").arg(KEY).arg(expires_at_us).arg("0123456789abcdef").exec(&mut connection).unwrap();
    let mut address = Ipv4Addr::LOCALHOST.to_bits();
    eventually("new states get separate keys again", || {
        address += 1;
        let mut client = Client::connect_from(Ipv4Addr::from_bits(address).into(), gateways[0].address);
        assert_eq!(client.get("/r").remaining("l"), 999_999, "a new identity");
        has_key("}:l:f86400000000")
    });
    assert_eq!(
        gateways.each_ref().map(remaining),
        [expected - 3, expected - 4],
        "the count of the old state continues"
    );
    redis.assert_every_key_expires();
}

#[test]
fn gateways_of_a_cluster_count_themselves() {
    let cluster = Cluster::start(3, 0);
    let gateways = [(); 2].map(|()| Gateway::start(&config(&cluster.url(), "")));
    eventually("two are counted", || gateways.iter().all(|gateway| counted(gateway) == 2));
}

/// Fifty gateways use one client, because entries differ only by their ids.
#[tokio::test]
async fn entries_expire_by_the_clock_of_redis_and_fit_into_a_full_redis() {
    let redis = Redis::start();
    let settings = RedisSettings { timeout: MAX_WAIT, ..RedisSettings::default() };
    let deployment = RedisDeployment::Single(RedisEndpoint::Single(redis.client()));
    let store = RedisStore::new(&deployment, &settings, Arc::default(), Arc::default(), Arc::default());
    let data = SharedData(&store);
    let mut connection = redis.connection();
    for number in 1..=50 {
        assert_eq!(data.count_gateways(&format!("g{number}"), ENTRY_TTL).await.unwrap(), (number, number));
        assert_eq!(
            data.count_gateways(&format!("g{number}"), ENTRY_TTL).await.unwrap(),
            (number, number),
            "an entry is renewed"
        );
    }
    for number in 2..=50 {
        let left = data.count_gateways(&format!("g{number}"), Duration::ZERO).await.unwrap();
        assert_eq!(left.0, 51 - number, "an entry is removed");
    }
    // An entry that has expired, and one that was written before the clock was set back by an hour.
    let now: (u64, u64) = redis::cmd("TIME").query(&mut connection).unwrap();
    for (id, expires_at_s) in [("dead", now.0), ("future", now.0 + 3600)] {
        redis::cmd("ZADD").arg(KEY).arg(expires_at_s * 1_000_000).arg(id).exec(&mut connection).unwrap();
    }
    assert_eq!(data.count_gateways("g1", ENTRY_TTL).await.unwrap(), (1, 1));
    for (name, value) in [("maxmemory-policy", "noeviction"), ("maxmemory", "1")] {
        redis::cmd("CONFIG").arg("SET").arg(name).arg(value).exec(&mut connection).unwrap();
    }
    assert_eq!(data.count_gateways("g2/2", ENTRY_TTL).await.unwrap(), (2, 1));
    redis::cmd("CONFIG").arg("SET").arg("maxmemory").arg("0").exec(&mut connection).unwrap();
    redis::cmd("SET").arg(KEY).arg("x").exec(&mut connection).unwrap();
    assert!(data.count_gateways("g1", ENTRY_TTL).await.is_err(), "another program uses the key");
}
