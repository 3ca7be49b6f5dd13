//! JWK Sets: no bytes cause a panic, and the result is the same each time. An accepted set has a public key and no
//! symmetric key.

use serde_json::Value;
use sluicegate::identity::jwt::KeySet;

pub(crate) fn run(data: &[u8]) {
    let parsed = KeySet::parse(data).map(|_| ()).map_err(|error| error.to_string());
    assert_eq!(KeySet::parse(data).map(|_| ()).map_err(|error| error.to_string()), parsed, "{}", data.escape_ascii());
    let Ok(set) = serde_json::from_slice::<Value>(data) else {
        assert!(parsed.is_err(), "a key set is JSON: {}", data.escape_ascii());
        return;
    };
    // `KeySet` ignores a key with a duplicate member, but serde_json drops only the duplicate. Therefore, also parse
    // the set that serde_json writes.
    if KeySet::parse(set.to_string().as_bytes()).is_err() {
        return;
    }
    let keys = set["keys"].as_array().expect("a key set has keys");
    let is_public = |key: &Value| ["RSA", "EC", "OKP"].into_iter().any(|kty| key["kty"] == kty);
    assert!(keys.iter().any(is_public), "no usable key: {set}");
    let is_secret = |key: &Value| key["kty"] == "oct" && key["k"].is_string();
    assert!(!keys.iter().any(is_secret), "a symmetric key: {set}");
}
