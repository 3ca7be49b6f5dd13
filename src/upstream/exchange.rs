//! The course of a request: a place at a member, a connection, the exchange, and again where that can do no harm.

use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::task::Poll;

use http::{Request, Response};
use hyper::body::Incoming;
use tokio::time::{Instant, timeout_at};

use super::connecting::EndpointConnection;
use super::http2::{StreamOutcome, classify_error};
use super::patience::ResponseTimer;
use super::pool::SendError;
use super::repeat::ReplayableRequest;
use super::settings::UpstreamSettings;
use super::{AttemptLog, PickState, Protocol, RetryReason as Why, Upstream, UpstreamError};
use crate::http::body::Body;
use crate::http::bounds::BodyLimits;
use crate::http::headers::{is_grpc, is_safe};
use crate::http::response;
use crate::http::upload::{RequestBody, UploadProgress};

/// How a request may still be sent again.
struct RetryState {
    /// Once, where it was: on a fresh connection after one that was there before.
    can_reconnect: bool,
    /// On other members.
    retries_left: u32,
    is_safe: bool,
    has_body: bool,
    is_http2: bool,
}

/// Where it goes after a failure.
enum RetryTarget {
    /// To the same member, on a fresh connection.
    SameEndpoint(Request<RequestBody>),
    /// To another member: nothing of it was written.
    OtherEndpoint(Request<RequestBody>),
    /// To another member, if the budget has something left.
    OtherEndpointWithBudget(Request<RequestBody>),
}

