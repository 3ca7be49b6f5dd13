//! The context of one request: what the gateway knows about the request, from its headers to the end of its response.
//!
//! No other file writes the access log record of a request.

use std::net::{IpAddr, SocketAddr};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::header::{CONTENT_LENGTH, FORWARDED};
use http::{HeaderMap, HeaderValue, Method, Request, Response, Version};
use tracing::{debug, warn};
use uuid::{NoContext, Timestamp, Uuid};

use crate::http::body::{Body, OnComplete};
use crate::http::cors::CorsDecision;
use crate::http::flow::StreamFlow;
use crate::http::headers::{ForwardedInfo, RenderedValues, X_REQUEST_ID};
use crate::http::request_body::RequestBody;
use crate::http::{ratelimit_headers, request_body};
use crate::identity::ClientIpResolver;
use crate::identity::auth::Credentials;
use crate::identity::client_cert::ClientCertificate;
use crate::limiter::clock::monotonic;
use crate::limiter::decision::{Decision, LimitCheck};
use crate::limiter::fallback::StoreUnavailable;
use crate::limiter::settlement::{ConcurrencyPermits, Deferred};
use crate::proxy::ConfigSnapshot;
use crate::proxy::body::BodyContent;
use crate::proxy::forward::RequestVariables;
use crate::proxy::llm::{LlmRequest, LlmSettlement};
use crate::proxy::local_reply::Rejection;
use crate::proxy::metrics::LimitDecision;
use crate::proxy::rate_limit;
use crate::snapshot::CompiledConfig;
use crate::snapshot::routes::Route;
use crate::telemetry::access_log::{
    DecisionInfo, EffectiveLimit, LimitInfo, RequestRecord, RequestStart, TelemetrySinks, UpstreamInfo,
};
use crate::telemetry::trace::TraceContext;
use crate::upstream::connector::ProxiedConnection;
use crate::upstream::retry::AttemptLog;
use crate::upstream::{Upstream, UpstreamError};

/// What the gateway knows about a request while it handles the request. If the context is dropped before
/// [`complete`](Self::complete), the connection or stream has ended: the client closed it, or `drain_timeout` expired.
/// The access log record then has the status 499.
pub(super) struct RequestContext<'a> {
    /// The configuration that applies to the whole request.
    pub(super) snapshot: &'a ConfigSnapshot,
    pub(super) peer: &'a Peer,
    /// The HTTP/1.x connection or HTTP/2 stream of the request.
    pub(super) flow: &'a Arc<StreamFlow>,
    /// `None` until a route is found.
    pub(super) route: Option<&'a Route>,
    /// Time at which the route timeout expires.
    pub(super) deadline: Option<tokio::time::Instant>,
    /// Permits of concurrency limits, held until the response ends.
    pub(super) permits: Option<Box<ConcurrencyPermits>>,
    /// The values of the body that a route, an identity or a cost depends on.
    pub(super) body: Option<Box<BodyContent>>,
    /// The id of the JSON-RPC message in the request, or null if the message has no id. If the id is `Some`, error
    /// responses are JSON-RPC errors.
    pub(super) rpc_id: Option<serde_json::Value>,
    /// The maximum token usage of a request to an LLM API, if limits count its tokens.
    pub(super) llm: Option<Box<LlmRequest>>,
    /// Token reservations that are settled when the response ends.
    pub(super) settlement: Option<Box<LlmSettlement>>,
    /// The decision of the route's CORS policy on the request.
    cors: Option<Box<CorsDecision<'a>>>,
    /// The verified credentials of the request.
    pub(super) credentials: Credentials<'a>,
    /// Values of the route's response headers that depend on the request.
    pub(super) response_values: RenderedValues,
    started_at: Instant,
    request_id: Option<RequestId>,
    /// The access log record. `None` if the request is neither logged nor traced.
    record: Option<Box<RequestRecord>>,
    /// Whether `complete` was called. If not, dropping the context records an aborted request.
    is_complete: bool,
    /// Whether a part of the request may still be unread when the response is sent; see
    /// [`request_body::has_unread_body`].
    has_unread_body: bool,
    /// Whether the gateway must discard the content of a local reply; see [`Body::discard_content`].
    is_http2_head: bool,
}

