//! Upstreams: endpoint selection, connections, and the exchange of a request and its response.

pub mod cluster;
mod connection_pool;
pub mod connector;
pub mod dns;
pub mod endpoint;
pub mod error;
pub mod fetch;
mod health;
pub mod health_check;
pub mod metrics;
pub mod retry;
pub mod settings;

use std::future::{Future, poll_fn};
use std::net::IpAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use arc_swap::{ArcSwap, Guard};
use futures_util::stream::{FuturesUnordered, StreamExt};
use http::header::SET_COOKIE;
use http::{HeaderMap, Request, Response};
use hyper::body::Incoming;
use tokio::time::{Instant, sleep, timeout, timeout_at};

use crate::clock::monotonic;
use crate::http::aws_signature::AwsSigner;
use crate::http::body;
use crate::http::body::Body;
use crate::http::body_limits::{BodyLimits, LazyTimer, NetworkShare};
use crate::http::flow::StreamFlow;
use crate::http::google_account;
use crate::http::headers::is_safe;
use crate::http::request_body::{BodyReader, ReplayBody, RequestBody, UploadProgress};
use crate::http::target;
use crate::upstream::cluster::UpstreamCluster;
use crate::upstream::connection_pool::{Connection, EndpointPool, SendError, StreamOutcome, classify_error};
use crate::upstream::connector::{Protocol, ProxiedConnection};
use crate::upstream::endpoint::{Endpoint, LoadBalancer, RequestPermit, Rng};
use crate::upstream::error::UpstreamError;
use crate::upstream::retry::{AttemptLog, ReplayableRequest, RetryReason, RetryRules, RetryState, RetryTarget};
use crate::upstream::settings::{HostPolicy, UpstreamSettings};

/// `Retry-After` if no endpoint has an address yet and the upstream has no health checks.
const UNRESOLVED_RETRY: Duration = Duration::from_secs(1);

/// An upstream as one worker uses it: the cluster, which all workers share, and the connection pools of the worker.
#[derive(Debug)]
pub struct Upstream {
    cluster: Arc<UpstreamCluster>,
    /// A copy for this worker, because each logged request changes the reference count.
    name: Arc<str>,
    pools: ArcSwap<EndpointPools>,
    rng: Rng,
}

/// Connection pools for the endpoints of one load balancer.
#[derive(Debug)]
struct EndpointPools {
    load_balancer: Arc<LoadBalancer>,
    /// Version of the cluster for which the pools were built.
    version: u64,
    /// A copy of each endpoint for this worker, in the order of `load_balancer.endpoints`.
    endpoints: Vec<Arc<Endpoint>>,
    /// One pool per endpoint, in the same order.
    pools: Vec<Arc<EndpointPool>>,
}

/// How a request is sent to an upstream.
pub struct SendOptions<'a> {
    /// Bounds and timeouts of the bodies, and the deadline.
    pub limits: BodyLimits,
    /// The HTTP/1.x connection or HTTP/2 stream of the client.
    pub flow: &'a StreamFlow,
    /// Which `Host` the server receives. The request already has this host, unless it is the host of the server.
    pub host: &'a HostPolicy,
    /// When the request is sent again. `None` if only the settings of the upstream apply.
    pub retry: Option<&'a RetryRules>,
    /// The body, if it can be sent again.
    pub replay: Option<&'a ReplayBody>,
}

impl<'a> SendOptions<'a> {
    /// Create options without retries of a route.
    pub fn new(limits: BodyLimits, flow: &'a StreamFlow, host: &'a HostPolicy) -> Self {
        SendOptions { limits, flow, host, retry: None, replay: None }
    }
}

/// The endpoint that gets a request.
struct Target {
    pool: Arc<EndpointPool>,
    permit: RequestPermit,
}

/// A request that is sent again, and the endpoint that gets it.
struct Retry {
    request: Request<RequestBody>,
    target: Target,
}

/// State of a request that is sent to an upstream.
struct Sending<'a> {
    retry_state: RetryState,
    pick_state: PickState,
    attempts: &'a mut AttemptLog,
}

