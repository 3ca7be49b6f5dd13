//! Redis Cluster and Sentinel: exact counts while slots migrate, and recovery after failovers. Fault 21 in
//! docs/testing.md.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::support::admin_listener::{ask, metric, with_admin};
use crate::support::client::{Client, load};
use crate::support::cluster::Cluster;
use crate::support::eventually;
use crate::support::gateway::{Gateway, binary};
use crate::support::redis::Redis;
use crate::support::sentinel::Sentinels;
use sluicegate::clock::monotonic;

/// A configuration of `limits` on one route. The tests use windows of ten years, so that no window begins during a
/// test.
fn config(url: &str, deadline: &str, limits: &[(&str, &str)]) -> String {
    let tables = limits.iter().map(|(name, rest)| format!("[limit.{name}]\n{rest}\n"));
    let names: Vec<_> = limits.iter().map(|(name, _)| format!("\"{name}\"")).collect();
    format!(
        "[store]\nurl = \"{url}\"\ntimeout = \"{deadline}\"\ndenial_cache = 0\n{}\
         [[route]]\nname = \"r\"\npath = \"/r\"\nlimits = [{}]\nrespond = {{ status = 200, body = \"ok\" }}\n",
        tables.collect::<String>(),
        names.join(", ")
    )
}

fn count(statuses: &[u16], wanted: u16) -> usize {
    statuses.iter().filter(|status| **status == wanted).count()
}

const FIXED: &str = "by = \"header:x-id\"\nalgorithm = \"fixed-window\"\non_store_error = \"deny\"\n";

/// Return an identity whose key is on this master, and the key's slot.
fn identity_of(cluster: &Cluster, master: &Redis, gateway: &Gateway) -> (String, u16) {
    let mut client = gateway.client();
    for number in 0.. {
        let before: BTreeSet<_> = master.keys().into_iter().collect();
        let name = format!("probe-{}-{number}", master.port);
        assert_eq!(client.get_with("/r", &[("x-id", &name)]).status, 200);
        if let Some(key) = master.keys().into_iter().find(|key| !before.contains(key)) {
            return (name, cluster.slot(&key));
        }
    }
    unreachable!()
}

#[test]
fn cluster_counts_each_identity_exactly_on_any_master() {
    let cluster = Cluster::start(3, 0);
    let two = [("a", &*format!("{FIXED}quota = \"20/3650d\"")), ("b", &*format!("{FIXED}quota = \"1000/3650d\""))];
    let config = config(&cluster.url(), "5s", &two);
    let gateways = [Gateway::start(&config), Gateway::start(&config)];
    let addresses = gateways.each_ref().map(|gateway| gateway.address);
    for identity in 0..30 {
        let statuses = load(&addresses, 8, 64, "/r", &[("x-id", &identity.to_string())]);
        assert_eq!((count(&statuses, 200), count(&statuses, 429)), (20, 44), "identity {identity}");
    }
    for master in cluster.masters() {
        assert!(!master.keys().is_empty(), "each master has some of the keys");
        master.assert_every_key_expires();
    }
    let mut client = gateways[0].client();
    let (before, requests) = (cluster.calls("evalsha"), 20);
    for identity in 0..requests {
        assert_eq!(client.get_with("/r", &[("x-id", &identity.to_string())]).status, 429);
    }
    assert_eq!(cluster.calls("evalsha") - before, requests, "all limits of an identity are checked in one call");
    assert_eq!(gateways[0].warnings(), "");
}

