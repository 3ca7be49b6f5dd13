//! The authentication of a request: verifies its credentials with the providers of the route.

use http::HeaderMap;
use tracing::debug;

use crate::identity::auth::{AuthError, AuthRequest, Challenge, Credentials};
use crate::limiter::clock;
use crate::proxy::context::Peer;
use crate::proxy::local_reply::Rejection;
use crate::snapshot::CompiledConfig;
use crate::snapshot::routes::Route;

/// Why a request is not authenticated, with the challenges of its route.
#[derive(Debug)]
pub struct AuthRejection<'a> {
    /// The reason.
    pub error: AuthError,
    /// Challenges of the response if it is a 401.
    pub challenges: &'a [Challenge],
}

/// Verify the credentials of a request. Without providers on the route this does nothing.
///
/// The credentials contain all that was checked, also if the request is rejected.
pub fn authenticate<'a>(
    runtime: &'a CompiledConfig,
    route: &'a Route,
    headers: &HeaderMap,
    peer: &Peer,
) -> (Credentials<'a>, Result<(), Rejection<'a>>) {
    let Some(auth) = &route.auth else { return (Credentials::default(), Ok(())) };
    let request = AuthRequest {
        headers,
        has_client_cert: peer.certificate.is_some(),
        route: &route.name,
        now_us: clock::unix_us(),
    };
    let (credentials, result) = auth.authenticate(&runtime.auth.providers, &request);
    let result = result.map_err(|error| {
        debug!(route = &*route.name, %error, "request is not authenticated");
        Rejection::Auth(AuthRejection { error, challenges: &auth.challenges })
    });
    (credentials, result)
}
