//! The admin API: top denied clients, inspect, reset and overrides, with one gateway and with several.

use crate::support::client::{Client, Reply, load};
use crate::support::cluster::Cluster;
use crate::support::eventually;
use crate::support::gateway::Gateway;
use crate::support::redis::{Redis, free_port};
use crate::support::relay::Relay;
use serde_json::{Value, json};
use sluicegate::admin::api::ENDPOINTS;

const TOKEN: &str = "open-sesame";
const ADMIN: &str = "[admin]\naddress = \"127.0.0.1:0\"\ntoken = \"open-sesame\"\n";

/// All algorithms.
const KINDS: [&str; 6] =
    ["token-bucket", "fixed-window", "sliding-window", "sliding-buckets", "sliding-log", "concurrency"];

/// A window that does not end during a test.
const LONG: &str = "3650d";

fn request(gateway: &Gateway, method: &str, path: &str, body: &[u8]) -> Reply {
    let authorization = format!("Bearer {TOKEN}");
    let mut headers = vec![("authorization", &*authorization)];
    if !body.is_empty() {
        headers.push(("content-type", "application/json"));
    }
    Client::connect(gateway.admin()).request(method, path, &headers, body)
}

fn get(gateway: &Gateway, path: &str) -> Value {
    let reply = request(gateway, "GET", path, b"");
    assert_eq!(reply.status, 200, "{path}: {}", reply.text());
    reply.json()
}

fn post(gateway: &Gateway, path: &str, body: &Value) -> Value {
    let reply = request(gateway, "POST", path, body.to_string().as_bytes());
    assert_eq!(reply.status, 200, "{path} {body}: {}", reply.text());
    reply.json()
}

/// Return the usage of an identity.
fn usage(gateway: &Gateway, query: &str) -> Value {
    let answer = get(gateway, &format!("/api/identities?{query}"));
    assert_eq!(answer["limits"].as_array().unwrap().len(), 1, "{answer}");
    answer["limits"][0].clone()
}

/// Return a configuration with one route and one limit. The limit key is the header `x-id`.
fn one_limit(store: &str, quota: &str, rest: &str) -> String {
    format!(
        "{store}{ADMIN}[limit.one]\nby = \"header:x-id\"\nalgorithm = \"fixed-window\"\nquota = \"{quota}\"\n\
         on_store_error = \"deny\"\n{rest}\
         [[route]]\nname = \"r\"\npath = \"/r\"\nlimits = [\"one\"]\nrespond = {{ status = 200 }}\n"
    )
}

fn statuses(gateway: &Gateway, identity: &str, times: usize) -> Vec<u16> {
    let mut client = gateway.client();
    (0..times).map(|_| client.get_with("/r", &[("x-id", identity)]).status).collect()
}

fn count(statuses: &[u16], status: u16) -> usize {
    statuses.iter().filter(|each| **each == status).count()
}