impl Upstream {
    /// Sends a request and waits for the head of the response. Dropping the future cancels the request.
    ///
    /// A request of which nothing was written goes to other connections and members. After that only GET, HEAD and
    /// OPTIONS without a body are repeated: once when a reused connection dies before it answered (RFC 9110 §9.2.2),
    /// and on other members as often as `retries` and its budget allow.
    ///
    /// # Errors
    /// See [`UpstreamError`].
    pub async fn send(
        &self,
        mut request: Box<Request<RequestBody>>,
        bounds: BodyLimits,
        attempts: &mut AttemptLog,
    ) -> Result<Response<Body>, UpstreamError> {
        let UpstreamSettings { protocol, retries, .. } = *self.cluster.settings;
        let http2 = protocol == Protocol::Http2;
        let progress = request.body_mut().apply_limits(bounds);
        if http2 && is_grpc(request.headers()) {
            request.body_mut().allow_trailers();
        }
        let (safe, has_body) = (is_safe(request.method()), progress.is_some());
        let mut retry_state =
            RetryState { can_reconnect: true, retries_left: retries, is_safe: safe, has_body, is_http2: http2 };
        let mut pick_state = PickState { hash_key: self.cluster.hash_key(request.headers()), tried: Vec::new() };
        if let Some(retry_budget) = &self.cluster.retry_budget {
            retry_budget.deposit();
        }
        // Whoever waits comes first.
        let picked = if self.cluster.queue.is_empty() { self.pick(pick_state.hash_key, &[]) } else { None };
        let mut target = match picked {
            Some(target) => target,
            None => Box::pin(self.pick_queued(pick_state.hash_key)).await?,
        };
        let mut idle = target.0.take_idle();
        loop {
            let EndpointConnection { pool, permit, mut connection, is_reused: reused } = match idle.take() {
                Some(connection) => {
                    EndpointConnection { pool: target.0, permit: target.1, connection, is_reused: true }
                }
                None => {
                    let tried = pick_state.tried.len() + 1;
                    let connected = Box::pin(self.connect(target, &mut pick_state, retry_state.can_reconnect)).await;
                    pick_state.tried.last().into_iter().for_each(|endpoint| attempts.record_endpoint(endpoint));
                    attempts.record_retries(Why::Unwritten, pick_state.tried.len().saturating_sub(tried) as u64);
                    connected?
                }
            };
            attempts.record_endpoint(permit.endpoint());
            let copy = retry_state.needs_copy(reused).then(|| ReplayableRequest::from_request(&request));
            let result = {
                // In its place, and not moved into each future that waits for it.
                let response = pin!(connection.send(*request));
                let result = pin!(self.attempt(response, connection.timer(), progress.as_deref()));
                match bounds.deadline {
                    None => result.await,
                    Some(deadline) => timeout_at(deadline, result)
                        .await
                        .unwrap_or_else(|_| Err(self.deadline_error(progress.as_deref()))),
                }
            };
            let mut failure = match result {
                Ok(Ok(response)) => {
                    if let Some(fault) = response::framing_error(&response) {
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
                    connection.start_draining();
                    if let UpstreamError::ResponseTimeout { .. } = error {
                        self.cluster.report_failure(permit.endpoint(), &error);
                    }
                    return Err(error);
                }
            };
            let outcome = connection.classify_error(failure.error());
            let unsent = failure.take_message();
            // A connection that was closed while nobody used it says nothing about its server.
            let is_endpoint_failure = !reused && (unsent.is_some() || outcome == StreamOutcome::Unknown)
                || outcome == StreamOutcome::PeerError;
            let retry = retry_state.retry_target(unsent, copy, outcome, reused);
            let error = self.exchange_error(failure.into_error(), progress.as_deref());
            if is_endpoint_failure && !error.is_client_error() {
                self.cluster.report_failure(permit.endpoint(), &error);
            }
            pick_state.tried.push(permit.endpoint().clone());
            let (retry, other) = match retry {
                Some(RetryTarget::SameEndpoint(request)) => {
                    attempts.record_retries(Why::Reconnected, 1);
                    (request, (pool, permit))
                }
                Some(RetryTarget::OtherEndpoint(request)) => {
                    let target = self.pick_other(&pick_state).ok_or(error)?;
                    attempts.record_retries(Why::Unwritten, 1);
                    (request, target)
                }
                Some(RetryTarget::OtherEndpointWithBudget(request)) => {
                    let target = self.pick_other(&pick_state).filter(|_| self.cluster.withdraw_retry());
                    retry_state.retries_left -= 1;
                    let target = target.ok_or(error)?;
                    attempts.record_retries(Why::Retried, 1);
                    (request, target)
                }
                None => return Err(error),
            };
            (request, target, retry_state.can_reconnect) = (Box::new(retry), other, false);
        }
    }

    /// One attempt. The time to answer runs while nothing is sent any more: a slow upload is not a slow upstream.
    async fn attempt(
        &self,
        mut response: Pin<&mut impl Future<Output = Result<Response<Incoming>, SendError>>>,
        timer: &mut ResponseTimer,
        progress: Option<&UploadProgress>,
    ) -> Result<Result<Response<Incoming>, SendError>, UpstreamError> {
        let mut last_frames = progress.map(UploadProgress::frame_count);
        // An upload is looked at more often, for the time to be right from where it ends.
        let polls = if progress.is_some() { 10 } else { 1 };
        let mut silent_polls = 0;
        while silent_polls < polls {
            let deadline = Instant::now() + self.cluster.settings.response_timeout / polls;
            let result = poll_fn(|cx| match response.as_mut().poll(cx) {
                Poll::Ready(result) => Poll::Ready(Some(result)),
                Poll::Pending => timer.poll(deadline, cx).map(|()| None),
            });
            if let Some(result) = result.await {
                return Ok(result);
            }
            let now = progress.map(UploadProgress::frame_count);
            // The body sees to a client that keeps everybody waiting.
            let is_silent = now == last_frames && !progress.is_some_and(UploadProgress::is_waiting_for_client);
            silent_polls = if is_silent { silent_polls + 1 } else { 0 };
            last_frames = now;
        }
        Err(UpstreamError::ResponseTimeout { upstream: self.name().into() })
    }

    /// What ran out of time: the client, or the upstream.
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
        // The body stream failed before its end: that was the client.
        let unfinished = progress.is_some_and(|progress| !progress.is_done());
        if unfinished && (error.is_user() || classify_error(&error).0 == StreamOutcome::LocalReset) {
            return UpstreamError::ClientAborted(error.into());
        }
        UpstreamError::Reset { upstream: self.name().into(), source: error }
    }
}

impl RetryState {
    /// Whether a copy of the request may be of use.
    fn needs_copy(&self, reused: bool) -> bool {
        let may_repeat = !self.has_body && (self.is_safe || self.is_http2);
        may_repeat && (self.retries_left > 0 || self.can_reconnect && (reused || self.is_http2))
    }

    /// What becomes of a request that was not answered.
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
