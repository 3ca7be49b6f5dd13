//! Computes the identity of a request from its attributes. A limit keeps separate state for each identity.

use std::borrow::Cow;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use http::header::COOKIE;
use http::{HeaderMap, HeaderName, HeaderValue, Method};
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use percent_encoding::percent_decode;

use crate::identity::auth::{Credentials, TierSource};
use crate::identity::basic::claimed_user;
use crate::identity::consumer::{CONSUMER_TAG, Caller};
use crate::identity::verification::AuthError;
use crate::limiter::key::{Identity, IdentityEncoder, IdentityHasher};
use crate::payload::form::{FieldValue, has_similar_parameter};
use crate::payload::json::body::{JsonBody, JsonPointer, JsonValue, MAX_VALUE};
use crate::payload::json::rpc::{CountedMessages, Message};
use crate::routing::condition::query_values;
use crate::routing::pattern::PathPattern;

/// How to handle requests that lack a part of the identity.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnMissing {
    /// Reject the request.
    Reject,
    /// `on_missing = "skip"`: do not apply the limit.
    Skip,
    /// `on_missing = "ip"`: use the client network instead.
    Ip,
}

/// Defines how a limit computes the identity of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IdentitySpec {
    /// The parts of the identity, in order.
    pub descriptors: Vec<Descriptor>,
    /// How to handle requests that lack a part of the identity.
    pub on_missing: OnMissing,
    /// Whether the limit does not apply to requests that have no tool or method in a JSON-RPC message. `on_missing` has
    /// no effect on such requests.
    pub skips_other_messages: bool,
    /// HTTP methods to which the limit applies. An empty list means all methods.
    pub methods: Vec<Method>,
    /// Identities that are exempt from the limit.
    pub exemptions: Exemptions,
}

/// Identities that are exempt from a limit.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Exemptions {
    /// Exempt client networks. They are considered only if the identity contains the client network.
    pub networks: Vec<IpNet>,
    /// Exempt values, each with the descriptor to which it belongs. For API keys, the value is the name of a consumer.
    pub values: Vec<(Descriptor, Box<str>)>,
}

/// The attributes of a request from which the gateway computes identities.
#[derive(Debug)]
pub struct RequestAttributes<'a> {
    /// Method of the request.
    pub method: &'a Method,
    /// Host of the request, as used for routing.
    pub host: &'a str,
    /// Path of the request in canonical form.
    pub path: &'a str,
    /// Query of the request, without the `?`.
    pub query: Option<&'a str>,
    /// Request headers.
    pub headers: &'a HeaderMap,
    /// Address of the client.
    pub client_address: IpAddr,
    /// Client network: the client address, truncated to the prefix length.
    pub client_network: IpAddr,
    /// Whether the peer is a trusted proxy.
    pub is_from_trusted_proxy: bool,
    /// Subject of the client certificate. `None` if the connection has none.
    pub client_cert_subject: Option<&'a str>,
    /// The credentials that the providers of the route verified.
    pub credentials: &'a Credentials<'a>,
    /// Source of the request's tier.
    pub tier_source: &'a TierSource,
    /// Name of the route.
    pub route_name: &'a str,
    /// Path pattern of the route.
    pub path_pattern: &'a PathPattern,
    /// The values that were read from the request body. `None` if there is no body, or if it was not read.
    pub body: Option<&'a JsonBody>,
}

/// The reason why no identity can be computed for a request.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum IdentityError {
    /// The request has no API key. The text names the headers from which the provider reads keys.
    #[error("{0}")]
    MissingApiKey(Arc<str>),
    /// A part of the identity has several values in the request.
    #[error("the {0} is present more than once")]
    Ambiguous(Descriptor),
    /// The value of a part contains bytes that servers interpret differently.
    #[error("the {0} contains bytes that different servers interpret in different ways")]
    Malformed(Descriptor),
    /// The value in the body cannot be used as an identity, for the given reason.
    #[error("the {0} {1}")]
    Unusable(Descriptor, &'static str),
    /// The messages of a JSON-RPC batch have different values for a part of the identity.
    #[error("the batch has messages with different values of the {0}: send them in separate requests")]
    Mixed(Descriptor),
    /// The request has no value for a part of the identity.
    #[error("the {0} is required")]
    Missing(Descriptor),
}

impl IdentityError {
    /// Return whether the missing part is a credential. Such requests are rejected with 401.
    pub fn is_credential_error(&self) -> bool {
        match self {
            IdentityError::MissingApiKey(_) => true,
            IdentityError::Missing(descriptor) => descriptor.is_credential(),
            IdentityError::Ambiguous(_)
            | IdentityError::Malformed(_)
            | IdentityError::Unusable(..)
            | IdentityError::Mixed(_) => false,
        }
    }
}

/// The identity of a request, or the reason why the limit does not apply.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum IdentityLookup {
    /// The limit applies to this identity.
    Identity(Identity),
    /// The limit does not apply to the HTTP method of the request.
    OtherMethod,
    /// A part is missing, and the limit does not apply to such requests.
    Missing(IdentityError),
    /// The identity is exempt from the limit.
    Exempt,
}

