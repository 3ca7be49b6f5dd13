//! Forward authentication, as with `auth_request` of nginx and ForwardAuth of Traefik: an authentication server verifies
//! the credentials of a request.

use std::sync::Arc;
use std::time::Duration;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use http::header::{
    CONTENT_LANGUAGE, CONTENT_TYPE, HOST, HeaderName, HeaderValue, LOCATION, RETRY_AFTER, SET_COOKIE, WWW_AUTHENTICATE,
};
use http::{HeaderMap, Request, Response, Uri};
use http_body_util::BodyExt;
use tokio::time::{Instant, timeout, timeout_at};
use tracing::warn;

use crate::clock::monotonic;
use crate::http::body::Body;
use crate::http::body_limits::{BodyLimits, UploadLimits};
use crate::http::flow::StreamFlow;
use crate::http::headers::{
    ForwardedInfo, X_FORWARDED_FOR, X_FORWARDED_HOST, X_FORWARDED_PROTO, X_REQUEST_ID, client_scheme, join_cookies,
};
use crate::http::request_body::RequestBody;
use crate::http::target::received_host;
use crate::identity::forward::{
    CacheRole, ForwardCache, ForwardProvider, ForwardSettings, PendingExchange, SharedResult, ToldParts,
};
use crate::identity::verification::{Admission, Denial};
use crate::identity::verification::{AuthError, Proof, Verification};
use crate::proxy::config_snapshot::ConfigSnapshot;
use crate::proxy::metrics::AuthResult;
use crate::proxy::request::{Peer, TargetedRequest};
use crate::upstream::SendOptions;
use crate::upstream::error::UpstreamError;
use crate::upstream::retry::AttemptLog;
use crate::upstream::settings::HostPolicy;

const X_FORWARDED_METHOD: HeaderName = HeaderName::from_static("x-forwarded-method");
const X_FORWARDED_URI: HeaderName = HeaderName::from_static("x-forwarded-uri");

/// Headers of an authentication server's denial that the gateway sends to the client.
static DENIAL_HEADERS: [HeaderName; 6] =
    [LOCATION, SET_COOKIE, WWW_AUTHENTICATE, CONTENT_TYPE, CONTENT_LANGUAGE, RETRY_AFTER];

/// Maximum size in bytes of the body of an authentication server's denial, such as a login page. A longer body is not
/// sent to the client.
const MAX_DENIAL_BODY: usize = 256 << 10;

/// Maximum size in bytes of the body of an admission. The gateway reads the body only so that the connection can be
/// reused.
const MAX_ADMISSION_BODY: usize = 64 << 10;

/// An authentication server, as one request uses it.
pub(super) struct AuthServer<'s> {
    pub(super) snapshot: &'s ConfigSnapshot,
    /// The HTTP/1.x connection or HTTP/2 stream of the request.
    pub(super) flow: &'s Arc<StreamFlow>,
    pub(super) provider: &'s ForwardProvider,
    /// Index of the provider.
    pub(super) index: usize,
}

impl AuthServer<'_> {
    /// Call the server, which admits or denies the request. `headers` are [`told_headers`].
    pub(super) async fn verify(&self, mut headers: HeaderMap, request_id: HeaderValue) -> Verification {
        let (result, is_cached) = match &self.provider.cache {
            None => {
                // With a cache, the server is not told the id, because the headers are the cache key.
                headers.insert(X_REQUEST_ID, request_id);
                (self.exchange(headers).await.result, false)
            }
            Some(cache) => self.ask_once(cache, headers).await,
        };
        let counted = match &result {
            Ok(_) if is_cached => AuthResult::Cached,
            Ok(_) => AuthResult::Admitted,
            Err(AuthError::Denied(_)) => AuthResult::Denied,
            Err(_) => AuthResult::Error,
        };
        self.snapshot.metrics.record_forward_auth(self.index, counted);
        match result {
            Ok(admission) => Verification::Valid(Proof::Forward(admission)),
            // Return `Foreign`, so that another alternative in the route's `require` setting may still admit the
            // request.
            Err(error @ AuthError::Denied(_)) => Verification::Foreign(error),
            // Do not fail open after an invalid response, because the client may be able to cause one.
            Err(error @ AuthError::InvalidResponse) => Verification::Unavailable(error),
            Err(_) if self.provider.settings.fail_open => Verification::Valid(Proof::Forward(Arc::default())),
            Err(error) => Verification::Unavailable(error),
        }
    }

    /// Return the cached admission of a request as the result of the provider, or `None` if no admission is cached.
    /// `headers` returns [`told_headers`].
    pub(super) fn verify_cached(&self, headers: impl FnOnce() -> HeaderMap) -> Option<Verification> {
        let cache = self.provider.cache.as_ref()?;
        let admission = cache.get(cache.key(&headers()))?;
        self.snapshot.metrics.record_forward_auth(self.index, AuthResult::Cached);
        Some(Verification::Valid(Proof::Forward(admission)))
    }
}

