//! Fetching JWT key sets (JWKS) from a URL, tested over the wire: the first fetch, key rotation, unknown keys and
//! failing servers.

use std::io::Write;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};

use crate::support::admin_listener::{metric, with_admin};
use crate::support::certificates::{Authority, NOW};
use crate::support::client::{Client, Reply};
use crate::support::gateway::{Gateway, binary};
use crate::support::redis::free_port;
use crate::support::tls_upstream::{self, TlsUpstream};
use crate::support::tokens::{Key, in_seconds, key_set};
use crate::support::upstream::{Upstream, read_request};
use crate::support::{SetOnDrop, eventually};
use serde_json::{Value, json};

/// A server that serves a key set, which the test can replace.
struct Issuer {
    server: Upstream,
    /// The raw response. With `None`, the server waits until the test sets a response.
    response: Arc<(Mutex<Option<Vec<u8>>>, Condvar)>,
}

fn ok(body: &str) -> Vec<u8> {
    format!("HTTP/1.1 200 OK\r\nContent-Type: application/jwk-set+json\r\nContent-Length: {}\r\n\r\n{body}", body.len())
        .into_bytes()
}

impl Issuer {
    fn start(response: Option<Vec<u8>>) -> Issuer {
        let response = Arc::new((Mutex::new(response), Condvar::new()));
        let inner = response.clone();
        let server = Upstream::responding(move |_| {
            let response = inner.1.wait_while(inner.0.lock().unwrap(), |response| response.is_none()).unwrap();
            response.clone().unwrap()
        });
        Issuer { server, response }
    }

    fn set(&self, response: Option<Vec<u8>>) {
        *self.response.0.lock().unwrap() = response;
        self.response.1.notify_all();
    }

    fn publish(&self, keys: &[&Key]) {
        self.set(Some(ok(&key_set(keys))));
    }

    fn url(&self) -> String {
        format!("{}/jwks.json", self.server.url())
    }

    fn fetches(&self) -> usize {
        self.server.count()
    }
}

/// A configuration with `[auth.tokens]`, whose keys come from `url`, a route `/limited` that requires a token, and an
/// open route.
fn config(url: &str, keys: &str) -> String {
    format!(
        "[client_ip]\ntrusted_proxies = []\n[auth.tokens]\nkind = \"jwt\"\njwks_url = \"{url}\"\n{keys}\n\
         [limit.ip]\nby = \"ip\"\nquota = \"1000000/s\"\n[limit.token]\nby = \"jwt:sub\"\nquota = \"1000000/s\"\n\
         [[route]]\nname = \"limited\"\npath = \"/limited\"\nrequire = [\"tokens\"]\nlimits = [\"ip\", \"token\"]\n\
         respond = {{ status = 200 }}\n[[route]]\nname = \"open\"\npath = \"/open\"\nrespond = {{ status = 200 }}\n"
    )
}

fn token(key: &Key) -> String {
    format!("Bearer {}", key.token(&json!({ "sub": "alice", "exp": in_seconds(300) })))
}

fn get(client: &mut Client, token: &str) -> Reply {
    client.get_with("/limited", &[("Authorization", token)])
}

fn ask(gateway: &Gateway, key: &Key) -> Reply {
    get(&mut gateway.client(), &token(key))
}

#[test]
fn tokens_get_503_until_the_first_key_set_arrives_and_nothing_else_waits() {
    let (key, issuer) = (Key::ed("a"), Issuer::start(None));
    let gateway = Gateway::start(&config(&issuer.url(), ""));
    assert_eq!(gateway.get("/open").status, 200, "the gateway starts while the issuer hangs");
    let reply = ask(&gateway, &key);
    reply.assert_problem(503, "the gateway has not fetched the keys");
    assert_eq!(reply.header("retry-after"), Some("1"));
    assert!(reply.header("x-request-id").is_some());
    assert_eq!(gateway.get("/limited").status, 401, "a request without a token");
    assert_eq!(get(&mut gateway.client(), "Bearer opaque").status, 401, "a bearer token that is not a JWT");
    issuer.publish(&[&key]);
    eventually("the keys arrive", || ask(&gateway, &key).status == 200);
    assert!(gateway.log().contains("key set fetched"), "{}", gateway.log());
}

