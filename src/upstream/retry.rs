//! Retries of requests to upstreams: when a retry is safe, the retry budget, the log of the attempts, and the responses
//! that retries replace.

use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::{Buf, Bytes};
use http::header::CONTENT_TYPE;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode, Uri, Version};
use http_body_util::BodyExt;
use tokio::time::timeout;

use crate::http::body::Body;
use crate::http::headers::has_content_coding;
use crate::http::request_body::{ReplayBody, RequestBody};
use crate::upstream::connection_pool::StreamOutcome;
use crate::upstream::endpoint::Endpoint;

/// When requests of a route are sent again (`retries`, `retry_on` and `retry_methods`).
#[derive(Debug, Clone)]
pub struct RetryRules {
    /// Maximum number of retries on other servers. `None` for `retries` of the upstream.
    pub retries: Option<u32>,
    /// Statuses after which a request is sent again.
    pub statuses: Vec<RangeInclusive<u16>>,
    /// Whether a request is sent again after an expired `response_timeout`.
    pub on_timeout: bool,
    /// Methods of requests that may be sent again although a server may have executed them.
    pub methods: Vec<Method>,
}

impl RetryRules {
    /// Return whether a request with this status is sent again.
    pub fn covers(&self, status: StatusCode) -> bool {
        self.statuses.iter().any(|statuses| statuses.contains(&status.as_u16()))
    }

    /// Return whether a request may be sent again although a server may have executed it.
    pub fn may_retry(&self, method: &Method) -> bool {
        self.methods.contains(method)
    }
}

/// The ways in which a request may still be retried.
pub(super) struct RetryState {
    /// Whether the request may be sent once more to the same endpoint on another connection.
    pub(super) can_reconnect: bool,
    /// Number of remaining retries on other endpoints.
    pub(super) retries_left: u32,
    pub(super) is_safe: bool,
    pub(super) has_body: bool,
    pub(super) is_http2: bool,
}

/// Where a request is sent again after a failure.
pub(super) enum RetryTarget {
    /// Send the request again to the same endpoint, on another connection.
    SameEndpoint(Request<RequestBody>),
    /// Send the request to another endpoint, because no part of the request was written.
    OtherEndpoint(Request<RequestBody>),
    /// Send the request to another endpoint, if the retry budget allows it.
    OtherEndpointWithBudget(Request<RequestBody>),
}

impl RetryState {
    /// Return whether a retry may need a copy of the request.
    pub(super) fn needs_copy(&self, reused: bool) -> bool {
        let may_repeat = !self.has_body && (self.is_safe || self.is_http2);
        may_repeat && (self.retries_left > 0 || self.can_reconnect && (reused || self.is_http2))
    }

    /// Decide where to send a failed request again. Return `None` if the request must not be sent again.
    pub(super) fn retry_target(
        &self,
        unsent: Option<Request<RequestBody>>,
        copy: Option<ReplayableRequest<'_>>,
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
    /// As `Retried`, after a response with a status of `retry_on`.
    Status,
    /// As `Retried`, after an expired `response_timeout`.
    Timeout,
    /// The request is sent to a fallback upstream.
    Fallback,
}

impl RetryReason {
    /// All reasons, in the order of [`AttemptLog::retries`].
    pub const ALL: [RetryReason; 6] = [
        RetryReason::Reconnected,
        RetryReason::Unwritten,
        RetryReason::Retried,
        RetryReason::Status,
        RetryReason::Timeout,
        RetryReason::Fallback,
    ];

    /// Return the value of the metric label `reason`.
    pub fn label(self) -> &'static str {
        match self {
            RetryReason::Reconnected => "stale_connection",
            RetryReason::Unwritten => "not_sent",
            RetryReason::Retried => "reset",
            RetryReason::Status => "status",
            RetryReason::Timeout => "timeout",
            RetryReason::Fallback => "fallback",
        }
    }
}

/// Last endpoint of a request, and its retries.
#[derive(Default)]
pub struct AttemptLog {
    retries: [u64; RetryReason::ALL.len()],
    endpoint: Option<Arc<Endpoint>>,
    /// Whether the endpoint is recorded. The endpoint is recorded only on demand, because recording changes a reference
    /// count that all workers share.
    records_endpoint: bool,
    /// Whether the request is retried only if no part of it was written, or if an HTTP/2 server declares it as not
    /// processed.
    pub(super) is_single_attempt: bool,
    /// Whether no server can have executed the failed request.
    is_unexecuted: bool,
    /// Whether to keep the body of a request of which no part was written.
    keeps_body: bool,
    unsent_body: Option<RequestBody>,
    /// Whether to keep the responses that retries replace.
    keeps_replaced: bool,
    replaced: Vec<ReplacedResponse>,
}

impl AttemptLog {
    /// Create a log. The log records the endpoint if `records_endpoint` is set.
    pub fn new(records_endpoint: bool) -> Self {
        AttemptLog { records_endpoint, ..AttemptLog::default() }
    }

    /// Keep the body of a request of which no part was written, so that the request can be sent to another upstream.
    pub fn keep_body(mut self) -> Self {
        self.keeps_body = true;
        self
    }

    /// Keep the start of each response that a retry replaces.
    pub fn keep_replaced(mut self) -> Self {
        self.keeps_replaced = true;
        self
    }

    pub(super) fn keeps_replaced(&self) -> bool {
        self.keeps_replaced
    }

