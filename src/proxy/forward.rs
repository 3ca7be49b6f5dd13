//! Forwarding of an admitted request to an upstream, and of its response to the client.

use std::borrow::Cow;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use http::header::{ACCEPT_ENCODING, EXPECT, HOST, HeaderValue};
use http::uri::{PathAndQuery, Uri};
use http::{Method, Request, Response, StatusCode, Version};
use http_body::Body as _;
use hyper::upgrade::OnUpgrade;
use tokio::time::{Instant, timeout_at};

use crate::clock::unix_us;
use crate::http::aws_signature::content_hash;
use crate::http::body::Body;
use crate::http::body_limits::{BodyLimits, UploadLimits};
use crate::http::flow::StreamFlow;
use crate::http::headers::{
    ForwardedInfo, HeaderMutations, ProtectedHeaders, RenderedValues, Variable, X_REQUEST_ID, client_scheme, is_grpc,
};
use crate::http::request_body;
use crate::http::request_body::{ReplayBody, RequestBody};
use crate::http::target::{canonical_path, request_host};
use crate::http::upgrade::{ExtendedConnect, Tunnel, UpgradeRequest};
use crate::http::{headers, target, upgrade};
use crate::identity::auth::Credentials;
use crate::identity::client_cert::ClientCertificate;
use crate::identity::consumer::Caller;
use crate::proxy::body::counted_network;
use crate::proxy::config_snapshot::ConfigSnapshot;
use crate::proxy::mirror;
use crate::proxy::mirror::MIRROR_HEADER;
use crate::proxy::request::{Peer, RequestHead};
use crate::snapshot::CompiledConfig;
use crate::snapshot::route_retry::Fallback;
use crate::snapshot::routes::Route;
use crate::telemetry::trace::TraceContext;
use crate::upstream::connector::Protocol;
use crate::upstream::error::UpstreamError;
use crate::upstream::retry::{AttemptLog, RetryRules};
use crate::upstream::settings::HostPolicy;
use crate::upstream::{SendOptions, Upstream};

/// A request that is forwarded to an upstream.
pub(super) struct Forwarding<'f> {
    pub(super) snapshot: &'f ConfigSnapshot,
    pub(super) peer: &'f Peer,
    /// The HTTP/1.x connection or HTTP/2 stream of the request.
    pub(super) flow: &'f Arc<StreamFlow>,
    pub(super) route: &'f Route,
    pub(super) upstream: &'f Upstream,
    /// Time at which the route timeout expires.
    pub(super) deadline: Option<Instant>,
    /// Whether the client has set this time.
    pub(super) is_client_deadline: bool,
    /// Path and query of the upstream request. `None` if they are equal to the received path and query.
    pub(super) target: Option<PathAndQuery>,
    pub(super) credentials: Credentials<'f>,
    /// The id of the request.
    pub(super) request_id: HeaderValue,
    /// Trace context that the upstream uses as the parent of its spans. `None` if the request is not traced.
    pub(super) trace: Option<TraceContext>,
    /// Whether the gateway reads the response, so that the upstream must not compress it.
    pub(super) reads_response: bool,
    /// The fallback that gets the request. `None` for the upstream of the route.
    pub(super) fallback: Option<&'f Fallback>,
}