#[test]
fn issuer_that_starts_late_is_found() {
    let key = Key::ec("a");
    // No server listens on this port yet.
    let address = format!("127.0.0.1:{}", free_port());
    let gateway = Gateway::start(&config(&format!("http://{address}/jwks.json"), ""));
    assert_eq!(ask(&gateway, &key).status, 503);
    eventually("the failure is logged", || gateway.log().contains("cannot fetch the key set: tokens are rejected"));
    let listener = std::net::TcpListener::bind(&address).unwrap();
    let body = ok(&key_set(&[&key]));
    std::thread::spawn(move || {
        for mut stream in listener.incoming().map_while(Result::ok) {
            if read_request(&mut stream).is_some() {
                let _ = stream.write_all(&body);
            }
        }
    });
    eventually("the keys arrive", || ask(&gateway, &key).status == 200);
}

#[test]
fn rotation_under_load_fails_no_request() {
    let keys: Vec<_> = (0..4).map(|number| Key::ed(&format!("key-{number}"))).collect();
    let issuer = Issuer::start(Some(ok(&key_set(&[&keys[0]]))));
    let gateway = Gateway::start(&config(&issuer.url(), "refresh_interval = \"1s\""));
    eventually("the keys arrive", || ask(&gateway, &keys[0]).status == 200);
    let (current, stop) = (AtomicUsize::new(0), AtomicBool::new(false));
    let tokens: Vec<_> = keys.iter().map(token).collect();
    let requests = std::thread::scope(|scope| {
        let _stop = SetOnDrop(&stop);
        let load = || {
            let mut client = gateway.client();
            let mut requests = 0;
            while !stop.load(Ordering::SeqCst) {
                let index = current.load(Ordering::SeqCst);
                let reply = get(&mut client, &tokens[index]);
                assert_eq!(reply.status, 200, "key {index}: {}", reply.text());
                requests += 1;
            }
            requests
        };
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(load)).collect();
        for next in 1..keys.len() {
            // The first rotation signs tokens with the new key at once, and the first of these tokens triggers a fetch.
            // Each later rotation publishes the new key, waits for a refresh, and only then signs tokens with it, as
            // issuers do.
            issuer.publish(&[&keys[next - 1], &keys[next]]);
            if next > 1 {
                let fetches = issuer.fetches();
                eventually("the keys are refreshed", || issuer.fetches() >= fetches + 2);
            }
            current.store(next, Ordering::SeqCst);
            let fetches = issuer.fetches();
            eventually("the keys are refreshed", || issuer.fetches() >= fetches + 2);
        }
        stop.store(true, Ordering::SeqCst);
        threads.into_iter().map(|thread| thread.join().unwrap()).sum::<usize>()
    });
    assert!(requests > 100, "{requests}");
    assert_eq!(ask(&gateway, &keys[0]).status, 401, "the key set does not contain the first key");
}