    /// Record a response that a retry replaces.
    pub(super) async fn record_replaced(&mut self, response: Response<Body>) {
        self.replaced.extend(ReplacedResponse::read(response).await);
    }

    /// Return the responses that retries have replaced.
    pub fn into_replaced(self) -> Vec<ReplacedResponse> {
        self.replaced
    }

    /// Return whether no server can have executed the failed request.
    pub fn is_unexecuted(&self) -> bool {
        self.is_unexecuted
    }

    /// Take the body of a request of which no part was written.
    pub fn take_unsent_body(&mut self) -> Option<RequestBody> {
        self.unsent_body.take()
    }

    /// Record that a request is sent to a fallback upstream.
    pub fn record_fallback(&mut self) {
        self.record_retries(RetryReason::Fallback, 1);
    }

    /// Record that no server can have executed the request. `unsent` is the request if no part of it was written.
    pub(super) fn record_unexecuted(&mut self, unsent: Option<Request<RequestBody>>) {
        self.is_unexecuted = true;
        self.unsent_body = unsent.filter(|_| self.keeps_body).map(Request::into_body);
    }

    /// Create the log of a request that is sent again only if no part of it was written, or if an HTTP/2 server
    /// declares it as not processed.
    pub fn single_attempt() -> Self {
        AttemptLog { is_single_attempt: true, ..AttemptLog::default() }
    }

    /// Return the number of retries by [`RetryReason`].
    pub fn retries(&self) -> [u64; RetryReason::ALL.len()] {
        self.retries
    }

    /// Return the name of the last endpoint.
    pub fn endpoint_name(&self) -> Option<&Arc<str>> {
        self.endpoint.as_ref().map(|endpoint| endpoint.name())
    }

    /// Record how the last attempt failed, after the request was sent.
    pub(super) fn record_outcome(&mut self, outcome: StreamOutcome) {
        if outcome == StreamOutcome::NotProcessed {
            self.record_unexecuted(None);
        }
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

// Responses that the client does not get.

/// Bounds of the part of a replaced response that is read.
const MAX_REPLACED: usize = 64 << 10;
const MAX_REPLACED_WAIT: Duration = Duration::from_secs(1);

/// The start of a response that the client does not get, because another server or a fallback gets the request.
pub struct ReplacedResponse {
    /// The value of `Content-Type`.
    pub media_type: Box<str>,
    /// The first bytes of the body.
    pub body: Vec<u8>,
}

impl ReplacedResponse {
    /// Read the start of a response. Return `None` if the response has no media type or is compressed.
    pub async fn read(response: Response<Body>) -> Option<Self> {
        let (head, mut response) = response.into_parts();
        let media_type = head.headers.get(CONTENT_TYPE).filter(|_| !has_content_coding(&head.headers))?;
        let media_type = media_type.to_str().ok()?.into();
        let mut body = Vec::new();
        let read = async {
            while let Some(Ok(frame)) = response.frame().await
                && body.len() < MAX_REPLACED
            {
                body.extend_from_slice(frame.data_ref().map_or(&[][..], Buf::chunk));
            }
        };
        // The start of a slow or broken response is kept as well.
        let _ = timeout(MAX_REPLACED_WAIT, read).await;
        Some(ReplacedResponse { media_type, body })
    }
}

// Copies of requests for retries, encoded as bytes.

/// A copy of a request, for retries.
///
/// Cloning a `HeaderMap` increments a reference count for each value and allocates a table. Encoding the headers costs
/// less CPU time. Decoding them is rarely needed, because only few requests are retried.
pub(super) struct ReplayableRequest<'b> {
    /// The body. `None` for an empty body.
    body: Option<&'b ReplayBody>,
    method: Method,
    uri: Uri,
    version: Version,
    /// Each header is encoded as: length of the name (u32), twice the length of the value plus one if the value is
    /// sensitive (u32), name, value.
    encoded_headers: Vec<u8>,
}

/// Initial capacity in bytes per header, which is sufficient for most requests.
const HEADER_CAPACITY: usize = 48;

impl<'b> ReplayableRequest<'b> {
    /// Create a copy of a request.
    pub(super) fn new(request: &Request<RequestBody>, body: Option<&'b ReplayBody>) -> Self {
        let headers = request.headers();
        let mut encoded = Vec::with_capacity(headers.len() * HEADER_CAPACITY);
        for (name, value) in headers {
            let (name, value, secret) = (name.as_str().as_bytes(), value.as_bytes(), value.is_sensitive());
            let lengths = [name.len() as u32, (value.len() as u32) << 1 | u32::from(secret)];
            encoded.extend_from_slice(lengths.map(u32::to_be_bytes).as_flattened());
            encoded.extend_from_slice(name);
            encoded.extend_from_slice(value);
        }
        let method = request.method().clone();
        let uri = request.uri().clone();
        let version = request.version();
        ReplayableRequest { body, method, uri, version, encoded_headers: encoded }
    }

    /// Return the request that the copy describes.
    pub(super) fn into_request(self) -> Request<RequestBody> {
        let mut request = Request::new(self.body.map_or_else(RequestBody::empty, ReplayBody::body));
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
        let name = encoded.get_u32() as usize;
        let value = encoded.get_u32() as usize;
        let secret = value % 2 == 1;
        let name = encoded.split_to(name);
        let value = encoded.split_to(value / 2);
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
    use crate::clock::monotonic;

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
        let retry = ReplayableRequest::new(&request, None).into_request();
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
