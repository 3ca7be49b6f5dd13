//! End-to-end tests of `require` and `identify`: kinds of credentials, their order, statuses and challenges, the number
//! of store calls, and the credentials that the upstream receives.

use std::path::Path;
use std::sync::Arc;

use crate::support::certificates::{Authority, NOW, Pair, TlsClient, tls};
use crate::support::client::{Client, Reply};
use crate::support::eventually;
use crate::support::gateway::Gateway;
use crate::support::redis::Redis;
use crate::support::tokens::{Key, encode, in_seconds, key_set, signed};
use crate::support::upstream::Upstream;
use aws_lc_rs::digest::{SHA256, digest};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use rcgen::DnType;
use rustls::ClientConfig;
use rustls::version::TLS13;
use serde_json::{Value, json};

const NAME: &str = "gate.test";

/// Return the hash of an API key in the format of the consumers file.
fn hash(key: &str) -> String {
    let digits: String = digest(&SHA256, key.as_bytes()).as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
    format!("sha256:{digits}")
}

/// Return a consumers file. Each consumer has a name, and keys as TOML values.
fn consumers(consumers: &[(&str, &[&str])]) -> String {
    let consumer = |(name, keys): &(&str, &[&str])| {
        let keys: Vec<_> = keys.iter().map(|key| (*key).to_owned()).collect();
        format!("[[consumer]]\nname = \"{name}\"\nkeys = [{}]\n", keys.join(", "))
    };
    consumers.iter().map(consumer).collect()
}

fn plain(key: &str) -> String {
    format!("\"{}\"", hash(key))
}

/// Return a consumers file with the consumer `alice` and its key `alice-key`.
fn alice() -> String {
    consumers(&[("alice", &[&plain("alice-key")])])
}

fn keys(rest: &str) -> String {
    format!("[auth.keys]\nkind = \"api-key\"\nconsumers = \"consumers.toml\"\n{rest}\n")
}

fn tokens(rest: &str) -> String {
    format!("[auth.tokens]\nkind = \"jwt\"\njwks_file = \"jwks.json\"\n{rest}\n")
}

/// Return a limit per hour. The window starts with the first request, so it does not end during the test.
fn limit(name: &str, quota: u64, rest: &str) -> String {
    format!(
        "[limit.{name}]\nalgorithm = \"fixed-window\"\nstart = \"first-request\"\nquota = \"{quota}/hour\"\n{rest}\n"
    )
}

/// Return a route that forwards the path `/NAME` to the upstream `api`.
fn route(name: &str, rest: &str) -> String {
    format!("[[route]]\nname = \"{name}\"\npath = \"/{name}\"\nupstream = \"api\"\n{rest}\n")
}

fn upstream(upstream: &Upstream) -> String {
    format!("[upstream.api]\nservers = [\"{}\"]\n", upstream.url())
}

/// Return all values of `WWW-Authenticate`.
fn challenges(reply: &Reply) -> Vec<&str> {
    let lines = reply.headers.iter().filter(|(name, _)| name == "www-authenticate");
    lines.map(|(_, value)| value.as_str()).collect()
}

/// Assert the status of a response and its challenges (`WWW-Authenticate`). A response with a status other than 200
/// must contain a problem document.
fn assert_reply(reply: &Reply, status: u16, expected: &[&str], what: &str) {
    if status == 200 {
        assert_eq!(reply.status, 200, "{what}: {}", reply.text());
    } else {
        reply.assert_problem(status, what);
        assert_eq!(reply.header("cache-control"), Some("no-store"), "{what}");
    }
    assert_eq!(challenges(reply), expected, "{what}: {}", reply.text());
}

fn bearer(token: &str) -> String {
    format!("Bearer {token}")
}

fn claims(sub: &str) -> Value {
    json!({ "sub": sub, "exp": in_seconds(300) })
}

/// Write the server certificate and the client CA to the folder. Return the listener configuration, the client CA and
/// the server certificate.
fn tls_listener(folder: &Path) -> (String, Authority, Pair) {
    let (authority, server) = (Authority::new("ours"), Pair::server(NAME, NOW));
    for (name, content) in [("server.pem", &*server.cert), ("server.key", &server.key), ("ca.pem", &authority.pem())] {
        std::fs::write(folder.join(name), content).unwrap();
    }
    let path = |name: &str| folder.join(name).display().to_string();
    let pair = format!("{{ cert = \"{}\", key = \"{}\" }}", path("server.pem"), path("server.key"));
    let listener = format!(
        "[[listener]]\naddress = \"127.0.0.1:0\"\ntls.certificates = [{pair}]\ntls.client_ca = \"{}\"\n",
        path("ca.pem")
    );
    (listener, authority, server)
}

fn over_tls(config: &Arc<ClientConfig>, gateway: &Gateway) -> TlsClient {
    TlsClient::handshake(config, gateway.address, NAME).unwrap()
}

#[test]
fn required_key_needs_no_limit() {
    let upstream_server = Upstream::start();
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("access.log");
    let config = [
        format!("[log]\nformat = \"json\"\naccess = \"{}\"\n", log.display()),
        keys(""),
        upstream(&upstream_server),
        route("closed", "require = [\"keys\"]"),
        route("open", ""),
    ];
    let mut gateway = Gateway::start_with(&config.concat(), &[("consumers.toml", &alice())]);
    let mut client = gateway.client();
    for (what, lines, status) in [
        ("no key", &[][..], 401),
        ("an empty key", &[("X-Api-Key", "")], 401),
        ("an unknown key", &[("X-Api-Key", "eve-key")], 401),
        ("a part of a key", &[("X-Api-Key", "alice-ke")], 401),
        ("an alias", &[("X_Api_Key", "alice-key")], 401),
        ("another place", &[("Authorization", "Bearer alice-key")], 401),
        ("a known key", &[("X-Api-Key", "alice-key")], 200),
        ("the key twice", &[("X-Api-Key", "alice-key"), ("x-api-key", "alice-key")], 400),
    ] {
        let before = upstream_server.count();
        let reply = client.get_with("/closed", lines);
        assert_reply(&reply, status, if status == 401 { &["ApiKey"] } else { &[] }, what);
        for key in ["alice", "eve"] {
            assert!(!reply.text().contains(key), "{what}: a key is never repeated: {}", reply.text());
        }
        assert_eq!(upstream_server.count() - before, usize::from(status == 200), "{what}");
    }
    let missing = client.get("/closed");
    assert!(missing.text().contains("an API key in the header `x-api-key` is required"), "{}", missing.text());
    assert_eq!(client.get_with("/open", &[("X-Api-Key", "eve-key")]).status, 200, "no provider on the route");
    assert_eq!(upstream_server.last().headers("x-api-key"), ["eve-key"], "a route without a provider forwards the key");
    gateway.terminate();
    gateway.wait();
    let records = std::fs::read_to_string(&log).unwrap();
    let records: Vec<Value> = records.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let outcomes: Vec<_> = records.iter().map(|record| record["outcome"].as_str().unwrap()).collect();
    let unauthenticated = outcomes.iter().filter(|outcome| **outcome == "unauthenticated").count();
    assert_eq!((unauthenticated, outcomes[6], outcomes[7]), (7, "ok", "no-identity"), "{outcomes:?}");
    assert_eq!(records[0]["route"], "closed");
}