#[test]
fn denied_request_is_refunded_to_limits_of_other_identities() {
    let cluster = Cluster::start(3, 0);
    let by = |header: &str, quota: u32, rest: &str| {
        format!("by = \"header:{header}\"\nquota = \"{quota}/3650d\"\non_store_error = \"deny\"\n{rest}")
    };
    let limits = [
        ("narrow", by("x-a", 3, "algorithm = \"fixed-window\"")),
        ("wide", by("x-b", 1000, "algorithm = \"fixed-window\"")),
        ("log", by("x-c", 1000, "algorithm = \"sliding-log\"")),
        ("bucket", by("x-d", 1000, "")),
        ("shadow", by("x-e", 3, "shadow = true\nalgorithm = \"fixed-window\"")),
    ];
    let flight = "by = \"header:x-f\"\nalgorithm = \"concurrency\"\nquota = \"2\"\non_store_error = \"deny\"";
    let mut limits: Vec<_> = limits.iter().map(|(name, rest)| (*name, rest.as_str())).collect();
    limits.push(("flight", flight));
    let paid = by("x-g", 1000, "algorithm = \"fixed-window\"\ncost.response_header = \"x-cost\"");
    limits.push(("paid", &paid));
    let gateway = Gateway::start(&with_admin(&config(&cluster.url(), "5s", &limits)));
    let mut client = gateway.client();
    let headers = |a: &'static str| {
        [("x-a", a), ("x-b", "b"), ("x-c", "c"), ("x-d", "d"), ("x-e", "e"), ("x-f", "f"), ("x-g", "g")]
    };
    for left in [2, 1, 0] {
        let reply = client.get_with("/r", &headers("a"));
        assert_eq!((reply.status, reply.remaining("narrow")), (200, left));
        for limit in ["wide", "log", "bucket"] {
            assert_eq!(reply.remaining(limit), 997 + left, "{limit}");
        }
    }
    for _ in 0..20 {
        let denied = client.get_with("/r", &headers("a"));
        denied.assert_problem(429, "the narrow limit is exhausted");
        assert_eq!(denied.json()["violated-policies"], serde_json::json!(["narrow"]));
    }
    // The denied requests did not charge these limits, so nothing is refunded to them.
    for (limit, header, remaining) in [("shadow", "x-e=e", 0), ("paid", "x-g=g", 997)] {
        let reply = ask(&gateway, &format!("/api/identities?limit={limit}&header:{header}"));
        assert_eq!(reply.json()["limits"][0]["remaining"], remaining, "{limit}: {}", reply.text());
    }
    let other = client.get_with("/r", &headers("another"));
    assert_eq!((other.status, other.remaining("narrow")), (200, 2));
    for limit in ["wide", "log", "bucket"] {
        assert_eq!(other.remaining(limit), 996, "{limit}: denied requests are not charged");
    }
    cluster.masters().iter().for_each(|master| master.assert_every_key_expires());
}

#[test]
fn parallel_requests_of_several_identities_admit_no_more_than_the_limit() {
    let cluster = Cluster::start(3, 0);
    let quota = |header: &str| {
        format!(
            "by = \"header:{header}\"\nalgorithm = \"fixed-window\"\nquota = \"50/3650d\"\non_store_error = \"deny\""
        )
    };
    let (one, two) = (quota("x-one"), quota("x-two"));
    let gateway = Gateway::start(&config(&cluster.url(), "5s", &[("one", &one), ("two", &two)]));
    let statuses = load(&[gateway.address], 16, 400, "/r", &[("x-one", "1"), ("x-two", "2")]);
    assert_eq!(count(&statuses, 200) + count(&statuses, 429), 400);
    assert!(count(&statuses, 200) <= 50, "{} admitted", count(&statuses, 200));
    // The refunded tokens are available: a single client gets exactly the rest of the quota.
    let rest = load(&[gateway.address], 1, 60, "/r", &[("x-one", "1"), ("x-two", "2")]);
    assert_eq!(count(&statuses, 200) + count(&rest, 200), 50);
}

