//! Request handling: admission, the action of the route, and the response.

pub mod admission;
pub mod body;
mod config_snapshot;
mod decision_api;
mod decisions;
pub mod descriptor_checks;
mod ext_authz;
pub mod forward;
mod forward_auth;
pub mod held_decisions;
pub mod holdings;
pub mod llm;
pub mod local_reply;
pub mod metrics;
pub mod mirror;
pub mod mirror_state;
mod named_limits;
pub mod rate_limit;
mod ratelimit_json;
mod ratelimit_service;
pub mod record;
pub mod rejection;
pub mod request;

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant as StdInstant};
use std::{mem, ptr};

use arc_swap::ArcSwap;
use futures_util::future::join_all;
use http::header::{CACHE_CONTROL, CONTENT_LENGTH, CONTENT_TYPE, HeaderName, HeaderValue, UPGRADE};
use http::uri::PathAndQuery;
use http::{Method, Request, Response, StatusCode, Version};
use http_body::Body as _;
use hyper::body::Incoming;
use hyper::upgrade::OnUpgrade;
use tokio::time::{Instant, timeout_at};
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

use crate::boxed::boxed;
use crate::clock;
use crate::clock::{LogThrottle, monotonic};
use crate::http::body::Body;
use crate::http::body_limits::INSPECTED_SHARE;
use crate::http::compression::CompressionOffer;
use crate::http::cors;
use crate::http::error_pages::ErrorPage;
use crate::http::flow::StreamFlow;
use crate::http::grpc::CallError;
use crate::http::headers;
use crate::http::headers::RenderedValues;
use crate::http::memory_guard::{MemoryGuard, NoMemory, RoomPermit};
use crate::http::problem::NO_STORE;
use crate::http::request_body;
use crate::http::request_body::{ReplayBody, RequestBody};
use crate::http::upgrade::{ExtendedConnect, UpgradeRequest};
use crate::identity::auth::{Credentials, ProviderKind, Verified};
use crate::identity::forward::{CacheKey, ForwardProvider};
use crate::identity::spec::RequestAttributes;
use crate::identity::verification::{AuthError, Proof, Verification};
use crate::limiter::Limiter;
use crate::limiter::decision::{Decision, LimitCheck};
use crate::limiter::fallback::StoreUnavailable;
use crate::limiter::overrides::OverrideTable;
use crate::payload::llm::request::with_usage_option;
use crate::payload::mcp_tools::{ToolFilter, ToolRules};
use crate::proxy::admission::{Admission, AdmissionIo, Admitted, RequestFacts};
use crate::proxy::body::{BodyContent, BodyRead};
use crate::proxy::config_snapshot::ConfigSnapshot;
use crate::proxy::decision_api::{
    ApiError, ApiMethod, Check, Decision as ApiDecision, DecisionId, Described, Limits, Release, Settle,
};
use crate::proxy::decisions::{Description, Endpoint};
use crate::proxy::forward::{Forwarding, RequestVariables};
use crate::proxy::forward_auth::AuthServer;
use crate::proxy::held_decisions::{HeldDecision, HeldDecisions, HeldLimits};
use crate::proxy::holdings::{Held, Holdings};
use crate::proxy::llm::{LlmRequest, UpstreamResponses};
use crate::proxy::local_reply::ReplyFormat;
use crate::proxy::metrics::{LimitDecision, RequestMetrics};
use crate::proxy::named_limits::{NamedCall, NamedLimits};
use crate::proxy::ratelimit_service::RateLimitService;
use crate::proxy::record::Record;
use crate::proxy::rejection::{LlmError, Rejection};
use crate::proxy::request::{Origin, Peer, RequestHead, TargetedRequest, origin_form};
use crate::snapshot::CompiledConfig;
use crate::snapshot::route_action::{DirectResponse, RouteAction};
use crate::snapshot::route_retry::Fallback;
use crate::snapshot::routes::Route;
use crate::telemetry::access_log::TelemetrySinks;
use crate::telemetry::outcome::RequestOutcome;
use crate::upstream::cluster::UpstreamCluster;
use crate::upstream::error::UpstreamError;
use crate::upstream::retry::{AttemptLog, ReplacedResponse};

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
    /// Decisions of all workers that programs settle later.
    held_decisions: Arc<HeldDecisions>,
    /// Index of the worker thread.
    worker: usize,
    memory_guard: Arc<MemoryGuard>,
}

/// The worker of a gateway, and what it shares with the other workers.
#[derive(Debug, Default)]
pub struct GatewayWorker {
    /// Metrics of all workers.
    pub request_metrics: Arc<RequestMetrics>,
    /// Decisions of all workers that programs settle later.
    pub held_decisions: Arc<HeldDecisions>,
    /// Index of the worker thread.
    pub worker: usize,
    /// Cancelled when load balancers must stop sending requests to this gateway.
    pub stopping: CancellationToken,
    /// Whether the memory of the process is nearly used up.
    pub memory_guard: Arc<MemoryGuard>,
}

impl Gateway {
    /// Create a gateway with its own connections to the upstreams in `clusters`, which has one entry for each of
    /// `config.upstreams`, in the same order.
    pub fn new(
        config: Arc<CompiledConfig>,
        limiter: Limiter,
        clusters: &[Arc<UpstreamCluster>],
        sinks: TelemetrySinks,
        worker: GatewayWorker,
    ) -> Self {
        let GatewayWorker { request_metrics, held_decisions, worker, stopping, memory_guard } = worker;
        let snapshot = ConfigSnapshot::new(config, clusters, &request_metrics, worker, stopping);
        let snapshot = ArcSwap::from_pointee(snapshot);
        Gateway { snapshot, limiter, sinks: Arc::new(sinks), request_metrics, held_decisions, worker, memory_guard }
    }

    /// Replace the configuration. The new configuration applies from the next request on. Metrics and upstream
    /// connections of routes, limits and upstreams that exist in both configurations are carried over.
    pub fn apply_config(&self, config: Arc<CompiledConfig>, clusters: &[Arc<UpstreamCluster>]) {
        let snapshot =
            ConfigSnapshot::carry_over(&self.snapshot.load(), config, clusters, &self.request_metrics, self.worker);
        self.snapshot.store(Arc::new(snapshot));
    }