/// Return the headers of the request to the authentication server with these parts of the request, except `Host` and
/// `X-Request-Id`. With the parts that the server is told, these headers are the cache key.
pub(super) fn told_headers(
    provider: &ForwardProvider,
    told: ToldParts,
    peer: &Peer,
    request: &TargetedRequest<'_>,
) -> HeaderMap {
    let ForwardSettings { request_headers, .. } = &provider.settings;
    let TargetedRequest { head, target, origin } = *request;
    let received = head.headers;
    let mut headers = HeaderMap::new();
    for name in request_headers {
        for value in received.get_all(name) {
            headers.append(name, value.clone());
        }
    }
    join_cookies(&mut headers);
    let ForwardedInfo { trusted, .. } = &peer.forwarded;
    // Use the host and the scheme that a trusted proxy reports, as in requests to upstreams.
    let from_proxy = |name: &HeaderName| received.get(name).filter(|_| *trusted).cloned();
    if told.method {
        // The conversion cannot fail, because a method is a token, and therefore a valid header value.
        let method = HeaderValue::from_str(head.method.as_str()).ok();
        headers.extend(method.map(|method| (X_FORWARDED_METHOD, method)));
    }
    if told.uri {
        let path = target.forwarded_path();
        let uri = match head.uri.query() {
            Some(query) => HeaderValue::try_from(format!("{path}?{query}")),
            None => HeaderValue::from_str(path),
        };
        // Building the target cannot fail, because its parts come from a valid target.
        headers.insert(X_FORWARDED_URI, uri.unwrap_or(HeaderValue::from_static("/")));
    }
    if told.host {
        let host = received_host(head.uri, received);
        headers.extend(from_proxy(&X_FORWARDED_HOST).or(host).map(|host| (X_FORWARDED_HOST, host)));
        let scheme = || HeaderValue::from_static(client_scheme(received, &peer.forwarded));
        headers.insert(X_FORWARDED_PROTO, from_proxy(&X_FORWARDED_PROTO).unwrap_or_else(scheme));
    }
    if told.ip {
        let client = origin.client.to_string();
        headers.extend(HeaderValue::try_from(client).ok().map(|client| (X_FORWARDED_FOR, client)));
    }
    headers
}

/// The result of an exchange with an authentication server, and all headers of its response.
struct Exchange {
    result: Result<Arc<Admission>, AuthError>,
    response: HeaderMap,
}