#[test]
fn counts_are_exact_while_a_slot_migrates() {
    let cluster = Cluster::start(3, 0);
    let limits =
        [("a", &*format!("{FIXED}quota = \"300/3650d\"")), ("b", &*format!("{FIXED}quota = \"100000/3650d\""))];
    let gateway = Gateway::start(&config(&cluster.url(), "5s", &limits));
    let (id, slot) = identity_of(&cluster, cluster.masters()[0], &gateway);
    let [from, to] = [cluster.masters()[0], cluster.masters()[1]];
    let mut admitted = 1;
    let mut ask = |requests: usize, what: &str| {
        let statuses = load(&[gateway.address], 8, requests, "/r", &[("x-id", &id)]);
        assert_eq!(count(&statuses, 200), requests, "{what}: {statuses:?}");
        admitted += requests;
    };
    ask(20, "before");
    let migration = cluster.begin_migration(slot, from, to);
    ask(20, "on its way, all keys still there");
    assert_eq!(migration.move_keys(1), 1);
    ask(20, "one key here, one key there");
    migration.finish();
    ask(20, "moved");
    // The slot migrates back. During this migration, the new keys exist on neither node.
    let migration = cluster.begin_migration(slot, to, from);
    migration.move_keys(1000);
    ask(20, "all keys gone, the slot not yet");
    migration.finish();
    // Migrate the slot back and forth without a pause, under load.
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut way = [from, to];
            while !stop.load(Ordering::Relaxed) {
                cluster.migrate(slot, way[0], way[1]);
                way.reverse();
            }
        });
        ask(150, "forth and back");
        stop.store(true, Ordering::Relaxed);
    });
    let statuses = load(&[gateway.address], 8, 300, "/r", &[("x-id", &id)]);
    assert_eq!(count(&statuses, 200) + admitted, 300, "exactly the quota is admitted");
    assert_eq!(count(&statuses, 429), admitted);
    cluster.masters().iter().for_each(|master| master.assert_every_key_expires());
    // The gateway learns the new owner of the slot: calls are not redirected in the end.
    let mut client = gateway.client();
    let moved = || cluster.masters().iter().map(|master| master.errors("MOVED")).sum::<u64>();
    eventually("calls go straight to the owner", || {
        let before = moved();
        assert_eq!(client.get_with("/r", &[("x-id", &id)]).status, 429);
        before == moved()
    });
}

#[test]
fn new_identities_are_admitted_while_their_slot_migrates() {
    let cluster = Cluster::start(3, 0);
    let limits = [("a", &*format!("{FIXED}quota = \"5/3650d\"")), ("b", &*format!("{FIXED}quota = \"9/3650d\""))];
    let gateway = Gateway::start(&config(&cluster.url(), "5s", &limits));
    let (id, slot) = identity_of(&cluster, cluster.masters()[0], &gateway);
    let [from, to] = [cluster.masters()[0], cluster.masters()[1]];
    let migration = cluster.begin_migration(slot, from, to);
    // Delete the keys. For a call with several missing keys, the nodes reply TRYAGAIN, and the gateway sends one call
    // per key.
    for key in from.keys() {
        redis::cmd("DEL").arg(key).exec(&mut from.connection()).unwrap();
    }
    let statuses = load(&[gateway.address], 1, 8, "/r", &[("x-id", &id)]);
    assert_eq!(statuses, [200, 200, 200, 200, 200, 429, 429, 429]);
    let keys: Vec<_> = to.keys().into_iter().filter(|key| cluster.slot(key) == slot).collect();
    assert_eq!(keys.len(), 1, "the states of the identity have one key: {keys:?}");
    migration.finish();
    let reply = gateway.client().get_with("/r", &[("x-id", &id)]);
    assert_eq!(reply.status, 429, "the denial stays after the migration");
}

