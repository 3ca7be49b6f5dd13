//! Names of identities: what operators are shown of one, and which one they mean.
//!
//! What may be a secret is never shown: unknown API keys, header fields, cookies and query parameters have their values
//! left out. Operators mean such an identity by its hash, or by the value if they know it.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use super::api_key::{ApiKeys, Caller, Consumers};
use super::client_ip::ClientIp;
use super::source::cookie_value;
use super::{ANONYMOUS, Asker, By, IP, OnMissing, Part, Source, octets};
use crate::http::host;
use crate::limit::key::{Encoder, Identity, IdentityHasher};

/// Bytes of a value that are shown: whoever is limited may have chosen it.
const LONGEST: usize = 128;

/// The word for an address that stands in for an API key.
const ANONYMOUS_WORD: &str = "anonymous";
const IP_WORD: &str = "ip";

/// What operators are shown of an identity: its parts.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Name(pub Arc<[Shown]>);

/// What operators are shown of a part.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shown {
    /// Its word in `by`, or of what stands in for it.
    pub word: Box<str>,
    /// Its value; none = it may be a secret.
    pub value: Option<Box<str>>,
}

/// What operators say of an identity: values by the words of `by`.
pub type Said = BTreeMap<String, String>;

/// An identity that an operator means.
#[derive(Debug)]
pub struct Meant<'a> {
    /// Its hash.
    pub identity: Identity,
    /// Whose sizes it has.
    pub caller: Caller<'a>,
    /// Whether it is never limited.
    pub exempt: bool,
}

/// Why it is not known which identity is meant.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum Unclear {
    #[error("`{0}` is missing")]
    Missing(Cow<'static, str>),
    #[error("no consumer has this name")]
    Consumer,
    #[error("`{0}` is not an address")]
    Address(Cow<'static, str>),
}

impl Source {
    /// As `by` has it.
    pub fn word(&self) -> Cow<'static, str> {
        match self {
            Source::ApiKey => "api-key".into(),
            Source::Ip => IP_WORD.into(),
            Source::User(name) => format!("user:{name}").into(),
            Source::Header(name) => format!("header:{name}").into(),
            Source::Cookie(name) => format!("cookie:{name}").into(),
            Source::Query(name) => format!("query:{name}").into(),
            Source::Path(name) => format!("path:{name}").into(),
            Source::Jwt(name) => format!("jwt:{name}").into(),
            Source::ClientCert => "client-cert".into(),
            Source::Host => "host".into(),
            Source::Method => "method".into(),
            Source::Global => "global".into(),
            Source::Route => "route".into(),
        }
    }

    /// Whether `by` has it as this word; names of headers have no case.
    pub fn is_called(&self, word: &str) -> bool {
        match self {
            Source::User(_) | Source::Header(_) => self.word().eq_ignore_ascii_case(word),
            _ => self.word() == word,
        }
    }

    /// The tag of its values, but for addresses and what is no value of a consumer.
    pub(super) fn tag(&self) -> u8 {
        match self {
            Source::ApiKey => b'c',
            Source::Ip => IP,
            Source::User(_) => b'u',
            Source::Header(_) => b'h',
            Source::Cookie(_) => b'o',
            Source::Query(_) => b'q',
            Source::Path(_) => b'p',
            Source::Jwt(_) => b'j',
            Source::ClientCert => b's',
            Source::Host => b'n',
            Source::Method => b'm',
            Source::Global => b'g',
            Source::Route => b'r',
        }
    }
}

/// Whether values with this tag may be shown. What proxies and verified tokens say of a user names him and opens nothing;
/// paths stand in the access log as well.
fn is_public(tag: u8) -> bool {
    match tag {
        b'c' | b'u' | b'p' | b'j' | b's' | b'n' | b'm' | b'g' | b'r' => true,
        // An unknown API key, a header field, a cookie, a query parameter.
        _ => false,
    }
}

impl Source {
    /// Whether what a request says may be shown; of API keys, the consumer.
    pub fn is_public(&self) -> bool {
        is_public(self.tag())
    }
}

impl Name {
    /// Its values in a line; `instead` of those that may be secrets.
    pub fn line(&self, instead: &str) -> String {
        let value = |shown: &Shown| match (&*shown.word, shown.value.as_deref()) {
            ("global", _) => "everybody".to_owned(),
            (ANONYMOUS_WORD, Some(value)) => format!("{ANONYMOUS_WORD} {value}"),
            (_, value) => value.unwrap_or(instead).to_owned(),
        };
        self.0.iter().map(value).collect::<Vec<_>>().join(", ")
    }
}

