//! What an upstream is told of a request: headers cleaned and completed.

use http::header::{EXPECT, HOST, HeaderValue};
use http::{Request, Version};

use crate::http::headers::{self, ForwardedInfo, X_REQUEST_ID};
use crate::http::host;
use crate::http::upgrade::UpgradeRequest;
use crate::observe::trace::TraceContext;
use crate::runtime::{CompiledConfig, Route};

/// What is known of a request besides its head.
#[derive(Debug)]
pub struct UpstreamRequestInfo<'a> {
    /// Where it comes from.
    pub forwarded: &'a ForwardedInfo,
    /// What tells it from all others.
    pub request_id: HeaderValue,
    /// What the upstream's own spans belong to, if that is recorded.
    pub trace: Option<TraceContext>,
    /// The host that the upstream is told where the request names none.
    pub authority: &'a str,
    /// Bytes of its body, where they are known.
    pub length: Option<u64>,
}

/// Makes the header section for the upstream of the one that came; the offer to switch protocols is left to whoever can switch.
pub fn prepare_upstream_headers<B>(
    runtime: &CompiledConfig,
    route: &Route,
    request: &mut Request<B>,
    info: UpstreamRequestInfo<'_>,
) -> Option<UpgradeRequest> {
    let version = request.version();
    // The host that was routed on is the only one; an authority is a valid value.
    let authority = request.uri().authority().and_then(|host| HeaderValue::from_str(host.as_str()).ok());
    let headers = request.headers_mut();
    // HTTP/1.0 cannot switch, and a body would have to be read first (RFC 9110 §7.8).
    let can_upgrade = route.websocket && version == Version::HTTP_11 && info.length == Some(0);
    let upgrade_request = if can_upgrade { UpgradeRequest::from_headers(headers) } else { None };
    headers::strip_hop_by_hop(headers, &runtime.protected_headers);
    headers::set_framing(headers, info.length);
    // Our own side answers 100-continue, when the body is first asked for.
    headers.remove(EXPECT);
    headers::strip_untrusted(headers, &runtime.protected_headers, info.forwarded.trusted);
    if version == Version::HTTP_2 {
        headers::join_cookies(headers);
    }
    if let Some(host) = authority {
        headers.insert(HOST, host);
    }
    let mut host = headers.get(HOST).cloned();
    if let Some(plain) = host.as_ref().and_then(host::strip_trailing_dot) {
        headers.insert(HOST, plain.clone());
        host = Some(plain);
    }
    if let (None, Ok(host)) = (&host, HeaderValue::from_str(info.authority)) {
        headers.insert(HOST, host);
    }
    headers::set_forwarded(headers, info.forwarded, host.as_ref(), version);
    headers.insert(X_REQUEST_ID, info.request_id);
    if let Some(trace) = info.trace {
        trace.inject(headers);
    }
    route.request_headers.apply(headers);
    upgrade_request
}