#[test]
fn key_is_read_from_several_places() {
    let upstream_server = Upstream::start();
    let file = consumers(&[("alice", &[&plain("alice-key")]), ("bob", &[&plain("bob-key")])]);
    let config = [
        keys("header = [\"authorization\", \"x-api-key\", \"x-other\"]"),
        upstream(&upstream_server),
        route("r", "require = [\"keys\"]"),
    ];
    let gateway = Gateway::start_with(&config.concat(), &[("consumers.toml", &file)]);
    let mut client = gateway.client();
    let both = &["Bearer", "ApiKey"][..];
    let invalid = &["Bearer error=\"invalid_token\"", "ApiKey"][..];
    for (what, lines, status, expected) in [
        ("as a bearer token", &[("Authorization", "Bearer alice-key")][..], 200, &[][..]),
        ("the scheme is case-insensitive", &[("authorization", "bEARER   alice-key")], 200, &[]),
        ("in a header", &[("X-Api-Key", "alice-key")], 200, &[]),
        ("in the last one", &[("X-Other", "alice-key")], 200, &[]),
        ("the same key in two places", &[("Authorization", "Bearer alice-key"), ("X-Api-Key", "alice-key")], 200, &[]),
        ("two keys", &[("Authorization", "Bearer alice-key"), ("X-Api-Key", "bob-key")], 400, &[]),
        ("a good and a bad one", &[("X-Other", "alice-key"), ("X-Api-Key", "eve")], 400, &[]),
        (
            "Authorization twice",
            &[("Authorization", "Bearer alice-key"), ("Authorization", "Bearer alice-key")],
            400,
            &[],
        ),
        ("two schemes", &[("Authorization", "Bearer alice-key"), ("Authorization", "Basic YTpi")], 400, &[]),
        ("another scheme", &[("Authorization", "Basic YTpi")], 401, both),
        ("another scheme, and a key", &[("Authorization", "Basic YTpi"), ("X-Api-Key", "alice-key")], 200, &[]),
        ("no scheme", &[("Authorization", "alice-key")], 401, both),
        ("the scheme alone", &[("Authorization", "Bearer")], 401, both),
        ("no space", &[("Authorization", "Beareralice-key")], 401, both),
        ("an unknown bearer", &[("Authorization", "Bearer eve")], 401, invalid),
        ("an unknown key", &[("X-Api-Key", "eve")], 401, both),
        ("nothing", &[], 401, both),
    ] {
        assert_reply(&client.get_with("/r", lines), status, expected, what);
    }
    let conflict = client.get_with("/r", &[("Authorization", "Bearer alice-key"), ("X-Api-Key", "bob-key")]);
    assert!(conflict.text().contains("`authorization` and `x-api-key` have different API keys"), "{}", conflict.text());
    // Over HTTP/2, the statuses are the same as over HTTP/1.1.
    let ask = |value: &str| {
        let request = http::Request::get("http://gateway.test/r").header("authorization", value);
        crate::support::http2::ask(gateway.address, [request.body(&b""[..]).unwrap()])[0].status()
    };
    assert_eq!([ask("Bearer alice-key"), ask("Bearer eve")], [Some(200), Some(401)]);
    // An unknown key of 30 KiB gets 401 like a short one. A request with a key of 64 KiB exceeds the size limit of the
    // headers and gets 431.
    let long = format!("Bearer {}", "x".repeat(30 << 10));
    assert_reply(&client.get_with("/r", &[("Authorization", &long)]), 401, invalid, "a long key");
    let mut client = gateway.client();
    client.send(
        format!("GET /r HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {}\r\n\r\n", "x".repeat(64 << 10)).as_bytes(),
    );
    assert_eq!(client.reply().unwrap().status, 431);
}

#[test]
fn keys_expire_and_are_disabled_and_bound_to_routes() {
    let upstream_server = Upstream::start();
    let table = |key: &str, rest: &str| format!("{{ hash = \"{}\", {rest} }}", hash(key));
    let file = consumers(&[(
        "alice",
        &[
            &table("old-key", "name = \"old\", expires = 2020-01-01T00:00:00Z"),
            &table("past-day", "name = \"day\", created = 2019-01-01, expires = 2020-01-01"),
            &table("future-key", "expires = 2999-01-01T00:00:00+02:00"),
            &table("off-key", "name = \"off\", disabled = true, expires = 2020-01-01"),
            &table("bound-key", "name = \"bound\", routes = [\"other\", \"r\"]"),
            &table("other-key", "name = \"other\", routes = [\"other\"]"),
            &table("no-routes", "routes = []"),
            &plain("plain-key"),
        ],
    )]);
    let config = [
        "[log]\nlevel = \"debug\"\n".to_owned(),
        keys("header = [\"x-api-key\", \"authorization\"]"),
        upstream(&upstream_server),
        route("r", "require = [\"keys\"]"),
        route("other", "identify = [\"keys\"]"),
    ];
    let gateway = Gateway::start_with(&config.concat(), &[("consumers.toml", &file)]);
    let mut client = gateway.client();
    for (key, status, detail, other) in [
        ("old-key", 401, "the API key has expired", 401),
        ("past-day", 401, "the API key has expired", 401),
        ("future-key", 200, "", 200),
        ("off-key", 401, "the API key is unknown", 401),
        ("bound-key", 200, "", 200),
        ("other-key", 403, "the API key is not valid for this route", 200),
        ("no-routes", 403, "the API key is not valid for this route", 403),
        ("plain-key", 200, "", 200),
        ("eve-key", 401, "the API key is unknown", 401),
    ] {
        let reply = client.get_with("/r", &[("X-Api-Key", key)]);
        assert_reply(&reply, status, if status == 401 { &["ApiKey", "Bearer"] } else { &[] }, key);
        assert!(reply.text().contains(detail), "{key}: {}", reply.text());
        assert_eq!(client.get_with("/other", &[("X-Api-Key", key)]).status, other, "{key}");
    }
    let expired = client.get_with("/r", &[("Authorization", "Bearer old-key")]);
    assert_reply(&expired, 401, &["ApiKey", "Bearer error=\"invalid_token\""], "an expired bearer token");
    // For a key that has expired, is disabled or is not valid for the route, the gateway logs the reason, the name of
    // the consumer and the name of the key.
    let log = gateway.log();
    for (reason, name) in [
        ("API key has expired", "old"),
        ("API key is disabled", "off"),
        ("API key is not valid for this route", "other"),
    ] {
        let line = log.lines().find(|line| line.contains(reason) && line.contains(name));
        let line = line.unwrap_or_else(|| panic!("{reason} of {name} is not in\n{log}"));
        assert!(line.contains("DEBUG") && line.contains("alice"), "{line}");
    }
    // If a key is disabled in the consumers file, the gateway rejects it after reloading the file.
    gateway.put_file("consumers.toml", &file.replace(&plain("plain-key"), &table("plain-key", "disabled = true")));
    eventually("the key is disabled", || client.get_with("/r", &[("X-Api-Key", "plain-key")]).status == 401);
}

