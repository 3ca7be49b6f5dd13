//! End-to-end tests of identities: client addresses, trusted proxies, user headers, API keys, cookies, and identities
//! that consist of several parts.

use std::net::IpAddr;

use crate::support::client::{Client, Reply};
use crate::support::gateway::Gateway;
use crate::support::redis::Redis;
use crate::support::tokens::{Key, in_seconds, key_set, signed};
use crate::support::upstream::Upstream;
use aws_lc_rs::digest::{SHA256, digest};
use serde_json::json;

const PROXY: &str = "127.0.0.9";

/// Return a limit per hour. The window starts with the first request, so it does not end during the test.
fn limit(name: &str, quota: u64, rest: &str) -> String {
    format!(
        "[limit.{name}]\nalgorithm = \"fixed-window\"\nstart = \"first-request\"\nquota = \"{quota}/hour\"\n{rest}\n"
    )
}

/// Return a route for the path `/NAME`. The gateway itself responds (`respond`).
fn route(name: &str, limits: &str) -> String {
    format!(
        "[[route]]\nname = \"{name}\"\npath = \"/{name}\"\nlimits = [{limits}]\nrespond = {{ status = 200, body = \"{name}\" }}\n"
    )
}

/// Return a route for the path `/NAME` with these providers in `identify`. The gateway itself responds (`respond`).
fn identified(name: &str, providers: &str, limits: &str) -> String {
    route(name, limits) + &format!("identify = [{providers}]\n")
}

fn trusting(rest: &str) -> String {
    format!("[client_ip]\ntrusted_proxies = [\"{PROXY}/32\"]\n{rest}\n")
}

fn from(address: &str, gateway: &Gateway) -> Client {
    Client::connect_from(address.parse::<IpAddr>().unwrap(), gateway.address)
}

/// Return a consumers file, which contains the hashes of the keys.
fn consumers(consumers: &[(&str, &[&str])]) -> String {
    let hash = |key: &&str| {
        let digits: String =
            digest(&SHA256, key.as_bytes()).as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
        format!("\"sha256:{digits}\"")
    };
    let keys = |keys: &[&str]| keys.iter().map(hash).collect::<Vec<_>>().join(", ");
    consumers.iter().map(|(name, list)| format!("[[consumer]]\nname = \"{name}\"\nkeys = [{}]\n", keys(list))).collect()
}

/// Assert that a limit denied the request.
fn assert_denied(reply: &Reply, limit: &str, what: &str) {
    reply.assert_problem(429, what);
    assert_eq!(reply.json()["violated-policies"], serde_json::json!([limit]), "{what}");
}