#[test]
fn top_denied_lists_clients_without_secrets() {
    let redis = Redis::start();
    let limit = |name: &str, by: &str, rest: &str| {
        format!("[limit.{name}]\nby = {by}\nalgorithm = \"fixed-window\"\nquota = \"1/{LONG}\"\n{rest}")
    };
    let (shadow, anybody) = ("shadow = true\n", "on_missing = \"skip\"\n");
    let gateway = Gateway::start_with(
        &format!(
            "{}{ADMIN}[server]\nworkers = 2\n[client_ip]\ntrusted_proxies = [\"127.0.0.9\"]\nipv4_prefix = 24\n\
             [auth.keys]\nkind = \"api-key\"\nconsumers = \"consumers.toml\"\non_unknown = \"accept\"\n{}{}{}{}{}\
             [[route]]\nname = \"k\"\npath = \"/k\"\nidentify = [\"keys\"]\nlimits = [\"key\"]\nrespond = {{ status = 200 }}\n\
             [[route]]\nname = \"n\"\npath = \"/n/{{id}}\"\nlimits = [\"net\", \"try\"]\nrespond = {{ status = 200 }}\n\
             [[route]]\nname = \"s\"\npath = \"/s\"\nlimits = [\"secret\", \"user\"]\nrespond = {{ status = 200 }}\n",
            redis.store(),
            limit("key", "\"api-key\"", ""),
            limit("net", "\"ip\"", ""),
            limit("try", "[\"path:id\", \"route\"]", shadow),
            limit("secret", "[\"header:authorization\", \"cookie:sid\", \"query:key\"]", anybody),
            limit("user", "\"user:x-user-id\"", anybody),
        ),
        &[(
            "consumers.toml",
            // The hash is the output of `printf %s secret-of-acme | sha256sum`.
            "[[consumer]]\nname = \"acme\"\nkeys = [\"sha256:f1a3b3e4acf10cec0cbde3ff4b4d5b17a10ce5b0b5f5f9d94a7ac4f1bb0b0ed5\"]\n",
        )],
    );
    let many = |times: usize, path: &str, headers: &[(&str, &str)]| {
        (0..times).for_each(|_| drop(gateway.client().get_with(path, headers)));
    };
    many(4, "/k", &[("x-api-key", "unknown-secret-key")]);
    many(6, "/n/some%20body", &[]);
    let secrets = [("authorization", "Bearer planted-token"), ("cookie", "sid=planted-session")];
    many(3, "/s?key=planted-key", &secrets);
    let mut proxy = Client::connect_from("127.0.0.9".parse().unwrap(), gateway.address);
    for _ in 0..3 {
        proxy.get_with("/s", &[("x-user-id", "bob")]);
    }
    let top = get(&gateway, "/api/top");
    let of = |name: &str| {
        let limits = top["limits"].as_array().unwrap();
        limits.iter().find(|limit| limit["limit"] == name).unwrap_or_else(|| panic!("no {name} in {top}")).clone()
    };
    assert_eq!(top["window_seconds"], 300);
    let net = of("net");
    assert_eq!((&net["denied"], &net["shadow"]), (&json!(5), &json!(false)), "{net}");
    assert_eq!(net["identities"][0]["parts"], json!({"ip": "127.0.0.0/24"}), "{net}");
    assert_eq!(
        (&net["identities"][0]["denied_at_least"], &net["identities"][0]["denied_at_most"]),
        (&json!(5), &json!(5))
    );
    // For a shadow limit, the list contains the clients that the limit would deny. Requests that another limit denies
    // do not count.
    let shadow = of("try");
    assert_eq!(shadow["shadow"], true);
    assert_eq!(of("key")["identities"][0]["parts"], json!({"api-key": null}));
    assert_eq!(of("user")["identities"][0]["parts"], json!({"user:x-user-id": "bob"}));
    let hidden = json!({"header:authorization": null, "cookie:sid": null, "query:key": null});
    assert_eq!((&of("secret")["identities"][0]["parts"], &of("secret")["denied"]), (&hidden, &json!(2)));
    let page = request(&gateway, "GET", "/api/top", b"");
    for secret in ["planted", "unknown-secret", TOKEN] {
        assert!(!page.text().contains(secret), "{secret} in {}", page.text());
    }
    // The identity hash in the response is part of the Redis key.
    let hash = net["identities"][0]["identity"].as_str().unwrap().to_owned();
    assert!(redis.keys().iter().any(|key| key.starts_with(&format!("rl:{{{hash}}}:"))), "{hash}: {:?}", redis.keys());
    let only = get(&gateway, "/api/top?limit=user&count=1");
    assert_eq!((only["limits"].as_array().unwrap().len(), &only["limits"][0]["limit"]), (1, &json!("user")));
    for wrong in ["limit=unknown", "count=0", "count=1000", "count=x", "what=1"] {
        request(&gateway, "GET", &format!("/api/top?{wrong}"), b"").assert_problem(400, wrong);
    }
}

/// Return a configuration with a limit per algorithm, each on its own route.
fn every_kind(store: &str) -> String {
    let each = KINDS.map(|kind| {
        let quota = if kind == "concurrency" { "3".to_owned() } else { format!("3/{LONG}") };
        format!(
            "[limit.{kind}]\nby = \"header:x-id\"\nalgorithm = \"{kind}\"\nquota = \"{quota}\"\non_store_error = \"deny\"\n\
             [[route]]\nname = \"{kind}\"\npath = \"/{kind}\"\nlimits = [\"{kind}\"]\nrespond = {{ status = 200 }}\n"
        )
    });
    format!("{store}{ADMIN}{}", each.concat())
}

#[test]
fn inspect_shows_usage_without_a_charge() {
    let redis = Redis::start();
    for store in ["", &redis.store()] {
        let gateway = Gateway::start(&every_kind(store));
        let mut client = gateway.client();
        for kind in KINDS.iter().filter(|kind| **kind != "concurrency") {
            let look = || usage(&gateway, &format!("limit={kind}&header%3Ax-id=alice"));
            for used in 0..4 {
                let (first, again) = (look(), look());
                let reply = client.get_with(&format!("/{kind}"), &[("x-id", "alice")]);
                assert_eq!((&first["remaining"], &again["remaining"]), (&json!(3 - used), &json!(3 - used)), "{kind}");
                assert_eq!((&first["quota"], &first["capacity"]), (&json!(format!("3/{LONG}")), &json!(3)), "{kind}");
                assert_eq!((&first["algorithm"], &first["override"]), (&json!(kind), &Value::Null), "{kind}");
                let expected = if used < 3 { ("allowed", 200) } else { ("denied", 429) };
                assert_eq!((first["decision"].as_str().unwrap(), reply.status), expected, "{kind} {first}");
                if used < 3 {
                    assert_eq!(reply.remaining(kind), 2 - used, "{kind}: nothing else was charged");
                    assert_eq!(first["retry_seconds"], Value::Null, "{kind}");
                } else {
                    assert!(first["retry_seconds"].as_f64().unwrap() > 1000.0, "{kind} {first}");
                }
            }
            let hash = look()["identity"].as_str().unwrap().to_owned();
            assert_eq!(usage(&gateway, &format!("limit={kind}&identity={hash}"))["decision"], "denied", "{kind}");
            let never = usage(&gateway, &format!("limit={kind}&identity={hash}&cost=4"));
            assert_eq!(
                (&never["decision"], &never["retry_seconds"]),
                (&json!("cost_too_large"), &Value::Null),
                "{kind}"
            );
        }
        let all = get(&gateway, "/api/identities?header:x-id=bob");
        assert_eq!(all["limits"].as_array().unwrap().len(), KINDS.len(), "{all}");
        for wrong in [
            "",
            "limit=fixed-window",
            "limit=fixed-window&ip=192.0.2.1",
            "ip=192.0.2.1",
            "limit=fixed-window&identity=12",
            "identity=00000000000000000000000000000000",
            "limit=fixed-window&header:x-id=a&cost=0",
        ] {
            request(&gateway, "GET", &format!("/api/identities?{wrong}"), b"").assert_problem(400, wrong);
        }
        request(&gateway, "GET", "/api/identities?limit=unknown&header:x-id=a", b"").assert_problem(404, "no limit");
    }
}

