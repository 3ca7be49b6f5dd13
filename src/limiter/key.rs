//! Keys of states. Keys contain a keyed hash of the identity, never the identity itself.

use std::fmt;
use std::hash::Hasher;
use std::sync::Arc;

use aws_lc_rs::digest::{SHA256, digest};
use siphasher::sip128::{Hasher128, SipHasher24};

/// The 128-bit keyed hash of an identity.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Identity(pub u128);

impl Identity {
    /// Return the hash as 32 lower-case hexadecimal digits, as in Redis keys.
    pub fn to_hex(self) -> [u8; 32] {
        // Compute the digits from bytes without a table, so that the compiler vectorizes the loop.
        let bytes = self.0.to_be_bytes();
        std::array::from_fn(|digit| {
            let value = bytes[digit / 2] >> (4 * (1 - digit % 2)) & 15;
            value + if value > 9 { b'a' - 10 } else { b'0' }
        })
    }

    /// Parse the output of [`Identity::to_hex`]. Return `None` for any other text.
    pub fn from_hex(text: &str) -> Option<Self> {
        let digits = text.len() == 32 && text.bytes().all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f'));
        u128::from_str_radix(text, 16).ok().filter(|_| digits).map(Identity)
    }

    /// Return the first 32 bits as `#` and 8 hexadecimal digits, for display.
    pub fn short_hex(self) -> String {
        format!("#{:08x}", self.0 >> 96)
    }
}

impl fmt::Display for Identity {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{:032x}", self.0)
    }
}

/// A keyed hash function for identities. The same secret gives the same hashes on every gateway.
///
/// SipHash-2-4 with 128 bits of output (Aumasson and Bernstein, 2012) is a keyed hash function for short inputs.
/// SipHash needs a tenth of the instructions of an HMAC. The key of SipHash is the first half of the SHA-256 hash of
/// the secret.
#[derive(Debug, Clone)]
pub struct IdentityHasher(SipHasher24);

/// The secret that is used if `store.secret` is not set. Hashes are then the same in every installation. An attacker
/// who reads a hash can find a short identity by hashing guesses.
const PUBLISHED_SECRET: &str = "sluicegate: set store.secret";

impl IdentityHasher {
    /// Create a hasher with a secret. An empty secret selects the public default secret.
    pub fn new(secret: &str) -> Self {
        let secret = if secret.is_empty() { PUBLISHED_SECRET } else { secret };
        let digest = digest(&SHA256, secret.as_bytes());
        let mut key = [0; 16];
        key.copy_from_slice(&digest.as_ref()[..16]);
        IdentityHasher(SipHasher24::new_with_key(&key))
    }

    /// Return the hash of an encoded identity.
    pub fn hash(&self, encoded_identity: &[u8]) -> Identity {
        let mut hasher = self.0;
        hasher.write(encoded_identity);
        Identity(hasher.finish128().as_u128())
    }
}

/// Encodes an identity for hashing. Each part has a tag and a length, so that different identities never have the same
/// encoding.
#[derive(Debug, Default)]
pub struct IdentityEncoder(Vec<u8>);

impl IdentityEncoder {
    /// Append one part of the identity.
    pub fn push(&mut self, tag: u8, value: &[u8]) {
        self.0.push(tag);
        self.0.extend_from_slice(&(value.len() as u64).to_be_bytes());
        self.0.extend_from_slice(value);
    }

    /// Return the encoded identity.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// Clear the encoder for the next identity.
    pub fn clear(&mut self) {
        self.0.clear();
    }
}

/// The key of one limit's state for one identity.
#[derive(Debug, Clone, Copy)]
pub struct Key<'a> {
    /// Hash of the identity.
    pub identity: Identity,
    /// The part of the key that belongs to the limit.
    pub state_name: &'a StateName,
}

/// The part of a key that a limit contributes: `<limit>:<shape>`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StateName {
    name: Arc<str>,
    hash: u128,
    /// Hash of the limit's name, independent of the shape.
    limit_hash: u64,
}