#[test]
fn forged_addresses_of_untrusted_clients_are_ignored() {
    let gateway = Gateway::start(&format!(
        "{}{}{}",
        trusting(""),
        limit("hourly", 50, "by = \"ip\""),
        route("limited", "\"hourly\"")
    ));
    let statuses: Vec<u16> = std::thread::scope(|scope| {
        let connection = |index: u32| {
            let gateway = &gateway;
            move || {
                let mut client = gateway.client();
                let address = |n: u32| format!("198.51.{}.{}", n / 250, n % 250 + 1);
                let ask = |n: u32| {
                    let claimed = address(n);
                    let forwarded = format!("for={claimed}");
                    let lines = [
                        ("X-Forwarded-For", claimed.as_str()),
                        ("X-Forwarded-For", PROXY),
                        ("Forwarded", forwarded.as_str()),
                        ("X-Real-IP", claimed.as_str()),
                    ];
                    client.get_with("/limited", &lines).status
                };
                (index * 125..(index + 1) * 125).map(ask).collect::<Vec<_>>()
            }
        };
        let threads: Vec<_> = (0..8).map(|index| scope.spawn(connection(index))).collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(statuses.len(), 1000);
    assert_eq!(statuses.iter().filter(|status| **status == 200).count(), 50, "admitted");
    assert_eq!(statuses.iter().filter(|status| **status == 429).count(), 950, "denied");
    // Another client is not affected.
    assert_eq!(from("127.0.0.2", &gateway).get("/limited").remaining("hourly"), 49);
}

#[test]
fn peers_have_separate_buckets_by_address() {
    let listener = "[[listener]]\naddress = \"[::]:0\"\n";
    for (what, extra, remaining) in [
        ("IPv4", String::new(), [99, 98, 99, 99]),
        ("IPv4 in a prefix", "[client_ip]\nipv4_prefix = 29\n".to_owned(), [99, 98, 97, 99]),
        ("IPv4 on a listener for both", listener.to_owned(), [99, 98, 99, 99]),
    ] {
        let gateway = Gateway::start(&format!(
            "{extra}{}{}",
            limit("hourly", 100, "by = \"ip\""),
            route("limited", "\"hourly\"")
        ));
        let port = gateway.address.port();
        let ask = |peer: &str| {
            let address = ([127, 0, 0, 1], port).into();
            Client::connect_from(peer.parse().unwrap(), address).get("/limited").remaining("hourly")
        };
        assert_eq!(["127.0.0.2", "127.0.0.2", "127.0.0.3", "127.0.0.11"].map(ask), remaining, "{what}");
    }
}

/// A group has a name and a list of requests. Each request has the values of the tested header, and the expected
/// remaining quota (of 100) after the request.
type Group = (&'static str, &'static [(&'static [&'static str], u64)]);

fn assert_groups(gateway: &Gateway, header: &str, groups: &[Group]) {
    let mut client = from(PROXY, gateway);
    for (what, requests) in groups {
        for (values, remaining) in *requests {
            let lines: Vec<_> = values.iter().map(|value| (header, *value)).collect();
            let reply = client.get_with("/limited", &lines);
            assert_eq!(reply.remaining("hourly"), *remaining, "{what}: {values:?}");
        }
    }
}

#[test]
fn behind_a_trusted_proxy_the_last_untrusted_hop_counts() {
    let gateway = Gateway::start(&format!(
        "{}{}{}",
        "[client_ip]\ntrusted_proxies = [\"127.0.0.9/32\", \"10.0.0.0/8\", \"fd00::/8\"]\n",
        limit("hourly", 100, "by = \"ip\""),
        route("limited", "\"hourly\"")
    ));
    let groups: &[Group] = &[
        ("one hop", &[(&["198.51.100.1"], 99), (&["198.51.100.1"], 98), (&["198.51.100.2"], 99)]),
        (
            "what the client claims in front is ignored",
            &[
                (&["1.1.1.1, 198.51.100.3"], 99),
                (&["2.2.2.2,198.51.100.3"], 98),
                (&["198.51.100.1, 198.51.100.3"], 97),
                (&["junk, 198.51.100.3"], 96),
                (&[", ,198.51.100.3"], 95),
                (&["10.0.0.1, 198.51.100.3"], 94),
            ],
        ),
        (
            "trusted hops are skipped",
            &[
                (&["198.51.100.4, 10.1.2.3"], 99),
                (&["1.1.1.1, 198.51.100.4, 127.0.0.9, 10.1.2.3, fd00::1"], 98),
                (&["198.51.100.4 , ::ffff:10.1.2.3"], 97),
            ],
        ),
        (
            "several lines are one list",
            &[
                (&["1.1.1.1", "198.51.100.5"], 99),
                (&["198.51.100.5", "10.0.0.1"], 98),
                (&["1.1.1.1, 2.2.2.2", "3.3.3.3, 198.51.100.5", "10.0.0.1, 10.0.0.2"], 97),
            ],
        ),
        (
            "an IPv4-mapped address is IPv4",
            &[(&["198.51.100.6"], 99), (&["::ffff:198.51.100.6"], 98), (&["::FFFF:c633:6406"], 97)],
        ),
        ("a port does not count", &[(&["198.51.100.7:1234"], 99), (&["198.51.100.7:80"], 98), (&["198.51.100.7"], 97)]),
        (
            "a /64 of IPv6 is one client",
            &[
                (&["2001:db8:0:1::1"], 99),
                (&["2001:db8:0:1:ffff:ffff:ffff:ffff"], 98),
                (&["[2001:DB8:0:1::3]:443"], 97),
                (&["[2001:db8:0:1::4]"], 96),
                (&["2001:db8:0:2::1"], 99),
                (&["2001:db8::1:0:0:0:1"], 95),
            ],
        ),
        (
            "without a client address the proxy is charged",
            &[
                (&[], 99),
                (&["junk"], 98),
                (&["198.51.100.1, junk"], 97),
                (&["198.51.100.1,"], 96),
                (&["unknown"], 95),
                (&["127.0.0.9"], 94),
                (&["256.1.1.1"], 93),
            ],
        ),
        (
            "what cannot be read ends the walk at the hop that said so",
            &[(&["1.1.1.1, junk, 10.9.9.9"], 99), (&["10.9.9.9"], 98)],
        ),
    ];
    assert_groups(&gateway, "X-Forwarded-For", groups);
}

#[test]
fn client_address_is_read_from_the_configured_header() {
    let forwarded: &[Group] = &[(
        "elements",
        &[
            (&["for=198.51.100.1"], 99),
            (&["for=1.1.1.1;proto=http, For=\"198.51.100.1:80\";by=10.0.0.1"], 98),
            (&["for=1.1.1.1", "proto=https;for=198.51.100.1"], 97),
            (&["for=\"[2001:db8::1]:80\""], 99),
            (&["for=\"[2001:db8::2]\""], 98),
            (&["for=_hidden"], 99),
            (&["for=unknown"], 98),
            (&["proto=https"], 97),
        ],
    )];
    let single: &[Group] =
        &[("one address", &[(&["198.51.100.1"], 99), (&["198.51.100.1"], 98), (&["198.51.100.2"], 99)])];
    for (header, groups) in [("forwarded", forwarded), ("cf-connecting-ip", single)] {
        let gateway = Gateway::start(&format!(
            "{}{}{}",
            trusting(&format!("header = \"{header}\"")),
            limit("hourly", 100, "by = \"ip\""),
            route("limited", "\"hourly\"")
        ));
        assert_groups(&gateway, header, groups);
        // If `client_ip.header` names another header, the gateway ignores `X-Forwarded-For`.
        let other = [("X-Forwarded-For", "203.0.113.1")];
        let left = from(PROXY, &gateway).get_with("/limited", &other).remaining("hourly");
        assert_eq!(from(PROXY, &gateway).get("/limited").remaining("hourly"), left - 1, "{header}");
    }
}

#[test]
fn user_headers_are_read_from_trusted_proxies_only() {
    let upstream = Upstream::start();
    let forward = |name: &str, limits: &str| {
        format!("[[route]]\nname = \"{name}\"\npath = \"/{name}\"\nlimits = [{limits}]\nupstream = \"api\"\n")
    };
    let gateway = Gateway::start(&format!(
        "{}[upstream.api]\nservers = [\"{}\"]\n{}{}{}{}{}",
        trusting(""),
        upstream.url(),
        limit("per-user", 100, "by = \"user:x-user-id\""),
        limit("lenient", 100, "by = \"user:x-user-id\"\non_missing = \"skip\""),
        forward("strict", "\"per-user\""),
        forward("lenient", "\"lenient\""),
        forward("free", ""),
    ));

    let mut proxy = from(PROXY, &gateway);
    let user = |name: &'static str| [("X-User-Id", name), ("X-Forwarded-For", "198.51.100.1")];
    for (name, remaining) in [("alice", 99), ("alice", 98), ("bob", 99), ("Alice", 99), ("alice", 97)] {
        let reply = proxy.get_with("/strict", &user(name));
        assert_eq!(reply.remaining("per-user"), remaining, "{name}");
        assert_eq!(upstream.last().headers("x-user-id"), [name], "the upstream receives the user");
    }
    for (what, lines) in [
        ("none", &[][..]),
        ("an empty one", &[("X-User-Id", "")]),
        ("two", &[("X-User-Id", "alice"), ("X-User-Id", "bob")]),
        ("another spelling only", &[("X_User_Id", "alice")]),
    ] {
        let before = upstream.count();
        proxy.get_with("/strict", lines).assert_problem(400, &format!("{what} from the proxy"));
        assert_eq!(upstream.count(), before, "{what}: nothing is forwarded");
    }

    let mut untrusted = gateway.client();
    untrusted.get_with("/strict", &[("X-User-Id", "alice")]).assert_problem(400, "a forged user header");
    untrusted.get("/strict").assert_problem(400, "no user header");
    let spoofed = [
        ("X-User-Id", "alice"),
        ("x-user-id", "bob"),
        ("X_User_Id", "alice"),
        ("x.user.id", "alice"),
        ("X-User_Id", "alice"),
        ("x-user-name", "kept"),
        ("x_other", "kept"),
    ];
    for path in ["/lenient", "/free"] {
        let reply = untrusted.get_with(path, &spoofed);
        assert_eq!((reply.status, reply.header("ratelimit")), (200, None), "{path}: the limit does not apply");
        let seen = upstream.last();
        for name in ["x-user-id", "x_user_id", "x.user.id", "x-user_id"] {
            assert_eq!(seen.headers(name), [""; 0], "{path}: {name} of an untrusted client is removed");
        }
        for name in ["x-user-name", "x_other"] {
            assert_eq!(seen.headers(name), ["kept"], "{path}: {name} is forwarded");
        }
    }
    // The gateway keeps the user header of the proxy, but removes its aliases.
    assert_eq!(proxy.get_with("/free", &spoofed[1..]).status, 200);
    let seen = upstream.last();
    assert_eq!(seen.headers("x-user-id"), ["bob"]);
    for name in ["x_user_id", "x.user.id", "x-user_id"] {
        assert_eq!(seen.headers(name), [""; 0], "{name} is removed from the proxy's request");
    }
}

#[test]
fn consumer_has_one_bucket_for_all_its_keys() {
    let config = format!(
        "[auth.keys]\nkind = \"api-key\"\nconsumers = \"consumers.toml\"\n{}{}{}{}",
        limit("per-key", 100, "by = \"api-key\""),
        limit("per-ip", 1000, "by = \"ip\""),
        identified("keyed", "\"keys\"", "\"per-ip\", \"per-key\""),
        route("open", "\"per-ip\""),
    );
    let file = consumers(&[("alice", &["alice-1", "alice-2"]), ("bob", &["bob-1"])]);
    let gateway = Gateway::start_with(&config, &[("consumers.toml", &file)]);
    let mut client = gateway.client();
    for (key, remaining) in [("alice-1", 99), ("alice-2", 98), ("alice-1", 97), ("bob-1", 99)] {
        let reply = client.get_with("/keyed", &[("X-Api-Key", key)]);
        assert_eq!((reply.status, reply.remaining("per-key")), (200, remaining), "{key}");
    }
    let two = [("X-Api-Key", "alice-1"), ("x-api-key", "alice-1")];
    for (what, lines, status) in [
        ("no key", &[][..], 401),
        ("an empty key", &[("X-Api-Key", "")], 401),
        ("an unknown key", &[("X-Api-Key", "mallory")], 401),
        ("a known key in another case", &[("X-Api-Key", "ALICE-1")], 401),
        ("a known key and more", &[("X-Api-Key", "alice-1x")], 401),
        ("the name of a consumer", &[("X-Api-Key", "alice")], 401),
        ("two keys", &two, 400),
        ("two keys in one line", &[("X-Api-Key", "alice-1, bob-1")], 401),
    ] {
        let reply = client.get_with("/keyed", lines);
        reply.assert_problem(status, what);
        assert_eq!(reply.header("www-authenticate").is_some(), status == 401, "{what}: a 401 names a scheme");
        for key in ["alice-1", "mallory", "ALICE"] {
            assert!(!reply.text().contains(key), "{what}: a key is never repeated: {}", reply.text());
        }
    }
    // The seven requests that got 401 were charged to the limit `per-ip`.
    let reply = client.get_with("/keyed", &[("X-Api-Key", "alice-1")]);
    assert_eq!((reply.remaining("per-key"), reply.remaining("per-ip")), (96, 988));
    // On a route without a provider, the gateway does not read keys.
    for lines in [&[][..], &[("X-Api-Key", "mallory")], &two] {
        assert_eq!(client.get_with("/open", lines).status, 200, "{lines:?}");
    }
}

#[test]
fn missing_and_unknown_keys_follow_the_configuration() {
    let file = consumers(&[("alice", &["alice-1"])]);
    let alice: &[(&str, &str)] = &[("X-Api-Key", "alice-1")];
    let eve: &[(&str, &str)] = &[("X-Api-Key", "eve")];
    let mallory: &[(&str, &str)] = &[("X-Api-Key", "mallory")];
    let none: &[(&str, &str)] = &[];
    // Each request has the address of the client, the headers, and the result: the remaining quota (of 100), or the
    // status of the rejection.
    for (settings, requests) in [
        (
            "on_missing = \"anonymous\"",
            &[
                ("127.0.0.2", none, Ok(99)),
                ("127.0.0.2", &[("X-Api-Key", "")], Ok(98)),
                ("127.0.0.3", none, Ok(99)),
                ("127.0.0.2", alice, Ok(99)),
                ("127.0.0.3", alice, Ok(98)),
                ("127.0.0.2", eve, Err(401)),
            ][..],
        ),
        (
            "on_unknown = \"anonymous\"",
            &[
                ("127.0.0.2", eve, Ok(99)),
                ("127.0.0.2", mallory, Ok(98)),
                ("127.0.0.3", eve, Ok(99)),
                ("127.0.0.2", alice, Ok(99)),
                ("127.0.0.2", none, Err(401)),
            ],
        ),
        (
            "on_missing = \"anonymous\"\non_unknown = \"anonymous\"",
            &[("127.0.0.2", eve, Ok(99)), ("127.0.0.2", none, Ok(98)), ("127.0.0.3", none, Ok(99))],
        ),
        (
            "on_unknown = \"accept\"",
            &[
                ("127.0.0.2", eve, Ok(99)),
                ("127.0.0.3", eve, Ok(98)),
                ("127.0.0.2", mallory, Ok(99)),
                ("127.0.0.2", alice, Ok(99)),
                // An API key that equals the name of a consumer does not identify this consumer.
                ("127.0.0.2", &[("X-Api-Key", "alice")], Ok(99)),
                ("127.0.0.2", none, Err(401)),
                ("127.0.0.2", &[("X-Api-Key", "eve"), ("X-Api-Key", "mallory")], Err(400)),
            ],
        ),
    ] {
        let config = format!(
            "[auth.keys]\nkind = \"api-key\"\nconsumers = \"consumers.toml\"\n{settings}\n{}{}",
            limit("per-key", 100, "by = \"api-key\""),
            identified("keyed", "\"keys\"", "\"per-key\""),
        );
        let gateway = Gateway::start_with(&config, &[("consumers.toml", &file)]);
        for (peer, lines, expected) in requests {
            let reply = from(peer, &gateway).get_with("/keyed", lines);
            match expected {
                Ok(remaining) => assert_eq!(reply.remaining("per-key"), *remaining, "{settings}: {peer} {lines:?}"),
                Err(status) => reply.assert_problem(*status, &format!("{settings}: {peer} {lines:?}")),
            }
        }
    }
}

#[test]
fn api_key_is_read_from_the_configured_header() {
    let config = format!(
        "[auth.keys]\nkind = \"api-key\"\nheader = \"authorization\"\nscheme = \"Token\"\non_unknown = \"accept\"\n{}{}",
        limit("per-key", 100, "by = \"api-key\""),
        identified("keyed", "\"keys\"", "\"per-key\""),
    );
    let gateway = Gateway::start(&config);
    let mut client = gateway.client();
    assert_eq!(client.get_with("/keyed", &[("Authorization", "Token a")]).remaining("per-key"), 99);
    assert_eq!(client.get_with("/keyed", &[("Authorization", "Token b")]).remaining("per-key"), 99);
    assert_eq!(client.get_with("/keyed", &[("Authorization", "Token a")]).remaining("per-key"), 98);
    assert_eq!(client.get_with("/keyed", &[("authorization", "token  a")]).remaining("per-key"), 97);
    for value in ["Bearer a", "Token", "Tokena", "Token ", "a"] {
        client.get_with("/keyed", &[("Authorization", value)]).assert_problem(401, value);
    }
    client.get_with("/keyed", &[("X-Api-Key", "a")]).assert_problem(401, "the default header is not read");
}

#[test]
fn tuple_of_parts_is_one_identity() {
    let gateway = Gateway::start(&format!(
        "{}{}{}{}{}{}{}",
        limit("pair", 100, "by = [\"ip\", \"header:x-tenant\"]"),
        limit("names", 100, "by = [\"header:x-a\", \"header:x-b\"]"),
        limit("per-route", 100, "by = \"route\""),
        limit("everybody", 1000, "by = \"global\""),
        route("pair", "\"pair\""),
        route("names", "\"names\""),
        route("one", "\"per-route\", \"everybody\"") + &route("other", "\"per-route\", \"everybody\""),
    ));
    for (peer, path, lines, remaining) in [
        ("127.0.0.2", "/pair", &[("X-Tenant", "a")][..], Some(99)),
        ("127.0.0.2", "/pair", &[("X-Tenant", "a")], Some(98)),
        ("127.0.0.2", "/pair", &[("X-Tenant", "b")], Some(99)),
        ("127.0.0.3", "/pair", &[("X-Tenant", "a")], Some(99)),
        ("127.0.0.3", "/pair", &[], None),
        // The boundary between two parts matters: the parts `ab` and `c` are another identity than `a` and `bc`.
        ("127.0.0.2", "/names", &[("X-A", "ab"), ("X-B", "c")], Some(99)),
        ("127.0.0.2", "/names", &[("X-A", "a"), ("X-B", "bc")], Some(99)),
        ("127.0.0.2", "/names", &[("X-A", "c"), ("X-B", "ab")], Some(99)),
        ("127.0.0.3", "/names", &[("X-B", "c"), ("X-A", "ab")], Some(98)),
        ("127.0.0.2", "/names", &[("X-A", "ab")], None),
        // A header that contains a list is one value. If the header occurs twice, the gateway rejects the request,
        // because servers differ in which value they use.
        ("127.0.0.2", "/names", &[("X-A", "1"), ("X-A", "2"), ("X-B", "c")], None),
        ("127.0.0.2", "/names", &[("X-A", "1, 2"), ("X-B", "c")], Some(99)),
        // Two limits apply to each of these routes. The first limit has one bucket per route.
        ("127.0.0.2", "/one", &[], Some(99)),
        ("127.0.0.3", "/one", &[], Some(98)),
        ("127.0.0.2", "/other", &[], Some(99)),
    ] {
        let reply = from(peer, &gateway).get_with(path, lines);
        let what = format!("{peer} {path} {lines:?}");
        let name = match path {
            "/pair" => "pair",
            "/names" => "names",
            _ => "per-route",
        };
        match remaining {
            Some(remaining) => assert_eq!(reply.remaining(name), remaining, "{what}"),
            None => reply.assert_problem(400, &what),
        }
    }
    assert_eq!(gateway.get("/other").remaining("everybody"), 996, "one bucket for all routes and clients");
}

#[test]
fn hostile_identities_have_their_own_buckets() {
    let redis = Redis::start();
    let gateway = Gateway::start(&format!(
        "{}{}{}{}{}",
        redis.store(),
        limit("header", 100, "by = \"header:x-id\""),
        limit("query", 100, "by = \"query:id\""),
        route("header", "\"header\""),
        route("query", "\"query\""),
    ));
    let mut client = gateway.client();
    let long = [b'x'; 30 << 10];
    let headers: [&[u8]; 14] = [
        b"a",
        b"a}b{c",
        b"a}",
        b"{a}",
        b"{}:",
        b"a:b",
        b"rl:{a}:header",
        b"a\xff",
        b"a\xfe",
        b"\xe9",
        b"\xc3\xa9",
        b"a\tb",
        &long,
        &long[1..],
    ];
    let mut ask = |head: &[&[u8]]| {
        client.send(&[head.concat(), b"\r\nHost: gateway.test\r\n\r\n".to_vec()].concat());
        client.reply().unwrap()
    };
    for remaining in [99, 98] {
        for value in headers {
            let reply = ask(&[b"GET /header HTTP/1.1\r\nX-Id: ", value]);
            assert_eq!(reply.remaining("header"), remaining, "{}", value.escape_ascii());
        }
    }
    let queries = [
        "a",
        "%00",
        "a%00",
        "%0D%0A",
        "%0d",
        "%0A",
        "a%0d%0ab",
        "%7Ba%7D",
        "{}:",
        "%7D",
        "%ff",
        "%fe",
        "%ef%bf%bd",
        "%25ff",
        "%",
        "%f",
        "%zz",
        "a+b",
        "a%2Bb",
    ];
    for remaining in [99, 98] {
        for value in queries {
            let reply = ask(&[b"GET /query?id=", value.as_bytes(), b" HTTP/1.1"]);
            assert_eq!(reply.remaining("query"), remaining, "{value}");
        }
    }
    // Other percent-encodings of the same values use the same buckets.
    for (value, remaining) in [("%61", 97), ("%7b%7D:", 97), ("%FF", 97), ("a%20b", 97)] {
        let reply = ask(&[b"GET /query?id=", value.as_bytes(), b" HTTP/1.1"]);
        assert_eq!(reply.remaining("query"), remaining, "{value}");
    }
    let keys = redis.keys();
    let lengths: Vec<_> = keys.iter().map(String::len).collect();
    let expected = vec![lengths[0]; headers.len() + queries.len()];
    assert_eq!(lengths, expected, "one key per value, all of the same length");
    redis.assert_every_key_expires();

    let mut client = gateway.client();
    client.send(&[b"GET /header HTTP/1.1\r\nHost: a\r\nX-Id: ", &[b'x'; 64 << 10][..], b"\r\n\r\n"].concat());
    assert_eq!(client.reply().unwrap().status, 431, "the headers are too long");
    assert_eq!(gateway.client().get_with("/header", &[("X-Id", "a")]).remaining("header"), 97);
}

#[test]
fn missing_part_is_rejected_skipped_or_replaced_by_the_address() {
    let tenant = |on_missing: &str, quota| limit("tenant", quota, &format!("by = \"header:x-tenant\"\n{on_missing}"));
    let start = |on_missing: &str| {
        let other = limit("per-ip", 100, "by = \"ip\"");
        Gateway::start(&format!("{}{other}{}", tenant(on_missing, 2), route("limited", "\"tenant\", \"per-ip\"")))
    };
    let named = [("X-Tenant", "a")];

    let gateway = start("");
    gateway.get("/limited").assert_problem(400, "rejected by default");
    assert_eq!(gateway.client().get_with("/limited", &named).remaining("tenant"), 1);

    let gateway = start("on_missing = \"skip\"");
    let mut client = gateway.client();
    for n in 1..=5 {
        let reply = client.get("/limited");
        assert_eq!((reply.status, reply.remaining("per-ip")), (200, 100 - n), "the other limit still counts");
        let policy = reply.header("ratelimit-policy").unwrap();
        assert!(!policy.contains("tenant"), "a skipped limit is not advertised: {policy}");
    }
    assert_eq!([0; 2].map(|_| client.get_with("/limited", &named).remaining("tenant")), [1, 0]);
    assert_denied(&client.get_with("/limited", &named), "tenant", "a named tenant is limited");

    let gateway = start("on_missing = \"ip\"");
    for (peer, lines, remaining) in [
        ("127.0.0.2", &[][..], Some(1)),
        ("127.0.0.3", &[], Some(1)),
        ("127.0.0.2", &named, Some(1)),
        ("127.0.0.2", &[], Some(0)),
        ("127.0.0.2", &[], None),
        ("127.0.0.3", &[], Some(0)),
        ("127.0.0.3", &named, Some(0)),
        // A header value that looks like an address is another identity than the client with this address.
        ("127.0.0.4", &[("X-Tenant", "127.0.0.2")], Some(1)),
    ] {
        let reply = from(peer, &gateway).get_with("/limited", lines);
        match remaining {
            Some(remaining) => assert_eq!(reply.remaining("tenant"), remaining, "{peer} {lines:?}"),
            None => assert_denied(&reply, "tenant", &format!("{peer} {lines:?}")),
        }
    }
}

#[test]
fn on_missing_of_api_keys_and_user_headers_is_followed() {
    // The provider `keys` has no `on_missing`, so `on_missing` of the limit applies.
    let config = format!(
        "{}[auth.keys]\nkind = \"api-key\"\non_unknown = \"accept\"\n{}{}{}{}",
        trusting(""),
        limit("key", 100, "by = \"api-key\"\non_missing = \"skip\""),
        limit("user", 100, "by = \"user:x-user-id\"\non_missing = \"ip\""),
        identified("keyed", "\"keys\"", "\"key\""),
        route("named", "\"user\""),
    );
    let gateway = Gateway::start(&config);
    let reply = gateway.get("/keyed");
    assert_eq!((reply.status, reply.header("ratelimit")), (200, None), "without a key the limit is skipped");
    let mut client = gateway.client();
    assert_eq!(client.get_with("/keyed", &[("X-Api-Key", "a")]).remaining("key"), 99);
    // The gateway ignores the user header of an untrusted client and charges its address.
    for (name, remaining) in [("alice", 99), ("bob", 98), ("carol", 97)] {
        assert_eq!(client.get_with("/named", &[("X-User-Id", name)]).remaining("user"), remaining, "{name}");
    }
    assert_eq!(from(PROXY, &gateway).get_with("/named", &[("X-User-Id", "alice")]).remaining("user"), 99);
}

#[test]
fn cookie_is_read_from_any_cookie_line() {
    let gateway = Gateway::start(&format!("{}{}", limit("l", 100, "by = \"cookie:sid\""), route("r", "\"l\"")));
    let mut client = gateway.client();
    let mut ask = |lines: &[&str]| {
        let headers: Vec<_> = lines.iter().map(|line| ("Cookie", *line)).collect();
        client.get_with("/r", &headers)
    };
    for (lines, left) in [
        (&["sid=a"][..], 99),
        (&["x=1; sid=a"], 98),
        (&["x=1", "sid=a"], 97),
        (&["x=1", "y=2; sid=a", "z=3"], 96),
        (&["sid=b", "x=1"], 99),
    ] {
        assert_eq!(ask(lines).remaining("l"), left, "{lines:?}");
    }
    for lines in [&["sid=a; sid=b"][..], &["sid=a", "sid=b"], &["sid=a", "x=1", "sid=a"]] {
        ask(lines).assert_problem(400, "two cookies with the same name are ambiguous");
    }
}

#[test]
fn exempt_network_includes_clients_without_a_key() {
    let settings = "[auth.keys]\nkind = \"api-key\"\nconsumers = \"consumers.toml\"\non_missing = \"anonymous\"\n";
    let config = format!(
        "{settings}{}{}",
        limit("l", 1, "by = \"api-key\"\nexempt = [\"ip=127.0.0.2/32\"]"),
        identified("r", "\"keys\"", "\"l\"")
    );
    let file = consumers(&[("alice", &["alice-1"])]);
    let gateway = Gateway::start_with(&config, &[("consumers.toml", &file)]);
    for (address, key, expected) in [
        ("127.0.0.2", None, [200, 200]),
        ("127.0.0.3", None, [200, 429]),
        // The identity of a consumer is its name, whatever the client's address is.
        ("127.0.0.2", Some("alice-1"), [200, 429]),
    ] {
        let headers: Vec<_> = key.map(|key| ("x-api-key", key)).into_iter().collect();
        let mut client = from(address, &gateway);
        assert_eq!([(); 2].map(|()| client.get_with("/r", &headers).status), expected, "{address}, {key:?}");
    }
}

#[test]
fn exempt_values_apply_to_their_source_only() {
    let settings = "[auth.keys]\nkind = \"api-key\"\nconsumers = \"consumers.toml\"\non_unknown = \"accept\"\n";
    let file = consumers(&[("batch", &["batch-key"]), ("other", &["other-key"])]);
    let key = |key| ("x-api-key", key);
    for (by, exempt, cases) in [
        (
            r#""api-key", "header:x-tenant""#,
            "api-key=batch",
            &[
                (&[key("batch-key"), ("x-tenant", "t")][..], "/r", true),
                (&[key("batch"), ("x-tenant", "t")], "/r", false),
                (&[key("api-key=batch"), ("x-tenant", "t")], "/r", false),
                (&[key("other-key"), ("x-tenant", "batch")], "/r", false),
            ][..],
        ),
        // The exempt value applies to the header `x-role` only, not to `x-tenant`. Names of headers are
        // case-insensitive.
        (
            r#""header:x-tenant", "header:x-role""#,
            "header:X-Role=a=b",
            &[
                (&[("x-tenant", "t"), ("x-role", "a=b")][..], "/r", true),
                (&[("x-tenant", "a=b"), ("x-role", "r")], "/r", false),
                (&[("x-tenant", "t"), ("x-role", "a")], "/r", false),
            ],
        ),
        (
            r#""cookie:a", "query:a""#,
            "cookie:a=7",
            &[(&[("cookie", "a=7")][..], "/r?a=1", true), (&[("cookie", "a=1")], "/r?a=7", false)],
        ),
        (
            r#""host""#,
            "host=Batch.Test",
            &[(&[("host", "batch.test")][..], "/r", true), (&[("host", "a.test")], "/r", false)],
        ),
        (r#""ip", "header:x-tenant""#, "ip=127.0.0.0/8", &[(&[("x-tenant", "t")][..], "/r", true)]),
        (r#""ip", "header:x-tenant""#, "ip=10.0.0.0/8", &[(&[("x-tenant", "10.0.0.1")][..], "/r", false)]),
        (r#""ip""#, "127.0.0.1", &[(&[][..], "/r", true)]),
    ] {
        let terms = format!("by = [{by}]\nexempt = [\"{exempt}\"]");
        let config = format!("{settings}{}{}", limit("l", 1, &terms), identified("r", "\"keys\"", "\"l\""));
        let gateway = Gateway::start_with(&config, &[("consumers.toml", &file)]);
        let mut client = gateway.client();
        for (headers, path, is_exempt) in cases {
            let statuses = [(); 2].map(|()| client.get_with(path, headers).status);
            let expected = if *is_exempt { [200, 200] } else { [200, 429] };
            assert_eq!(statuses, expected, "{exempt}: {headers:?} {path}");
        }
    }
}

#[test]
fn tiers_inherit_quota_and_burst_unless_set() {
    let sizes = [
        ("neither", "", 9),
        ("quota", "quota = \"120/min\"", 119),
        ("burst", "burst = 3", 2),
        ("both", "quota = \"120/min\", burst = 5", 4),
    ];
    let mut tiers = Vec::new();
    let mut file = String::new();
    for (name, size, _) in sizes {
        tiers.push(format!("{name} = {{ {size} }}"));
        // Configure the same quota for two consumers: for one by its tier, for the other as its own quota.
        for (kind, line) in [("tier", format!("tier = \"{name}\"")), ("own", format!("limit.l = {{ {size} }}"))] {
            let (consumer, key) = (format!("{kind}-{name}"), format!("{kind}-{name}-key"));
            file.push_str(&consumers(&[(&consumer, &[&key])]));
            file.push_str(&format!("{line}\n"));
        }
    }
    let config = format!(
        "[auth.keys]\nkind = \"api-key\"\nconsumers = \"consumers.toml\"\n[limit.l]\nby = \"api-key\"\nquota = \"60/min\"\nburst = 10\ntiers = {{ {} }}\n{}",
        tiers.join(", "),
        identified("r", "\"keys\"", "\"l\"")
    );
    let gateway = Gateway::start_with(&config, &[("consumers.toml", &file)]);
    let mut client = gateway.client();
    for (name, size, left) in sizes {
        for kind in ["tier", "own"] {
            let key = format!("{kind}-{name}-key");
            assert_eq!(client.get_with("/r", &[("x-api-key", &key)]).remaining("l"), left, "{kind} {{ {size} }}");
        }
    }
}

#[test]
fn invalid_credentials_are_not_charged_to_shared_limits() {
    for by in ["\"global\"", "\"route\"", "\"header:x-tenant\""] {
        let config = format!(
            "[auth.keys]\nkind = \"api-key\"\nconsumers = \"consumers.toml\"\n{}{}{}",
            limit("shared", 2, &format!("by = {by}")),
            limit("who", 100, "by = \"api-key\""),
            identified("r", "\"keys\"", "\"shared\", \"who\"")
        );
        let gateway = Gateway::start_with(&config, &[("consumers.toml", &consumers(&[("alice", &["alice-1"])]))]);
        let mut client = gateway.client();
        let ask = |client: &mut Client, key| client.get_with("/r", &[("x-api-key", key), ("x-tenant", "t")]).status;
        assert_eq!([(); 5].map(|()| ask(&mut client, "guess")), [401; 5], "{by}");
        assert_eq!([(); 3].map(|()| ask(&mut client, "alice-1")), [200, 200, 429], "{by}");
    }
}

#[test]
fn invalid_credentials_are_charged_to_limits_without_credentials() {
    let key = Key::ed("k");
    let jwks = key_set(&[&key]);
    let claims = json!({ "sub": "alice", "exp": in_seconds(3600) });
    let bearer = |token: String| format!("Bearer {token}");
    let valid = bearer(key.token(&claims));
    let expired = bearer(key.token(&json!({ "sub": "alice", "exp": in_seconds(-3600) })));
    let forged = bearer(Key::ed("k").token(&claims));
    let unknown = bearer(Key::ed("other").token(&claims));
    let nameless = bearer(key.token(&json!({ "exp": in_seconds(3600) })));
    let unsigned = bearer(signed(&json!({ "alg": "none" }), &claims, |_| Vec::new()));
    let settings = "[auth.keys]\nkind = \"api-key\"\nconsumers = \"consumers.toml\"\n[auth.tokens]\nkind = \"jwt\"\njwks_file = \"jwks.json\"\n";
    let file = consumers(&[("alice", &["alice-1"])]);
    let both = |by: &str, terms: &str| {
        let per_ip = limit("per-ip", 3, &format!("by = \"ip\"\n{terms}"));
        format!("{settings}{per_ip}{}", limit("who", 100, &format!("by = \"{by}\"")))
    };
    for (what, by, terms, limits, header) in [
        ("unknown key", "api-key", "", "\"per-ip\", \"who\"", Some(("x-api-key", "guess"))),
        ("the credential's limit first", "api-key", "", "\"who\", \"per-ip\"", Some(("x-api-key", "guess"))),
        ("no key", "api-key", "", "\"per-ip\", \"who\"", None),
        ("refunds", "api-key", "refund_on = [\"4xx\", \"401\"]", "\"per-ip\", \"who\"", Some(("x-api-key", "guess"))),
        (
            "post-paid",
            "api-key",
            "cost = { response_header = \"x-cost\" }",
            "\"per-ip\", \"who\"",
            Some(("x-api-key", "guess")),
        ),
        ("malformed token", "jwt:sub", "", "\"per-ip\", \"who\"", Some(("authorization", "Bearer guess"))),
        ("no token", "jwt:sub", "", "\"per-ip\", \"who\"", None),
        ("expired token", "jwt:sub", "", "\"per-ip\", \"who\"", Some(("authorization", &*expired))),
        ("wrong signature", "jwt:sub", "", "\"per-ip\", \"who\"", Some(("authorization", &*forged))),
        ("the token's limit first", "jwt:sub", "", "\"who\", \"per-ip\"", Some(("authorization", &*forged))),
        ("unknown kid", "jwt:sub", "", "\"per-ip\", \"who\"", Some(("authorization", &*unknown))),
        ("no such claim", "jwt:sub", "", "\"per-ip\", \"who\"", Some(("authorization", &*nameless))),
        ("unsigned", "jwt:sub", "", "\"per-ip\", \"who\"", Some(("authorization", &*unsigned))),
    ] {
        let provider = if by == "api-key" { "\"keys\"" } else { "\"tokens\"" };
        let config = format!("{}{}", both(by, terms), identified("r", provider, limits));
        let gateway = Gateway::start_with(&config, &[("consumers.toml", &file), ("jwks.json", &jwks)]);
        let headers: Vec<_> = header.into_iter().collect();
        let mut client = gateway.client();
        let statuses = [(); 5].map(|()| client.get_with("/r", &headers).status);
        assert_eq!(statuses, [401, 401, 401, 429, 429], "{what}");
        assert_denied(&client.get_with("/r", &headers), "per-ip", what);
        assert_eq!(from("127.0.0.2", &gateway).get_with("/r", &headers).status, 401, "{what}: another address");
        // The failed attempts from this address have exhausted the limit `per-ip`. The limit therefore also denies
        // requests from this address that have valid credentials. From another address, a request with a valid
        // credential is charged to all limits.
        let right = if by == "api-key" { ("x-api-key", "alice-1") } else { ("authorization", &*valid) };
        assert_denied(&client.get_with("/r", &[right]), "per-ip", what);
        let reply = from("127.0.0.3", &gateway).get_with("/r", &[right]);
        assert_eq!((reply.status, reply.remaining("per-ip"), reply.remaining("who")), (200, 2, 99), "{what}");
    }
}