impl<'a> RequestContext<'a> {
    /// Create the context of a new request.
    pub(super) fn new(
        snapshot: &'a ConfigSnapshot,
        sinks: &Arc<TelemetrySinks>,
        peer: &'a Peer,
        flow: &'a Arc<StreamFlow>,
        request: &Request<RequestBody>,
    ) -> Self {
        let started_at = monotonic();
        let start = RequestStart {
            instant: started_at,
            peer: peer.address,
            scheme: if peer.forwarded.scheme == "https" { "https" } else { "http" },
            method: request.method(),
            path: request.uri().path(),
            headers: request.headers(),
        };
        let mut context = RequestContext {
            snapshot,
            peer,
            flow,
            route: None,
            deadline: None,
            permits: None,
            body: None,
            rpc_id: None,
            llm: None,
            settlement: None,
            cors: None,
            credentials: Credentials::default(),
            response_values: RenderedValues::default(),
            started_at,
            request_id: None,
            record: RequestRecord::start(sinks, &start),
            is_complete: false,
            has_unread_body: request_body::has_unread_body(request),
            is_http2_head: request.method() == Method::HEAD && request.version() == Version::HTTP_2,
        };
        if context.is_recorded() {
            context.request_id(request.headers());
        }
        context
    }

    /// Set the route, and start its timeout.
    pub(super) fn set_route(&mut self, route: &'a Route) {
        self.route = Some(route);
        self.deadline = route.timeout.map(|timeout| tokio::time::Instant::now() + timeout);
    }

    /// Apply the CORS policy of the route to a request with these headers.
    pub(super) fn set_cors(&mut self, route: &'a Route, headers: &HeaderMap, is_preflight: bool) {
        self.cors = route.cors.as_ref().map(|policy| Box::new(policy.decide(headers, is_preflight)));
    }