#[test]
fn identity_is_found_by_its_value_or_hash() {
    let hash = |key: &str| {
        let digest = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, key.as_bytes());
        digest.as_ref().iter().map(|byte| format!("{byte:02x}")).collect::<String>()
    };
    let gateway = Gateway::start_with(
        &format!(
            "{ADMIN}[auth.keys]\nkind = \"api-key\"\nconsumers = \"consumers.toml\"\non_missing = \"anonymous\"\n\
             [limit.calls]\nby = \"api-key\"\nalgorithm = \"fixed-window\"\nquota = \"10/{LONG}\"\n\
             tiers = {{ anonymous = {{ quota = \"2/{LONG}\" }}, pro = {{ quota = \"20/{LONG}\" }} }}\nexempt = [\"api-key=robot\"]\n\
             [limit.pair]\nby = [\"ip\", \"route\", \"host\", \"method\"]\nalgorithm = \"fixed-window\"\nquota = \"5/{LONG}\"\n\
             [limit.all]\nby = \"global\"\nalgorithm = \"fixed-window\"\nquota = \"100/{LONG}\"\n\
             [[route]]\nname = \"r\"\npath = \"/r\"\nidentify = [\"keys\"]\nlimits = [\"calls\", \"pair\", \"all\"]\nrespond = {{ status = 200 }}\n"
        ),
        &[(
            "consumers.toml",
            &format!(
                "[[consumer]]\nname = \"acme\"\ntier = \"pro\"\nkeys = [\"sha256:{}\"]\n\
                 [[consumer]]\nname = \"zeta\"\nlimit.calls = {{ quota = \"30/{LONG}\" }}\nkeys = [\"sha256:{}\"]\n\
                 [[consumer]]\nname = \"robot\"\nkeys = [\"sha256:{}\"]\n",
                hash("acme-key"),
                hash("zeta-key"),
                hash("robot-key")
            ),
        )],
    );
    let mut client = gateway.client();
    for (key, remaining) in [(Some("acme-key"), 19), (Some("zeta-key"), 29), (None, 1)] {
        let headers: Vec<_> = key.map(|key| ("x-api-key", key)).into_iter().chain([("host", "API.test")]).collect();
        assert_eq!(client.get_with("/r", &headers).remaining("calls"), remaining, "{key:?}");
    }
    for (query, remaining, quota) in [
        ("limit=calls&api-key=acme", 19, "20"),
        ("limit=calls&api-key=zeta", 29, "30"),
        ("limit=calls&anonymous=127.0.0.1", 1, "2"),
        ("limit=calls&anonymous=127.0.0.2", 2, "2"),
        ("limit=calls&api-key=robot", 10, "10"),
        ("limit=pair&ip=127.0.0.1&route=r&host=api.TEST&method=GET", 2, "5"),
        ("limit=pair&ip=::ffff:127.0.0.1&route=r&host=api.test&method=GET", 2, "5"),
        ("limit=pair&ip=127.0.0.1&route=r&host=api.test&method=POST", 5, "5"),
        ("limit=all", 97, "100"),
    ] {
        let found = usage(&gateway, query);
        assert_eq!(
            (&found["remaining"], &found["quota"]),
            (&json!(remaining), &json!(format!("{quota}/{LONG}"))),
            "{query}"
        );
        let hash = found["identity"].as_str().unwrap();
        let limit = query.split('&').next().unwrap();
        let again = usage(&gateway, &format!("{limit}&identity={hash}"));
        // The hash does not reveal that the identity is the address of an anonymous client. A query by hash may
        // therefore return another quota than the query by `anonymous`.
        if !query.contains("anonymous") {
            assert_eq!(again["quota"], found["quota"], "{query} by its hash");
            assert_eq!(again["consumer"], found["consumer"], "{query} by its hash");
        }
    }
    assert_eq!(usage(&gateway, "limit=calls&api-key=robot")["decision"], "exempt");
    let all = get(&gateway, "/api/identities?api-key=acme");
    let names: Vec<_> = all["limits"].as_array().unwrap().iter().map(|one| one["limit"].clone()).collect();
    assert_eq!(names, ["all", "calls"], "{all}");
    request(&gateway, "GET", "/api/identities?limit=calls&api-key=unknown", b"").assert_problem(404, "no consumer");
    request(&gateway, "GET", "/api/identities?limit=calls&anonymous=here", b"").assert_problem(400, "no address");
}

