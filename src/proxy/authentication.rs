//! Authentication: the providers of the route verify the credentials of a request. Some providers call an
//! authentication server (forward authentication).

use std::sync::Arc;
use std::time::Duration;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use http::header::{
    CONTENT_LANGUAGE, CONTENT_TYPE, HOST, HeaderName, HeaderValue, LOCATION, RETRY_AFTER, SET_COOKIE, WWW_AUTHENTICATE,
};
use http::{HeaderMap, Request, Response, Uri};
use http_body_util::BodyExt;
use tokio::time::{Instant, timeout, timeout_at};
use tracing::{debug, warn};

use crate::http::body::Body;
use crate::http::body_limits::{BodyLimits, UploadLimits};
use crate::http::headers::{
    ForwardedInfo, X_FORWARDED_FOR, X_FORWARDED_HOST, X_FORWARDED_PROTO, X_REQUEST_ID, client_scheme, join_cookies,
};
use crate::http::request_body::RequestBody;
use crate::http::target::strip_trailing_dot;
use crate::identity::auth::{AuthError, AuthRequest, Challenge, Credentials, Proof, ProviderKind, Verification};
use crate::identity::forward::{
    Admission, CacheKey, CacheRole, Denial, ForwardCache, ForwardProvider, ForwardSettings, PendingExchange,
    SharedResult,
};
use crate::limiter::clock;
use crate::limiter::clock::monotonic;
use crate::proxy::RequestTarget;
use crate::proxy::context::{Peer, RequestContext};
use crate::proxy::local_reply::Rejection;
use crate::proxy::metrics::AuthResult;
use crate::snapshot::CompiledConfig;
use crate::snapshot::routes::Route;
use crate::upstream::UpstreamError;
use crate::upstream::retry::AttemptLog;

/// The error for a request that is not authenticated: the reason, and the challenges of the route.
#[derive(Debug)]
pub struct AuthRejection<'a> {
    /// The reason why authentication failed.
    pub error: AuthError,
    /// Values of `WWW-Authenticate` if the status of the response is 401.
    pub challenges: &'a [Challenge],
}

/// Check that the client certificate of the connection is still valid and trusted. TLS verifies it only in the handshake,
/// and a connection may last longer than the certificate or the CA certificates. The listener closes a connection whose
/// certificate was rejected.
///
/// # Errors
/// The certificate has expired, or the current CA certificates do not verify it.
pub(super) fn check_certificate<'a>(
    config: &CompiledConfig,
    route: &'a Route,
    peer: &Peer,
) -> Result<(), Rejection<'a>> {
    let Some(certificate) = &peer.certificate else { return Ok(()) };
    let tls = config.listeners.get(peer.listener).and_then(|listener| listener.tls.as_ref());
    let verifier = tls.and_then(|tls| tls.tls.client_verifier());
    match certificate.is_trusted(verifier.as_ref(), clock::unix_us() / 1_000_000) {
        true => Ok(()),
        false => {
            let challenges = route.auth.as_ref().map_or(&[][..], |auth| &auth.challenges[..]);
            Err(reject(route, challenges, AuthError::UntrustedCertificate))
        }
    }
}

/// Verify the credentials of a request. If the route has no providers, this function does nothing. If a provider has to
/// wait, for example for an authentication server, the function returns [`AuthError::Pending`]. [`finish`] then
/// continues the authentication.
///
/// The credentials contain the results of all checks, even if the request is rejected.
pub fn authenticate<'a>(
    config: &'a CompiledConfig,
    route: &'a Route,
    headers: &HeaderMap,
    peer: &Peer,
) -> (Credentials<'a>, Result<(), Rejection<'a>>) {
    let Some(auth) = &route.auth else { return (Credentials::default(), Ok(())) };
    let (credentials, result) = auth.authenticate(&config.auth.providers, &auth_request(route, headers, peer));
    (credentials, result.map_err(|error| reject(route, &auth.challenges, error)))
}

/// Continue an authentication for which the provider `pending` has to wait, but use only cached admissions of
/// authentication servers. If these admissions complete the authentication, the caller can check all limits in one
/// store call instead of two.
///
/// # Errors
/// The request is not authenticated, or a provider still has to wait ([`AuthError::Pending`]).
pub(super) fn resume_from_cache<'a>(
    context: &mut RequestContext<'a>,
    route: &'a Route,
    credentials: &mut Credentials<'a>,
    mut pending: usize,
    target: &RequestTarget<'_>,
    request: &Request<RequestBody>,
) -> Result<(), Rejection<'a>> {
    let Some(auth) = &route.auth else { return Ok(()) };
    let providers = &context.snapshot.config.auth.providers;
    let result = loop {
        let cached = match &providers[pending].kind {
            ProviderKind::Forward(forward) => verify_with_cached_admission(context, pending, forward, target, request),
            ProviderKind::ApiKey(_) | ProviderKind::Jwt(_) | ProviderKind::ClientCert | ProviderKind::Basic(_) => None,
        };
        let Some(verification) = cached else { break Err(AuthError::Pending(pending)) };
        let auth_request = auth_request(route, request.headers(), context.peer);
        match credentials.resume(pending, verification, &auth_request) {
            Err(AuthError::Pending(next)) => pending = next,
            result => break result,
        }
    };
    result.map_err(|error| reject(route, &auth.challenges, error))
}