impl Sending<'_> {
    /// Record that no server can have executed the request, so that it can be sent to another upstream.
    fn fail_unexecuted(&mut self, request: Request<RequestBody>, error: UpstreamError) -> UpstreamError {
        self.attempts.record_unexecuted(Some(request));
        error
    }
}

/// State of the endpoint selection of one request.
struct PickState {
    /// Hash of the header or cookie that selects the endpoint, or the token of the endpoint of a sticky session.
    hash_key: Option<u64>,
    /// Endpoints that this request has tried.
    tried: Vec<Arc<Endpoint>>,
    /// Connection of the client, if the gateway sends PROXY headers to the endpoints. The value is boxed, because only
    /// few upstreams need it.
    client: Option<Box<ProxiedConnection>>,
}

impl Upstream {
    /// Create an upstream without connections.
    pub fn new(cluster: Arc<UpstreamCluster>) -> Self {
        Upstream::with_pools(cluster, &[])
    }

    /// Create an upstream. For endpoints that have a pool in `known`, take over this pool.
    fn with_pools(cluster: Arc<UpstreamCluster>, known: &[Arc<EndpointPool>]) -> Self {
        let pools = ArcSwap::from_pointee(EndpointPools::new(&cluster, cluster.version(), known));
        let name = (*cluster.settings.name).into();
        Upstream { cluster, name, pools, rng: Rng::from_random_seed() }
    }

    /// Return whether this upstream belongs to `cluster`.
    pub fn is_for(&self, cluster: &Arc<UpstreamCluster>) -> bool {
        Arc::ptr_eq(&self.cluster, cluster)
    }

    /// Return the name of the upstream.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Return the name of the upstream, with a reference count of this worker.
    pub fn shared_name(&self) -> Arc<str> {
        self.name.clone()
    }

    /// Return the protocol of the upstream.
    pub fn protocol(&self) -> Protocol {
        self.cluster.settings.protocol
    }

    /// Return the maximum time to wait for the response headers.
    pub fn response_timeout(&self) -> Duration {
        self.cluster.settings.response_timeout
    }

    /// Return the maximum number of requests in flight per server. 0 means that there is no limit.
    pub fn max_requests(&self) -> usize {
        self.cluster.settings.max_requests
    }

    /// Count an upload of a client network. One network may have as many unfinished uploads as half of the requests
    /// that one server may have in flight, so that slow uploads of one client do not delay others.
    ///
    /// # Errors
    /// [`UpstreamError::TooManyUploads`] if the network has reached this number.
    pub fn start_upload(&self, network: IpAddr) -> Result<NetworkShare, UpstreamError> {
        let share = self.cluster.uploads.start(network, self.max_requests().div_ceil(2));
        share.ok_or_else(|| UpstreamError::TooManyUploads { upstream: self.name().into() })
    }

    /// Return whether connections start with a PROXY header.
    pub fn sends_proxy_header(&self) -> bool {
        self.cluster.settings.proxy_protocol
    }

    /// Return the keys of AWS with which requests are signed.
    pub fn aws(&self) -> Option<&AwsSigner> {
        self.cluster.settings.aws.as_ref()
    }

    /// Set the access token in a request to Google Cloud.
    ///
    /// # Errors
    /// [`UpstreamError::NoAccessToken`] if there is no valid token.
    fn authorize(&self, headers: &mut HeaderMap) -> Result<(), UpstreamError> {
        let Some(access) = &self.cluster.settings.google else { return Ok(()) };
        let no_token = || UpstreamError::NoAccessToken { upstream: self.name().into() };
        let authorization = access.account.authorization(monotonic()).ok_or_else(no_token)?;
        google_account::authorize(headers, authorization);
        Ok(())
    }

    /// Return whether requests contain the certificate of the client.
    pub fn sends_client_cert(&self) -> bool {
        self.cluster.settings.client_cert_header
    }

