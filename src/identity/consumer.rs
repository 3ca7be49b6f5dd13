//! Consumers and their API keys. Keys are stored as hashes. All keys of a consumer have the same identity.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use aws_lc_rs::constant_time::verify_slices_are_equal;
use aws_lc_rs::digest::{SHA256, digest};

use crate::limiter::key::{Identity, IdentityEncoder, IdentityHasher};
use crate::limiter::spec::{LimitSpec, LimitVariant};
use crate::payload::mcp_tools::ToolRules;

/// Tag of consumers in identities. The other tags are in `identity/spec.rs`.
pub(super) const CONSUMER_TAG: u8 = b'c';

/// SHA-256 of an API key.
pub type KeyHash = [u8; 32];

/// Consumer keys, indexed by the first 8 bytes of their hashes.
#[derive(Debug, Default)]
pub struct Consumers(HashMap<[u8; 8], ConsumerKey>);

/// A key of a consumer.
#[derive(Debug, PartialEq, Eq)]
pub struct ConsumerKey {
    /// Hash of the key.
    pub hash: KeyHash,
    /// The consumer that owns the key.
    pub consumer: Arc<Consumer>,
    /// Restrictions of the key. `None` if the key is valid on all routes and never expires.
    pub terms: Option<Box<KeyTerms>>,
}

/// Restrictions that apply to an API key, such as its expiry and routes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KeyTerms {
    /// Name of the key, which appears in logs.
    pub name: Option<Box<str>>,
    /// Time at which the key expires, in µs since the Unix epoch.
    pub expires_us: Option<u64>,
    /// Whether the key is disabled.
    pub disabled: bool,
    /// Names of the routes on which the key is valid. `None` means all routes.
    pub routes: Option<Vec<Box<str>>>,
}

/// A consumer: an API client that has one or more keys.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Consumer {
    /// Name of the consumer, which is its identity.
    pub name: Box<str>,
    /// Tier of the consumer, which selects the variant of each limit.
    pub tier: Option<Box<str>>,
    /// Names of the groups to which the consumer belongs, by their level.
    pub groups: BTreeMap<Box<str>, Box<str>>,
    /// The MCP tools that the consumer may call. `None`: all tools.
    pub mcp_tools: Option<Arc<ToolRules>>,
    /// Variants that apply only to this consumer, by limit name. They take precedence over the tier.
    pub variants: BTreeMap<Box<str>, Arc<LimitVariant>>,
}

/// Tier of anonymous clients.
pub const ANONYMOUS_TIER: &str = "anonymous";

/// The caller of a request, as determined from its API key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Caller {
    /// The key belongs to this consumer.
    Consumer(Arc<Consumer>),
    /// The key is unknown, and is used as the identity (`on_unknown = "accept"`).
    Accepted(Box<[u8]>),
    /// The key is unknown or missing, and the client network is the identity.
    Anonymous,
    /// The request has no key.
    Missing,
}

/// The caller of a request without a key.
pub static MISSING_CALLER: Caller = Caller::Missing;

/// The consumers of all consumers files. They share one namespace.
#[derive(Debug, Default)]
pub struct ConsumerDirectory(pub Vec<Arc<Consumers>>);

impl Consumers {
    /// Add a key of a consumer.
    ///
    /// # Errors
    /// A consumer already has this key. The error contains that consumer.
    pub fn insert(&mut self, key: ConsumerKey) -> Result<(), Arc<Consumer>> {
        match self.0.insert(hash_prefix(&key.hash), key) {
            None => Ok(()),
            Some(other) => Err(other.consumer),
        }
    }

    /// Return the keys of all consumers.
    pub fn keys(&self) -> impl Iterator<Item = &ConsumerKey> {
        self.0.values()
    }

    /// Return the consumer of each key. A consumer with several keys occurs several times.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<Consumer>> {
        self.0.values().map(|key| &key.consumer)
    }

    /// Return whether there are no keys.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn find_by_key(&self, key: &[u8]) -> Option<&ConsumerKey> {
        if self.is_empty() {
            return None;
        }
        let found = digest(&SHA256, key);
        // The table is indexed by the first 8 bytes of the hash. Compare the whole hash in constant time, so that
        // response times reveal nothing about known hashes.
        let known = self.0.get(found.as_ref().first_chunk()?)?;
        verify_slices_are_equal(&known.hash, found.as_ref()).ok().map(|()| known)
    }
}