impl StateName {
    /// Create the key part of the limit `limit`. `shape` identifies the algorithm and the window of the limit's states.
    pub fn new(hasher: &IdentityHasher, limit: &str, shape: &str) -> Self {
        let name = format!("{limit}:{shape}");
        let hash = hasher.hash(name.as_bytes()).0;
        StateName { name: name.into(), hash, limit_hash: hasher.hash(limit.as_bytes()).0 as u64 }
    }

    /// Return the id of the state in the value of an identity in Redis: an integer below 2^52 that is not 0.
    pub fn id(&self) -> u64 {
        (self.hash >> 76) as u64 | 1
    }

    /// Return the part of the key: `<limit>:<shape>`.
    pub fn name(&self) -> &Arc<str> {
        &self.name
    }

    /// Return the name of the limit.
    pub fn limit_name(&self) -> &str {
        self.name.split_once(':').map_or(&*self.name, |(limit, _)| limit)
    }
}

impl Key<'_> {
    /// Return the key for hash tables in this process. Clients that do not know the secret cannot choose this key.
    pub fn local_hash(&self) -> u128 {
        self.identity.0 ^ self.state_name.hash
    }

    /// Return the hash of the limit's name, independent of the shape.
    pub fn limit_hash(&self) -> u64 {
        self.state_name.limit_hash
    }

    /// Append `<prefix>:{<identity hash>}:<limit>:<shape>`, the separate key of a state.
    pub fn write(&self, prefix: &str, out: &mut Vec<u8>) {
        write_key(prefix, self.identity, &self.state_name.name, out);
    }
}

/// The last part of the key of an identity, in whose value several states are. The names of states contain a colon, so
/// none has this name.
const IDENTITY_SUFFIX: &str = "states";

impl Identity {
    /// Append `<prefix>:{<identity hash>}:states`, the key of the states that have three fields.
    pub fn write_key(self, prefix: &str, out: &mut Vec<u8>) {
        write_key(prefix, self, IDENTITY_SUFFIX, out);
    }
}

/// Append `<prefix>:{<identity hash>}:<name>`. The braces put all keys of an identity into one cluster slot.
fn write_key(prefix: &str, identity: Identity, name: &str, out: &mut Vec<u8>) {
    out.extend_from_slice(prefix.as_bytes());
    out.extend_from_slice(b":{");
    out.extend_from_slice(&identity.to_hex());
    out.extend_from_slice(b"}:");
    out.extend_from_slice(name.as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key_of(parts: &[&str]) -> Vec<u8> {
        let hasher = IdentityHasher::new("");
        let mut encoder = IdentityEncoder::default();
        for part in parts {
            encoder.push(b'h', part.as_bytes());
        }
        let state_name = StateName::new(&hasher, "login", "l60000000");
        let mut out = Vec::new();
        Key { identity: hasher.hash(encoder.as_bytes()), state_name: &state_name }.write("rl", &mut out);
        out
    }

    #[test]
    fn key_has_documented_format() {
        let key = String::from_utf8(key_of(&["alice"])).unwrap();
        assert_eq!(key.len(), "rl:{}:login:l60000000".len() + 32);
        assert!(key.starts_with("rl:{") && key.ends_with("}:login:l60000000"), "{key}");
    }

    #[test]
    fn identity_hex_round_trips() {
        for identity in [0, 1, u128::MAX, 0x0123_4567_89ab_cdef << 64].map(Identity) {
            assert_eq!(identity.to_string().as_bytes(), identity.to_hex());
            assert_eq!(Identity::from_hex(&identity.to_string()), Some(identity));
        }
        for text in ["", "12", "+123456789abcdef0123456789abcdef", &"0".repeat(33), &"A".repeat(32), &"é".repeat(16)] {
            assert_eq!(Identity::from_hex(text), None, "{text}");
        }
    }

    #[test]
    fn different_identities_never_share_a_key() {
        let mut seen = std::collections::HashSet::new();
        let cases: [&[&str]; 8] =
            [&["ab", "c"], &["a", "bc"], &["abc"], &["a}b{c"], &["a:b", "c"], &["a", "b:c"], &["\0", ""], &["", "\0"]];
        for parts in cases {
            let key = key_of(parts);
            assert_eq!(key.len(), key_of(&["x"]).len(), "all keys have the same length: {parts:?}");
            assert!(seen.insert(key), "{parts:?} shares a key");
        }
    }
}