impl By {
    /// What operators are shown of the identity of a request.
    pub fn name(&self, asker: &Asker<'_>, keys: &ApiKeys, addresses: &ClientIp) -> Name {
        let network =
            |word: &str| Shown { word: word.into(), value: Some(addresses.network_text(asker.client).into()) };
        let shown = |source: &Source| match source.part(asker, keys) {
            Ok(Part::Value(tag, value)) => {
                Shown { word: source.word().into(), value: is_public(tag).then(|| text(&value)) }
            }
            Ok(Part::Address(ANONYMOUS)) => network(ANONYMOUS_WORD),
            Ok(Part::Address(_) | Part::Missing(_)) => network(IP_WORD),
            // Such a request has no identity.
            Err(_) => Shown { word: source.word().into(), value: None },
        };
        Name(self.sources.iter().map(shown).collect())
    }

    /// Whether a part of an identity may be said by this word.
    pub fn knows(&self, word: &str) -> bool {
        let anonymous = || word == ANONYMOUS_WORD && self.sources.contains(&Source::ApiKey);
        let stand_in = || word == IP_WORD && self.on_missing == OnMissing::Ip;
        self.sources.iter().any(|source| source.word() == word) || anonymous() || stand_in()
    }

    /// The identity that an operator means.
    ///
    /// # Errors
    /// It is not clear which one.
    pub fn meant<'a>(
        &self,
        said: &Said,
        addresses: &ClientIp,
        consumers: &'a Consumers,
        hasher: &IdentityHasher,
    ) -> Result<Meant<'a>, Unclear> {
        let address = |word: &'static str| {
            let text = said.get(word)?;
            // As it is shown, too.
            let address = text.split_once('/').map_or(text.as_str(), |(address, _)| address).trim();
            Some(
                address
                    .parse::<IpAddr>()
                    .map(|address| address.to_canonical())
                    .map_err(|_| Unclear::Address(word.into())),
            )
        };
        let (mut encoder, mut caller, mut exempt) = (Encoder::default(), Caller::Missing, false);
        // Of parts that are no address.
        let nowhere = IpAddr::from([0; 4]);
        for source in &self.sources {
            let value = said.get(&*source.word()).map(String::as_str).filter(|value| !value.is_empty());
            let (tag, value, client) = match (source, value) {
                (Source::Ip, _) | (_, None) if *source != Source::Global => {
                    let anonymous = (*source == Source::ApiKey).then(|| address(ANONYMOUS_WORD)).flatten();
                    let stands_in = *source == Source::Ip || self.on_missing == OnMissing::Ip;
                    let (tag, client) = match anonymous {
                        Some(client) => {
                            caller = Caller::Anonymous;
                            (ANONYMOUS, client?)
                        }
                        None => {
                            let client = stands_in.then(|| address(IP_WORD)).flatten();
                            (IP, client.ok_or_else(|| Unclear::Missing(source.word()))??)
                        }
                    };
                    (tag, octets(addresses.network(client)), client)
                }
                (Source::ApiKey, Some(name)) => {
                    caller = Caller::Consumer(consumers.named(name).ok_or(Unclear::Consumer)?);
                    (source.tag(), name.as_bytes().to_vec(), nowhere)
                }
                // As they are when a request was routed.
                (Source::Host, Some(name)) => (source.tag(), host::canonical_host(name).into_owned().into_bytes(), nowhere),
                (Source::Cookie(_), Some(value)) => {
                    (source.tag(), cookie_value(value.as_bytes()).into_owned(), nowhere)
                }
                (_, value) => (source.tag(), value.unwrap_or_default().as_bytes().to_vec(), nowhere),
            };
            exempt |= self.exempt.covers(source, tag, &value, client);
            encoder.part(tag, &value);
        }
        Ok(Meant { identity: hasher.hash(encoder.bytes()), caller, exempt })
    }
}

/// The beginning of a value, as text.
fn text(value: &[u8]) -> Box<str> {
    let whole = String::from_utf8_lossy(value);
    let end = (0..=LONGEST.min(whole.len())).rev().find(|end| whole.is_char_boundary(*end)).unwrap_or(0);
    if end < whole.len() { format!("{}…", &whole[..end]).into() } else { whole.into() }
}