    /// Return the response to a CORS preflight.
    pub(super) fn preflight<B>(&mut self, route: &Route, request: &Request<B>) -> Rejection<'static> {
        if self.is_recorded() {
            self.record_client(self.peer.client_address(request.headers()), Some(route));
        }
        let headers = self.cors.as_ref().map(|cors| cors.preflight_headers(request.headers()));
        Rejection::Preflight(Box::new(headers.unwrap_or_default()))
    }

    /// Return the request id. The first call of this function determines the id.
    pub(super) fn request_id(&mut self, headers: &HeaderMap) -> &RequestId {
        let RequestContext { record, request_id, peer, .. } = self;
        request_id.get_or_insert_with(|| {
            let id = RequestId::from_headers(headers, peer.forwarded.trusted);
            if let Some(record) = record
                && let Ok(text) = id.to_header_value().to_str()
            {
                record.request_id = text.into();
            }
            id
        })
    }

    /// Render the values of the route's response headers that depend on the request, before the request is forwarded or
    /// discarded.
    pub(super) fn render_response_headers(&mut self, request: &Request<RequestBody>) {
        let Some(route) = self.route.filter(|route| route.response_headers.has_variables()) else { return };
        let request_id = self.request_id(request.headers()).to_header_value();
        let variables =
            RequestVariables { route, peer: self.peer, credentials: &self.credentials, request, request_id };
        self.response_values = route.response_headers.render(|variable| variables.content(variable));
    }

    /// Return whether the request is logged or traced.
    pub(super) fn is_recorded(&self) -> bool {
        self.record.is_some()
    }

    /// Return the trace context that the upstream uses as the parent of its spans, or `None` if the request is not
    /// traced.
    pub(super) fn trace(&self) -> Option<TraceContext> {
        self.record.as_ref().and_then(|record| record.trace)
    }

    // === The access log record ===

    /// Record the address of the client and the route.
    pub(super) fn record_client(&mut self, client: IpAddr, route: Option<&Route>) {
        let Some(record) = &mut self.record else { return };
        record.client = client;
        let Some(route) = route else { return };
        record.route = Some(route.name.clone());
        record.path_template = record.trace.map(|_| route.path.clone());
    }

    /// Record the model of a request whose tokens are counted.
    pub(super) fn record_model(&mut self, model: Option<&str>) {
        if let Some(record) = &mut self.record {
            record.model = model.map(Into::into);
        }
    }

    /// Record the decision on the limits of the route.
    pub(super) fn record_decision(
        &mut self,
        checks: &[LimitCheck<'_, '_>],
        decision: &Result<Decision<'_>, StoreUnavailable>,
        (started_at, elapsed): (Instant, Duration),
    ) {
        let Some(record) = &mut self.record else { return };
        record.decision = Some(DecisionInfo {
            start_offset: record.offset_of(started_at),
            duration: elapsed,
            ..decision_info(checks, decision.as_ref().ok())
        });
    }

    /// Record the upstream, the result of the exchange, and the costs that only the response determines.
    pub(super) fn record_upstream(
        &mut self,
        upstream: &Upstream,
        attempts: &AttemptLog,
        result: &Result<Response<Body>, UpstreamError>,
        started_at: Instant,
    ) {
        let Some(record) = &mut self.record else { return };
        record.upstream = Some(UpstreamInfo {
            upstream: upstream.name().into(),
            server: attempts.endpoint_name().map(Into::into),
            upstream_status: result.as_ref().ok().map(|response| response.status().as_u16()),
            duration: started_at.elapsed(),
            retries: attempts.retries().iter().sum(),
            start_offset: record.offset_of(started_at),
        });
        let (Some(route), Some(decision)) = (self.route, &mut record.decision) else { return };
        let no_headers = HeaderMap::new();
        let headers = result.as_ref().map_or(&no_headers, Response::headers);
        for limit in &mut decision.limits {
            let route_limit = &route.rate_limits.limits[limit.limit_index];
            if route_limit.cost.is_deferred() {
                limit.cost = route_limit.cost.response_cost(headers).unwrap_or(0);
            }
            if limit.reserved.is_some() && rate_limit::is_refunded(route_limit, result) {
                limit.cost = 0;
                limit.settled = Some(0);
            }
        }
    }

    // === The end of the request ===

    /// Update the metrics and return the response to the client. The access log record and the spans are written when
    /// the response body ends.
    pub(super) fn complete(&mut self, result: Result<Response<Body>, Rejection<'_>>) -> Response<Body> {
        let (mut response, outcome) = match result {
            Ok(response) => (response, "ok"),
            Err(rejection) => {
                let is_preflight = matches!(rejection, Rejection::Preflight(_));
                let (mut response, outcome) = self.reject(rejection);
                if let Some(route) = self.route.filter(|_| !is_preflight) {
                    route.response_headers.apply_to_rejection(response.headers_mut(), &self.response_values);
                }
                (response, outcome)
            }
        };
        self.is_complete = true;
        let route_index = self.route.map(|route| route.index);
        self.snapshot.metrics.record_response(route_index, response.status(), self.started_at.elapsed());
        if let Some(cors) = &self.cors {
            cors.apply(response.headers_mut());
        }
        if self.has_unread_body {
            request_body::set_connection_close(&mut response, self.flow);
        }
        if self.is_http2_head
            && let Some(length) = response.body_mut().discard_content()
        {
            response.headers_mut().insert(CONTENT_LENGTH, HeaderValue::from(length));
        }
        let completion = Completion {
            record: self.record.take(),
            settlement: self.settlement.take(),
            _permits: self.permits.take(),
        };
        if let Some(completion) = completion.with_response(response.status().as_u16(), outcome) {
            response.body_mut().on_complete(Box::new(completion));
        }
        response
    }

    fn reject(&self, rejection: Rejection<'_>) -> (Response<Body>, &'static str) {
        let id = self.request_id.as_ref().map(RequestId::to_header_value);
        let request_id = id.as_ref().and_then(|id| id.to_str().ok());
        match &rejection {
            Rejection::Upstream(error) if error.is_client_error() => {
                debug!(%error, request_id, "client did not send the complete request");
            }
            Rejection::Upstream(error) => warn!(%error, request_id, "upstream request failed"),
            _ => {}
        }
        rejection.into_response(id, self.snapshot.config.server.proxy_status, self.rpc_id.as_ref())
    }
}

impl Drop for RequestContext<'_> {
    fn drop(&mut self) {
        if !self.is_complete {
            self.snapshot.metrics.record_aborted(self.route.map(|route| route.index));
        }
        if let Some(record) = self.record.take() {
            record.write_aborted();
        }
    }
}

/// The actions at the end of the response body: settle reservations, write the access log record and release the
/// permits.
struct Completion {
    record: Option<Box<RequestRecord>>,
    settlement: Option<Box<LlmSettlement>>,
    _permits: Option<Box<ConcurrencyPermits>>,
}

impl Completion {
    /// Set the status and the outcome in the access log record. Return `None` if there is nothing to do at the end of
    /// the body.
    fn with_response(mut self, status: u16, outcome: &'static str) -> Option<Self> {
        if let Some(record) = &mut self.record {
            record.status = status;
            record.outcome = outcome;
        }
        (self.record.is_some() || self.settlement.is_some() || self._permits.is_some()).then_some(self)
    }
}

