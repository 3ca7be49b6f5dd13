//! Warnings about routes: those that no request takes, and retries without time for them.

use http::Method;

use super::LintInput;
use crate::config::error::Issue;
use crate::limit::redis::RedisDeployment;
use crate::runtime::{Route, RouteAction};
use crate::upstream::settings::UpstreamSettings;

pub(super) fn route_warnings(input: &LintInput<'_>) -> Vec<Issue> {
    let mut issues: Vec<_> = unreachable_methods(input).collect();
    for route in &input.config.routes {
        issues.extend(unmatchable_conditions(input, route));
        issues.extend(retries_without_time(input, route));
    }
    issues
}

/// Routes of which another one takes what they were written for.
fn unreachable_methods<'a>(input: &'a LintInput<'_>) -> impl Iterator<Item = Issue> + 'a {
    input.config.table.unreachable_routes().filter_map(|(route, other, methods)| {
        let parsed = input.route(route.index)?;
        let methods: Vec<_> = methods.iter().map(Method::as_str).collect();
        let message = format!(
            "`{}` never gets {}: they go to `{}`, as routes that list methods come before those that do not, whatever their headers",
            route.name,
            methods.join(", "),
            other.name
        );
        let span = parsed.get_ref().name.as_ref().map_or(parsed.span(), |name| name.span());
        Some(Issue::new(span, message).with_hint(format!("methods = {methods:?} here as well: then the route with more headers comes first")))
    })
}

/// Routes that ask for what no request has.
fn unmatchable_conditions(input: &LintInput<'_>, route: &Route) -> Vec<Issue> {
    let Some(parsed) = input.route(route.index).map(|parsed| parsed.get_ref()) else { return Vec::new() };
    let mut issues = Vec::new();
    let is_refused = |text: &str| matches!(text, "CONNECT" | "TRACE");
    let methods = parsed.methods.iter().flatten().filter(|text| is_refused(text.get_ref()));
    for text in methods {
        let message = format!("`{}` never gets {}: the gateway refuses it on all routes", route.name, text.get_ref());
        issues.push(Issue::new(text.span(), message).with_hint("leave it out"));
    }
    for (name, value) in &parsed.headers {
        if value.get_ref().trim() != value.get_ref() {
            let message = format!("`{}` never matches: the value of a field has no spaces around it", route.name);
            issues
                .push(Issue::new(value.span(), message).with_hint(format!("{name} = \"{}\"", value.get_ref().trim())));
        }
    }
    issues
}

/// Retries for which a slow first attempt leaves no time.
fn retries_without_time(input: &LintInput<'_>, route: &Route) -> Option<Issue> {
    let (timeout, RouteAction::Forward(weighted_upstreams)) = (route.timeout?, &route.action) else { return None };
    let is_slow = |upstream: &&UpstreamSettings| upstream.retries > 0 && upstream.response_timeout >= timeout;
    let upstreams = weighted_upstreams.upstreams().filter_map(|index| input.config.upstreams.get(index));
    let upstream = upstreams.map(|upstream| &**upstream).find(is_slow)?;
    let span = input.route(route.index)?.get_ref().timeout.as_ref()?.span();
    let message = format!(
        "the first attempt may take all of the `timeout` of `{}`: no time is left for the `retries` of `{}`, whose `response_timeout` is {:?}",
        route.name, upstream.name, upstream.response_timeout
    );
    let attempts = upstream.retries + 1;
    Some(Issue::new(span, message).with_hint(format!(
        "response_timeout = \"{}ms\" leaves time for {attempts} attempts",
        (timeout / attempts).as_millis()
    )))
}

/// What a cluster makes of routes with several identities.
pub(super) fn route_notes(input: &LintInput<'_>) -> Vec<Issue> {
    let is_cluster = input
        .config
        .store
        .redis
        .as_ref()
        .is_some_and(|(servers, _)| matches!(servers, RedisDeployment::Cluster { .. }));
    let affected_routes =
        input.config.routes.iter().filter(|route| is_cluster && route.rate_limits.identities.len() > 1);
    let notes = affected_routes.map(|route| {
        let message = format!(
            "route `{}` is up to {} calls at the same time, as its identities are kept by several masters: a request \
             that one denies holds units of the others for about a round trip",
            route.name,
            route.rate_limits.identities.len()
        );
        Issue { span: input.route(route.index).map(|parsed| parsed.span()), message, hint: None }
    });
    notes.collect()
}
