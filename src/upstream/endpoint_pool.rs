//! One worker's connections to one member, whatever is spoken on them.

use std::io;
use std::sync::Arc;

use futures_util::future::Either;
use http::{Request, Response, StatusCode};
use hyper::body::Incoming;

use crate::http::body::{Body, OnComplete, declares_forbidden_body};
use crate::http::body_limits::BodyLimits;
use crate::http::request_body::RequestBody;
use crate::upstream::endpoint::Endpoint;
use crate::upstream::http1::{Http1Pool, SendError};
use crate::upstream::http2::{SharedConnection, StreamOutcome};
use crate::upstream::lazy_timer::ResponseTimer;
use crate::upstream::pending_queue::RequestPermit;
use crate::upstream::{Protocol, UpstreamSettings, http1, http2};

/// The way to one member.
#[derive(Debug)]
pub(super) struct EndpointPool {
    endpoint: Arc<Endpoint>,
    pool: ProtocolPool,
}

#[derive(Debug, Clone)]
enum ProtocolPool {
    Http1(Arc<Http1Pool>),
    Http2(Arc<SharedConnection>),
}

/// What a request is sent on.
#[derive(Debug)]
pub(super) enum Connection {
    /// By one at a time.
    Http1(http1::Http1Connection),
    /// By many.
    Http2(http2::Http2Connection, ResponseTimer),
}

/// Brings a connection back into its pool when the response body has reached its end, and leaves its place at the server.
struct PooledConnection {
    connection: http1::Http1Connection,
    pool: Arc<EndpointPool>,
    is_reusable: bool,
    _permit: RequestPermit,
}

impl EndpointPool {
    /// Without connections yet.
    pub(super) fn new(settings: &UpstreamSettings, endpoint: Arc<Endpoint>) -> Self {
        let connections = match settings.protocol {
            Protocol::Http1 => ProtocolPool::Http1(Arc::new(Http1Pool::new(settings.pool_idle_timeout))),
            Protocol::Http2 => ProtocolPool::Http2(Arc::new(SharedConnection::new(settings.pool_idle_timeout))),
        };
        EndpointPool { endpoint, pool: connections }
    }

    /// Whether this is its server.
    pub(super) fn is_for(&self, endpoint: &Arc<Endpoint>) -> bool {
        self.endpoint.is_same_as(endpoint)
    }

    /// The same connections to its server as another configuration has it, if that speaks with it in the same way.
    pub(super) fn reuse_for(&self, endpoint: &Arc<Endpoint>) -> Option<Self> {
        let name = |endpoint: &Endpoint| endpoint.server.tls.as_ref().map(|tls| tls.server_name.clone());
        let fits = self.endpoint.is_same_as(endpoint) && name(&self.endpoint) == name(endpoint);
        fits.then(|| EndpointPool { endpoint: endpoint.clone(), pool: self.pool.clone() })
    }

    /// A connection that is there.
    pub(super) fn take_idle(&self) -> Option<Connection> {
        match &self.pool {
            ProtocolPool::Http1(pool) => Some(Connection::Http1(pool.take_idle()?)),
            ProtocolPool::Http2(shared) => Some(Connection::Http2(shared.try_get()?, ResponseTimer::default())),
        }
    }

    /// A new one; or, where requests share one, that of somebody who was faster, which is `true`.
    ///
    /// # Errors
    /// Those of the system.
    pub(super) async fn connect(&self) -> io::Result<(Connection, bool)> {
        match &self.pool {
            ProtocolPool::Http1(_) => Ok((Connection::Http1(http1::connect(&self.endpoint).await?), false)),
            ProtocolPool::Http2(shared) => {
                let (connection, reused) = shared.get_or_connect(&self.endpoint).await?;
                Ok((Connection::Http2(connection, ResponseTimer::default()), reused))
            }
        }
    }
}

impl Connection {
    /// Sends a request; the future does not borrow the connection.
    pub(super) fn send(
        &mut self,
        request: Request<RequestBody>,
    ) -> impl Future<Output = Result<Response<Incoming>, SendError>> + Send + use<> {
        match self {
            Connection::Http1(connection) => Either::Left(connection.send(request)),
            // On the heap: inside this future it would take room for every request.
            Connection::Http2(connection, _) => Either::Right(Box::pin(connection.send(request))),
        }
    }

    /// What a request on it is waited for by.
    pub(super) fn timer(&mut self) -> &mut ResponseTimer {
        match self {
            Connection::Http1(connection) => &mut connection.timer,
            Connection::Http2(_, timer) => timer,
        }
    }

    /// Hands a response on, with the connection of a link and the place that it takes.
    pub(super) fn into_response(
        self,
        response: Response<Incoming>,
        bounds: BodyLimits,
        pool: Arc<EndpointPool>,
        permit: RequestPermit,
    ) -> Response<Body> {
        // The connection is not ours any more: whoever asked for it takes it over from the extensions.
        if response.status() == StatusCode::SWITCHING_PROTOCOLS {
            return response.map(|_| Body::full("").on_data_end(Box::new(permit)));
        }
        match self {
            Connection::Http1(connection) => {
                let reusable = !declares_forbidden_body(response.status(), response.headers());
                let reads = connection.reads.clone();
                let lease = Box::new(PooledConnection { connection, pool, is_reusable: reusable, _permit: permit });
                response.map(|body| Body::from_upstream(body, bounds, lease).with_read_limit(reads))
            }
            Connection::Http2(..) => response.map(|body| Body::from_upstream(body, bounds, Box::new(permit))),
        }
    }

    /// What the end of an exchange says of its request. A connection that is no good any more is not used again.
    pub(super) fn classify_error(&self, error: &hyper::Error) -> StreamOutcome {
        match self {
            // Something that cannot be read is an answer, too.
            Connection::Http1(..) if error.is_parse() => StreamOutcome::PeerError,
            Connection::Http1(..) => StreamOutcome::Unknown,
            Connection::Http2(connection, _) => {
                let (outcome, is_alive) = http2::classify_error(error);
                if !is_alive {
                    connection.start_draining();
                }
                outcome
            }
        }
    }

    /// Slow or dead: whoever comes next shall not find out.
    pub(super) fn start_draining(&self) {
        match self {
            // It is dropped, and closed by that.
            Connection::Http1(..) => {}
            Connection::Http2(connection, _) => connection.start_draining(),
        }
    }
}

impl OnComplete for PooledConnection {
    fn on_complete(self: Box<Self>, _sent: u64, complete: bool) {
        if let (true, ProtocolPool::Http1(pool)) = (complete && self.is_reusable, &self.pool.pool) {
            pool.put(self.connection);
        }
    }
}
