//! Request handling: routing, rate limits, forwarding and the response.

pub mod authentication;
pub mod body;
pub mod context;
pub mod forward;
pub mod llm;
pub mod local_reply;
pub mod metrics;
pub mod mirror;
pub mod rate_limit;

use std::borrow::Cow;
use std::mem;
use std::sync::Arc;

use arc_swap::ArcSwap;
use bytes::Bytes;
use http::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderValue, TRANSFER_ENCODING};
use http::uri::{PathAndQuery, Uri};
use http::{Method, Request, Response, StatusCode, Version};
use http_body::Body as _;
use tokio::time::Instant;

use crate::http::body::Body;
use crate::http::cors;
use crate::http::flow::StreamFlow;
use crate::http::headers;
use crate::http::headers::{http1_header_count, is_grpc_call};
use crate::http::request_body;
use crate::http::request_body::RequestBody;
use crate::http::target::{canonical_path, forwarded_path, request_host};
use crate::identity::access::AccessRules;
use crate::identity::auth::AuthError;
use crate::limiter::Limiter;
use crate::limiter::clock::monotonic;
use crate::limiter::decision::Decision;
use crate::payload::json::body::JsonBody;
use crate::proxy::authentication::AuthRejection;
use crate::proxy::body as inspection;
use crate::proxy::body::InspectError;
use crate::proxy::context::{Peer, RequestContext};
use crate::proxy::local_reply::Rejection;
use crate::proxy::metrics::{RequestMetrics, WorkerMetrics};
use crate::proxy::mirror::MirrorTasks;
use crate::proxy::rate_limit::append_ratelimit_headers;
use crate::routing::condition::RouteBody;
use crate::routing::{NoMatch, RouteRequest};
use crate::snapshot::CompiledConfig;
use crate::snapshot::listeners::Acme;
use crate::snapshot::routes::{Route, RouteAction};
use crate::snapshot::settings::ServerSettings;
use crate::telemetry::access_log::TelemetrySinks;
use crate::upstream::Upstream;
use crate::upstream::cluster::UpstreamCluster;
use crate::upstream::retry::AttemptLog;

/// Path of HTTP-01 challenges, without the token at its end (RFC 8555 §8.3).
const HTTP_CHALLENGE_PATH: &str = "/.well-known/acme-challenge/";

/// The gateway in one worker: its configuration snapshot, limiter and telemetry.
#[derive(Debug)]
pub struct Gateway {
    /// Current configuration snapshot. A request uses one snapshot from its beginning to its end.
    snapshot: ArcSwap<ConfigSnapshot>,
    limiter: Limiter,
    /// Destinations of request records. Each worker has its own `Arc`, because each request changes the reference
    /// count, and workers must not contend for it.
    sinks: Arc<TelemetrySinks>,
    request_metrics: Arc<RequestMetrics>,
    /// Index of the worker thread.
    worker: usize,
}

impl Gateway {
    /// Create a gateway with its own connections to the upstreams in `clusters`, which has one entry for each of
    /// `config.upstreams`, in the same order. The metrics of this gateway have the index `worker`.
    pub fn new(
        config: Arc<CompiledConfig>,
        limiter: Limiter,
        clusters: &[Arc<UpstreamCluster>],
        sinks: TelemetrySinks,
        (request_metrics, worker): (Arc<RequestMetrics>, usize),
    ) -> Self {
        let snapshot = ArcSwap::from_pointee(ConfigSnapshot::new(config, clusters, &request_metrics, worker));
        Gateway { snapshot, limiter, sinks: Arc::new(sinks), request_metrics, worker }
    }

    /// Replace the configuration. The new configuration applies from the next request on. Metrics and upstream
    /// connections of routes, limits and upstreams that exist in both configurations are carried over.
    pub fn apply_config(&self, config: Arc<CompiledConfig>, clusters: &[Arc<UpstreamCluster>]) {
        let snapshot =
            ConfigSnapshot::carry_over(&self.snapshot.load(), config, clusters, &self.request_metrics, self.worker);
        self.snapshot.store(Arc::new(snapshot));
    }