#[test]
fn required_claims_have_a_value_one_of_several_or_all_of_several() {
    let key = Key::ed("k");
    let provider = |name: &str, claims: &str| {
        format!("[auth.{name}]\nkind = \"jwt\"\njwks_file = \"jwks.json\"\nclaims = {claims}\n")
    };
    let respond = |name: &str| {
        format!(
            "[[route]]\nname = \"{name}\"\npath = \"/{name}\"\nrequire = [\"{name}\"]\nrespond = {{ status = 200 }}\n"
        )
    };
    let providers = [
        ("one", "{ scope = \"write\" }"),
        ("any", "{ scope = [\"write\", \"admin\"] }"),
        ("all", "{ scope = [[\"read\", \"write\"]] }"),
        ("mixed", "{ scope = [\"admin\", [\"read\", \"write\"]] }"),
        ("two", "{ scope = [\"write\"], tenant = [\"7\", \"true\"] }"),
    ];
    let config: String = providers.iter().map(|(name, claims)| provider(name, claims) + &respond(name)).collect();
    let gateway = Gateway::start_with(&config, &[("jwks.json", &key_set(&[&key]))]);
    let mut client = gateway.client();
    for (scope, tenant, expected) in [
        (json!("write"), json!(7), [true, true, false, false, true]),
        (json!("read write"), json!("7"), [true, true, true, true, true]),
        (json!("write read openid"), json!(8), [true, true, true, true, false]),
        (json!("read"), json!(7), [false; 5]),
        (json!("admin"), json!(true), [false, true, false, true, false]),
        (json!(["write"]), json!([7]), [true, true, false, false, false]),
        (json!(["read", "write"]), json!(["7", "8"]), [true, true, true, true, true]),
        // If a claim is a list, a required value must equal one whole element. If a claim is a string, a required value
        // must equal one of its words, which are separated by spaces.
        (json!(["read write"]), json!("7"), [false; 5]),
        (json!("read,write"), json!("7"), [false; 5]),
        (json!("Write"), json!("7"), [false; 5]),
        (json!("write\tadmin"), json!("7"), [false; 5]),
        (json!({"write": true}), json!("7"), [false; 5]),
        (json!(null), json!("7"), [false; 5]),
        (json!(""), json!("7"), [false; 5]),
    ] {
        let mut claims = claims("alice");
        (claims["scope"], claims["tenant"]) = (scope.clone(), tenant.clone());
        let token = bearer(&key.token(&claims));
        for ((name, _), expected) in providers.iter().zip(expected) {
            let reply = client.get_with(&format!("/{name}"), &[("Authorization", &token)]);
            let what = format!("{name}: {scope} {tenant}: {}", reply.text());
            match expected {
                true => assert_eq!(reply.status, 200, "{what}"),
                false => {
                    reply.assert_problem(403, &what);
                    assert_eq!(reply.header("www-authenticate"), Some("Bearer error=\"insufficient_scope\""), "{what}");
                }
            }
        }
    }
}

#[test]
fn alternatives_are_tried_in_order() {
    let upstream_server = Upstream::start();
    let folder = tempfile::tempdir().unwrap();
    let (listener, authority, server) = tls_listener(folder.path());
    let key = Key::ed("k");
    let config = [
        listener,
        keys("header = [\"x-api-key\", \"authorization\"]"),
        tokens("claims = { scope = \"write\" }"),
        "[auth.mtls]\nkind = \"client-cert\"\n".to_owned(),
        upstream(&upstream_server),
        route("any", "require = [\"keys\", [\"mtls\", \"tokens\"]]"),
        route("tokens-first", "require = [\"tokens\", \"keys\"]"),
        route("cert", "require = [\"mtls\"]"),
    ];
    let files = [("consumers.toml", &*alice()), ("jwks.json", &key_set(&[&key]))];
    let gateway = Gateway::start_with(&config.concat(), &files);
    let own = authority.client(&[(DnType::CommonName, "alice")], NOW);
    let with_cert = tls(&[&server.der], Some(&own), &[&TLS13]);
    let without = tls(&[&server.der], None, &[&TLS13]);
    let mut writer = claims("alice");
    writer["scope"] = json!("read write");
    let [write, read] = [key.token(&writer), key.token(&claims("alice"))].map(|token| bearer(&token));
    let forged = bearer(&Key::ed("k").token(&writer));
    let good = ("X-Api-Key", "alice-key");
    let all = &["ApiKey", "Bearer", "ClientCertificate"][..];
    let invalid = &["ApiKey", "Bearer error=\"invalid_token\"", "ClientCertificate"][..];
    let tokens_first = &["Bearer", "ApiKey"][..];
    for (what, path, config, lines, status, expected) in [
        ("a key", "/any", &without, &[good][..], 200, &[][..]),
        ("certificate and token", "/any", &with_cert, &[("Authorization", &*write)], 200, &[]),
        ("a key beside them", "/any", &with_cert, &[good, ("Authorization", &write)], 200, &[]),
        ("nothing", "/any", &without, &[], 401, all),
        ("the certificate alone", "/any", &with_cert, &[], 401, all),
        ("the token alone", "/any", &without, &[("Authorization", &write)], 401, all),
        ("a forged token", "/any", &with_cert, &[("Authorization", &forged)], 401, invalid),
        (
            "a token without the claim",
            "/any",
            &with_cert,
            &[("Authorization", &read)],
            403,
            &["Bearer error=\"insufficient_scope\""],
        ),
        ("an unknown key stops", "/any", &with_cert, &[("X-Api-Key", "eve"), ("Authorization", &write)], 401, all),
        ("a key that is no token", "/any", &with_cert, &[("Authorization", "Bearer eve")], 401, invalid),
        ("two keys", "/any", &with_cert, &[good, ("Authorization", "Bearer eve")], 400, &[]),
        ("a bearer key", "/tokens-first", &without, &[("Authorization", "Bearer alice-key")], 200, &[]),
        ("a token", "/tokens-first", &without, &[("Authorization", &write)], 200, &[]),
        ("the right comes with the key", "/tokens-first", &without, &[good, ("Authorization", &read)], 200, &[]),
        (
            "the key of a forged token",
            "/tokens-first",
            &without,
            &[good, ("Authorization", &forged)],
            401,
            &["Bearer error=\"invalid_token\"", "ApiKey"],
        ),
        ("neither", "/tokens-first", &without, &[], 401, tokens_first),
        ("a certificate", "/cert", &with_cert, &[], 200, &[]),
        ("no certificate", "/cert", &without, &[good], 401, &["ClientCertificate"]),
        ("a forwarded certificate", "/cert", &without, &[("Client-Cert", ":MIIB:")], 401, &["ClientCertificate"]),
    ] {
        assert_reply(&over_tls(config, &gateway).get_with(path, lines), status, expected, what);
    }
    let reply = over_tls(&without, &gateway).get("/any");
    let detail = "one of these is required: an API key in the header `x-api-key` or `authorization` (Bearer); \
                  a client certificate and a bearer token";
    assert!(reply.text().contains(detail), "{}", reply.text());
    // A certificate with an empty subject is a valid credential, although it is not an identity for limits.
    let anonymous = tls(&[&server.der], Some(&authority.client(&[], NOW)), &[&TLS13]);
    assert_eq!(over_tls(&anonymous, &gateway).get("/cert").status, 200);
}

