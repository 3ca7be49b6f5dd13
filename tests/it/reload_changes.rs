//! State that belongs to a setting: a reload keeps the state if the setting is equal, and drops it if the setting
//! changes.

use std::io::Write;

use serde_json::json;

use crate::basic_auth::htpasswd;
use crate::support::certificates::{Authority, NOW, Pair};
use crate::support::client::{Client, load};
use crate::support::eventually;
use crate::support::gateway::Gateway;
use crate::support::redis::{Redis, free_port};
use crate::support::reload::{metric, reloads, with_admin};
use crate::support::server::{Behaviour, Server};
use crate::support::tls_upstream::{self, TlsUpstream};
use crate::support::tokens::{Key, in_seconds, key_set};
use crate::support::upstream::{Upstream, read_request};
use aws_lc_rs::digest::{SHA256, digest};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;

/// A route that has nothing to do with the tested setting.
const OTHER_ROUTE: &str = "[[route]]\nname = \"other\"\npath = \"/other\"\nrespond = { status = 200 }\n";

/// A response with this body.
fn ok(body: &str) -> Vec<u8> {
    format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len()).into_bytes()
}

/// Start an authentication server that admits every request.
fn admitting() -> Upstream {
    Upstream::responding(|_| b"HTTP/1.1 200 OK\r\nX-User: alice\r\nContent-Length: 0\r\n\r\n".to_vec())
}

/// Start a server with TLS that responds to every request with `body`.
fn tls_server(pair: &Pair, clients: Option<&Authority>, body: Vec<u8>) -> TlsUpstream {
    let config = tls_upstream::server(pair, clients, &["http/1.1"], rustls::ALL_VERSIONS);
    TlsUpstream::serve(config, move |mut stream| {
        while read_request(&mut stream).is_some() {
            if stream.write_all(&body).is_err() {
                return;
            }
        }
    })
}

#[test]
fn cached_admissions_are_kept_for_equal_settings_only() {
    let (server, other) = (admitting(), admitting());
    let config = |url: &str, keys: &str, rest: &str| {
        format!(
            "[auth.sso]\nkind = \"forward\"\nurl = \"{url}\"\n{keys}\n{rest}\
             [[route]]\nname = \"r\"\npath = \"/r\"\nrequire = [\"sso\"]\nrespond = {{ status = 200 }}\n"
        )
    };
    let url = format!("{}/verify?a", server.url());
    let keys = "response_headers = [\"x-user\"]\ncache = { ttl = \"1h\" }";
    let changed = |from: &str, to: &str| keys.replace(from, to);
    let more = |line: &str| format!("{keys}\n{line}");
    // This upstream comes before the internal upstream of the authentication server.
    let upstream = format!("[upstream.a]\nservers = [\"{}\"]\n", other.url());
    let unused = upstream + "[[route]]\nname = \"a\"\npath = \"/a\"\nupstream = \"a\"\n";
    for (what, url_after, keys_after, rest, is_kept) in [
        ("nothing", url.clone(), keys.to_owned(), "", true),
        ("another route", url.clone(), keys.to_owned(), OTHER_ROUTE, true),
        ("another upstream", url.clone(), keys.to_owned(), &*unused, true),
        ("forward_credential", url.clone(), more("forward_credential = false"), "", true),
        ("path of url", url.replace("/verify", "/check"), keys.to_owned(), "", false),
        ("query of url", url.replace("?a", "?b"), keys.to_owned(), "", false),
        ("host of url", url.replace("127.0.0.1", "localhost"), keys.to_owned(), "", false),
        ("port of url", format!("{}/verify?a", other.url()), keys.to_owned(), "", false),
        ("request_headers", url.clone(), more("request_headers = [\"cookie\"]"), "", false),
        ("response_headers", url.clone(), changed("x-user", "x-name"), "", false),
        ("timeout", url.clone(), more("timeout = \"3s\""), "", false),
        ("on_error", url.clone(), more("on_error = \"allow\""), "", false),
        ("cache.ttl", url.clone(), changed("1h", "59m"), "", false),
        ("cache.max_entries", url.clone(), changed("\"1h\"", "\"1h\", max_entries = 9"), "", false),
        ("cache.by", url.clone(), changed("{ ttl", "{ by = [\"authorization\", \"cookie\", \"uri\"], ttl"), "", false),
        ("cache", url.clone(), changed("cache = { ttl = \"1h\" }", ""), "", false),
    ] {
        let gateway = Gateway::start(&with_admin(&config(&url, keys, "")));
        let calls = || server.count() + other.count();
        let admitted = || {
            let before = calls();
            assert_eq!(gateway.client().get_with("/r", &[("cookie", "s=1")]).status, 200, "{what}");
            calls() - before
        };
        assert_eq!((admitted(), admitted()), (1, 0), "{what}: the admission is cached");
        reloads(&gateway, &config(&url_after, &keys_after, rest));
        assert_eq!(admitted(), usize::from(!is_kept), "{what}: calls of the server after the reload");
    }
}

