//! Request handling: routing, rate limits, forwarding and the response.

pub mod client;
mod early_response;
pub mod forward;
pub mod local_reply;
pub mod rate_limit;
pub mod target;
pub mod telemetry;
pub mod top_denied;

use std::sync::Arc;

use arc_swap::ArcSwap;
use http::header::CONTENT_LENGTH;
use http::uri::PathAndQuery;
use http::{HeaderValue, Method, Request, Response, Version};
use http_body::Body as _;
use tokio::time::Instant;
use tracing::{debug, warn};

use crate::http::body::Body;
use crate::http::headers::is_grpc_call;
use crate::http::request_body::RequestBody;
use crate::limiter::Limiter;
use crate::limiter::clock::monotonic;
use crate::limiter::decision::Decision;
use crate::proxy::client::{Peer, RequestId};
use crate::proxy::forward::ForwardContext;
use crate::proxy::local_reply::Rejection;
use crate::proxy::rate_limit::LimitContext;
use crate::proxy::target::{RequestTarget, origin_form};
use crate::proxy::telemetry::{RequestMetrics, WorkerMetrics};
use crate::snapshot::CompiledConfig;
use crate::snapshot::routes::{Route, RouteAction};
use crate::telemetry::access_log::{RequestRecord, RequestStart, TelemetrySinks};
use crate::upstream::cluster::UpstreamCluster;
use crate::upstream::retry::AttemptLog;
use crate::upstream::{Upstream, UpstreamError};

/// The gateway of one worker: its configuration snapshot, limiter and telemetry.
#[derive(Debug)]
pub struct Gateway {
    /// Current configuration snapshot. Each request holds one snapshot from its beginning to its end.
    snapshot: ArcSwap<ConfigSnapshot>,
    limiter: Limiter,
    /// Telemetry sinks of this worker only: each request updates the reference count, which workers must not contend
    /// for.
    sinks: Arc<TelemetrySinks>,
    request_metrics: Arc<RequestMetrics>,
    /// Index of the worker.
    worker: usize,
}

impl Gateway {
    /// Create a gateway with its own connections to the upstream `clusters`, which are those of `runtime`. Its metrics
    /// are recorded under the index `worker`.
    pub fn new(
        runtime: Arc<CompiledConfig>,
        limiter: Limiter,
        clusters: &[Arc<UpstreamCluster>],
        sinks: TelemetrySinks,
        (request_metrics, worker): (Arc<RequestMetrics>, usize),
    ) -> Self {
        let snapshot = ArcSwap::from_pointee(ConfigSnapshot::new(runtime, clusters, &request_metrics, worker));
        Gateway { snapshot, limiter, sinks: Arc::new(sinks), request_metrics, worker }
    }

    /// Apply another configuration from the next request on. Metrics and upstream connections that are the same in both
    /// configurations are carried over.
    pub fn apply_config(&self, runtime: Arc<CompiledConfig>, clusters: &[Arc<UpstreamCluster>]) {
        let snapshot =
            ConfigSnapshot::carry_over(&self.snapshot.load(), runtime, clusters, &self.request_metrics, self.worker);
        self.snapshot.store(Arc::new(snapshot));
    }

    /// Return the current configuration.
    pub fn runtime(&self) -> Arc<CompiledConfig> {
        self.snapshot.load().runtime.clone()
    }

    /// Wait until the work that requests leave behind is done: permits to release and late charges.
    pub async fn flush_pending(&self) {
        self.limiter.flush_pending().await;
    }

