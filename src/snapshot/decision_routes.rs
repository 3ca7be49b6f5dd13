//! Checks that the routes of listeners for decisions can be decided without the body of the request and without its
//! response. Collects the identity headers of these routes.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::config::error::Issue;
use crate::config::gateway::Config;
use crate::config::spanned::Spanned;
use crate::config::tables;
use crate::identity::auth::{AuthProvider, ProviderKind};
use crate::identity::spec::Descriptor;
use crate::snapshot::auth::Authentication;
use crate::snapshot::cost::Cost;
use crate::snapshot::listeners::{Listener, ListenerProtocol};
use crate::snapshot::routes::{Route, RouteLimit};
use crate::snapshot::validator::Validator;

/// Check the routes of all listeners for decisions, and store the identity headers of these routes in the listeners.
pub(super) fn check(
    config: &Config,
    listeners: &mut [Listener],
    routes: &[Arc<Route>],
    auth: &Authentication,
    reader: &mut Validator<'_>,
) {
    let mut reported = BTreeSet::new();
    let served: Vec<_> = listeners.iter().map(|listener| listener.protocol).collect();
    for (index, listener) in listeners.iter_mut().enumerate() {
        let address = listener.address.clone();
        let Some(settings) = &mut listener.decisions else { continue };
        let mut names = BTreeSet::new();
        for route in routes.iter().filter(|route| route.listeners.is_empty() || route.listeners.contains(&index)) {
            let of_rules = route.request_headers.names().map(|name| name.as_str());
            let providers = route.auth.iter().flat_map(|auth| &auth.providers).map(|index| &auth.providers[*index]);
            let of_servers = providers.flat_map(AuthProvider::identity_headers).map(|name| name.as_str());
            names.extend(of_rules.chain(of_servers).map(str::to_owned));
            let written = config.route.iter().find(|written| is_named(written, &route.name));
            let (Some(written), true) = (written, reported.insert(route.index)) else { continue };
            for reason in undecidable(written.get_ref(), route, auth, settings.settle_timeout.is_some()) {
                let message = format!("the listener {address} for decisions cannot decide about this route: {reason}");
                let others = served.contains(&ListenerProtocol::Http);
                let hint = match others {
                    true => {
                        "set `listeners` in the route to the name of a listener with protocol = \"http\", or remove \
                             this setting"
                    }
                    false => "remove this setting, or let the gateway forward the requests of this route",
                };
                reader.push_issue(Issue::new(written.span(), message).with_hint(hint));
            }
        }
        // The names come from valid names, so the conversion cannot fail.
        settings.set_identity_headers(names.iter().filter_map(|name| name.parse().ok()).collect());
    }
}

fn is_named(written: &Spanned<tables::Route>, name: &str) -> bool {
    written.get_ref().name.as_ref().is_some_and(|written| written.get_ref() == name)
}

/// Return the reasons why the gateway cannot decide about a request of this route before the request is forwarded.
/// `is_settled` is true if programs report the response.
fn undecidable(written: &tables::Route, route: &Route, auth: &Authentication, is_settled: bool) -> Vec<String> {
    let of_limit = |limit| of_limit(route, limit, is_settled);
    let mut reasons: Vec<_> = route.rate_limits.limits.iter().filter_map(of_limit).collect();
    if written.conditions.as_ref().is_some_and(|rules| !rules.get_ref().json.is_empty()) {
        reasons.push("`match.json` reads the body, which proxies do not send".to_owned());
    }
    if route.rate_limits.tools.is_some() {
        reasons.push("`mcp_tools` reads the body, which proxies do not send".to_owned());
    }
    if route.cors.is_some() {
        reasons.push("`cors` changes the response, which comes from the application".to_owned());
    }
    let mut providers = route.auth.iter().flat_map(|auth| &auth.providers).map(|index| &auth.providers[*index]);
    if let Some(provider) = providers.find(|provider| matches!(provider.kind, ProviderKind::ClientCert)) {
        reasons.push(format!("`{}` verifies the certificate of the client, which only the proxy sees", provider.name));
    }
    reasons
}

/// Return the reason why a limit cannot be decided.
fn of_limit(route: &Route, limit: &RouteLimit, is_settled: bool) -> Option<String> {
    let name = &limit.limit.name;
    let of_response = "depends on the response, which the gateway does not see";
    let of_body = "depends on the body, which proxies do not send";
    match &limit.cost {
        Cost::Fixed(_) => {}
        Cost::Request { header, .. } => {
            return Some(format!(
                "the cost of `{name}` is the header `{header}`, which clients of the proxy could send"
            ));
        }
        Cost::Response { .. } if is_settled => {}
        Cost::Response { .. } => return Some(format!("the cost of `{name}` {of_response}")),
        Cost::Llm(_) => return Some(format!("the cost of `{name}` (`llm`) {of_response}")),
        Cost::Tools(_) => return Some(format!("the cost of `{name}` (`tools`) {of_body}")),
    }
    if !is_settled && !limit.refund_on.is_empty() {
        return Some(format!("`refund_on` of `{name}` {of_response}"));
    }
    if !is_settled && limit.limit.default_variant.rule.is_concurrency() {
        return Some(format!("`{name}` limits concurrency, but the gateway does not see the end of the request"));
    }
    let spec = &route.rate_limits.identities[limit.identity_index];
    spec.descriptors.iter().find_map(|descriptor| match descriptor {
        Descriptor::Json(_) | Descriptor::Form(_) | Descriptor::Rpc(_) => {
            Some(format!("`{name}` counts by {}, which {of_body}", descriptor.label()))
        }
        Descriptor::User(header) => Some(format!(
            "`{name}` counts by the header `{header}` of a trusted proxy, which clients of the proxy could send"
        )),
        Descriptor::ClientCert => Some(format!("`{name}` counts by {}, which only the proxy sees", descriptor.label())),
        Descriptor::ApiKey
        | Descriptor::Group(_)
        | Descriptor::Ip
        | Descriptor::Header(_)
        | Descriptor::Cookie(_)
        | Descriptor::Query(_)
        | Descriptor::Path(_)
        | Descriptor::Jwt(_)
        | Descriptor::Basic
        | Descriptor::ClaimedUser
        | Descriptor::Forward(_)
        | Descriptor::Host
        | Descriptor::Method
        | Descriptor::Entry(_)
        | Descriptor::Global
        | Descriptor::Route => None,
    })
}