impl IdentitySpec {
    /// Return whether the limit may charge requests before their credentials are verified. This is the case if the
    /// identity contains the client network or a trusted user header, and no credential. Otherwise, unauthenticated
    /// clients could use up a bucket of other clients, or choose a bucket.
    pub fn limits_unauthenticated(&self) -> bool {
        let is_client = |descriptor: &Descriptor| matches!(descriptor, Descriptor::Ip | Descriptor::User(_));
        self.descriptors.iter().any(is_client) && !self.descriptors.iter().any(Descriptor::is_credential)
    }

    /// Return whether the identity depends on the body of the request.
    pub fn reads_body(&self) -> bool {
        self.reads_json() || self.reads_form()
    }

    /// Return whether the identity depends on values or messages of a JSON body.
    pub fn reads_json(&self) -> bool {
        self.descriptors.iter().any(|descriptor| matches!(descriptor, Descriptor::Json(_) | Descriptor::Rpc(_)))
    }

    /// Return whether the identity depends on fields of a form in the body.
    pub fn reads_form(&self) -> bool {
        self.descriptors.iter().any(|descriptor| matches!(descriptor, Descriptor::Form(_)))
    }

    /// Return which JSON-RPC messages the limit charges. Return `None` if it charges each request once.
    pub fn counted_messages(&self) -> Option<CountedMessages> {
        let sources = self.descriptors.iter().filter_map(|descriptor| match descriptor {
            Descriptor::Rpc(source) => Some(source.counted()),
            _ => None,
        });
        // With descriptors for both tool and method, charge only tool calls, because each tool call also has a method.
        sources.reduce(|one, other| if one == CountedMessages::ToolCalls { one } else { other })
    }

    /// Return whether the identity depends on MCP messages. The MCP headers of a request must then match its body.
    pub fn is_mcp(&self) -> bool {
        let is_mcp = |source: &RpcSource| matches!(source, RpcSource::McpTool | RpcSource::McpMethod);
        self.descriptors.iter().any(|descriptor| matches!(descriptor, Descriptor::Rpc(source) if is_mcp(source)))
    }

    /// Return the identity that the entries of a descriptor have, or `None` if it is exempt. `value` returns the value of
    /// the entry with a key.
    pub fn identify_entries<'v>(
        &self,
        value: impl Fn(&str) -> &'v [u8],
        hasher: &IdentityHasher,
        encoder: &mut IdentityEncoder,
    ) -> Option<Identity> {
        encoder.clear();
        for descriptor in &self.descriptors {
            // All other parts are errors in the configuration of a descriptor.
            let value = if let Descriptor::Entry(key) = descriptor { value(key) } else { b"" };
            if self.exemptions.values.iter().any(|(of, exempt)| of == descriptor && exempt.as_bytes() == value) {
                return None;
            }
            encoder.push(descriptor.tag(), value);
        }
        Some(hasher.hash(encoder.as_bytes()))
    }

    /// Return the identity of a request, or `None` if the limit does not apply.
    ///
    /// # Errors
    /// A part is missing and `on_missing` is `reject`, or a part is ambiguous or invalid.
    pub fn identify(
        &self,
        request: &RequestAttributes<'_>,
        hasher: &IdentityHasher,
        encoder: &mut IdentityEncoder,
    ) -> Result<Option<Identity>, IdentityError> {
        Ok(match self.lookup(request, hasher, encoder)? {
            IdentityLookup::Identity(identity) => Some(identity),
            IdentityLookup::OtherMethod | IdentityLookup::Missing(_) | IdentityLookup::Exempt => None,
        })
    }

    /// Return the identity as [`IdentitySpec::identify`] does. If the limit does not apply, return the reason.
    ///
    /// # Errors
    /// See [`IdentitySpec::identify`].
    pub fn lookup(
        &self,
        request: &RequestAttributes<'_>,
        hasher: &IdentityHasher,
        encoder: &mut IdentityEncoder,
    ) -> Result<IdentityLookup, IdentityError> {
        if !self.methods.is_empty() && !self.methods.contains(request.method) {
            return Ok(IdentityLookup::OtherMethod);
        }
        if self.skips_other_messages {
            for descriptor in self.descriptors.iter().filter(|descriptor| matches!(descriptor, Descriptor::Rpc(_))) {
                if let IdentityPart::Missing(missing) = descriptor.extract(request)? {
                    return Ok(IdentityLookup::Missing(missing));
                }
            }
        }
        encoder.clear();
        for descriptor in &self.descriptors {
            let (tag, value) = match descriptor.extract(request)? {
                IdentityPart::Value(tag, value) => (tag, value),
                IdentityPart::Address(tag) => (tag, network_octets(request)),
                IdentityPart::Missing(missing) => match self.on_missing {
                    OnMissing::Reject => return Err(missing),
                    OnMissing::Skip => return Ok(IdentityLookup::Missing(missing)),
                    OnMissing::Ip => (IP_TAG, network_octets(request)),
                },
            };
            if self.exemptions.contains(descriptor, tag, &value, request.client_address) {
                return Ok(IdentityLookup::Exempt);
            }
            encoder.push(tag, &value);
        }
        Ok(IdentityLookup::Identity(hasher.hash(encoder.as_bytes())))
    }
}

impl Exemptions {
    /// Return whether a part is exempt. The tag distinguishes consumer names from unknown API keys, which clients
    /// choose.
    pub(super) fn contains(&self, descriptor: &Descriptor, tag: u8, value: &[u8], client: IpAddr) -> bool {
        match tag {
            IP_TAG | ANONYMOUS_TAG => self.networks.iter().any(|net| net.contains(&client)),
            _ if tag != descriptor.tag() => false,
            _ => self.values.iter().any(|(of, exempt)| of == descriptor && exempt.as_bytes() == value),
        }
    }
}

