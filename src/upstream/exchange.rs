//! The course of a request: a place at a member, a connection, the exchange, and again where that can do no harm.

use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::task::Poll;

use http::{Request, Response};
use hyper::body::Incoming;
use tokio::time::{Instant, timeout_at};

use super::connecting::Connected;
use super::http2::{Fate, fate};
use super::patience::Patience;
use super::pool::Failure;
use super::repeat::Repeat;
use super::settings::UpstreamSettings;
use super::{RetryReason as Why, Choice, Protocol, Trail, Upstream, UpstreamError};
use crate::http::body::Body;
use crate::http::bounds::BodyLimits;
use crate::http::headers::{is_grpc, is_safe};
use crate::http::response;
use crate::http::upload::{UploadProgress, RequestBody};

/// How a request may still be sent again.
struct Course {
    /// Once, where it was: on a fresh connection after one that was there before.
    fresh: bool,
    /// On other members.
    retries: u32,
    safe: bool,
    has_body: bool,
    http2: bool,
}

/// Where it goes after a failure.
enum RetryTarget {
    /// To the same member, on a fresh connection.
    There(Request<RequestBody>),
    /// To another member: nothing of it was written.
    Elsewhere(Request<RequestBody>),
    /// To another member, if the budget has something left.
    Retry(Request<RequestBody>),
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
        trail: &mut Trail,
    ) -> Result<Response<Body>, UpstreamError> {
        let UpstreamSettings { protocol, retries, .. } = *self.fleet.settings;
        let http2 = protocol == Protocol::Http2;
        let progress = request.body_mut().apply_limits(bounds);
        if http2 && is_grpc(request.headers()) {
            request.body_mut().allow_trailers();
        }
        let (safe, has_body) = (is_safe(request.method()), progress.is_some());
        let mut course = Course { fresh: true, retries, safe, has_body, http2 };
        let mut choice = Choice { key: self.fleet.key(request.headers()), tried: Vec::new() };
        if let Some(budget) = &self.fleet.budget {
            budget.earn();
        }
        // Whoever waits comes first.
        let found = if self.fleet.queue.is_empty() { self.place(choice.key, &[]) } else { None };
        let mut way = match found {
            Some(way) => way,
            None => Box::pin(self.wait(choice.key)).await?,
        };
        let mut idle = way.0.idle();
        loop {
            let Connected { link, place, mut connection, reused } = match idle.take() {
                Some(connection) => Connected { link: way.0, place: way.1, connection, reused: true },
                None => {
                    let tried = choice.tried.len() + 1;
                    let connected = Box::pin(self.connect(way, &mut choice, course.fresh)).await;
                    choice.tried.last().into_iter().for_each(|member| trail.at(member));
                    trail.count(Why::Unwritten, choice.tried.len().saturating_sub(tried) as u64);
                    connected?
                }
            };
            trail.at(place.member());
            let copy = course.needs_copy(reused).then(|| Repeat::of(&request));
            let answer = {
                // In its place, and not moved into each future that waits for it.
                let response = pin!(connection.send(*request));
                let answer = pin!(self.exchange(response, connection.patience(), progress.as_deref()));
                match bounds.deadline {
                    None => answer.await,
                    Some(deadline) => {
                        timeout_at(deadline, answer).await.unwrap_or_else(|_| Err(self.overdue(progress.as_deref())))
                    }
                }
            };
            let mut failure = match answer {
                Ok(Ok(response)) => {
                    if let Some(fault) = response::framing_error(&response) {
                        let error = UpstreamError::Malformed { upstream: self.name().into(), fault };
                        self.fleet.failed(place.member(), &error);
                        return Err(error);
                    }
                    if let Some(progress) = &progress {
                        progress.mark_response_started();
                    }
                    self.fleet.answered(place.member(), response.status());
                    return Ok(connection.answer(response, bounds, link, place));
                }
                Ok(Err(failure)) => failure,
                Err(error) => {
                    connection.retire();
                    if let UpstreamError::ResponseTimeout { .. } = error {
                        self.fleet.failed(place.member(), &error);
                    }
                    return Err(error);
                }
            };
            let fate = connection.fate(failure.error());
            let unsent = failure.take_message();
            // A connection that was closed while nobody used it says nothing about its server.
            let blamed = !reused && (unsent.is_some() || fate == Fate::Unknown) || fate == Fate::Answered;
            let again = course.again(unsent, copy, fate, reused);
            let error = self.broken(failure.into_error(), progress.as_deref());
            if blamed && !error.is_clients_fault() {
                self.fleet.failed(place.member(), &error);
            }
            choice.tried.push(place.member().clone());
            let (again, other) = match again {
                Some(RetryTarget::There(request)) => {
                    trail.count(Why::Reconnected, 1);
                    (request, (link, place))
                }
                Some(RetryTarget::Elsewhere(request)) => {
                    let way = self.another(&choice).ok_or(error)?;
                    trail.count(Why::Unwritten, 1);
                    (request, way)
                }
                Some(RetryTarget::Retry(request)) => {
                    let way = self.another(&choice).filter(|_| self.fleet.may_retry());
                    course.retries -= 1;
                    let way = way.ok_or(error)?;
                    trail.count(Why::Retried, 1);
                    (request, way)
                }
                None => return Err(error),
            };
            (request, way, course.fresh) = (Box::new(again), other, false);
        }
    }

    /// One attempt. The time to answer runs while nothing is sent any more: a slow upload is not a slow upstream.
    async fn exchange(
        &self,
        mut response: Pin<&mut impl Future<Output = Result<Response<Incoming>, Failure>>>,
        patience: &mut Patience,
        progress: Option<&UploadProgress>,
    ) -> Result<Result<Response<Incoming>, Failure>, UpstreamError> {
        let mut seen = progress.map(UploadProgress::frame_count);
        // An upload is looked at more often, for the time to be right from where it ends.
        let looks = if progress.is_some() { 10 } else { 1 };
        let mut silent = 0;
        while silent < looks {
            let until = Instant::now() + self.fleet.settings.response_timeout / looks;
            let answer = poll_fn(|cx| match response.as_mut().poll(cx) {
                Poll::Ready(answer) => Poll::Ready(Some(answer)),
                Poll::Pending => patience.poll(until, cx).map(|()| None),
            });
            if let Some(answer) = answer.await {
                return Ok(answer);
            }
            let now = progress.map(UploadProgress::frame_count);
            // The body sees to a client that keeps everybody waiting.
            let is_silent = now == seen && !progress.is_some_and(UploadProgress::is_waiting_for_client);
            silent = if is_silent { silent + 1 } else { 0 };
            seen = now;
        }
        Err(UpstreamError::ResponseTimeout { upstream: self.name().into() })
    }

    /// What ran out of time: the client, or the upstream.
    fn overdue(&self, progress: Option<&UploadProgress>) -> UpstreamError {
        if progress.is_some_and(UploadProgress::is_delayed_by_client) {
            return UpstreamError::ClientStalled;
        }
        UpstreamError::Overdue { upstream: self.name().into() }
    }

    fn broken(&self, error: hyper::Error, progress: Option<&UploadProgress>) -> UpstreamError {
        if progress.is_some_and(UploadProgress::is_too_large) {
            return UpstreamError::BodyTooLarge;
        }
        if progress.is_some_and(UploadProgress::is_stalled) {
            return UpstreamError::ClientStalled;
        }
        // The body stream failed before its end: that was the client.
        let unfinished = progress.is_some_and(|progress| !progress.is_done());
        if unfinished && (error.is_user() || fate(&error).0 == Fate::Ours) {
            return UpstreamError::ClientBroken(error.into());
        }
        UpstreamError::Broken { upstream: self.name().into(), source: error }
    }
}

impl Course {
    /// Whether a copy of the request may be of use.
    fn needs_copy(&self, reused: bool) -> bool {
        let may_repeat = !self.has_body && (self.safe || self.http2);
        may_repeat && (self.retries > 0 || self.fresh && (reused || self.http2))
    }

    /// What becomes of a request that was not answered.
    fn again(
        &self,
        unsent: Option<Request<RequestBody>>,
        copy: Option<Repeat>,
        fate: Fate,
        reused: bool,
    ) -> Option<RetryTarget> {
        let unwritten = unsent.is_some();
        let harmless = match fate {
            Fate::Unprocessed => true,
            Fate::Unknown => self.safe,
            Fate::Answered | Fate::Ours => false,
        };
        let request = unsent.or_else(|| copy.filter(|_| harmless).map(Repeat::request))?;
        if self.fresh && (reused || self.http2 && (unwritten || fate == Fate::Unprocessed)) {
            Some(RetryTarget::There(request))
        } else if unwritten {
            Some(RetryTarget::Elsewhere(request))
        } else {
            (self.retries > 0).then_some(RetryTarget::Retry(request))
        }
    }
}