#[test]
fn each_issuer_has_its_provider_and_claims() {
    let upstream_server = Upstream::start();
    let (one, other) = (Key::ec("same"), Key::ec("same"));
    let provider = |name: &str, issuer: &str, rest: &str| {
        format!("[auth.{name}]\nkind = \"jwt\"\njwks_file = \"{name}.json\"\nissuer = \"{issuer}\"\n{rest}\n")
    };
    let config = [
        provider("one", "https://one.example", "audience = \"api\""),
        provider("other", "https://other.example", "claims = { roles = \"admin\", tenant = \"7\" }"),
        upstream(&upstream_server),
        limit("subject", 100, "by = \"jwt:sub\""),
        route("both", "require = [\"one\", \"other\"]\nlimits = [\"subject\"]"),
        route("identified", "identify = [\"one\", \"other\"]\nlimits = [\"subject\"]"),
    ];
    let (one_set, other_set) = (key_set(&[&one]), key_set(&[&other]));
    let gateway = Gateway::start_with(&config.concat(), &[("one.json", &one_set), ("other.json", &other_set)]);
    let token = |key: &Key, issuer: &str, more: Value| {
        let mut claims = claims("alice");
        claims["iss"] = json!(issuer);
        for (name, value) in more.as_object().unwrap() {
            claims[name] = value.clone();
        }
        bearer(&key.token(&claims))
    };
    let (first, second) = ("https://one.example", "https://other.example");
    let admin = json!({ "roles": ["user", "admin"], "tenant": 7 });
    let scope = &["Bearer error=\"insufficient_scope\""][..];
    let invalid = &["Bearer error=\"invalid_token\""][..];
    let mut client = gateway.client();
    for (what, value, status, expected, detail) in [
        ("the first issuer", token(&one, first, json!({ "aud": "api" })), 200, &[][..], ""),
        ("the second issuer", token(&other, second, admin.clone()), 200, &[], ""),
        ("a claim is missing", token(&other, second, json!({ "roles": "admin" })), 403, scope, "claim `tenant`"),
        (
            "another value",
            token(&other, second, json!({ "roles": ["users"], "tenant": 7 })),
            403,
            scope,
            "claim `roles`",
        ),
        ("the key of the other issuer", token(&one, second, admin.clone()), 401, invalid, "signature"),
        ("a key of neither", token(&Key::ec("same"), first, json!({ "aud": "api" })), 401, invalid, "signature"),
        ("an unknown issuer", token(&one, "https://x.example", json!({ "aud": "api" })), 401, invalid, "issuer"),
        ("another audience", token(&one, first, json!({ "aud": "x" })), 401, invalid, "audience"),
        ("no token", "Bearer x".to_owned(), 401, invalid, "malformed"),
    ] {
        for path in ["/both", "/identified"] {
            let reply = client.get_with(path, &[("Authorization", &value)]);
            assert_reply(&reply, status, expected, &format!("{what}: {path}"));
            assert!(reply.text().contains(detail), "{what}: {}", reply.text());
        }
    }
    let left = client.get_with("/both", &[("Authorization", &token(&other, second, admin))]).remaining("subject");
    assert_eq!(left, 95, "alice has one bucket for all issuers");
}