impl ConsumerDirectory {
    /// Return the consumer of each key. A consumer with several keys occurs several times.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<Consumer>> {
        self.0.iter().flat_map(|consumers| consumers.iter())
    }

    /// Return the consumer with this name.
    pub fn find_by_name(&self, name: &str) -> Option<&Arc<Consumer>> {
        self.iter().find(|consumer| *consumer.name == *name)
    }
}

fn hash_prefix(hash: &KeyHash) -> [u8; 8] {
    let mut first = [0; 8];
    first.copy_from_slice(&hash[..8]);
    first
}

impl Consumer {
    /// Return the consumer's identity for limits whose only descriptor is the API key.
    pub fn identity(&self, hasher: &IdentityHasher) -> Identity {
        let mut encoder = IdentityEncoder::default();
        encoder.push(CONSUMER_TAG, self.name.as_bytes());
        hasher.hash(encoder.as_bytes())
    }
}

impl Caller {
    /// Return the variant of a limit that applies to this caller. The consumer's own variant comes first, then that of
    /// its tier, then the default variant.
    pub fn variant<'v>(&'v self, limit: &'v LimitSpec) -> &'v Arc<LimitVariant> {
        let tier = || match self {
            Caller::Consumer(consumer) => limit.tiers.get(consumer.tier.as_deref()?),
            Caller::Anonymous => limit.tiers.get(ANONYMOUS_TIER),
            Caller::Accepted(_) | Caller::Missing => None,
        };
        self.own_variant(limit).or_else(tier).unwrap_or(&limit.default_variant)
    }

    /// Return the variant of a limit that applies only to this consumer.
    pub fn own_variant(&self, limit: &LimitSpec) -> Option<&Arc<LimitVariant>> {
        match self {
            Caller::Consumer(consumer) => consumer.variants.get(&limit.name),
            Caller::Accepted(_) | Caller::Anonymous | Caller::Missing => None,
        }
    }
}

/// Parse the hash of a key: `sha256:` followed by 64 lower-case hexadecimal digits.
pub fn parse_key_hash(text: &str) -> Option<KeyHash> {
    let digits = text.strip_prefix("sha256:")?.as_bytes();
    let value = |digit: u8| match digit {
        b'0'..=b'9' => Some(digit - b'0'),
        b'a'..=b'f' => Some(digit - b'a' + 10),
        _ => None,
    };
    let mut hash = [0; 32];
    if digits.len() != 64 {
        return None;
    }
    for (byte, pair) in hash.iter_mut().zip(digits.chunks(2)) {
        *byte = value(pair[0])? * 16 + value(pair[1])?;
    }
    Some(hash)
}

#[cfg(test)]
mod tests {
    use super::*;

    // Output of `printf %s secret | sha256sum`.
    const SECRET: &str = "sha256:2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b";

    #[test]
    fn key_whose_hash_differs_only_after_the_index_is_unknown() {
        let presented = digest(&SHA256, b"guessed key");
        let hash: KeyHash = presented.as_ref().try_into().unwrap();
        let find = |hash: KeyHash| {
            let mut consumers = Consumers::default();
            let key = ConsumerKey { hash, consumer: Arc::default(), terms: None };
            consumers.insert(key).unwrap();
            consumers.find_by_key(b"guessed key").is_some()
        };
        assert!(find(hash));
        for index in 0..hash.len() {
            let mut other = hash;
            other[index] ^= 1;
            assert!(!find(other), "the hashes differ in byte {index}");
        }
    }

    #[test]
    fn malformed_key_hashes_are_rejected() {
        for text in ["", "sha256:", &SECRET[..70], &SECRET.to_uppercase(), "md5:00", &format!("{SECRET}00")] {
            assert_eq!(parse_key_hash(text), None, "{text}");
        }
    }
}
