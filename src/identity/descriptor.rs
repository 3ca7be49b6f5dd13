//! The parts of an identity, as a request has them.

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
    /// The consumer that the API key belongs to.
    ApiKey,
    /// The client's network.
    Ip,
    /// A header that trusted proxies set.
    User(HeaderName),
    /// A header as the client sent it.
    Header(HeaderName),
    /// A cookie.
    Cookie(Box<str>),
    /// A parameter of the query, decoded.
    Query(Box<str>),
    /// What the path has in the place of a parameter of the route.
    Path(Box<str>),
    /// A claim of the bearer token.
    Jwt(Box<str>),
    /// The subject of the client's certificate.
    ClientCert,
    /// The host that was routed on.
    Host,
    /// The method.
    Method,
    /// One identity for everybody.
    Global,
    /// The route's name.
    Route,
}

impl fmt::Display for Descriptor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Descriptor::ApiKey => f.write_str("API key"),
            Descriptor::Ip => f.write_str("address"),
            Descriptor::User(name) | Descriptor::Header(name) => write!(f, "field `{name}`"),
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

/// A part of an identity as a request has it.
pub(super) enum IdentityPart<'a> {
    Value(u8, Cow<'a, [u8]>),
    Address(u8),
    Missing(IdentityError),
}

/// Tags keep the kinds of parts apart: a consumer named `1` is not a header of that value.
pub(super) const IP_TAG: u8 = b'i';
pub(super) const ANONYMOUS_TAG: u8 = b'a';
pub(super) const CONSUMER_TAG: u8 = b'c';

/// What a name or value of a query stands for, as forms encode it (WHATWG URL §5.1). Bytes that are no text stay apart: they
/// are not replaced by one character for them all.
fn form_decoded(text: &str) -> Cow<'_, [u8]> {
    if text.contains(['%', '+']) {
        Cow::Owned(percent_decode_str(&text.replace('+', " ")).collect())
    } else {
        Cow::Borrowed(text.as_bytes())
    }
}

/// What servers read as the value of a cookie: without spaces and quotes around it, and decoded.
pub fn cookie_value(value: &[u8]) -> Cow<'_, [u8]> {
    percent_decode(unquoted(value)).into()
}

fn unquoted(value: &[u8]) -> &[u8] {
    let value = value.trim_ascii();
    value.strip_prefix(b"\"").and_then(|value| value.strip_suffix(b"\"")).unwrap_or(value)
}

/// Whether servers agree on the value of a cookie. Python decodes `\164` in quotes, JavaScript trims no-break spaces, Go takes
/// control characters, quotes, backslashes and other bytes than ASCII for no cookie at all (RFC 6265 §4.1.1).
fn is_unambiguous_cookie_value(value: &[u8]) -> bool {
    unquoted(value).iter().all(|byte| matches!(byte, b' '..=b'~') && !matches!(byte, b'"' | b'\\'))
}

/// The bytes behind all that some servers cut off the name of a cookie: spaces, control characters, other bytes than ASCII.
fn trim_start_of_cookie(bytes: &[u8]) -> &[u8] {
    let start = bytes.iter().position(u8::is_ascii_graphic).unwrap_or(bytes.len());
    bytes.get(start..).unwrap_or_default()
}

impl Descriptor {
    /// The header that it reads, whoever sent it.
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

    /// Whether it is a credential that the gateway verifies.
    pub(super) fn is_credential(&self) -> bool {
        matches!(self, Descriptor::ApiKey | Descriptor::Jwt(_) | Descriptor::ClientCert)
    }

    pub(super) fn extract<'a>(
        &self,
        request: &'a RequestAttributes<'_>,
        keys: &'a ApiKeySettings,
    ) -> Result<IdentityPart<'a>, IdentityError> {
        let missing = || IdentityPart::Missing(IdentityError::Missing(self.clone()));
        // Two values for one name: the upstream may believe the other one.
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
                    // Servers take the first line, the last one, or both with a comma between.
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
                        // Without a value some servers take it for an empty one.
                        [] => values.push(Cow::Borrowed(&b""[..])),
                        [b'=', value @ ..] => {
                            // Some servers cut spaces off names, others do not.
                            let exact = rest.starts_with(b"=") && pair.starts_with(name.as_bytes());
                            if !exact || !is_unambiguous_cookie_value(value) {
                                return Err(IdentityError::Malformed(self.clone()));
                            }
                            values.push(cookie_value(value));
                        }
                        // Another name that begins like this one.
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
