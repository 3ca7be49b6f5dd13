//! Exchange of a request with an upstream: choice of the endpoint, connection, response, and safe retries.

use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Poll;

use bytes::{Buf, Bytes};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, Uri, Version};
use hyper::body::Incoming;
use tokio::time::{Instant, timeout_at};

use crate::http::body;
use crate::http::body::Body;
use crate::http::body_limits::BodyLimits;
use crate::http::body_limits::LazyTimer;
use crate::http::flow::StreamFlow;
use crate::http::headers::is_safe;
use crate::http::request_body::{BodyReader, RequestBody, UploadProgress};
use crate::upstream::connection_pool::{SendError, StreamOutcome, classify_error};
use crate::upstream::connector::{EndpointConnection, ProxiedConnection};
use crate::upstream::endpoint::Endpoint;
use crate::upstream::{PickState, Protocol, Upstream, UpstreamError, UpstreamSettings};

/// The ways in which a request may still be retried.
struct RetryState {
    /// Whether the request may be sent once more to the same endpoint on another connection.
    can_reconnect: bool,
    /// Number of remaining retries on other endpoints.
    retries_left: u32,
    is_safe: bool,
    has_body: bool,
    is_http2: bool,
}

/// Where a request is sent again after a failure.
enum RetryTarget {
    /// Send the request again to the same endpoint, on another connection.
    SameEndpoint(Request<RequestBody>),
    /// Send the request to another endpoint, because no part of the request was written.
    OtherEndpoint(Request<RequestBody>),
    /// Send the request to another endpoint, if the retry budget allows it.
    OtherEndpointWithBudget(Request<RequestBody>),
}

