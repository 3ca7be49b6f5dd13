//! One worker's connections to one server: an exchange, repeated where nothing was sent or nothing can have happened.

use std::io;
use std::pin::pin;
use std::sync::Arc;

use http::{Request, Response, StatusCode};
use hyper::body::Incoming;
use tokio::time::{Instant, timeout, timeout_at};

use super::fleet::{Member, UpstreamSettings};
use super::http2::{Fate, Shared, fate};
use super::pool::{self, Connection, Failure, Pool};
use super::{Protocol, UpstreamError};
use crate::http::body::Body;
use crate::http::bounds::Bounds;
use crate::http::headers::{is_grpc, is_safe};
use crate::http::upload::{Progress, RequestBody};

/// The way to one server.
#[derive(Debug)]
pub(super) struct Link {
    settings: Arc<UpstreamSettings>,
    member: Arc<Member>,
    connections: Connections,
}

#[derive(Debug)]
enum Connections {
    Http1(Arc<Pool>),
    Http2(Shared),
}

impl Link {
    /// Without connections yet.
    pub(super) fn new(settings: Arc<UpstreamSettings>, member: Arc<Member>) -> Self {
        let connections = match settings.protocol {
            Protocol::Http1 => Connections::Http1(Arc::new(Pool::new(settings.pool_idle_timeout))),
            Protocol::Http2 => Connections::Http2(Shared::new(settings.pool_idle_timeout)),
        };
        Link { settings, member, connections }
    }

    /// Whether this is its server.
    pub(super) fn leads_to(&self, member: &Arc<Member>) -> bool {
        Arc::ptr_eq(&self.member, member)
    }

    /// Sends a request and waits for the head of the response. Dropping the future cancels the request.
    ///
    /// A request of which nothing was written moves to a fresh connection. After that only GET, HEAD and OPTIONS
    /// without a body do, once, when a reused connection dies before it answered (RFC 9110 §9.2.2).
    ///
    /// # Errors
    /// See [`UpstreamError`].
    pub(super) async fn send(
        &self,
        request: Request<Incoming>,
        bounds: Bounds,
    ) -> Result<Response<Body>, UpstreamError> {
        let pool = match &self.connections {
            Connections::Http1(pool) => pool,
            // On the heap: inside this future it would take room for every request.
            Connections::Http2(shared) => return Box::pin(self.send_shared(shared, request, bounds)).await,
        };
        let (parts, body) = request.into_parts();
        let (body, progress) = RequestBody::new(body, bounds);
        let repeatable = progress.is_none() && is_safe(&parts.method);
        let mut request = Request::from_parts(parts, body);
        let mut pooled = pool.take();
        loop {
            let reused = pooled.is_some();
            let mut connection = match pooled.take() {
                Some(connection) => connection,
                None => self.connect().await?,
            };
            let copy = (reused && repeatable).then(|| copy_without_body(&request));
            // Something that cannot be read is an answer, too.
            let mut failure = match self.exchange(connection.send(request), progress.as_deref()).await? {
                // The connection is not ours any more: whoever asked for it takes it over from the extensions.
                Ok(response) if response.status() == StatusCode::SWITCHING_PROTOCOLS => {
                    return Ok(response.map(|_| Body::full("")));
                }
                Ok(response) => {
                    if let Some(progress) = &progress {
                        progress.answered();
                    }
                    let lease = Box::new(connection.lease(pool));
                    return Ok(response.map(|body| Body::upstream(body, bounds, lease)));
                }
                Err(failure) => failure,
            };
            request = match failure.take_message().filter(|_| reused).or(copy.filter(|_| !failure.error().is_parse())) {
                Some(request) => request,
                None => return Err(self.broken(failure.into_error(), progress.as_deref())),
            };
        }
    }

