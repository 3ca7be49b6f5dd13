//! The authentication of a request: what each provider of the route found.

use crate::identity::api_key::Caller;
use crate::identity::auth::{AuthProvider, Credentials, Proof, ProviderKind, Verification};
use crate::snapshot::CompiledConfig;
use crate::snapshot::routes::Route;
use crate::tools::explain::report::AuthReport;

/// Report the providers of a route in the order of their checks, then those that were not checked.
pub(super) fn steps(config: &CompiledConfig, route: &Route, credentials: &Credentials<'_>) -> Vec<AuthReport> {
    let Some(auth) = &route.auth else { return Vec::new() };
    let mut reports: Vec<AuthReport> =
        credentials.checked().map(|(provider, verification)| report(provider, verification)).collect();
    for index in &auth.providers {
        let provider = &config.auth.providers[*index];
        if !reports.iter().any(|report| *report.provider == *provider.name) {
            let reason = "not checked: an earlier step decided".to_owned();
            reports.push(auth_report(provider, "not_checked", reason));
        }
    }
    reports
}

fn report(provider: &AuthProvider, verification: &Verification) -> AuthReport {
    let (result, reason) = match verification {
        Verification::Absent => ("absent", format!("the request has no {}", credential(provider))),
        Verification::Foreign(error) => ("foreign", format!("not for this provider: {error}")),
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
        ProviderKind::Forward(_) => "its server decides; it was not asked",
        ProviderKind::Jwt(_) => "the key of the token is unknown; the key set was not fetched",
        _ => "the password was not hashed",
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