#[test]
fn credential_and_limits_take_one_store_call() {
    let (redis, upstream_server) = (Redis::start(), Upstream::start());
    let config = [
        redis.store(),
        "denial_cache = 0\n[server]\nworkers = 1\n".to_owned(),
        keys(""),
        upstream(&upstream_server),
        limit("per-ip", 9, "by = \"ip\""),
        limit("per-key", 100, "by = \"api-key\""),
        limit("all", 100, "by = \"global\""),
        route("r", "require = [\"keys\"]\nlimits = [\"per-ip\", \"per-key\", \"all\"]"),
        route("free", "require = [\"keys\"]"),
        route("bound", "require = [\"keys\"]\nlimits = [\"per-ip\", \"all\"]"),
        route("shared", "require = [\"keys\"]\nlimits = [\"all\"]"),
    ];
    let bound = format!("{{ hash = \"{}\", routes = [\"r\"] }}", hash("bound-key"));
    let file = consumers(&[("alice", &[&plain("alice-key"), &bound])]);
    let gateway = Gateway::start_with(&config.concat(), &[("consumers.toml", &file)]);
    let mut client = gateway.client();
    let mut ask = |path: &str, lines: &[(&str, &str)]| {
        let before = redis.calls("evalsha");
        let reply = client.get_with(path, lines);
        (reply, redis.calls("evalsha") - before)
    };
    let good = [("X-Api-Key", "alice-key")];
    let (reply, calls) = ask("/r", &good);
    assert_eq!((reply.status, calls), (200, 1), "all limits in one call");
    assert_eq!(["per-ip", "per-key", "all"].map(|limit| reply.remaining(limit)), [8, 99, 99]);
    for (what, path, lines, status, expected) in [
        ("an unknown key", "/r", &[("X-Api-Key", "eve")][..], 401, 1),
        ("no key", "/r", &[], 401, 1),
        ("a key of another route", "/bound", &[("X-Api-Key", "bound-key")], 403, 1),
        ("two keys", "/r", &[("X-Api-Key", "a"), ("X-Api-Key", "b")], 400, 0),
        ("no limits", "/free", &[("X-Api-Key", "eve")], 401, 0),
        ("no limit for the unauthenticated", "/shared", &[("X-Api-Key", "eve")], 401, 0),
        ("admitted without limits", "/free", &good, 200, 0),
    ] {
        let (reply, calls) = ask(path, lines);
        assert_eq!((reply.status, calls), (status, expected), "{what}");
    }
    // Three of these requests were charged to the limit `per-ip`. None was charged to the limit `all`: requests that
    // are rejected for their credentials are not charged to limits that all clients share.
    let (reply, _) = ask("/r", &good);
    assert_eq!(["per-ip", "per-key", "all"].map(|limit| reply.remaining(limit)), [4, 98, 98]);
    // A client that guesses keys exhausts the limit `per-ip` and then gets 429. This status does not reveal whether a
    // key is valid.
    let statuses: Vec<_> = (0..6).map(|_| ask("/r", &[("X-Api-Key", "eve")]).0.status).collect();
    assert_eq!(statuses, [401, 401, 401, 401, 429, 429]);
    let (reply, calls) = ask("/bound", &[("X-Api-Key", "bound-key")]);
    assert_eq!((reply.status, calls, challenges(&reply)), (429, 1, vec![]), "429 instead of 403");
}

#[test]
fn limits_read_the_provider_that_succeeded() {
    let upstream_server = Upstream::start();
    let key = Key::ed("k");
    let partners = "[auth.partners]\nkind = \"api-key\"\nheader = \"x-partner\"\nconsumers = \"partners.toml\"\n";
    let config = [
        keys("on_missing = \"anonymous\""),
        partners.to_owned(),
        tokens(""),
        upstream(&upstream_server),
        limit(
            "calls",
            100,
            "by = \"api-key\"\non_missing = \"skip\"\ntiers = { pro = { quota = \"500/hour\" }, anonymous = { quota = \"10/hour\" } }",
        ),
        limit("subject", 100, "by = \"jwt:sub\"\non_missing = \"skip\""),
        limit("needed", 100, "by = \"api-key\""),
        route("any", "require = [\"partners\", \"tokens\"]\nlimits = [\"calls\", \"subject\"]"),
        route("both", "require = [\"tokens\"]\nidentify = [\"keys\", \"partners\"]\nlimits = [\"calls\", \"subject\"]"),
        route("needed", "require = [\"partners\", \"tokens\"]\nlimits = [\"needed\"]"),
    ];
    let partner = consumers(&[("globex", &[&plain("globex-key")])]) + "tier = \"pro\"\n";
    let files = [("consumers.toml", &*alice()), ("partners.toml", &partner), ("jwks.json", &key_set(&[&key]))];
    let gateway = Gateway::start_with(&config.concat(), &files);
    let token = bearer(&key.token(&claims("alice")));
    let token = ("Authorization", &*token);
    let mut client = gateway.client();
    // The last two elements of each case are the remaining quotas of the limits `calls` and `subject`.
    for (what, path, lines, calls, subject) in [
        ("a partner", "/any", &[("X-Partner", "globex-key")][..], Some(499), None),
        ("a token", "/any", &[token], None, Some(99)),
        ("the first that succeeded decides", "/any", &[("X-Partner", "globex-key"), token], Some(498), None),
        ("anonymous beside the token", "/both", &[token], Some(9), Some(98)),
        ("a key beside the token", "/both", &[token, ("X-Api-Key", "alice-key")], Some(99), Some(97)),
        ("the key of another provider", "/both", &[token, ("X-Partner", "globex-key")], Some(497), Some(96)),
        (
            "two consumers: the first provider",
            "/both",
            &[token, ("X-Partner", "globex-key"), ("X-Api-Key", "alice-key")],
            Some(98),
            Some(95),
        ),
    ] {
        let reply = client.get_with(path, lines);
        assert_eq!(reply.status, 200, "{what}: {}", reply.text());
        let has = |limit: &str| reply.header("ratelimit").is_some_and(|line| line.contains(&format!("\"{limit}\"")));
        let left = |limit: &str| has(limit).then(|| reply.remaining(limit));
        assert_eq!((left("calls"), left("subject")), (calls, subject), "{what}");
    }
    assert_reply(&client.get_with("/both", &[("X-Api-Key", "alice-key")]), 401, &["Bearer", "ApiKey"], "no token");
    assert_reply(
        &client.get_with("/both", &[token, ("X-Api-Key", "eve")]),
        401,
        &["Bearer", "ApiKey"],
        "an unknown key",
    );
    // The limit `needed` counts by API key and rejects requests without one. A token alone is therefore not sufficient.
    assert_reply(&client.get_with("/needed", &[token]), 401, &["ApiKey"], "a limit by API key");
    assert_eq!(client.get_with("/needed", &[("X-Partner", "globex-key")]).remaining("needed"), 99);
}

