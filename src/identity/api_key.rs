//! API keys and consumers. Keys are stored as hashes; all keys of a consumer are one identity.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use aws_lc_rs::constant_time::verify_slices_are_equal;
use aws_lc_rs::digest::{SHA256, digest};
use http::{HeaderMap, HeaderName};

use crate::identity::IdentityError;
use crate::identity::{CONSUMER_TAG, Descriptor};
use crate::limiter::key::{Identity, IdentityEncoder, IdentityHasher};
use crate::limiter::spec::{LimitSpec, LimitVariant};

/// SHA-256 of an API key.
pub type KeyHash = [u8; 32];

/// The API key header, and the handling of missing and unknown keys.
#[derive(Debug)]
pub struct ApiKeySettings {
    /// Header with the API key.
    pub header: HeaderName,
    /// Whether requests without a key are anonymous instead of rejected.
    pub anonymous_if_missing: bool,
    /// Handling of unknown keys.
    pub on_unknown: OnUnknownKey,
}

/// Handling of unknown keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnUnknownKey {
    /// Reject the request with 401.
    Reject,
    /// Treat the request as anonymous: the client network is the identity.
    Anonymous,
    /// Treat the key as an identity of its own.
    Accept,
}

/// Consumers, by the hashes of their keys.
#[derive(Debug, Default)]
pub struct Consumers(HashMap<[u8; 8], (KeyHash, Arc<Consumer>)>);

/// A consumer: an API client with keys.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Consumer {
    /// Name of the consumer, which is its identity.
    pub name: Box<str>,
    /// Tier that selects the variant of each limit.
    pub tier: Option<Box<str>>,
    /// Variants of this consumer, by limit name. They take precedence over the tier.
    pub variants: BTreeMap<Box<str>, Arc<LimitVariant>>,
}

/// Tier of anonymous clients.
const ANONYMOUS_TIER: &str = "anonymous";

/// The result of the API key lookup for a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Caller<'a> {
    /// The key belongs to this consumer.
    Consumer(&'a Consumer),
    /// The key is unknown and accepted as an identity.
    Accepted(&'a [u8]),
    /// The key is unknown or missing, and the client network is the identity.
    Anonymous,
    /// The request has no key.
    Missing,
}

impl Default for ApiKeySettings {
    fn default() -> Self {
        ApiKeySettings {
            header: HeaderName::from_static("x-api-key"),
            anonymous_if_missing: false,
            on_unknown: OnUnknownKey::Reject,
        }
    }
}

impl Consumers {
    /// Add a key.
    ///
    /// # Errors
    /// The key exists already. The error has its previous consumer.
    pub fn insert(&mut self, hash: KeyHash, consumer: Arc<Consumer>) -> Result<(), Arc<Consumer>> {
        match self.0.insert(hash_prefix(&hash), (hash, consumer)) {
            None => Ok(()),
            Some((_, other)) => Err(other),
        }
    }

    /// Return the consumers, once for each key.
    pub fn iter(&self) -> impl Iterator<Item = &Consumer> {
        self.0.values().map(|(_, consumer)| &**consumer)
    }

    /// Return the consumer with this name.
    pub fn find_by_name(&self, name: &str) -> Option<&Consumer> {
        self.iter().find(|consumer| *consumer.name == *name)
    }

    /// Return whether there are no keys.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn find_by_key(&self, key: &[u8]) -> Option<&Consumer> {
        if self.is_empty() {
            return None;
        }
        let found = digest(&SHA256, key);
        // The table is keyed by 8 bytes of the hash. The whole hash is compared in constant time, so that response
        // times reveal nothing about known hashes.
        let (hash, consumer) = self.0.get(found.as_ref().first_chunk()?)?;
        verify_slices_are_equal(hash, found.as_ref()).ok().map(|()| &**consumer)
    }
}

fn hash_prefix(hash: &KeyHash) -> [u8; 8] {
    let mut first = [0; 8];
    first.copy_from_slice(&hash[..8]);
    first
}

impl Consumer {
    /// Return the identity of the consumer for limits by API key alone.
    pub fn identity(&self, hasher: &IdentityHasher) -> Identity {
        let mut encoder = IdentityEncoder::default();
        encoder.push(CONSUMER_TAG, self.name.as_bytes());
        hasher.hash(encoder.as_bytes())
    }
}