#[test]
fn reset_reaches_all_gateways() {
    let redis = Redis::start();
    let config = one_limit(&redis.store(), &format!("3/{LONG}"), "");
    let gateways = [Gateway::start(&config), Gateway::start(&config)];
    for gateway in &gateways {
        assert_eq!(
            statuses(gateway, "other", 2).last(),
            Some(if gateway.address == gateways[0].address { &200 } else { &429 })
        );
    }
    assert_eq!(statuses(&gateways[0], "alice", 4), [200, 200, 200, 429]);
    // After its first denial, the second gateway denies from its cache and does not call Redis.
    assert_eq!(statuses(&gateways[1], "alice", 1), [429]);
    let asked = redis.calls("evalsha");
    assert_eq!(statuses(&gateways[1], "alice", 3), [429; 3]);
    assert_eq!(redis.calls("evalsha"), asked);
    let answer = post(&gateways[0], "/api/reset", &json!({"limit": "one", "identity": {"header:x-id": "alice"}}));
    assert_eq!((&answer["removed"], &answer["effective_within_seconds"]), (&json!(true), &json!(2)), "{answer}");
    assert_eq!(usage(&gateways[1], "limit=one&header:x-id=alice")["remaining"], 3);
    // The reset also removes the denial from the caches of all gateways. Without a reset, it could stay there for up to
    // a minute.
    eventually("the other gateway has the change", || statuses(&gateways[1], "alice", 1) == [200]);
    let rest: Vec<_> = gateways.iter().flat_map(|gateway| statuses(gateway, "alice", 4)).collect();
    assert_eq!(count(&rest, 200), 2, "the gateways share one new quota");
    assert_eq!(statuses(&gateways[0], "other", 1), [429], "other identities are unaffected");
    let hash = answer["identity"].clone();
    let again = post(&gateways[1], "/api/reset", &json!({"limit": "one", "identity": hash}));
    assert_eq!(again["removed"], true, "a reset by the hash");
    let nothing = post(&gateways[1], "/api/reset", &json!({"limit": "one", "identity": {"header:x-id": "absent"}}));
    assert_eq!(nothing["removed"], false);
    redis.assert_every_key_expires();
}

#[test]
fn state_of_every_algorithm_can_be_reset() {
    let redis = Redis::start();
    for store in ["", &redis.store()] {
        let gateway = Gateway::start(&every_kind(store));
        for kind in KINDS.iter().filter(|kind| **kind != "concurrency") {
            let mut client = gateway.client();
            let mut three = || [0; 3].map(|_| client.get_with(&format!("/{kind}"), &[("x-id", "alice")]).status);
            assert_eq!((three(), three()), ([200; 3], [429; 3]), "{kind}");
            post(&gateway, "/api/reset", &json!({"limit": kind, "identity": {"header:x-id": "alice"}}));
            // The gateway that executes a reset applies it at once. Other gateways may need 2 s.
            assert_eq!((three(), three()), ([200; 3], [429; 3]), "{kind} after its reset");
        }
    }
}