#[test]
fn bearer_credentials_of_both_shapes_are_identified() {
    let upstream_server = Upstream::start();
    let key = Key::ed("k");
    let jwt = key.token(&claims("alice"));
    let forged = Key::ed("k").token(&claims("alice"));
    let foreign = Key::ed("other").token(&claims("alice"));
    for (unknown, identify, expected) in [
        // The expected statuses, in this order: for an API key, a token, a forged token, a token that an unknown key
        // signed, another unknown bearer credential, and no credential.
        ("reject", "\"keys\", \"tokens\"", [200, 200, 401, 401, 401, 200]),
        ("reject", "\"tokens\", \"keys\"", [200, 200, 401, 401, 401, 200]),
        ("anonymous", "\"keys\", \"tokens\"", [200, 200, 401, 401, 401, 200]),
        ("accept", "\"keys\", \"tokens\"", [200, 200, 401, 401, 200, 200]),
        ("accept", "\"tokens\", \"keys\"", [200, 200, 401, 401, 200, 200]),
        ("reject", "\"keys\"", [200, 401, 401, 401, 401, 200]),
        ("anonymous", "\"keys\"", [200, 200, 200, 200, 200, 200]),
        ("accept", "\"keys\"", [200, 200, 200, 200, 200, 200]),
    ] {
        let config = [
            keys(&format!("header = \"authorization\"\non_unknown = \"{unknown}\"")),
            tokens(""),
            upstream(&upstream_server),
            route("r", &format!("identify = [{identify}]")),
            route("unused", "identify = [\"keys\", \"tokens\"]"),
        ];
        let files = [("consumers.toml", &*alice()), ("jwks.json", &key_set(&[&key]))];
        let gateway = Gateway::start_with(&config.concat(), &files);
        let mut client = gateway.client();
        let lines = ["alice-key", &jwt, &forged, &foreign, "eve"].map(bearer);
        let mut statuses: Vec<_> =
            lines.iter().map(|line| client.get_with("/r", &[("Authorization", line)]).status).collect();
        statuses.push(client.get("/r").status);
        assert_eq!(statuses, expected, "on_unknown = {unknown}, identify = [{identify}]");
    }
}

#[test]
fn upstream_sees_only_verified_credentials_that_are_forwarded() {
    let upstream_server = Upstream::start();
    let key = Key::ed("k");
    let kept = "[auth.kept]\nkind = \"api-key\"\nheader = \"x-kept\"\nconsumers = \"consumers.toml\"\nforward_credential = true\n";
    let hidden = "[auth.hidden]\nkind = \"jwt\"\njwks_file = \"jwks.json\"\nforward_credential = false\n";
    let config = [
        keys("header = [\"x-api-key\", \"authorization\"]"),
        kept.to_owned(),
        tokens(""),
        hidden.to_owned(),
        upstream(&upstream_server),
        route("keys", "require = [\"keys\"]"),
        route("kept", "require = [\"kept\"]"),
        route("tokens", "require = [\"tokens\"]"),
        route("hidden", "require = [\"hidden\"]"),
        route("any", "require = [\"kept\", \"tokens\"]"),
        route("identified", "identify = [\"keys\", \"tokens\"]"),
        route("open", ""),
    ];
    let files = [("consumers.toml", &*alice()), ("jwks.json", &key_set(&[&key]))];
    let gateway = Gateway::start_with(&config.concat(), &files);
    let token = bearer(&key.token(&claims("alice")));
    let forged = bearer(&signed(&json!({ "alg": "none" }), &claims("root"), |_| Vec::new()));
    let basic = "Basic YTpi";
    let mut client = gateway.client();
    // Each case has the headers of a request, and the values of `X-Api-Key`, `X-Kept` and `Authorization` that the
    // upstream receives.
    for (what, path, lines, seen) in [
        ("a key", "/keys", &[("X-Api-Key", "alice-key")][..], ["", "", ""]),
        ("a bearer key", "/keys", &[("Authorization", "Bearer alice-key")], ["", "", ""]),
        ("both places", "/keys", &[("X-Api-Key", "alice-key"), ("Authorization", "Bearer alice-key")], ["", "", ""]),
        ("another scheme", "/keys", &[("X-Api-Key", "alice-key"), ("Authorization", basic)], ["", "", ""]),
        (
            "a header of no provider here",
            "/kept",
            &[("X-Kept", "alice-key"), ("Authorization", basic)],
            ["", "alice-key", basic],
        ),
        ("a key of no provider here", "/keys", &[("X-Api-Key", "alice-key"), ("X-Kept", "x")], ["", "x", ""]),
        ("a forwarded key", "/kept", &[("X-Kept", "alice-key")], ["", "alice-key", ""]),
        ("a token", "/tokens", &[("Authorization", &*token)], ["", "", &*token]),
        ("a hidden token", "/hidden", &[("Authorization", &token)], ["", "", ""]),
        (
            "a token that was not verified",
            "/any",
            &[("X-Kept", "alice-key"), ("Authorization", &forged)],
            ["", "alice-key", ""],
        ),
        (
            "a token beside a key",
            "/identified",
            &[("X-Api-Key", "alice-key"), ("Authorization", &token)],
            ["", "", &token],
        ),
        ("nothing", "/identified", &[], ["", "", ""]),
        ("a route without providers", "/open", &[("X-Api-Key", "x"), ("Authorization", &forged)], ["x", "", &forged]),
    ] {
        assert_eq!(client.get_with(path, lines).status, 200, "{what}");
        let last = upstream_server.last();
        let at = ["x-api-key", "x-kept", "authorization"].map(|name| last.headers(name).join("|"));
        assert_eq!(at, seen, "{what}: {}", last.head);
    }
    // Some servers treat a header such as `X_Api_Key` like `X-Api-Key`. The gateway removes these headers on all
    // routes. If `Connection` lists these headers or `Authorization`, the result is the same.
    for alias in ["X_Api_Key", "x.api.key", "X-Api_Key", "x_kept", "X!Kept"] {
        for path in ["/identified", "/open"] {
            let lines = [
                (alias, "alice-key"),
                ("Connection", "x-api-key, x_api_key, authorization"),
                ("Authorization", &token),
            ];
            assert_eq!(client.get_with(path, &lines).status, 200, "{alias}");
            let last = upstream_server.last();
            assert!(!last.head.contains("alice-key"), "{alias}: {}", last.head);
            assert_eq!(last.headers("authorization"), [&token], "{path}, {alias}");
        }
    }
}

/// `Authorization` headers that no provider of the test accepts, with the schemes `Bearer`, `Basic` and others.
fn unverified_credentials() -> Vec<Vec<String>> {
    let forged = bearer(&signed(&json!({ "alg": "none" }), &claims("root"), |_| Vec::new()));
    let one = [
        &*forged,
        "Bearer opaque",
        "bearer opaque",
        "Basic cm9vdDp4",
        "BASIC cm9vdDp4",
        "Basic !",
        "Digest username=\"root\", realm=\"api\", response=\"0\"",
        "Negotiate YWI=",
        "AWS4-HMAC-SHA256 Credential=root",
        "opaque",
    ];
    let mut all: Vec<_> = one.iter().map(|value| vec![(*value).to_owned()]).collect();
    all.push(vec!["Digest username=\"root\"".to_owned(), forged.clone()]);
    all.push(vec!["Basic cm9vdDp4".to_owned(), "Digest username=\"root\"".to_owned()]);
    all
}