    /// Return whether the servers of an LLM API accept that the gateway requests the usage of streams.
    pub fn includes_usage(&self) -> bool {
        self.cluster.settings.includes_usage
    }

    /// Return the `Host` of requests for routes without `upstream_host`.
    pub fn host(&self) -> &HostPolicy {
        &self.cluster.settings.host
    }

    /// Return host and port of the first server. The gateway sends this value as `Host` if a request has no host.
    pub fn authority(&self) -> &str {
        &self.cluster.settings.servers[0].authority
    }

    /// Return the pools of the current endpoints. If the cluster has changed, rebuild the list of pools, but keep the
    /// pools of endpoints that still exist.
    fn pools(&self) -> Guard<Arc<EndpointPools>> {
        let version = self.cluster.version();
        let pools = self.pools.load();
        if pools.version == version {
            return pools;
        }
        self.pools.store(Arc::new(EndpointPools::new(&self.cluster, version, &pools.pools)));
        self.pools.load()
    }

    /// Pick an endpoint and acquire a request permit. Return `None` if no endpoint is usable, or if all usable
    /// endpoints have `max_requests` in flight.
    fn pick(&self, key: Option<u64>, tried: &[Arc<Endpoint>]) -> Option<Target> {
        let pools = self.pools();
        let (index, permit) = self.cluster.pick(&pools.load_balancer, &pools.endpoints, key, &self.rng, tried)?;
        Some(Target { pool: pools.pools[index].clone(), permit })
    }

    /// Wait in the queue for a request permit, at most `connect_timeout`.
    ///
    /// # Errors
    /// [`UpstreamError::NoHealthyEndpoint`] or [`UpstreamError::Unresolved`] if no endpoint is usable;
    /// [`UpstreamError::Overflow`] if the queue is full or the wait timed out.
    async fn pick_queued(&self, key: Option<u64>) -> Result<Target, UpstreamError> {
        let settings = &self.cluster.settings;
        let busy = || UpstreamError::Overflow { upstream: settings.name.clone() };
        if self.pools().load_balancer.usable.is_empty() {
            let (upstream, retry_after) =
                (settings.name.clone(), settings.health.as_ref().map_or(UNRESOLVED_RETRY, |health| health.interval));
            let has_address = self.cluster.endpoints().iter().any(|endpoint| endpoint.address.is_some());
            if !has_address {
                return Err(UpstreamError::Unresolved { upstream, retry_after });
            }
            return Err(UpstreamError::NoHealthyEndpoint { upstream, retry_after });
        }
        let mut waiting = self.cluster.shared.queue.enqueue().ok_or_else(busy)?;
        if waiting.is_first {
            // A permit may have been released just before this request joined the empty queue, so that no waiter got
            // it. Acquire a permit and drop it: `Endpoint::release` passes it to the first waiter.
            self.pick(key, &[]);
        }
        let permit = timeout(settings.connect_timeout, waiting.ready()).await.ok().flatten().ok_or_else(busy)?;
        let pool = self.pools().pools.iter().find(|pool| pool.is_for(permit.endpoint())).cloned();
        let pool = pool.unwrap_or_else(|| Arc::new(EndpointPool::new(settings, permit.endpoint().clone())));
        Ok(Target { pool, permit })
    }
}

impl EndpointPools {
    /// Create the pools for the current load balancer of the cluster. It may be newer than `version`, because the
    /// caller has read `version` earlier. Reuse the pools in `known`.
    fn new(cluster: &UpstreamCluster, version: u64, known: &[Arc<EndpointPool>]) -> Self {
        let table = Guard::into_inner(cluster.load_balancer());
        let pool = |endpoint: &Arc<Endpoint>| {
            let known = known.iter().find(|pool| pool.is_for(endpoint)).cloned();
            known.unwrap_or_else(|| Arc::new(EndpointPool::new(&cluster.settings, endpoint.clone())))
        };
        let pools = table.endpoints.iter().map(pool).collect();
        let endpoints = table.endpoints.iter().map(|endpoint| Arc::new(endpoint.for_worker())).collect();
        EndpointPools { load_balancer: table, version, endpoints, pools }
    }
}

