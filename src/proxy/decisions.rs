//! Decisions about requests that other proxies describe (`protocol = "decisions"`): the description in the headers of
//! the proxy, and the response that admits the request.
//!
//! The path of a request for a decision selects the headers that describe the client's request. The proxy chooses this
//! path, so a client cannot describe another request by headers that the proxy does not set.

use std::mem;
use std::net::IpAddr;
use std::time::Duration;

use http::header::{Entry, HOST};
use http::uri::{PathAndQuery, Uri};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode};
use tracing::warn;

use crate::clock::LogThrottle;
use crate::http::body::Body;
use crate::http::headers;
use crate::http::headers::{X_FORWARDED_HOST, X_FORWARDED_PROTO};
use crate::http::request_body;
use crate::http::request_body::RequestBody;
use crate::http::target::received_host;
use crate::proxy::admission::Admitted;
use crate::proxy::forward::RequestVariables;
use crate::proxy::rejection::{DescriptionError, Rejection};
use crate::proxy::request::Peer;
use crate::snapshot::CompiledConfig;
use crate::snapshot::decisions::DecisionSettings;
use crate::snapshot::route_action::{DirectResponse, RouteAction};

const X_FORWARDED_METHOD: HeaderName = HeaderName::from_static("x-forwarded-method");
const X_FORWARDED_URI: HeaderName = HeaderName::from_static("x-forwarded-uri");
const X_ORIGINAL_METHOD: HeaderName = HeaderName::from_static("x-original-method");
const X_ORIGINAL_URI: HeaderName = HeaderName::from_static("x-original-uri");

/// Name of the header with the status of the decision, if it denies the request.
const X_DECISION_STATUS: HeaderName = HeaderName::from_static("x-decision-status");

/// Headers that Envoy removes from the request before it forwards the request.
pub(super) const X_ENVOY_AUTH_HEADERS_TO_REMOVE: HeaderName = HeaderName::from_static("x-envoy-auth-headers-to-remove");

/// Minimum interval between log records about proxies that describe no request.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// Where the description of the client's request is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Endpoint {
    /// `/decide/forwarded`: in `X-Forwarded-Method` and `X-Forwarded-Uri`.
    Forwarded,
    /// `/decide/original`: in `X-Original-Method` and `X-Original-URI`.
    Original,
    /// `/decide/request/…`: in the request for the decision itself, after the prefix of its path.
    Request,
}

impl Endpoint {
    fn of(uri: &Uri) -> Self {
        match uri.path() {
            "/decide/forwarded" => Endpoint::Forwarded,
            "/decide/original" => Endpoint::Original,
            _ => Endpoint::Request,
        }
    }
}

/// A request that a proxy describes.
pub(super) struct Description {
    /// The described request, without a body.
    pub(super) request: Request<RequestBody>,
    /// The client that sent the described request. `None` if the proxy described no request.
    pub(super) client: Option<Peer>,
    pub(super) endpoint: Endpoint,
    /// The reason why the proxy described no request.
    pub(super) error: Option<DescriptionError>,
}

impl Description {
    /// Read the description in a request for a decision.
    pub(super) fn read(received: &mut Request<RequestBody>, peer: &Peer, config: &CompiledConfig) -> Self {
        let described = ClientRequest::read(received, peer, config);
        Description::new(described, received, peer, config)
    }

    /// Create the description of a request, or of a request for a decision that describes none.
    pub(super) fn new<B>(
        described: Result<ClientRequest, DescriptionError>,
        received: &Request<B>,
        peer: &Peer,
        config: &CompiledConfig,
    ) -> Self {
        let mut request = Request::new(RequestBody::empty());
        match described {
            Ok(described) => {
                let ClientRequest { method, target, headers, host, scheme, address, endpoint } = described;
                *request.method_mut() = method;
                *request.uri_mut() = Uri::from(target);
                *request.headers_mut() = described_headers(headers, host, config);
                let client = Some(client(address, scheme, peer.listener, config));
                Description { request, client, endpoint, error: None }
            }
            Err(error) => {
                request.method_mut().clone_from(received.method());
                request.uri_mut().clone_from(received.uri());
                // Keep the default version. With HTTP/2, the denial of a call of Envoy would be an error of gRPC.
                request.headers_mut().clone_from(received.headers());
                Description { request, client: None, endpoint: Endpoint::Request, error: Some(error) }
            }
        }
    }
}