    /// On the connection of all. What the server says it has not processed is sent again, too, if it has no body.
    async fn send_shared(
        &self,
        shared: &Shared,
        request: Request<Incoming>,
        bounds: Bounds,
    ) -> Result<Response<Body>, UpstreamError> {
        let (parts, body) = request.into_parts();
        let (mut body, progress) = RequestBody::new(body, bounds);
        if is_grpc(&parts.headers) {
            body = body.with_trailers();
        }
        let safe = is_safe(&parts.method);
        let mut request = Request::from_parts(parts, body);
        let mut first = true;
        loop {
            let (mut connection, reused) = self.within_time(shared.take(&self.member)).await?;
            let copy = (first && progress.is_none()).then(|| copy_without_body(&request));
            let answer = self.exchange(connection.send(request), progress.as_deref());
            let mut failure = match self.in_time(bounds.deadline, answer).await {
                Ok(Ok(response)) => {
                    if let Some(progress) = &progress {
                        progress.answered();
                    }
                    return Ok(response.map(|body| Body::shared(body, bounds)));
                }
                Ok(Err(failure)) => failure,
                Err(error) => {
                    // Slow or dead: whoever comes next shall not find out.
                    connection.retire();
                    return Err(error);
                }
            };
            let (fate, lives) = fate(failure.error());
            if !lives {
                connection.retire();
            }
            let again = fate == Fate::Unprocessed || (fate == Fate::Unknown && reused && safe);
            request = match failure.take_message().filter(|_| first).or(copy.filter(|_| again)) {
                Some(request) => request,
                None => return Err(self.broken(failure.into_error(), progress.as_deref())),
            };
            first = false;
        }
    }

    async fn connect(&self) -> Result<Connection, UpstreamError> {
        self.within_time(pool::connect(&self.member)).await
    }

    async fn within_time<T>(&self, connecting: impl Future<Output = io::Result<T>>) -> Result<T, UpstreamError> {
        let UpstreamSettings { name, connect_timeout, .. } = &*self.settings;
        match timeout(*connect_timeout, connecting).await {
            Ok(Ok(connection)) => Ok(connection),
            Ok(Err(source)) => Err(UpstreamError::Connect { upstream: name.clone(), source }),
            Err(_) => Err(UpstreamError::ConnectTimeout { upstream: name.clone() }),
        }
    }

    /// One attempt. The time to answer runs while nothing is sent any more: a slow upload is not a slow upstream.
    async fn exchange(
        &self,
        response: impl Future<Output = Result<Response<Incoming>, Failure>>,
        progress: Option<&Progress>,
    ) -> Result<Result<Response<Incoming>, Failure>, UpstreamError> {
        let mut response = pin!(response);
        let mut seen = progress.map(Progress::frames);
        // An upload is looked at more often, for the time to be right from where it ends.
        let looks = if progress.is_some() { 10 } else { 1 };
        let mut silent = 0;
        while silent < looks {
            if let Ok(result) = timeout(self.settings.response_timeout / looks, &mut response).await {
                return Ok(result);
            }
            let now = progress.map(Progress::frames);
            // The body sees to a client that keeps everybody waiting.
            let is_silent = now == seen && !progress.is_some_and(Progress::waits_for_client);
            silent = if is_silent { silent + 1 } else { 0 };
            seen = now;
        }
        Err(UpstreamError::ResponseTimeout { upstream: self.settings.name.clone() })
    }

    async fn in_time<T>(
        &self,
        deadline: Option<Instant>,
        work: impl Future<Output = Result<T, UpstreamError>>,
    ) -> Result<T, UpstreamError> {
        let Some(deadline) = deadline else { return work.await };
        let overdue = |_| Err(UpstreamError::Overdue { upstream: self.settings.name.clone() });
        timeout_at(deadline, work).await.unwrap_or_else(overdue)
    }

    fn broken(&self, error: hyper::Error, progress: Option<&Progress>) -> UpstreamError {
        if progress.is_some_and(Progress::is_too_large) {
            return UpstreamError::BodyTooLarge;
        }
        if progress.is_some_and(Progress::is_stalled) {
            return UpstreamError::ClientStalled;
        }
        // The body stream failed before its end: that was the client.
        let unfinished = progress.is_some_and(|progress| !progress.is_done());
        if unfinished && (error.is_user() || fate(&error).0 == Fate::Ours) {
            return UpstreamError::ClientBroken(error);
        }
        UpstreamError::Broken { upstream: self.settings.name.clone(), source: error }
    }
}

fn copy_without_body(request: &Request<RequestBody>) -> Request<RequestBody> {
    let mut copy = Request::new(RequestBody::empty());
    *copy.method_mut() = request.method().clone();
    *copy.uri_mut() = request.uri().clone();
    *copy.version_mut() = request.version();
    *copy.headers_mut() = request.headers().clone();
    copy
}