#[test]
fn override_applies_on_all_gateways_until_it_expires() {
    let redis = Redis::start();
    let config = one_limit(&redis.store(), &format!("3/{LONG}"), "");
    let gateways = [Gateway::start(&config), Gateway::start(&config)];
    for gateway in &gateways {
        statuses(gateway, "alice", 3);
        assert_eq!(statuses(gateway, "alice", 1), [429]);
    }
    let body = json!({
        "limit": "one", "identity": {"header:x-id": "alice"}, "quota": format!("10/{LONG}"), "ttl": "8s", "note": "trial"
    });
    let answer = post(&gateways[0], "/api/overrides", &body);
    let shown = &answer["override"];
    assert_eq!((&shown["quota"], &shown["note"]), (&body["quota"], &body["note"]), "{answer}");
    let looked = usage(&gateways[0], "limit=one&header:x-id=alice");
    assert_eq!((&looked["remaining"], &looked["override"]["note"]), (&json!(7), &json!("trial")), "{looked}");
    // A gateway that starts after the override was set must also apply the override.
    let third = Gateway::start(&config);
    for gateway in [&gateways[1], &third] {
        eventually("the other gateways have the override", || statuses(gateway, "alice", 1) == [200]);
    }
    let addresses = [gateways[0].address, gateways[1].address, third.address];
    let admitted = load(&addresses, 6, 60, "/r", &[("x-id", "alice")]);
    assert_eq!(count(&admitted, 200), 5, "of ten requests, five were used earlier");
    assert_eq!(count(&admitted, 429), 55);
    let all = get(&third, "/api/overrides");
    assert_eq!(all["overrides"].as_array().unwrap().len(), 1, "{all}");
    assert_eq!(all["overrides"][0]["identity"], shown["identity"]);
    redis.assert_every_key_expires();
    eventually("the override has expired", || get(&third, "/api/overrides")["overrides"] == json!([]));
    for gateway in [&gateways[0], &gateways[1], &third] {
        let looked = usage(gateway, "limit=one&header:x-id=alice");
        assert_eq!((&looked["decision"], &looked["remaining"]), (&json!("denied"), &json!(0)), "{looked}");
        assert_eq!(statuses(gateway, "alice", 1), [429]);
        assert_eq!(looked["quota"], format!("3/{LONG}"));
    }
    eventually("the overrides are deleted", || redis.keys().iter().all(|key| key.starts_with("rl:{")));
}

#[test]
fn override_may_lower_the_quota_and_can_be_removed() {
    let redis = Redis::start();
    for store in ["", &redis.store()] {
        let gateway = Gateway::start(&one_limit(store, &format!("10/{LONG}"), ""));
        assert_eq!(statuses(&gateway, "alice", 5), [200; 5]);
        let body = |quota: &str| json!({"limit": "one", "identity": {"header:x-id": "alice"}, "quota": format!("{quota}/{LONG}"), "ttl": "1h"});
        post(&gateway, "/api/overrides", &body("4"));
        let mut client = gateway.client();
        let reply = client.get_with("/r", &[("x-id", "alice")]);
        assert_eq!(reply.status, 429, "the usage exceeds the new quota");
        assert!(reply.header("ratelimit-policy").unwrap().contains("\"one\";q=4;"), "{reply:?}");
        assert_eq!(statuses(&gateway, "bob", 5), [200; 5], "other identities are unaffected");
        post(&gateway, "/api/overrides", &body("7"));
        assert_eq!(statuses(&gateway, "alice", 4), [200, 200, 429, 429]);
        let removed = request(&gateway, "DELETE", "/api/overrides?limit=one&header:x-id=alice", b"");
        assert_eq!((removed.status, &removed.json()["removed"]), (200, &json!(true)), "{}", removed.text());
        assert_eq!(statuses(&gateway, "alice", 4), [200, 200, 200, 429]);
        let removed = request(&gateway, "DELETE", "/api/overrides?limit=one&header:x-id=alice", b"");
        assert_eq!(removed.json()["removed"], false);
        assert_eq!(get(&gateway, "/api/overrides"), json!({"max_overrides": 1000, "overrides": []}));
        for (field, value) in [
            ("quota", json!("0/min")),
            ("quota", json!("many")),
            ("quota", json!("1/month of sundays")),
            ("ttl", json!("1s")),
            ("ttl", json!("40d")),
            ("ttl", json!("soon")),
            ("burst", json!(5)),
            ("note", json!("x".repeat(201))),
            ("identity", json!("12")),
            ("identity", json!(12)),
            ("identity", json!({"ip": "192.0.2.1"})),
            ("quota", json!(5)),
            ("unknown", json!(1)),
        ] {
            let mut wrong = body("5");
            wrong[field] = value.clone();
            let reply = request(&gateway, "POST", "/api/overrides", wrong.to_string().as_bytes());
            reply.assert_problem(400, &format!("{field} = {value}"));
        }
        request(&gateway, "POST", "/api/overrides", b"{\"limit\": ").assert_problem(400, "half");
        assert_eq!(get(&gateway, "/api/overrides")["overrides"], json!([]));
    }
}

#[test]
fn override_in_the_memory_store_expires() {
    let gateway = Gateway::start(&one_limit("", &format!("2/{LONG}"), ""));
    let body = json!({"limit": "one", "identity": {"header:x-id": "alice"}, "quota": format!("4/{LONG}"), "ttl": "5s"});
    post(&gateway, "/api/overrides", &body);
    assert_eq!(statuses(&gateway, "alice", 3), [200; 3]);
    eventually("the override has expired", || usage(&gateway, "limit=one&header:x-id=alice")["override"].is_null());
    assert_eq!(statuses(&gateway, "alice", 1), [429], "the usage exceeds the standard quota");
    assert_eq!(get(&gateway, "/api/overrides")["overrides"], json!([]));
}