/// Send a request to an upstream and return its response. `replay` receives the body if the route retries requests, and
/// the body can be sent again.
///
/// # Errors
/// The upstream or the client failed, or the route timeout expired; see [`UpstreamError`].
pub(super) async fn forward(
    forwarding: Forwarding<'_>,
    mut request: Box<Request<RequestBody>>,
    replay: &mut Option<ReplayBody>,
    attempts: &mut AttemptLog,
) -> Result<Box<Response<Body>>, UpstreamError> {
    let Forwarding { snapshot, peer, flow, route, upstream, deadline, is_client_deadline, .. } = forwarding;
    let route_timeout = || match is_client_deadline {
        true => UpstreamError::ClientDeadline { upstream: upstream.name().into() },
        false => UpstreamError::RouteTimeout { upstream: upstream.name().into() },
    };
    if deadline.is_some_and(|deadline| deadline <= Instant::now()) {
        // Do not forward the request if the wait queues of the limits have used up the route timeout.
        request_body::discard_body(request, flow);
        return Err(route_timeout());
    }
    let config = &snapshot.config;
    let http_1_0 = request.version() == Version::HTTP_10;
    let upload = if request_body::has_unread_body(&request) { request.body().progress() } else { None };
    let host = forwarding.host();
    let pending_upgrade = forwarding.prepare(host, &mut request);
    let progress = deadline.and_then(|_| request.body().progress());
    let is_counted = upstream.max_requests() > 0 && !request.body().is_end_stream();
    let network = if is_counted { counted_network(config, peer, request.headers()) } else { None };
    let (mut limits, should_buffer) = body_limits(config, route, upstream, &request, deadline);
    limits.is_client_deadline = is_client_deadline;
    let exchange = pin!(async {
        if should_buffer {
            request.body_mut().buffer(limits).await?;
        }
        if let Some(network) = network.filter(|_| !request.body().is_buffered())
            && let Some(progress) = request.body_mut().apply_limits(limits)
        {
            progress.set_share(Some(upstream.start_upload(network)?));
        }
        let retry = route.retry.as_ref();
        if retry.is_some() && replay.is_none() {
            *replay = request.body_mut().replayable();
        }
        let options = SendOptions { retry, replay: replay.as_ref(), ..SendOptions::new(limits, flow, host) };
        upstream.send(request, options, attempts).await
    });
    let response = match deadline {
        None => exchange.await?,
        Some(deadline) => match timeout_at(deadline, exchange).await {
            Ok(result) => result?,
            Err(_) if progress.is_some_and(|progress| progress.is_delayed_by_client()) => {
                return Err(UpstreamError::ClientTimeout);
            }
            Err(_) => return Err(route_timeout()),
        },
    };
    // The upstream will not read the rest of the body, so the client connection cannot serve another request.
    if response.status() != StatusCode::SWITCHING_PROTOCOLS
        && upload.is_some_and(|upload| !upload.is_done())
        && headers::closes_connection(response.headers())
    {
        flow.abandon_request();
    }
    client_response(response, pending_upgrade, upstream, http_1_0, config.server.idle_timeout)
}

impl<'f> Forwarding<'f> {
    /// Return which `Host` the upstream receives.
    fn host(&self) -> &'f HostPolicy {
        let host = self.fallback.map_or(&self.route.upstream_host, |fallback| &fallback.host);
        host.as_ref().unwrap_or(self.upstream.host())
    }

    /// Convert the received request into the request to the upstream, and copy it to the mirror. Return the upgrade that
    /// the request offers. The values of `self` end here, so that the future of the exchange does not keep them.
    fn prepare(self, host: &HostPolicy, request: &mut Request<RequestBody>) -> Option<PendingUpgrade> {
        let Forwarding { snapshot, peer, route, upstream, target, credentials, request_id, trace, fallback, .. } = self;
        let config = &snapshot.config;
        let rules = fallback.and_then(|fallback| fallback.request_headers.as_ref()).unwrap_or(&route.request_headers);
        let selected = if fallback.is_none() { mirror::select(snapshot, peer, route, request) } else { None };
        if upstream.sends_proxy_header() {
            let client = peer.proxied_connection(request.headers());
            request.extensions_mut().insert(client);
        }
        let header_values = if rules.has_variables() {
            let head = RequestHead::from(&*request);
            let request_id = request_id.clone();
            let variables = RequestVariables { route, peer, credentials: &credentials, head, request_id };
            rules.render(|variable| variables.content(variable))
        } else {
            RenderedValues::default()
        };
        let info = UpstreamRequestInfo {
            credentials: &credentials,
            forwarded: &peer.forwarded,
            request_id,
            trace,
            host,
            authority: upstream.authority(),
            length: request.body().size_hint().exact(),
            header_rules: rules,
            header_values: &header_values,
            client_cert: upstream.sends_client_cert().then_some(peer.certificate()),
        };
        let upgrade_request = prepare_upstream_headers(config, route, request, info);
        if self.reads_response {
            // Request an uncompressed response, because the gateway cannot read the token usage in a compressed response.
            request.headers_mut().insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
        }
        let pending_upgrade = upgrade_request.and_then(|offered| {
            let downstream = request.extensions_mut().remove::<OnUpgrade>()?;
            offered.insert_into(request.headers_mut());
            let connect = request.extensions_mut().remove();
            Some(PendingUpgrade { offered, downstream, connect })
        });
        if let Some(target) = target {
            *request.uri_mut() = Uri::from(target);
        }
        *request.version_mut() = Version::HTTP_11;
        if let Some(selected) = selected {
            selected.copy(upstream, request, pending_upgrade.is_some());
        }
        if let Some(signer) = upstream.aws() {
            let method = request.method().clone();
            let uri = request.uri().clone();
            let hash = content_hash(request.body().content());
            signer.sign(&method, &uri, request.headers_mut(), &hash, unix_us());
        }
        if upstream.protocol() == Protocol::Http2 {
            target::set_http2_target(request);
            if is_grpc(request.headers()) {
                request.body_mut().forward_trailers(&config.trailer_filter);
            }
        }
        pending_upgrade
    }
}

