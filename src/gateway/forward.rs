//! Sends an admitted request on, and hands the answer back.

use std::pin::pin;

use http::header::{HOST, TRANSFER_ENCODING};
use http::uri::{self, PathAndQuery, Uri};
use http::{Request, Response, StatusCode, Version};
use http_body::Body as _;
use hyper::upgrade::OnUpgrade;
use tokio::time::{Duration, Instant, timeout_at};

use super::Peer;
use super::request_id::RequestId;
use super::tell::{Told, tell};
use crate::http::body::Body;
use crate::http::bounds::Bounds;
use crate::http::headers::{self, Guarded, is_grpc};
use crate::http::pace::Demand;
use crate::http::tunnel::Tunnel;
use crate::http::upgrade::{self, Offer};
use crate::http::upload::RequestBody;
use crate::observe::trace::Trace;
use crate::runtime::{Route, Runtime};
use crate::upstream::{Protocol, Trail, Upstream, UpstreamError};

/// What a request takes along.
pub(super) struct Onward<'a> {
    pub(super) peer: &'a Peer,
    /// What tells it from all others.
    pub(super) id: &'a RequestId,
    /// What is asked for, where that is not what came.
    pub(super) target: Option<PathAndQuery>,
    /// When all of it is to be over.
    pub(super) deadline: Option<Instant>,
    /// What the upstream's own spans belong to, if that is recorded.
    pub(super) trace: Option<Trace>,
    /// Notes where it has been.
    pub(super) trail: &'a mut Trail,
}

/// Sends a request to an upstream and hands its answer back.
pub(super) async fn forward(
    runtime: &Runtime,
    route: &Route,
    upstream: &Upstream,
    mut request: Box<Request<RequestBody>>,
    onward: Onward<'_>,
) -> Result<Response<Body>, UpstreamError> {
    let Onward { peer, id, target, deadline, trace, trail } = onward;
    let http_1_0 = request.version() == Version::HTTP_10;
    let told = Told {
        origin: &peer.origin,
        id: id.value(),
        trace,
        authority: upstream.authority(),
        length: request.body().size_hint().exact(),
    };
    let offer = tell(runtime, route, &mut request, told);
    let switch = offer.and_then(|offer| {
        let downstream = request.extensions_mut().remove::<OnUpgrade>()?;
        offer.make(request.headers_mut());
        Some((offer, downstream))
    });
    if let Some(target) = target {
        *request.uri_mut() = Uri::from(target);
    }
    *request.version_mut() = Version::HTTP_11;
    if upstream.protocol() == Protocol::Http2 {
        absolute_form(&mut request);
    }
    let progress = deadline.and_then(|_| request.body().progress());
    let (bounds, buffers) = bounds(runtime, route, upstream, &request, deadline);
    let sent = pin!(async {
        if buffers {
            request.body_mut().buffer(bounds).await?;
        }
        upstream.send(request, bounds, trail).await
    });
    let mut response = match deadline {
        None => sent.await?,
        Some(deadline) => match timeout_at(deadline, sent).await {
            Ok(answer) => answer?,
            Err(_) if progress.is_some_and(|progress| progress.is_clients_delay()) => {
                return Err(UpstreamError::ClientStalled);
            }
            Err(_) => return Err(UpstreamError::Overdue { upstream: upstream.name().into() }),
        },
    };
    if response.status() == StatusCode::SWITCHING_PROTOCOLS {
        let switched = self::switch(response, switch, runtime.server.idle_timeout);
        return switched.ok_or_else(|| UpstreamError::Switched { upstream: upstream.name().into() });
    }
    // What ends with the connection hyper would call kept alive otherwise.
    let unframed = http_1_0 && response.body().size_hint().exact().is_none();
    *response.version_mut() = if unframed { Version::HTTP_10 } else { Version::HTTP_11 };
    headers::strip_hop_by_hop(response.headers_mut(), &Guarded::default());
    Ok(response)
}

/// The bounds of an exchange, and whether the body is read before it begins: a slow client then holds no connection and no
/// permit of an upstream.
fn bounds(
    runtime: &Runtime,
    route: &Route,
    upstream: &Upstream,
    request: &Request<RequestBody>,
    deadline: Option<Instant>,
) -> (Bounds, bool) {
    let settings = &runtime.server;
    // The sides of a call may talk in turn, and with pauses. Over HTTP/1.1 there is no gRPC, whatever the client says.
    let streams = upstream.protocol() == Protocol::Http2 && is_grpc(request.headers());
    let idle = settings.body_idle_timeout;
    let demand = match streams {
        true => Demand { idle, rate: 0, total: None },
        false => Demand { idle, rate: settings.min_body_rate, total: settings.body_timeout },
    };
    let length = request.body().size_hint().exact().filter(|length| *length > 0);
    let buffers = !streams && length.is_some_and(|length| length <= settings.request_buffer);
    (Bounds { deadline, demand, idle, max_body: route.max_body }, buffers)
}

/// The switch that an upstream agrees to; none if it is not what was offered.
fn switch(
    response: Response<Body>,
    asked: Option<(Offer, OnUpgrade)>,
    idle_timeout: Duration,
) -> Option<Response<Body>> {
    let (offer, downstream) = asked?;
    let (mut parts, body) = response.into_parts();
    parts.version = Version::HTTP_11;
    let protocols = offer.accepted(&parts.headers)?;
    let upstream = parts.extensions.remove::<OnUpgrade>()?;
    headers::strip_hop_by_hop(&mut parts.headers, &Guarded::default());
    upgrade::announce(&mut parts.headers, protocols);
    Some(Response::from_parts(parts, body.tunnel(Tunnel { downstream, upstream, idle_timeout })))
}

/// HTTP/2 says the host in the target (RFC 9113 §8.3.1).
fn absolute_form(request: &mut Request<RequestBody>) {
    // Frames say where a body ends (RFC 9113 §8.1).
    request.headers_mut().remove(TRANSFER_ENCODING);
    let host = request.headers_mut().remove(HOST);
    let mut uri = std::mem::take(request.uri_mut()).into_parts();
    uri.scheme = Some(uri::Scheme::HTTP);
    // A host that was routed on, or our own of the upstream, is a valid authority.
    uri.authority = host.and_then(|host| uri::Authority::try_from(host.as_bytes()).ok());
    *request.uri_mut() = Uri::from_parts(uri).unwrap_or_default();
    *request.version_mut() = Version::HTTP_2;
}