impl OnComplete for Completion {
    fn on_data(&mut self, data: &mut Bytes) -> ControlFlow<()> {
        self.settlement.as_mut().map_or(ControlFlow::Continue(()), |settlement| settlement.feed(data))
    }

    fn on_complete(mut self: Box<Self>, bytes_sent: u64, complete: bool) {
        if let Some(settlement) = self.settlement.take() {
            let decision = self.record.as_mut().and_then(|record| record.decision.as_mut());
            settlement.settle(decision.map(|decision| &mut decision.limits[..]));
        }
        if let Some(record) = self.record.take() {
            record.write(bytes_sent, complete);
        }
    }
}

/// The precedence of decisions in the access log. If the limits of a request have made different decisions, the record
/// contains the decision that comes first in this list.
const DECISION_PRIORITY: [LimitDecision; 6] = [
    LimitDecision::Denied,
    LimitDecision::LocalDenied,
    LimitDecision::ShadowDenied,
    LimitDecision::LocalAllowed,
    LimitDecision::StoreError,
    LimitDecision::Allowed,
];

/// Return the fields of the access log record that describe a decision. `decision` is `None` if the store was
/// unavailable.
fn decision_info(checks: &[LimitCheck<'_, '_>], decision: Option<&Decision<'_>>) -> DecisionInfo {
    let to_limit_decision = |check: &LimitCheck<'_, '_>| match decision {
        Some(decision) => LimitDecision::from_decision(check, decision),
        None => Some(LimitDecision::StoreError),
    };
    let limit_decisions: Vec<_> = checks.iter().map(to_limit_decision).collect();
    let remaining = |check: &LimitCheck<'_, '_>| {
        let result = decision?.results.iter().find(|result| result.limit_index == check.limit_index)?;
        Some(result.outcome.remaining)
    };
    let limits = checks.iter().zip(&limit_decisions).map(|(check, limit_decision)| LimitInfo {
        limit: check.limit.name.clone(),
        identity: check.identity.0,
        cost: check.required(),
        decision: limit_decision.map(LimitDecision::label),
        remaining: remaining(check),
        reserved: (check.deferred == Deferred::Settle).then_some(check.cost),
        settled: None,
        estimated: false,
        limit_index: check.limit_index,
    });
    let limits: Vec<_> = limits.collect();
    let effective_limit = decision.and_then(ratelimit_headers::effective_limit).and_then(|status| {
        let info = limits.iter().find(|info| &*info.limit == status.name)?;
        Some(EffectiveLimit { limit: info.limit.clone(), remaining: status.remaining, identity: info.identity })
    });
    let most_relevant =
        DECISION_PRIORITY.iter().find(|limit_decision| limit_decisions.contains(&Some(**limit_decision)));
    let shadows = decision.map_or(&[][..], |decision| &decision.shadow_denied);
    DecisionInfo {
        decision: most_relevant.map_or("denied", |limit_decision| limit_decision.label()),
        decided_by: decision.map(Decision::decider_label),
        effective_limit,
        duration: Duration::ZERO,
        decided_at: decision.map(|decision| decision.now_us),
        shadow_denied: shadows.iter().map(|limit| limit.name.clone()).collect(),
        limits,
        start_offset: Duration::ZERO,
    }
}

// === The peer of a downstream connection, and request ids ===

/// The peer of a downstream connection.
#[derive(Debug)]
pub struct Peer {
    /// IP address of the peer. An IPv4-mapped IPv6 address is converted to IPv4.
    pub address: IpAddr,
    /// Values of the forwarding headers that are sent to upstreams.
    pub forwarded: ForwardedInfo,
    /// Subject of the verified client certificate, if there is one.
    pub certificate_subject: Option<Box<str>>,
    /// The verified client certificate, if there is one.
    pub certificate: Option<Arc<ClientCertificate>>,
    /// Port of the peer, or 0 if it is unknown or not needed.
    port: u16,
    /// Address and port that the peer connected to. `None` if they are unknown or not needed.
    destination: Option<SocketAddr>,
    /// Index of the listener that accepted the connection. A reload changes neither the listeners nor their order.
    pub listener: usize,
    /// The resolver that determined whether the peer is trusted.
    client_ip: Arc<ClientIpResolver>,
    /// Whether forwarding headers must not be trusted, although the peer is a trusted proxy. True if the peer forwards
    /// the connection of a client, but its PROXY header does not contain the address of this client.
    is_distrusted: bool,
}