    /// Return the current configuration.
    pub fn config(&self) -> Arc<CompiledConfig> {
        self.snapshot.load().config.clone()
    }

    /// Record the response to a request that the HTTP parser has rejected.
    pub fn record_unparsed(&self, status: StatusCode) {
        self.snapshot.load().metrics.record_unparsed(status);
    }

    /// Wait until the background tasks of requests are done: releases of permits and deferred charges.
    pub async fn flush_pending(&self) {
        self.limiter.flush_pending().await;
    }

    /// Wait until `deadline` for the copies of mirrored requests. Return the number of copies that are not done.
    pub async fn drain_mirrors(&self, deadline: Instant) -> usize {
        let tasks = self.snapshot.load().mirror_tasks.clone();
        tasks.drain(deadline).await
    }

    /// Handle a request and return its response. `flow` is the HTTP/1.x connection or HTTP/2 stream of the request.
    /// Dropping the future cancels all operations that the future waits for.
    pub async fn handle(
        &self,
        mut request: Box<Request<RequestBody>>,
        peer: &Peer,
        flow: &Arc<StreamFlow>,
    ) -> Response<Body> {
        let snapshot = self.snapshot.load_full();
        // Check again whether the peer is trusted, because a reload may have changed the trusted proxies since the
        // connection was accepted.
        let revalidated = peer.revalidate(&snapshot.config);
        let peer = revalidated.as_deref().unwrap_or(peer);
        let config = &snapshot.config;
        headers::normalize_received(request.headers_mut(), &config.protected_headers, peer.forwarded.trusted);
        let mut context = RequestContext::new(&snapshot, &self.sinks, peer, flow, &request);
        if let Some(response) = config.acme.as_ref().and_then(|acme| challenge_response(acme, &request)) {
            request_body::discard_body(request, flow);
            return context.complete(Ok(response));
        }
        // Take the body out of the request, because the headers are borrowed while the body is read.
        let mut body = mem::replace(request.body_mut(), RequestBody::empty());
        let admission = self.admit(&mut context, &request, &mut body).await;
        *request.body_mut() = body;
        // Render the values of response headers before the request is consumed.
        context.render_response_headers(&request);
        let result = match admission {
            Ok(admitted) => self.respond(&mut context, admitted, request).await,
            Err(rejection) => {
                if rejection.has_request_id() {
                    context.request_id(request.headers());
                }
                request_body::discard_body(request, flow);
                Err(rejection)
            }
        };
        context.complete(result)
    }

