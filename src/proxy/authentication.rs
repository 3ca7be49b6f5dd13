//! The authentication of a request: verifies its credentials with the providers of the route.

use http::{HeaderMap, Request};
use tokio::time::timeout_at;
use tracing::debug;

use crate::http::request_body::RequestBody;
use crate::identity::auth::{AuthError, AuthRequest, Challenge, Credentials, ProviderKind, Verification};
use crate::limiter::clock;
use crate::proxy::context::{Peer, RequestContext};
use crate::proxy::forward_auth;
use crate::proxy::local_reply::Rejection;
use crate::proxy::target::RequestTarget;
use crate::snapshot::CompiledConfig;
use crate::snapshot::routes::Route;

/// The error for a request that is not authenticated: the reason, and the challenges of the route.
#[derive(Debug)]
pub struct AuthRejection<'a> {
    /// The reason why authentication failed.
    pub error: AuthError,
    /// Challenges of the response if its status is 401.
    pub challenges: &'a [Challenge],
}

/// Verify the credentials of a request. If the route has no providers, this function does nothing. If a provider has to
/// wait, the function returns [`AuthError::Pending`], and [`finish`] continues.
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

/// Continue an authentication for which the provider `pending` has to wait, as long as the caches of authentication
/// servers contain an admission. If no provider is left to wait for, one call can check all limits.
///
/// # Errors
/// As for [`authenticate`].
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
            ProviderKind::Forward(forward) => forward_auth::verify_cached(context, pending, forward, target, request),
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

/// Continue an authentication for which the provider `pending` has to wait: for another server, or for the hash of a
/// password.
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
            ProviderKind::Forward(forward) => forward_auth::verify(context, index, forward, target, request).await,
            ProviderKind::Basic(basic) => basic.verify_with_hash(request.headers()).await,
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