#[test]
fn killed_cluster_master_is_replaced_and_the_others_keep_deciding() {
    let mut cluster = Cluster::start(3, 1);
    let local = format!("{FIXED}quota = \"40/3650d\"").replace("deny", "local");
    let gateway = Gateway::start(&config(&cluster.url(), "200ms", &[("a", &local)]));
    let ids: Vec<_> = (0..3).map(|index| identity_of(&cluster, cluster.masters()[index], &gateway).0).collect();
    let port = cluster.masters()[0].port;
    let ask = |client: &mut Client, id: &str| client.get_with("/r", &[("x-id", id)]);
    let mut client = gateway.client();
    let mut admitted = 1;
    for _ in 0..10 {
        admitted += usize::from(ask(&mut client, &ids[0]).status == 200);
    }
    assert_eq!(cluster.kill_master(0), port);
    let dead = |client: &mut Client, admitted: &mut usize| {
        let reply = ask(client, &ids[0]);
        assert!(matches!(reply.status, 200 | 429), "{reply:?}");
        *admitted += usize::from(reply.status == 200);
    };
    let (before, mut alive) = (cluster.calls("evalsha"), 0);
    eventually("the circuit breaker of the master opens", || {
        dead(&mut client, &mut admitted);
        gateway.log().contains("the store is down")
    });
    for _ in 0..10 {
        for id in &ids[1..] {
            assert_eq!(ask(&mut client, id).status, 200);
            alive += 1;
        }
    }
    assert!(cluster.calls("evalsha") - before >= alive, "the other masters still get calls");
    cluster.wait_for_promotion();
    eventually("the replica decides", || {
        let before = cluster.calls("evalsha");
        dead(&mut client, &mut admitted);
        cluster.calls("evalsha") > before
    });
    for _ in 0..100 {
        dead(&mut client, &mut admitted);
    }
    println!("fault 21: a master of a cluster killed: {admitted} admitted of a limit of 40");
    assert!((40..=80).contains(&admitted), "at most one fresh burst: {admitted}");
}

#[test]
fn sentinel_failovers_are_followed_and_give_one_fresh_limit_each() {
    let mut sentinels = Sentinels::start();
    let limit = "by = \"header:x-id\"\nalgorithm = \"fixed-window\"\nquota = \"60/3650d\"\non_store_error = \"local\"";
    let gateway = Gateway::start(&config(&sentinels.url(), "200ms", &[("a", limit)]));
    let mut client = gateway.client();
    let mut admitted = 0;
    let mut ask = |admitted: &mut usize| {
        let reply = client.get_with("/r", &[("x-id", "i")]);
        assert!(matches!(reply.status, 200 | 429), "{reply:?}");
        *admitted += usize::from(reply.status == 200);
    };
    let decides = |redis: &Redis, ask: &mut dyn FnMut()| {
        eventually("the master decides", || {
            let before = redis.calls("evalsha");
            ask();
            redis.calls("evalsha") > before
        });
    };
    decides(sentinels.master(), &mut || ask(&mut admitted));
    // The old master stays connected as a replica, which rejects writes.
    sentinels.fail_over_by_command();
    decides(sentinels.master(), &mut || ask(&mut admitted));
    sentinels.fail_over_by_kill();
    decides(sentinels.master(), &mut || ask(&mut admitted));
    for _ in 0..200 {
        ask(&mut admitted);
    }
    println!("fault 21: two failovers by Sentinel: {admitted} admitted of a limit of 60");
    assert!((60..=180).contains(&admitted), "at most one fresh burst per failover: {admitted}");
    sentinels.master().assert_every_key_expires();
}

/// Run a command of the binary with a configuration. Return its exit code and its output.
fn run(command: &str, config: &str) -> (Option<i32>, String) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("gateway.toml");
    std::fs::write(&path, format!("{config}[[listener]]\naddress = \"127.0.0.1:0\"\n")).unwrap();
    let output = binary().arg(command).arg("--config").arg(&path).output().unwrap();
    (output.status.code(), String::from_utf8(output.stdout).unwrap())
}