    /// Find the route of a request, check access rules, answer CORS preflights, check the declared body length, rewrite
    /// the target, authenticate the client and check the limits. The `body` is a separate argument, and is polled only
    /// if the route or a limit depends on it. A client that waits for `100 Continue` therefore does not send the body
    /// of a rejected request.
    ///
    /// # Errors
    /// The request is rejected, or it is a CORS preflight. In both cases, the [`Rejection`] determines the response.
    async fn admit<'a>(
        &self,
        context: &mut RequestContext<'a>,
        request: &Request<RequestBody>,
        body: &mut RequestBody,
    ) -> Result<AdmittedRequest<'a>, Rejection<'a>> {
        let config = &context.snapshot.config;
        let target = RequestTarget::from_request(request, &config.server)?;
        let preflight_route = target.find_preflight_route(config, request, context.peer.listener);
        let listener = context.peer.listener;
        let find_route = |body: RouteBody<'_>| target.find_route(config, request, listener, body);
        let found = match preflight_route.map_or_else(|| find_route(RouteBody::Unread), Ok) {
            Ok(route) => Ok(route),
            Err(NoMatch::NeedsBody) => {
                if config.checks_access {
                    // Check the access rules first, so that the body of a denied client is not read.
                    check_access(context, &target, None, request)?;
                }
                // Box the future, because only the few requests whose body is read need space for it.
                Box::pin(inspection::read_for_route(context, request, body)).await?;
                let no_values = JsonBody::default();
                let values = context.body.as_ref().and_then(|body| body.json()).unwrap_or(&no_values);
                find_route(RouteBody::Read(values)).map_err(routing_rejection)
            }
            Err(error) => Err(routing_rejection(error)),
        };
        if let Ok(route) = found {
            context.set_route(route);
            context.set_cors(route, request.headers(), preflight_route.is_some());
        }
        if config.checks_access {
            check_access(context, &target, found.as_ref().ok().copied(), request)?;
        }
        let route = found?;
        if preflight_route.is_some() {
            return Err(context.preflight(route, request));
        }
        if route.max_body.is_some_and(|max| body.size_hint().lower() > max) {
            return Err(Rejection::BodyTooLarge);
        }
        authentication::check_certificate(config, route, context.peer)?;
        let rewritten_target = target.rewrite(route, request.uri().query())?;
        let (mut credentials, mut authenticated) =
            authentication::authenticate(config, route, request.headers(), context.peer);
        if let Some(pending) = pending_provider(&authenticated) {
            authenticated =
                authentication::resume_from_cache(context, route, &mut credentials, pending, &target, request);
        }
        if let Some(pending) = pending_provider(&authenticated)
            && !route.rate_limits.reads_body()
            && let Some(denied) =
                authentication::denied_request(context, route, (&credentials, pending), &target, request)
        {
            // Box the future, because only requests of clients over their limits need space for it.
            let decision = Box::pin(rate_limit::deny_again(&self.limiter, context, route, denied, &target, request));
            if let Some(decision) = decision.await {
                return Err(rate_limited(context, route, request, decision));
            }
        }
        let needs_body = match pending_provider(&authenticated) {
            // If possible, read the body after the authentication, so that a request that gets 401 costs no parsing.
            Some(_) => route.rate_limits.reads_body_unauthenticated(),
            None => authenticated.is_ok() && route.rate_limits.reads_body(),
        };
        if needs_body {
            // Box the future, because only the few requests whose body is read need space for it.
            Box::pin(inspection::inspect(context, route, &target, request, body)).await?;
        }
        let decision = if let Some(pending) = pending_provider(&authenticated) {
            let pending = (credentials, pending);
            // Box the future, because requests that are authenticated without waiting need no space for it.
            Box::pin(rate_limit::check_limits_around_authentication(
                &self.limiter,
                context,
                route,
                pending,
                &target,
                (request, body),
            ))
            .await
        } else {
            // Check the limits even if the authentication has failed, because some limits need no credential. Without
            // limits, the check only records the client for the access log.
            let decision = if route.rate_limits.limits.is_empty() && !context.is_recorded() {
                authenticated.map(|()| Decision::unlimited())
            } else {
                let authenticated = (&credentials, authenticated);
                // Box the future, because requests without limits need no space for it.
                Box::pin(rate_limit::check_limits(&self.limiter, context, route, authenticated, &target, request)).await
            };
            context.credentials = credentials;
            decision
        }?;
        if !decision.admitted {
            return Err(rate_limited(context, route, request, decision));
        }
        let forwarded_path =
            (target.forwarded_path() != request.uri().path()).then(|| target.forwarded_path().to_owned());
        Ok(AdmittedRequest { route, decision, forwarded_path, rewritten_target })
    }

    /// Perform the action of the route, settle the costs that the response determines, and complete the response
    /// headers.
    async fn respond<'a>(
        &self,
        context: &mut RequestContext<'a>,
        admitted: AdmittedRequest<'a>,
        request: Box<Request<RequestBody>>,
    ) -> Result<Response<Body>, Rejection<'a>> {
        let AdmittedRequest { route, mut decision, forwarded_path, rewritten_target } = admitted;
        let result = match &route.action {
            RouteAction::DirectResponse(respond) => {
                request_body::discard_body(request, context.flow);
                Ok(respond.response())
            }
            RouteAction::Redirect(redirect) => {
                let path = forwarded_path.as_deref().unwrap_or(request.uri().path());
                let response = redirect.response(&request, &route.path_pattern, path);
                request_body::discard_body(request, context.flow);
                Ok(response?)
            }
            RouteAction::Forward(weighted_upstreams) => {
                // If the route rewrites the path, send the rewritten target, otherwise the path to forward.
                let target = rewritten_target.or_else(|| origin_form(request.uri(), forwarded_path.as_deref()));
                let index = weighted_upstreams.pick();
                let upstream = &*context.snapshot.upstreams[index];
                let started_at = monotonic();
                let mut attempts = AttemptLog::new(context.is_recorded());
                // Box the future. Otherwise it would be a part of this future, and would be moved with it for every
                // request.
                let result = Box::pin(forward::forward(context, route, upstream, request, target, &mut attempts)).await;
                context.snapshot.metrics.record_upstream(index, &result, started_at.elapsed(), &attempts);
                context.record_upstream(upstream, &attempts, &result, started_at);
                result
            }
        };
        if let (Some(llm), Ok(response)) = (context.llm.take(), &result) {
            context.settlement = llm.settlement(&mut decision, route, &context.snapshot.metrics, response);
        }
        // Settle the costs even if the upstream failed: the status may cause a refund. The response waits for the
        // settlement, so that its headers contain the values after the settlement.
        rate_limit::settle(&mut decision, route, &result).await;
        // Return early after an error. This drops the decision, which releases the permits of the request.
        let mut response = result.map_err(Rejection::Upstream)?;
        if route.cors.is_some() {
            cors::remove_headers(response.headers_mut());
        }
        // Apply the header rules after the settlement, which reads response headers that the rules may remove. Append
        // the RateLimit headers afterwards, so that the rules do not change the RateLimit headers.
        route.response_headers.apply(response.headers_mut(), &context.response_values);
        append_ratelimit_headers(response.headers_mut(), &route.rate_limits, &decision);
        // The concurrency permits of the request are released when the response body ends.
        context.permits = decision.permits;
        Ok(response)
    }
}