    /// Handle a request and return its response. Dropping the future cancels everything it waits for.
    pub async fn handle(&self, request: Box<Request<RequestBody>>, peer: &Peer) -> Response<Body> {
        let started_at = monotonic();
        let snapshot = self.snapshot.load_full();
        let revalidated = peer.revalidate(&snapshot.runtime);
        let peer = revalidated.as_deref().unwrap_or(peer);
        let start = RequestStart {
            instant: started_at,
            peer: peer.address,
            scheme: if peer.forwarded.scheme == "https" { "https" } else { "http" },
            method: request.method(),
            path: request.uri().path(),
            headers: request.headers(),
        };
        let mut state =
            RequestState { record: RequestRecord::start(&self.sinks, &start), route_index: None, request_id: None };
        if state.record.is_some() {
            state.ensure_request_id(&request, peer);
        }
        let has_unread_body = early_response::has_unread_body(&request);
        let is_head = request.method() == Method::HEAD && request.version() == Version::HTTP_2;
        let (mut response, outcome) = match self.serve(&snapshot, request, peer, &mut state).await {
            Ok(response) => (response, "ok"),
            Err(rejection) => {
                let id = state.request_id.as_ref().map(RequestId::to_header_value);
                let request_id = id.as_ref().and_then(|id| id.to_str().ok());
                match &rejection {
                    Rejection::Upstream(error) if error.is_client_error() => {
                        debug!(%error, request_id, "no whole request");
                    }
                    Rejection::Upstream(error) => warn!(%error, request_id, "no answer from upstream"),
                    _ => {}
                }
                rejection.into_response(id)
            }
        };
        snapshot.metrics.record_response(state.route_index, response.status(), started_at.elapsed());
        if has_unread_body {
            early_response::set_connection_close(&mut response);
        }
        if is_head && let Some(length) = response.body_mut().discard_content() {
            response.headers_mut().insert(CONTENT_LENGTH, HeaderValue::from(length));
        }
        match state.record {
            Some(record) => record.attach(response, outcome),
            None => response,
        }
    }

    async fn serve<'g>(
        &self,
        snapshot: &'g ConfigSnapshot,
        request: Box<Request<RequestBody>>,
        peer: &Peer,
        state: &mut RequestState,
    ) -> Result<Response<Body>, Rejection<'g>> {
        let ConfigSnapshot { runtime, upstreams, metrics } = snapshot;
        let admitted = self.admit(snapshot, &request, peer, state).await;
        let AdmittedRequest { route, mut decision, forwarded_path, rewritten_target, deadline } = match admitted {
            Ok(admitted) => admitted,
            Err(rejection) => {
                if let Rejection::StoreUnavailable(_) = rejection {
                    state.ensure_request_id(&request, peer);
                }
                early_response::discard_body(request);
                return Err(rejection);
            }
        };
        let result = match &route.action {
            RouteAction::DirectResponse(respond) => {
                early_response::discard_body(request);
                Ok(respond.response())
            }
            RouteAction::Redirect(redirect) => {
                let path = forwarded_path.as_deref().unwrap_or(request.uri().path());
                let response = redirect.response(&route.path_pattern, path, request.uri().query());
                early_response::discard_body(request);
                Ok(response)
            }
            RouteAction::Forward(weighted_upstreams) => {
                let (index, started_at) = (weighted_upstreams.pick(), monotonic());
                let upstream = &*upstreams[index];
                let mut attempts = AttemptLog::new(state.record.is_some());
                let trace = state.record.as_ref().and_then(|record| record.trace);
                let target = rewritten_target.or_else(|| origin_form(request.uri(), forwarded_path.as_deref()));
                let id = state.ensure_request_id(&request, peer);
                let context = ForwardContext { peer, request_id: id, target, deadline, trace, attempts: &mut attempts };
                let result = if deadline.is_some_and(|deadline| deadline <= Instant::now()) {
                    // The wait queues of the limits used up the route timeout.
                    early_response::discard_body(request);
                    Err(UpstreamError::RouteTimeout { upstream: upstream.name().into() })
                } else {
                    // Boxed: inline, it would be part of this future and be moved with it for every request.
                    Box::pin(forward::forward(runtime, route, upstream, request, context)).await
                };
                metrics.record_upstream(index, &result, started_at.elapsed(), &attempts);
                if let Some(record) = &mut state.record {
                    telemetry::record_upstream(record, upstream, &attempts, &result, started_at);
                    telemetry::record_cost(record, route, &result);
                }
                result
            }
        };
        if let Some(settlement) =
            decision.deferred_charges.take().and_then(|debts| rate_limit::settle(*debts, route, &result))
        {
            rate_limit::apply_settlement(&mut decision, settlement.await);
        }
        let mut response = result.map_err(Rejection::Upstream)?;
        // The route may remove headers that the settlement has read. The rate limit headers are appended afterwards.
        route.response_headers.apply(response.headers_mut());
        rate_limit::append_ratelimit_headers(response.headers_mut(), route, &decision);
        if let Some(permits) = decision.permits {
            response.body_mut().hold_until_drop(permits);
        }
        Ok(response)
    }

    /// Check the target, route, declared body length and limits of a request. The body is not polled yet, so a client
    /// that waits for `100 Continue` does not send the body of a rejected request.
    async fn admit<'g>(
        &self,
        snapshot: &'g ConfigSnapshot,
        request: &Request<RequestBody>,
        peer: &Peer,
        state: &mut RequestState,
    ) -> Result<AdmittedRequest<'g>, Rejection<'g>> {
        let ConfigSnapshot { runtime, metrics, .. } = snapshot;
        let target = RequestTarget::from_request(request, &runtime.server)?;
        let route = target.find_route(runtime, request)?;
        state.route_index = Some(route.index);
        if route.max_body.is_some_and(|max| request.body().size_hint().lower() > max) {
            return Err(Rejection::BodyTooLarge);
        }
        let deadline = route.timeout.map(|timeout| Instant::now() + timeout);
        let rewritten_target = target.rewrite(route, request.uri().query())?;
        let (host, path, subject) = (&*target.host, &*target.path, peer.certificate_subject.as_deref());
        let limit_context =
            LimitContext { request, host, path, trusted: peer.forwarded.trusted, certificate_subject: subject };
        let decision = if route.rate_limits.limits.is_empty() && state.record.is_none() {
            Decision::unlimited()
        } else {
            // Boxed: requests without limits need no space for this future.
            let record = state.record.as_deref_mut();
            Box::pin(rate_limit::check_limits(runtime, &self.limiter, metrics, route, &limit_context, peer, record))
                .await?
        };
        if !decision.admitted {
            return Err(Rejection::RateLimited {
                decision,
                header_styles: &route.rate_limits.header_styles,
                expose_headers: route.rate_limits.expose_header.as_ref(),
                is_grpc: is_grpc_call(request),
            });
        }
        let path = (target.forwarded_path() != request.uri().path()).then(|| target.forwarded_path().to_owned());
        Ok(AdmittedRequest { route, decision, forwarded_path: path, rewritten_target, deadline })
    }
}

