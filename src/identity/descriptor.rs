//! Descriptors: the parts of an identity, and how requests provide them.

use std::borrow::Cow;
use std::fmt;

use http::HeaderName;
use http::header::{AUTHORIZATION, COOKIE};
use percent_encoding::{percent_decode, percent_decode_str};

use crate::identity::api_key::{ApiKeySettings, Caller};
use crate::identity::{IdentityError, RequestAttributes};

/// One part of an identity.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Descriptor {
    /// Consumer of the API key.
    ApiKey,
    /// Client network.
    Ip,
    /// Header set by trusted proxies.
    User(HeaderName),
    /// Header sent by the client.
    Header(HeaderName),
    /// Cookie.
    Cookie(Box<str>),
    /// Query parameter, decoded.
    Query(Box<str>),
    /// Value of a path parameter of the route.
    Path(Box<str>),
    /// Claim of the bearer token.
    Jwt(Box<str>),
    /// Subject of the client certificate.
    ClientCert,
    /// Host used for routing.
    Host,
    /// Method.
    Method,
    /// One identity for all clients.
    Global,
    /// Name of the route.
    Route,
}

impl fmt::Display for Descriptor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Descriptor::ApiKey => f.write_str("API key"),
            Descriptor::Ip => f.write_str("address"),
            Descriptor::User(name) | Descriptor::Header(name) => write!(f, "header `{name}`"),
            Descriptor::Cookie(name) => write!(f, "cookie `{name}`"),
            Descriptor::Query(name) => write!(f, "query parameter `{name}`"),
            Descriptor::Path(name) => write!(f, "path parameter `{name}`"),
            Descriptor::Jwt(name) => write!(f, "claim `{name}` of a bearer token"),
            Descriptor::ClientCert => f.write_str("subject of a client certificate"),
            Descriptor::Host => f.write_str("host"),
            Descriptor::Method => f.write_str("method"),
            Descriptor::Global | Descriptor::Route => f.write_str("route"),
        }
    }
}

/// The value of a descriptor for a request.
pub(super) enum IdentityPart<'a> {
    Value(u8, Cow<'a, [u8]>),
    Address(u8),
    Missing(IdentityError),
}

/// Tags separate the kinds of parts: a consumer named `1` differs from a header with that value.
pub(super) const IP_TAG: u8 = b'i';
pub(super) const ANONYMOUS_TAG: u8 = b'a';
pub(super) const CONSUMER_TAG: u8 = b'c';

/// Decode a name or value of a query as forms encode it (WHATWG URL §5.1). Bytes that are not UTF-8 are kept.
/// Replacement characters would make different values equal.
fn form_decoded(text: &str) -> Cow<'_, [u8]> {
    if text.contains(['%', '+']) {
        Cow::Owned(percent_decode_str(&text.replace('+', " ")).collect())
    } else {
        Cow::Borrowed(text.as_bytes())
    }
}

/// Return the value of a cookie as servers read it: without surrounding whitespace and quotes, and percent-decoded.
pub fn cookie_value(value: &[u8]) -> Cow<'_, [u8]> {
    percent_decode(unquoted(value)).into()
}

fn unquoted(value: &[u8]) -> &[u8] {
    let value = value.trim_ascii();
    value.strip_prefix(b"\"").and_then(|value| value.strip_suffix(b"\"")).unwrap_or(value)
}

/// Return whether all servers read the same value of a cookie. Python decodes `\164` in quotes, JavaScript trims
/// no-break spaces, and Go drops cookies with control characters, quotes, backslashes or non-ASCII bytes (RFC 6265
/// §4.1.1).
fn is_unambiguous_cookie_value(value: &[u8]) -> bool {
    unquoted(value).iter().all(|byte| matches!(byte, b' '..=b'~') && !matches!(byte, b'"' | b'\\'))
}

/// Trim the bytes that some servers remove from the start of a cookie name: spaces, control characters and non-ASCII
/// bytes.
fn trim_start_of_cookie(bytes: &[u8]) -> &[u8] {
    let start = bytes.iter().position(u8::is_ascii_graphic).unwrap_or(bytes.len());
    bytes.get(start..).unwrap_or_default()
}

impl Descriptor {
    /// Return the header that this part reads from any client, trusted or not.
    pub fn header(&self, keys: &ApiKeySettings) -> Option<HeaderName> {
        match self {
            Descriptor::ApiKey => Some(keys.header.clone()),
            Descriptor::Header(name) => Some(name.clone()),
            Descriptor::Cookie(_) => Some(COOKIE),
            Descriptor::Jwt(_) => Some(AUTHORIZATION),
            Descriptor::User(_)
            | Descriptor::Ip
            | Descriptor::Query(_)
            | Descriptor::Path(_)
            | Descriptor::ClientCert => None,
            Descriptor::Host | Descriptor::Method | Descriptor::Global | Descriptor::Route => None,
        }
    }

    /// Return whether the gateway verifies this part as a credential.
    pub(super) fn is_credential(&self) -> bool {
        matches!(self, Descriptor::ApiKey | Descriptor::Jwt(_) | Descriptor::ClientCert)
    }