/// Return the rejection of a request that a limit has denied.
fn rate_limited<'a>(
    context: &RequestContext<'a>,
    route: &'a Route,
    request: &Request<RequestBody>,
    decision: Decision<'a>,
) -> Rejection<'a> {
    Rejection::RateLimited {
        decision,
        rate_limits: &route.rate_limits,
        is_grpc: is_grpc_call(request),
        provider: context.llm.as_ref().map(|llm| llm.provider),
    }
}

/// Return the index of the authentication provider that has to wait, for example for an authentication server, before
/// it can verify the credentials.
fn pending_provider(authenticated: &Result<(), Rejection<'_>>) -> Option<usize> {
    match authenticated {
        Err(Rejection::Auth(AuthRejection { error: AuthError::Pending(index), .. })) => Some(*index),
        _ => None,
    }
}

/// Return the response to an HTTP-01 challenge, by which a CA validates a DNS name (RFC 8555 §8.3). The challenge takes
/// precedence over routes, redirects and access rules. A request with an unknown token is routed like any other
/// request, because the CA may be validating the order of another ACME client.
fn challenge_response(acme: &Acme, request: &Request<RequestBody>) -> Option<Response<Body>> {
    let token = request.uri().path().strip_prefix(HTTP_CHALLENGE_PATH)?;
    if !matches!(*request.method(), Method::GET | Method::HEAD) {
        return None;
    }
    let key_authorization = acme.certificates.http_response(token)?;
    let mut response = Response::new(Body::full(Bytes::from(String::from(key_authorization))));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
    response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    Some(response)
}