/// Continue an authentication for which the provider `pending` has to wait: for another server, or until the hash of a
/// password is computed.
///
/// # Errors
/// The request is not authenticated. The credentials contain the results of all checks.
pub(super) async fn finish<'a>(
    context: &mut RequestContext<'a>,
    route: &'a Route,
    mut credentials: Credentials<'a>,
    mut pending: usize,
    target: &RequestTarget<'_>,
    request: &Request<RequestBody>,
) -> (Credentials<'a>, Result<(), Rejection<'a>>) {
    let Some(auth) = &route.auth else { return (credentials, Ok(())) };
    loop {
        let verification = verify_pending(context, route, pending, target, request).await;
        let auth_request = auth_request(route, request.headers(), context.peer);
        match credentials.resume(pending, verification, &auth_request) {
            Err(AuthError::Pending(next)) => pending = next,
            result => return (credentials, result.map_err(|error| reject(route, &auth.challenges, error))),
        }
    }
}

/// Wait for the result of a provider, at most until the route timeout expires.
async fn verify_pending(
    context: &mut RequestContext<'_>,
    route: &Route,
    index: usize,
    target: &RequestTarget<'_>,
    request: &Request<RequestBody>,
) -> Verification {
    let (config, peer, deadline) = (&context.snapshot.config, context.peer, context.deadline);
    let verify = async {
        match &config.auth.providers[index].kind {
            ProviderKind::Forward(forward) => verify_with_server(context, index, forward, target, request).await,
            ProviderKind::Basic(basic) => {
                let network = config.client_ip.network(peer.client_address(request.headers()));
                basic.verify_with_hash(request.headers(), network).await
            }
            ProviderKind::Jwt(verifier) => {
                verifier.verify_with_new_keys(&auth_request(route, request.headers(), peer)).await
            }
            // This code is not reached, because providers of these kinds never wait.
            ProviderKind::ApiKey(_) | ProviderKind::ClientCert => Verification::Absent,
        }
    };
    match deadline {
        None => verify.await,
        Some(deadline) => timeout_at(deadline, verify).await.unwrap_or_else(|_| {
            Verification::Unavailable(AuthError::Unavailable("the request was not authenticated within its timeout"))
        }),
    }
}

/// Return the parts of a request that authentication uses.
pub fn auth_request<'r>(route: &'r Route, headers: &'r HeaderMap, peer: &Peer) -> AuthRequest<'r> {
    AuthRequest { headers, has_client_cert: peer.certificate.is_some(), route: &route.name, now_us: clock::unix_us() }
}

fn reject<'a>(route: &Route, challenges: &'a [Challenge], error: AuthError) -> Rejection<'a> {
    if !matches!(error, AuthError::Pending(_)) {
        debug!(route = &*route.name, %error, "request is not authenticated");
    }
    Rejection::Auth(AuthRejection { error, challenges })
}

// === Forward authentication, as with `auth_request` of nginx and ForwardAuth of Traefik ===

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

/// Call the authentication server of a provider, which admits or denies the request. `index` is the index of the
/// provider.
pub(super) async fn verify_with_server(
    context: &mut RequestContext<'_>,
    index: usize,
    provider: &ForwardProvider,
    target: &RequestTarget<'_>,
    request: &Request<RequestBody>,
) -> Verification {
    let mut headers = told_headers(context, provider, target, request);
    let (result, is_cached) = match &provider.cache {
        None => {
            // With a cache, the server is not told the id, because the headers are the cache key.
            headers.insert(X_REQUEST_ID, context.request_id(request.headers()).to_header_value());
            (exchange(context, index, provider, headers).await.result, false)
        }
        Some(cache) => ask_once(context, index, (provider, cache), headers).await,
    };
    let counted = match &result {
        Ok(_) if is_cached => AuthResult::Cached,
        Ok(_) => AuthResult::Admitted,
        Err(AuthError::Denied(_)) => AuthResult::Denied,
        Err(_) => AuthResult::Error,
    };
    context.snapshot.metrics.record_forward_auth(index, counted);
    match result {
        Ok(admission) => Verification::Valid(Proof::Forward(admission)),
        // Return `Foreign`, so that another alternative in the route's `require` setting may still admit the request.
        Err(error @ AuthError::Denied(_)) => Verification::Foreign(error),
        // Do not fail open after an invalid response, because the client may be able to cause one.
        Err(error @ AuthError::InvalidResponse) => Verification::Unavailable(error),
        Err(_) if provider.settings.fail_open => Verification::Valid(Proof::Forward(Arc::default())),
        Err(error) => Verification::Unavailable(error),
    }
}

