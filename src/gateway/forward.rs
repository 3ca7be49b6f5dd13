//! Sends an admitted request on: headers cleaned and completed, the path in canonical form.

use http::header::{EXPECT, HOST, HeaderValue};
use http::{Request, Response, Uri, Version, uri};
use hyper::body::{Body as _, Incoming};
use uuid::Uuid;

use super::Peer;
use crate::account::Record;
use crate::http::body::Body;
use crate::http::bounds::Bounds;
use crate::http::headers::{self, X_REQUEST_ID};
use crate::runtime::Runtime;
use crate::upstream::{Upstream, UpstreamError};

/// Sends a request to an upstream and hands its answer back.
pub(super) async fn forward(
    runtime: &Runtime,
    upstream: &Upstream,
    request: Request<Incoming>,
    path: Option<String>,
    bounds: Bounds,
    peer: &Peer,
    record: Option<&mut Record>,
) -> Result<Response<Body>, UpstreamError> {
    let (mut parts, body) = request.into_parts();
    let headers = &mut parts.headers;
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
    if path.is_some() || parts.uri.authority().is_some() {
        parts.uri = origin_form(&parts.uri, path.as_deref());
    }
    parts.version = Version::HTTP_11;
    let response = upstream.send(Request::from_parts(parts, body), bounds).await?;
    let (mut parts, body) = response.into_parts();
    headers::strip_hop_by_hop(&mut parts.headers, &[]);
    parts.version = Version::HTTP_11;
    Ok(Response::from_parts(parts, body))
}

fn request_id() -> HeaderValue {
    let mut text = [0; uuid::fmt::Hyphenated::LENGTH];
    let id = Uuid::now_v7().hyphenated().encode_lower(&mut text);
    // Hex digits and hyphens are a valid value.
    HeaderValue::from_str(id).unwrap_or(HeaderValue::from_static("-"))
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
