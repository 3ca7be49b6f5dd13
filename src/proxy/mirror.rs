//! Mirroring: the gateway sends a copy of a forwarded request to a second upstream, and discards the response.
//!
//! The client never waits for the copy. The body is copied while the gateway forwards it to the upstream of the route.
//! A separate task sends the copy when the body is complete. The number of copies in flight is bounded per route and
//! worker, and their bytes are bounded per process. When a bound is reached, further requests are not copied. The
//! gateway counts the requests without a copy by [`DropReason`].

use std::sync::Arc;

use http::header::{HOST, TRANSFER_ENCODING};
use http::{HeaderName, HeaderValue, Request};
use http_body::Body as _;
use http_body_util::BodyExt;
use tokio::time::timeout;
use tracing::debug;

use crate::clock::monotonic;
use crate::http::body_limits::{BodyLimits, UploadLimits};
use crate::http::flow::StreamFlow;
use crate::http::request_body::{BodyTee, RequestBody, TeeError};
use crate::http::{headers, target};
use crate::identity::client_cert::ClientCertificate;
use crate::proxy::config_snapshot::ConfigSnapshot;
use crate::proxy::metrics::ResponseStats;
use crate::proxy::mirror_state::{CopyResult, DropReason, InFlight, MirrorStats, MirrorTasks};
use crate::proxy::request::Peer;
use crate::snapshot::route_action::Mirror;
use crate::snapshot::routes::Route;
use crate::upstream::connector::{Protocol, ProxiedConnection};
use crate::upstream::retry::AttemptLog;
use crate::upstream::settings::HostPolicy;
use crate::upstream::{SendOptions, Upstream};

/// Header that marks a copy. The value of the header is `1`.
pub const MIRROR_HEADER: HeaderName = HeaderName::from_static("x-sluicegate-mirror");

/// A request that was selected for copying.
pub(super) struct Selected<'a> {
    mirror: &'a Mirror,
    stats: Arc<MirrorStats>,
    /// Connection of the client, if the gateway sends PROXY headers to the upstream of the copies.
    client: Option<ProxiedConnection>,
    /// The host that the client requested, which may differ from the `Host` of the request to the original upstream.
    host: Option<HeaderValue>,
    snapshot: &'a ConfigSnapshot,
    peer: &'a Peer,
}

/// Decide whether a request of this route is copied. Return `None` if the request is not copied. `request` is the
/// request as it was received.
pub(super) fn select<'a>(
    snapshot: &'a ConfigSnapshot,
    peer: &'a Peer,
    route: &'a Route,
    request: &Request<RequestBody>,
) -> Option<Selected<'a>> {
    let mirror = route.mirror.as_ref().filter(|mirror| mirror.picks_next())?;
    let stats = snapshot.metrics.mirror(route.index)?.clone();
    if request.headers().contains_key(&MIRROR_HEADER) {
        // Do not copy a copy. Otherwise two gateways that mirror to each other would send copies forever.
        stats.drop_copy(DropReason::Copy);
        return None;
    }
    let upstream = &snapshot.upstreams[mirror.upstream];
    let client = upstream.sends_proxy_header().then(|| peer.proxied_connection(request.headers()));
    let host = target::received_host(request.uri(), request.headers());
    Some(Selected { mirror, stats, client, host, snapshot, peer })
}

