//! The result of verifying a credential: what the provider has found, or why the credential is rejected.

use std::borrow::Cow;
use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use serde_json::{Map, Value};

use crate::identity::consumer::Caller;

/// The parts of a request that are used for authentication.
#[derive(Debug, Clone, Copy)]
pub struct AuthRequest<'r> {
    /// Request headers.
    pub headers: &'r HeaderMap,
    /// Whether the connection has a verified client certificate.
    pub has_client_cert: bool,
    /// Name of the route.
    pub route: &'r str,
    /// Current time in µs since the Unix epoch.
    pub now_us: u64,
}

/// The result of one provider.
#[derive(Debug, Clone)]
pub enum Verification {
    /// The request has no credential of this kind.
    Absent,
    /// The credential has another format, or is from another issuer. The request is rejected unless another provider of
    /// the route verifies the credential.
    Foreign(AuthError),
    /// The credential is valid.
    Valid(Proof),
    /// The credential is invalid.
    Invalid(AuthError),
    /// The credential is valid, but lacks a required permission.
    Forbidden(AuthError),
    /// The credential cannot be verified at this time.
    Unavailable(AuthError),
    /// The result depends on another server or on a password hash. See `Verified::Waits`.
    Pending,
}

/// A verified credential.
#[derive(Debug, Clone)]
pub enum Proof {
    /// The caller that owns the API key, and a bit set of the headers that contain the key. Bit n is the header at
    /// index n of `ApiKeyProvider::places`.
    ApiKey(Caller, u32),
    /// The claims of the bearer token.
    Jwt(Arc<Claims>),
    /// The client certificate of the connection.
    ClientCert,
    /// The user name.
    Basic(Box<str>),
    /// The authentication server's admission.
    Forward(Arc<Admission>),
}

/// The reason why authentication failed. It never contains parts of a credential.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AuthError {
    /// The request has no credential that `require` accepts.
    #[error("{0}")]
    Missing(Arc<str>),
    /// The API key is unknown or disabled.
    #[error("the API key is unknown")]
    UnknownApiKey(KeySource),
    /// The API key has expired.
    #[error("the API key has expired")]
    ExpiredApiKey(KeySource),
    /// The API key is restricted to other routes.
    #[error("the API key is not valid for this route")]
    ApiKeyRoute,
    /// The client certificate of the connection has expired since the TLS handshake, or a reload has replaced the CA
    /// certificates.
    #[error(
        "the client certificate has expired or is no longer trusted: open a new connection with a valid certificate"
    )]
    UntrustedCertificate,
    /// Two headers contain different API keys.
    #[error("the headers `{0}` and `{1}` have different API keys")]
    DifferentApiKeys(HeaderName, HeaderName),
    /// The header occurs more than once.
    #[error("the header `{0}` is present more than once")]
    Ambiguous(HeaderName),
    /// The header is not a credential in the syntax of RFC 9110 §11.4. Servers could read different credentials from
    /// it.
    #[error("the header `{0}` is malformed")]
    Malformed(HeaderName),
    /// The bearer token is invalid.
    #[error(transparent)]
    Token(#[from] TokenError),
    /// The bearer token lacks a required claim.
    #[error("the bearer token lacks the required claim `{0}`")]
    Claim(Arc<str>),
    /// The user name or the password is wrong.
    #[error(transparent)]
    Basic(#[from] BasicError),
    /// The authentication server denied the request. The client gets the server's response.
    #[error("the authentication server denied the request with status {}", .0.status.as_u16())]
    Denied(Arc<Denial>),
    /// The credential cannot be verified at this time. The client should retry later.
    #[error("{0}")]
    Unavailable(&'static str),
    /// The authentication server sent an invalid response. The request is rejected even with `on_error = "allow"`,
    /// because the client may have provoked the invalid response.
    #[error("the request cannot be authenticated at the moment")]
    InvalidResponse,
}

/// The reason why a token is rejected. Errors never contain parts of the token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum TokenError {
    /// The token is not a JWT, has a critical header parameter (`crit`), or has invalid claims.
    #[error("the bearer token is malformed")]
    Malformed,
    /// The keys of the issuer have not been fetched yet.
    #[error("the keys of the token issuer are not available yet")]
    NoKeys,
    /// No key matches the `kid` of the token. For a token without a `kid`: no key, or more than one key, matches its
    /// algorithm.
    #[error("the bearer token is signed with an unknown key")]
    UnknownKey,
    /// The algorithm of the token differs from the algorithm of the key.
    #[error("the algorithm of the bearer token differs from the algorithm of its key")]
    Algorithm,
    /// The signature of the token is invalid.
    #[error("the signature of the bearer token is invalid")]
    Signature,
    /// The claim `exp` is missing.
    #[error("the bearer token has no expiration time")]
    NoExpiration,
    /// The time in `exp` has passed.
    #[error("the bearer token has expired")]
    Expired,
    /// The time in `nbf` is in the future.
    #[error("the bearer token is not valid yet")]
    NotYetValid,
    /// The claim `iss` is missing or is not the configured issuer.
    #[error("the bearer token is from another issuer")]
    Issuer,
    /// The claim `aud` does not match the configured audience.
    #[error("the bearer token is for another audience")]
    Audience,
}

/// The reason why Basic credentials are rejected. It never contains parts of the credentials.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BasicError {
    /// The header is not base64 of `USER:PASSWORD`, contains control characters, or is longer than 1 KiB.
    #[error("the Basic credentials are malformed")]
    Malformed,
    /// The user is unknown, or the password is wrong.
    #[error("the user name or the password is wrong")]
    Rejected,
}

