//! A JWK Set is taken or refused, whatever the issuer sends: the same each time, and never with a key that could sign.

use serde_json::Value;
use sluicegate::identity::jwt::KeySet;

pub(crate) fn run(data: &[u8]) {
    let parsed = KeySet::parse(data).map(|_| ()).map_err(|error| error.to_string());
    assert_eq!(KeySet::parse(data).map(|_| ()).map_err(|error| error.to_string()), parsed, "{}", data.escape_ascii());
    if parsed.is_err() {
        return;
    }
    let set: Value = serde_json::from_slice(data).expect("a key set is JSON");
    let keys = set["keys"].as_array().expect("a key set has keys");
    let is_public = |kty: &str| keys.iter().any(|key| key["kty"] == kty);
    assert!(["RSA", "EC", "OKP"].into_iter().any(is_public), "no usable key: {}", data.escape_ascii());
    // A key with a member twice is of no known type, and a secret has a value.
    let occurs = |member: &[u8]| data.windows(member.len()).filter(|window| *window == member).count();
    if occurs(b"\"kty\"") <= keys.len() && occurs(b"\"k\"") <= keys.len() {
        let is_secret = |key: &Value| key["kty"] == "oct" && key["k"].is_string();
        assert!(!keys.iter().any(is_secret), "a symmetric key: {}", data.escape_ascii());
    }
}