// Connecting to the picked endpoint, and to other endpoints if the picked endpoint is slow or refuses the connection.

/// Delay after which the gateway also tries to connect to another endpoint (Connection Attempt Delay, RFC 8305 §5).
const CONNECTION_ATTEMPT_DELAY: Duration = Duration::from_millis(250);

/// Maximum number of endpoints that one request tries.
const MAX_CONNECT_ATTEMPTS: usize = 9;

/// A connection, with the pool and the request permit of its endpoint.
struct EndpointConnection {
    pool: Arc<EndpointPool>,
    permit: RequestPermit,
    connection: Connection,
    is_reused: bool,
}

impl Upstream {
    /// Connect to the picked endpoint. If the attempt fails or takes longer than `CONNECTION_ATTEMPT_DELAY`, also
    /// connect to other endpoints. No byte of the request has been written yet, so every request can be sent to another
    /// endpoint. If `allow_idle` is set, idle connections of the other endpoints are used as well.
    ///
    /// # Errors
    /// No endpoint accepted the connection, or `connect_timeout` expired.
    async fn connect(
        &self,
        first: Target,
        pick_state: &mut PickState,
        allow_idle: bool,
    ) -> Result<EndpointConnection, UpstreamError> {
        let mut attempts = Vec::new();
        let racing = self.happy_eyeballs(first, pick_state, allow_idle, &mut attempts);
        match timeout(self.cluster.settings.connect_timeout, racing).await {
            Ok(result) => result,
            Err(_) => {
                let error = UpstreamError::ConnectTimeout { upstream: self.name().into() };
                attempts.iter().for_each(|(endpoint, _)| self.cluster.report_connect_failure(endpoint, &error));
                Err(error)
            }
        }
    }

    async fn happy_eyeballs(
        &self,
        first: Target,
        pick_state: &mut PickState,
        allow_idle: bool,
        attempts: &mut Vec<(Arc<Endpoint>, std::time::Instant)>,
    ) -> Result<EndpointConnection, UpstreamError> {
        let mut connecting = FuturesUnordered::new();
        let mut next = Some(first);
        loop {
            if let Some(Target { pool, permit }) = next.take() {
                pick_state.tried.push(permit.endpoint().clone());
                attempts.push((permit.endpoint().clone(), monotonic()));
                let client = pick_state.client.clone();
                connecting.push(async move {
                    let result = pool.connect(client.as_deref()).await;
                    (pool, permit, result)
                });
            }
            tokio::select! {
                biased;
                Some((pool, permit, result)) = connecting.next() => {
                    attempts.retain(|(endpoint, _)| !Arc::ptr_eq(endpoint, permit.endpoint()));
                    let error = match result {
                        Ok((connection, is_reused)) => {
                            self.report_slow_connects(attempts);
                            return Ok(EndpointConnection { pool, permit, connection, is_reused });
                        }
                        Err(error) => error,
                    };
                    self.cluster.report_connect_failure(permit.endpoint(), &error);
                    drop(permit);
                    next = self.pick_other(pick_state);
                    if next.is_none() && connecting.is_empty() {
                        return Err(UpstreamError::Connect { upstream: self.name().into(), source: error });
                    }
                }
                () = sleep(CONNECTION_ATTEMPT_DELAY) => next = self.pick_other(pick_state),
            }
            if let Some(Target { pool, .. }) = next.as_ref().filter(|_| allow_idle)
                && let Some(connection) = pool.take_idle(pick_state.client.as_deref())
                && let Some(Target { pool, permit }) = next.take()
            {
                self.report_slow_connects(attempts);
                return Ok(EndpointConnection { pool, permit, connection, is_reused: true });
            }
        }
    }

