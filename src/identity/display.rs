//! Shows identities to administrators, and finds the identities that administrators enter.
//!
//! Values that may be secrets are never shown. These are unknown API keys, headers, cookies, query parameters and
//! values of JSON bodies. To select such an identity, administrators can enter its hash, or the value if they know it.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use crate::http::target;
use crate::identity::consumer::{Caller, ConsumerDirectory};
use crate::identity::spec::{
    ANONYMOUS_TAG, ClientIpResolver, Descriptor, IP_TAG, IdentityPart, IdentitySpec, OnMissing, RequestAttributes,
    RpcSource, cookie_value, octets,
};
use crate::limiter::key::{Identity, IdentityEncoder, IdentityHasher};

/// Maximum number of bytes to show of a value. Longer values are truncated, because clients may choose values of any
/// length.
const MAX_DISPLAY_BYTES: usize = 128;

/// Label for a client network that replaces an API key.
const ANONYMOUS_LABEL: &str = "anonymous";
const IP_LABEL: &str = "ip";

/// An identity to show to administrators, as a list of parts.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct IdentityDisplay(pub Arc<[DisplayPart]>);

/// A part of an identity to show to administrators.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DisplayPart {
    /// Label of the part in `by`, or the label of the client network if it replaces the part.
    pub label: Box<str>,
    /// Value of the part. `None` if the value may be a secret.
    pub value: Option<Box<str>>,
}

/// An identity that an administrator entered: a value for each label in `by`.
pub type IdentityInput = BTreeMap<String, String>;

/// The identity that an administrator's input refers to.
#[derive(Debug)]
pub struct ResolvedIdentity {
    /// Hash of the identity.
    pub identity: Identity,
    /// Caller that determines which variant of the limit applies.
    pub caller: Caller,
    /// Whether the identity is exempt from the limit.
    pub is_exempt: bool,
}

/// An error in the identity that an administrator entered.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum IdentityInputError {
    /// The administrator gave no value for a part of the identity.
    #[error("`{0}` is missing")]
    Missing(Cow<'static, str>),
    /// No consumer has this name.
    #[error("no consumer has this name")]
    UnknownConsumer,
    /// The value is not an IP address.
    #[error("`{0}` is not an IP address")]
    InvalidAddress(String),
}

impl Descriptor {
    /// Return the label of the descriptor in `by`.
    pub fn label(&self) -> Cow<'static, str> {
        match self {
            Descriptor::ApiKey => "api-key".into(),
            Descriptor::Group(level) => format!("group:{level}").into(),
            Descriptor::Ip => IP_LABEL.into(),
            Descriptor::User(name) => format!("user:{name}").into(),
            Descriptor::Header(name) => format!("header:{name}").into(),
            Descriptor::Cookie(name) => format!("cookie:{name}").into(),
            Descriptor::Query(name) => format!("query:{name}").into(),
            Descriptor::Path(name) => format!("path:{name}").into(),
            Descriptor::Jwt(name) => format!("jwt:{name}").into(),
            Descriptor::ClientCert => "client-cert".into(),
            Descriptor::Basic => "basic".into(),
            Descriptor::ClaimedUser => "basic:user".into(),
            Descriptor::Forward(name) => format!("auth:{name}").into(),
            Descriptor::Host => "host".into(),
            Descriptor::Method => "method".into(),
            Descriptor::Json(pointer) => format!("json:{pointer}").into(),
            Descriptor::Form(name) => format!("form:{name}").into(),
            Descriptor::Rpc(RpcSource::McpTool) => "mcp:tool".into(),
            Descriptor::Rpc(RpcSource::McpMethod) => "mcp:method".into(),
            Descriptor::Rpc(RpcSource::Method) => "jsonrpc:method".into(),
            Descriptor::Entry(key) => format!("entry:{key}").into(),
            Descriptor::Global => "global".into(),
            Descriptor::Route => "route".into(),
        }
    }

    /// Return whether this label refers to the descriptor. Header names are case-insensitive.
    pub fn matches_label(&self, label: &str) -> bool {
        match self {
            Descriptor::User(_) | Descriptor::Header(_) | Descriptor::Forward(_) => {
                self.label().eq_ignore_ascii_case(label)
            }
            _ => self.label() == label,
        }
    }
}

/// Return whether values with this tag may be shown. Values from trusted proxies and verified credentials identify a
/// client, but grant no access. Path parameters are also in the access log. Tools and methods are names in the
/// upstream's API.
fn is_public(tag: u8) -> bool {
    match tag {
        b'c' | b'x' | b'u' | b'p' | b'j' | b's' | b'b' | b'f' | b'n' | b'm' | b'g' | b'r' | b't' | b'v' => true,
        // All other tags are for values that may be secret: accepted API keys, headers, cookies, query parameters and
        // body values.
        _ => false,
    }
}

impl Descriptor {
    /// Return whether values of this descriptor may be shown. For API keys, the value is the consumer name.
    pub fn is_public(&self) -> bool {
        is_public(self.tag())
    }
}

impl IdentityDisplay {
    /// Return all values on one line. `placeholder` replaces values that may be secret.
    pub fn summary(&self, placeholder: &str) -> String {
        let value = |part: &DisplayPart| match (&*part.label, part.value.as_deref()) {
            ("global", _) => "all clients".to_owned(),
            (ANONYMOUS_LABEL, Some(value)) => format!("{ANONYMOUS_LABEL} {value}"),
            (_, value) => value.unwrap_or(placeholder).to_owned(),
        };
        self.0.iter().map(value).collect::<Vec<_>>().join(", ")
    }
}