/// A request that all its limits have admitted.
struct AdmittedRequest<'a> {
    route: &'a Route,
    /// The decision on the limits of the request, with permits and deferred charges.
    decision: Decision<'a>,
    /// Path to forward, if this path differs from the received path.
    forwarded_path: Option<String>,
    /// Path and query after the route's rewrite, if the route has one. If set, it replaces `forwarded_path`.
    rewritten_target: Option<PathAndQuery>,
}

// === Configuration snapshot ===

/// A configuration with the worker's upstream connections and metrics. The metrics have the same indices as the routes
/// and upstreams of the configuration. A reload replaces the whole snapshot.
#[derive(Debug)]
struct ConfigSnapshot {
    config: Arc<CompiledConfig>,
    upstreams: Vec<Arc<Upstream>>,
    metrics: WorkerMetrics,
    mirror_tasks: MirrorTasks,
}

impl ConfigSnapshot {
    /// Create the snapshot of the configuration with which the worker starts.
    pub(crate) fn new(
        config: Arc<CompiledConfig>,
        clusters: &[Arc<UpstreamCluster>],
        request_metrics: &RequestMetrics,
        worker: usize,
    ) -> Self {
        let metrics = WorkerMetrics::new(request_metrics, &config, worker);
        let upstreams = clusters.iter().cloned().map(Upstream::new).map(Arc::new).collect();
        ConfigSnapshot { config, upstreams, metrics, mirror_tasks: MirrorTasks::default() }
    }

    /// Create the snapshot that replaces `previous`. Take over the connections of `previous` to upstreams that still
    /// exist.
    pub(crate) fn carry_over(
        previous: &ConfigSnapshot,
        config: Arc<CompiledConfig>,
        clusters: &[Arc<UpstreamCluster>],
        request_metrics: &RequestMetrics,
        worker: usize,
    ) -> Self {
        let upstream = |cluster: &Arc<UpstreamCluster>| {
            let existing = previous.upstreams.iter().find(|upstream| upstream.name() == &*cluster.settings.name);
            match existing {
                Some(existing) if existing.is_for(cluster) => existing.clone(),
                Some(existing) => Arc::new(Upstream::from_previous(cluster.clone(), existing)),
                None => Arc::new(Upstream::new(cluster.clone())),
            }
        };
        let metrics = WorkerMetrics::new(request_metrics, &config, worker);
        let mirror_tasks = previous.mirror_tasks.clone();
        ConfigSnapshot { upstreams: clusters.iter().map(upstream).collect(), config, metrics, mirror_tasks }
    }
}

// === The request target: host and path in the form used for routing ===

/// Maximum length in bytes of a target that `http::Uri` supports.
const MAX_URI_BYTES: usize = 65_534;

/// Return the rejection of a request that no route matches, or for which the body does not determine one route.
pub fn routing_rejection(error: NoMatch) -> Rejection<'static> {
    match error {
        NoMatch::NotFound => Rejection::NoRoute,
        // This arm is not reached, because the caller reads the body first.
        NoMatch::NeedsBody => Rejection::NoRoute,
        NoMatch::MethodNotAllowed(allowed) => Rejection::MethodNotAllowed(allowed),
        NoMatch::Ambiguous(pointer) => Rejection::Inspect(InspectError::Ambiguous(pointer)),
    }
}

/// Host and path of a request in the form that routes match.
#[derive(Debug)]
pub struct RequestTarget<'a> {
    /// Host in lower case without port. Empty if the request has no host.
    pub host: Cow<'a, str>,
    /// Path of the request in canonical form.
    pub path: Cow<'a, str>,
    /// Path to forward, if it differs from the canonical path: encoded delimiters stay encoded.
    pub forwarded_path: Option<Box<str>>,
}