fn missing_api_key(credentials: &Credentials<'_>) -> IdentityError {
    match credentials.api_key_providers().next() {
        Some(keys) => IdentityError::MissingApiKey(keys.missing.clone()),
        None => IdentityError::Missing(Descriptor::ApiKey),
    }
}

fn network_octets(request: &RequestAttributes<'_>) -> Cow<'static, [u8]> {
    Cow::Owned(octets(request.client_network))
}

pub(super) fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    }
}

// === Descriptors: the parts of an identity, and how to extract them from requests ===

/// One part of an identity.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Descriptor {
    /// `api-key`: consumer of the API key.
    ApiKey,
    /// Group of the consumer of the API key at this level.
    Group(Box<str>),
    /// `ip`: the client network.
    Ip,
    /// Value of a header that trusted proxies set.
    User(HeaderName),
    /// Value of a header that the client sends.
    Header(HeaderName),
    /// Value of the cookie with this name.
    Cookie(Box<str>),
    /// Value of the query parameter with this name, after decoding.
    Query(Box<str>),
    /// Value of the route's path parameter with this name.
    Path(Box<str>),
    /// Value of the bearer token's claim with this name.
    Jwt(Box<str>),
    /// Subject of the client certificate.
    ClientCert,
    /// User name of Basic authentication.
    Basic,
    /// User name in the Basic credentials of the request, which the gateway does not verify.
    ClaimedUser,
    /// Value of a header from the authentication server.
    Forward(HeaderName),
    /// Host of the request, as used for routing.
    Host,
    /// Method of the request.
    Method,
    /// Value at this pointer in the JSON body.
    Json(JsonPointer),
    /// Value of the form field with this name in the body.
    Form(Box<str>),
    /// A part of a JSON-RPC message in the body.
    Rpc(RpcSource),
    /// Value of the entry with this key in a descriptor of Envoy's rate limit service.
    Entry(Box<str>),
    /// One identity for all clients.
    Global,
    /// Name of the route.
    Route,
}

/// A part of a JSON-RPC message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RpcSource {
    /// Tool that an MCP message calls.
    McpTool,
    /// Method of an MCP message.
    McpMethod,
    /// Method of any JSON-RPC message.
    Method,
}

impl RpcSource {
    fn counted(self) -> CountedMessages {
        match self {
            RpcSource::McpTool => CountedMessages::ToolCalls,
            RpcSource::McpMethod | RpcSource::Method => CountedMessages::Methods,
        }
    }

    fn value(self, message: &Message) -> Option<&str> {
        match self {
            RpcSource::McpTool => message.tool(),
            RpcSource::McpMethod | RpcSource::Method => message.method.as_deref(),
        }
    }
}

impl fmt::Display for Descriptor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Descriptor::ApiKey => f.write_str("API key"),
            Descriptor::Group(level) => write!(f, "{level} of the consumer"),
            Descriptor::Ip => f.write_str("address"),
            Descriptor::User(name) | Descriptor::Header(name) => write!(f, "header `{name}`"),
            Descriptor::Cookie(name) => write!(f, "cookie `{name}`"),
            Descriptor::Query(name) => write!(f, "query parameter `{name}`"),
            Descriptor::Path(name) => write!(f, "path parameter `{name}`"),
            Descriptor::Jwt(name) => write!(f, "claim `{name}` of a bearer token"),
            Descriptor::ClientCert => f.write_str("subject of a client certificate"),
            Descriptor::Basic => f.write_str("name of a user"),
            Descriptor::ClaimedUser => f.write_str("user name in the header `authorization`"),
            Descriptor::Forward(name) => write!(f, "header `{name}` of the authentication server"),
            Descriptor::Host => f.write_str("host"),
            Descriptor::Method => f.write_str("method"),
            Descriptor::Json(pointer) => write!(f, "JSON value `{pointer}`"),
            Descriptor::Form(name) => write!(f, "form field `{name}`"),
            Descriptor::Rpc(RpcSource::McpTool) => f.write_str("MCP tool"),
            Descriptor::Rpc(RpcSource::McpMethod) => f.write_str("MCP method"),
            Descriptor::Rpc(RpcSource::Method) => f.write_str("JSON-RPC method"),
            Descriptor::Entry(key) => write!(f, "entry `{key}` of a descriptor"),
            Descriptor::Global | Descriptor::Route => f.write_str("route"),
        }
    }
}

/// The value of a descriptor in a request.
pub(super) enum IdentityPart<'a> {
    Value(u8, Cow<'a, [u8]>),
    Address(u8),
    Missing(IdentityError),
}

/// Tags of the parts of an identity, one for each kind of part. Without tags, the consumer `1` would have the same
/// identity as a header with the value `1`.
pub(super) const IP_TAG: u8 = b'i';
pub(super) const ANONYMOUS_TAG: u8 = b'a';

/// Return a cookie value as servers decode it: without surrounding whitespace and quotes, and percent-decoded.
pub fn cookie_value(value: &[u8]) -> Cow<'_, [u8]> {
    percent_decode(unquoted(value)).into()
}