#[test]
fn check_and_doctor_examine_every_master() {
    let cluster = Cluster::start(3, 0);
    let one = ("a", &*format!("{FIXED}quota = \"5/3650d\""));
    let other = ("b", "by = \"ip\"\nquota = \"5/3650d\"");
    let (code, said) = run("check", &config(&cluster.url(), "5s", &[one]));
    assert!(code == Some(0) && !said.contains("store calls at the same time"), "{said}");
    assert_eq!(said.matches("warning: store").count(), 3, "one warning per master: {said}");
    let (code, said) = run("check", &config(&cluster.url(), "5s", &[one, other]));
    assert!(code == Some(0) && said.contains("note: route `r` makes up to 2 store calls at the same time"), "{said}");
    let (code, said) = run("doctor", &config(&cluster.url(), "5s", &[one, other]));
    for master in cluster.masters() {
        assert!(said.contains(&format!("redis at 127.0.0.1:{}\n", master.port)), "{said}");
    }
    assert_eq!(said.matches("2 algorithms tried").count(), 3, "{said}");
    assert_eq!((code, said.contains("\n0 failed")), (Some(0), true), "{said}");
    // With the Redis default `cluster-require-full-coverage yes`, the loss of one master affects all identities.
    let coverage = "CONFIG SET cluster-require-full-coverage no";
    assert_eq!(said.matches("warning   full coverage").count(), 3, "{said}");
    assert!(said.contains(coverage), "{said}");
    let (_, said) = run("check", &config(&cluster.url(), "5s", &[one]));
    assert!(said.contains("full coverage") && said.contains(coverage), "{said}");
    for master in cluster.masters() {
        let mut set = redis::cmd("CONFIG");
        set.arg("SET").arg("cluster-require-full-coverage").arg("no").exec(&mut master.connection()).unwrap();
    }
    let (_, said) = run("doctor", &config(&cluster.url(), "5s", &[one]));
    assert_eq!(said.matches("ok        full coverage  cluster-require-full-coverage no").count(), 3, "{said}");

    let sentinels = Sentinels::start();
    let (code, said) = run("doctor", &config(&sentinels.url(), "5s", &[one]));
    assert!(said.contains(&format!("redis at 127.0.0.1:{}\n", sentinels.master_port())), "{said}");
    assert_eq!((code, said.contains("\n0 failed")), (Some(0), true), "{said}");

    // Each of these URLs is for another kind of server than the one that runs at its address.
    let (node, sentinel) = (cluster.masters()[0].port, sentinels.sentinels[0].port);
    let single = sentinels.master_port();
    let unknown = sentinels.url().replace("mymaster", "nomaster");
    for (url, expected) in [
        (format!("redis://127.0.0.1:{node}"), format!("is a node of a cluster; use redis+cluster://127.0.0.1:{node}")),
        (
            format!("redis+cluster://127.0.0.1:{single}"),
            format!("is not a node of a cluster; use redis://127.0.0.1:{single}"),
        ),
        (format!("redis+cluster://127.0.0.1:{sentinel}"), "is a Sentinel; use redis+sentinel://".to_owned()),
        (format!("redis+sentinel://127.0.0.1:{single}/mymaster"), "is not a Sentinel; use redis://".to_owned()),
        (unknown, "the Sentinels know no master `nomaster`".to_owned()),
    ] {
        let text = config(&url, "500ms", &[one]);
        let (code, said) = run("check", &text);
        assert!(code == Some(0) && said.contains("warning: store:") && said.contains(&expected), "{url}: {said}");
        let (code, said) = run("doctor", &text);
        assert!(code == Some(1) && said.contains(&expected), "{url}: {said}");
        let gateway = Gateway::start(&text);
        eventually("the error is logged", || {
            gateway.client().get_with("/r", &[("x-id", "i")]).assert_problem(503, &url);
            gateway.log().contains(&expected)
        });
    }
}

#[test]
fn redis_user_of_the_manual_suffices_for_a_cluster() {
    let cluster = Cluster::start(3, 0);
    let manual = include_str!("../../docs/how-to/redis.md");
    let line = manual.lines().find_map(|line| line.trim().strip_prefix("ACL SETUSER gateway ")).unwrap();
    let more = manual.split_once("For a cluster, the user also needs `").unwrap().1.split('`').next().unwrap();
    for master in cluster.masters() {
        let mut command = redis::cmd("ACL");
        command.arg("SETUSER").arg("gateway");
        for word in line.split(' ').chain(more.split(' ')) {
            command.arg(word.replace(">…", ">secret"));
        }
        command.exec(&mut master.connection()).unwrap();
    }
    let url = cluster.url().replace("redis+cluster://", "redis+cluster://gateway:secret@");
    let limits = [("a", &*format!("{FIXED}quota = \"5/3650d\"")), ("b", &*format!("{FIXED}quota = \"9/3650d\""))];
    let gateway = Gateway::start(&config(&url, "5s", &limits));
    let (id, slot) = identity_of(&cluster, cluster.masters()[0], &gateway);
    let [from, to] = [cluster.masters()[0], cluster.masters()[1]];
    let migration = cluster.begin_migration(slot, from, to);
    migration.move_keys(1);
    assert_eq!(load(&[gateway.address], 1, 5, "/r", &[("x-id", &id)]), [200, 200, 200, 200, 429]);
    migration.finish();
    assert_eq!(gateway.warnings(), "");
}

