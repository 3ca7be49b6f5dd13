//! Warnings about valid values that are probably not what the operator means: misspelled methods, a path without a
//! wildcard, limits whose identity clients choose, and admin tokens that can be guessed.

use std::sync::Arc;

use crate::config::error::Issue;
use crate::config::spanned::Text;
use crate::config::unknown_keys::closest_name;
use crate::identity::spec::Descriptor;
use crate::snapshot::limits::CompiledLimit;
use crate::snapshot::route_action::RouteAction;
use crate::snapshot::routes::Route;
use crate::snapshot::settings::AdminSettings;
use crate::tools::check::LintInput;

/// The methods that most APIs use. A method that resembles one of them, but is not registered, is probably misspelled.
const COMMON_METHODS: [&str; 7] = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"];

/// Other methods in the IANA registry, and the methods with which caches are purged.
const OTHER_METHODS: [&str; 37] = [
    "ACL",
    "BAN",
    "BASELINE-CONTROL",
    "BIND",
    "CHECKIN",
    "CHECKOUT",
    "CONNECT",
    "COPY",
    "LABEL",
    "LINK",
    "LOCK",
    "MERGE",
    "MKACTIVITY",
    "MKCALENDAR",
    "MKCOL",
    "MKREDIRECTREF",
    "MKWORKSPACE",
    "MOVE",
    "NOTIFY",
    "ORDERPATCH",
    "PRI",
    "PROPFIND",
    "PROPPATCH",
    "PURGE",
    "QUERY",
    "REBIND",
    "REPORT",
    "SEARCH",
    "SUBSCRIBE",
    "TRACE",
    "UNBIND",
    "UNCHECKOUT",
    "UNLINK",
    "UNLOCK",
    "UPDATE",
    "UPDATEREDIRECTREF",
    "VERSION-CONTROL",
];

/// Warn of methods of routes, limits and `cors` that are probably misspelled. Any token is a valid method.
pub(super) fn misspelled_methods<'a>(input: &'a LintInput<'_>) -> impl Iterator<Item = Issue> + 'a {
    let routes = input.parsed.route.iter().map(|route| route.get_ref());
    let of_routes = routes.flat_map(|route| {
        let of_cors = route.cors.iter().flat_map(|cors| cors.get_ref().methods.iter().flatten());
        route.methods.iter().flatten().chain(of_cors)
    });
    let of_limits = input.parsed.limit.values().flat_map(|limit| limit.get_ref().methods.iter().flatten());
    of_routes.chain(of_limits).filter_map(|text| {
        let method = text.get_ref().as_str();
        if COMMON_METHODS.contains(&method) || OTHER_METHODS.contains(&method) {
            return None;
        }
        let meant = closest_name(method, COMMON_METHODS)?;
        let issue = Issue::new(text.span(), format!("`{method}` is not a registered HTTP method"));
        Some(issue.with_hint(format!("did you mean {meant}?")))
    })
}

/// Warn of a route whose path ends with a slash and therefore matches only this path, if it is the only route to its
/// upstream. In other gateways, such a path is a prefix.
pub(super) fn path_without_wildcard(input: &LintInput<'_>, route: &Route) -> Option<Issue> {
    let RouteAction::Forward(upstreams) = &route.action else { return None };
    let written = input.route(route.index)?.get_ref().path.as_ref()?;
    let path = written.get_ref().as_str();
    if !path.ends_with('/') || !route.path_pattern.is_literal() {
        return None;
    }
    let is_other = |other: &&Arc<Route>| {
        let RouteAction::Forward(others) = &other.action else { return false };
        other.path != route.path && upstreams.upstreams().any(|index| others.upstreams().any(|own| own == index))
    };
    if input.config.routes.iter().any(|other| is_other(&other)) {
        return None;
    }
    let message = format!(
        "`{path}` matches only this path: the requests for all paths below it do not match `{}`, and its upstream has \
         no other route",
        route.name
    );
    Some(
        Issue::new(written.span(), message).with_hint(format!("write path = \"{path}{{*rest}}\" to match all of them")),
    )
}