    /// Drop the metrics of routes, limits and upstreams that the configuration does not use any more, if they are too many.
    pub fn drop_unused_metrics(&self) {
        self.request_metrics.drop_unused();
    }

    /// Return the current configuration.
    pub fn config(&self) -> Arc<CompiledConfig> {
        self.snapshot.load().config.clone()
    }

    /// Answer a call on a listener of the rate limit service. `is_draining` is true while the gateway shuts down.
    pub async fn answer_call(
        &self,
        request: Request<Incoming>,
        peer: &Peer,
        flow: &StreamFlow,
        is_draining: bool,
    ) -> Response<Body> {
        let snapshot = self.snapshot.load_full();
        let service = RateLimitService { limiter: &self.limiter, sinks: &self.sinks, snapshot: &snapshot };
        service.answer(request, peer, flow, is_draining).await
    }

    /// Answer a request on a listener with `protocol = "ratelimit-http"`.
    pub async fn answer_json(
        &self,
        request: Box<Request<RequestBody>>,
        peer: &Peer,
        flow: &Arc<StreamFlow>,
    ) -> Box<Response<Body>> {
        let snapshot = self.snapshot.load_full();
        let revalidated = peer.revalidate(&snapshot.config);
        let peer = revalidated.as_deref().unwrap_or(peer);
        let service = RateLimitService { limiter: &self.limiter, sinks: &self.sinks, snapshot: &snapshot };
        Box::new(ratelimit_json::answer(&service, request, peer, flow).await)
    }

    /// Return the guard that tells whether the memory of the process is nearly used up.
    pub fn memory_guard(&self) -> &MemoryGuard {
        &self.memory_guard
    }

    /// Return the time after which this worker may accept the next connection. `None`: at once.
    pub fn accept_delay(&self) -> Option<Duration> {
        self.memory_guard.accept_delay(self.worker)
    }

    /// Count a connection that this worker has accepted. Return `None` without a memory limit.
    pub fn start_connection(&self) -> Option<RoomPermit> {
        self.memory_guard.start_connection(self.worker)
    }

    /// Start a request if there is memory for it. If it may wait, wait for a short time.
    ///
    /// # Errors
    /// The memory is nearly used up, or other requests have used up the room for new ones.
    pub async fn start_request(&self, may_wait: bool) -> Result<RoomPermit, NoMemory> {
        self.memory_guard.start_request(self.worker, may_wait).await
    }

    /// Record the response to a request that the HTTP parser has rejected.
    pub fn record_unparsed(&self, status: StatusCode) {
        self.snapshot.load().metrics.record_unparsed(status);
    }

    /// Wait until the background tasks of requests are done: releases of permits and deferred charges. No program can
    /// settle a decision of this worker any more.
    pub async fn flush_pending(&self) {
        self.held_decisions.drop_of(self.worker);
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
    ) -> Box<Response<Body>> {
        let snapshot = self.snapshot.load_full();
        // Check again whether the peer is trusted, because a reload may have changed the trusted proxies since the
        // connection was accepted.
        let revalidated = peer.revalidate(&snapshot.config);
        let peer = revalidated.as_deref().unwrap_or(peer);
        let config = &snapshot.config;
        headers::normalize_received(request.headers_mut(), &config.protected_headers, peer.forwarded.trusted);
        let mut exchange = Exchange::new(&snapshot, &self.sinks, peer, flow, &request);
        // Take the body out of the request, because the headers are borrowed while the body is read.
        let mut body = mem::replace(request.body_mut(), RequestBody::empty());
        let Exchange { facts, record, .. } = &mut exchange;
        let mut io =
            GatewayIo { limiter: &self.limiter, snapshot: &snapshot, peer, flow, record, body: &mut body, time: None };
        let admission = admission::admit(&mut io, facts, (&*request).into(), peer.origin(request.headers())).await;
        *request.body_mut() = body;
        exchange.record.consumer(&exchange.facts.credentials);
        // Render the values of response headers before the request is consumed.
        exchange.render_response_headers(&request);
        match admission {
            Admission::Admitted(admitted) => match exchange.respond(admitted, request).await {
                Ok(mut response) => {
                    exchange.send(&mut response, RequestOutcome::Ok);
                    response
                }
                Err(rejection) => exchange.reject(rejection),
            },
            Admission::Answered(answer) => {
                request_body::discard_body(request, flow);
                let (mut response, outcome) = answer.into_response();
                exchange.send(&mut response, outcome);
                response
            }
            Admission::Rejected(rejection) => {
                if rejection.has_request_id() {
                    exchange.record.request_id(request.headers());
                }
                request_body::discard_body(request, flow);
                exchange.reject(rejection)
            }
            Admission::Undecided(never) => match never {},
        }
    }
}

// === Decisions about requests that other proxies describe ===

/// What the response to a request for a decision depends on.
#[derive(Default)]
struct Message {
    /// See [`Exchange::has_unread_body`].
    has_unread_body: bool,
    /// See [`Exchange::is_http2_head`].
    is_http2_head: bool,
}

impl Gateway {
    /// Decide about the request that a proxy describes, and answer instead of forwarding the request. The decision is
    /// the same as if the client had sent the described request to this gateway.
    pub async fn decide(
        &self,
        mut request: Box<Request<RequestBody>>,
        peer: &Peer,
        flow: &Arc<StreamFlow>,
    ) -> Box<Response<Body>> {
        let snapshot = self.snapshot.load_full();
        let revalidated = peer.revalidate(&snapshot.config);
        let peer = revalidated.as_deref().unwrap_or(peer);
        if headers::is_grpc_call(request.method(), request.version(), request.headers()) {
            let called = boxed(|| self.check_call(&snapshot, request, peer, flow)).await;
            return called.unwrap_or_else(|error| Box::new(error.into_response()));
        }
        if let Some(method) = ApiMethod::at(request.uri().path()) {
            let answered = boxed(|| self.answer_program(&snapshot, request, method, peer, flow)).await;
            return answered.unwrap_or_else(ApiError::into_response);
        }
        let message = Message {
            has_unread_body: request_body::has_unread_body(&request),
            is_http2_head: request.method() == Method::HEAD && request.version() == Version::HTTP_2,
        };
        let description = Description::read(&mut request, peer, &snapshot.config);
        request_body::discard_body(request, flow);
        let mut response = self.answer(&snapshot, peer, description, flow, message).await;
        decisions::set_denied_status(&mut response, decisions::settings(&snapshot.config, peer.listener));
        response
    }