#[test]
fn failed_check_is_refunded_by_every_master_that_charged_it() {
    let cluster = Cluster::start(3, 0);
    let by = |header: &str, algorithm: &str| {
        format!(
            "by = \"header:{header}\"\nalgorithm = \"{algorithm}\"\nquota = \"3/3650d\"\nrefund_on = [\"5xx\"]\non_store_error = \"deny\""
        )
    };
    // A refund to a sliding log deletes the entry with the time at which the master of this limit charged it.
    let limits = ["x-a", "x-b", "x-c"].map(|header| [by(header, "token-bucket"), by(header, "sliding-log")]);
    let [[a, d], [b, e], [c, f]] = &limits;
    let limits = [("a", &**a), ("b", b), ("c", c), ("d", d), ("e", e), ("f", f)];
    let fails = config(&cluster.url(), "5s", &limits).replace("status = 200", "status = 500");
    let gateway = Gateway::start(&fails);
    let mut client = gateway.client();
    for _ in 0..10 {
        // The refund is complete before the response headers arrive.
        let reply = client.get_with("/r", &[("x-a", "a"), ("x-b", "b"), ("x-c", "c")]);
        assert_eq!(reply.status, 500);
        for limit in ["a", "b", "c", "d", "e", "f"] {
            assert_eq!(reply.remaining(limit), 3, "{limit}");
        }
    }
}

#[test]
fn charges_of_a_client_that_disconnects_are_refunded_by_every_master() {
    let cluster = Cluster::start(3, 0);
    let by = |header: &str, rest: &str| format!("by = \"header:{header}\"\non_store_error = \"deny\"\n{rest}");
    let limits = [
        ("a", by("x-a", "algorithm = \"fixed-window\"\nquota = \"3/3650d\"")),
        ("b", by("x-b", "quota = \"3/3650d\"")),
        ("c", by("x-c", "algorithm = \"sliding-log\"\nquota = \"3/3650d\"")),
    ];
    let limits = limits.each_ref().map(|(name, rest)| (*name, rest.as_str()));
    let config = config(&cluster.url(), "5s", &limits);
    let gateway = Gateway::start(&with_admin(&format!("[server]\nhalf_close_timeout = \"0s\"\n{config}")));
    let mut client = gateway.client();
    for id in 0..20 {
        let id = format!("{id}");
        let reply = client.get_with("/r", &[("x-a", &id), ("x-b", &id), ("x-c", &id)]);
        assert_eq!(reply.status, 200, "all masters are connected");
    }
    let masters = cluster.masters();
    let client_command = |arguments: &[&str]| {
        masters.iter().for_each(|each| redis::cmd("CLIENT").arg(arguments).exec(&mut each.connection()).unwrap());
    };
    let charges = || masters.iter().map(|master| master.calls("set") + master.calls("rpush")).sum::<u64>();
    let before = charges();
    // Pausing writes also pauses scripts. The cluster bus continues, so that the masters do not count as failed.
    client_command(&["PAUSE", "60000", "WRITE"]);
    client.send(b"GET /r HTTP/1.1\r\nHost: a\r\nx-a: a\r\nx-b: b\r\nx-c: c\r\n\r\n");
    eventually("a master has the first call", || {
        masters.iter().any(|master| {
            let clients: String = redis::cmd("CLIENT").arg("LIST").query(&mut master.connection()).unwrap();
            clients.contains("flags=b")
        })
    });
    drop(client);
    eventually("the client has disconnected", || {
        metric(&gateway, "sluicegate_http_responses_total{route=\"r\",status=\"499\"}") == 1.0
    });
    client_command(&["UNPAUSE"]);
    eventually("a check that has begun is not cancelled", || charges() >= before + 3);
    for (limit, header) in [("a", "x-a=a"), ("b", "x-b=b"), ("c", "x-c=c")] {
        eventually(&format!("the charge of {limit} is refunded"), || {
            let reply = ask(&gateway, &format!("/api/identities?limit={limit}&header:{header}"));
            reply.json()["limits"][0]["remaining"] == 3
        });
    }
}

