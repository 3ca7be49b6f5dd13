//! Providers of kind `api-key`: read the API key of a request, and find its consumer.

use std::sync::Arc;

use arc_swap::ArcSwap;
use http::{HeaderMap, HeaderName};
use tracing::debug;

use crate::identity::consumer::{Caller, ConsumerKey, Consumers};
use crate::identity::jwt::is_jwt_shaped;
use crate::identity::verification::{AuthError, AuthRequest, KeySource, Proof, Verification};

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
            let consumer = &*consumer.name;
            let key = terms.name.as_deref();
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
