//! Upstreams at Google Cloud (`google`): access tokens of a service account. The token endpoint answers in the shapes of
//! <https://developers.google.com/identity/protocols/oauth2/service-account>.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{SystemTime, UNIX_EPOCH};

use aws_lc_rs::signature;
use aws_lc_rs::signature::{KeyPair as _, UnparsedPublicKey};
use base64::Engine;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use jiff::Timestamp;
use jiff::fmt::rfc2822::DateTimePrinter;
use serde_json::{Value, json};

use crate::support::eventually;
use crate::support::gateway::{Gateway, binary};
use crate::support::google_key;
use crate::support::google_key::EMAIL;
use crate::support::reload::{reloads, with_admin};
use crate::support::upstream::{Seen, Upstream};

#[allow(clippy::disallowed_methods)] // the assertions have the time of the system clock
fn now_s() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs() as i64
}

/// The token endpoint of Google, with the account that it knows.
struct Endpoint {
    server: Upstream,
    /// The key file of the account.
    key_file: String,
}

/// What the endpoint does.
struct Behavior {
    /// Lifetime of the tokens in s.
    expires_in: u64,
    /// How many seconds the clock of the endpoint is ahead.
    skew_s: i64,
    /// The requests that fail. The first one is 0.
    failures: Range<u64>,
}

const USUAL: Behavior = Behavior { expires_in: 3599, skew_s: 0, failures: 0..0 };

fn respond(status: &str, date_s: i64, body: &Value) -> Vec<u8> {
    let date = DateTimePrinter::new().timestamp_to_rfc9110_string(&Timestamp::from_second(date_s).unwrap()).unwrap();
    let (body, mut head) = (body.to_string(), format!("HTTP/1.1 {status}\r\nContent-Type: application/json\r\n"));
    head += &format!("Date: {date}\r\nContent-Length: {}\r\n\r\n", body.len());
    (head + &body).into_bytes()
}

/// Check a token request as the endpoint does. Return the time of the assertion.
fn issued_at(request: &Seen, public_key: &[u8]) -> i64 {
    assert!(request.head.starts_with("POST /token HTTP/1.1\r\n"), "{}", request.head);
    assert_eq!(request.headers("content-type"), ["application/x-www-form-urlencoded"]);
    let body = std::str::from_utf8(&request.body).unwrap();
    let grant = "grant_type=urn%3Aietf%3Aparams%3Aoauth%3Agrant-type%3Ajwt-bearer&assertion=";
    let assertion = body.strip_prefix(grant).unwrap();
    let (signed, signature) = assertion.rsplit_once('.').unwrap();
    let key = UnparsedPublicKey::new(&signature::RSA_PKCS1_2048_8192_SHA256, public_key);
    key.verify(signed.as_bytes(), &BASE64_URL_SAFE_NO_PAD.decode(signature).unwrap()).unwrap();
    let decode =
        |part: &str| -> Value { serde_json::from_slice(&BASE64_URL_SAFE_NO_PAD.decode(part).unwrap()).unwrap() };
    let (header, claims) = signed.split_once('.').unwrap();
    assert_eq!(decode(header), json!({"alg": "RS256", "typ": "JWT", "kid": "key-1"}));
    let claims = decode(claims);
    let host = request.headers("host")[0];
    assert_eq!((&claims["iss"], &claims["aud"]), (&json!(EMAIL), &json!(format!("http://{host}/token"))));
    assert_eq!(claims["scope"], "https://www.googleapis.com/auth/cloud-platform");
    let issued_at = claims["iat"].as_i64().unwrap();
    assert_eq!(claims["exp"].as_i64().unwrap() - issued_at, 3600, "at most an hour");
    issued_at
}

impl Endpoint {
    fn start(behavior: Behavior) -> Endpoint {
        let public_key = Arc::<OnceLock<Vec<u8>>>::default();
        let known_key = public_key.clone();
        let (requests, tokens) = (AtomicU64::new(0), AtomicU64::new(0));
        let server = Upstream::responding(move |request| {
            let issued_at = issued_at(request, known_key.get().unwrap());
            let now_s = now_s() + behavior.skew_s;
            if behavior.failures.contains(&requests.fetch_add(1, Ordering::SeqCst)) {
                return respond("503 Service Unavailable", now_s, &json!({"error": "internal_failure"}));
            }
            if (issued_at - now_s).abs() > 300 {
                let description = "Invalid JWT: Token must be a short-lived token (60 minutes) and in a reasonable \
                                   timeframe. Check your iat and exp values in the JWT claim.";
                let error = json!({"error": "invalid_grant", "error_description": description});
                return respond("400 Bad Request", now_s, &error);
            }
            let token = format!("ya29.{}", tokens.fetch_add(1, Ordering::SeqCst) + 1);
            let token = json!({"access_token": token, "expires_in": behavior.expires_in, "token_type": "Bearer"});
            respond("200 OK", now_s, &token)
        });
        let (key, key_file) = google_key::generate(&format!("{}/token", server.url()));
        public_key.set(key.public_key().as_ref().to_vec()).unwrap();
        Endpoint { server, key_file }
    }