impl<'a> RequestTarget<'a> {
    /// Parse and check the target of a request.
    ///
    /// # Errors
    /// The gateway does not accept the target, the method, the number of headers or the transfer coding.
    pub fn from_request<B>(request: &'a Request<B>, settings: &ServerSettings) -> Result<Self, Rejection<'static>> {
        let uri = request.uri();
        // Check the transfer coding first: its rejection closes the connection, because the following bytes may not be
        // a request.
        let mut codings = request.headers().get_all(TRANSFER_ENCODING).iter();
        let is_chunked = codings.next().is_none_or(|coding| coding.as_bytes().eq_ignore_ascii_case(b"chunked"));
        if !is_chunked || codings.next().is_some() {
            return Err(Rejection::UnsupportedTransferCoding);
        }
        if matches!(*request.method(), Method::CONNECT | Method::TRACE) {
            return Err(Rejection::MethodNotImplemented);
        }
        // Some servers treat `post` as POST, but the routes and limits for POST would not match `post`.
        if request.method().as_str().bytes().any(|byte| byte.is_ascii_lowercase()) {
            return Err(Rejection::LowercaseMethod);
        }
        // Check the number of headers only for HTTP/2, because hyper enforces the maximum for HTTP/1.1.
        let (headers, max_headers) = (request.headers(), settings.max_headers);
        if request.version() == Version::HTTP_2
            && headers.len() > max_headers
            && http1_header_count(headers) > max_headers
        {
            return Err(Rejection::TooManyHeaders);
        }
        let length = uri.path_and_query().map_or(0, |target| target.as_str().len());
        if length > settings.max_uri {
            return Err(Rejection::UriTooLong);
        }
        let host = request_host(uri, request.headers(), request.version()).map_err(Rejection::InvalidHost)?;
        let path = canonical_path(uri.path()).map_err(Rejection::InvalidPath)?;
        let forwarded_path = if uri.path().contains('%') {
            let forwarded_path = forwarded_path(uri.path()).map_err(Rejection::InvalidPath)?;
            (forwarded_path != path).then(|| forwarded_path.into())
        } else {
            None
        };
        let target = RequestTarget { host, path, forwarded_path };
        // Check the length again, because percent-encoding may make the target longer than the received target.
        if length - uri.path().len().min(length) + target.forwarded_path().len() > settings.max_uri.min(MAX_URI_BYTES) {
            return Err(Rejection::UriTooLong);
        }
        Ok(target)
    }

    /// Return the path to forward. The forwarded path has the same segments as the canonical path.
    pub fn forwarded_path(&self) -> &str {
        self.forwarded_path.as_deref().unwrap_or(&self.path)
    }

    /// Return the canonical form of the path that the upstream gets, which is the path after the route's rewrite.
    ///
    /// # Errors
    /// See [`RequestTarget::rewrite`].
    pub fn upstream_path(&self, route: &Route) -> Result<Cow<'_, str>, Rejection<'static>> {
        let Some(rewritten) = self.rewrite(route, None)? else { return Ok(Cow::Borrowed(&self.path)) };
        let path = canonical_path(rewritten.path()).map_err(Rejection::InvalidPath)?;
        Ok(Cow::Owned(path.into_owned()))
    }

    /// Return the parts of the request that routes match. `listener` is the index of the listener that accepted the
    /// connection.
    pub fn route_request<'r, B>(&'r self, request: &'r Request<B>, listener: usize) -> RouteRequest<'r> {
        RouteRequest {
            host: &self.host,
            path: &self.path,
            uri: request.uri(),
            method: request.method(),
            headers: request.headers(),
            listener,
            body: RouteBody::Unread,
        }
    }

    /// Return the route of the request. `listener` is the index of the listener.
    ///
    /// # Errors
    /// No route matches the request, or only routes with other methods match. The error also occurs if the choice of
    /// the route depends on a body that was not read.
    pub fn find_route<'r, B>(
        &self,
        config: &'r CompiledConfig,
        request: &Request<B>,
        listener: usize,
        body: RouteBody<'_>,
    ) -> Result<&'r Route, NoMatch> {
        let route_request = RouteRequest { body, ..self.route_request(request, listener) };
        config.table.find(&route_request).map(|route| &**route)
    }

    /// Return the route of a CORS preflight: the route for the requested method, if this route has a CORS policy.
    /// Return `None` if the request is not a preflight, or if the route has no CORS policy, so that the upstream
    /// answers the preflight.
    pub fn find_preflight_route<'r, B>(
        &self,
        config: &'r CompiledConfig,
        request: &Request<B>,
        listener: usize,
    ) -> Option<&'r Route> {
        let method = cors::requested_method(request.method(), request.headers())?;
        // Treat conditions on the body as met, because a preflight has no body.
        let body = RouteBody::Unknown;
        let route_request = RouteRequest { method: &method, body, ..self.route_request(request, listener) };
        let route = config.table.find(&route_request).ok()?;
        route.cors.is_some().then_some(&**route)
    }

    /// Return path and query after the route's rewrite, or `None` if the route has no rewrite.
    ///
    /// # Errors
    /// The result is longer than the maximum, or its path is not canonical.
    pub fn rewrite(&self, route: &Route, query: Option<&str>) -> Result<Option<PathAndQuery>, Rejection<'static>> {
        let Some(rewrite) = &route.rewrite else { return Ok(None) };
        let target = rewrite.apply(&route.path_pattern, self.forwarded_path(), query);
        // Building the target fails only if it is too long, because the result is in canonical form.
        let target = PathAndQuery::try_from(target.map_err(Rejection::InvalidPath)?);
        target.map(Some).map_err(|_| Rejection::UriTooLong)
    }
}