#[test]
fn denied_flood_across_masters_takes_no_tokens_of_a_shared_bucket() {
    let cluster = Cluster::start(3, 0);
    let shared = "by = \"header:x-shared\"\nquota = \"100/5s\"\non_store_error = \"deny\"";
    let own = "by = \"header:x-own\"\nalgorithm = \"fixed-window\"\nquota = \"1/3650d\"\non_store_error = \"deny\"";
    let gateway = Gateway::start(&config(&cluster.url(), "5s", &[("shared", shared), ("own", own)]));
    let ask = |client: &mut Client, own: &str| client.get_with("/r", &[("x-shared", "all"), ("x-own", own)]);
    let mut client = gateway.client();
    // Each of these identities has quota left in its own limit.
    for number in 0..90 {
        assert_eq!(ask(&mut client, &number.to_string()).status, 200);
    }
    let (before, began) = (ask(&mut client, "before").remaining("shared"), monotonic());
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let mut client = gateway.client();
                while began.elapsed() < Duration::from_secs(2) {
                    assert_eq!(ask(&mut client, "0").status, 429, "its own limit is used up");
                }
            });
        }
    });
    let after = ask(&mut client, "after").remaining("shared");
    let refilled = (20.0 * began.elapsed().as_secs_f64()) as u64;
    assert!(
        after + 4 >= (before + refilled).min(100),
        "{before} tokens and {refilled} refilled ones, but only {after} remain"
    );
}

#[test]
fn graceful_failover_moves_the_connections_before_sentinel_closes_them() {
    let sentinels = Sentinels::start();
    let limit = "by = \"global\"\nalgorithm = \"fixed-window\"\nquota = \"1000000000/24h\"\non_store_error = \"deny\"";
    let gateway = Gateway::start(&config(&sentinels.url(), "5s", &[("a", limit)]));
    let mut client = gateway.client();
    let mut ask = || assert_eq!(client.get("/r").status, 200, "{}", gateway.log());
    let old = sentinels.master();
    ask();
    sentinels.fail_over_by_command();
    let new = sentinels.master();
    eventually("the new master decides", || {
        let before = new.calls("evalsha");
        ask();
        new.calls("evalsha") > before
    });
    // When Sentinel turns the server into a replica, it closes all connections to the server, including this one of the
    // test.
    let role = || redis::cmd("ROLE").query::<redis::Value>(&mut old.connection()).map(|role| format!("{role:?}"));
    assert!(
        role().is_ok_and(|role| role.contains("master")),
        "the gateway reconnects before the server becomes a replica"
    );
    eventually("Sentinel makes it a replica", || {
        ask();
        role().is_ok_and(|role| role.contains("slave"))
    });
    (0..100).for_each(|_| ask());
}

