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
use super::tell::{UpstreamRequestInfo, prepare_upstream_headers};
use crate::http::body::Body;
use crate::http::bounds::BodyLimits;
use crate::http::headers::{self, ProtectedHeaders, is_grpc};
use crate::http::pace::UploadLimits;
use crate::http::tunnel::Tunnel;
use crate::http::upgrade::{self, UpgradeRequest};
use crate::http::upload::RequestBody;
use crate::observe::trace::TraceContext;
use crate::runtime::{CompiledConfig, Route};
use crate::upstream::{AttemptLog, Protocol, Upstream, UpstreamError};

/// What a request takes along.
pub(super) struct ForwardContext<'a> {
    pub(super) peer: &'a Peer,
    /// What tells it from all others.
    pub(super) request_id: &'a RequestId,
    /// What is asked for, where that is not what came.
    pub(super) target: Option<PathAndQuery>,
    /// When all of it is to be over.
    pub(super) deadline: Option<Instant>,
    /// What the upstream's own spans belong to, if that is recorded.
    pub(super) trace: Option<TraceContext>,
    /// Notes where it has been.
    pub(super) attempts: &'a mut AttemptLog,
}

/// Sends a request to an upstream and hands its answer back.
pub(super) async fn forward(
    runtime: &CompiledConfig,
    route: &Route,
    upstream: &Upstream,
    mut request: Box<Request<RequestBody>>,
    context: ForwardContext<'_>,
) -> Result<Response<Body>, UpstreamError> {
    let ForwardContext { peer, request_id, target, deadline, trace, attempts } = context;
    let http_1_0 = request.version() == Version::HTTP_10;
    let info = UpstreamRequestInfo {
        forwarded: &peer.forwarded,
        request_id: request_id.to_header_value(),
        trace,
        authority: upstream.authority(),
        length: request.body().size_hint().exact(),
    };
    let upgrade_request = prepare_upstream_headers(runtime, route, &mut request, info);
    let pending_upgrade = upgrade_request.and_then(|upgrade_request| {
        let downstream = request.extensions_mut().remove::<OnUpgrade>()?;
        upgrade_request.insert_into(request.headers_mut());
        Some((upgrade_request, downstream))
    });
    if let Some(target) = target {
        *request.uri_mut() = Uri::from(target);
    }
    *request.version_mut() = Version::HTTP_11;
    if upstream.protocol() == Protocol::Http2 {
        set_http2_target(&mut request);
    }
    let progress = deadline.and_then(|_| request.body().progress());
    let (limits, should_buffer) = body_limits(runtime, route, upstream, &request, deadline);
    let exchange = pin!(async {
        if should_buffer {
            request.body_mut().buffer(limits).await?;
        }
        upstream.send(request, limits, attempts).await
    });
    let mut response = match deadline {
        None => exchange.await?,
        Some(deadline) => match timeout_at(deadline, exchange).await {
            Ok(result) => result?,
            Err(_) if progress.is_some_and(|progress| progress.is_delayed_by_client()) => {
                return Err(UpstreamError::ClientTimeout);
            }
            Err(_) => return Err(UpstreamError::RouteTimeout { upstream: upstream.name().into() }),
        },
    };
    if response.status() == StatusCode::SWITCHING_PROTOCOLS {
        let upgraded = self::accept_upgrade(response, pending_upgrade, runtime.server.idle_timeout);
        return upgraded.ok_or_else(|| UpstreamError::UnexpectedUpgrade { upstream: upstream.name().into() });
    }
    // What ends with the connection hyper would call kept alive otherwise.
    let is_close_delimited = http_1_0 && response.body().size_hint().exact().is_none();
    *response.version_mut() = if is_close_delimited { Version::HTTP_10 } else { Version::HTTP_11 };
    headers::strip_hop_by_hop(response.headers_mut(), &ProtectedHeaders::default());
    Ok(response)
}

/// The bounds of an exchange, and whether the body is read before it begins: a slow client then holds no connection and no
/// permit of an upstream.
fn body_limits(
    runtime: &CompiledConfig,
    route: &Route,
    upstream: &Upstream,
    request: &Request<RequestBody>,
    deadline: Option<Instant>,
) -> (BodyLimits, bool) {
    let settings = &runtime.server;
    // The sides of a call may talk in turn, and with pauses. Over HTTP/1.1 there is no gRPC, whatever the client says.
    let is_streaming = upstream.protocol() == Protocol::Http2 && is_grpc(request.headers());
    let idle_timeout = settings.body_idle_timeout;
    let upload = match is_streaming {
        true => UploadLimits { idle_timeout, min_rate: 0, total_timeout: None },
        false => UploadLimits { idle_timeout, min_rate: settings.min_body_rate, total_timeout: settings.body_timeout },
    };
    let length = request.body().size_hint().exact().filter(|length| *length > 0);
    let should_buffer = !is_streaming && length.is_some_and(|length| length <= settings.request_buffer);
    (BodyLimits { deadline, upload, idle_timeout, max_body: route.max_body }, should_buffer)
}

/// The switch that an upstream agrees to; none if it is not what was offered.
fn accept_upgrade(
    response: Response<Body>,
    pending: Option<(UpgradeRequest, OnUpgrade)>,
    idle_timeout: Duration,
) -> Option<Response<Body>> {
    let (upgrade_request, downstream) = pending?;
    let (mut parts, body) = response.into_parts();
    parts.version = Version::HTTP_11;
    let protocols = upgrade_request.accepted_protocols(&parts.headers)?;
    let upstream = parts.extensions.remove::<OnUpgrade>()?;
    headers::strip_hop_by_hop(&mut parts.headers, &ProtectedHeaders::default());
    upgrade::set_upgrade_headers(&mut parts.headers, protocols);
    Some(Response::from_parts(parts, body.with_tunnel(Tunnel { downstream, upstream, idle_timeout })))
}

/// HTTP/2 says the host in the target (RFC 9113 §8.3.1).
fn set_http2_target(request: &mut Request<RequestBody>) {
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