#[test]
fn cached_admissions_of_a_server_that_is_no_longer_trusted_are_dropped() {
    let authority = Authority::new("ca");
    let body = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n".to_vec();
    let server = tls_server(&authority.server(&["127.0.0.1"], NOW), None, body);
    let config = |ca: &str| {
        format!(
            "[auth.sso]\nkind = \"forward\"\nurl = \"https://{}/\"\nca = \"{ca}\"\ncache = {{ ttl = \"1h\" }}\n\
             [[route]]\nname = \"r\"\npath = \"/r\"\nrequire = [\"sso\"]\nrespond = {{ status = 200 }}\n",
            server.address
        )
    };
    let files = [("ca.pem", &*authority.pem()), ("other.pem", &*Authority::new("other").pem())];
    let gateway = Gateway::start_with(&with_admin(&config("ca.pem")), &files);
    assert_eq!(gateway.get("/r").status, 200);
    reloads(&gateway, &(config("ca.pem") + OTHER_ROUTE));
    assert_eq!((gateway.get("/r").status, server.handshakes().len()), (200, 1), "the same server is still trusted");
    reloads(&gateway, &config("other.pem"));
    assert_eq!(gateway.get("/r").status, 503, "neither the admission nor the connection outlives the CA");
}

#[test]
fn keys_of_a_token_issuer_are_kept_for_the_same_source_only() {
    let (authority, key) = (Authority::new("ca"), Key::ed("a"));
    let body = ok(&key_set(&[&key]));
    let issuer = tls_server(&authority.server(&["127.0.0.1", "localhost"], NOW), None, body);
    let stranger = Key::ed("a");
    let other = tls_server(&authority.server(&["127.0.0.1"], NOW), None, ok(&key_set(&[&stranger])));
    let url = format!("https://{}/jwks.json", issuer.address);
    let config = |name: &str, url: &str, keys: &str, rest: &str| {
        format!(
            "[auth.{name}]\nkind = \"jwt\"\njwks_url = \"{url}\"\n{keys}\n{rest}\
             [[route]]\nname = \"r\"\npath = \"/r\"\nrequire = [\"{name}\"]\nrespond = {{ status = 200 }}\n"
        )
    };
    let ca = "ca = \"ca.pem\"";
    let files = [("ca.pem", &*authority.pem()), ("other.pem", &*Authority::new("other").pem())];
    let refused = format!("https://127.0.0.1:{}/jwks.json", free_port());
    for (what, name, url_after, keys, rest, status) in [
        ("nothing", "tokens", url.clone(), ca.to_owned(), "", 200),
        ("another route", "tokens", url.clone(), ca.to_owned(), OTHER_ROUTE, 200),
        ("refresh_interval", "tokens", url.clone(), format!("{ca}\nrefresh_interval = \"1h\""), "", 200),
        ("another issuer", "tokens", format!("https://{}/jwks.json", other.address), ca.to_owned(), "", 401),
        ("an issuer that refuses connections", "tokens", refused.clone(), ca.to_owned(), "", 503),
        ("name of the provider", "others", refused, ca.to_owned(), "", 503),
        ("ca", "tokens", url.clone(), "ca = \"other.pem\"".to_owned(), "", 503),
        ("audience", "tokens", url.clone(), format!("{ca}\naudience = \"api\""), "", 401),
        ("issuer", "tokens", url.clone(), format!("{ca}\nissuer = \"https://issuer.test\""), "", 401),
        ("claims", "tokens", url.clone(), format!("{ca}\nclaims = {{ plan = \"gold\" }}"), "", 403),
    ] {
        let gateway = Gateway::start_with(&with_admin(&config("tokens", &url, ca, "")), &files);
        let token = format!("Bearer {}", key.token(&json!({ "sub": "alice", "exp": in_seconds(300) })));
        let verify = || gateway.client().get_with("/r", &[("authorization", &*token)]).status;
        eventually("the keys arrive", || verify() == 200);
        reloads(&gateway, &config(name, &url_after, &keys, rest));
        assert_eq!(verify(), status, "{what}");
    }
}