impl Upstream {
    /// Send a request and wait for the response headers. Dropping the future cancels the request.
    ///
    /// If an attempt fails and no part of the request was written, the request is sent on another connection or to
    /// another endpoint. Otherwise, only requests without a body are retried: GET, HEAD and OPTIONS, and requests with
    /// any method that an HTTP/2 server declares as not processed (RFC 9113 §8.7). A request of these two kinds is sent
    /// once more to the same endpoint if a reused or shared connection was closed before the response (RFC 9110
    /// §9.2.2), or if the HTTP/2 server did not process the request. Other retries of such a request go to other endpoints, limited by
    /// `retries` and the retry budget.
    ///
    /// If the gateway sends PROXY headers to the upstream, the header describes the [`ProxiedConnection`] in the
    /// extensions of the request.
    ///
    /// # Errors
    /// See [`UpstreamError`].
    pub async fn send(
        &self,
        mut request: Box<Request<RequestBody>>,
        bounds: BodyLimits,
        flow: &StreamFlow,
        attempts: &mut AttemptLog,
    ) -> Result<Response<Body>, UpstreamError> {
        let UpstreamSettings { protocol, retries, .. } = *self.cluster.settings;
        let http2 = protocol == Protocol::Http2;
        let progress = request.body_mut().apply_limits(bounds);
        request.body_mut().start_upload(if http2 { BodyReader::SharedConnection } else { BodyReader::Connection });
        let may_retry = !attempts.is_single_attempt;
        let (safe, has_body) = (may_retry && is_safe(request.method()), progress.is_some());
        let retries = if may_retry { retries } else { 0 };
        let mut retry_state =
            RetryState { can_reconnect: true, retries_left: retries, is_safe: safe, has_body, is_http2: http2 };
        let client = if self.sends_proxy_header() {
            request.extensions_mut().remove::<ProxiedConnection>().map(Box::new)
        } else {
            None
        };
        let mut pick_state =
            PickState { hash_key: self.cluster.hash_key(request.headers()), tried: Vec::new(), client };
        if let Some(retry_budget) = self.cluster.retry_budget.as_ref().filter(|_| may_retry) {
            retry_budget.deposit();
        }
        // Requests that already wait in the queue take precedence over this request.
        let picked = if self.cluster.queue.is_empty() { self.pick(pick_state.hash_key, &[]) } else { None };
        let mut target = match picked {
            Some(target) => target,
            None => Box::pin(self.pick_queued(pick_state.hash_key)).await?,
        };
        let mut idle = target.0.take_idle(pick_state.client.as_deref());
        loop {
            let EndpointConnection { pool, permit, mut connection, is_reused: reused } = match idle.take() {
                Some(connection) => {
                    EndpointConnection { pool: target.0, permit: target.1, connection, is_reused: true }
                }
                None => {
                    let tried = pick_state.tried.len() + 1;
                    let connected = Box::pin(self.connect(target, &mut pick_state, retry_state.can_reconnect)).await;
                    pick_state.tried.last().into_iter().for_each(|endpoint| attempts.record_endpoint(endpoint));
                    attempts
                        .record_retries(RetryReason::Unwritten, pick_state.tried.len().saturating_sub(tried) as u64);
                    connected?
                }
            };
            attempts.record_endpoint(permit.endpoint());
            let copy = retry_state.needs_copy(reused).then(|| ReplayableRequest::from_request(&request));
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
                        .unwrap_or_else(|_| Err(self.deadline_error(progress.as_deref()))),
                }
            };
            flow.stop_if_abandoned().await;
            let mut failure = match result {
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
                    return Ok(connection.into_response(response, bounds, pool, permit));
                }
                Ok(Err(failure)) => failure,
                Err(error) => {
                    if !error.is_client_error() {
                        connection.start_draining();
                    }
                    if let UpstreamError::ResponseTimeout { .. } = error {
                        self.cluster.report_failure(permit.endpoint(), &error);
                    }
                    return Err(error);
                }
            };
            let outcome = connection.classify_error(failure.error());
            let unsent = failure.take_message();
            // Do not count a closed idle connection as a failure of the endpoint, because a server may close it at any
            // time.
            let is_endpoint_failure = !reused && (unsent.is_some() || outcome == StreamOutcome::Unknown)
                || outcome == StreamOutcome::PeerError;
            // Other requests may have caused the end of a shared connection.
            let retry = retry_state.retry_target(unsent, copy, outcome, reused || connection.is_shared());
            let error = self.exchange_error(failure.into_error(), progress.as_deref());
            if is_endpoint_failure && !error.is_client_error() {
                self.cluster.report_failure(permit.endpoint(), &error);
            }
            pick_state.tried.push(permit.endpoint().clone());
            let (retry, other) = match retry {
                Some(RetryTarget::SameEndpoint(request)) => {
                    attempts.record_retries(RetryReason::Reconnected, 1);
                    (request, (pool, permit))
                }
                Some(RetryTarget::OtherEndpoint(request)) => {
                    let target = self.pick_other(&pick_state).ok_or(error)?;
                    attempts.record_retries(RetryReason::Unwritten, 1);
                    (request, target)
                }
                Some(RetryTarget::OtherEndpointWithBudget(request)) => {
                    let target = self.pick_other(&pick_state).filter(|_| self.cluster.withdraw_retry());
                    retry_state.retries_left -= 1;
                    let target = target.ok_or(error)?;
                    attempts.record_retries(RetryReason::Retried, 1);
                    (request, target)
                }
                None => return Err(error),
            };
            (request, target, retry_state.can_reconnect) = (Box::new(retry), other, false);
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

    /// Return the error for an expired route timeout: `ClientTimeout` if the client delayed the upload, otherwise
    /// `RouteTimeout`.
    fn deadline_error(&self, progress: Option<&UploadProgress>) -> UpstreamError {
        if progress.is_some_and(UploadProgress::is_delayed_by_client) {
            return UpstreamError::ClientTimeout;
        }
        UpstreamError::RouteTimeout { upstream: self.name().into() }
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

impl RetryState {
    /// Return whether a retry may need a copy of the request.
    fn needs_copy(&self, reused: bool) -> bool {
        let may_repeat = !self.has_body && (self.is_safe || self.is_http2);
        may_repeat && (self.retries_left > 0 || self.can_reconnect && (reused || self.is_http2))
    }

    /// Decide where to send a failed request again. Return `None` if the request must not be sent again.
    fn retry_target(
        &self,
        unsent: Option<Request<RequestBody>>,
        copy: Option<ReplayableRequest>,
        outcome: StreamOutcome,
        reused: bool,
    ) -> Option<RetryTarget> {
        let unwritten = unsent.is_some();
        let is_safe_to_resend = match outcome {
            StreamOutcome::NotProcessed => true,
            StreamOutcome::Unknown => self.is_safe,
            StreamOutcome::PeerError | StreamOutcome::LocalReset => false,
        };
        let request = unsent.or_else(|| copy.filter(|_| is_safe_to_resend).map(ReplayableRequest::into_request))?;
        if self.can_reconnect && (reused || self.is_http2 && (unwritten || outcome == StreamOutcome::NotProcessed)) {
            Some(RetryTarget::SameEndpoint(request))
        } else if unwritten {
            Some(RetryTarget::OtherEndpoint(request))
        } else {
            (self.retries_left > 0).then_some(RetryTarget::OtherEndpointWithBudget(request))
        }
    }
}

// Retry budget: the number of retries is limited to a fraction of the requests, so that retries do not overload a
// failing upstream.

/// Number of requests that add one retry to the budget.
const REQUESTS_PER_RETRY: u64 = 5;

/// Maximum number of retries that the budget can save.
const MAX_SAVED_RETRIES: u64 = 100;

/// Minimum number of retries per second, for upstreams with few requests.
const MIN_RETRIES_PER_SEC: f64 = 10.0;

/// Retry budget of an upstream.
#[derive(Debug)]
pub(super) struct RetryBudget {
    /// Credit for retries: each recorded request adds 1, and a retry subtracts `REQUESTS_PER_RETRY`. If the credit is
    /// too low, nothing is subtracted, and `min_retries` determines whether the retry is allowed.
    deposits: AtomicU64,
    /// Token bucket that refills at `MIN_RETRIES_PER_SEC` and holds at most the retries of one second: the remaining
    /// retries, and the time of the last update.
    min_retries: Mutex<(f64, std::time::Instant)>,
}

impl RetryBudget {
    pub(super) fn new(now: std::time::Instant) -> Self {
        RetryBudget { deposits: AtomicU64::new(0), min_retries: Mutex::new((MIN_RETRIES_PER_SEC, now)) }
    }

    /// Record a request that is not a retry.
    pub(super) fn deposit(&self) {
        let most = MAX_SAVED_RETRIES * REQUESTS_PER_RETRY;
        let _ = self
            .deposits
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |saved| (saved < most).then_some(saved + 1));
    }

    /// Withdraw a retry from the budget. Return whether the budget allows the retry.
    pub(super) fn withdraw(&self, now: std::time::Instant) -> bool {
        let pay = |saved: u64| saved.checked_sub(REQUESTS_PER_RETRY);
        if self.deposits.fetch_update(Ordering::Relaxed, Ordering::Relaxed, pay).is_ok() {
            return true;
        }
        let mut floor = self.min_retries.lock().unwrap_or_else(PoisonError::into_inner);
        let (left, at) = *floor;
        let left =
            (left + MIN_RETRIES_PER_SEC * now.saturating_duration_since(at).as_secs_f64()).min(MIN_RETRIES_PER_SEC);
        *floor = (if left < 1.0 { left } else { left - 1.0 }, now);
        left >= 1.0
    }
}

