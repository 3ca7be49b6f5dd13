//! Upstreams: sends a request on and hands its answer back.

mod pool;

use std::pin::pin;
use std::sync::Arc;

use http::{Request, Response, StatusCode};
use hyper::body::Incoming;
use tokio::time::{Duration, timeout};

use crate::http::body::{Body, Progress, RequestBody};
use crate::http::bounds::Bounds;
use crate::http::headers::is_safe;
use pool::{Connection, Failure, Pool};

/// Where an upstream listens and how long to wait for it.
#[derive(Debug, Clone)]
pub struct UpstreamSettings {
    /// The name that the configuration gives it.
    pub name: Box<str>,
    /// Host and port as the configuration writes them.
    pub authority: Box<str>,
    /// Host name or address.
    pub host: Box<str>,
    /// Port.
    pub port: u16,
    /// Bound of connecting, name resolution included.
    pub connect_timeout: Duration,
    /// Bound of waiting for the response head once the request is sent.
    pub response_timeout: Duration,
    /// Idle connections older than this are not used again.
    pub pool_idle_timeout: Duration,
}

/// Why an upstream gave no answer.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum UpstreamError {
    #[error("connecting to upstream `{upstream}` failed: {source}")]
    Connect { upstream: Box<str>, source: std::io::Error },
    #[error("connecting to upstream `{upstream}` took too long")]
    ConnectTimeout { upstream: Box<str> },
    #[error("upstream `{upstream}` broke off: {source}")]
    Broken { upstream: Box<str>, source: hyper::Error },
    #[error("upstream `{upstream}` switched protocols without being asked")]
    Switched { upstream: Box<str> },
    #[error("upstream `{upstream}` did not answer in time")]
    ResponseTimeout { upstream: Box<str> },
    #[error("the client stopped sending the request body")]
    ClientStalled,
    #[error("the request body is longer than the route allows")]
    BodyTooLarge,
    #[error("the client broke off the request body: {0}")]
    ClientBroken(hyper::Error),
}

impl UpstreamError {
    /// Whether the upstream has nothing to do with it.
    pub fn is_clients_fault(&self) -> bool {
        matches!(self, UpstreamError::ClientStalled | UpstreamError::BodyTooLarge | UpstreamError::ClientBroken(_))
    }
}

/// One worker's connections to an upstream.
#[derive(Debug)]
pub struct Upstream {
    settings: UpstreamSettings,
    pool: Arc<Pool>,
}

impl Upstream {
    /// Without connections yet.
    pub fn new(settings: UpstreamSettings) -> Self {
        let pool = Arc::new(Pool::new(settings.pool_idle_timeout));
        Upstream { settings, pool }
    }

    /// Host and port, for requests that name no host.
    pub fn authority(&self) -> &str {
        &self.settings.authority
    }

    /// Sends a request and waits for the head of the response. Dropping the future cancels the request.
    ///
    /// A request of which nothing was written moves to a fresh connection. After that only GET, HEAD and OPTIONS
    /// without a body do, once, when a reused connection dies before it answered (RFC 9110 §9.2.2).
    ///
    /// # Errors
    /// See [`UpstreamError`].
    pub async fn send(&self, request: Request<Incoming>, bounds: Bounds) -> Result<Response<Body>, UpstreamError> {
        let (parts, body) = request.into_parts();
        let (body, progress) = RequestBody::new(body, bounds);
        let repeatable = progress.is_none() && is_safe(&parts.method);
        let mut request = Request::from_parts(parts, body);
        let mut pooled = self.pool.take();
        loop {
            let reused = pooled.is_some();
            let mut connection = match pooled.take() {
                Some(connection) => connection,
                None => self.connect().await?,
            };
            let copy = (reused && repeatable).then(|| copy_without_body(&request));
            // Something that cannot be read is an answer, too.
            let mut failure = match self.exchange(&mut connection, request, progress.as_deref()).await? {
                // No upgrade was asked for, so none can be.
                Ok(response) if response.status() == StatusCode::SWITCHING_PROTOCOLS => {
                    return Err(UpstreamError::Switched { upstream: self.settings.name.clone() });
                }
                Ok(response) => {
                    if let Some(progress) = &progress {
                        progress.answered();
                    }
                    let lease = Box::new(connection.lease(&self.pool));
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

    async fn connect(&self) -> Result<Connection, UpstreamError> {
        let UpstreamSettings { name, host, port, connect_timeout, .. } = &self.settings;
        match timeout(*connect_timeout, pool::connect(host, *port)).await {
            Ok(Ok(connection)) => Ok(connection),
            Ok(Err(source)) => Err(UpstreamError::Connect { upstream: name.clone(), source }),
            Err(_) => Err(UpstreamError::ConnectTimeout { upstream: name.clone() }),
        }
    }

    /// One attempt. The time to answer runs while nothing is sent any more: a slow upload is not a slow upstream.
    async fn exchange(
        &self,
        connection: &mut Connection,
        request: Request<RequestBody>,
        progress: Option<&Progress>,
    ) -> Result<Result<Response<Incoming>, Failure>, UpstreamError> {
        let mut response = pin!(connection.send(request));
        let mut seen = progress.map(Progress::frames);
        loop {
            if let Ok(result) = timeout(self.settings.response_timeout, &mut response).await {
                return Ok(result);
            }
            let now = progress.map(Progress::frames);
            // The body sees to a client that keeps everybody waiting.
            if now == seen && !progress.is_some_and(Progress::waits_for_client) {
                return Err(UpstreamError::ResponseTimeout { upstream: self.settings.name.clone() });
            }
            seen = now;
        }
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
        if error.is_user() && unfinished {
            return UpstreamError::ClientBroken(error);
        }
        UpstreamError::Broken { upstream: self.settings.name.clone(), source: error }
    }
}

fn copy_without_body(request: &Request<RequestBody>) -> Request<RequestBody> {
    let mut copy = Request::new(RequestBody::empty());
    *copy.method_mut() = request.method().clone();
    *copy.uri_mut() = request.uri().clone();
    *copy.headers_mut() = request.headers().clone();
    copy
}