#[test]
fn verified_credentials_are_checked_against_the_new_files() {
    let consumer = |key: &str| {
        let hash: String = digest(&SHA256, key.as_bytes()).as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
        format!("[[consumer]]\nname = \"a\"\nkeys = [\"sha256:{hash}\"]\n")
    };
    let user = |password: &str| htpasswd(&["-B", "-C", "4"], "alice", password);
    let config = |users: &str, realm: &str, consumers: &str| {
        format!(
            "[auth.users]\nkind = \"basic\"\nusers = \"{users}\"\nrealm = \"{realm}\"\n\
             [auth.keys]\nkind = \"api-key\"\nconsumers = \"{consumers}\"\n\
             [[route]]\nname = \"u\"\npath = \"/u\"\nrequire = [\"users\"]\nrespond = {{ status = 200 }}\n\
             [[route]]\nname = \"k\"\npath = \"/k\"\nrequire = [\"keys\"]\nrespond = {{ status = 200 }}\n"
        )
    };
    let (one, two, key_one, key_two) = (user("one"), user("two"), consumer("one"), consumer("two"));
    let files = [("one", &*one), ("two", &*two), ("one.toml", &*key_one), ("two.toml", &*key_two)];
    let gateway = Gateway::start_with(&with_admin(&config("one", "r", "one.toml")), &files);
    let login = |password: &str| {
        let value = format!("Basic {}", STANDARD.encode(format!("alice:{password}")));
        gateway.client().get_with("/u", &[("authorization", &value)])
    };
    let key = |key: &str| gateway.client().get_with("/k", &[("x-api-key", key)]).status;
    let statuses = || ["one", "two"].map(|secret| (login(secret).status, key(secret)));
    for (what, users, realm, consumers, expected) in [
        ("nothing", "one", "r", "one.toml", [(200, 200), (401, 401)]),
        ("users", "two", "r", "one.toml", [(401, 200), (200, 401)]),
        ("consumers", "two", "r", "two.toml", [(401, 401), (200, 200)]),
        ("realm", "two", "s", "two.toml", [(401, 401), (200, 200)]),
    ] {
        reloads(&gateway, &config(users, realm, consumers));
        assert_eq!(statuses(), expected, "{what}");
        assert_eq!(statuses(), expected, "{what}: the results are cached");
        let expected = format!("Basic realm=\"{realm}\", charset=\"UTF-8\"");
        assert_eq!(login("three").header("www-authenticate"), Some(&*expected), "{what}");
    }
}

#[test]
fn upstream_connections_are_kept_for_equal_settings_only() {
    let (authority, clients) = (Authority::new("ca"), Authority::new("clients"));
    let pair = authority.server(&["127.0.0.1", "one.test", "two.test"], NOW);
    let (first, second) = (clients.client(&[], NOW), clients.client(&[], NOW));
    let tls = "ca = \"ca.pem\", cert = \"one.pem\", key = \"one.key\", server_name = \"one.test\"";
    let copy = authority.pem() + "\n";
    let files = [
        ("ca.pem", &*authority.pem()),
        ("copy.pem", &*copy),
        ("other.pem", &*Authority::new("other").pem()),
        ("one.pem", &*first.cert),
        ("one.key", &*first.key),
        ("two.pem", &*second.cert),
        ("two.key", &*second.key),
    ];
    // For each change: the status of the next request, and whether it opens a connection.
    for (what, tls_after, rest, status, is_kept) in [
        ("nothing", tls.to_owned(), "", 200, true),
        ("response_timeout", tls.to_owned(), "response_timeout = \"9s\"\n", 200, true),
        ("max_requests", tls.to_owned(), "max_requests = 5\n", 200, true),
        ("retries", tls.to_owned(), "retries = 1\n", 200, true),
        ("pool_idle_timeout", tls.to_owned(), "pool_idle_timeout = \"9s\"\n", 200, false),
        ("tls.ca", tls.replace("ca.pem", "copy.pem"), "", 200, false),
        ("tls.ca of other servers", tls.replace("ca.pem", "other.pem"), "", 502, false),
        ("tls.cert", tls.replace("one.pem", "two.pem").replace("one.key", "two.key"), "", 200, false),
        ("tls.server_name", tls.replace("one.test", "two.test"), "", 200, false),
    ] {
        let server = tls_server(&pair, Some(&clients), ok("ok"));
        let config = |tls: &str, rest: &str| {
            format!(
                "[server]\nworkers = 1\n[upstream.u]\nservers = [\"https://{}\"]\ntls = {{ {tls} }}\n{rest}\
                 [[route]]\nname = \"r\"\npath = \"/r\"\nupstream = \"u\"\n",
                server.address
            )
        };
        let gateway = Gateway::start_with(&with_admin(&config(tls, "")), &files);
        let mut client = gateway.client();
        assert_eq!([client.get("/r").status, client.get("/r").status], [200; 2], "{what}");
        assert_eq!(server.handshakes().len(), 1, "{what}: the connection is reused");
        reloads(&gateway, &config(&tls_after, rest));
        assert_eq!(client.get("/r").status, status, "{what}");
        let handshakes = server.handshakes();
        let expected = if is_kept || status != 200 { 1 } else { 2 };
        assert_eq!(handshakes.len(), expected, "{what}: {handshakes:?}");
        let own = if what == "tls.cert" { &second.der } else { &first.der };
        assert_eq!(handshakes.last().unwrap().client.as_ref(), Some(own), "{what}");
    }
}