impl Selected<'_> {
    /// Copy a request that is about to be sent to `original`. `request` already has the target and the headers for an
    /// HTTP/1.1 upstream. `is_upgrade` is true if the request offers to upgrade the connection.
    pub(super) fn copy(self, original: &Upstream, request: &mut Request<RequestBody>, is_upgrade: bool) {
        let Selected { mirror, stats, client, host, snapshot, peer } = self;
        if is_upgrade {
            return stats.drop_copy(DropReason::Upgrade);
        }
        let length = request.body().size_hint();
        if length.lower() > mirror.max_body as u64 {
            return stats.drop_copy(DropReason::MaxBody);
        }
        let mut head = Request::new(());
        head.method_mut().clone_from(request.method());
        head.uri_mut().clone_from(request.uri());
        head.headers_mut().clone_from(request.headers());
        let upstream = snapshot.upstreams[mirror.upstream].clone();
        // Set or remove the client certificate headers again, because `client_cert_header` of the copy's upstream may
        // differ from that of `original`.
        if upstream.sends_client_cert() || original.sends_client_cert() {
            let certificate = peer.certificate().filter(|_| upstream.sends_client_cert());
            ClientCertificate::set_headers(certificate, head.headers_mut());
        }
        let host = match upstream.host() {
            HostPolicy::Client => host,
            // `Upstream::send` sets the host of the server.
            HostPolicy::Server => None,
            HostPolicy::Name(name) => Some(name.clone()),
        };
        host.into_iter().for_each(|host| drop(head.headers_mut().insert(HOST, host)));
        if let Some(client) = client {
            head.extensions_mut().insert(client);
        }
        let budget = snapshot.metrics.mirror_budget.clone();
        let idle_timeout = snapshot.config.server.body_idle_timeout;
        let copy = RequestCopy {
            head,
            upstream,
            responses: snapshot.metrics.upstream_responses(mirror.upstream),
            flow: StreamFlow::for_connection(budget.clone()),
            // The upload needs no minimum rate and no total timeout, because the body of the copy is already in memory.
            limits: BodyLimits {
                is_client_deadline: false,
                deadline: None,
                upload: UploadLimits { idle_timeout, min_rate: 0, total_timeout: None },
                idle_timeout,
                max_body: None,
            },
            max_in_flight: mirror.max_in_flight,
            stats: stats.clone(),
            tasks: snapshot.mirror_tasks.clone(),
        };
        if request.body().is_end_stream() {
            return copy.start(RequestBody::empty());
        }
        // Reserve memory for the known length, or for `max_body` bytes if the length is unknown. A known length is at
        // most `max_body` here, because longer bodies are not copied (see above).
        let max = length.exact().map_or(mirror.max_body, |length| length as usize);
        let Some(reservation) = budget.try_reserve(max) else {
            return stats.drop_copy(DropReason::MaxBuffered);
        };
        let on_end = move |result| match result {
            Ok(body) => copy.start(body),
            Err(TeeError::TooLarge) => copy.stats.drop_copy(DropReason::MaxBody),
            Err(TeeError::Incomplete) => copy.stats.drop_copy(DropReason::Incomplete),
        };
        request.body_mut().tee(BodyTee::new(max, reservation, on_end));
    }
}

/// A copy of a request, without its body.
struct RequestCopy {
    head: Request<()>,
    upstream: Arc<Upstream>,
    responses: Arc<ResponseStats>,
    /// Separate flow of the copy, because the copy may outlive the connection of the client.
    flow: Arc<StreamFlow>,
    limits: BodyLimits,
    max_in_flight: usize,
    stats: Arc<MirrorStats>,
    tasks: MirrorTasks,
}

impl RequestCopy {
    /// Send the copy in a separate task.
    fn start(self, body: RequestBody) {
        let Some(in_flight) = InFlight::try_acquire(&self.stats, self.max_in_flight) else {
            return self.stats.drop_copy(DropReason::MaxInFlight);
        };
        let MirrorTasks(tasks) = self.tasks.clone();
        tasks.spawn(async move {
            let _in_flight = in_flight;
            Box::pin(self.send(body)).await;
        });
    }

    async fn send(self, body: RequestBody) {
        let RequestCopy { head, upstream, responses, flow, limits, stats, .. } = self;
        let mut request = Box::new(head.map(|()| body));
        let length = request.body().size_hint().exact();
        let headers = request.headers_mut();
        // Send the body with `Content-Length`, because the whole body is in memory.
        headers.remove(TRANSFER_ENCODING);
        headers::set_framing(headers, length);
        headers.insert(MIRROR_HEADER, HeaderValue::from_static("1"));
        if upstream.protocol() == Protocol::Http2 {
            target::set_http2_target(&mut request);
        }
        let started_at = monotonic();
        let options = SendOptions::new(limits, &flow, upstream.host());
        let result = upstream.send(request, options, &mut AttemptLog::single_attempt()).await;
        responses.record(result.as_ref().ok().map(|response| response.status()), started_at.elapsed());
        match result {
            Ok(response) => {
                stats.sent.increment(CopyResult::Responded as usize);
                let mut body = response.into_body();
                // Read the response to its end, so that the connection can be reused, but stop after the response
                // timeout.
                let discard = async { while let Some(Ok(_)) = body.frame().await {} };
                let _ = timeout(upstream.response_timeout(), discard).await;
            }
            Err(error) => {
                stats.sent.increment(CopyResult::Failed as usize);
                debug!(%error, "the mirrored copy of a request failed");
            }
        }
    }
}