fn unquoted(value: &[u8]) -> &[u8] {
    let value = value.trim_ascii();
    value.strip_prefix(b"\"").and_then(|value| value.strip_suffix(b"\"")).unwrap_or(value)
}

/// Return whether all servers decode a cookie value in the same way. Python decodes `\164` in quotes, and JavaScript
/// removes no-break spaces. Go drops cookies with control characters, quotes, backslashes or non-ASCII bytes (RFC 6265
/// §4.1.1).
fn is_unambiguous_cookie_value(value: &[u8]) -> bool {
    unquoted(value).iter().all(|byte| matches!(byte, b' '..=b'~') && !matches!(byte, b'"' | b'\\'))
}

/// Remove the bytes that some servers ignore at the start of a cookie name: spaces, control characters and non-ASCII
/// bytes.
fn trim_start_of_cookie(bytes: &[u8]) -> &[u8] {
    let start = bytes.iter().position(u8::is_ascii_graphic).unwrap_or(bytes.len());
    bytes.get(start..).unwrap_or_default()
}

impl Descriptor {
    /// Return the header from which this part is read, if any client may send it. Headers with credentials are not
    /// included, because authentication providers read them.
    pub fn header(&self) -> Option<HeaderName> {
        match self {
            Descriptor::Header(name) => Some(name.clone()),
            Descriptor::Cookie(_) => Some(COOKIE),
            Descriptor::ApiKey
            | Descriptor::Group(_)
            | Descriptor::Jwt(_)
            | Descriptor::User(_)
            | Descriptor::Ip
            | Descriptor::Query(_)
            | Descriptor::Path(_)
            | Descriptor::ClientCert
            | Descriptor::Basic
            | Descriptor::Forward(_) => None,
            Descriptor::Host | Descriptor::Method | Descriptor::Global | Descriptor::Route => None,
            Descriptor::Json(_) | Descriptor::Form(_) | Descriptor::Rpc(_) | Descriptor::Entry(_) => None,
            // The upstream's scheme of the header, not this limit, decides who may send it.
            Descriptor::ClaimedUser => None,
        }
    }

    /// Return whether this part is a credential that the gateway verifies.
    pub(super) fn is_credential(&self) -> bool {
        match self {
            Descriptor::ApiKey
            | Descriptor::Group(_)
            | Descriptor::Jwt(_)
            | Descriptor::ClientCert
            | Descriptor::Basic
            | Descriptor::Forward(_) => true,
            Descriptor::Ip
            | Descriptor::User(_)
            | Descriptor::Header(_)
            | Descriptor::Cookie(_)
            | Descriptor::Query(_)
            | Descriptor::Path(_)
            | Descriptor::Host
            | Descriptor::Method
            | Descriptor::ClaimedUser
            | Descriptor::Json(_)
            | Descriptor::Form(_)
            | Descriptor::Rpc(_)
            | Descriptor::Entry(_)
            | Descriptor::Global
            | Descriptor::Route => false,
        }
    }

    /// Return the tag for values of this descriptor. Accepted API keys have a different tag, and so do client networks
    /// that replace another part.
    pub(super) fn tag(&self) -> u8 {
        match self {
            Descriptor::ApiKey => b'c',
            Descriptor::Group(_) => b'x',
            Descriptor::Ip => IP_TAG,
            Descriptor::User(_) => b'u',
            Descriptor::Header(_) => b'h',
            Descriptor::Cookie(_) => b'o',
            Descriptor::Query(_) => b'q',
            Descriptor::Path(_) => b'p',
            Descriptor::Jwt(_) => b'j',
            Descriptor::ClientCert => b's',
            Descriptor::Basic => b'b',
            Descriptor::Forward(_) => b'f',
            Descriptor::Host => b'n',
            Descriptor::Method => b'm',
            Descriptor::Json(_) => b'd',
            Descriptor::Form(_) => b'e',
            Descriptor::ClaimedUser => b'l',
            Descriptor::Rpc(RpcSource::McpTool) => b't',
            Descriptor::Rpc(RpcSource::McpMethod | RpcSource::Method) => b'v',
            Descriptor::Entry(_) => b'y',
            Descriptor::Global => b'g',
            Descriptor::Route => b'r',
        }
    }