    fn gateway(&self, upstream: &Upstream) -> Gateway {
        Gateway::start_with(&with_admin(&config(upstream)), &[("account.json", &self.key_file)])
    }
}

fn config(upstream: &Upstream) -> String {
    format!(
        "[upstream.vertex]\nservers = [\"{}\"]\ngoogle = {{ service_account = \"account.json\" }}\n\
         [[route]]\nname = \"vertex\"\npath = \"/{{*rest}}\"\nupstream = \"vertex\"\n",
        upstream.url()
    )
}

const PATH: &str = "/v1/projects/p/locations/us-east5/publishers/anthropic/models/claude:rawPredict";

#[test]
fn requests_carry_the_token_of_the_gateway_and_no_credentials_of_the_client() {
    let (endpoint, upstream) = (Endpoint::start(USUAL), Upstream::start());
    let gateway = endpoint.gateway(&upstream);
    let of_client = [
        ("authorization", "Bearer of-the-client"),
        ("x-goog-api-key", "of-the-client"),
        ("x-goog-user-project", "of-the-client"),
    ];
    for _ in 0..3 {
        assert_eq!(gateway.client().request("POST", PATH, &of_client, b"{}").status, 200);
        let seen = upstream.last();
        assert_eq!(seen.headers("authorization"), ["Bearer ya29.1"]);
        assert!(!seen.head.contains("of-the-client"), "{}", seen.head);
    }
    // A change of another table keeps the token.
    reloads(&gateway, &(config(&upstream) + "[limit.l]\nby = \"ip\"\nquota = \"1/s\"\n"));
    assert_eq!(gateway.client().get("/").status, 200);
    assert_eq!((endpoint.server.count(), upstream.last().headers("authorization")), (1, vec!["Bearer ya29.1"]));
    // Another key is another account.
    let other = Endpoint::start(USUAL);
    std::fs::write(gateway.directory().join("account.json"), &other.key_file).unwrap();
    reloads(&gateway, &config(&upstream));
    eventually("the other account is used", || gateway.client().get("/").status == 200 && other.server.count() == 1);
    assert!(!gateway.log().contains("ya29"), "{}", gateway.log());
}

#[test]
fn token_is_replaced_before_it_expires() {
    // Half of the lifetime is left for a machine that stalls.
    let endpoint = Endpoint::start(Behavior { expires_in: 24, ..USUAL });
    let upstream = Upstream::start();
    let gateway = endpoint.gateway(&upstream);
    eventually("another token is used", || {
        assert_eq!(gateway.client().get("/").status, 200, "a token is always valid");
        upstream.last().headers("authorization") != ["Bearer ya29.1"]
    });
}

#[test]
fn reload_of_the_upstream_keeps_the_token_while_the_endpoint_is_down() {
    let endpoint = Endpoint::start(Behavior { failures: 1..u64::MAX, ..USUAL });
    let upstream = Upstream::start();
    let gateway = endpoint.gateway(&upstream);
    eventually("the first token is fetched", || gateway.client().get("/").status == 200);
    reloads(&gateway, &config(&upstream).replace("google", "max_requests = 7\ngoogle"));
    eventually("the next fetch fails", || gateway.log().contains("the last one stays in use"));
    assert_eq!(gateway.client().get("/").status, 200);
    assert_eq!(upstream.last().headers("authorization"), ["Bearer ya29.1"]);
    // A token is not valid for another scope or another account.
    let other = Endpoint::start(Behavior { failures: 0..u64::MAX, ..USUAL });
    std::fs::write(gateway.directory().join("account.json"), &other.key_file).unwrap();
    reloads(&gateway, &config(&upstream));
    gateway.client().get("/").assert_problem(503, "there is no token");
}

#[test]
fn requests_without_a_token_get_503_until_the_endpoint_answers() {
    let endpoint = Endpoint::start(Behavior { failures: 0..2, ..USUAL });
    let upstream = Upstream::start();
    let gateway = endpoint.gateway(&upstream);
    let reply = gateway.client().get("/");
    if upstream.count() == 0 {
        reply.assert_problem(503, "there is no token");
        assert!(reply.header("retry-after").is_some(), "{reply:?}");
    }
    eventually("the endpoint answers", || gateway.client().get("/").status == 200);
    assert_eq!((endpoint.server.count(), upstream.last().headers("authorization")), (3, vec!["Bearer ya29.1"]));
    let log = gateway.log();
    assert!(log.contains("requests get 503") && log.contains("internal_failure"), "{log}");
}

#[test]
fn clock_of_the_gateway_may_differ_from_that_of_the_endpoint() {
    for skew_s in [-4000, 7200] {
        let endpoint = Endpoint::start(Behavior { skew_s, ..USUAL });
        let upstream = Upstream::start();
        let gateway = endpoint.gateway(&upstream);
        eventually("a request is sent", || gateway.client().get("/").status == 200);
        assert_eq!(endpoint.server.count(), 2, "the second assertion has the time of the endpoint");
    }
}