/// The request of a client, as a proxy describes it.
pub(super) struct ClientRequest {
    pub(super) method: Method,
    pub(super) target: PathAndQuery,
    pub(super) headers: HeaderMap,
    pub(super) host: HeaderValue,
    pub(super) scheme: &'static str,
    pub(super) address: IpAddr,
    pub(super) endpoint: Endpoint,
}

impl ClientRequest {
    fn read(
        received: &mut Request<RequestBody>,
        peer: &Peer,
        config: &CompiledConfig,
    ) -> Result<Self, DescriptionError> {
        check_proxy(peer, received.headers(), config)?;
        let endpoint = Endpoint::of(received.uri());
        // A request whose body is still unread keeps its headers, because `Expect` determines how the body is discarded.
        let mut headers = match request_body::has_unread_body(received) {
            true => received.headers().clone(),
            false => mem::take(received.headers_mut()),
        };
        let described = ClientRequest::take(endpoint, &mut headers, received, peer, config);
        match described {
            Ok(described) => Ok(ClientRequest { headers, ..described }),
            Err(error) => {
                *received.headers_mut() = headers;
                Err(error)
            }
        }
    }

    /// Take the description out of the headers of a request for a decision. Return it without headers.
    fn take(
        endpoint: Endpoint,
        headers: &mut HeaderMap,
        received: &Request<RequestBody>,
        peer: &Peer,
        config: &CompiledConfig,
    ) -> Result<Self, DescriptionError> {
        let method = match endpoint {
            Endpoint::Forwarded => header_method(headers, X_FORWARDED_METHOD)?,
            Endpoint::Original => header_method(headers, X_ORIGINAL_METHOD)?,
            Endpoint::Request => received.method().clone(),
        };
        let target = match endpoint {
            Endpoint::Forwarded => header_target(headers, X_FORWARDED_URI)?,
            Endpoint::Original => header_target(headers, X_ORIGINAL_URI)?,
            Endpoint::Request => own_target(received.uri())?,
        };
        let host = match endpoint {
            Endpoint::Forwarded | Endpoint::Original => take_single(headers, X_FORWARDED_HOST, HOST_OF_CLIENT)?,
            Endpoint::Request => {
                received_host(received.uri(), headers).ok_or(DescriptionError::Header(HOST, HOST_OF_CLIENT))?
            }
        };
        let value = take_single(headers, X_FORWARDED_PROTO, SCHEME_OF_CLIENT)?;
        let scheme = scheme(value.as_bytes()).ok_or(DescriptionError::Header(X_FORWARDED_PROTO, SCHEME_OF_CLIENT))?;
        let client_ip = &config.client_ip;
        let address = client_ip
            .reported_address(peer.address, headers)
            .ok_or_else(|| DescriptionError::Header(client_ip.header.clone(), "the address of the client"))?;
        Ok(ClientRequest { method, target, headers: HeaderMap::new(), host, scheme, address, endpoint })
    }
}

/// Check that the peer may ask for decisions, and that the client's headers cannot be mistaken for identity headers.
pub(super) fn check_proxy(peer: &Peer, headers: &HeaderMap, config: &CompiledConfig) -> Result<(), DescriptionError> {
    peer.check_listener(config)?;
    if !peer.forwarded.trusted {
        return Err(DescriptionError::NotTrusted);
    }
    let settings = settings(config, peer.listener);
    if settings.is_some_and(|settings| settings.settle_timeout.is_some()) {
        return Err(DescriptionError::OnlyPrograms);
    }
    check_headers(headers, settings)
}

/// Check that servers cannot mistake a header of the client for an identity header.
pub(super) fn check_headers(headers: &HeaderMap, settings: Option<&DecisionSettings>) -> Result<(), DescriptionError> {
    match settings.and_then(|settings| settings.forged_header(headers)) {
        Some(name) => Err(DescriptionError::Forged(name.clone())),
        None => Ok(()),
    }
}

/// Return the settings of the listener with this index.
pub(super) fn settings(config: &CompiledConfig, listener: usize) -> Option<&DecisionSettings> {
    config.listeners.get(listener)?.decisions.as_deref()
}

const HOST_OF_CLIENT: &str = "the host that the client requested";
const METHOD_OF_CLIENT: &str = "the method of the client";
const TARGET_OF_CLIENT: &str = "the path and query of the client, which start with `/` and have no fragment";
const SCHEME_OF_CLIENT: &str = "`http` or `https`";