    /// Return the value of this part in a request.
    ///
    /// # Errors
    /// The value is ambiguous or invalid.
    pub(super) fn extract<'a>(&self, request: &'a RequestAttributes<'_>) -> Result<IdentityPart<'a>, IdentityError> {
        let missing = || IdentityPart::Missing(IdentityError::Missing(self.clone()));
        // Reject several values for one name, because the upstream could use a different value than the gateway.
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
            Descriptor::ApiKey => Ok(match request.credentials.caller() {
                Caller::Consumer(consumer) => {
                    IdentityPart::Value(CONSUMER_TAG, Cow::Borrowed(consumer.name.as_bytes()))
                }
                Caller::Accepted(key) => IdentityPart::Value(b'k', Cow::Borrowed(key)),
                Caller::Anonymous => IdentityPart::Address(ANONYMOUS_TAG),
                Caller::Missing => IdentityPart::Missing(missing_api_key(request.credentials)),
            }),
            Descriptor::Group(level) => Ok(match request.credentials.caller() {
                Caller::Consumer(consumer) => consumer
                    .groups
                    .get(level)
                    .map_or_else(missing, |group| IdentityPart::Value(self.tag(), Cow::Borrowed(group.as_bytes()))),
                Caller::Accepted(_) | Caller::Anonymous => missing(),
                Caller::Missing => IdentityPart::Missing(missing_api_key(request.credentials)),
            }),
            Descriptor::Ip => Ok(IdentityPart::Address(IP_TAG)),
            Descriptor::User(_) if !request.is_from_trusted_proxy => Ok(missing()),
            Descriptor::User(name) => only(b'u', lines(name)),
            Descriptor::Header(name) => {
                let mut lines = lines(name);
                match lines.len() {
                    0 => Ok(missing()),
                    1 => Ok(IdentityPart::Value(b'h', lines.swap_remove(0))),
                    // Some servers use the first occurrence of a header, some the last, and some join all of them with
                    // commas.
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
                        // A cookie without `=` counts as a value, because some servers interpret it as an empty value.
                        [] => values.push(Cow::Borrowed(&b""[..])),
                        [b'=', value @ ..] => {
                            // Reject spaces around the name, because only some servers remove them.
                            let exact = rest.starts_with(b"=") && pair.starts_with(name.as_bytes());
                            if !exact || !is_unambiguous_cookie_value(value) {
                                return Err(IdentityError::Malformed(self.clone()));
                            }
                            values.push(cookie_value(value));
                        }
                        // The name of this cookie is longer, and only starts with the wanted name.
                        _ => {}
                    }
                }
                only(b'o', values)
            }
            Descriptor::Query(name) => only(b'q', query_values(request.query.unwrap_or_default(), name).collect()),
            Descriptor::Path(name) => only(
                b'p',
                request
                    .path_pattern
                    .capture(request.path, name)
                    .map(|value| Cow::Borrowed(value.as_bytes()))
                    .into_iter()
                    .collect(),
            ),
            Descriptor::Jwt(name) => Ok(match request.credentials.claims().and_then(|claims| claims.text(name)) {
                Some(Cow::Borrowed(text)) => IdentityPart::Value(b'j', Cow::Borrowed(text.as_bytes())),
                Some(Cow::Owned(text)) => IdentityPart::Value(b'j', Cow::Owned(text.into_bytes())),
                None => missing(),
            }),
            Descriptor::ClientCert => Ok(match request.client_cert_subject {
                Some(subject) => IdentityPart::Value(b's', Cow::Borrowed(subject.as_bytes())),
                None => missing(),
            }),
            Descriptor::Basic => Ok(match request.credentials.user() {
                Some(user) => IdentityPart::Value(b'b', Cow::Borrowed(user.as_bytes())),
                None => missing(),
            }),
            Descriptor::Forward(name) => Ok(match request.credentials.forward_header(name) {
                Some(value) => IdentityPart::Value(b'f', Cow::Borrowed(value)),
                None => missing(),
            }),
            Descriptor::Host => only(b'n', vec![Cow::Borrowed(request.host.as_bytes())]),
            Descriptor::Method => Ok(IdentityPart::Value(b'm', Cow::Borrowed(request.method.as_str().as_bytes()))),
            Descriptor::ClaimedUser => self.extract_claimed_user(request.headers),
            Descriptor::Form(name) => self.extract_form(name, request),
            Descriptor::Json(pointer) => self.extract_json(request.body.and_then(|body| body.value(pointer))),
            Descriptor::Rpc(source) => {
                let messages = request.body.and_then(|body| body.messages.as_ref()?.as_ref().ok());
                let mut values = messages.iter().flat_map(|all| &all.list).filter_map(|message| source.value(message));
                let Some(value) = values.next() else { return Ok(missing()) };
                match values.all(|other| other == value) {
                    true => Ok(IdentityPart::Value(self.tag(), Cow::Borrowed(value.as_bytes()))),
                    false => Err(IdentityError::Mixed(self.clone())),
                }
            }
            // Requests on a route have no descriptor, and the limits of routes have no such part.
            Descriptor::Entry(_) => Ok(missing()),
            Descriptor::Global => Ok(IdentityPart::Value(b'g', Cow::Borrowed(b""))),
            Descriptor::Route => Ok(IdentityPart::Value(b'r', Cow::Borrowed(request.route_name.as_bytes()))),
        }
    }
}

impl Descriptor {
    /// Return the user name in the header Authorization.
    fn extract_claimed_user<'a>(&self, headers: &HeaderMap) -> Result<IdentityPart<'a>, IdentityError> {
        match claimed_user(headers) {
            Ok(Some(user)) => Ok(IdentityPart::Value(self.tag(), Cow::Owned(user))),
            Ok(None) => Ok(IdentityPart::Missing(IdentityError::Missing(self.clone()))),
            Err(AuthError::Ambiguous(_)) => Err(IdentityError::Ambiguous(self.clone())),
            Err(_) => Err(IdentityError::Malformed(self.clone())),
        }
    }

