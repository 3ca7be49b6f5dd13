//! Who asks: from the parts of a request to the identity that a limit counts.

pub mod api_key;
pub mod client_ip;

use std::net::IpAddr;

use http::{HeaderMap, HeaderName};

use crate::limit::key::{Encoder, Identity, IdentityHasher};
use api_key::{ApiKeys, Caller};

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
    /// One identity for everybody.
    Global,
    /// The route's name.
    Route,
}

/// What happens to a request that lacks a part of an identity.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnMissing {
    /// It is refused.
    Reject,
    /// The limit does not apply to it.
    Skip,
    /// The client's network stands in.
    Ip,
}

/// By what a limit tells identities apart.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct By {
    /// The parts, in order.
    pub sources: Vec<Source>,
    /// When one is missing.
    pub on_missing: OnMissing,
}

/// A request, as far as identities are concerned.
#[derive(Debug)]
pub struct Asker<'a> {
    /// Its header section.
    pub headers: &'a HeaderMap,
    /// The client's network: address and prefix applied.
    pub network: IpAddr,
    /// Whether the peer is a trusted proxy.
    pub trusted: bool,
    /// The name of the route.
    pub route: &'a str,
}

/// Why a request has no identity.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum IdentityError {
    #[error("an API key is needed in the field `{0}`")]
    MissingKey(HeaderName),
    #[error("the API key is not known")]
    UnknownKey,
    #[error("the field `{0}` stands more than once")]
    Ambiguous(HeaderName),
    #[error("the field `{0}` is needed")]
    MissingHeader(HeaderName),
}

impl By {
    /// The identity of a request; none if the limit does not apply to it.
    ///
    /// # Errors
    /// A part is missing or ambiguous and the configuration says to refuse.
    pub fn identify(
        &self,
        asker: &Asker<'_>,
        keys: &ApiKeys,
        hasher: &IdentityHasher,
        encoder: &mut Encoder,
    ) -> Result<Option<Identity>, IdentityError> {
        encoder.clear();
        for source in &self.sources {
            if let Err(missing) = encode(source, asker, keys, encoder)? {
                match self.on_missing {
                    OnMissing::Reject => return Err(missing),
                    OnMissing::Skip => return Ok(None),
                    OnMissing::Ip => encode_ip(b'i', asker.network, encoder),
                }
            }
        }
        Ok(Some(hasher.hash(encoder.bytes())))
    }
}

/// Adds a part; the inner error says that it is missing.
fn encode(
    source: &Source,
    asker: &Asker<'_>,
    keys: &ApiKeys,
    encoder: &mut Encoder,
) -> Result<Result<(), IdentityError>, IdentityError> {
    match source {
        Source::ApiKey => match keys.caller(asker.headers)? {
            Caller::Consumer(name) => encoder.part(b'c', name.as_bytes()),
            Caller::Accepted(key) => encoder.part(b'k', key),
            Caller::Anonymous => encode_ip(b'a', asker.network, encoder),
            Caller::Missing => return Ok(Err(IdentityError::MissingKey(keys.header.clone()))),
        },
        Source::Ip => encode_ip(b'i', asker.network, encoder),
        Source::User(name) => {
            let mut values = asker.headers.get_all(name).iter();
            match (values.next().filter(|_| asker.trusted), values.next()) {
                (None, _) => return Ok(Err(IdentityError::MissingHeader(name.clone()))),
                (Some(value), None) if value.is_empty() => return Ok(Err(IdentityError::MissingHeader(name.clone()))),
                (Some(value), None) => encoder.part(b'u', value.as_bytes()),
                // Two names for one user: the upstream may believe the other one.
                (Some(_), Some(_)) => return Err(IdentityError::Ambiguous(name.clone())),
            }
        }
        Source::Header(name) => {
            // Several lines are one list (RFC 9110 §5.3).
            let lines: Vec<_> = asker.headers.get_all(name).iter().map(|value| value.as_bytes()).collect();
            match lines[..] {
                [] => return Ok(Err(IdentityError::MissingHeader(name.clone()))),
                [one] => encoder.part(b'h', one),
                _ => encoder.part(b'h', &lines.join(&b", "[..])),
            }
        }
        Source::Global => encoder.part(b'g', b""),
        Source::Route => encoder.part(b'r', asker.route.as_bytes()),
    }
    Ok(Ok(()))
}

fn encode_ip(tag: u8, network: IpAddr, encoder: &mut Encoder) {
    match network {
        IpAddr::V4(address) => encoder.part(tag, &address.octets()),
        IpAddr::V6(address) => encoder.part(tag, &address.octets()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    fn identify(by: &By, lines: &[(&'static str, &str)], trusted: bool) -> Result<Option<Identity>, IdentityError> {
        let mut headers = HeaderMap::new();
        for (name, value) in lines {
            headers.append(*name, value.parse().unwrap());
        }
        let asker = Asker { headers: &headers, network: "192.0.2.1".parse().unwrap(), trusted, route: "r" };
        by.identify(&asker, &ApiKeys::default(), &IdentityHasher::new(""), &mut Encoder::default())
    }

    fn by(sources: &[Source], on_missing: OnMissing) -> By {
        By { sources: sources.to_vec(), on_missing }
    }

    #[test]
    fn a_user_header_counts_only_from_trusted_proxies() {
        let user = by(&[Source::User(HeaderName::from_static("x-user-id"))], OnMissing::Reject);
        assert!(identify(&user, &[("x-user-id", "bob")], true).unwrap().is_some());
        let missing = IdentityError::MissingHeader(HeaderName::from_static("x-user-id"));
        assert_eq!(identify(&user, &[("x-user-id", "bob")], false), Err(missing));
        let twice = identify(&user, &[("x-user-id", "bob"), ("x-user-id", "eve")], true);
        assert_eq!(twice, Err(IdentityError::Ambiguous(HeaderName::from_static("x-user-id"))));
    }

    #[test]
    fn parts_do_not_run_into_each_other() {
        let pair = |one, other| {
            let names = [HeaderName::from_static("x-a"), HeaderName::from_static("x-b")].map(Source::Header);
            identify(&by(&names, OnMissing::Reject), &[("x-a", one), ("x-b", other)], false).unwrap()
        };
        let all: HashSet<_> = [("ab", "c"), ("a", "bc"), ("abc", ""), ("", "abc")].map(|(a, b)| pair(a, b)).into();
        assert_eq!(all.len(), 4);
    }

    #[test]
    fn a_missing_part_is_refused_skipped_or_replaced() {
        let named = |on_missing| by(&[Source::Header(HeaderName::from_static("x-a"))], on_missing);
        assert!(identify(&named(OnMissing::Reject), &[], false).is_err());
        assert_eq!(identify(&named(OnMissing::Skip), &[], false), Ok(None));
        let ip = identify(&by(&[Source::Ip], OnMissing::Reject), &[], false);
        assert_eq!(identify(&named(OnMissing::Ip), &[], false), ip);
    }
}