/// Take the only value of a header.
fn take_single(
    headers: &mut HeaderMap,
    name: HeaderName,
    content: &'static str,
) -> Result<HeaderValue, DescriptionError> {
    let (first, is_repeated) = match headers.entry(&name) {
        Entry::Vacant(_) => (None, false),
        Entry::Occupied(entry) => {
            let mut values = entry.remove_entry_mult().1;
            (values.next(), values.next().is_some())
        }
    };
    first.filter(|value| !is_repeated && !value.is_empty()).ok_or(DescriptionError::Header(name, content))
}

fn header_method(headers: &mut HeaderMap, name: HeaderName) -> Result<Method, DescriptionError> {
    let value = take_single(headers, name.clone(), METHOD_OF_CLIENT)?;
    Method::from_bytes(value.as_bytes()).map_err(|_| DescriptionError::Header(name, METHOD_OF_CLIENT))
}

fn header_target(headers: &mut HeaderMap, name: HeaderName) -> Result<PathAndQuery, DescriptionError> {
    let value = take_single(headers, name.clone(), TARGET_OF_CLIENT)?;
    target(value.as_bytes()).ok_or(DescriptionError::Header(name, TARGET_OF_CLIENT))
}

/// Parse a target in origin form (RFC 9112 §3.2.1).
pub(super) fn target(value: &[u8]) -> Option<PathAndQuery> {
    // The parser drops a fragment, but the application would get it.
    let is_origin_form = value.starts_with(b"/") && !value.contains(&b'#');
    if is_origin_form { PathAndQuery::try_from(value).ok() } else { None }
}

/// Return the path and query of a request for a decision, without the prefix of the endpoint.
fn own_target(uri: &Uri) -> Result<PathAndQuery, DescriptionError> {
    let target = uri.path_and_query().map_or("", PathAndQuery::as_str).strip_prefix("/decide/request");
    let target = target.filter(|target| target.starts_with('/')).ok_or(DescriptionError::UnknownEndpoint)?;
    PathAndQuery::try_from(target).map_err(|_| DescriptionError::UnknownEndpoint)
}

pub(super) fn scheme(value: &[u8]) -> Option<&'static str> {
    // Traefik sends `ws` and `wss` for WebSockets.
    match value {
        b"http" | b"ws" => Some("http"),
        b"https" | b"wss" => Some("https"),
        _ => None,
    }
}

/// Return the headers of the described request. The proxy forwards headers of its client, so they are those of an
/// untrusted client.
fn described_headers(mut headers: HeaderMap, host: HeaderValue, config: &CompiledConfig) -> HeaderMap {
    headers::strip_hop_by_hop(&mut headers, &config.protected_headers);
    // Look at each name once: this costs less than a lookup of each of these headers.
    let is_of_message = |name: &&HeaderName| {
        matches!(
            name.as_str(),
            "content-length" | "transfer-encoding" | "expect" | "x-original-method" | "x-original-uri"
        )
    };
    let names: Vec<_> = headers.keys().filter(is_of_message).cloned().collect();
    for name in names {
        headers.remove(name);
    }
    headers::normalize_received(&mut headers, &config.protected_headers, false);
    headers.insert(HOST, host);
    headers
}

/// Return the client of the described request. Its forwarding headers are not trusted, because the proxy may forward
/// those of the client.
fn client(address: IpAddr, scheme: &'static str, listener: usize, config: &CompiledConfig) -> Peer {
    let mut client = Peer::new(address, scheme, config);
    client.distrust();
    client.listener = listener;
    client
}

/// Log that a proxy describes no request, at most once per [`LOG_INTERVAL`].
pub(super) fn log(error: &DescriptionError, peer: &Peer) {
    static LOG_THROTTLE: LogThrottle = LogThrottle::new();
    if LOG_THROTTLE.should_log(LOG_INTERVAL) {
        warn!(%error, peer = %peer.address, "cannot decide about a request; further errors are not logged for a minute");
    }
}

// === The response ===