/// Return the cached admission of the request as the result of the provider, or `None` if no admission is cached.
pub(super) fn verify_with_cached_admission(
    context: &mut RequestContext<'_>,
    index: usize,
    provider: &ForwardProvider,
    target: &RequestTarget<'_>,
    request: &Request<RequestBody>,
) -> Option<Verification> {
    let cache = provider.cache.as_ref()?;
    let admission = cache.get(cache.key(&told_headers(context, provider, target, request)))?;
    context.snapshot.metrics.record_forward_auth(index, AuthResult::Cached);
    Some(Verification::Valid(Proof::Forward(admission)))
}

/// Return the headers of the request to the authentication server, except `Host` and `X-Request-Id`. These headers are
/// the cache key.
fn told_headers(
    context: &RequestContext<'_>,
    provider: &ForwardProvider,
    target: &RequestTarget<'_>,
    request: &Request<RequestBody>,
) -> HeaderMap {
    let ForwardSettings { request_headers, told, .. } = &provider.settings;
    let received = request.headers();
    let mut headers = HeaderMap::new();
    for name in request_headers {
        for value in received.get_all(name) {
            headers.append(name, value.clone());
        }
    }
    join_cookies(&mut headers);
    let ForwardedInfo { trusted, .. } = &context.peer.forwarded;
    // Use the host and the scheme that a trusted proxy reports, as in requests to upstreams.
    let from_proxy = |name: &HeaderName| received.get(name).filter(|_| *trusted).cloned();
    if told.method {
        // The conversion cannot fail, because a method is a token, and therefore a valid header value.
        let method = HeaderValue::from_str(request.method().as_str()).ok();
        headers.extend(method.map(|method| (X_FORWARDED_METHOD, method)));
    }
    if told.uri {
        let path = target.forwarded_path();
        let uri = match request.uri().query() {
            Some(query) => HeaderValue::try_from(format!("{path}?{query}")),
            None => HeaderValue::from_str(path),
        };
        // Building the target cannot fail, because its parts come from a valid target.
        headers.insert(X_FORWARDED_URI, uri.unwrap_or(HeaderValue::from_static("/")));
    }
    if told.host {
        let authority = request.uri().authority().and_then(|host| HeaderValue::from_str(host.as_str()).ok());
        let host = authority.or_else(|| received.get(HOST).cloned());
        let host = host.map(|host| strip_trailing_dot(&host).unwrap_or(host));
        headers.extend(from_proxy(&X_FORWARDED_HOST).or(host).map(|host| (X_FORWARDED_HOST, host)));
        let scheme = || HeaderValue::from_static(client_scheme(received, &context.peer.forwarded));
        headers.insert(X_FORWARDED_PROTO, from_proxy(&X_FORWARDED_PROTO).unwrap_or_else(scheme));
    }
    if told.ip {
        let client = context.peer.client_address(received).to_string();
        headers.extend(HeaderValue::try_from(client).ok().map(|client| (X_FORWARDED_FOR, client)));
    }
    headers
}

// === Requests that a limit has denied after the server admitted them ===

/// A request for which the authentication server would be called, with the admission that the server sent for the last
/// equal request, which a limit has denied.
pub(super) struct DeniedRequest<'a> {
    /// The credentials of the request if the server sends the same admission again.
    pub credentials: Credentials<'a>,
    cache: &'a ForwardCache,
    key: CacheKey,
}

impl DeniedRequest<'_> {
    /// Forget the admission, because the limits admit the request now.
    pub(super) fn forget(self) {
        self.cache.remove(self.key);
    }
}

/// Return the request as a [`DeniedRequest`], if a limit has denied the last equal request within the last second.
/// `pending` is the provider for which the request has to wait.
pub(super) fn denied_request<'a>(
    context: &RequestContext<'a>,
    route: &'a Route,
    (credentials, pending): (&Credentials<'a>, usize),
    target: &RequestTarget<'_>,
    request: &Request<RequestBody>,
) -> Option<DeniedRequest<'a>> {
    let ProviderKind::Forward(provider) = &context.snapshot.config.auth.providers[pending].kind else { return None };
    if provider.denied.is_empty() {
        return None;
    }
    let key = provider.denied.key(&told_headers(context, provider, target, request));
    let verification = Verification::Valid(Proof::Forward(provider.denied.get(key)?));
    let mut credentials = credentials.clone();
    credentials.resume(pending, verification, &auth_request(route, request.headers(), context.peer)).ok()?;
    Some(DeniedRequest { credentials, cache: &provider.denied, key })
}

