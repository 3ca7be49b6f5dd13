//! What an upstream is told of a request: headers cleaned and completed.

use http::header::{EXPECT, HOST, HeaderValue};
use http::{Request, Version};

use crate::http::headers::{self, Origin, X_REQUEST_ID};
use crate::http::host;
use crate::http::upgrade::Offer;
use crate::observe::trace::Trace;
use crate::runtime::{Route, Runtime};

/// What is known of a request besides its head.
#[derive(Debug)]
pub struct Told<'a> {
    /// Where it comes from.
    pub origin: &'a Origin,
    /// What tells it from all others.
    pub id: HeaderValue,
    /// What the upstream's own spans belong to, if that is recorded.
    pub trace: Option<Trace>,
    /// The host that the upstream is told where the request names none.
    pub authority: &'a str,
    /// Bytes of its body, where they are known.
    pub length: Option<u64>,
}

/// Makes the header section for the upstream of the one that came; the offer to switch protocols is left to whoever can switch.
pub fn tell<B>(runtime: &Runtime, route: &Route, request: &mut Request<B>, told: Told<'_>) -> Option<Offer> {
    let version = request.version();
    // The host that was routed on is the only one; an authority is a valid value.
    let authority = request.uri().authority().and_then(|host| HeaderValue::from_str(host.as_str()).ok());
    let headers = request.headers_mut();
    // HTTP/1.0 cannot switch, and a body would have to be read first (RFC 9110 §7.8).
    let may_switch = route.websocket && version == Version::HTTP_11 && told.length == Some(0);
    let offer = if may_switch { Offer::read(headers) } else { None };
    headers::strip_hop_by_hop(headers, &runtime.guarded);
    headers::set_framing(headers, told.length);
    // Our own side answers 100-continue, when the body is first asked for.
    headers.remove(EXPECT);
    headers::strip_untrusted(headers, &runtime.guarded, told.origin.trusted);
    if version == Version::HTTP_2 {
        headers::join_cookies(headers);
    }
    if let Some(host) = authority {
        headers.insert(HOST, host);
    }
    let mut host = headers.get(HOST).cloned();
    if let Some(plain) = host.as_ref().and_then(host::without_dot) {
        headers.insert(HOST, plain.clone());
        host = Some(plain);
    }
    if let (None, Ok(host)) = (&host, HeaderValue::from_str(told.authority)) {
        headers.insert(HOST, host);
    }
    headers::set_forwarded(headers, told.origin, host.as_ref(), version);
    headers.insert(X_REQUEST_ID, told.id);
    if let Some(trace) = told.trace {
        trace.pass_on(headers);
    }
    route.request_headers.apply(headers);
    offer
}