impl Peer {
    /// Create the peer of a connection to the first listener.
    pub fn new(address: IpAddr, scheme: &'static str, config: &CompiledConfig) -> Self {
        let address = address.to_canonical();
        let client_ip = config.client_ip.clone();
        let reads_forwarded = client_ip.header == FORWARDED;
        let forwarded =
            ForwardedInfo { reads_forwarded, ..ForwardedInfo::new(address, scheme, client_ip.is_trusted(address)) };
        Peer {
            address,
            forwarded,
            certificate_subject: None,
            certificate: None,
            port: 0,
            destination: None,
            listener: 0,
            client_ip,
            is_distrusted: false,
        }
    }

    /// Set the source port and the destination of the connection, for PROXY headers to upstreams.
    pub fn set_connection(&mut self, connection: &ProxiedConnection) {
        (self.port, self.destination) = (connection.source.port(), Some(connection.destination));
    }

    /// Return the addresses for the PROXY header to the upstream, for a request with these headers. The port of a
    /// client behind a trusted proxy is unknown, so it is set to 0.
    pub(super) fn proxied_connection(&self, headers: &HeaderMap) -> ProxiedConnection {
        let client = self.client_address(headers);
        let port = if client == self.address { self.port } else { 0 };
        ProxiedConnection::new(SocketAddr::new(client, port), self.destination)
    }

    /// Return the client address of a request with these headers: the address of the peer, unless the peer is a trusted
    /// proxy.
    pub fn client_address(&self, headers: &HeaderMap) -> IpAddr {
        // Use the address of the peer if a trusted proxy sends no client address.
        if self.forwarded.trusted { self.client_ip.client_address(self.address, headers) } else { self.address }
    }

    /// Return whether a request was rejected because the client certificate is not trusted any more.
    pub fn has_rejected_certificate(&self) -> bool {
        self.certificate.as_ref().is_some_and(|certificate| certificate.is_rejected())
    }

    /// Stop trusting the forwarding headers of this peer, even after a configuration reload.
    pub fn distrust(&mut self) {
        (self.is_distrusted, self.forwarded.trusted) = (true, false);
    }

    /// Return a copy of the peer that uses the `[client_ip]` settings of `config`, or `None` if no reload has changed
    /// these settings.
    pub(super) fn revalidate(&self, config: &CompiledConfig) -> Option<Box<Peer>> {
        let client_ip = &config.client_ip;
        if Arc::ptr_eq(client_ip, &self.client_ip) {
            return None;
        }
        let trusted = !self.is_distrusted && client_ip.is_trusted(self.address);
        let reads_forwarded = client_ip.header == FORWARDED;
        let forwarded = ForwardedInfo { trusted, reads_forwarded, ..self.forwarded.clone() };
        let client_ip = client_ip.clone();
        let (certificate_subject, certificate) = (self.certificate_subject.clone(), self.certificate.clone());
        Some(Box::new(Peer { forwarded, client_ip, certificate_subject, certificate, ..*self }))
    }
}

// === Request id: sent by a trusted proxy, or generated by this gateway. The upstream request, the logs and the problem
// documents contain the same id ===

/// The id of a request.
#[derive(Debug, Clone)]
pub enum RequestId {
    /// A UUIDv7 that this gateway generated. The id is converted to text only when the text is used.
    Generated(Uuid),
    /// Value of `X-Request-Id` that a trusted proxy sent.
    Received(HeaderValue),
}

impl RequestId {
    /// Return the id of a request: the received `X-Request-Id` if the peer is `trusted`, otherwise a new id.
    pub fn from_headers(headers: &HeaderMap, trusted: bool) -> Self {
        match trusted.then(|| headers.get(X_REQUEST_ID)).flatten() {
            Some(received) => RequestId::Received(received.clone()),
            // UUIDv7 ids of different milliseconds are ordered by time. Do not use `Uuid::now_v7`, which orders ids
            // more finely, but takes a lock that all workers share.
            None => RequestId::Generated(Uuid::new_v7(Timestamp::now(NoContext))),
        }
    }

    /// Return the id as a header value.
    pub fn to_header_value(&self) -> HeaderValue {
        match self {
            RequestId::Received(value) => value.clone(),
            RequestId::Generated(id) => {
                let mut text = [0; uuid::fmt::Hyphenated::LENGTH];
                let text = id.hyphenated().encode_lower(&mut text);
                // The conversion cannot fail, because hexadecimal digits and hyphens are a valid header value.
                HeaderValue::from_str(text).unwrap_or(HeaderValue::from_static("-"))
            }
        }
    }
}