/// Each pair of providers, in `require` and in `identify`: an `Authorization` header that no provider has verified
/// reaches neither the upstream nor the mirror, whatever its scheme is. Cookies for an authentication server that has
/// not admitted the request do not reach them either.
#[test]
fn unverified_credentials_of_any_scheme_reach_neither_upstream_nor_mirror() {
    let (api, copies) = (Upstream::start(), Upstream::start());
    let server = Upstream::responding(|seen| {
        let status =
            if seen.headers("cookie").iter().any(|cookie| cookie.contains("s=ok")) { "200 OK" } else { "401 No" };
        format!("HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n").into_bytes()
    });
    let key = Key::ed("k");
    // A provider, and the scheme that it reads from `Authorization`.
    let readers = [("bearer", Some("bearer")), ("tokens", Some("bearer")), ("users", Some("basic")), ("sso", None)];
    let mirror = "mirror = { upstream = \"copies\" }";
    let mut config = [
        keys(""),
        tokens(""),
        "[auth.bearer]\nkind = \"api-key\"\nheader = \"authorization\"\nconsumers = \"others.toml\"\n".to_owned(),
        "[auth.users]\nkind = \"basic\"\nusers = \"htpasswd\"\n".to_owned(),
        format!("[auth.sso]\nkind = \"forward\"\nurl = \"{}\"\n", server.url()),
        upstream(&api),
        format!("[upstream.copies]\nservers = [\"{}\"]\n", copies.url()),
        route("identify-users", &format!("identify = [\"keys\"]\nrequire = [\"keys\", \"users\"]\n{mirror}")),
        route("identify-sso", &format!("identify = [\"sso\"]\n{mirror}")),
        route("keys-only", &format!("require = [\"keys\"]\n{mirror}")),
    ]
    .concat();
    for (name, _) in readers {
        for first in ["keys", "sso"].iter().filter(|first| **first != name) {
            let require = format!("require = [\"{first}\", \"{name}\"]\n{mirror}");
            config += &route(&format!("{first}-{name}"), &require);
        }
    }
    let files = [
        ("consumers.toml", &*alice()),
        ("others.toml", &consumers(&[("bob", &[&plain("bob-key")])])),
        ("jwks.json", &key_set(&[&key])),
        ("htpasswd", "alice:$apr1$saltsalt$LrttParrLPdxvgutaSXWJ0\n"),
    ];
    let gateway = Gateway::start_with(&config, &files);
    let mut client = gateway.client();
    let mut seen = |path: &str, lines: &[(&str, &str)]| {
        let before = copies.count();
        assert_eq!(client.get_with(path, lines).status, 200, "{path} {lines:?}");
        eventually("the request is copied", || copies.count() > before);
        let last = api.last();
        let found = ["authorization", "cookie", "x-api-key"].map(|name| last.headers(name).join("|"));
        let copied = ["authorization", "cookie", "x-api-key"].map(|name| copies.last().headers(name).join("|"));
        assert_eq!(found, copied, "the copy has the same credentials");
        found
    };
    let mut checked = 0;
    for values in unverified_credentials() {
        let authorization: Vec<_> = values.iter().map(|value| ("Authorization", &**value)).collect();
        let with = |credential| [&authorization[..], &[credential]].concat();
        let joined = values.join("|");
        for (name, _) in readers {
            let path = format!("/keys-{name}");
            let found = seen(&path, &[&with(("X-Api-Key", "alice-key"))[..], &[("Cookie", "s=no")]].concat());
            let cookie = if name == "sso" { "" } else { "s=no" };
            assert_eq!(found, ["", cookie, ""], "{path} {values:?}");
            checked += 1;
        }
        assert_eq!(seen("/identify-users", &with(("X-Api-Key", "alice-key"))), ["", "", ""], "{values:?}");
        assert_eq!(seen("/keys-only", &with(("X-Api-Key", "alice-key"))), [&*joined, "", ""], "no provider reads it");
        // With `identify`, the upstream gets the cookies of a client that the authentication server denied.
        if values.len() == 1 {
            assert_eq!(seen("/identify-sso", &with(("Cookie", "s=no"))), ["", "s=no", ""], "{values:?}");
            assert_eq!(seen("/identify-sso", &with(("Cookie", "s=ok"))), [&*joined, "s=ok", ""], "{values:?}");
        }
        // The authentication server has verified the header, unless another provider verifies its scheme. The gateway
        // rejects requests that send a header for the authentication server twice.
        for (name, scheme) in readers.iter().filter(|(name, _)| *name != "sso" && values.len() == 1) {
            let is_for_provider = scheme.is_some_and(|scheme| joined.to_lowercase().starts_with(&format!("{scheme} ")));
            let kept = if is_for_provider { "" } else { &*joined };
            let path = format!("/sso-{name}");
            assert_eq!(seen(&path, &with(("Cookie", "s=ok"))), [kept, "s=ok", ""], "{path} {values:?}");
            checked += 1;
        }
    }
    assert!(checked > 70, "{checked}");
    // Verified credentials are forwarded as configured.
    let (token, users) = (bearer(&key.token(&claims("alice"))), format!("Basic {}", STANDARD.encode("alice:secret")));
    for (path, value, kept) in
        [("/keys-tokens", &*token, &*token), ("/keys-users", &users, ""), ("/keys-bearer", "Bearer bob-key", "")]
    {
        assert_eq!(seen(path, &[("Authorization", value)]), [kept, "", ""], "{path}");
    }
    assert_eq!(
        seen("/keys-sso", &[("Authorization", "Bearer opaque"), ("Cookie", "s=ok")]),
        ["Bearer opaque", "s=ok", ""]
    );
}