    /// Pick an endpoint that this request has not tried. Prefer an address of the other family (IPv4 or IPv6) than the
    /// last tried address.
    fn pick_other(&self, pick_state: &PickState) -> Option<Target> {
        if pick_state.tried.len() >= MAX_CONNECT_ATTEMPTS {
            return None;
        }
        let family = |endpoint: &Endpoint| endpoint.address.map(|address| address.is_ipv6());
        let last = pick_state.tried.last().and_then(|endpoint| family(endpoint));
        let table = self.cluster.load_balancer();
        let same = table.endpoints.iter().filter(|endpoint| family(endpoint) == last).cloned();
        let same_and_tried: Vec<_> = same.chain(pick_state.tried.iter().cloned()).collect();
        self.pick(pick_state.hash_key, &same_and_tried).or_else(|| self.pick(pick_state.hash_key, &pick_state.tried))
    }

    /// Report a connect failure for each endpoint that has not accepted a connection within `CONNECTION_ATTEMPT_DELAY`.
    /// Call this function after another endpoint has accepted a connection.
    fn report_slow_connects(&self, attempts: &[(Arc<Endpoint>, std::time::Instant)]) {
        for (endpoint, _) in attempts.iter().filter(|(_, since)| since.elapsed() >= CONNECTION_ATTEMPT_DELAY) {
            self.cluster.report_connect_failure(endpoint, &"another server accepted a parallel connection first");
        }
    }
}

// Sending a request to the picked endpoint, and again if that is safe.