#[test]
fn ejection_ends_when_outlier_detection_is_removed() {
    let [bad, good] = &Server::start_many();
    let config = |detection: &str| {
        format!(
            "[server]\nworkers = 1\n[upstream.api]\nservers = [\"{}\", \"{}\"]\nbalance = \"round-robin\"\n{detection}\n\
             [[route]]\nname = \"api\"\npath = \"/\"\nupstream = \"api\"\n",
            bad.url(),
            good.url()
        )
    };
    let gateway = Gateway::start(&with_admin(&config(
        "outlier_detection = { consecutive_errors = 1, base_ejection_time = \"1h\" }",
    )));
    bad.set(Behaviour::Respond(503));
    let mut client = gateway.client();
    let up = || metric(&gateway, &format!("upstream_server_up{{upstream=\"api\",server=\"{}\"}}", bad.address));
    eventually("the failing server is ejected", || {
        client.get("/");
        up() == 0.0
    });
    reloads(&gateway, &config("outlier_detection = { consecutive_errors = 2, base_ejection_time = \"30m\" }"));
    assert_eq!(up(), 0.0, "another setting keeps the ejection");
    reloads(&gateway, &config(""));
    assert_eq!(up(), 1.0, "without outlier detection, no server is ejected");
    let mut statuses = [client.get("/").status, client.get("/").status];
    statuses.sort_unstable();
    assert_eq!(statuses, [200, 503]);
}

/// Return the configuration of a limit with the name `name` on `/r`.
fn limited(store: &str, name: &str, limit: &str, route: &str) -> String {
    format!(
        "[server]\nworkers = 1\n{store}[limit.{name}]\n{limit}\n\
         [[route]]\nname = \"r\"\npath = \"/r\"\nlimits = [\"{name}\"]\n{route}\nrespond = {{ status = 200 }}\n"
    )
}

#[test]
fn denials_belong_to_the_rule_that_denied() {
    let redis = Redis::start();
    let rule = "by = \"ip\"\nalgorithm = \"fixed-window\"\nstart = \"first-request\"\nquota = \"2/24h\"";
    let changed = |from: &str, to: &str| rule.replace(from, to);
    let more = |line: &str| format!("{rule}\n{line}");
    for store in [String::new(), redis.store()] {
        // For each change: the number of the next three requests that are admitted.
        for (what, name, limit, route, admitted) in [
            ("nothing", "l", rule.to_owned(), "", 0),
            ("unit", "l", more("unit = \"calls\""), "", 0),
            ("announce", "l", more("announce = false"), "", 0),
            ("on_store_error", "l", more("on_store_error = \"deny\""), "", 0),
            ("a lower quota", "l", changed("2/", "1/"), "", 0),
            ("a higher quota", "l", changed("2/", "3/"), "", 1),
            ("the cost", "l", changed("2/", "3/"), "cost = 2", 0),
            ("window", "l", changed("24h", "23h"), "", 2),
            ("algorithm", "l", changed("fixed-window\"\nstart = \"first-request", "sliding-window"), "", 2),
            ("by", "l", changed("\"ip\"", "\"global\""), "", 2),
            ("name", "m", rule.to_owned(), "", 2),
            ("shadow", "l", more("shadow = true"), "", 3),
            ("methods", "l", more("methods = [\"POST\"]"), "", 3),
            ("exempt", "l", more("exempt = [\"127.0.0.0/8\"]"), "", 3),
        ] {
            redis::cmd("FLUSHALL").exec(&mut redis.connection()).unwrap();
            let gateway = Gateway::start(&with_admin(&limited(&store, "l", rule, "")));
            let mut client = gateway.client();
            let mut count = |requests: usize| (0..requests).filter(|_| client.get("/r").status == 200).count();
            assert_eq!(count(4), 2, "{what}: the quota is used up, and the denial is cached");
            reloads(&gateway, &limited(&store, name, &limit, route));
            assert_eq!(count(3), admitted, "{what}, {store}");
        }
    }
}