impl AuthServer<'_> {
    /// Return the result of the authentication server. Use the cached admission if there is one. If another request with
    /// the same cache key is calling the server, wait for the result of that call. Otherwise, call the server. The second
    /// value is true if the request was admitted without a call for this request.
    async fn ask_once(&self, cache: &ForwardCache, headers: HeaderMap) -> (Result<Arc<Admission>, AuthError>, bool) {
        let key = cache.key(&headers);
        loop {
            let mut waiting = match cache.role(key) {
                CacheRole::Hit(admission) => return (Ok(admission), true),
                CacheRole::Ask(pending) => return (self.ask(headers, pending).await, false),
                CacheRole::Wait(waiting) => waiting,
            };
            // An error means that the request that was calling the server was cancelled. Read the cache again: one of the
            // waiting requests then calls the server.
            if waiting.changed().await.is_err() {
                continue;
            }
            let shared = waiting.borrow().clone();
            match shared {
                Some(SharedResult::Admitted(admission)) => return (Ok(admission), true),
                Some(SharedResult::Unavailable(error)) => return (Err(error), false),
                // The result of the other request must not be shared. It is a denial, or it is an admission that the cache
                // must not store, for example because the response starts a session for one client. Call the server for
                // this request.
                Some(SharedResult::Private) => return (self.exchange(headers).await.result, false),
                None => {}
            }
        }
    }

    async fn ask(&self, headers: HeaderMap, pending: PendingExchange<'_>) -> Result<Arc<Admission>, AuthError> {
        let Exchange { result, response } = self.exchange(headers).await;
        let ttl = self.provider.settings.cache.map_or(Duration::ZERO, |(ttl, _)| ttl);
        pending.finish(&result, &response, ttl);
        result
    }

    /// Send a request to the authentication server and interpret its response. Redirects are not followed.
    async fn exchange(&self, headers: HeaderMap) -> Exchange {
        let settings = &self.provider.settings;
        let deadline = Instant::now() + settings.timeout;
        let name = &self.snapshot.config.auth.providers[self.index].name;
        let failed = |reason: &dyn std::fmt::Display| {
            warn!(provider = &**name, error = %reason, "authentication server did not respond");
            let result = Err(AuthError::Unavailable("the request cannot be authenticated at the moment"));
            Exchange { result, response: HeaderMap::new() }
        };
        let invalid = |reason: &dyn std::fmt::Display| {
            warn!(provider = &**name, error = %reason, "authentication server sent an invalid response");
            Exchange { result: Err(AuthError::InvalidResponse), response: HeaderMap::new() }
        };
        let response = match timeout_at(deadline, self.send(headers)).await {
            Ok(Ok(response)) if response.status().is_informational() => return invalid(&"it switched protocols"),
            Ok(Ok(response)) => response,
            Ok(Err(error)) if error.is_invalid_response() => return invalid(&error),
            Ok(Err(error)) => return failed(&error),
            Err(_) => return failed(&format_args!("no response within {:?}", settings.timeout)),
        };
        let (parts, body) = response.into_parts();
        if parts.status.is_success() {
            drain(body, settings.timeout);
            let admission = Admission { headers: selected(&parts.headers, &settings.response_headers) };
            return Exchange { result: Ok(Arc::new(admission)), response: parts.headers };
        }
        let mut headers = selected(&parts.headers, &DENIAL_HEADERS);
        // The denial applies even if its body cannot be read.
        let body = match timeout_at(deadline, read(body, MAX_DENIAL_BODY)).await {
            Ok(Some(body)) => body,
            Ok(None) | Err(_) => {
                let status = parts.status.as_u16();
                warn!(
                    provider = &**name,
                    status, "response body of the authentication server is incomplete or too long"
                );
                [CONTENT_TYPE, CONTENT_LANGUAGE].iter().for_each(|name| drop(headers.remove(name)));
                Bytes::new()
            }
        };
        let denial = Denial { status: parts.status, headers, body };
        Exchange { result: Err(AuthError::Denied(Arc::new(denial))), response: parts.headers }
    }

    async fn send(&self, headers: HeaderMap) -> Result<Box<Response<Body>>, UpstreamError> {
        let settings = &self.provider.settings;
        let upstream = &*self.snapshot.upstreams[self.provider.upstream];
        let mut request = Box::new(Request::new(RequestBody::empty()));
        *request.uri_mut() = Uri::from(settings.target.clone());
        *request.headers_mut() = headers;
        request.headers_mut().insert(HOST, settings.authority.clone());
        let idle_timeout = settings.timeout;
        let upload = UploadLimits { idle_timeout, min_rate: 0, total_timeout: None };
        let limits = BodyLimits { deadline: None, is_client_deadline: false, upload, idle_timeout, max_body: None };
        let started_at = monotonic();
        let mut attempts = AttemptLog::new(false);
        let result =
            upstream.send(request, SendOptions::new(limits, self.flow, &HostPolicy::Client), &mut attempts).await;
        self.snapshot.metrics.record_upstream(self.provider.upstream, &result, started_at.elapsed(), &attempts);
        result
    }
}

/// Return all headers that have one of these names.
fn selected(headers: &HeaderMap, names: &[HeaderName]) -> HeaderMap {
    let mut selected = HeaderMap::new();
    for name in names {
        for value in headers.get_all(name) {
            selected.append(name, value.clone());
        }
    }
    selected
}

/// Read a whole body. Return `None` if the body is longer than `max` bytes or incomplete.
async fn read(mut body: Body, max: usize) -> Option<Bytes> {
    let mut content = BytesMut::new();
    while let Some(frame) = body.frame().await {
        let Ok(data) = frame.ok()?.into_data() else { continue };
        if content.len() + data.remaining() > max {
            return None;
        }
        content.put(data);
    }
    Some(content.freeze())
}

/// Read a short body in the background, so that the connection can be reused. The request does not wait for the body.
fn drain(body: Body, time: Duration) {
    if http_body::Body::is_end_stream(&body) {
        return;
    }
    tokio::spawn(async move { timeout(time, read(body, MAX_ADMISSION_BODY)).await.ok() });
}