/// Convert the response of an upstream into the response to the client. `http_1_0` is true if the client uses HTTP/1.0.
///
/// # Errors
/// The upstream has accepted a WebSocket in an invalid way, or switched to a protocol that was not offered.
fn client_response(
    mut response: Box<Response<Body>>,
    pending_upgrade: Option<PendingUpgrade>,
    upstream: &Upstream,
    http_1_0: bool,
    idle_timeout: Duration,
) -> Result<Box<Response<Body>>, UpstreamError> {
    let is_connect = pending_upgrade.as_ref().is_some_and(|pending| pending.connect.is_some());
    if is_connect && response.status().is_success() {
        // The client would take the response for a WebSocket.
        let fault = "the response to a WebSocket handshake is neither 101 nor an error";
        return Err(UpstreamError::InvalidResponse { upstream: upstream.name().into(), fault });
    }
    if response.status() == StatusCode::SWITCHING_PROTOCOLS {
        let upgraded = accept_upgrade(response, pending_upgrade, idle_timeout);
        return upgraded.ok_or_else(|| UpstreamError::UnexpectedUpgrade { upstream: upstream.name().into() });
    }
    // Mark a response to an HTTP/1.0 client as HTTP/1.0 if only the end of the connection delimits the body, because
    // hyper would otherwise keep the connection open.
    let is_close_delimited = http_1_0 && response.body().size_hint().exact().is_none();
    *response.version_mut() = if is_close_delimited { Version::HTTP_10 } else { Version::HTTP_11 };
    headers::strip_hop_by_hop(response.headers_mut(), &ProtectedHeaders::default());
    Ok(response)
}

/// Return the body for a fallback upstream, or `None` if the result of the last attempt is final. A request that a
/// server may have executed is sent again only if the route permits it for the method.
pub(super) fn body_for_fallback(
    rules: &RetryRules,
    method: &Method,
    result: &Result<Box<Response<Body>>, UpstreamError>,
    attempts: &mut AttemptLog,
    replay: Option<&ReplayBody>,
) -> Option<RequestBody> {
    let may_retry = rules.may_retry(method);
    let is_sent_again = match result {
        Ok(response) => may_retry && rules.covers(response.status()),
        Err(UpstreamError::ResponseTimeout { .. }) => may_retry && rules.on_timeout,
        Err(
            UpstreamError::NoHealthyEndpoint { .. }
            | UpstreamError::Unresolved { .. }
            | UpstreamError::NoAccessToken { .. }
            | UpstreamError::Overflow { .. }
            | UpstreamError::Connect { .. }
            | UpstreamError::ConnectTimeout { .. }
            | UpstreamError::Reset { .. }
            | UpstreamError::InvalidResponse { .. }
            | UpstreamError::UnexpectedUpgrade { .. },
        ) => may_retry || attempts.is_unexecuted(),
        Err(
            UpstreamError::TooManyUploads { .. }
            | UpstreamError::RouteTimeout { .. }
            | UpstreamError::ClientDeadline { .. }
            | UpstreamError::ClientTimeout
            | UpstreamError::BodyTooLarge
            | UpstreamError::ClientAborted(_),
        ) => false,
    };
    let unsent = attempts.take_unsent_body().filter(|_| is_sent_again);
    unsent.or_else(|| replay.filter(|_| is_sent_again).map(ReplayBody::body))
}