#[test]
fn override_with_another_window_is_found_by_reset() {
    let redis = Redis::start();
    let bucket = "[limit.two]\nby = \"header:x-id\"\nquota = \"5/3650d\"\nprefetch = 3\n";
    let gateway = Gateway::start(
        &one_limit(&redis.store(), &format!("2/{LONG}"), bucket).replace("[\"one\"]", "[\"one\", \"two\"]"),
    );
    let identity = json!({"header:x-id": "alice"});
    assert_eq!(statuses(&gateway, "alice", 3), [200, 200, 429]);
    // A quota with another window has its own counter.
    post(&gateway, "/api/overrides", &json!({"limit": "one", "identity": identity, "quota": "3/365d", "ttl": "1h"}));
    assert_eq!(statuses(&gateway, "alice", 4), [200, 200, 200, 429]);
    let reset = json!({"limit": "one", "identity": identity});
    assert_eq!(post(&gateway, "/api/reset", &reset)["removed"], true);
    assert_eq!(usage(&gateway, "limit=one&header:x-id=alice")["remaining"], 3);
    // The gateway accepts an override whose bucket is smaller than the `prefetch` of the limit.
    let two = json!({"limit": "two", "identity": identity, "quota": "2/3650d", "burst": 1, "ttl": "1h"});
    post(&gateway, "/api/overrides", &two);
    post(&gateway, "/api/reset", &json!({"limit": "two", "identity": identity}));
    assert_eq!(usage(&gateway, "limit=two&header:x-id=alice")["capacity"], 1);
    assert_eq!(statuses(&gateway, "alice", 2), [200, 429]);
}

#[test]
fn override_that_would_make_the_checks_of_a_route_too_heavy_is_rejected() {
    let redis = Redis::start();
    let log = |name: &str| {
        format!("[limit.{name}]\nby = \"header:x-id\"\nalgorithm = \"sliding-log\"\nquota = \"100/day\"\n")
    };
    let limits: String = ["a", "b", "c", "d", "e", "f", "g", "h", "alone"].map(log).concat();
    let routes = "[[route]]\nname = \"eight\"\npath = \"/r\"\nrespond = { status = 200 }\n\
                  limits = [\"a\", \"b\", \"c\", \"d\", \"e\", \"f\", \"g\", \"h\"]\n\
                  [[route]]\nname = \"one\"\npath = \"/one\"\nrespond = { status = 200 }\nlimits = [\"alone\"]\n";
    for store in ["", &redis.store()] {
        let admin = format!("[admin]\naddress = \"127.0.0.1:0\"\ntoken = \"{TOKEN}\"\n");
        let gateway = Gateway::start(&format!("{store}{admin}{limits}{routes}"));
        let token = format!("Bearer {TOKEN}");
        let headers = [("authorization", &*token), ("content-type", "application/json")];
        // Eight logs with a quota of 100 have the weight 72. Each of them may add an eighth of the rest of 1024.
        for (limit, quota, expected) in
            [("a", 10_000, 400), ("h", 4000, 400), ("a", 3900, 200), ("b", 3900, 200), ("alone", 10_000, 200)]
        {
            let identity = json!({"header:x-id": "alice"});
            let body = json!({"limit": limit, "identity": identity, "quota": format!("{quota}/day"), "ttl": "1h"});
            let body = body.to_string();
            let reply = Client::connect(gateway.admin()).request("POST", "/api/overrides", &headers, body.as_bytes());
            assert_eq!(reply.status, expected, "{limit}, {quota}: {}", reply.text());
            assert!(expected == 200 || reply.text().contains("use a smaller quota"), "{}", reply.text());
        }
    }
}

#[test]
fn number_of_overrides_is_bounded() {
    let redis = Redis::start();
    for store in ["", &redis.store()] {
        let gateway = Gateway::start(&one_limit(store, "3/day", ""));
        let body = |identity: usize| json!({"limit": "one", "identity": format!("{identity:032x}"), "quota": "5/day", "ttl": "1h"});
        if store.is_empty() {
            let (mut client, token) = (Client::connect(gateway.admin()), format!("Bearer {TOKEN}"));
            let headers = [("authorization", &*token), ("content-type", "application/json")];
            for identity in 0..1000 {
                let reply = client.request("POST", "/api/overrides", &headers, body(identity).to_string().as_bytes());
                assert_eq!(reply.status, 200, "{identity}: {}", reply.text());
            }
        } else {
            let fields = (0..1000).map(|identity| {
                (format!("size/one/{identity:032x}"), format!("4000000000000000 {}", json!({"quota": "5/day"})))
            });
            let mut command = redis::cmd("HSET");
            command.arg("rl:overrides");
            for (field, value) in fields {
                command.arg(field).arg(value);
            }
            command.exec(&mut redis.connection()).unwrap();
        }
        let full = request(&gateway, "POST", "/api/overrides", body(1000).to_string().as_bytes());
        full.assert_problem(409, "one more");
        post(&gateway, "/api/overrides", &body(999));
        // A reset of an identity without usage removes nothing.
        assert_eq!(
            post(&gateway, "/api/reset", &json!({"limit": "one", "identity": format!("{:032x}", 7)}))["removed"],
            false
        );
        let removed = request(&gateway, "DELETE", &format!("/api/overrides?limit=one&identity={:032x}", 5), b"");
        assert_eq!(removed.json()["removed"], true, "{}", removed.text());
        post(&gateway, "/api/overrides", &body(1000));
        assert_eq!(get(&gateway, "/api/overrides")["overrides"].as_array().unwrap().len(), 1000);
    }
}