    fn extract_form<'a>(
        &self,
        name: &str,
        request: &'a RequestAttributes<'_>,
    ) -> Result<IdentityPart<'a>, IdentityError> {
        let unusable = |reason| Err(IdentityError::Unusable(self.clone(), reason));
        let form = request.body.and_then(|body| body.form.as_ref());
        // Some servers read a query parameter instead of a field with the same name.
        if form.is_some() && has_similar_parameter(request.query.unwrap_or_default(), name) {
            return unusable("is also a query parameter");
        }
        match form.and_then(|form| form.value(name)) {
            None => Ok(IdentityPart::Missing(IdentityError::Missing(self.clone()))),
            Some(FieldValue::Text(text)) => Ok(IdentityPart::Value(self.tag(), Cow::Borrowed(text.as_bytes()))),
            Some(FieldValue::TooLong) => unusable(TOO_LONG),
            Some(FieldValue::Ambiguous) => unusable(
                "is ambiguous: it occurs twice or in a different spelling (such as another case), is a file, or \
                 contains control characters",
            ),
        }
    }

    fn extract_json<'a>(&self, value: Option<&'a JsonValue>) -> Result<IdentityPart<'a>, IdentityError> {
        let unusable = |reason| Err(IdentityError::Unusable(self.clone(), reason));
        let Some(value) = value else { return Ok(IdentityPart::Missing(IdentityError::Missing(self.clone()))) };
        let text = match value {
            JsonValue::Text(text) => Cow::Borrowed(text.as_bytes()),
            JsonValue::Integer(_) | JsonValue::Bool(_) => {
                Cow::Owned(value.text().unwrap_or_default().into_owned().into_bytes())
            }
            JsonValue::Null | JsonValue::Compound | JsonValue::Fraction => {
                return unusable("is not a string, an integer of 64 bits, true or false");
            }
            JsonValue::TooLong => return unusable(TOO_LONG),
            JsonValue::Ambiguous(_) => {
                return unusable(
                    "is ambiguous: a member on its path occurs twice, or in a different spelling (such as another \
                     case)",
                );
            }
        };
        Ok(IdentityPart::Value(self.tag(), text))
    }
}

/// Error text for a value that is too long to be used as an identity.
const TOO_LONG: &str = "is longer than 1024 bytes";
const _: () = assert!(MAX_VALUE == 1024);

// === Client addresses: the peer's address, or the address of an earlier hop that a trusted proxy reports ===

/// Trusted proxies, the header that lists the hops, and the prefix lengths of client networks.
#[derive(Debug, PartialEq, Eq)]
pub struct ClientIpResolver {
    /// Networks of trusted proxies.
    pub trusted_proxies: Vec<IpNet>,
    /// Header in which proxies report the addresses of the client and of earlier proxies.
    pub header: HeaderName,
    /// Prefix length of an IPv4 client network.
    pub ipv4_prefix: u8,
    /// Prefix length of an IPv6 client network. IPv6 subscribers usually have a /64 network.
    pub ipv6_prefix: u8,
}

impl ClientIpResolver {
    /// Return whether the address is that of a trusted proxy.
    pub fn is_trusted(&self, address: IpAddr) -> bool {
        self.trusted_proxies.iter().any(|net| net.contains(&address))
    }

    /// Return the client address: read the hops from right to left, and return the first address that is not a trusted
    /// proxy. If an element is invalid, return the hop to its right, which is the proxy that added the element.
    pub fn client_address(&self, peer: IpAddr, headers: &HeaderMap) -> IpAddr {
        match self.is_trusted(peer) {
            true => self.hops(peer, headers.get_all(&self.header).iter().rev()).0,
            false => peer,
        }
    }

    /// Return the client address that these lines report, and whether their last element is an address.
    fn hops<'h>(&self, peer: IpAddr, lines: impl Iterator<Item = &'h HeaderValue>) -> (IpAddr, bool) {
        let mut client = peer;
        let mut is_reported = false;
        for line in lines {
            // Split bytes instead of text. Otherwise, non-ASCII bytes from a client could hide the elements that
            // proxies appended.
            for element in line.as_bytes().rsplit(|byte| *byte == b',') {
                let Some(hop) = self.hop(element) else { return (client, is_reported) };
                client = hop;
                is_reported = true;
                if !self.is_trusted(hop) {
                    return (client, is_reported);
                }
            }
        }
        (client, is_reported)
    }

    /// Return the address in an element of the header, or `None` if the element is invalid.
    fn hop(&self, element: &[u8]) -> Option<IpAddr> {
        let element = std::str::from_utf8(element).ok().filter(|element| element.is_ascii());
        let hop = if self.header == http::header::FORWARDED { element.and_then(forwarded_for) } else { element };
        hop.and_then(parse_address)
    }

    /// Return the client address that a trusted proxy reports, as [`client_address`](Self::client_address) does. Return `None` if the header is
    /// missing or repeated, or if its last element is no address, so that the peer did not report its client.
    pub fn reported_address(&self, peer: IpAddr, headers: &HeaderMap) -> Option<IpAddr> {
        let mut lines = headers.get_all(&self.header).iter();
        let line = lines.next().filter(|_| lines.next().is_none())?;
        let (address, is_reported) = self.hops(peer, std::iter::once(line));
        is_reported.then_some(address)
    }

    /// Return the client network that contains an address.
    pub fn network(&self, address: IpAddr) -> IpAddr {
        // The configuration was validated, so the prefix lengths are valid.
        match address {
            IpAddr::V4(address) => Ipv4Net::new(address, self.ipv4_prefix).map_or(address, |net| net.network()).into(),
            IpAddr::V6(address) => Ipv6Net::new(address, self.ipv6_prefix).map_or(address, |net| net.network()).into(),
        }
    }

    /// Format the client network of an address. If the prefix is shorter than the address, use CIDR notation.
    pub fn format_network(&self, address: IpAddr) -> String {
        let (prefix, whole) = match address {
            IpAddr::V4(_) => (self.ipv4_prefix, 32),
            IpAddr::V6(_) => (self.ipv6_prefix, 128),
        };
        let network = self.network(address);
        if prefix == whole { network.to_string() } else { format!("{network}/{prefix}") }
    }
}