impl Upstream {
    /// Send a request and wait for the response headers. Dropping the future cancels the request.
    ///
    /// If an attempt fails and no part of the request was written, the request is sent on another connection or to
    /// another endpoint. Otherwise, only requests without a body are retried, unless the [`RetryRules`] of the route
    /// permit more: GET, HEAD and OPTIONS, and requests with any method that an HTTP/2 server declares as not processed
    /// (RFC 9113 §8.7). A request of these two kinds is sent once more to the same endpoint if a reused or shared
    /// connection was closed before the response (RFC 9110 §9.2.2), or if the HTTP/2 server did not process the
    /// request. Other retries of such a request go to other endpoints, limited by `retries` and the retry budget.
    ///
    /// If the gateway sends PROXY headers to the upstream, the header describes the [`ProxiedConnection`] in the
    /// extensions of the request.
    ///
    /// # Errors
    /// See [`UpstreamError`].
    pub async fn send(
        &self,
        mut request: Box<Request<RequestBody>>,
        options: SendOptions<'_>,
        attempts: &mut AttemptLog,
    ) -> Result<Box<Response<Body>>, UpstreamError> {
        let SendOptions { limits: bounds, flow, host, retry: rules, replay } = options;
        let UpstreamSettings { protocol, retries, .. } = *self.cluster.settings;
        let http2 = protocol == Protocol::Http2;
        let reader = if http2 { BodyReader::SharedConnection } else { BodyReader::Connection };
        let mut progress = request.body_mut().apply_limits(bounds);
        request.body_mut().start_upload(reader);
        let may_retry = !attempts.is_single_attempt;
        let may_retry_method =
            rules.map_or_else(|| is_safe(request.method()), |rules| rules.may_retry(request.method()));
        let safe = may_retry && may_retry_method;
        let has_body = progress.is_some() && replay.is_none();
        let retries = if may_retry { rules.and_then(|rules| rules.retries).unwrap_or(retries) } else { 0 };
        let retry_state =
            RetryState { can_reconnect: true, retries_left: retries, is_safe: safe, has_body, is_http2: http2 };
        let client = if self.sends_proxy_header() {
            request.extensions_mut().remove::<ProxiedConnection>().map(Box::new)
        } else {
            None
        };
        let hash_key = self.cluster.hash_key(request.headers());
        let pick_state = PickState { hash_key, tried: Vec::new(), client };
        let mut sending = Sending { retry_state, pick_state, attempts };
        if retries > 0 {
            self.cluster.retry_budget.deposit();
        }
        if let Err(error) = self.authorize(request.headers_mut()) {
            return Err(sending.fail_unexecuted(*request, error));
        }
        // Requests that already wait in the queue take precedence over this request.
        let picked = if self.cluster.shared.queue.is_empty() { self.pick(hash_key, &[]) } else { None };
        let mut target = match picked {
            Some(target) => target,
            None => match Box::pin(self.pick_queued(hash_key)).await {
                Ok(target) => target,
                Err(error) => return Err(sending.fail_unexecuted(*request, error)),
            },
        };
        let mut idle = target.pool.take_idle(sending.pick_state.client.as_deref());
        loop {
            let EndpointConnection { pool, permit, mut connection, is_reused } = match idle.take() {
                Some(connection) => {
                    EndpointConnection { pool: target.pool, permit: target.permit, connection, is_reused: true }
                }
                None => match Box::pin(self.connect_and_record(target, &mut sending)).await {
                    Ok(connection) => connection,
                    Err(error) => return Err(sending.fail_unexecuted(*request, error)),
                },
            };
            sending.attempts.record_endpoint(permit.endpoint());
            if matches!(host, HostPolicy::Server) {
                target::set_host(&mut request, &permit.endpoint().server.authority);
            }
            let needs_copy = sending.retry_state.needs_copy(is_reused);
            let copy = needs_copy.then(|| ReplayableRequest::new(&request, replay));
            flow.stop_if_abandoned().await;
            let result = {
                let _exchange = flow.start_exchange();
                // Pin the futures here, because each future that awaits them would otherwise contain a copy.
                let response = pin!(connection.send(*request, flow.reads(0)));
                let result = pin!(self.attempt(response, connection.timer(), progress.as_deref()));
                match bounds.deadline {
                    None => result.await,
                    Some(deadline) => timeout_at(deadline, result)
                        .await
                        .unwrap_or_else(|_| Err(self.deadline_error(&bounds, progress.as_deref()))),
                }
            };
            flow.stop_if_abandoned().await;
            let retry = match result {
                Ok(Ok(response)) => {
                    if let Some(fault) = body::framing_error(&response) {
                        let error = UpstreamError::InvalidResponse { upstream: self.name().into(), fault };
                        self.cluster.report_failure(permit.endpoint(), &error);
                        return Err(error);
                    }
                    if let Some(progress) = &progress {
                        progress.mark_response_started();
                    }
                    self.cluster.report_response(permit.endpoint(), response.status());
                    let copy = copy.filter(|_| rules.is_some_and(|rules| rules.covers(response.status())));
                    match self.retry_elsewhere(copy, RetryReason::Status, &permit, &mut sending) {
                        Some(retry) => {
                            if sending.attempts.keeps_replaced() {
                                let response = connection.into_response(response, bounds, pool, permit);
                                Box::pin(sending.attempts.record_replaced(*response)).await;
                            }
                            retry
                        }
                        None => {
                            let cookie = self.cluster.sticky_cookie(hash_key, permit.endpoint());
                            let mut response = connection.into_response(response, bounds, pool, permit);
                            if let Some(cookie) = cookie {
                                response.headers_mut().append(SET_COOKIE, cookie);
                            }
                            return Ok(response);
                        }
                    }
                }
                Ok(Err(failure)) => {
                    let failed = EndpointConnection { pool, permit, connection, is_reused };
                    self.retry_after_failure(failure, copy, failed, progress.as_deref(), &mut sending)?
                }
                Err(error) => {
                    if !error.is_client_error() {
                        connection.start_draining();
                    }
                    let is_timeout = matches!(error, UpstreamError::ResponseTimeout { .. });
                    if is_timeout {
                        self.cluster.report_failure(permit.endpoint(), &error);
                    }
                    let copy = copy.filter(|_| is_timeout && rules.is_some_and(|rules| rules.on_timeout));
                    self.retry_elsewhere(copy, RetryReason::Timeout, &permit, &mut sending).ok_or(error)?
                }
            };
            (request, target) = (Box::new(retry.request), retry.target);
            sending.retry_state.can_reconnect = false;
            if replay.is_some() {
                progress = request.body_mut().apply_limits(bounds);
                request.body_mut().start_upload(reader);
            }
        }
    }