#[test]
fn prefetched_tokens_belong_to_their_quota() {
    let redis = Redis::start();
    let limit =
        |quota: &str| format!("by = \"global\"\nalgorithm = \"fixed-window\"\nquota = \"{quota}\"\nprefetch = 50");
    let gateway = Gateway::start(&with_admin(&limited(&redis.store(), "l", &limit("100000/24h"), "")));
    let prefetched = || metric(&gateway, "checks_total{answered_by=\"prefetch\"}");
    eventually("tokens of a hot identity are prefetched", || {
        load(&[gateway.address], 8, 64, "/r", &[]);
        prefetched() > 0.0
    });
    let mut client = gateway.client();
    reloads(&gateway, &limited(&redis.store(), "l", &limit("50/24h"), ""));
    let before = prefetched();
    for _ in 0..60 {
        assert_eq!(client.get("/r").status, 429, "more than 50 tokens were used before the reload");
    }
    assert_eq!(prefetched(), before, "no prefetched token of the earlier quota is used");
}

#[test]
fn override_applies_to_the_rule_of_the_active_configuration() {
    let redis = Redis::start();
    let rule = |algorithm: &str| format!("by = \"header:x-id\"\nalgorithm = \"{algorithm}\"\nquota = \"2/24h\"");
    for store in [String::new(), redis.store()] {
        let gateway = Gateway::start(&with_admin(&limited(&store, "l", &rule("fixed-window"), "")));
        let body = json!({"limit": "l", "identity": {"header:x-id": "a"}, "quota": "4/24h", "ttl": "1h"}).to_string();
        let headers = [("authorization", "Bearer sesame"), ("content-type", "application/json")];
        let reply = Client::connect(gateway.admin()).request("POST", "/api/overrides", &headers, body.as_bytes());
        assert_eq!(reply.status, 200, "{}", reply.text());
        let mut client = gateway.client();
        let mut count =
            |requests: usize| (0..requests).filter(|_| client.get_with("/r", &[("x-id", "a")]).status == 200).count();
        assert_eq!(count(6), 4, "{store}");
        reloads(&gateway, &(limited(&store, "l", &rule("fixed-window"), "") + OTHER_ROUTE));
        assert_eq!(count(3), 0, "{store}: the same rule keeps its state");
        reloads(&gateway, &limited(&store, "l", &rule("sliding-window"), ""));
        let mut admitted = 0;
        eventually("the override applies to the new algorithm", || {
            admitted += count(1);
            admitted == 4
        });
        assert_eq!(count(3), 0, "{store}: the quota of the override, not that of the limit");
    }
}

#[test]
fn copies_of_a_mirror_in_flight_count_against_the_new_bound() {
    let (upstream, mirror) = (Upstream::start(), Server::start());
    let config = |most: usize| {
        format!(
            "[server]\nworkers = 1\n[upstream.u]\nservers = [\"{}\"]\n[upstream.m]\nservers = [\"{}\"]\n\
             [[route]]\nname = \"r\"\npath = \"/r\"\nupstream = \"u\"\n\
             mirror = {{ upstream = \"m\", max_in_flight = {most} }}\n",
            upstream.url(),
            mirror.url()
        )
    };
    let gateway = Gateway::start(&with_admin(&config(1)));
    mirror.set(Behaviour::Hang);
    assert_eq!(gateway.get("/r").status, 200);
    eventually("the copy is in flight", || mirror.running() == 1);
    let dropped = || metric(&gateway, "mirrored_requests_dropped_total{route=\"r\",reason=\"max_in_flight\"}");
    for (most, expected) in [(1, (1.0, 1)), (2, (1.0, 2)), (1, (2.0, 2))] {
        reloads(&gateway, &config(most));
        assert_eq!(gateway.get("/r").status, 200);
        eventually("the copy is sent or dropped", || (dropped(), mirror.running()) == expected);
    }
    assert_eq!(mirror.max_running(), 2);
    mirror.set(Behaviour::Respond(200));
    eventually("all copies end", || metric(&gateway, "mirrored_requests_in_flight{route=\"r\"}") == 0.0);
}
