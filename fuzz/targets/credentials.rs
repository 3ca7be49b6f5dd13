//! Credentials in headers: requests without valid credentials are rejected, errors do not contain credentials, and
//! credentials are removed before forwarding.

use http::header::{AUTHORIZATION, HeaderMap, HeaderName, HeaderValue};
use sluicegate::identity::auth::Verified;
use sluicegate::identity::verification::{AuthError, AuthRequest};
use sluicegate::snapshot::CompiledConfig;

/// The API key of the consumer. `CONSUMERS` contains its hash.
const KEY: &[u8] = b"sk-valid-0123456789";
/// The signed part (header and claims) of the token that has the required claim.
const MESSAGE: &[u8] =
    b"eyJhbGciOiJFZERTQSIsImtpZCI6ImsifQ.eyJzdWIiOiJhbGljZSIsInNjb3BlIjoicmVhZCB3cml0ZSIsImV4cCI6OTAwMDAwMDAwMH0";
/// The current time in this target, in µs since the Unix epoch. The tokens have not expired at this time.
const NOW_US: u64 = 1_800_000_000_000_000;

const CONFIG: &str = r#"
[[listener]]
address = "127.0.0.1:0"
[auth.keys]
kind = "api-key"
header = ["authorization", "x-api-key"]
consumers = "consumers.toml"
[auth.tokens]
kind = "jwt"
jwks_file = "jwks.json"
claims = { scope = "write" }
forward_credential = false
[[route]]
name = "keys"
path = "/keys"
require = ["keys"]
respond = { status = 200 }
[[route]]
name = "tokens"
path = "/tokens"
require = ["tokens"]
respond = { status = 200 }
[[route]]
name = "either"
path = "/either"
require = ["keys", "tokens"]
respond = { status = 200 }
[[route]]
name = "both"
path = "/both"
require = [["keys", "tokens"]]
respond = { status = 200 }
"#;

const CONSUMERS: &str = r#"
[[consumer]]
name = "acme"
keys = ["sha256:ce69145e403e96d0b6c3073401106f58107c4f94e1476a97f1978076e807c6c6"]
"#;

const KEY_SET: &str =
    r#"{"keys": [{"kty": "OKP", "crv": "Ed25519", "kid": "k", "x": "PWx2EfkaKFBTssmDdlQFAokZtk0HpsU5Y5LQ83vbdEQ"}]}"#;

fn fixture() -> CompiledConfig {
    let directory = tempfile::tempdir().expect("a folder");
    for (name, text) in [("gateway.toml", CONFIG), ("consumers.toml", CONSUMERS), ("jwks.json", KEY_SET)] {
        std::fs::write(directory.path().join(name), text).expect("a file");
    }
    let path = directory.path().join("gateway.toml");
    CompiledConfig::load(&path, &|_| None).unwrap_or_else(|error| panic!("{error}"))
}

thread_local! {
    static FIXTURE: CompiledConfig = fixture();
}

/// The first byte of the input selects the route. Each line is a header.
pub(crate) fn run(data: &[u8]) {
    let Some((choice, lines)) = data.split_first() else { return };
    let mut headers = HeaderMap::new();
    for line in lines.split(|byte| *byte == b'\n').take(20) {
        let Some(colon) = line.iter().position(|byte| *byte == b':') else { continue };
        let (name, value) =
            (HeaderName::from_bytes(&line[..colon]), HeaderValue::from_bytes(line[colon + 1..].trim_ascii()));
        if let (Ok(name), Ok(value)) = (name, value) {
            headers.append(name, value);
        }
    }
    FIXTURE.with(|config| {
        let route = &config.routes[usize::from(*choice) % config.routes.len()];
        let auth = route.auth.as_ref().expect("each route requires a credential");
        let request = AuthRequest { headers: &headers, has_client_cert: false, route: &route.name, now_us: NOW_US };
        let (credentials, result) = auth.authenticate(&config.auth.providers, &request);
        let (_, again) = auth.authenticate(&config.auth.providers, &request);
        assert_eq!(result, again, "{}: {headers:?}", route.name);
        let has =
            |part: &[u8]| headers.values().any(|value| value.as_bytes().windows(part.len()).any(|all| all == part));
        let (key, token) = (has(KEY), has(MESSAGE));
        match result {
            Verified::Yes => {
                let is_entitled = match &*route.name {
                    "keys" => key,
                    "tokens" => token,
                    "either" => key || token,
                    _ => key && token,
                };
                assert!(is_entitled, "{} is admitted with {headers:?}", route.name);
                let (has_claims, needs_claims) =
                    (credentials.claims().is_some(), matches!(&*route.name, "tokens" | "both"));
                assert!(token >= has_claims && has_claims >= needs_claims, "{}: {headers:?}", route.name);
                let mut forwarded = headers.clone();
                credentials.remove_from(&mut forwarded);
                let keys = forwarded.get_all("x-api-key");
                let has_key = keys.iter().any(|value| !value.is_empty());
                assert!(&*route.name == "tokens" || !has_key, "{headers:?} became {forwarded:?}");
                let is_bearer = |value: &HeaderValue| {
                    value.as_bytes().get(..7).is_some_and(|all| all.eq_ignore_ascii_case(b"bearer "))
                };
                assert!(!forwarded.get_all(AUTHORIZATION).iter().any(is_bearer), "{headers:?} became {forwarded:?}");
            }
            Verified::Waits(provider) => panic!("the provider {provider} never has to wait"),
            Verified::No(error) => {
                assert!(matches!(error.status().as_u16(), 400 | 401 | 403), "{error:?}");
                let said = format!(
                    "{error} {error:?} {:?}",
                    auth.challenges.iter().map(|one| one.value(&error)).collect::<Vec<_>>()
                );
                for secret in [KEY, MESSAGE].map(|secret| std::str::from_utf8(secret).expect("text")) {
                    assert!(!said.contains(secret), "{said}");
                }
                let is_missing = matches!(error, AuthError::Missing(_));
                assert!(!is_missing || !auth.challenges.is_empty(), "a 401 has a challenge (RFC 9110 §11.6.1)");
            }
        }
    });
}