    /// Connect to the picked endpoint or to others, and record the attempts.
    async fn connect_and_record(
        &self,
        target: Target,
        sending: &mut Sending<'_>,
    ) -> Result<EndpointConnection, UpstreamError> {
        let Sending { retry_state, pick_state, attempts } = sending;
        let tried = pick_state.tried.len() + 1;
        let connected = self.connect(target, pick_state, retry_state.can_reconnect).await;
        pick_state.tried.last().into_iter().for_each(|endpoint| attempts.record_endpoint(endpoint));
        attempts.record_retries(RetryReason::Unwritten, pick_state.tried.len().saturating_sub(tried) as u64);
        connected
    }

    /// Return a copy of a request and another endpoint that gets it, if `retries` and the retry budget allow it.
    fn retry_elsewhere(
        &self,
        copy: Option<ReplayableRequest<'_>>,
        reason: RetryReason,
        permit: &RequestPermit,
        sending: &mut Sending<'_>,
    ) -> Option<Retry> {
        let Sending { retry_state, pick_state, attempts } = sending;
        let copy = copy.filter(|_| retry_state.is_safe && retry_state.retries_left > 0)?;
        pick_state.tried.push(permit.endpoint().clone());
        let target = self.pick_other(pick_state).filter(|_| self.cluster.withdraw_retry())?;
        retry_state.retries_left -= 1;
        attempts.record_retries(reason, 1);
        Some(Retry { request: copy.into_request(), target })
    }

    /// Return where a request is sent again whose connection has failed.
    ///
    /// # Errors
    /// The request is not sent again.
    fn retry_after_failure(
        &self,
        mut failure: SendError,
        copy: Option<ReplayableRequest<'_>>,
        failed: EndpointConnection,
        progress: Option<&UploadProgress>,
        sending: &mut Sending<'_>,
    ) -> Result<Retry, UpstreamError> {
        let EndpointConnection { pool, permit, mut connection, is_reused } = failed;
        let Sending { retry_state, pick_state, attempts } = sending;
        let outcome = connection.classify_error(failure.error());
        let unsent = failure.take_message();
        // Do not count a closed idle connection as a failure of the endpoint, because a server may close it at any time.
        let is_endpoint_failure = !is_reused && (unsent.is_some() || outcome == StreamOutcome::Unknown)
            || outcome == StreamOutcome::PeerError;
        // Other requests may have caused the end of a shared connection.
        let retry = retry_state.retry_target(unsent, copy, outcome, is_reused || connection.is_shared());
        let error = self.exchange_error(failure.into_error(), progress);
        if is_endpoint_failure && !error.is_client_error() {
            self.cluster.report_failure(permit.endpoint(), &error);
        }
        pick_state.tried.push(permit.endpoint().clone());
        match retry {
            Some(RetryTarget::SameEndpoint(request)) => {
                attempts.record_retries(RetryReason::Reconnected, 1);
                Ok(Retry { request, target: Target { pool, permit } })
            }
            Some(RetryTarget::OtherEndpoint(request)) => match self.pick_other(pick_state) {
                Some(target) => {
                    attempts.record_retries(RetryReason::Unwritten, 1);
                    Ok(Retry { request, target })
                }
                None => Err(sending.fail_unexecuted(request, error)),
            },
            Some(RetryTarget::OtherEndpointWithBudget(request)) => {
                retry_state.retries_left -= 1;
                match self.pick_other(pick_state).filter(|_| self.cluster.withdraw_retry()) {
                    Some(target) => {
                        attempts.record_retries(RetryReason::Retried, 1);
                        Ok(Retry { request, target })
                    }
                    None => {
                        attempts.record_outcome(outcome);
                        Err(error)
                    }
                }
            }
            None => {
                attempts.record_outcome(outcome);
                Err(error)
            }
        }
    }

