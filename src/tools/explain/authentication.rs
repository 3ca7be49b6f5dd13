//! The authentication of a request, with the result of each provider of the route.

use http::HeaderMap;
use tokio::runtime::Builder;

use crate::identity::api_key::Caller;
use crate::identity::auth::{AuthError, AuthProvider, Credentials, Proof, ProviderKind, Verification};
use crate::identity::basic::BasicProvider;
use crate::proxy::authentication::{AuthRejection, auth_request, authenticate};
use crate::proxy::context::Peer;
use crate::proxy::local_reply::Rejection;
use crate::snapshot::CompiledConfig;
use crate::snapshot::routes::Route;
use crate::tools::explain::report::AuthReport;

/// Verify the credentials of a request as a gateway does. Passwords are compared with their hashes. The keys of issuers
/// are not fetched, and authentication servers are not called. The error in these cases is [`AuthError::Pending`].
pub(super) fn verify<'a>(
    config: &'a CompiledConfig,
    route: &'a Route,
    headers: &HeaderMap,
    peer: &Peer,
) -> (Credentials<'a>, Result<(), Rejection<'a>>) {
    let (mut credentials, mut result) = authenticate(config, route, headers, peer);
    let request = auth_request(route, headers, peer);
    while let Err(Rejection::Auth(AuthRejection { error: AuthError::Pending(index), challenges })) = &result {
        let (index, challenges) = (*index, *challenges);
        let verification = match &config.auth.providers[index].kind {
            ProviderKind::Basic(basic) => hash_password(basic, headers),
            ProviderKind::Jwt(verifier) => verifier.verify_with_current_keys(&request),
            _ => break,
        };
        let resumed = credentials.resume(index, verification, &request);
        result = resumed.map_err(|error| Rejection::Auth(AuthRejection { error, challenges }));
    }
    (credentials, result)
}

fn hash_password(basic: &BasicProvider, headers: &HeaderMap) -> Verification {
    match Builder::new_current_thread().enable_time().build() {
        Ok(runtime) => runtime.block_on(basic.verify_with_hash(headers)),
        Err(_) => Verification::Unavailable(AuthError::Unavailable("the password cannot be hashed")),
    }
}

/// Report the providers of a route in the order of their checks, followed by the providers that were not checked.
pub(super) fn steps(config: &CompiledConfig, route: &Route, credentials: &Credentials<'_>) -> Vec<AuthReport> {
    let Some(auth) = &route.auth else { return Vec::new() };
    let mut reports: Vec<AuthReport> =
        credentials.checked().map(|(provider, verification)| report(provider, verification)).collect();
    for index in &auth.providers {
        let provider = &config.auth.providers[*index];
        if !reports.iter().any(|report| *report.provider == *provider.name) {
            let reason = "not checked, because an earlier step decided".to_owned();
            reports.push(auth_report(provider, "not_checked", reason));
        }
    }
    reports
}

fn report(provider: &AuthProvider, verification: &Verification) -> AuthReport {
    let (result, reason) = match verification {
        Verification::Absent => ("absent", format!("the request has no {}", credential(provider))),
        Verification::Foreign(error) => ("foreign", format!("the credential is not for this provider: {error}")),
        Verification::Valid(proof) => ("valid", proof_text(provider, proof)),
        Verification::Invalid(error) => ("invalid", error.to_string()),
        Verification::Forbidden(error) => ("forbidden", error.to_string()),
        Verification::Unavailable(error) => ("unavailable", error.to_string()),
        Verification::Pending => ("pending", pending_text(provider)),
    };
    auth_report(provider, result, reason)
}

fn auth_report(provider: &AuthProvider, result: &'static str, reason: String) -> AuthReport {
    AuthReport { provider: provider.name.to_string(), kind: provider.kind.label(), result, reason }
}

fn credential(provider: &AuthProvider) -> &'static str {
    match provider.kind {
        ProviderKind::ApiKey(_) => "API key",
        ProviderKind::Jwt(_) => "bearer token",
        ProviderKind::ClientCert => "client certificate",
        ProviderKind::Basic(_) => "Basic credentials",
        ProviderKind::Forward(_) => "admission",
    }
}

fn pending_text(provider: &AuthProvider) -> String {
    match provider.kind {
        ProviderKind::Forward(_) => "the provider's server decides; explain does not call it",
        _ => "not verified",
    }
    .to_owned()
}

fn proof_text(provider: &AuthProvider, proof: &Proof) -> String {
    match proof {
        Proof::ApiKey(Caller::Consumer(consumer), _) => format!("API key of the consumer {}", consumer.name),
        Proof::ApiKey(Caller::Accepted(_), _) => "unknown API key, accepted (on_unknown)".to_owned(),
        Proof::ApiKey(Caller::Anonymous | Caller::Missing, _) => "anonymous, without a known API key".to_owned(),
        Proof::Jwt(claims) => match claims.text("sub") {
            Some(subject) => format!("token of {subject}"),
            None => "token without a subject".to_owned(),
        },
        Proof::ClientCert => format!("the {} of the connection", credential(provider)),
        Proof::Basic(user) => format!("the user {user}"),
        Proof::Forward(_) => "admitted by its server".to_owned(),
    }
}