#[test]
fn server_that_fails_or_sends_garbage_leaves_the_last_keys_in_force() {
    let (key, other) = (Key::rsa("a"), Key::ed("b"));
    let issuer = Issuer::start(Some(ok(&key_set(&[&key]))));
    let target = Upstream::start();
    let gateway = Gateway::start(&with_admin(&config(&issuer.url(), "refresh_interval = \"1s\"")));
    eventually("the keys arrive", || ask(&gateway, &key).status == 200);
    let mut huge = ok("");
    huge = String::from_utf8(huge).unwrap().replace("Content-Length: 0", "Content-Length: 2000000").into_bytes();
    huge.resize(huge.len() + 2_000_000, b' ');
    let symmetric = json!({ "keys": [{ "kty": "oct", "k": "c2VjcmV0" }] }).to_string();
    for (response, reason) in [
        (Some(b"HTTP/1.1 500 Oops\r\nContent-Length: 0\r\n\r\n".to_vec()), "status 500"),
        (Some(b"HTTP/1.1 204 No Content\r\n\r\n".to_vec()), "status 204"),
        (
            Some(
                format!("HTTP/1.1 302 Found\r\nLocation: {}/jwks\r\nContent-Length: 0\r\n\r\n", target.url())
                    .into_bytes(),
            ),
            "redirects are not followed",
        ),
        (Some(ok("<html>not json</html>")), "not a JSON Web Key Set"),
        (Some(ok("{\"keys\": []}")), "no key for RS256"),
        (Some(ok("{\"keys\": 7}")), "not a JSON Web Key Set"),
        (Some(ok(&symmetric)), "no key for RS256"),
        (Some(huge), "longer than 1048576 bytes"),
        (Some(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n{".to_vec()), "no complete response within 5 s"),
        (Some(b"\x15\x03\x01garbage".to_vec()), "no valid response"),
        (None, "no complete response within 5 s"),
    ] {
        let known = gateway.log().matches(reason).count();
        issuer.set(response);
        // Tokens with an unknown key are rejected and do not affect the known keys.
        assert_eq!(get(&mut gateway.client(), &token(&other)).status, 401, "{reason}");
        eventually(reason, || gateway.log().matches(reason).count() > known);
        assert_eq!(ask(&gateway, &key).status, 200, "{reason}");
    }
    assert_eq!(target.count(), 0, "no redirect is followed");
    let failed = metric(&gateway, "sluicegate_jwks_refreshes_total{provider=\"tokens\",result=\"error\"}");
    let fetched = metric(&gateway, "sluicegate_jwks_refreshes_total{provider=\"tokens\",result=\"ok\"}");
    assert!(failed >= 10.0 && fetched >= 1.0, "{failed} {fetched}");
    assert!(metric(&gateway, "sluicegate_jwks_last_success_timestamp_seconds{provider=\"tokens\"}") > 1e9);
    // Unusable keys in a set do not prevent the use of the other keys in this set.
    let mut set: Value = serde_json::from_str(&key_set(&[&other])).unwrap();
    let unusable = [
        json!({ "kty": "RSA", "kid": "small", "n": "AQAB", "e": "AQAB" }),
        json!({ "kty": "AKP", "alg": "ML-DSA-65", "kid": "pq", "pub": "AAAA" }),
        json!({ "kty": "oct", "k": "c2VjcmV0" }),
        json!("nonsense"),
    ];
    set["keys"].as_array_mut().unwrap().extend(unusable);
    issuer.set(Some(ok(&set.to_string())));
    eventually("the usable key is taken", || ask(&gateway, &other).status == 200);
    assert_eq!(ask(&gateway, &key).status, 401, "the key set does not contain the old key");
    assert!(gateway.log().contains("a key of the key set was skipped"), "{}", gateway.log());
}

#[test]
fn unknown_keys_cause_one_fetch_in_ten_seconds() {
    let (key, next) = (Key::ed("a"), Key::ed("b"));
    let issuer = Issuer::start(Some(ok(&key_set(&[&key]))));
    let gateway = Gateway::start(&config(&issuer.url(), "refresh_interval = \"1h\""));
    eventually("the keys arrive", || ask(&gateway, &key).status == 200);
    assert_eq!(issuer.fetches(), 1);
    // The first token with an unknown key waits for the new key set.
    issuer.publish(&[&key, &next]);
    assert_eq!(ask(&gateway, &next).status, 200);
    assert_eq!(issuer.fetches(), 2);
    for number in 0..50 {
        assert_eq!(ask(&gateway, &Key::ed(&format!("unknown-{number}"))).status, 401);
    }
    assert_eq!(issuer.fetches(), 2);
}

#[test]
fn concurrent_tokens_with_a_new_key_wait_for_the_same_fetch() {
    let (key, next) = (Key::ed("a"), Key::ed("b"));
    let issuer = Issuer::start(Some(ok(&key_set(&[&key]))));
    let gateway = Gateway::start(&config(&issuer.url(), "refresh_interval = \"1h\""));
    eventually("the keys arrive", || ask(&gateway, &key).status == 200);
    issuer.set(None);
    let token = token(&next);
    let replies: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..8).map(|_| scope.spawn(|| get(&mut gateway.client(), &token))).collect();
        eventually("the keys are asked for", || issuer.server.heads.lock().unwrap().len() == 2);
        assert_eq!(ask(&gateway, &key).status, 200, "tokens with known keys do not wait for the fetch");
        issuer.publish(&[&key, &next]);
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(replies.iter().all(|reply| reply.status == 200), "{replies:?}");
    assert_eq!(issuer.fetches(), 2);
}

#[test]
fn keys_outlive_a_reload_while_the_issuer_is_down() {
    let (key, issuer) = (Key::ed("a"), Issuer::start(None));
    issuer.publish(&[&key]);
    let gateway = Gateway::start(&config(&issuer.url(), ""));
    eventually("the keys arrive", || ask(&gateway, &key).status == 200);
    issuer.set(None);
    gateway.put(&(config(&issuer.url(), "refresh_interval = \"1s\"") + "\n# changed\n"));
    eventually("the configuration is reloaded", || gateway.log().contains("configuration reloaded"));
    assert_eq!(ask(&gateway, &key).status, 200);
}

#[test]
fn issuer_at_https_is_verified_and_check_and_doctor_say_what_is_wrong() {
    let (authority, key) = (Authority::new("issuer ca"), Key::ec("a"));
    let pair = authority.server(&["127.0.0.1"], NOW);
    let body = ok(&key_set(&[&key]));
    let server = TlsUpstream::serve(
        tls_upstream::server(&pair, None, &["http/1.1"], rustls::ALL_VERSIONS),
        move |mut stream| {
            while read_request(&mut stream).is_some() {
                if stream.write_all(&body).is_err() {
                    return;
                }
            }
        },
    );
    let url = format!("https://{}/jwks.json", server.address);
    let text = config(&url, "ca = \"ca.pem\"");
    let gateway = Gateway::start_with(&text, &[("ca.pem", &authority.pem())]);
    eventually("the keys arrive", || ask(&gateway, &key).status == 200);
    let run = |command: &str, ca: &str, url: &str| {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("gateway.toml");
        let text = config(url, if url.starts_with("https") { "ca = \"ca.pem\"" } else { "" });
        std::fs::write(&path, text + "[[listener]]\naddress = \"127.0.0.1:0\"\n").unwrap();
        std::fs::write(directory.path().join("ca.pem"), ca).unwrap();
        let output = binary().arg(command).arg("--config").arg(&path).output().unwrap();
        (output.status.code(), String::from_utf8(output.stdout).unwrap())
    };
    let (code, report) = run("doctor", &authority.pem(), &url);
    assert!(code == Some(0) && report.contains("1 usable key"), "{report}");
    let (code, report) = run("check", &authority.pem(), &url);
    assert!(code == Some(0) && !report.contains("warning"), "{report}");
    let (code, report) = run("doctor", &Authority::new("other").pem(), &url);
    assert!(
        code == Some(1) && report.contains("TLS handshake failed") && report.contains("ca = \"ca.pem\""),
        "{report}"
    );
    let (code, report) = run("check", &Authority::new("other").pem(), &url);
    assert!(code == Some(0) && report.contains("warning: [auth.tokens]: TLS handshake failed"), "{report}");
    let garbage = Issuer::start(Some(ok("[]")));
    let (code, report) = run("doctor", "", &garbage.url());
    assert!(code == Some(1) && report.contains("not a JSON Web Key Set"), "{report}");
    let (_, report) = run("check", "", &garbage.url());
    assert!(report.contains("not a JSON Web Key Set"), "{report}");
}