impl IdentitySpec {
    /// Return the parts of an identity without their values.
    pub fn display_hidden(&self) -> IdentityDisplay {
        let part = |descriptor: &Descriptor| DisplayPart { label: descriptor.label().into(), value: None };
        IdentityDisplay(self.descriptors.iter().map(part).collect())
    }

    /// Return the identity of a request in the form that is shown to administrators.
    pub fn display(&self, request: &RequestAttributes<'_>, client_ip: &ClientIpResolver) -> IdentityDisplay {
        let network = |label: &str| DisplayPart {
            label: label.into(),
            value: Some(client_ip.format_network(request.client_address).into()),
        };
        let part_of = |descriptor: &Descriptor| match descriptor.extract(request) {
            Ok(IdentityPart::Value(tag, value)) => {
                DisplayPart { label: descriptor.label().into(), value: is_public(tag).then(|| display_value(&value)) }
            }
            Ok(IdentityPart::Address(ANONYMOUS_TAG)) => network(ANONYMOUS_LABEL),
            Ok(IdentityPart::Address(_) | IdentityPart::Missing(_)) => network(IP_LABEL),
            // The request has no identity, so show no value.
            Err(_) => DisplayPart { label: descriptor.label().into(), value: None },
        };
        IdentityDisplay(self.descriptors.iter().map(part_of).collect())
    }

    /// Return whether the label refers to a part of this identity.
    pub fn has_label(&self, label: &str) -> bool {
        let anonymous = || label == ANONYMOUS_LABEL && self.descriptors.contains(&Descriptor::ApiKey);
        let is_ip_fallback = || label == IP_LABEL && self.on_missing == OnMissing::Ip;
        self.descriptors.iter().any(|descriptor| descriptor.label() == label) || anonymous() || is_ip_fallback()
    }

    /// Return the identity that an administrator's input refers to.
    ///
    /// # Errors
    /// A part is missing or invalid.
    pub fn resolve(
        &self,
        input: &IdentityInput,
        client_ip: &ClientIpResolver,
        consumers: &ConsumerDirectory,
        hasher: &IdentityHasher,
    ) -> Result<ResolvedIdentity, IdentityInputError> {
        let address = |label: &'static str| {
            let text = input.get(label)?;
            // Also accept the form in which networks are shown, `ADDRESS/PREFIX`.
            let address = text.split_once('/').map_or(text.as_str(), |(address, _)| address).trim();
            Some(
                address
                    .parse::<IpAddr>()
                    .map(|address| address.to_canonical())
                    .map_err(|_| IdentityInputError::InvalidAddress(text.clone())),
            )
        };
        let mut encoder = IdentityEncoder::default();
        let mut caller = Caller::Missing;
        let mut is_exempt = false;
        // Client address for parts that are not client networks. `Exemptions::contains` does not use it for these
        // parts.
        let no_address = IpAddr::from([0; 4]);
        for descriptor in &self.descriptors {
            let value = input.get(&*descriptor.label()).map(String::as_str).filter(|value| !value.is_empty());
            let (tag, value, client) = match (descriptor, value) {
                (Descriptor::Ip, _) | (_, None) if *descriptor != Descriptor::Global => {
                    let anonymous = (*descriptor == Descriptor::ApiKey).then(|| address(ANONYMOUS_LABEL)).flatten();
                    let falls_back_to_ip = *descriptor == Descriptor::Ip || self.on_missing == OnMissing::Ip;
                    let (tag, client) = match anonymous {
                        Some(client) => {
                            caller = Caller::Anonymous;
                            (ANONYMOUS_TAG, client?)
                        }
                        None => {
                            let client = falls_back_to_ip.then(|| address(IP_LABEL)).flatten();
                            (IP_TAG, client.ok_or_else(|| IdentityInputError::Missing(descriptor.label()))??)
                        }
                    };
                    (tag, octets(client_ip.network(client)), client)
                }
                (Descriptor::ApiKey, Some(name)) => {
                    let consumer = consumers.find_by_name(name).ok_or(IdentityInputError::UnknownConsumer)?;
                    caller = Caller::Consumer(consumer.clone());
                    (descriptor.tag(), name.as_bytes().to_vec(), no_address)
                }
                // Convert the host to its canonical form, as for requests.
                (Descriptor::Host, Some(name)) => {
                    (descriptor.tag(), target::canonical_host(name).into_owned().into_bytes(), no_address)
                }
                (Descriptor::Cookie(_), Some(value)) => {
                    (descriptor.tag(), cookie_value(value.as_bytes()).into_owned(), no_address)
                }
                (_, value) => (descriptor.tag(), value.unwrap_or_default().as_bytes().to_vec(), no_address),
            };
            is_exempt |= self.exemptions.contains(descriptor, tag, &value, client);
            encoder.push(tag, &value);
        }
        Ok(ResolvedIdentity { identity: hasher.hash(encoder.as_bytes()), caller, is_exempt })
    }
}

/// Return a value as text, truncated to the maximum length.
fn display_value(value: &[u8]) -> Box<str> {
    let whole = String::from_utf8_lossy(value);
    let end = (0..=MAX_DISPLAY_BYTES.min(whole.len())).rev().find(|end| whole.is_char_boundary(*end)).unwrap_or(0);
    if end < whole.len() { format!("{}…", &whole[..end]).into() } else { whole.into() }
}