#[test]
fn forged_identities_are_not_admitted() {
    let upstream_server = Upstream::start();
    let key = Key::rsa("k");
    let config = [
        keys("header = [\"x-api-key\", \"authorization\"]"),
        tokens(""),
        upstream(&upstream_server),
        limit("who", 1000, "by = \"api-key\"\non_missing = \"skip\""),
        route("r", "require = [\"tokens\", \"keys\"]\nlimits = [\"who\"]"),
    ];
    let files = [("consumers.toml", &*alice()), ("jwks.json", &key_set(&[&key]))];
    let gateway = Gateway::start_with(&config.concat(), &files);
    let token = key.token(&claims("alice"));
    let (message, signature) = token.rsplit_once('.').unwrap();
    let (header, payload) = message.split_once('.').unwrap();
    let none = encode(json!({ "alg": "none" }).to_string());
    let mut client = gateway.client();
    for (what, value) in [
        ("no signature", format!("Bearer {message}.")),
        ("no algorithm", format!("Bearer {none}.{payload}.")),
        ("no algorithm, with a signature", format!("Bearer {none}.{payload}.{signature}")),
        ("two parts", format!("Bearer {message}")),
        ("four parts", format!("Bearer {token}.{signature}")),
        ("other claims", format!("Bearer {header}.{}.{signature}", encode(claims("root").to_string()))),
        ("the name of a consumer", "Bearer alice".to_owned()),
        ("the hash of a key", format!("Bearer {}", hash("alice-key"))),
        ("a list", format!("Bearer {token}, Bearer {token}")),
        ("a parameter", format!("Bearer token={token}")),
        ("a large token", format!("Bearer {message}.{}", "A".repeat(24 << 10))),
        ("many dots", format!("Bearer {}", ".".repeat(24 << 10))),
        ("a deep header", format!("Bearer {}.e30.x", encode("[".repeat(8 << 10)))),
        (
            "a large header",
            format!("Bearer {}.e30.x", encode(format!("{{\"alg\":\"RS256\",\"x\":\"{}\"}}", "a".repeat(8 << 10)))),
        ),
    ] {
        let reply = client.get_with("/r", &[("Authorization", &value)]);
        assert_eq!(reply.status, 401, "{what}: {}", reply.text());
        for part in token.split('.') {
            assert!(!reply.text().contains(part), "{what}: the token is repeated: {}", reply.text());
        }
    }
    // The gateway does not accept headers that only claim an identity as credentials.
    let smuggled =
        ["X-Consumer", "X-Consumer-Name", "X-Consumer-Username", "X-Credential-Identifier", "X-Authenticated-Userid"];
    for name in smuggled {
        assert_eq!(client.get_with("/r", &[(name, "alice")]).status, 401, "{name}");
    }
    assert_eq!(upstream_server.count(), 0);
    let reply = client.get_with("/r", &[("X-Api-Key", "alice-key")]);
    assert_eq!((reply.status, reply.remaining("who")), (200, 999), "nothing was charged to alice");
}

/// If the JWKS file changes, the gateway verifies tokens again that it has already verified.
#[test]
fn replaced_keys_end_verified_tokens() {
    let upstream_server = Upstream::start();
    let (old, new) = (Key::ed("same"), Key::ed("same"));
    let config = [tokens(""), upstream(&upstream_server), route("r", "require = [\"tokens\"]")];
    let gateway = Gateway::start_with(&config.concat(), &[("jwks.json", &key_set(&[&old]))]);
    let [old_token, new_token] = [&old, &new].map(|key| bearer(&key.token(&claims("alice"))));
    let status = |token: &str| Client::connect(gateway.address).get_with("/r", &[("Authorization", token)]).status;
    assert_eq!([status(&old_token), status(&old_token), status(&new_token)], [200, 200, 401]);
    gateway.put_file("jwks.json", &key_set(&[&new]));
    eventually("the new key is used", || status(&new_token) == 200);
    assert_eq!(status(&old_token), 401, "it was verified with the old key");
}

/// Return a consumers file with one key per consumer: `key-NUMBER`.
fn many_consumers(numbers: std::ops::Range<usize>) -> String {
    numbers.map(|number| consumers(&[(&format!("customer-{number}"), &[&plain(&format!("key-{number}"))])])).collect()
}

#[test]
fn long_consumers_file_is_read_in_little_memory() {
    let config = "[auth.keys]\nkind = \"api-key\"\nconsumers = \"consumers.toml\"\n\
                  [[route]]\nname = \"r\"\npath = \"/\"\nrequire = [\"keys\"]\nrespond = { status = 200 }\n";
    let peak = |gateway: &Gateway| {
        let status = std::fs::read_to_string(format!("/proc/{}/status", gateway.child.id())).unwrap();
        let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() >> 10
    };
    let start = |file: &str| Gateway::start_with(config, &[("consumers.toml", file)]);
    const COUNT: usize = 20_000;
    let group = "[[group]]\nname = \"search\"\nlevel = \"team\"\n";
    let file = format!("{group}{}", many_consumers(0..COUNT));
    let gateway = start(&file);
    let small = peak(&start(&many_consumers(0..1)));
    let large = peak(&gateway);
    println!("{small} MiB for one consumer, {large} MiB for {COUNT}");
    // The values of the whole file need 70 MiB.
    assert!(large < small + 25, "{small} MiB and {large} MiB");
    let mut client = gateway.client();
    let status =
        |client: &mut Client, number: usize| client.get_with("/", &[("x-api-key", &format!("key-{number}"))]).status;
    for number in (0..COUNT).step_by(97).chain([COUNT - 1]) {
        assert_eq!(status(&mut client, number), 200, "{number}");
    }
    assert_eq!(status(&mut client, COUNT), 401);
    // Files that cannot be divided have the same consumers.
    let text = "\n[[consumer]]\nname = \"\"\"text\n[[consumer]]\nname = \"inner\"\n\"\"\"\nkeys = []\n";
    for other in [
        format!("{}{group}", many_consumers(0..2000)),
        format!("{}{text}{}", many_consumers(0..600), many_consumers(600..2000)),
        many_consumers(0..2000).replace('\n', "\r\n"),
        format!("# consumer\n{}", many_consumers(0..2000)),
    ] {
        gateway.put_file("consumers.toml", &other.replacen(&hash("key-7"), &hash("changed"), 1));
        eventually("the file is read", || client.get_with("/", &[("x-api-key", "changed")]).status == 200);
        assert_eq!((status(&mut client, 1_999), status(&mut client, 7)), (200, 401));
        gateway.put_file("consumers.toml", &file);
        eventually("the file is read", || status(&mut client, 7) == 200);
    }
    // Errors about two pieces name both lines.
    let lines = file.lines().count();
    for (added, error) in [
        (many_consumers(5..6), "duplicate consumer `customer-5`"),
        (many_consumers(5..6).replace("customer-5", "other"), "the consumer `customer-5` has this key already"),
        ("[[consumer]]\nname = \"a\"\nkey = []\n".to_owned(), "unknown key `key`"),
        ("[[consumer]]\nname = \"a\"\nkeys = [\n".to_owned(), ""),
    ] {
        gateway.put_file("consumers.toml", &format!("{file}{added}"));
        let path = gateway.directory().join("gateway.toml");
        let output = crate::support::gateway::binary().arg("check").arg("--config").arg(path).output().unwrap();
        let report = String::from_utf8(output.stdout).unwrap() + &String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{report}");
        assert!(report.contains(error), "{report}\nlacks {error}");
        assert!((lines + 1..lines + 6).any(|line| report.contains(&format!("consumers.toml:{line}"))), "{report}");
    }
}
