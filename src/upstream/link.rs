//! One worker's connections to one member, whatever is spoken on them.

use std::io;
use std::sync::Arc;

use futures_util::future::Either;
use http::{Request, Response, StatusCode};
use hyper::body::Incoming;

use super::Protocol;
use super::http2::{self, Fate, Shared};
use super::member::Member;
use super::patience::Patience;
use super::pool::{self, Failure, Pool};
use super::queue::Place;
use super::settings::UpstreamSettings;
use crate::http::body::{Body, OnComplete};
use crate::http::bounds::BodyLimits;
use crate::http::response::declares_forbidden_body;
use crate::http::upload::RequestBody;

/// The way to one member.
#[derive(Debug)]
pub(super) struct Link {
    member: Arc<Member>,
    connections: Connections,
}

#[derive(Debug, Clone)]
enum Connections {
    Http1(Arc<Pool>),
    Http2(Arc<Shared>),
}

/// What a request is sent on.
#[derive(Debug)]
pub(super) enum Connection {
    /// By one at a time.
    Http1(pool::Connection),
    /// By many.
    Http2(http2::Connection, Patience),
}

/// Brings a connection back into its pool when the response body has reached its end, and leaves its place at the server.
struct Lease {
    connection: pool::Connection,
    link: Arc<Link>,
    reusable: bool,
    _place: Place,
}

impl Link {
    /// Without connections yet.
    pub(super) fn new(settings: &UpstreamSettings, member: Arc<Member>) -> Self {
        let connections = match settings.protocol {
            Protocol::Http1 => Connections::Http1(Arc::new(Pool::new(settings.pool_idle_timeout))),
            Protocol::Http2 => Connections::Http2(Arc::new(Shared::new(settings.pool_idle_timeout))),
        };
        Link { member, connections }
    }

    /// Whether this is its server.
    pub(super) fn leads_to(&self, member: &Arc<Member>) -> bool {
        self.member.is(member)
    }

    /// The same connections to its server as another configuration has it, if that speaks with it in the same way.
    pub(super) fn to(&self, member: &Arc<Member>) -> Option<Self> {
        let name = |member: &Member| member.server.tls.as_ref().map(|tls| tls.name.clone());
        let fits = self.member.is(member) && name(&self.member) == name(member);
        fits.then(|| Link { member: member.clone(), connections: self.connections.clone() })
    }

    /// A connection that is there.
    pub(super) fn idle(&self) -> Option<Connection> {
        match &self.connections {
            Connections::Http1(pool) => Some(Connection::Http1(pool.take()?)),
            Connections::Http2(shared) => Some(Connection::Http2(shared.idle()?, Patience::default())),
        }
    }

    /// A new one; or, where requests share one, that of somebody who was faster, which is `true`.
    ///
    /// # Errors
    /// Those of the system.
    pub(super) async fn connect(&self) -> io::Result<(Connection, bool)> {
        match &self.connections {
            Connections::Http1(_) => Ok((Connection::Http1(pool::connect(&self.member).await?), false)),
            Connections::Http2(shared) => {
                let (connection, reused) = shared.take(&self.member).await?;
                Ok((Connection::Http2(connection, Patience::default()), reused))
            }
        }
    }
}

impl Connection {
    /// Sends a request; the future does not borrow the connection.
    pub(super) fn send(
        &mut self,
        request: Request<RequestBody>,
    ) -> impl Future<Output = Result<Response<Incoming>, Failure>> + Send + use<> {
        match self {
            Connection::Http1(connection) => Either::Left(connection.send(request)),
            // On the heap: inside this future it would take room for every request.
            Connection::Http2(connection, _) => Either::Right(Box::pin(connection.send(request))),
        }
    }

    /// What a request on it is waited for by.
    pub(super) fn patience(&mut self) -> &mut Patience {
        match self {
            Connection::Http1(connection) => &mut connection.patience,
            Connection::Http2(_, patience) => patience,
        }
    }

    /// Hands a response on, with the connection of a link and the place that it takes.
    pub(super) fn answer(
        self,
        response: Response<Incoming>,
        bounds: BodyLimits,
        link: Arc<Link>,
        place: Place,
    ) -> Response<Body> {
        // The connection is not ours any more: whoever asked for it takes it over from the extensions.
        if response.status() == StatusCode::SWITCHING_PROTOCOLS {
            return response.map(|_| Body::full("").on_data_end(Box::new(place)));
        }
        match self {
            Connection::Http1(connection) => {
                let reusable = !declares_forbidden_body(response.status(), response.headers());
                let reads = connection.reads.clone();
                let lease = Box::new(Lease { connection, link, reusable, _place: place });
                response.map(|body| Body::from_upstream(body, bounds, lease).with_read_limit(reads))
            }
            Connection::Http2(..) => response.map(|body| Body::from_upstream(body, bounds, Box::new(place))),
        }
    }

    /// What the end of an exchange says of its request. A connection that is no good any more is not used again.
    pub(super) fn fate(&self, error: &hyper::Error) -> Fate {
        match self {
            // Something that cannot be read is an answer, too.
            Connection::Http1(..) if error.is_parse() => Fate::Answered,
            Connection::Http1(..) => Fate::Unknown,
            Connection::Http2(connection, _) => {
                let (fate, lives) = http2::fate(error);
                if !lives {
                    connection.retire();
                }
                fate
            }
        }
    }

    /// Slow or dead: whoever comes next shall not find out.
    pub(super) fn retire(&self) {
        match self {
            // It is dropped, and closed by that.
            Connection::Http1(..) => {}
            Connection::Http2(connection, _) => connection.retire(),
        }
    }
}

impl OnComplete for Lease {
    fn on_complete(self: Box<Self>, _sent: u64, complete: bool) {
        if let (true, Connections::Http1(pool)) = (complete && self.reusable, &self.link.connections) {
            pool.put(self.connection);
        }
    }
}