#[test]
fn charge_is_refunded_if_another_master_rejects_it() {
    const IDENTITIES: usize = 20;
    let cluster = Cluster::start(3, 0);
    let by = |header: &str, rest: &str| format!("by = \"header:{header}\"\non_store_error = \"deny\"\n{rest}");
    let counted = |algorithm: &str| format!("algorithm = \"{algorithm}\"\nquota = \"3/3650d\"");
    let limits = [
        ("a", by("x-a", &counted("fixed-window"))),
        ("b", by("x-b", &counted("token-bucket"))),
        ("c", by("x-b", &counted("sliding-log"))),
        ("d", by("x-b", "algorithm = \"concurrency\"\nquota = \"1\"")),
    ];
    let limits = limits.each_ref().map(|(name, rest)| (*name, rest.as_str()));
    let gateway = Gateway::start(&with_admin(&config(&cluster.url(), "5s", &limits)));
    let mut client = gateway.client();
    let mut send = |id: usize| client.get_with("/r", &[("x-a", &format!("a{id}")), ("x-b", &format!("b{id}"))]);
    let full = cluster.masters()[0];
    let set_maxmemory = |bytes: &str| {
        redis::cmd("CONFIG").arg("SET").arg("maxmemory").arg(bytes).exec(&mut full.connection()).unwrap();
    };
    // The full master replies to the peek but rejects the charge that follows, so the limits on this master are not
    // charged.
    set_maxmemory("1");
    let statuses: Vec<_> = (0..IDENTITIES).map(|id| send(id).status).collect();
    assert!(count(&statuses, 200) > 0 && count(&statuses, 503) > 0, "{statuses:?}");
    assert_eq!(count(&statuses, 200) + count(&statuses, 503), IDENTITIES, "{statuses:?}");
    set_maxmemory("0");
    for (id, before) in statuses.into_iter().enumerate() {
        let charged = u64::from(before == 200);
        for (limit, header, left) in
            [("a", "x-a=a", 3 - charged), ("b", "x-b=b", 3 - charged), ("c", "x-b=b", 3 - charged), ("d", "x-b=b", 1)]
        {
            eventually(&format!("limit {limit} of {id} is charged as the response says, {before}"), || {
                let reply = ask(&gateway, &format!("/api/identities?limit={limit}&header:{header}{id}"));
                reply.json()["limits"][0]["remaining"] == left
            });
        }
    }
}

#[test]
fn lost_master_affects_all_identities_with_full_coverage_and_else_its_own() {
    const IDENTITIES: usize = 45;
    for (coverage, affects_all) in [("yes", true), ("no", false)] {
        let mut cluster = Cluster::start(3, 0);
        for master in cluster.masters() {
            let mut set = redis::cmd("CONFIG");
            set.arg("SET").arg("cluster-require-full-coverage").arg(coverage).exec(&mut master.connection()).unwrap();
        }
        let limit = format!("{FIXED}quota = \"1000000/3650d\"");
        let gateway = Gateway::start(&config(&cluster.url(), "1s", &[("a", &limit)]));
        let mut client = gateway.client();
        let mut ask = |id: usize| client.get_with("/r", &[("x-id", &id.to_string())]).status;
        let mut of_dead = Vec::new();
        for id in 0..IDENTITIES {
            let before = cluster.masters()[0].keys().len();
            assert_eq!(ask(id), 200, "{coverage}: {id}");
            of_dead.push(cluster.masters()[0].keys().len() > before);
        }
        assert!(of_dead.contains(&true) && of_dead.contains(&false), "{of_dead:?}");
        cluster.kill_master(0);
        eventually("the other nodes mark the killed master as failed", || {
            cluster.masters().iter().all(|master| {
                let nodes: String = redis::cmd("CLUSTER").arg("NODES").query(&mut master.connection()).unwrap();
                let info: String = redis::cmd("CLUSTER").arg("INFO").query(&mut master.connection()).unwrap();
                nodes.contains("master,fail ") && info.contains("cluster_state:fail") == affects_all
            })
        });
        let affected: Vec<_> = std::thread::scope(|scope| {
            let ask = |id: usize| gateway.client().get_with("/r", &[("x-id", &id.to_string())]).status == 503;
            let all: Vec<_> = (0..IDENTITIES).map(|id| scope.spawn(move || ask(id))).collect();
            all.into_iter().map(|each| each.join().unwrap()).collect()
        });
        let expected = if affects_all { vec![true; IDENTITIES] } else { of_dead };
        println!("{coverage}: {} of {IDENTITIES} affected", affected.iter().filter(|affected| **affected).count());
        assert_eq!(affected, expected, "{coverage}");
    }
}