// Log of the attempts of a request.

/// Reason why a request was sent again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RetryReason {
    /// A reused connection was closed, or an HTTP/2 server did not process the request. The request is sent again to
    /// the same endpoint.
    Reconnected,
    /// No part of the request was written. The request is sent to another endpoint.
    Unwritten,
    /// The request is safe to repeat, and the retry budget allows a retry. The request is sent to another endpoint.
    Retried,
}

impl RetryReason {
    /// All reasons, in the order of [`AttemptLog::retries`].
    pub const ALL: [RetryReason; 3] = [RetryReason::Reconnected, RetryReason::Unwritten, RetryReason::Retried];

    /// Return the value of the metric label `reason`.
    pub fn label(self) -> &'static str {
        match self {
            RetryReason::Reconnected => "stale_connection",
            RetryReason::Unwritten => "not_sent",
            RetryReason::Retried => "reset",
        }
    }
}

/// Last endpoint of a request, and its retries.
#[derive(Debug, Default)]
pub struct AttemptLog {
    retries: [u64; 3],
    endpoint: Option<Arc<Endpoint>>,
    /// Whether the endpoint is recorded. The endpoint is recorded only on demand, because recording changes a reference
    /// count that all workers share.
    records_endpoint: bool,
    /// Whether the request is retried only if no part of it was written, or if an HTTP/2 server declares it as not
    /// processed.
    is_single_attempt: bool,
}

impl AttemptLog {
    /// Create a log. The log records the endpoint if `records_endpoint` is set.
    pub fn new(records_endpoint: bool) -> Self {
        AttemptLog { records_endpoint, ..AttemptLog::default() }
    }

    /// Create the log of a request that is sent again only if no part of it was written, or if an HTTP/2 server
    /// declares it as not processed.
    pub fn single_attempt() -> Self {
        AttemptLog { is_single_attempt: true, ..AttemptLog::default() }
    }

    /// Return the number of retries by [`RetryReason`].
    pub fn retries(&self) -> [u64; 3] {
        self.retries
    }

    /// Return the name of the last endpoint.
    pub fn endpoint_name(&self) -> Option<&str> {
        self.endpoint.as_ref().map(|endpoint| endpoint.name())
    }

    pub(super) fn record_endpoint(&mut self, endpoint: &Arc<Endpoint>) {
        if self.records_endpoint {
            self.endpoint = Some(endpoint.clone());
        }
    }

    pub(super) fn record_retries(&mut self, reason: RetryReason, times: u64) {
        self.retries[reason as usize] += times;
    }
}

// Copies of requests for retries, encoded as bytes.