/// Return the target in origin form (RFC 9112 §3.2.1) with `path`, the path to forward. Return `None` if the received
/// target already has this form and path.
pub fn origin_form(uri: &Uri, path: Option<&str>) -> Option<PathAndQuery> {
    if path.is_none() && uri.authority().is_none() {
        return None;
    }
    let path = path.unwrap_or(uri.path());
    let target = match uri.query() {
        Some(query) => format!("{path}?{query}"),
        None => path.to_owned(),
    };
    // The conversion cannot fail, because a path to forward and a parsed query form a valid target.
    Some(PathAndQuery::try_from(target).unwrap_or(PathAndQuery::from_static("/")))
}

// === Access: unknown hosts, and the access rules of the listener and the route ===

/// Check the host and the client address of a request. The rules of the listener also apply if no route matches, so
/// that a denied client cannot find out which routes exist.
///
/// # Errors
/// No route names the host, or an access rule denies the client.
fn check_access<B>(
    context: &mut RequestContext<'_>,
    target: &RequestTarget<'_>,
    route: Option<&Route>,
    request: &Request<B>,
) -> Result<(), Rejection<'static>> {
    let config = &*context.snapshot.config;
    check_host(config, target)?;
    let rules = access_rules(config, context.peer.listener, route);
    if rules.iter().all(Option::is_none) {
        return Ok(());
    }
    let client = context.peer.client_address(request.headers());
    if rules.into_iter().flatten().all(|rules| rules.decide(client).is_allowed()) {
        return Ok(());
    }
    context.record_client(client, route);
    Err(Rejection::Forbidden)
}

/// Check that a route names the host, if `server.block_unknown_hosts` is set.
///
/// # Errors
/// No route names the host of the request.
pub fn check_host(config: &CompiledConfig, target: &RequestTarget<'_>) -> Result<(), Rejection<'static>> {
    match config.server.block_unknown_hosts && !config.table.names_host(&target.host) {
        true => Err(Rejection::UnknownHost),
        false => Ok(()),
    }
}

/// Return the access rules of a listener, given by its index, and of a route.
pub fn access_rules<'r>(
    config: &'r CompiledConfig,
    listener: usize,
    route: Option<&'r Route>,
) -> [Option<&'r AccessRules>; 2] {
    let listener = config.listeners.get(listener);
    [listener.and_then(|listener| listener.access.as_ref()), route.and_then(|route| route.access.as_deref())]
}