    /// Answer a call of the JSON API.
    async fn answer_program(
        &self,
        snapshot: &ConfigSnapshot,
        mut request: Box<Request<RequestBody>>,
        method: ApiMethod,
        peer: &Peer,
        flow: &Arc<StreamFlow>,
    ) -> Result<Box<Response<Body>>, ApiError> {
        if let Err(error) = decision_api::authorize(&request, peer, &snapshot.config) {
            request_body::discard_body(request, flow);
            return Err(error);
        }
        let received_at = monotonic();
        let head = request_head(&request);
        let read = body::read_whole(request.body_mut(), snapshot, peer, head.headers(), decision_api::MAX_BODY).await?;
        let take = |id| self.held_decisions.take(id).ok_or_else(ApiError::unknown_decision);
        match method {
            ApiMethod::Check => match decision_api::parse_check(read)? {
                Check::One(described) => {
                    let decisions = self.check_requests(snapshot, vec![described], &head, peer, flow).await?;
                    decisions.first().map(decision_api::decision).ok_or_else(ApiError::store_unavailable)
                }
                Check::Several(several) => {
                    let decisions = self.check_requests(snapshot, several.requests, &head, peer, flow).await?;
                    Ok(decision_api::decisions(&decisions))
                }
                Check::Limits(limits) => {
                    let call = NamedCall { head: &head, peer, received_at };
                    Ok(decision_api::decision(&self.check_limits(&snapshot.config, &limits, &call).await?))
                }
            },
            ApiMethod::Settle => {
                let settle: Settle = decision_api::parse(read)?;
                let response = settle.response()?;
                if let Some(name) = self.held_decisions.unknown_cost(settle.id, &settle.costs) {
                    return Err(ApiError::bad_request(format!(
                        "the cost of `{name}` is final, or no single limit of the decision has this name"
                    )));
                }
                take(settle.id)?.settle(response, &settle.costs).await;
                Ok(decision_api::done())
            }
            ApiMethod::Release => {
                let Release { id } = decision_api::parse(read)?;
                take(id)?.release().await;
                Ok(decision_api::done())
            }
        }
    }

    /// Decide about described requests at the same time, so that their checks share a batch.
    async fn check_requests(
        &self,
        snapshot: &ConfigSnapshot,
        requests: Vec<Described>,
        head: &Request<()>,
        peer: &Peer,
        flow: &Arc<StreamFlow>,
    ) -> Result<Vec<ApiDecision>, ApiError> {
        let config = &snapshot.config;
        let settings = decisions::settings(config, peer.listener);
        if settings.is_some_and(|settings| settings.settle_timeout.is_some())
            && !self.held_decisions.has_room(requests.len())
        {
            return Err(ApiError::too_many_decisions());
        }
        let decide = |described: Described| {
            let described = described.client_request(settings);
            let description = Description::new(described, head, peer, config);
            self.answer(snapshot, peer, description, flow, Message::default())
        };
        let responses = join_all(requests.into_iter().map(decide)).await;
        Ok(responses.into_iter().map(|response| ApiDecision::new(*response)).collect())
    }

    /// Decide about limits that a program names.
    async fn check_limits(
        &self,
        config: &CompiledConfig,
        Limits { limits, reserve }: &Limits,
        call: &NamedCall<'_>,
    ) -> Result<ApiDecision, ApiError> {
        let named = NamedLimits::resolve(limits, config).map_err(ApiError::bad_request)?;
        let time = decisions::settings(config, call.peer.listener).and_then(|settings| settings.settle_timeout);
        if time.is_none() && (*reserve || named.has_permits()) {
            let detail = "set `settle_timeout` in the [[listener]] to reserve costs, or to limit concurrency";
            return Err(ApiError::bad_request(detail));
        }
        if time.is_some() && !self.held_decisions.has_room(1) {
            return Err(ApiError::too_many_decisions());
        }
        let overrides = self.limiter.overrides.current();
        let checks = named.checks(overrides.as_deref(), *reserve).map_err(ApiError::bad_request)?;
        let started_at = monotonic();
        let decision = self.limiter.check(&checks).await;
        let elapsed = started_at.elapsed();
        for check in &checks {
            if let Some(effect) = LimitDecision::from_result(check, &decision) {
                self.request_metrics.limits.get_or_create(&check.limit.name, self.worker).increment(effect as usize);
            }
        }
        let mut response = Response::new(Body::full(""));
        *response.status_mut() = match &decision {
            Ok(decision) => named.answer(decision, response.headers_mut()),
            Err(_) => StatusCode::SERVICE_UNAVAILABLE,
        };
        call.write_record(&self.sinks, &checks, &decision, response.status(), elapsed);
        let mut decision = decision.map_err(|_| ApiError::store_unavailable())?;
        if let Some(time) = time
            && let Some(held) = HeldDecision::take(&mut decision, HeldLimits::Named(named.specs()))
        {
            response.extensions_mut().insert(DecisionId(self.held_decisions.hold(held, self.worker, time)));
        }
        Ok(ApiDecision::new(response))
    }

    /// Answer a call of Envoy's external authorization.
    async fn check_call(
        &self,
        snapshot: &ConfigSnapshot,
        request: Box<Request<RequestBody>>,
        peer: &Peer,
        flow: &Arc<StreamFlow>,
    ) -> Result<Box<Response<Body>>, CallError> {
        let ConfigSnapshot { config, metrics, .. } = snapshot;
        let max_read = config.server.max_buffered / INSPECTED_SHARE;
        let share = metrics.inspected_by_network.share(config.client_ip.network(peer.address), max_read);
        let head = request_head(&request);
        let check = ext_authz::read(head.uri().path(), request.into_body(), flow, share).await?;
        let described = ext_authz::client_request(check, peer, config);
        let description = Description::new(described, &head, peer, config);
        let response = self.answer(snapshot, peer, description, flow, Message::default()).await;
        Ok(Box::new(ext_authz::response(*response, decisions::settings(config, peer.listener))))
    }

