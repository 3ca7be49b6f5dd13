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
    assert!(keys.iter().all(|key| key["kty"] != "oct"), "a symmetric key: {}", data.escape_ascii());
}