    /// Await the response to one attempt. The response timeout runs only while the upload makes no progress, so that a
    /// slow upload does not count as a delay of the upstream.
    async fn attempt(
        &self,
        mut response: Pin<&mut impl Future<Output = Result<Response<Incoming>, SendError>>>,
        timer: &mut LazyTimer,
        progress: Option<&UploadProgress>,
    ) -> Result<Result<Response<Incoming>, SendError>, UpstreamError> {
        let mut last_frames = progress.map(UploadProgress::frame_count);
        // Check the progress of a request body ten times per response timeout, so that the timeout starts close to the
        // end of the upload.
        let polls = if progress.is_some() { 10 } else { 1 };
        let mut silent_polls = 0;
        while silent_polls < polls {
            let deadline = Instant::now() + self.cluster.settings.response_timeout / polls;
            let result = poll_fn(|cx| match response.as_mut().poll(cx) {
                Poll::Ready(result) => Poll::Ready(Some(Ok(result))),
                Poll::Pending => match progress.map_or(Poll::Pending, |progress| progress.poll_error(cx)) {
                    Poll::Ready(error) => Poll::Ready(Some(Err(error.into()))),
                    Poll::Pending => timer.poll(deadline, cx).map(|()| None),
                },
            });
            if let Some(result) = result.await {
                return result;
            }
            let now = progress.map(UploadProgress::frame_count);
            // Do not count time in which the gateway waits for the client. During this time, the upload timeouts apply.
            let is_silent = now == last_frames && !progress.is_some_and(UploadProgress::is_waiting_for_client);
            silent_polls = if is_silent { silent_polls + 1 } else { 0 };
            last_frames = now;
        }
        Err(UpstreamError::ResponseTimeout { upstream: self.name().into() })
    }

    /// Return the error for an expired route timeout: `ClientTimeout` if the client delayed the upload, `ClientDeadline`
    /// if the client has set this time, otherwise `RouteTimeout`.
    fn deadline_error(&self, bounds: &BodyLimits, progress: Option<&UploadProgress>) -> UpstreamError {
        if progress.is_some_and(UploadProgress::is_delayed_by_client) {
            return UpstreamError::ClientTimeout;
        }
        match bounds.is_client_deadline {
            true => UpstreamError::ClientDeadline { upstream: self.name().into() },
            false => UpstreamError::RouteTimeout { upstream: self.name().into() },
        }
    }

    fn exchange_error(&self, error: hyper::Error, progress: Option<&UploadProgress>) -> UpstreamError {
        if progress.is_some_and(UploadProgress::is_too_large) {
            return UpstreamError::BodyTooLarge;
        }
        if progress.is_some_and(UploadProgress::is_stalled) {
            return UpstreamError::ClientTimeout;
        }
        // If the body is incomplete, a user error of hyper or a local stream reset means that the client has aborted
        // the body.
        let unfinished = progress.is_some_and(|progress| !progress.is_done());
        if unfinished && (error.is_user() || classify_error(&error).0 == StreamOutcome::LocalReset) {
            return UpstreamError::ClientAborted(error.into());
        }
        UpstreamError::Reset { upstream: self.name().into(), source: error }
    }
}

// When the configuration is reloaded, an upstream takes over the connections of the previous upstream.

impl Upstream {
    /// Create the upstream for a cluster that replaces another cluster. Connections to endpoints in both clusters are
    /// kept if protocol, `proxy_protocol`, `pool_idle_timeout` and the TLS settings are equal.
    pub fn from_previous(cluster: Arc<UpstreamCluster>, previous: &Upstream) -> Self {
        let speaks = |cluster: &UpstreamCluster| {
            let settings = &cluster.settings;
            (settings.protocol, settings.proxy_protocol, settings.pool_idle_timeout)
        };
        let pools = previous.pools.load();
        let endpoints = cluster.endpoints();
        let known = pools.pools.iter().filter(|_| speaks(&cluster) == speaks(&previous.cluster));
        let known =
            known.filter_map(|pool| endpoints.iter().find_map(|endpoint| pool.reuse_for(endpoint))).map(Arc::new);
        let known: Vec<_> = known.collect();
        Upstream::with_pools(cluster, &known)
    }
}