    /// Decide about a described request, and return the response to the proxy.
    async fn answer(
        &self,
        snapshot: &ConfigSnapshot,
        peer: &Peer,
        description: Description,
        flow: &Arc<StreamFlow>,
        message: Message,
    ) -> Box<Response<Body>> {
        let Description { request, client, endpoint, error } = description;
        let peer = client.as_ref().unwrap_or(peer);
        let mut exchange = Exchange::new(snapshot, &self.sinks, peer, flow, &request);
        exchange.has_unread_body = message.has_unread_body;
        exchange.is_http2_head = message.is_http2_head;
        let result = match error {
            Some(error) => {
                decisions::log(&error, peer);
                Err(Rejection::Undescribed(error))
            }
            None => self.decide_described(&mut exchange, &request, endpoint).await,
        };
        match result {
            Ok(mut response) => {
                exchange.send(&mut response, RequestOutcome::Ok);
                response
            }
            Err(rejection) => exchange.reject(rejection),
        }
    }

    /// Run the sequence of admission for a described request, and return the response that admits it.
    async fn decide_described<'a>(
        &self,
        exchange: &mut Exchange<'a>,
        request: &Request<RequestBody>,
        endpoint: Endpoint,
    ) -> Result<Box<Response<Body>>, Rejection<'a>> {
        let Exchange { snapshot, peer, flow, .. } = *exchange;
        let mut body = RequestBody::empty();
        let Exchange { facts, record, .. } = exchange;
        let mut io = GatewayIo { limiter: &self.limiter, snapshot, peer, flow, record, body: &mut body, time: None };
        let admission = admission::admit(&mut io, facts, request.into(), peer.origin(request.headers())).await;
        exchange.record.consumer(&exchange.facts.credentials);
        exchange.render_response_headers(request);
        exchange.reply.compression = None;
        let settings = decisions::settings(&snapshot.config, peer.listener);
        let mut response = match admission {
            Admission::Admitted(mut admitted) => {
                let route = admitted.route;
                let mut response = match decisions::reply(&admitted, request, snapshot.is_ready())? {
                    Some(reply) => reply,
                    None => {
                        let request_id = exchange.record.request_id(request.headers()).to_header_value();
                        let credentials = &exchange.facts.credentials;
                        let head = RequestHead::from(request);
                        let variables = RequestVariables { route, peer, credentials, head, request_id };
                        decisions::admission(settings, endpoint, &variables)
                    }
                };
                let policy_header = snapshot.policy_header(route);
                route.rate_limits.append_headers(response.headers_mut(), &admitted.decision, policy_header);
                if let Some(time) = settings.and_then(|settings| settings.settle_timeout) {
                    self.hold(&mut admitted.decision, snapshot.config.routes[route.index].clone(), &mut response, time)
                        .await;
                }
                response
            }
            // The proxy forwards challenges, and their response comes from the application.
            Admission::Answered(_) => decisions::admission_without_identity(settings, endpoint, request.headers()),
            Admission::Rejected(rejection) => {
                if rejection.has_request_id() {
                    exchange.record.request_id(request.headers());
                }
                return Err(rejection);
            }
            Admission::Undecided(never) => match never {},
        };
        response.headers_mut().insert(CACHE_CONTROL, NO_STORE);
        Ok(Box::new(response))
    }

    /// Hold what an admitted request holds at its limits until the program settles it, and add the id to the response.
    /// If the route itself responds, its response settles the decision.
    async fn hold(
        &self,
        decision: &mut Decision<'_>,
        route: Arc<Route>,
        response: &mut Response<Body>,
        time: Duration,
    ) {
        let Some(held) = HeldDecision::take(decision, HeldLimits::Route(route)) else { return };
        if response.status() == StatusCode::OK {
            response.extensions_mut().insert(DecisionId(self.held_decisions.hold(held, self.worker, time)));
        } else {
            let mut replied = Response::new(Body::full(""));
            *replied.status_mut() = response.status();
            replied.headers_mut().clone_from(response.headers());
            held.settle(replied, &BTreeMap::new()).await;
        }
    }
}

// === Admission: the input and output of the sequence in `admission.rs` ===

/// The input and output of the sequence in the gateway.
struct GatewayIo<'g, 'a> {
    limiter: &'g Limiter,
    snapshot: &'a ConfigSnapshot,
    peer: &'a Peer,
    flow: &'a Arc<StreamFlow>,
    record: &'g mut Record<'a>,
    body: &'g mut RequestBody,
    /// Time when the first rate limit check began, and the duration of all checks.
    time: Option<(StdInstant, Duration)>,
}

impl AdmissionIo for GatewayIo<'_, '_> {
    type Undecided = Infallible;

    fn body_length(&self, _: RequestHead<'_>) -> u64 {
        self.body.size_hint().lower()
    }