#[test]
fn admin_commands_work_on_a_cluster() {
    let cluster = Cluster::start(3, 0);
    let store = format!("[store]\nurl = \"{}\"\ntimeout = \"5s\"\n", cluster.url());
    let config = one_limit(&store, &format!("2/{LONG}"), "");
    let gateways = [Gateway::start(&config), Gateway::start(&config)];
    // The Redis Cluster stores these identities on different masters.
    for identity in ["a", "b", "c", "d", "e", "f"] {
        let whose = json!({"header:x-id": identity});
        assert_eq!(statuses(&gateways[0], identity, 3), [200, 200, 429]);
        assert_eq!(statuses(&gateways[1], identity, 1), [429]);
        assert_eq!(post(&gateways[0], "/api/reset", &json!({"limit": "one", "identity": whose}))["removed"], true);
        eventually("the other one has the change", || statuses(&gateways[1], identity, 1) == [200]);
        let body = json!({"limit": "one", "identity": whose, "quota": format!("4/{LONG}"), "ttl": "1h"});
        post(&gateways[1], "/api/overrides", &body);
        assert_eq!(usage(&gateways[1], &format!("limit=one&header:x-id={identity}"))["remaining"], 3);
        eventually("the first gateway has the change", || {
            usage(&gateways[0], &format!("limit=one&header:x-id={identity}"))["override"].is_object()
        });
        assert_eq!(statuses(&gateways[0], identity, 4), [200, 200, 200, 429]);
    }
}

/// Each path supports exactly the methods in the table of endpoints, and a change without a configured token is 403.
#[test]
fn endpoints_support_the_methods_of_the_table() {
    let gateway = Gateway::start(&one_limit("", "1/day", "").replace("token = \"open-sesame\"\n", ""));
    for endpoint in &ENDPOINTS {
        let path = endpoint.path;
        let listed = ENDPOINTS.iter().filter(|other| other.path == path);
        let allowed = listed.map(|other| other.methods()).collect::<Vec<_>>().join(", ");
        for method in ["GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"] {
            let expected = match (allowed.split(", ").any(|one| one == method), method) {
                (false, _) => 405,
                (true, "GET" | "HEAD") if ["/api/identities", "/api/usage", "/api/differences"].contains(&path) => 400,
                (true, "GET" | "HEAD") => 200,
                (true, _) => 403,
            };
            if (method, path) == ("GET", "/api/live") {
                continue; // The stream does not end.
            }
            let headers = [("host", "localhost"), ("content-type", "application/json")];
            let reply = Client::connect(gateway.admin()).request(method, path, &headers, b"");
            assert_eq!(reply.status, expected, "{method} {path}");
            assert_eq!(reply.header("allow"), (expected == 405).then_some(&*allowed), "{method} {path}");
        }
    }
}

#[test]
fn changes_need_a_token() {
    let open = "[admin]\naddress = \"127.0.0.1:0\"\n";
    let gateway = Gateway::start(&one_limit("", "1/day", "").replace(ADMIN, open));
    let json_type = ("content-type", "application/json");
    let body = json!({"limit": "one", "identity": {"header:x-id": "alice"}}).to_string();
    let send = |gateway: &Gateway, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]| {
        Client::connect(gateway.admin()).request(method, path, headers, body)
    };
    let here = ("host", "localhost");
    assert_eq!(send(&gateway, "GET", "/api/top", &[here], b"").status, 200, "reading is allowed");
    for (method, path) in [("POST", "/api/reset"), ("POST", "/api/overrides"), ("DELETE", "/api/overrides")] {
        let reply = send(&gateway, method, path, &[here, json_type, ("authorization", "Bearer x")], body.as_bytes());
        reply.assert_problem(403, path);
        assert!(reply.text().contains("set admin.token"), "{}", reply.text());
    }
    assert_eq!(
        send(&gateway, "POST", "/api/reset", &[("host", "evil.example"), json_type], body.as_bytes()).status,
        403
    );

    let gateway = Gateway::start(&one_limit("", "1/day", ""));
    statuses(&gateway, "alice", 1);
    let (token, wrong) = (format!("Bearer {TOKEN}"), format!("Bearer {TOKEN}x"));
    for headers in [&[json_type][..], &[json_type, ("authorization", &wrong)]] {
        assert_eq!(send(&gateway, "POST", "/api/reset", headers, body.as_bytes()).status, 401);
    }
    let known = ("authorization", &*token);
    for kind in ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"] {
        let headers = [known, ("content-type", kind)];
        send(&gateway, "POST", "/api/reset", &headers, body.as_bytes()).assert_problem(415, kind);
    }
    send(&gateway, "POST", "/api/reset", &[known], body.as_bytes()).assert_problem(415, "no type");
    send(&gateway, "POST", "/api/reset", &[known, json_type], &[b' '; 20_000]).assert_problem(413, "a large body");
    let reply = send(&gateway, "DELETE", "/api/reset", &[known, json_type], b"");
    reply.assert_problem(405, "another method");
    assert_eq!(reply.header("allow"), Some("POST"));
    send(&gateway, "GET", "/api/nothing", &[known], b"").assert_problem(404, "no such path");
    assert_eq!(statuses(&gateway, "alice", 1), [429], "the rejected requests changed nothing");
    let reply = send(
        &gateway,
        "POST",
        "/api/reset",
        &[known, ("content-type", "Application/JSON; charset=utf-8")],
        body.as_bytes(),
    );
    assert_eq!(reply.status, 200, "{}", reply.text());
    assert_eq!(statuses(&gateway, "alice", 1), [200]);
}