    /// Return the value of this part for a request.
    ///
    /// # Errors
    /// The value is ambiguous, or a credential is invalid.
    pub(super) fn extract<'a>(
        &self,
        request: &'a RequestAttributes<'_>,
        keys: &'a ApiKeySettings,
    ) -> Result<IdentityPart<'a>, IdentityError> {
        let missing = || IdentityPart::Missing(IdentityError::Missing(self.clone()));
        // Reject several values for one name: the upstream may use another one than the gateway.
        let only = |tag, mut values: Vec<Cow<'a, [u8]>>| match values.len() {
            0 => Ok(missing()),
            1 if values[0].is_empty() => Ok(missing()),
            1 => Ok(IdentityPart::Value(tag, values.swap_remove(0))),
            _ => Err(IdentityError::Ambiguous(self.clone())),
        };
        let lines = |name: &HeaderName| -> Vec<Cow<'a, [u8]>> {
            request.headers.get_all(name).iter().map(|value| Cow::Borrowed(value.as_bytes())).collect()
        };
        match self {
            Descriptor::ApiKey => Ok(match request.caller.clone()? {
                Caller::Consumer(consumer) => {
                    IdentityPart::Value(CONSUMER_TAG, Cow::Borrowed(consumer.name.as_bytes()))
                }
                Caller::Accepted(key) => IdentityPart::Value(b'k', Cow::Borrowed(key)),
                Caller::Anonymous => IdentityPart::Address(ANONYMOUS_TAG),
                Caller::Missing => IdentityPart::Missing(IdentityError::MissingApiKey(keys.header.clone())),
            }),
            Descriptor::Ip => Ok(IdentityPart::Address(IP_TAG)),
            Descriptor::User(_) if !request.is_from_trusted_proxy => Ok(missing()),
            Descriptor::User(name) => only(b'u', lines(name)),
            Descriptor::Header(name) => {
                let mut lines = lines(name);
                match lines.len() {
                    0 => Ok(missing()),
                    1 => Ok(IdentityPart::Value(b'h', lines.swap_remove(0))),
                    // Servers use the first line, the last line, or all lines joined by commas.
                    _ => Err(IdentityError::Ambiguous(self.clone())),
                }
            }
            Descriptor::Cookie(name) => {
                let mut values = Vec::new();
                for pair in
                    request.headers.get_all(COOKIE).iter().flat_map(|line| line.as_bytes().split(|byte| *byte == b';'))
                {
                    let pair = pair.trim_ascii();
                    let Some(rest) = trim_start_of_cookie(pair).strip_prefix(name.as_bytes()) else { continue };
                    match trim_start_of_cookie(rest) {
                        // Some servers read a cookie without `=` as an empty value.
                        [] => values.push(Cow::Borrowed(&b""[..])),
                        [b'=', value @ ..] => {
                            // Some servers trim spaces from names, others do not.
                            let exact = rest.starts_with(b"=") && pair.starts_with(name.as_bytes());
                            if !exact || !is_unambiguous_cookie_value(value) {
                                return Err(IdentityError::Malformed(self.clone()));
                            }
                            values.push(cookie_value(value));
                        }
                        // A longer name with this one as its prefix.
                        _ => {}
                    }
                }
                only(b'o', values)
            }
            Descriptor::Query(name) => {
                let pairs =
                    request.query.unwrap_or("").split('&').map(|pair| pair.split_once('=').unwrap_or((pair, "")));
                let values = pairs.filter(|(key, _)| *form_decoded(key) == *name.as_bytes());
                only(b'q', values.map(|(_, value)| form_decoded(value)).collect())
            }
            Descriptor::Path(name) => only(
                b'p',
                request
                    .path_pattern
                    .capture(request.path, name)
                    .map(|value| Cow::Borrowed(value.as_bytes()))
                    .into_iter()
                    .collect(),
            ),
            Descriptor::Jwt(name) => Ok(match request.bearer_token.claims()?.and_then(|claims| claims.text(name)) {
                Some(Cow::Borrowed(text)) => IdentityPart::Value(b'j', Cow::Borrowed(text.as_bytes())),
                Some(Cow::Owned(text)) => IdentityPart::Value(b'j', Cow::Owned(text.into_bytes())),
                None => missing(),
            }),
            Descriptor::ClientCert => Ok(match request.client_cert_subject {
                Some(subject) => IdentityPart::Value(b's', Cow::Borrowed(subject.as_bytes())),
                None => missing(),
            }),
            Descriptor::Host => only(b'n', vec![Cow::Borrowed(request.host.as_bytes())]),
            Descriptor::Method => Ok(IdentityPart::Value(b'm', Cow::Borrowed(request.method.as_str().as_bytes()))),
            Descriptor::Global => Ok(IdentityPart::Value(b'g', Cow::Borrowed(b""))),
            Descriptor::Route => Ok(IdentityPart::Value(b'r', Cow::Borrowed(request.route_name.as_bytes()))),
        }
    }
}