/// Return the timeouts and bounds of an exchange, and whether to buffer the request body before it is sent. With
/// buffering, a slow client does not occupy an upstream connection and a request permit while it sends the body.
fn body_limits(
    config: &CompiledConfig,
    route: &Route,
    upstream: &Upstream,
    request: &Request<RequestBody>,
    deadline: Option<Instant>,
) -> (BodyLimits, bool) {
    let settings = &config.server;
    // Set no minimum rate or total timeout for the uploads of gRPC calls, because client and server may send
    // alternately, with pauses. gRPC requires HTTP/2, so for an HTTP/1.1 upstream the client's `Content-Type` is
    // ignored.
    let is_streaming = upstream.protocol() == Protocol::Http2 && is_grpc(request.headers());
    let idle_timeout = settings.body_idle_timeout;
    let upload = match is_streaming {
        true => UploadLimits { idle_timeout, min_rate: 0, total_timeout: None },
        false => UploadLimits { idle_timeout, min_rate: settings.min_body_rate, total_timeout: settings.body_timeout },
    };
    let length = request.body().size_hint().exact().filter(|length| *length > 0);
    let should_buffer = !is_streaming && length.is_some_and(|length| length <= settings.request_buffer);
    (BodyLimits { deadline, is_client_deadline: false, upload, idle_timeout, max_body: route.max_body }, should_buffer)
}

/// Return the 101 response with the tunnel, or `None` if the upstream switched to a protocol that was not offered.
fn accept_upgrade(
    response: Box<Response<Body>>,
    pending: Option<PendingUpgrade>,
    idle_timeout: Duration,
) -> Option<Box<Response<Body>>> {
    let PendingUpgrade { offered, downstream, connect } = pending?;
    let (mut parts, body) = response.into_parts();
    parts.version = Version::HTTP_11;
    let protocols = offered.accepted_protocols(&parts.headers)?;
    if connect.as_ref().is_some_and(|connect| !connect.is_accepted(&parts.headers)) {
        return None;
    }
    let upstream = parts.extensions.remove::<OnUpgrade>()?;
    headers::strip_hop_by_hop(&mut parts.headers, &ProtectedHeaders::default());
    upgrade::set_upgrade_headers(&mut parts.headers, protocols);
    let mut response = Response::from_parts(parts, body.with_tunnel(Tunnel { downstream, upstream, idle_timeout }));
    if connect.is_some() {
        ExtendedConnect::convert_response(&mut response);
    }
    Some(Box::new(response))
}

/// An upgrade that is offered to the upstream.
struct PendingUpgrade {
    offered: UpgradeRequest,
    downstream: OnUpgrade,
    /// `Some` if the client has sent an extended CONNECT request.
    connect: Option<ExtendedConnect>,
}

// === Headers of the upstream request ===

/// Values for the upstream request headers that do not come from the received request itself.
#[derive(Debug)]
pub struct UpstreamRequestInfo<'a> {
    /// The credentials that the providers of the route have verified.
    pub credentials: &'a Credentials<'a>,
    /// Values of the forwarding headers.
    pub forwarded: &'a ForwardedInfo,
    /// Value of `X-Request-Id`.
    pub request_id: HeaderValue,
    /// Trace context that the upstream uses as the parent of its spans. `None` if the request is not traced.
    pub trace: Option<TraceContext>,
    /// Which `Host` the upstream receives.
    pub host: &'a HostPolicy,
    /// Host of the first server: `Host` for `HostPolicy::Server`, and for requests without a host.
    pub authority: &'a str,
    /// Length of the body in bytes, if known.
    pub length: Option<u64>,
    /// Changes to the request headers.
    pub header_rules: &'a HeaderMutations,
    /// Values of these changes that depend on the request.
    pub header_values: &'a RenderedValues,
    /// Certificate of the client, if it has one, for an upstream with `client_cert_header`; `None` for other upstreams.
    pub client_cert: Option<Option<&'a ClientCertificate>>,
}