/// A copy of a request without a body, for retries.
///
/// Cloning a `HeaderMap` increments a reference count for each value and allocates a table. Encoding the headers costs
/// less CPU time. Decoding them is rarely needed, because only few requests are retried.
pub(super) struct ReplayableRequest {
    method: Method,
    uri: Uri,
    version: Version,
    /// Each header is encoded as: length of the name (u32), twice the length of the value plus one if the value is
    /// sensitive (u32), name, value.
    encoded_headers: Vec<u8>,
}

/// Initial capacity in bytes per header, which is sufficient for most requests.
const HEADER_CAPACITY: usize = 48;

impl ReplayableRequest {
    /// Create a copy of a request.
    pub(super) fn from_request(request: &Request<RequestBody>) -> Self {
        let headers = request.headers();
        let mut encoded = Vec::with_capacity(headers.len() * HEADER_CAPACITY);
        for (name, value) in headers {
            let (name, value, secret) = (name.as_str().as_bytes(), value.as_bytes(), value.is_sensitive());
            let lengths = [name.len() as u32, (value.len() as u32) << 1 | u32::from(secret)];
            encoded.extend_from_slice(lengths.map(u32::to_be_bytes).as_flattened());
            encoded.extend_from_slice(name);
            encoded.extend_from_slice(value);
        }
        let (method, uri, version) = (request.method().clone(), request.uri().clone(), request.version());
        ReplayableRequest { method, uri, version, encoded_headers: encoded }
    }

    /// Return the request that the copy describes.
    pub(super) fn into_request(self) -> Request<RequestBody> {
        let mut request = Request::new(RequestBody::empty());
        *request.method_mut() = self.method;
        *request.uri_mut() = self.uri;
        *request.version_mut() = self.version;
        *request.headers_mut() = decode_headers(self.encoded_headers.into());
        request
    }
}

fn decode_headers(mut encoded: Bytes) -> HeaderMap {
    let mut headers = HeaderMap::new();
    while encoded.has_remaining() {
        let (name, value) = (encoded.get_u32() as usize, encoded.get_u32() as usize);
        let secret = value % 2 == 1;
        let (name, value) = (encoded.split_to(name), encoded.split_to(value / 2));
        // Parsing cannot fail, because name and value were encoded from a `HeaderMap`.
        if let (Ok(name), Ok(mut value)) = (HeaderName::from_bytes(&name), HeaderValue::from_maybe_shared(value)) {
            value.set_sensitive(secret);
            headers.append(name, value);
        }
    }
    headers
}

#[cfg(test)]
mod budget_tests {
    use std::time::Duration;

    use super::*;
    use crate::limiter::clock::monotonic;

    #[test]
    fn budget_allows_a_fifth_of_requests_and_a_minimum_rate() {
        let now = monotonic();
        let budget = RetryBudget::new(now);
        let withdrawn = |at| (0..1000).filter(|_| budget.withdraw(at)).count();
        assert_eq!(withdrawn(now), 10, "the minimum rate allows 10 retries in the first second");
        assert_eq!(withdrawn(now + Duration::from_millis(500)), 5);
        (0..200).for_each(|_| budget.deposit());
        assert_eq!(withdrawn(now + Duration::from_millis(500)), 40, "a fifth of 200 requests");
        (0..100_000).for_each(|_| budget.deposit());
        assert_eq!(withdrawn(now + Duration::from_secs(3600)), 110, "100 saved retries, and 10 of the minimum rate");
    }
}

#[cfg(test)]
mod replayable_request_tests {
    use super::*;

    #[test]
    fn replayed_request_equals_original() {
        let mut secret = HeaderValue::from_static("s3cret");
        secret.set_sensitive(true);
        let mut request = Request::new(RequestBody::empty());
        (*request.method_mut(), *request.version_mut()) = (Method::OPTIONS, Version::HTTP_2);
        *request.uri_mut() = Uri::from_static("/a%20b?c=d");
        let headers = request.headers_mut();
        headers.append("accept", HeaderValue::from_static("text/html"));
        headers.append("x-empty", HeaderValue::from_static(""));
        headers.append("authorization", secret);
        headers.append("accept", HeaderValue::from_bytes(b"caf\xe9; q=0.5").unwrap());
        headers.append("x-long", HeaderValue::from_str(&"y".repeat(70_000)).unwrap());
        let retry = ReplayableRequest::from_request(&request).into_request();
        assert_eq!((retry.method(), retry.uri()), (request.method(), request.uri()));
        assert_eq!((retry.version(), retry.headers()), (request.version(), request.headers()));
        assert_eq!(
            retry.headers().iter().collect::<Vec<_>>(),
            request.headers().iter().collect::<Vec<_>>(),
            "the copy keeps the order of the headers"
        );
        let secrets = retry.headers().iter().filter(|(_, value)| value.is_sensitive());
        assert_eq!(secrets.map(|(name, _)| name.as_str()).collect::<Vec<_>>(), ["authorization"]);
    }
}
