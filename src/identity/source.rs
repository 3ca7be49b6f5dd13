//! The parts of an identity, as a request has them.

use std::borrow::Cow;
use std::fmt;

use http::HeaderName;
use http::header::{AUTHORIZATION, COOKIE};
use percent_encoding::{percent_decode, percent_decode_str};

use super::api_key::{ApiKeys, Caller};
use super::{Asker, IdentityError};

/// One part of an identity.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
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

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Source::ApiKey => f.write_str("API key"),
            Source::Ip => f.write_str("address"),
            Source::User(name) | Source::Header(name) => write!(f, "field `{name}`"),
            Source::Cookie(name) => write!(f, "cookie `{name}`"),
            Source::Query(name) => write!(f, "query parameter `{name}`"),
            Source::Path(name) => write!(f, "path parameter `{name}`"),
            Source::Jwt(name) => write!(f, "claim `{name}` of a bearer token"),
            Source::ClientCert => f.write_str("subject of a client certificate"),
            Source::Host => f.write_str("host"),
            Source::Method => f.write_str("method"),
            Source::Global | Source::Route => f.write_str("route"),
        }
    }
}

/// A part of an identity as a request has it.
pub(super) enum Part<'a> {
    Value(u8, Cow<'a, [u8]>),
    Address(u8),
    Missing(IdentityError),
}

/// Tags keep the kinds of parts apart: a consumer named `1` is not a header of that value.
pub(super) const IP: u8 = b'i';
pub(super) const ANONYMOUS: u8 = b'a';
pub(super) const CONSUMER: u8 = b'c';

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
    let value = value.trim_ascii();
    let value = value.strip_prefix(b"\"").and_then(|value| value.strip_suffix(b"\"")).unwrap_or(value);
    percent_decode(value).into()
}

impl Source {
    /// The header that it reads, whoever sent it.
    pub fn header(&self, keys: &ApiKeys) -> Option<HeaderName> {
        match self {
            Source::ApiKey => Some(keys.header.clone()),
            Source::Header(name) => Some(name.clone()),
            Source::Cookie(_) => Some(COOKIE),
            Source::Jwt(_) => Some(AUTHORIZATION),
            Source::User(_) | Source::Ip | Source::Query(_) | Source::Path(_) | Source::ClientCert => None,
            Source::Host | Source::Method | Source::Global | Source::Route => None,
        }
    }

    /// Whether it is a credential that the gateway verifies.
    pub(super) fn is_credential(&self) -> bool {
        matches!(self, Source::ApiKey | Source::Jwt(_) | Source::ClientCert)
    }

    pub(super) fn part<'a>(&self, asker: &'a Asker<'_>, keys: &'a ApiKeys) -> Result<Part<'a>, IdentityError> {
        let missing = || Part::Missing(IdentityError::Missing(self.clone()));
        // Two values for one name: the upstream may believe the other one.
        let only = |tag, mut values: Vec<Cow<'a, [u8]>>| match values.len() {
            0 => Ok(missing()),
            1 if values[0].is_empty() => Ok(missing()),
            1 => Ok(Part::Value(tag, values.swap_remove(0))),
            _ => Err(IdentityError::Ambiguous(self.clone())),
        };
        let lines = |name: &HeaderName| -> Vec<Cow<'a, [u8]>> {
            asker.headers.get_all(name).iter().map(|value| Cow::Borrowed(value.as_bytes())).collect()
        };
        match self {
            Source::ApiKey => Ok(match asker.caller.clone()? {
                Caller::Consumer(consumer) => Part::Value(CONSUMER, Cow::Borrowed(consumer.name.as_bytes())),
                Caller::Accepted(key) => Part::Value(b'k', Cow::Borrowed(key)),
                Caller::Anonymous => Part::Address(ANONYMOUS),
                Caller::Missing => Part::Missing(IdentityError::MissingKey(keys.header.clone())),
            }),
            Source::Ip => Ok(Part::Address(IP)),
            Source::User(_) if !asker.trusted => Ok(missing()),
            Source::User(name) => only(b'u', lines(name)),
            Source::Header(name) => {
                let mut lines = lines(name);
                Ok(match lines.len() {
                    0 => missing(),
                    1 => Part::Value(b'h', lines.swap_remove(0)),
                    // Several lines are one list (RFC 9110 §5.3).
                    _ => Part::Value(b'h', Cow::Owned(lines.join(&b", "[..]))),
                })
            }
            Source::Cookie(name) => {
                let mut values = Vec::new();
                for pair in
                    asker.headers.get_all(COOKIE).iter().flat_map(|line| line.as_bytes().split(|byte| *byte == b';'))
                {
                    let Some(rest) = pair.trim_ascii().strip_prefix(name.as_bytes()) else { continue };
                    match rest.trim_ascii_start() {
                        // Without a value some servers take it for an empty one.
                        [] => values.push(Cow::Borrowed(&b""[..])),
                        // Some servers cut spaces off names, others do not.
                        [b'=', ..] if !rest.starts_with(b"=") => return Err(IdentityError::Malformed(self.clone())),
                        [b'=', value @ ..] => values.push(cookie_value(value)),
                        // Another name that begins like this one.
                        _ => {}
                    }
                }
                only(b'o', values)
            }
            Source::Query(name) => {
                let pairs = asker.query.unwrap_or("").split('&').map(|pair| pair.split_once('=').unwrap_or((pair, "")));
                let values = pairs.filter(|(key, _)| *form_decoded(key) == *name.as_bytes());
                only(b'q', values.map(|(_, value)| form_decoded(value)).collect())
            }
            Source::Path(name) => only(
                b'p',
                asker
                    .pattern
                    .capture(asker.path, name)
                    .map(|value| Cow::Borrowed(value.as_bytes()))
                    .into_iter()
                    .collect(),
            ),
            Source::Jwt(name) => Ok(match asker.bearer.claims()?.and_then(|claims| claims.text(name)) {
                Some(Cow::Borrowed(text)) => Part::Value(b'j', Cow::Borrowed(text.as_bytes())),
                Some(Cow::Owned(text)) => Part::Value(b'j', Cow::Owned(text.into_bytes())),
                None => missing(),
            }),
            Source::ClientCert => Ok(match asker.subject {
                Some(subject) => Part::Value(b's', Cow::Borrowed(subject.as_bytes())),
                None => missing(),
            }),
            Source::Host => only(b'n', vec![Cow::Borrowed(asker.host.as_bytes())]),
            Source::Method => Ok(Part::Value(b'm', Cow::Borrowed(asker.method.as_str().as_bytes()))),
            Source::Global => Ok(Part::Value(b'g', Cow::Borrowed(b""))),
            Source::Route => Ok(Part::Value(b'r', Cow::Borrowed(asker.route.as_bytes()))),
        }
    }
}