impl ApiKeySettings {
    /// Look up the API key of a request.
    ///
    /// # Errors
    /// The request has several keys, or an unknown key and `on_unknown` is `reject`.
    pub fn caller<'a>(&self, consumers: &'a Consumers, headers: &'a HeaderMap) -> Result<Caller<'a>, IdentityError> {
        let mut values = headers.get_all(&self.header).iter();
        let key = match (values.next(), values.next()) {
            (Some(_), Some(_)) => return Err(IdentityError::Ambiguous(Descriptor::Header(self.header.clone()))),
            (Some(key), None) if !key.is_empty() => key.as_bytes(),
            _ if self.anonymous_if_missing => return Ok(Caller::Anonymous),
            _ => return Ok(Caller::Missing),
        };
        match (consumers.find_by_key(key), self.on_unknown) {
            (Some(consumer), _) => Ok(Caller::Consumer(consumer)),
            (None, OnUnknownKey::Reject) => Err(IdentityError::UnknownApiKey),
            (None, OnUnknownKey::Anonymous) => Ok(Caller::Anonymous),
            (None, OnUnknownKey::Accept) => Ok(Caller::Accepted(key)),
        }
    }
}

impl<'a> Caller<'a> {
    /// Return the variant of a limit for this caller: that of the consumer, else of the tier, else the default.
    pub fn variant(self, limit: &'a LimitSpec) -> &'a Arc<LimitVariant> {
        let special = match self {
            Caller::Consumer(consumer) => {
                let tier = || limit.tiers.get(consumer.tier.as_deref()?);
                consumer.variants.get(&limit.name).or_else(tier)
            }
            Caller::Anonymous => limit.tiers.get(ANONYMOUS_TIER),
            Caller::Accepted(_) | Caller::Missing => None,
        };
        special.unwrap_or(&limit.default_variant)
    }
}

/// Parse `sha256:` followed by 64 lower-case hex digits.
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

    // printf %s secret | sha256sum
    const SECRET: &str = "sha256:2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b";

    #[test]
    fn keys_are_looked_up_by_hash() {
        let mut keys = ApiKeySettings::default();
        let mut consumers = Consumers::default();
        let named = |name: &str| Arc::new(Consumer { name: name.into(), ..Consumer::default() });
        consumers.insert(parse_key_hash(SECRET).unwrap(), named("bob")).unwrap();
        assert_eq!(consumers.insert(parse_key_hash(SECRET).unwrap(), named("alice")), Err(named("bob")));
        for (sent, on_unknown, expected) in [
            (vec!["secret"], OnUnknownKey::Reject, Ok(Caller::Consumer(&named("alice")))),
            (vec!["Secret"], OnUnknownKey::Reject, Err(IdentityError::UnknownApiKey)),
            (vec!["Secret"], OnUnknownKey::Anonymous, Ok(Caller::Anonymous)),
            (vec!["Secret"], OnUnknownKey::Accept, Ok(Caller::Accepted(b"Secret"))),
            (vec![], OnUnknownKey::Accept, Ok(Caller::Missing)),
            (vec![""], OnUnknownKey::Accept, Ok(Caller::Missing)),
            (
                vec!["secret", "x"],
                OnUnknownKey::Accept,
                Err(IdentityError::Ambiguous(Descriptor::Header(keys.header.clone()))),
            ),
        ] {
            keys.on_unknown = on_unknown;
            let headers = sent.iter().map(|value| (keys.header.clone(), value.parse().unwrap()));
            let headers = headers.fold(HeaderMap::new(), |mut map, (name, value)| {
                map.append(name, value);
                map
            });
            assert_eq!(keys.caller(&consumers, &headers), expected, "{sent:?}");
        }
    }

    #[test]
    fn malformed_key_hashes_are_rejected() {
        for text in ["", "sha256:", &SECRET[..70], &SECRET.to_uppercase(), "md5:00", &format!("{SECRET}00")] {
            assert_eq!(parse_key_hash(text), None, "{text}");
        }
    }
}