/// Health checks carry the token, as requests do. Without a token, there are no checks.
#[test]
fn health_checks_carry_the_token_and_wait_for_the_first_one() {
    let endpoint = Endpoint::start(Behavior { failures: 0..2, ..USUAL });
    let upstream = Upstream::responding(|seen| {
        let status = match seen.headers("authorization")[..] {
            ["Bearer ya29.1"] => "200 OK",
            _ => "401 Unauthorized",
        };
        format!("HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n").into_bytes()
    });
    let check = "health_check = { path = \"/health\", interval = \"50ms\", unhealthy_threshold = 1 }\ngoogle";
    let config = with_admin(&config(&upstream).replace("google", check));
    let gateway = Gateway::start_with(&config, &[("account.json", &endpoint.key_file)]);
    let checks = || {
        let seen = upstream.seen.lock().unwrap();
        seen.iter()
            .filter(|seen| seen.target() == "/health")
            .map(|seen| seen.headers("authorization").concat())
            .collect::<Vec<_>>()
    };
    eventually("the server is checked", || checks().len() > 2);
    assert!(checks().iter().all(|value| value == "Bearer ya29.1"), "{:?}", checks());
    assert_eq!(endpoint.server.count(), 3, "two requests for a token have failed before");
    assert_eq!(gateway.client().get("/").status, 200);
    assert!(!gateway.log().contains("server is unhealthy"), "{}", gateway.log());
}

/// Run a command with the account of an endpoint. Return its exit code and its output.
fn run(command: &str, arguments: &[&str], key_file: &str) -> (Option<i32>, String) {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("account.json"), key_file).unwrap();
    let path = directory.path().join("gateway.toml");
    let listener = "[[listener]]\naddress = \"127.0.0.1:0\"\n";
    std::fs::write(&path, config(&Upstream::start()) + listener).unwrap();
    let output = binary().arg(command).args(arguments).arg("--config").arg(&path).output().unwrap();
    let text = String::from_utf8(if output.stdout.is_empty() { output.stderr } else { output.stdout }).unwrap();
    (output.status.code(), text)
}

#[test]
fn doctor_and_check_request_a_token_and_say_what_fails() {
    let unreachable = google_key::generate("http://127.0.0.1:1/token").1;
    let rejecting = Upstream::responding(|_| {
        respond(
            "400 Bad Request",
            now_s(),
            &json!({"error": "invalid_grant", "error_description": "Invalid JWT Signature."}),
        )
    });
    let rejected = google_key::generate(&format!("{}/token", rejecting.url())).1;
    let empty = Upstream::responding(|_| respond("200 OK", now_s(), &json!({})));
    let without_token = google_key::generate(&format!("{}/token", empty.url())).1;
    let failing = Endpoint::start(Behavior { failures: 0..u64::MAX, ..USUAL });
    let skewed = Endpoint::start(Behavior { skew_s: 7200, ..USUAL });
    let usual = Endpoint::start(USUAL);
    for (key_file, code, status, message, advice) in [
        (&usual.key_file, 0, "ok", "received, valid for 3599 s", ""),
        (&skewed.key_file, 0, "warning", "is 7200 s ahead of this clock", "synchronize the clock"),
        (
            &unreachable,
            1,
            "failed",
            "cannot connect: Connection refused",
            "check `token_uri` in the key file, and whether",
        ),
        (&rejected, 1, "failed", "responded with 400: invalid_grant: Invalid JWT Signature.", "still has this key"),
        (&failing.key_file, 1, "failed", "responded with 503: internal_failure", "try again later"),
        (&without_token, 1, "failed", "has no `access_token`", "check `token_uri`"),
    ] {
        let (found, text) = run("doctor", &["--json"], key_file);
        let report: Value = serde_json::from_str(&text).unwrap();
        let endpoint = &report["token_endpoints"][0];
        let check = &endpoint["checks"][0];
        assert_eq!((found, &report["ok"], &check["status"]), (Some(code), &json!(code == 0), &json!(status)), "{text}");
        let address = endpoint["address"].as_str().unwrap();
        assert!(address.contains("/token (") && address.contains(&format!("{EMAIL}, upstream.vertex")), "{text}");
        // A clock that runs may be one second further.
        let is_said =
            check["message"].as_str().unwrap().contains(message) || text.contains(&message.replace("7200", "7201"));
        assert!(is_said && check["advice"].as_str().unwrap_or_default().contains(advice), "{message}: {text}");
        let (_, table) = run("doctor", &[], key_file);
        assert!(table.contains("token endpoint at http://127.0.0.1:") && table.contains(advice), "{table}");
        let (code, warnings) = run("check", &[], key_file);
        assert_eq!(
            (code, warnings.contains("[upstream.vertex]: no access token: ")),
            (Some(0), found == Some(1)),
            "{warnings}"
        );
        assert!(found == Some(0) || warnings.contains(message) && warnings.contains("google = {"), "{warnings}");
        let (_, offline) = run("check", &["--offline"], key_file);
        assert!(!offline.contains("access token"), "{offline}");
    }
}
