//! Sends an admitted request on: headers cleaned and completed, the path in canonical form.

use http::header::{EXPECT, HOST, HeaderValue, TRANSFER_ENCODING};
use http::{Request, Response, StatusCode, Uri, Version, request, response, uri};
use hyper::body::{Body as _, Incoming};
use hyper::upgrade::OnUpgrade;
use tokio::time::Duration;
use uuid::Uuid;

use super::Peer;
use crate::account::Record;
use crate::http::body::Body;
use crate::http::bounds::Bounds;
use crate::http::headers::{self, X_REQUEST_ID};
use crate::http::tunnel::Tunnel;
use crate::http::upgrade::{self, Offer};
use crate::runtime::{Route, Runtime};
use crate::upstream::{Protocol, Upstream, UpstreamError};

/// Sends a request to an upstream and hands its answer back.
pub(super) async fn forward(
    runtime: &Runtime,
    route: &Route,
    upstream: &Upstream,
    request: Request<Incoming>,
    path: Option<String>,
    peer: &Peer,
    record: Option<&mut Record>,
) -> Result<Response<Body>, UpstreamError> {
    let (mut parts, body) = request.into_parts();
    let http_1_0 = parts.version == Version::HTTP_10;
    let headers = &mut parts.headers;
    // HTTP/1.0 cannot switch, and a body would have to be read first (RFC 9110 §7.8).
    let may_switch = route.websocket && parts.version == Version::HTTP_11 && body.is_end_stream();
    let offer = if may_switch { Offer::read(headers) } else { None };
    headers::strip_hop_by_hop(headers, &runtime.trusted_headers);
    headers::set_framing(headers, body.size_hint().exact());
    // Our own side answers 100-continue, when the body is first asked for.
    headers.remove(EXPECT);
    headers::strip_untrusted(headers, &runtime.trusted_headers, peer.origin.trusted);
    if parts.version == Version::HTTP_2 {
        headers::join_cookies(headers);
    }
    // The host that was routed on is the only one.
    if let Some(authority) = parts.uri.authority() {
        // An authority is a valid value.
        if let Ok(host) = HeaderValue::from_str(authority.as_str()) {
            headers.insert(HOST, host);
        }
    }
    let host = headers.get(HOST).cloned();
    if let (None, Ok(host)) = (&host, HeaderValue::from_str(upstream.authority())) {
        headers.insert(HOST, host);
    }
    headers::set_forwarded(headers, &peer.origin, host.as_ref(), parts.version);
    let id = headers.entry(X_REQUEST_ID).or_insert_with(request_id);
    if let (Some(record), Ok(id)) = (record, id.to_str()) {
        record.request_id = id.into();
    }
    route.request_headers.apply(headers);
    let switch = offer.and_then(|offer| {
        let downstream = parts.extensions.remove::<OnUpgrade>()?;
        offer.make(headers);
        Some((offer, downstream))
    });
    if path.is_some() || parts.uri.authority().is_some() {
        parts.uri = origin_form(&parts.uri, path.as_deref());
    }
    parts.version = Version::HTTP_11;
    if upstream.protocol() == Protocol::Http2 {
        absolute_form(&mut parts);
    }
    let bounds = Bounds { idle: runtime.server.body_idle_timeout, max_body: route.max_body };
    let response = upstream.send(Request::from_parts(parts, body), bounds).await?;
    let (mut parts, body) = response.into_parts();
    parts.version = Version::HTTP_11;
    if parts.status == StatusCode::SWITCHING_PROTOCOLS {
        let switched = self::switch(parts, body, switch, runtime.server.idle_timeout);
        return switched.ok_or_else(|| UpstreamError::Switched { upstream: upstream.name().into() });
    }
    if http_1_0 && body.size_hint().exact().is_none() {
        // It ends with the connection, which hyper would call kept alive otherwise.
        parts.version = Version::HTTP_10;
    }
    headers::strip_hop_by_hop(&mut parts.headers, &[]);
    Ok(Response::from_parts(parts, body))
}

/// The switch that an upstream agrees to; none if it is not what was offered.
fn switch(
    mut parts: response::Parts,
    body: Body,
    asked: Option<(Offer, OnUpgrade)>,
    idle_timeout: Duration,
) -> Option<Response<Body>> {
    let (offer, downstream) = asked?;
    let protocols = offer.accepted(&parts.headers)?;
    let upstream = parts.extensions.remove::<OnUpgrade>()?;
    headers::strip_hop_by_hop(&mut parts.headers, &[]);
    upgrade::announce(&mut parts.headers, protocols);
    Some(Response::from_parts(parts, body.tunnel(Tunnel { downstream, upstream, idle_timeout })))
}

fn request_id() -> HeaderValue {
    let mut text = [0; uuid::fmt::Hyphenated::LENGTH];
    let id = Uuid::now_v7().hyphenated().encode_lower(&mut text);
    // Hex digits and hyphens are a valid value.
    HeaderValue::from_str(id).unwrap_or(HeaderValue::from_static("-"))
}

/// HTTP/2 says the host in the target (RFC 9113 §8.3.1).
fn absolute_form(parts: &mut request::Parts) {
    // Frames say where a body ends (RFC 9113 §8.1).
    parts.headers.remove(TRANSFER_ENCODING);
    let host = parts.headers.remove(HOST);
    let mut uri = std::mem::take(&mut parts.uri).into_parts();
    uri.scheme = Some(uri::Scheme::HTTP);
    // A host that was routed on, or our own of the upstream, is a valid authority.
    uri.authority = host.and_then(|host| uri::Authority::try_from(host.as_bytes()).ok());
    parts.uri = Uri::from_parts(uri).unwrap_or_default();
    parts.version = Version::HTTP_2;
}

/// Path and query only, the path in canonical form.
fn origin_form(uri: &Uri, path: Option<&str>) -> Uri {
    let path = path.unwrap_or(uri.path());
    let target = match uri.query() {
        Some(query) => format!("{path}?{query}"),
        None => path.to_owned(),
    };
    // A canonical path and a query that was parsed before are valid.
    uri::PathAndQuery::try_from(target).map_or_else(|_| Uri::from_static("/"), Uri::from)
}
