//! Who asks: from the parts of a request to the identity that a limit counts.

pub mod api_key;
pub mod client_cert;
pub mod client_ip;
pub mod jwks;
pub mod jwt;
pub mod name;
mod source;

use std::borrow::Cow;
use std::net::IpAddr;

use http::{HeaderMap, HeaderName, Method};
use ipnet::IpNet;

use crate::limit::key::{Encoder, Identity, IdentityHasher};
use crate::route::path::PathPattern;
use api_key::{ApiKeys, Caller};
use jwt::{Bearer, TokenError};
use source::{ANONYMOUS, CONSUMER, IP, Part};
pub use source::{Source, cookie_value};

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
    /// The methods that the limit is about; none listed = all.
    pub methods: Vec<Method>,
    /// Who is never limited.
    pub exempt: Exempt,
}

/// Identities that are never limited.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Exempt {
    /// Clients in these networks, where the identity has the client's address in it.
    pub networks: Vec<IpNet>,
    /// Values of one source each; a consumer by its name. A value of another source never matches.
    pub values: Vec<(Source, Box<str>)>,
}

/// A request, as far as identities are concerned.
#[derive(Debug)]
pub struct Asker<'a> {
    /// Its method.
    pub method: &'a Method,
    /// The host that it was routed on.
    pub host: &'a str,
    /// Its path in canonical form.
    pub path: &'a str,
    /// Its query.
    pub query: Option<&'a str>,
    /// Its header section.
    pub headers: &'a HeaderMap,
    /// The client's address.
    pub client: IpAddr,
    /// The client's network: address and prefix applied.
    pub network: IpAddr,
    /// Whether the peer is a trusted proxy.
    pub trusted: bool,
    /// The subject of the client's certificate.
    pub subject: Option<&'a str>,
    /// Whose API key it carries.
    pub caller: Result<Caller<'a>, IdentityError>,
    /// The name of the route.
    pub route: &'a str,
    /// The path pattern of the route.
    pub pattern: &'a PathPattern,
    /// Its bearer token.
    pub bearer: Bearer<'a>,
}

/// Why a request has no identity.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum IdentityError {
    #[error("an API key is needed in the field `{0}`")]
    MissingKey(HeaderName),
    #[error("the API key is not known")]
    UnknownKey,
    #[error("the {0} stands more than once")]
    Ambiguous(Source),
    #[error("the {0} has a space behind its name")]
    Malformed(Source),
    #[error("the {0} is needed")]
    Missing(Source),
    #[error(transparent)]
    Token(#[from] TokenError),
}

impl IdentityError {
    /// Whether a credential is missing or does not count. Such requests are rejected with 401, and may be guesses.
    pub fn is_about_credentials(&self) -> bool {
        match self {
            IdentityError::MissingKey(_) | IdentityError::UnknownKey | IdentityError::Token(_) => true,
            IdentityError::Missing(source) => source.is_credential(),
            IdentityError::Ambiguous(_) | IdentityError::Malformed(_) => false,
        }
    }
}

/// Whose units of a limit a request takes, or why of nobody's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Found {
    /// This identity's.
    Identity(Identity),
    /// The limit is about other methods.
    OtherMethod,
    /// A part is missing, and the limit does not apply to those who lack it.
    Lacking(IdentityError),
    /// A part is one that is never limited.
    Exempt,
}

impl By {
    /// Whether it counts a client before its credential is known: by its address, or by what a trusted proxy says of it. A
    /// bucket that others share, or that a client chooses, is not for clients without a credential to empty.
    pub fn counts_guesses(&self) -> bool {
        let is_client = |source: &Source| matches!(source, Source::Ip | Source::User(_));
        self.sources.iter().any(is_client) && !self.sources.iter().any(Source::is_credential)
    }

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
        Ok(match self.find(asker, keys, hasher, encoder)? {
            Found::Identity(identity) => Some(identity),
            Found::OtherMethod | Found::Lacking(_) | Found::Exempt => None,
        })
    }

    /// The same, with the reason where the limit does not apply.
    ///
    /// # Errors
    /// As [`By::identify`].
    pub fn find(
        &self,
        asker: &Asker<'_>,
        keys: &ApiKeys,
        hasher: &IdentityHasher,
        encoder: &mut Encoder,
    ) -> Result<Found, IdentityError> {
        if !self.methods.is_empty() && !self.methods.contains(asker.method) {
            return Ok(Found::OtherMethod);
        }
        encoder.clear();
        for source in &self.sources {
            let (tag, value) = match source.part(asker, keys)? {
                Part::Value(tag, value) => (tag, value),
                Part::Address(tag) => (tag, network(asker)),
                Part::Missing(missing) => match self.on_missing {
                    OnMissing::Reject => return Err(missing),
                    OnMissing::Skip => return Ok(Found::Lacking(missing)),
                    OnMissing::Ip => (IP, network(asker)),
                },
            };
            if self.exempt.covers(source, tag, &value, asker.client) {
                return Ok(Found::Exempt);
            }
            encoder.part(tag, &value);
        }
        Ok(Found::Identity(hasher.hash(encoder.bytes())))
    }
}