#[test]
fn admin_api_reports_a_store_that_does_not_reply() {
    let mut redis = Redis::start();
    let gateway = Gateway::start(&one_limit(&redis.store().replace("5s", "1s"), "3/day", ""));
    assert_eq!(statuses(&gateway, "alice", 1), [200]);
    let body = json!({"limit": "one", "identity": {"header:x-id": "alice"}, "quota": "9/day", "ttl": "1h"});
    post(&gateway, "/api/overrides", &body);
    redis.child.kill().unwrap();
    redis.child.wait().unwrap();
    eventually("the breaker opens", || {
        gateway.log().contains("the store is down") || {
            statuses(&gateway, "alice", 1);
            false
        }
    });
    request(&gateway, "GET", "/api/identities?limit=one&header:x-id=alice", b"").assert_problem(503, "a standing");
    request(
        &gateway,
        "POST",
        "/api/reset",
        json!({"limit": "one", "identity": {"header:x-id": "a"}}).to_string().as_bytes(),
    )
    .assert_problem(503, "a reset");
    request(&gateway, "POST", "/api/overrides", body.to_string().as_bytes()).assert_problem(503, "an override");
    let all = get(&gateway, "/api/overrides");
    assert_eq!((&all["overrides"][0]["quota"], all["store_error"].is_string()), (&json!("9/day"), true), "{all}");
    assert_eq!(get(&gateway, "/api/top")["window_seconds"], 300, "the gateway lists its own denials");
}

#[test]
fn reset_clears_the_local_share_of_an_outage() {
    let (redis, nowhere) = (Redis::start(), free_port());
    let relay = Relay::start(redis.port);
    let store = format!("[server]\nworkers = 1\n[store]\nurl = \"{}\"\ntimeout = \"5s\"\n", relay.url());
    let config = one_limit(&store, &format!("2/{LONG}"), "").replace("\"deny\"", "\"local\"");
    let gateway = Gateway::start(&config);
    relay.redirect_to(nowhere);
    assert_eq!(statuses(&gateway, "alice", 3), [200, 200, 429], "the local share");
    relay.redirect_to(redis.port);
    let reset = json!({"limit": "one", "identity": {"header:x-id": "alice"}});
    eventually("the store is back", || {
        request(&gateway, "POST", "/api/reset", reset.to_string().as_bytes()).status == 200
    });
    relay.redirect_to(nowhere);
    assert_eq!(statuses(&gateway, "alice", 3), [200, 200, 429], "the local share starts anew");
}

#[test]
fn reset_finds_the_state_of_a_consumer_with_its_own_quota() {
    let redis = Redis::start();
    let consumers = "[[consumer]]\nname = \"acme\"\n\
                     keys = [\"sha256:KEY\"]\nlimit.one = { quota = \"2/365d\" }\n";
    let consumers = consumers.replace("KEY", &sha256("secret-of-acme"));
    for store in ["", &redis.store()] {
        let config = one_limit(store, &format!("9/{LONG}"), "").replace("\"header:x-id\"", "\"api-key\"");
        let config = config.replace("limits = ", "identify = [\"keys\"]\nlimits = ");
        let config = format!("[auth.keys]\nkind = \"api-key\"\nconsumers = \"consumers.toml\"\n{config}");
        let gateway = Gateway::start_with(&config, &[("consumers.toml", &consumers)]);
        let mut client = gateway.client();
        let mut three = || [(); 3].map(|()| client.get_with("/r", &[("x-api-key", "secret-of-acme")]).status);
        assert_eq!(three(), [200, 200, 429], "{store}");
        let reset = json!({"limit": "one", "identity": {"api-key": "acme"}});
        assert_eq!(post(&gateway, "/api/reset", &reset)["removed"], true, "{store}");
        assert_eq!(three(), [200, 200, 429], "{store}");
    }
}

fn sha256(text: &str) -> String {
    let hash = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, text.as_bytes());
    hash.as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}