    async fn read_body(&mut self, head: RequestHead<'_>, read: BodyRead) -> Result<BodyContent, Rejection<'static>> {
        body::read(self.body, self.snapshot, self.peer, head.headers, read).await
    }

    fn located(&mut self, facts: &RequestFacts<'_>, origin: &Origin<'_>) {
        self.record.located(origin, facts.route);
    }

    async fn counts_tokens(&mut self, llm: &mut LlmRequest, route: &Route) -> Result<(), LlmError> {
        self.record.model(llm.model(None), llm.operation);
        llm.is_traced = self.record.trace().is_some();
        if route.rate_limits.llm.is_some_and(|llm| llm.learns_output) {
            llm.learned = Some(self.snapshot.metrics.learned_output.clone());
        }
        if llm.has_aliases {
            body::replace_models(self.body, self.snapshot, route, None).await?;
        }
        Ok(())
    }

    fn verify_at_once(&mut self, request: &TargetedRequest<'_>, provider: usize) -> Option<Verification> {
        match &self.snapshot.config.auth.providers[provider].kind {
            ProviderKind::Forward(forward) => {
                let server =
                    AuthServer { snapshot: self.snapshot, flow: self.flow, provider: forward, index: provider };
                server.verify_cached(|| forward_auth::told_headers(forward, forward.settings.told, self.peer, request))
            }
            ProviderKind::ApiKey(_) | ProviderKind::Jwt(_) | ProviderKind::ClientCert | ProviderKind::Basic(_) => None,
        }
    }

    async fn verify(
        &mut self,
        request: &TargetedRequest<'_>,
        route: &Route,
        deadline: Option<Instant>,
        provider: usize,
    ) -> Result<Verification, Infallible> {
        let verify = async {
            match &self.snapshot.config.auth.providers[provider].kind {
                ProviderKind::Forward(forward) => {
                    let headers = forward_auth::told_headers(forward, forward.settings.told, self.peer, request);
                    let request_id = self.record.request_id(request.head.headers).to_header_value();
                    let snapshot = self.snapshot;
                    let flow = self.flow;
                    AuthServer { snapshot, flow, provider: forward, index: provider }.verify(headers, request_id).await
                }
                ProviderKind::Basic(basic) => {
                    let network = self.snapshot.config.client_ip.network(request.origin.client);
                    basic.verify_with_hash(request.head.headers, network).await
                }
                ProviderKind::Jwt(verifier) => verifier.verify_with_new_keys(&request.auth_request(route)).await,
                // This code is not reached, because providers of these kinds never wait.
                ProviderKind::ApiKey(_) | ProviderKind::ClientCert => Verification::Absent,
            }
        };
        Ok(match deadline {
            None => verify.await,
            Some(deadline) => timeout_at(deadline, verify).await.unwrap_or_else(|_| {
                let reason = "the request was not authenticated within its timeout";
                Verification::Unavailable(AuthError::Unavailable(reason))
            }),
        })
    }

    fn admitted_before<'a>(
        &self,
        request: &TargetedRequest<'_>,
        route: &Route,
        credentials: &Credentials<'a>,
        provider: usize,
    ) -> Option<Credentials<'a>> {
        let ProviderKind::Forward(forward) = &self.snapshot.config.auth.providers[provider].kind else { return None };
        if forward.denied.is_empty() {
            return None;
        }
        let admission = forward.denied.get(self.denied_key(forward, request, route))?;
        let mut credentials = credentials.clone();
        let verification = Verification::Valid(Proof::Forward(admission));
        match credentials.resume(provider, verification, &request.auth_request(route)) {
            Verified::Yes => Some(credentials),
            Verified::Waits(_) | Verified::No(_) => None,
        }
    }

    fn forget_denied(&self, request: &TargetedRequest<'_>, route: &Route, provider: usize) {
        if let ProviderKind::Forward(forward) = &self.snapshot.config.auth.providers[provider].kind {
            forward.denied.remove(self.denied_key(forward, request, route));
        }
    }

    fn remember_denied(&self, request: &TargetedRequest<'_>, route: &Route, credentials: &Credentials<'_>) {
        for index in route.auth.iter().flat_map(|auth| &auth.providers) {
            if let ProviderKind::Forward(forward) = &self.snapshot.config.auth.providers[*index].kind
                && let Some(admission) = credentials.admission(*index)
            {
                forward.denied.insert_denied(self.denied_key(forward, request, route), admission);
            }
        }
    }

    fn overrides(&self) -> Option<Arc<OverrideTable>> {
        self.limiter.overrides.current()
    }

    async fn check<'a>(&mut self, checks: &[LimitCheck<'a, '_>]) -> Result<Decision<'a>, StoreUnavailable> {
        let started_at = monotonic();
        let decision = self.limiter.check(checks).await;
        let (_, elapsed) = self.time.get_or_insert((started_at, Duration::ZERO));
        *elapsed += started_at.elapsed();
        decision
    }

    async fn refund(&mut self, decision: &mut Decision<'_>) {
        if let Err(error) = decision.refund().await {
            warn!(%error, "refund of a request that was denied after its authentication may be lost");
        }
    }

    fn decided(
        &mut self,
        route: &Route,
        checks: &[LimitCheck<'_, '_>],
        decision: &Result<Decision<'_>, StoreUnavailable>,
        attributes: &RequestAttributes<'_>,
    ) {
        let ConfigSnapshot { config, metrics, .. } = self.snapshot;
        let Some((started_at, elapsed)) = self.time else { return };
        metrics.record_decision(route.index, checks, decision, elapsed, |check| {
            route.rate_limits.spec(check.limit_index).display(attributes, &config.client_ip)
        });
        self.record.decision(checks, decision.as_ref().ok(), started_at, elapsed);
    }
}

/// Name of the route in the key of denied requests.
const ROUTE: HeaderName = HeaderName::from_static("route");

impl GatewayIo<'_, '_> {
    /// Return the key of requests for which the server would return the same identities, and that are checked against
    /// the same limits.
    fn denied_key(&self, provider: &ForwardProvider, request: &TargetedRequest<'_>, route: &Route) -> CacheKey {
        let mut headers = forward_auth::told_headers(provider, provider.settings.denied_by, self.peer, request);
        headers.append(ROUTE, HeaderValue::from(route.index));
        provider.denied.key(&headers)
    }
}

// === The response to a request ===

/// A request while the gateway handles it.
struct Exchange<'a> {
    /// The configuration that applies to the whole request.
    snapshot: &'a ConfigSnapshot,
    peer: &'a Peer,
    /// The HTTP/1.x connection or HTTP/2 stream of the request.
    flow: &'a Arc<StreamFlow>,
    facts: RequestFacts<'a>,
    record: Record<'a>,
    /// What the response depends on, if the request or the configuration asks for it.
    reply: ReplyNeeds<'a>,
    /// What the request holds until the end of the response body.
    held: Held,
    /// Values of the route's response headers that depend on the request.
    response_values: RenderedValues,
    /// Whether a part of the request may still be unread when the response is sent; see
    /// [`request_body::has_unread_body`].
    has_unread_body: bool,
    /// Whether the gateway must discard the content of a local reply; see [`Body::discard_content`].
    is_http2_head: bool,
}