/// Return the `for` parameter of a Forwarded element (RFC 7239 §4).
fn forwarded_for(element: &str) -> Option<&str> {
    // Reject an unbalanced quote: the element is only a part of a quoted value that contains a comma. The client may
    // have chosen this value, for example as its host.
    if element.contains('\\') || !element.matches('"').count().is_multiple_of(2) {
        return None;
    }
    element.split(';').find_map(|pair| {
        let (name, value) = pair.split_once('=')?;
        name.trim().eq_ignore_ascii_case("for").then(|| value.trim().trim_matches('"'))
    })
}

/// Parse `192.0.2.1`, `192.0.2.1:80`, `2001:db8::1`, `[2001:db8::1]` or `[2001:db8::1]:80`. Convert IPv4-mapped
/// addresses to IPv4.
fn parse_address(text: &str) -> Option<IpAddr> {
    let text = text.trim();
    let plain = || text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(text).parse().ok();
    let address = plain().or_else(|| text.parse::<SocketAddr>().ok().map(|socket| socket.ip()))?;
    Some(address.to_canonical())
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use http::HeaderValue;

    use super::*;

    fn identify(
        by: &IdentitySpec,
        lines: &[(&'static str, &str)],
        trusted: bool,
    ) -> Result<Option<Identity>, IdentityError> {
        let mut headers = HeaderMap::new();
        for (name, value) in lines {
            headers.append(*name, value.parse().unwrap());
        }
        let client = "192.0.2.1".parse().unwrap();
        let attributes = RequestAttributes {
            method: &Method::GET,
            host: "example.com",
            path: "/users/7",
            query: Some("a=1&b=x%26y&a=2"),
            headers: &headers,
            client_address: client,
            client_network: client,
            is_from_trusted_proxy: trusted,
            client_cert_subject: None,
            credentials: &Credentials::default(),
            tier_source: &TierSource::default(),
            route_name: "r",
            path_pattern: &"/users/{id}".parse().unwrap(),
            body: None,
        };
        by.identify(&attributes, &IdentityHasher::new(""), &mut IdentityEncoder::default())
    }

    fn by(descriptors: &[Descriptor], on_missing: OnMissing) -> IdentitySpec {
        IdentitySpec {
            descriptors: descriptors.to_vec(),
            on_missing,
            skips_other_messages: false,
            methods: Vec::new(),
            exemptions: Exemptions::default(),
        }
    }

    #[test]
    fn user_header_is_used_only_from_trusted_proxies() {
        let descriptor = Descriptor::User(HeaderName::from_static("x-user-id"));
        let user = by(std::slice::from_ref(&descriptor), OnMissing::Reject);
        assert!(identify(&user, &[("x-user-id", "bob")], true).unwrap().is_some());
        let missing = IdentityError::Missing(descriptor.clone());
        assert_eq!(identify(&user, &[("x-user-id", "bob")], false), Err(missing));
        let twice = identify(&user, &[("x-user-id", "bob"), ("x-user-id", "eve")], true);
        assert_eq!(twice, Err(IdentityError::Ambiguous(descriptor)));
    }

    #[test]
    fn parts_with_equal_concatenation_are_different_identities() {
        let pair = |one, other| {
            let names = [HeaderName::from_static("x-a"), HeaderName::from_static("x-b")].map(Descriptor::Header);
            identify(&by(&names, OnMissing::Reject), &[("x-a", one), ("x-b", other)], false).unwrap()
        };
        let all: HashSet<_> = [("ab", "c"), ("a", "bc"), ("abc", ""), ("", "abc")].map(|(a, b)| pair(a, b)).into();
        assert_eq!(all.len(), 4);
    }

    #[test]
    fn missing_part_is_rejected_skipped_or_replaced() {
        let named = |on_missing| by(&[Descriptor::Header(HeaderName::from_static("x-a"))], on_missing);
        assert!(identify(&named(OnMissing::Reject), &[], false).is_err());
        assert_eq!(identify(&named(OnMissing::Skip), &[], false), Ok(None));
        let ip = identify(&by(&[Descriptor::Ip], OnMissing::Reject), &[], false);
        assert_eq!(identify(&named(OnMissing::Ip), &[], false), ip);
    }

    #[test]
    fn single_cookies_and_query_parameters_are_identities() {
        for (descriptor, cookie, expected) in [
            (Descriptor::Cookie("sid".into()), "a=b; sid=7", Ok(true)),
            (Descriptor::Cookie("sid".into()), "xsid=7", Err("the cookie `sid` is required")),
            (Descriptor::Cookie("sid".into()), "sid=7; sid=8", Err("the cookie `sid` is present more than once")),
            (Descriptor::Path("id".into()), "", Ok(true)),
            (Descriptor::Query("b".into()), "", Ok(true)),
            (Descriptor::Query("a".into()), "", Err("the query parameter `a` is present more than once")),
            (Descriptor::Query("c".into()), "", Err("the query parameter `c` is required")),
        ] {
            let found =
                identify(&by(std::slice::from_ref(&descriptor), OnMissing::Reject), &[("cookie", cookie)], false);
            let found = found.map(|identity| identity.is_some()).map_err(|error| error.to_string());
            assert_eq!(found, expected.map_err(str::to_owned), "{descriptor:?} of {cookie}");
        }
    }

    #[test]
    fn exempt_identities_and_other_methods_are_not_limited() {
        let header = Descriptor::Header(HeaderName::from_static("x-a"));
        let exemptions = |values: &[&str], networks: &[&str]| Exemptions {
            values: values.iter().map(|value| (header.clone(), (*value).into())).collect(),
            networks: networks.iter().map(|net| net.parse().unwrap()).collect(),
        };
        for (descriptor, exemptions, methods, limited) in [
            (&header, exemptions(&["7"], &[]), vec![], false),
            (&header, exemptions(&["8"], &["192.0.2.0/24"]), vec![], true),
            (&Descriptor::Ip, exemptions(&["192.0.2.1"], &["192.0.2.0/24"]), vec![], false),
            (&Descriptor::Ip, exemptions(&[], &["198.51.100.0/24"]), vec![], true),
            (&Descriptor::Ip, Exemptions::default(), vec![Method::POST], false),
            (&Descriptor::Ip, Exemptions::default(), vec![Method::POST, Method::GET], true),
        ] {
            let spec = IdentitySpec { methods, exemptions, ..by(std::slice::from_ref(descriptor), OnMissing::Reject) };
            let identity = identify(&spec, &[("x-a", "7")], false).unwrap();
            assert_eq!(identity.is_some(), limited, "{spec:?}");
        }
    }

    fn resolver(header: &'static str) -> ClientIpResolver {
        ClientIpResolver {
            trusted_proxies: vec!["10.0.0.0/8".parse().unwrap(), "::1/128".parse().unwrap()],
            header: HeaderName::from_static(header),
            ipv4_prefix: 32,
            ipv6_prefix: 64,
        }
    }

    #[test]
    fn client_is_the_rightmost_untrusted_hop() {
        for (peer, lines, expected) in [
            ("192.0.2.1", vec!["1.1.1.1"], "192.0.2.1"),
            ("10.0.0.1", vec![], "10.0.0.1"),
            ("10.0.0.1", vec!["1.1.1.1, 2.2.2.2"], "2.2.2.2"),
            ("10.0.0.1", vec!["1.1.1.1, 2.2.2.2, 10.0.0.2"], "2.2.2.2"),
            ("10.0.0.1", vec!["1.1.1.1", "2.2.2.2, 10.0.0.2"], "2.2.2.2"),
            ("10.0.0.1", vec!["10.0.0.3, 10.0.0.2"], "10.0.0.3"),
            ("10.0.0.1", vec!["1.1.1.1, junk, 10.0.0.2"], "10.0.0.2"),
            ("10.0.0.1", vec!["1.1.1.1,"], "10.0.0.1"),
            ("10.0.0.1", vec!["::ffff:1.2.3.4"], "1.2.3.4"),
            ("10.0.0.1", vec!["1.2.3.4:5678"], "1.2.3.4"),
            ("10.0.0.1", vec!["[2001:db8::1]:443"], "2001:db8::1"),
            ("10.0.0.1", vec!["2001:db8::1"], "2001:db8::1"),
            ("10.0.0.1", vec!["\u{e9}, 2.2.2.2, 10.0.0.2"], "2.2.2.2"),
            ("10.0.0.1", vec!["2.2.2.2, \u{a0}3.3.3.3"], "10.0.0.1"),
        ] {
            let mut headers = HeaderMap::new();
            for line in &lines {
                headers.append("x-forwarded-for", HeaderValue::from_bytes(line.as_bytes()).unwrap());
            }
            let client = resolver("x-forwarded-for").client_address(peer.parse().unwrap(), &headers);
            assert_eq!(client, expected.parse::<IpAddr>().unwrap(), "{peer} {lines:?}");
        }
    }

    #[test]
    fn forwarded_elements_are_parsed() {
        for (line, expected) in [
            ("for=1.1.1.1;proto=https, for=2.2.2.2", "2.2.2.2"),
            ("For=\"[2001:db8::1]:80\"", "2001:db8::1"),
            ("for=_hidden", "10.0.0.1"),
            ("proto=https", "10.0.0.1"),
            ("for=2.2.2.2;host=\"a, for=3.3.3.3;x\"", "10.0.0.1"),
            ("for=2.2.2.2;host=\"a, for=3.3.3.3;x=\\\"\"", "10.0.0.1"),
            ("for=\"1.1.1.1, for=2.2.2.2", "2.2.2.2"),
        ] {
            let headers = HeaderMap::from_iter([(http::header::FORWARDED, line.parse().unwrap())]);
            let client = resolver("forwarded").client_address("10.0.0.1".parse().unwrap(), &headers);
            assert_eq!(client, expected.parse::<IpAddr>().unwrap(), "{line}");
        }
    }

    #[test]
    fn addresses_are_reduced_to_networks() {
        let rules = resolver("x-forwarded-for");
        for (address, network) in [("192.0.2.77", "192.0.2.77"), ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::")] {
            assert_eq!(rules.network(address.parse().unwrap()), network.parse::<IpAddr>().unwrap());
            let text = if network.contains(':') { format!("{network}/64") } else { network.to_owned() };
            assert_eq!(rules.format_network(address.parse().unwrap()), text);
        }
    }
}