/// Convert the received headers into the headers that are sent to the upstream. Return the protocols to which the
/// client offers to upgrade. The caller adds these protocols to the upstream request if the client connection can be
/// upgraded.
pub fn prepare_upstream_headers<B>(
    config: &CompiledConfig,
    route: &Route,
    request: &mut Request<B>,
    info: UpstreamRequestInfo<'_>,
) -> Option<UpgradeRequest> {
    let version = request.version();
    // Forward only the host that was used for routing. An authority is always a valid header value.
    let authority = request.uri().authority().and_then(|host| HeaderValue::from_str(host.as_str()).ok());
    let headers = request.headers_mut();
    // Do not offer an upgrade for HTTP/1.0, which does not support upgrades. Do not offer one for a request with a
    // body, because the body must be read before the protocol changes (RFC 9110 §7.8).
    // An HTTP/2 request with `Upgrade` was an extended CONNECT request.
    let can_upgrade = route.websocket && version >= Version::HTTP_11 && info.length == Some(0);
    let upgrade_request = if can_upgrade { UpgradeRequest::from_headers(headers) } else { None };
    headers::strip_hop_by_hop(headers, &config.protected_headers);
    headers::set_framing(headers, info.length);
    // Do not forward `Expect`, because hyper sends `100 Continue` to the client when the body is first polled.
    headers.remove(EXPECT);
    info.credentials.remove_from(headers);
    if route.mirror.is_some() {
        // `MIRROR_HEADER` marks a mirrored copy. Remove this header from requests of untrusted peers, because the
        // upstream would mistake a request with this header for a copy.
        headers::strip_with_aliases(headers, &MIRROR_HEADER, info.forwarded.trusted);
    }
    if let Some(host) = authority {
        headers.insert(HOST, host);
    }
    let mut host = headers.get(HOST).cloned();
    if let Some(plain) = host.as_ref().and_then(target::strip_trailing_dot) {
        headers.insert(HOST, plain.clone());
        host = Some(plain);
    }
    match (info.host, &host) {
        (HostPolicy::Client, Some(_)) => {}
        (HostPolicy::Client, None) | (HostPolicy::Server, _) => {
            let authority = HeaderValue::from_str(info.authority).ok();
            authority.into_iter().for_each(|host| drop(headers.insert(HOST, host)));
        }
        (HostPolicy::Name(name), _) => drop(headers.insert(HOST, name.clone())),
    }
    headers::set_forwarded(headers, info.forwarded, host.as_ref(), version);
    headers.insert(X_REQUEST_ID, info.request_id);
    if let Some(certificate) = info.client_cert {
        ClientCertificate::set_headers(certificate, headers);
    }
    if let Some(trace) = info.trace {
        trace.inject(headers);
    }
    info.credentials.set_forward_headers(headers);
    info.header_rules.apply(headers, info.header_values);
    upgrade_request
}

// === The values of variables in header rules for one request ===

/// The received request and its route, which determine the content of variables.
#[derive(Debug)]
pub struct RequestVariables<'a> {
    /// The route of the request.
    pub route: &'a Route,
    /// The peer that sent the request.
    pub peer: &'a Peer,
    /// The verified credentials of the request.
    pub credentials: &'a Credentials<'a>,
    /// The request, before its headers are changed for the upstream.
    pub head: RequestHead<'a>,
    /// The id of the request.
    pub request_id: HeaderValue,
}

impl RequestVariables<'_> {
    /// Return the content of a variable, or `None` if the variable has no content for this request.
    pub fn content(&self, variable: Variable) -> Option<Cow<'_, [u8]>> {
        let RequestHead { method, uri, version, headers } = self.head;
        Some(match variable {
            Variable::ClientIp => self.peer.client_address(headers).to_string().into_bytes().into(),
            Variable::RequestId => self.request_id.as_bytes().into(),
            Variable::Consumer => self.consumer()?.as_bytes().into(),
            Variable::Route => self.route.name.as_bytes().into(),
            Variable::Host => match request_host(uri, headers, version).ok()? {
                Cow::Borrowed(host) => host.as_bytes().into(),
                Cow::Owned(host) => host.into_bytes().into(),
            },
            Variable::Method => method.as_str().as_bytes().into(),
            Variable::Path => match canonical_path(uri.path(), self.route.path_policy).ok()? {
                Cow::Borrowed(path) => path.as_bytes().into(),
                Cow::Owned(path) => path.into_bytes().into(),
            },
            Variable::Scheme => client_scheme(headers, &self.peer.forwarded).as_bytes().into(),
        })
    }

    /// Return the name of the consumer to which the API key of the request belongs.
    fn consumer(&self) -> Option<&str> {
        match self.credentials.caller() {
            Caller::Consumer(consumer) => Some(&consumer.name),
            Caller::Accepted(_) | Caller::Anonymous | Caller::Missing => None,
        }
    }
}