impl Exempt {
    /// The tag tells a consumer from an unknown API key: clients choose the latter.
    fn covers(&self, source: &Source, tag: u8, value: &[u8], client: IpAddr) -> bool {
        match tag {
            IP | ANONYMOUS => self.networks.iter().any(|net| net.contains(&client)),
            _ if tag != source.tag() => false,
            _ => self.values.iter().any(|(of, exempt)| of == source && exempt.as_bytes() == value),
        }
    }
}

fn network(asker: &Asker<'_>) -> Cow<'static, [u8]> {
    Cow::Owned(octets(asker.network))
}

fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::identity::jwt::Verifier;
    use std::collections::HashSet;

    fn identify(by: &By, lines: &[(&'static str, &str)], trusted: bool) -> Result<Option<Identity>, IdentityError> {
        let mut headers = HeaderMap::new();
        for (name, value) in lines {
            headers.append(*name, value.parse().unwrap());
        }
        let client = "192.0.2.1".parse().unwrap();
        let verifier = Verifier::default();
        let asker = Asker {
            method: &Method::GET,
            host: "example.com",
            path: "/users/7",
            query: Some("a=1&b=x%26y&a=2"),
            headers: &headers,
            client,
            network: client,
            trusted,
            subject: None,
            caller: Ok(Caller::Missing),
            route: "r",
            pattern: &"/users/{id}".parse().unwrap(),
            bearer: Bearer::new(&verifier, &headers),
        };
        by.identify(&asker, &ApiKeys::default(), &IdentityHasher::new(""), &mut Encoder::default())
    }

    fn by(sources: &[Source], on_missing: OnMissing) -> By {
        By { sources: sources.to_vec(), on_missing, methods: Vec::new(), exempt: Exempt::default() }
    }

    #[test]
    fn a_user_header_counts_only_from_trusted_proxies() {
        let source = Source::User(HeaderName::from_static("x-user-id"));
        let user = by(std::slice::from_ref(&source), OnMissing::Reject);
        assert!(identify(&user, &[("x-user-id", "bob")], true).unwrap().is_some());
        let missing = IdentityError::Missing(source.clone());
        assert_eq!(identify(&user, &[("x-user-id", "bob")], false), Err(missing));
        let twice = identify(&user, &[("x-user-id", "bob"), ("x-user-id", "eve")], true);
        assert_eq!(twice, Err(IdentityError::Ambiguous(source)));
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

    #[test]
    fn cookies_and_query_parameters_are_found() {
        for (source, cookie, expected) in [
            (Source::Cookie("sid".into()), "a=b; sid=7", Ok(true)),
            (Source::Cookie("sid".into()), "xsid=7", Err("the cookie `sid` is needed")),
            (Source::Cookie("sid".into()), "sid=7; sid=8", Err("the cookie `sid` stands more than once")),
            (Source::Path("id".into()), "", Ok(true)),
            (Source::Query("b".into()), "", Ok(true)),
            (Source::Query("a".into()), "", Err("the query parameter `a` stands more than once")),
            (Source::Query("c".into()), "", Err("the query parameter `c` is needed")),
        ] {
            let found = identify(&by(std::slice::from_ref(&source), OnMissing::Reject), &[("cookie", cookie)], false);
            let found = found.map(|identity| identity.is_some()).map_err(|error| error.to_string());
            assert_eq!(found, expected.map_err(str::to_owned), "{source:?} of {cookie}");
        }
    }

    #[test]
    fn exempt_identities_and_other_methods_are_not_limited() {
        let header = Source::Header(HeaderName::from_static("x-a"));
        let exempt = |values: &[&str], networks: &[&str]| Exempt {
            values: values.iter().map(|value| (header.clone(), (*value).into())).collect(),
            networks: networks.iter().map(|net| net.parse().unwrap()).collect(),
        };
        for (source, exempt, methods, limited) in [
            (&header, exempt(&["7"], &[]), vec![], false),
            (&header, exempt(&["8"], &["192.0.2.0/24"]), vec![], true),
            (&Source::Ip, exempt(&["192.0.2.1"], &["192.0.2.0/24"]), vec![], false),
            (&Source::Ip, exempt(&[], &["198.51.100.0/24"]), vec![], true),
            (&Source::Ip, Exempt::default(), vec![Method::POST], false),
            (&Source::Ip, Exempt::default(), vec![Method::POST, Method::GET], true),
        ] {
            let by = By { methods, exempt, ..by(std::slice::from_ref(source), OnMissing::Reject) };
            let identity = identify(&by, &[("x-a", "7")], false).unwrap();
            assert_eq!(identity.is_some(), limited, "{by:?}");
        }
    }
}