/// Minimum time between two warnings of a client that asks for a WebSocket on a route without WebSockets.
const IGNORED_WEBSOCKET_INTERVAL: Duration = Duration::from_mins(1);

/// One attempt to get a response from an upstream.
struct Attempt<'a> {
    /// Index of the upstream.
    index: usize,
    /// `None` for the upstream of the route.
    fallback: Option<&'a Fallback>,
    /// Path and query of the upstream request. `None` if they are equal to the received path and query.
    target: Option<PathAndQuery>,
    credentials: Credentials<'a>,
    /// Whether the gateway reads the token usage of an LLM API in the response.
    counts_tokens: bool,
    /// Whether the gateway requests this usage, if the upstream accepts that.
    requests_usage: bool,
    /// Whether the gateway removes MCP tools from the response.
    filters_tools: bool,
}

/// The result of one attempt.
struct Attempted {
    result: Result<Box<Response<Body>>, UpstreamError>,
    /// The body of the request for the next fallback. `None` if the result is final.
    next_body: Option<RequestBody>,
    /// If the gateway counts tokens, the responses that retries have replaced.
    replaced: Vec<ReplacedResponse>,
}

/// Return a copy of a request without its body.
fn request_head<B>(request: &Request<B>) -> Request<()> {
    let mut head = Request::new(());
    head.method_mut().clone_from(request.method());
    head.uri_mut().clone_from(request.uri());
    *head.version_mut() = request.version();
    head.headers_mut().clone_from(request.headers());
    head
}

/// What a response depends on, read from the request before the request is forwarded or discarded.
#[derive(Default)]
struct ReplyNeeds<'a> {
    /// `None` if the request is not a gRPC call.
    grpc: Option<GrpcCall>,
    /// The page that replaces a problem document.
    error_page: Option<ErrorPage<'a>>,
    /// Whether the response gets `Strict-Transport-Security`.
    sets_hsts: bool,
    /// `None` if the route compresses no responses.
    compression: Option<Box<CompressionOffer<'a>>>,
}

/// A gRPC call.
struct GrpcCall {
    /// Time until which the client waits for the response.
    deadline: Option<Instant>,
}

impl GrpcCall {
    fn new(request: &Request<RequestBody>) -> Option<Self> {
        let is_call = headers::is_grpc_call(request.method(), request.version(), request.headers());
        let timeout = || headers::grpc_timeout(request.headers()).and_then(|time| Instant::now().checked_add(time));
        is_call.then(|| GrpcCall { deadline: timeout() })
    }
}

impl<'a> Exchange<'a> {
    fn new(
        snapshot: &'a ConfigSnapshot,
        sinks: &Arc<TelemetrySinks>,
        peer: &'a Peer,
        flow: &'a Arc<StreamFlow>,
        request: &Request<RequestBody>,
    ) -> Self {
        Exchange {
            snapshot,
            peer,
            flow,
            facts: RequestFacts::new(&snapshot.config),
            record: Record::new(snapshot, sinks, peer, request),
            reply: ReplyNeeds { grpc: GrpcCall::new(request), ..ReplyNeeds::default() },
            held: Held::default(),
            response_values: RenderedValues::default(),
            has_unread_body: request_body::has_unread_body(request),
            is_http2_head: request.method() == Method::HEAD && request.version() == Version::HTTP_2,
        }
    }

    /// Render the values of the route's response headers that depend on the request, before the request is forwarded or
    /// discarded.
    fn render_response_headers(&mut self, request: &Request<RequestBody>) {
        let pages = match self.facts.route {
            Some(route) => {
                self.reply.sets_hsts =
                    route.sets_hsts && headers::client_scheme(request.headers(), &self.peer.forwarded) == "https";
                if let Some(compression) = &route.compression {
                    self.reply.compression = Some(Box::new(compression.offer(request)));
                }
                &route.error_pages
            }
            None => &self.snapshot.config.server.error_pages,
        };
        self.reply.error_page = pages.as_ref().and_then(|pages| pages.select(request.headers()));
        let Some(route) = self.facts.route.filter(|route| route.response_headers.has_variables()) else { return };
        let request_id = self.record.request_id(request.headers()).to_header_value();
        let peer = self.peer;
        let credentials = &self.facts.credentials;
        let head = request.into();
        let variables = RequestVariables { route, peer, credentials, head, request_id };
        self.response_values = route.response_headers.render(|variable| variables.content(variable));
    }