/// Return whether clients choose the value of an identity freely, so that each request can have another one.
fn is_chosen_by_clients(descriptor: &Descriptor) -> bool {
    matches!(
        descriptor,
        Descriptor::Header(_)
            | Descriptor::Cookie(_)
            | Descriptor::Query(_)
            | Descriptor::Json(_)
            | Descriptor::Form(_)
            | Descriptor::ClaimedUser
    )
}

/// Return whether an identity is an address or comes from a verified credential or a trusted proxy.
fn is_bound_to_client(descriptor: &Descriptor) -> bool {
    matches!(
        descriptor,
        Descriptor::Ip
            | Descriptor::ApiKey
            | Descriptor::Group(_)
            | Descriptor::Jwt(_)
            | Descriptor::ClientCert
            | Descriptor::Basic
            | Descriptor::Forward(_)
            | Descriptor::User(_)
    )
}

/// Warn of a limit by a value that clients choose, on a route that has no limit by address or credential: a client that
/// changes the value with each request gets a new quota each time.
pub(super) fn chosen_identity(
    input: &LintInput<'_>,
    compiled: &CompiledLimit,
    routes: &[&Arc<Route>],
) -> Option<Issue> {
    let descriptors = &compiled.identity_spec.descriptors;
    let chosen = descriptors.iter().find(|descriptor| is_chosen_by_clients(descriptor))?;
    if compiled.limit.shadow {
        return None;
    }
    let is_bounding = |route: &Route| {
        route.rate_limits.limits.iter().any(|other| {
            let spec = &route.rate_limits.identities[other.identity_index];
            !other.limit.shadow
                && !spec.descriptors.iter().any(is_chosen_by_clients)
                && spec.descriptors.iter().any(is_bound_to_client)
        })
    };
    let route = routes.iter().find(|route| !is_bounding(route))?;
    let name = &compiled.limit.name;
    let message = format!(
        "`{name}` counts by {}, which clients choose: a client that changes it with each request of `{}` is not limited",
        chosen.label(),
        route.name
    );
    let hint = "verify keys with [auth.NAME] (kind = \"api-key\") and write by = \"api-key\", or add a limit by = \
                \"ip\" to the route";
    Some(Issue::new(input.span_of(name, |parsed| parsed.by.as_ref()), message).with_hint(hint))
}

/// Minimum length in bytes of a token that cannot be guessed: 16 hexadecimal digits are 64 random bits.
const MIN_TOKEN_LENGTH: usize = 16;

/// Texts that stand for a secret in examples, in lower case and without separators.
const PLACEHOLDERS: [&str; 14] = [
    "changeme",
    "replaceme",
    "placeholder",
    "yoursecret",
    "yourtoken",
    "mysecret",
    "mytoken",
    "supersecret",
    "secretsecret",
    "topsecret",
    "password",
    "insecure",
    "example",
    "123456",
];

/// Warn of an admin token that can be guessed, if other hosts can reach the admin listener.
pub(super) fn weak_token(input: &LintInput<'_>) -> Option<Issue> {
    let is_remote = |admin: &AdminSettings| !admin.address.ip().to_canonical().is_loopback();
    input.config.admin.as_ref().filter(|admin| is_remote(admin))?;
    let token = input.parsed.admin.as_ref()?.get_ref().token.as_ref().filter(|token| !token.get_ref().is_empty())?;
    let weakness = if is_placeholder(token) {
        "is a placeholder".to_owned()
    } else if token.get_ref().len() < MIN_TOKEN_LENGTH {
        format!("has fewer than {MIN_TOKEN_LENGTH} characters")
    } else {
        return None;
    };
    let message = format!("the admin token {weakness}: attackers who guess it can change quotas and the configuration");
    Some(
        Issue::new(token.span(), message)
            .with_hint("generate a token with openssl rand -hex 32, and write token = \"${SLUICEGATE_ADMIN_TOKEN}\""),
    )
}

/// Return whether a secret stands for another one, as in examples.
pub(super) fn is_placeholder(text: &Text) -> bool {
    let plain: String = text.get_ref().chars().filter(|c| c.is_ascii_alphanumeric()).collect();
    let plain = plain.to_ascii_lowercase();
    let is_repeated = plain.len() > 1 && plain.bytes().all(|byte| Some(&byte) == plain.as_bytes().first());
    is_repeated || PLACEHOLDERS.iter().any(|word| plain.contains(word))
}