/// Store the admissions of a request that a limit has denied.
pub(super) fn remember_denied(
    context: &RequestContext<'_>,
    route: &Route,
    credentials: &Credentials<'_>,
    target: &RequestTarget<'_>,
    request: &Request<RequestBody>,
) {
    for index in route.auth.iter().flat_map(|auth| &auth.providers) {
        if let ProviderKind::Forward(provider) = &context.snapshot.config.auth.providers[*index].kind
            && let Some(admission) = credentials.admission(*index)
        {
            let key = provider.denied.key(&told_headers(context, provider, target, request));
            provider.denied.insert_denied(key, admission);
        }
    }
}

/// Return the result of the authentication server. Use the cached admission if there is one. If another request with
/// the same cache key is calling the server, wait for the result of that call. Otherwise, call the server. The second
/// value is true if the request was admitted without a call for this request.
async fn ask_once(
    context: &RequestContext<'_>,
    index: usize,
    (provider, cache): (&ForwardProvider, &ForwardCache),
    headers: HeaderMap,
) -> (Result<Arc<Admission>, AuthError>, bool) {
    let key = cache.key(&headers);
    loop {
        let mut waiting = match cache.role(key) {
            CacheRole::Hit(admission) => return (Ok(admission), true),
            CacheRole::Ask(pending) => return (ask(context, index, provider, headers, pending).await, false),
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
            Some(SharedResult::Private) => return (exchange(context, index, provider, headers).await.result, false),
            None => {}
        }
    }
}

async fn ask(
    context: &RequestContext<'_>,
    index: usize,
    provider: &ForwardProvider,
    headers: HeaderMap,
    pending: PendingExchange<'_>,
) -> Result<Arc<Admission>, AuthError> {
    let Exchange { result, response } = exchange(context, index, provider, headers).await;
    let ttl = provider.settings.cache.map_or(Duration::ZERO, |(ttl, _)| ttl);
    pending.finish(&result, &response, ttl);
    result
}

/// The result of an exchange with an authentication server, and all headers of its response.
struct Exchange {
    result: Result<Arc<Admission>, AuthError>,
    response: HeaderMap,
}

/// Send a request to the authentication server and interpret its response. Redirects are not followed.
async fn exchange(
    context: &RequestContext<'_>,
    index: usize,
    provider: &ForwardProvider,
    headers: HeaderMap,
) -> Exchange {
    let settings = &provider.settings;
    let deadline = Instant::now() + settings.timeout;
    let name = &context.snapshot.config.auth.providers[index].name;
    let failed = |reason: &dyn std::fmt::Display| {
        warn!(provider = &**name, error = %reason, "authentication server did not respond");
        let result = Err(AuthError::Unavailable("the request cannot be authenticated at the moment"));
        Exchange { result, response: HeaderMap::new() }
    };
    let invalid = |reason: &dyn std::fmt::Display| {
        warn!(provider = &**name, error = %reason, "authentication server sent an invalid response");
        Exchange { result: Err(AuthError::InvalidResponse), response: HeaderMap::new() }
    };
    let response = match timeout_at(deadline, send(context, settings, headers)).await {
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
            warn!(provider = &**name, status, "response body of the authentication server is incomplete or too long");
            [CONTENT_TYPE, CONTENT_LANGUAGE].iter().for_each(|name| drop(headers.remove(name)));
            Bytes::new()
        }
    };
    let denial = Denial { status: parts.status, headers, body };
    Exchange { result: Err(AuthError::Denied(Arc::new(denial))), response: parts.headers }
}

async fn send(
    context: &RequestContext<'_>,
    settings: &ForwardSettings,
    headers: HeaderMap,
) -> Result<Response<Body>, UpstreamError> {
    let upstream = &*context.snapshot.upstreams[settings.upstream];
    let mut request = Box::new(Request::new(RequestBody::empty()));
    *request.uri_mut() = Uri::from(settings.target.clone());
    *request.headers_mut() = headers;
    request.headers_mut().insert(HOST, settings.authority.clone());
    let idle_timeout = settings.timeout;
    let upload = UploadLimits { idle_timeout, min_rate: 0, total_timeout: None };
    let limits = BodyLimits { deadline: None, upload, idle_timeout, max_body: None };
    let started_at = monotonic();
    let mut attempts = AttemptLog::new(false);
    let result = upstream.send(request, limits, context.flow, &mut attempts).await;
    context.snapshot.metrics.record_upstream(settings.upstream, &result, started_at.elapsed(), &attempts);
    result
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