    /// Perform the action of the route, settle the costs that the response determines, and complete the response
    /// headers.
    async fn respond(
        &mut self,
        admitted: Admitted<'a>,
        request: Box<Request<RequestBody>>,
    ) -> Result<Box<Response<Body>>, Rejection<'a>> {
        let Admitted { route, decision, llm, forwarded_path, rewritten_target } = admitted;
        let Exchange { flow, snapshot, peer, .. } = *self;
        if !route.websocket && request.extensions().get::<OnUpgrade>().is_some() {
            self.ignore_websocket(route, &request)?;
        }
        let holdings = Holdings::new(decision, llm);
        let tool_rules = admission::tool_rules(route, &self.facts.credentials);
        let mut rest = None;
        let mut responses = UpstreamResponses::default();
        let result = match &route.action {
            RouteAction::DirectResponse(respond) => {
                request_body::discard_body(request, flow);
                Ok(Box::new(respond.response()))
            }
            RouteAction::Readiness => {
                request_body::discard_body(request, flow);
                Ok(Box::new(DirectResponse::readiness(snapshot.is_ready()).response()))
            }
            RouteAction::Redirect(redirect) => {
                let path = forwarded_path.as_deref().unwrap_or(request.uri().path());
                let response = redirect.response(&request, &route.path_pattern, path);
                request_body::discard_body(request, flow);
                Ok(Box::new(response?))
            }
            RouteAction::Forward(weighted_upstreams) => {
                let index = weighted_upstreams.pick();
                let counts_tokens = holdings.counts_tokens();
                let requests_usage = holdings.llm().is_some_and(|llm| llm.hides_usage);
                rest = counts_tokens.then(|| body::rest_bounds(snapshot, peer, request.headers()));
                let filters_tools = !tool_rules.is_empty();
                // If the route rewrites the path, send the rewritten target, otherwise the path to forward.
                let target = rewritten_target.or_else(|| origin_form(request.uri(), forwarded_path.as_deref()));
                // Box the futures. Otherwise they would be a part of this future, and would be moved with it for every
                // request.
                let has_fallback = !route.fallback.is_empty();
                let credentials = &mut self.facts.credentials;
                let credentials = if has_fallback { credentials.clone() } else { mem::take(credentials) };
                let fallback = None;
                let attempt =
                    Attempt { index, fallback, target, credentials, counts_tokens, requests_usage, filters_tools };
                if !has_fallback {
                    let mut no_replay = None;
                    let attempted = boxed(|| self.attempt(route, attempt, request, &mut no_replay)).await;
                    responses.add_replaced(attempted.replaced);
                    attempted.result
                } else {
                    let path = forwarded_path.unwrap_or_else(|| request.uri().path().to_owned());
                    let llm = holdings.llm();
                    let result =
                        boxed(|| self.attempt_with_fallback(route, attempt, request, &path, llm, &mut responses)).await;
                    if let (Some(llm), Some(_)) = (llm, responses.fallback) {
                        self.record.model(llm.model(responses.fallback), llm.operation);
                    }
                    result
                }
            }
        };
        // The response waits for the settlement, so that its headers contain the values after the settlement.
        let mut settled = holdings.settle(route, &snapshot.metrics, &result, rest, &responses).await;
        // Return early after an error. This drops the decision, which releases the permits of the request.
        let mut response = result.map_err(Rejection::Upstream)?;
        if route.rate_limits.llm.is_some_and(|llm| !llm.provider_headers) {
            llm::remove_account_headers(response.headers_mut());
        }
        if !tool_rules.is_empty() {
            filter_tools(&mut response, tool_rules, &mut settled.held);
        }
        if self.reply.grpc.is_some() {
            response.body_mut().end_with_grpc_status();
        }
        if route.cors.is_some() {
            cors::remove_headers(response.headers_mut());
        }
        // Apply the header rules after the settlement, which reads response headers that the rules may remove. Append
        // the RateLimit headers afterwards, so that the rules do not change the RateLimit headers.
        route.response_headers.apply(response.headers_mut(), &self.response_values);
        let policy_header = self.snapshot.policy_header(route);
        route.rate_limits.append_headers(response.headers_mut(), &settled.decision, policy_header);
        self.held = settled.held;
        Ok(response)
    }

    /// Count and log a request for a WebSocket on a route that does not allow WebSockets. An HTTP/1.1 request is then
    /// an ordinary request.
    ///
    /// # Errors
    /// The request was an extended CONNECT request, which has no meaning without the WebSocket.
    fn ignore_websocket(&self, route: &Route, request: &Request<RequestBody>) -> Result<(), Rejection<'a>> {
        static LOG_THROTTLE: LogThrottle = LogThrottle::new();
        let offered = UpgradeRequest::from_headers(request.headers());
        if !offered.is_some_and(|offered| offered.offers_websocket()) {
            return Ok(());
        }
        self.snapshot.metrics.record_ignored_websocket();
        if LOG_THROTTLE.should_log(IGNORED_WEBSOCKET_INTERVAL) {
            warn!(
                route = &*route.name,
                "a client asked for a WebSocket, but the route does not allow it: set `websocket = true` in the route; \
                 further requests are not logged for a minute"
            );
        }
        if request.extensions().get::<ExtendedConnect>().is_some() { Err(Rejection::NoWebSocket) } else { Ok(()) }
    }

    /// Send a request to one upstream, and record the attempt.
    async fn attempt(
        &mut self,
        route: &'a Route,
        attempt: Attempt<'a>,
        mut request: Box<Request<RequestBody>>,
        replay: &mut Option<ReplayBody>,
    ) -> Attempted {
        let Attempt { index, fallback, target, credentials, counts_tokens, requests_usage, filters_tools } = attempt;
        let Exchange { snapshot, peer, flow, .. } = *self;
        let upstream = &*snapshot.upstreams[index];
        if requests_usage && upstream.includes_usage() {
            // The change fails only if the runtime shuts down.
            let _ = boxed(|| body::change(request.body_mut(), snapshot, |body| Ok(with_usage_option(body)))).await;
        }
        let started_at = monotonic();
        let log = AttemptLog::new(self.record.is_logged());
        let log = if route.fallback.is_empty() { log } else { log.keep_body() };
        let mut log = if counts_tokens { log.keep_replaced() } else { log };
        let method = (!route.fallback.is_empty()).then(|| request.method().clone());
        let is_last =
            fallback.is_some_and(|fallback| route.fallback.last().is_some_and(|last| ptr::eq(last, fallback)));
        let request_id = self.record.request_id(request.headers()).to_header_value();
        let trace = self.record.trace();
        let client_deadline = self.reply.grpc.as_ref().and_then(|call| call.deadline);
        let deadline = self.facts.deadline.into_iter().chain(client_deadline).min();
        let is_client_deadline = deadline != self.facts.deadline;
        let forwarding = Forwarding {
            snapshot,
            peer,
            flow,
            route,
            upstream,
            deadline,
            is_client_deadline,
            target,
            credentials,
            request_id,
            trace,
            reads_response: counts_tokens || filters_tools,
            fallback,
        };
        let mut result = forward::forward(forwarding, request, replay, &mut log).await;
        if filters_tools && result.as_ref().is_ok_and(|response| hides_tools(response)) {
            let fault = "its list of tools is compressed, although the request asked for no compression";
            result = Err(UpstreamError::InvalidResponse { upstream: upstream.name().into(), fault });
        }
        // The body for the next fallback. `None` if the result is final.
        let next_body = match (&route.retry, method) {
            (Some(rules), Some(method)) if !is_last => {
                forward::body_for_fallback(rules, &method, &result, &mut log, replay.as_ref())
            }
            _ => None,
        };
        if next_body.is_some() {
            log.record_fallback();
        }
        let elapsed = started_at.elapsed();
        snapshot.metrics.record_upstream(index, &result, elapsed, &log);
        self.record.upstream(route, upstream, &log, &result, started_at, elapsed);
        Attempted { result, next_body, replaced: log.into_replaced() }
    }

    /// Send a request to the upstream of the route, and then to its fallbacks until one of them gives a final result.
    /// `path` is the path of the request in its forwarded form. `llm` is a request whose tokens are counted.
    async fn attempt_with_fallback(
        &mut self,
        route: &'a Route,
        first: Attempt<'a>,
        mut request: Box<Request<RequestBody>>,
        path: &str,
        llm: Option<&LlmRequest>,
        responses: &mut UpstreamResponses,
    ) -> Result<Box<Response<Body>>, UpstreamError> {
        let received = request_head(&request);
        let Attempt { counts_tokens, requests_usage, filters_tools, .. } = first;
        let target = first.target.clone();
        let credentials = first.credentials.clone();
        // The body without the changes for the upstream of the route or for a fallback.
        let has_aliases = |llm: &LlmRequest| (0..route.fallback.len()).any(|index| llm.has_aliases_at(index));
        let is_changed = requests_usage || llm.is_some_and(has_aliases);
        let original = if is_changed { request.body_mut().replayable() } else { None };
        let mut replay = None;
        let mut attempted = self.attempt(route, first, request, &mut replay).await;
        // The upgrade of a connection belongs to the first attempt.
        let is_upgrade = route.websocket && received.headers().contains_key(UPGRADE);
        for (index, fallback) in route.fallback.iter().enumerate().filter(|_| !is_upgrade) {
            responses.add_replaced(mem::take(&mut attempted.replaced));
            let Some(mut body) = attempted.next_body.take() else { break };
            let first = target.clone();
            let Ok(target) = llm::fallback_target(fallback, route, first, path, received.uri()) else { break };
            if let Some(original) = &original {
                body = original.body();
                replay = None;
            }
            if llm.is_some_and(|llm| llm.has_aliases_at(index))
                && body::replace_models(&mut body, self.snapshot, route, Some(index)).await.is_err()
            {
                break;
            }
            // Release the connection and the permit of the failed response.
            if let (Ok(response), true) = (attempted.result, counts_tokens) {
                responses.add_replaced(ReplacedResponse::read(*response).await);
            }
            responses.fallback = Some(index);
            let request = Box::new(request_head(&received).map(|()| body));
            let credentials = credentials.clone();
            let (index, fallback) = (fallback.upstream, Some(fallback));
            let attempt =
                Attempt { index, fallback, target, credentials, counts_tokens, requests_usage, filters_tools };
            attempted = self.attempt(route, attempt, request, &mut replay).await;
        }
        responses.add_replaced(attempted.replaced);
        attempted.result
    }

    /// Return the response to a rejected request.
    fn reject(&mut self, rejection: Rejection<'_>) -> Box<Response<Body>> {
        let (mut response, outcome) = self.rejection_response(rejection);
        if let Some(route) = self.facts.route {
            route.response_headers.apply_to_rejection(response.headers_mut(), &self.response_values);
        }
        self.send(&mut response, outcome);
        response
    }

    fn rejection_response(&mut self, rejection: Rejection<'_>) -> (Box<Response<Body>>, RequestOutcome) {
        match &rejection {
            Rejection::Upstream(error) if !error.is_client_error() => self.record.reason(|| error.to_string()),
            Rejection::StoreUnavailable(error) => self.record.reason(|| error.to_string()),
            Rejection::Auth(rejection) if rejection.error.is_unavailable() => {
                self.record.reason(|| rejection.error.to_string());
            }
            _ => {}
        }
        let id = self.record.known_request_id();
        let request_id = id.as_ref().and_then(|id| id.to_str().ok());
        match &rejection {
            Rejection::Upstream(error) if error.is_client_error() => {
                debug!(%error, request_id, "client did not send the complete request");
            }
            Rejection::Upstream(error) => warn!(%error, request_id, "upstream request failed"),
            _ => {}
        }
        let RequestFacts { rpc_id, api, .. } = &self.facts;
        rejection.into_response(ReplyFormat {
            request_id: id,
            proxy_status: self.snapshot.config.server.proxy_status,
            rpc_id: rpc_id.as_ref(),
            api: *api,
            is_grpc: self.reply.grpc.is_some(),
            error_page: self.reply.error_page,
            policy_header: self.facts.route.and_then(|route| self.snapshot.policy_header(route)),
        })
    }

    /// Set the headers that all responses have, and update the metrics. The access log record and the spans are written
    /// when the response body ends. The response is not moved, because it is large.
    fn send(&mut self, response: &mut Response<Body>, outcome: RequestOutcome) {
        let status = response.status();
        if let Some(cors) = &self.facts.cors {
            cors.apply(response.headers_mut());
        }
        if self.reply.sets_hsts {
            headers::set_hsts(response.headers_mut());
        }
        if clock::is_behind() {
            headers::set_date(response.headers_mut(), clock::unix_us());
        }
        if self.has_unread_body {
            request_body::set_connection_close(response, self.flow);
        }
        if self.is_http2_head
            && let Some(length) = response.body_mut().discard_content()
        {
            response.headers_mut().insert(CONTENT_LENGTH, HeaderValue::from(length));
        }
        if let Some(completion) = self.record.finish(status, outcome, mem::take(&mut self.held)) {
            response.body_mut().on_complete(completion);
        }
        // Compress the content after the callbacks above have read it.
        if let Some(offer) = self.reply.compression.take() {
            offer.apply(response);
        }
    }
}

/// Return whether a response may contain a list of MCP tools that the gateway cannot read.
fn hides_tools(response: &Response<Body>) -> bool {
    headers::has_content_coding(response.headers())
        && ToolFilter::reads(media_type(response))
        && !response.body().is_end_stream()
}

fn media_type(response: &Response<Body>) -> &str {
    response.headers().get(CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default()
}

/// Remove tools from a response that the client may not call.
fn filter_tools(response: &mut Response<Body>, rules: Vec<Arc<ToolRules>>, held: &mut Held) {
    let Some(filter) = ToolFilter::new(media_type(response), rules) else { return };
    if response.body().is_end_stream() {
        return;
    }
    response.headers_mut().remove(CONTENT_LENGTH);
    response.body_mut().forget_length();
    held.filter_tools(filter);
}