/// How a client sent an API key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeySource {
    /// The client sent the key as a bearer token.
    Bearer,
    /// The client sent the key with another scheme or without a scheme.
    Other,
}

/// The claims of a verified token.
#[derive(Debug)]
pub struct Claims(pub(super) Map<String, Value>);

/// The server's decision to admit a request, with headers for the upstream.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Admission {
    /// The `response_headers` that the server sent.
    pub headers: HeaderMap,
}

/// The response of an authentication server that denies a request. The client gets this response.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Denial {
    /// Status of the response, which is not 2xx.
    pub status: StatusCode,
    /// Headers of the response that are sent to the client.
    pub headers: HeaderMap,
    /// Body of the response.
    pub body: Bytes,
}

impl Verification {
    /// Return whether an authentication server has admitted the request.
    pub(super) fn is_admission(&self) -> bool {
        matches!(self, Verification::Valid(Proof::Forward(_)))
    }
}

impl AuthError {
    /// Return the status of the response: 400, 401, 403 or 503, or the status that the authentication server sent.
    pub fn status(&self) -> StatusCode {
        match self {
            AuthError::Missing(_) | AuthError::UnknownApiKey(_) | AuthError::ExpiredApiKey(_) | AuthError::Token(_) => {
                StatusCode::UNAUTHORIZED
            }
            AuthError::Basic(_) | AuthError::UntrustedCertificate => StatusCode::UNAUTHORIZED,
            AuthError::ApiKeyRoute | AuthError::Claim(_) => StatusCode::FORBIDDEN,
            AuthError::Denied(denial) => denial.status,
            AuthError::Unavailable(_) | AuthError::InvalidResponse => StatusCode::SERVICE_UNAVAILABLE,
            AuthError::DifferentApiKeys(..) | AuthError::Ambiguous(_) | AuthError::Malformed(_) => {
                StatusCode::BAD_REQUEST
            }
        }
    }

    /// Return whether the credential cannot be verified at this time.
    pub fn is_unavailable(&self) -> bool {
        matches!(self, AuthError::Unavailable(_) | AuthError::InvalidResponse)
    }

    /// Return whether the bearer token of the request was invalid. The token may be a JWT or an API key.
    pub(super) fn is_invalid_bearer_token(&self) -> bool {
        matches!(
            self,
            AuthError::Token(_)
                | AuthError::UnknownApiKey(KeySource::Bearer)
                | AuthError::ExpiredApiKey(KeySource::Bearer)
        )
    }
}

impl Claims {
    /// Return whether a claim has or contains a value. A list must contain the value. A string must be equal to the
    /// value, or contain the value as a space-separated word (as in `scope`, RFC 8693 §4.2).
    pub(super) fn contains(&self, name: &str, value: &str) -> bool {
        match self.0.get(name) {
            Some(Value::Array(list)) => list.iter().any(|item| *item == *value),
            Some(Value::String(text)) => text == value || text.split(' ').any(|word| word == value),
            Some(Value::Bool(flag)) => value == if *flag { "true" } else { "false" },
            Some(Value::Number(number)) => number.to_string() == value,
            Some(Value::Null | Value::Object(_)) | None => false,
        }
    }

    /// Return a claim as an identity. Return `None` unless it is a string that is not empty, a number or a boolean.
    pub fn text(&self, name: &str) -> Option<Cow<'_, str>> {
        match self.0.get(name)? {
            Value::String(text) if text.is_empty() => None,
            Value::String(text) => Some(Cow::Borrowed(text)),
            Value::Number(number) => Some(Cow::Owned(number.to_string())),
            Value::Bool(flag) => Some(Cow::Borrowed(if *flag { "true" } else { "false" })),
            Value::Null | Value::Array(_) | Value::Object(_) => None,
        }
    }
}

impl Admission {
    /// Return the value of a header for use as an identity. Return `None` if the header is absent, empty or repeated.
    pub fn identity(&self, name: &HeaderName) -> Option<&[u8]> {
        let mut values = self.headers.get_all(name).iter().map(HeaderValue::as_bytes);
        values.next().filter(|value| !value.is_empty() && values.next().is_none())
    }
}