/// State collected while a request is handled, needed whatever its result.
struct RequestState {
    record: Option<Box<RequestRecord>>,
    /// Index of the route.
    route_index: Option<usize>,
    /// Request id in logs and problem responses.
    request_id: Option<RequestId>,
}

impl RequestState {
    /// Return the request id. The first call determines it and writes it to the access log record.
    fn ensure_request_id(&mut self, request: &Request<RequestBody>, peer: &Peer) -> &RequestId {
        let RequestState { record, request_id, .. } = self;
        request_id.get_or_insert_with(|| {
            let new_id = RequestId::from_headers(request.headers(), peer.forwarded.trusted);
            if let Some(record) = record
                && let Ok(text) = new_id.to_header_value().to_str()
            {
                record.request_id = text.into();
            }
            new_id
        })
    }
}

/// A request admitted by its limits.
struct AdmittedRequest<'a> {
    route: &'a Route,
    decision: Decision<'a>,
    /// Path to forward, if it differs from the received path.
    forwarded_path: Option<String>,
    /// Path and query after the route's rewrite, if it has one.
    rewritten_target: Option<PathAndQuery>,
    /// When the route timeout expires.
    deadline: Option<Instant>,
}

// === Configuration snapshot ===

/// A configuration with the worker's own upstream connections and metrics by index, swapped as a whole.
#[derive(Debug)]
struct ConfigSnapshot {
    runtime: Arc<CompiledConfig>,
    upstreams: Vec<Arc<Upstream>>,
    metrics: WorkerMetrics,
}

impl ConfigSnapshot {
    /// Create the first snapshot.
    pub(crate) fn new(
        runtime: Arc<CompiledConfig>,
        clusters: &[Arc<UpstreamCluster>],
        request_metrics: &RequestMetrics,
        worker: usize,
    ) -> Self {
        let metrics = WorkerMetrics::new(request_metrics, &runtime, worker);
        let upstreams = clusters.iter().cloned().map(Upstream::new).map(Arc::new).collect();
        ConfigSnapshot { runtime, upstreams, metrics }
    }

    /// Create the snapshot that replaces `previous`, with its connections to upstreams that still exist.
    pub(crate) fn carry_over(
        previous: &ConfigSnapshot,
        runtime: Arc<CompiledConfig>,
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
        let metrics = WorkerMetrics::new(request_metrics, &runtime, worker);
        ConfigSnapshot { upstreams: clusters.iter().map(upstream).collect(), runtime, metrics }
    }
}