/// Return the response of the route itself, which the proxy sends to the client instead of forwarding the request.
/// `None` if the proxy must forward the request.
pub(super) fn reply(
    admitted: &Admitted<'_>,
    request: &Request<RequestBody>,
    is_ready: bool,
) -> Result<Option<Response<Body>>, Rejection<'static>> {
    let response = match &admitted.route.action {
        RouteAction::Forward(_) => return Ok(None),
        RouteAction::DirectResponse(respond) => respond.response(),
        RouteAction::Readiness => DirectResponse::readiness(is_ready).response(),
        RouteAction::Redirect(redirect) => {
            let path = admitted.forwarded_path.as_deref().unwrap_or(request.uri().path());
            redirect.response(request, &admitted.route.path_pattern, path)?
        }
    };
    Ok((!response.status().is_success()).then_some(response))
}

/// Return the response that admits a request: 200 without content, with the headers that the gateway would set in the
/// request to the upstream.
pub(super) fn admission(
    settings: Option<&DecisionSettings>,
    endpoint: Endpoint,
    variables: &RequestVariables<'_>,
) -> Response<Body> {
    let rules = &variables.route.request_headers;
    let received = variables.head.headers;
    let mut forwarded = received.clone();
    variables.credentials.remove_from(&mut forwarded);
    variables.credentials.set_forward_headers(&mut forwarded);
    rules.apply(&mut forwarded, &rules.render(|variable| variables.content(variable)));
    respond(settings, endpoint, received, &forwarded)
}

/// Return the response that admits a request without identity.
pub(super) fn admission_without_identity(
    settings: Option<&DecisionSettings>,
    endpoint: Endpoint,
    received: &HeaderMap,
) -> Response<Body> {
    let mut forwarded = received.clone();
    for name in settings.iter().flat_map(|settings| settings.identity_headers()) {
        forwarded.remove(name);
    }
    respond(settings, endpoint, received, &forwarded)
}

/// Build the response that admits a request. `forwarded` are the headers that the gateway would forward.
fn respond(
    settings: Option<&DecisionSettings>,
    endpoint: Endpoint,
    received: &HeaderMap,
    forwarded: &HeaderMap,
) -> Response<Body> {
    // Envoy sends every other successful response to the client.
    let mut response = Response::new(Body::full(""));
    let names = settings.map_or(&[][..], DecisionSettings::identity_headers);
    for name in names {
        // Only a header without value replaces the header of the client in all proxies.
        let mut values = forwarded.get_all(name).iter();
        response.headers_mut().insert(name, values.next().cloned().unwrap_or(HeaderValue::from_static("")));
        for value in values {
            response.headers_mut().append(name, value.clone());
        }
    }
    if endpoint == Endpoint::Request {
        let removed = received.keys().chain(names).filter(|name| !forwarded.contains_key(*name));
        let mut removed: Vec<_> = removed.map(HeaderName::as_str).collect();
        removed.sort_unstable();
        removed.dedup();
        // The value consists of header names and commas, so the conversion cannot fail.
        let value = HeaderValue::from_str(&removed.join(",")).ok().filter(|value| !value.is_empty());
        response.headers_mut().extend(value.map(|value| (X_ENVOY_AUTH_HEADERS_TO_REMOVE, value)));
    }
    response
}

/// Complete a response that denies a request: tell the status of the decision, and replace the status if the proxy would
/// not forward it.
pub(super) fn set_denied_status(response: &mut Response<Body>, settings: Option<&DecisionSettings>) {
    let status = response.status();
    if status == StatusCode::OK {
        return;
    }
    response.headers_mut().insert(X_DECISION_STATUS, HeaderValue::from(status.as_u16()));
    let denied_status = settings.and_then(|settings| settings.denied_status);
    if !matches!(status, StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN)
        && let Some(denied_status) = denied_status
    {
        *response.status_mut() = denied_status;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    /// The headers of the description are stripped as well, so only this test fails if the client is trusted.
    #[test]
    fn described_client_at_the_address_of_a_proxy_is_not_trusted() {
        let text = "[[listener]]\naddress = \"127.0.0.1:8080\"\n[client_ip]\ntrusted_proxies = [\"10.0.0.0/8\"]\n\
                    [[route]]\nname = \"r\"\npath = \"/\"\nrespond = { status = 200 }\n";
        let load = || CompiledConfig::from_text(Path::new("gateway.toml"), text.to_owned(), &|_| None).unwrap();
        let config = load();
        let address = "10.0.0.7".parse().unwrap();
        assert!(Peer::new(address, "https", &config).forwarded.trusted);
        let client = client(address, "https", 0, &config);
        assert!(!client.forwarded.trusted);
        assert!(!client.revalidate(&load()).unwrap().forwarded.trusted, "after a reload");
    }
}
