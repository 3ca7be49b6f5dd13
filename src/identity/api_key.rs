//! API keys and their consumers. Keys are stored as hashes. All keys of a consumer have the same identity.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use arc_swap::ArcSwap;
use aws_lc_rs::constant_time::verify_slices_are_equal;
use aws_lc_rs::digest::{SHA256, digest};
use http::{HeaderMap, HeaderName};
use tracing::debug;

use crate::identity::CONSUMER_TAG;
use crate::identity::auth::{AuthError, AuthRequest, KeySource, Proof, Verification};
use crate::identity::jwt::is_jwt_shaped;
use crate::limiter::key::{Identity, IdentityEncoder, IdentityHasher};
use crate::limiter::spec::{LimitSpec, LimitVariant};

/// SHA-256 of an API key.
pub type KeyHash = [u8; 32];

/// A provider of kind `api-key`.
#[derive(Debug)]
pub struct ApiKeyProvider {
    /// Headers that may contain the key: 1 to [`MAX_PLACES`] headers.
    pub places: Vec<KeyPlace>,
    /// The current consumers. They are replaced when the consumers file changes. Providers with the same file share
    /// them.
    pub consumers: Arc<ArcSwap<Consumers>>,
    /// `on_missing`: whether requests without a key are anonymous. Applies only to routes with `identify`.
    pub anonymous_if_missing: bool,
    /// `on_unknown`: how to handle unknown keys. Applies only to routes with `identify`.
    pub on_unknown: OnUnknownKey,
    /// Error message for a missing key, such as "an API key is required in the header `x-api-key`".
    pub missing: Arc<str>,
}

/// Maximum number of headers that may contain a key.
pub const MAX_PLACES: usize = 8;

/// A header that may contain an API key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyPlace {
    /// Name of the header.
    pub header: HeaderName,
    /// Authentication scheme before the key, compared case-insensitively. If `None`, the whole header value is the key.
    pub scheme: Option<Box<str>>,
}

/// The API key that a client sent, and how it was sent.
#[derive(Debug, Clone, Copy)]
pub(super) struct PresentedKey<'h> {
    pub(super) key: &'h [u8],
    /// Bit set of the headers that contain the key: bit n is the header at index n of [`ApiKeyProvider::places`].
    pub(super) places: u32,
    pub(super) source: KeySource,
    /// Whether the key follows a scheme and looks like a JWT, so that it may be a token for another provider.
    is_jwt_shaped: bool,
}

/// How to handle unknown keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnUnknownKey {
    /// Reject the request with 401.
    Reject,
    /// Treat the request as anonymous: the client network is the identity.
    Anonymous,
    /// Treat each key as a separate identity.
    Accept,
}

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

    fn find_by_key(&self, key: &[u8]) -> Option<&ConsumerKey> {
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

impl KeyPlace {
    /// Return the key in the value of this header. Return `None` if the value has another scheme or contains no key.
    fn key<'h>(&self, value: &'h [u8]) -> Option<&'h [u8]> {
        let key = match &self.scheme {
            None => value,
            Some(scheme) => {
                let (found, rest) = value.split_at_checked(scheme.len())?;
                let is_scheme = found.eq_ignore_ascii_case(scheme.as_bytes());
                let is_separated = rest.first().is_none_or(u8::is_ascii_whitespace);
                (is_scheme && is_separated).then(|| rest.trim_ascii())?
            }
        };
        (!key.is_empty()).then_some(key)
    }

    /// Return whether the request contains a key in this header. Without a scheme, any value is a key.
    pub(super) fn is_present(&self, headers: &HeaderMap) -> bool {
        self.scheme.is_none() || headers.get_all(&self.header).iter().any(|value| self.key(value.as_bytes()).is_some())
    }

    fn is_bearer(&self) -> bool {
        self.scheme.as_ref().is_some_and(|scheme| scheme.eq_ignore_ascii_case("bearer"))
    }
}

impl ApiKeyProvider {
    /// Verify the API key of a request.
    pub(super) fn verify(&self, request: &AuthRequest<'_>) -> Verification {
        let presented = match self.read(request.headers) {
            Ok(Some(presented)) => presented,
            Ok(None) => return Verification::Absent,
            Err(error) => return Verification::Invalid(error),
        };
        let consumers = self.consumers.load();
        let Some(ConsumerKey { consumer, terms, .. }) = consumers.find_by_key(presented.key) else {
            let unknown = AuthError::UnknownApiKey(presented.source);
            return match presented.is_jwt_shaped {
                true => Verification::Foreign(unknown),
                false => Verification::Invalid(unknown),
            };
        };
        if let Some(terms) = terms {
            let (consumer, key) = (&*consumer.name, terms.name.as_deref());
            if terms.disabled {
                debug!(consumer, key, "API key is disabled");
                // Return the error for unknown keys, so that the client does not learn that the key is disabled.
                return Verification::Invalid(AuthError::UnknownApiKey(presented.source));
            }
            if terms.expires_us.is_some_and(|expires| expires <= request.now_us) {
                debug!(consumer, key, "API key has expired");
                return Verification::Invalid(AuthError::ExpiredApiKey(presented.source));
            }
            if terms.routes.as_ref().is_some_and(|routes| !routes.iter().any(|route| **route == *request.route)) {
                debug!(consumer, key, route = request.route, "API key is not valid for this route");
                return Verification::Forbidden(AuthError::ApiKeyRoute);
            }
        }
        Verification::Valid(Proof::ApiKey(Caller::Consumer(consumer.clone()), presented.places))
    }

    /// Return the API key of a request, or `None` if it has none.
    ///
    /// # Errors
    /// A header occurs twice, or two headers contain different keys.
    pub(super) fn read<'h>(&self, headers: &'h HeaderMap) -> Result<Option<PresentedKey<'h>>, AuthError> {
        let mut found: Option<(PresentedKey<'h>, &HeaderName)> = None;
        for (index, place) in self.places.iter().enumerate() {
            let mut values = headers.get_all(&place.header).iter();
            let (Some(value), second) = (values.next(), values.next()) else { continue };
            if second.is_some() {
                return Err(AuthError::Ambiguous(place.header.clone()));
            }
            let Some(key) = place.key(value.as_bytes()) else { continue };
            let presented = PresentedKey {
                key,
                places: 1 << index,
                source: if place.is_bearer() { KeySource::Bearer } else { KeySource::Other },
                is_jwt_shaped: place.scheme.is_some() && is_jwt_shaped(key),
            };
            found = Some(match found {
                None => (presented, &place.header),
                Some((first, header)) if first.key == key => {
                    (PresentedKey { places: first.places | presented.places, ..first }, header)
                }
                // One of the two values is a token for another provider. Use the value that does not look like a JWT.
                Some((first, _)) if first.is_jwt_shaped && !presented.is_jwt_shaped => (presented, &place.header),
                Some(first) if presented.is_jwt_shaped && !first.0.is_jwt_shaped => first,
                Some((_, header)) => {
                    return Err(AuthError::DifferentApiKeys(header.clone(), place.header.clone()));
                }
            });
        }
        Ok(found.map(|(presented, _)| presented))
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
