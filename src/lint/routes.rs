//! Warnings about routes: those that no request takes, and retries without time for them.

use http::Method;

use super::Whole;
use crate::config::error::Issue;
use crate::limit::redis::RedisDeployment;
use crate::runtime::{Route, RouteAction};
use crate::upstream::settings::UpstreamSettings;

pub(super) fn route_warnings(whole: &Whole<'_>) -> Vec<Issue> {
    let mut found: Vec<_> = overtaken(whole).collect();
    for route in &whole.runtime.routes {
        found.extend(unmatched(whole, route));
        found.extend(retries(whole, route));
    }
    found
}

/// Routes of which another one takes what they were written for.
fn overtaken<'a>(whole: &'a Whole<'_>) -> impl Iterator<Item = Issue> + 'a {
    whole.runtime.table.unreachable_routes().filter_map(|(route, other, methods)| {
        let written = whole.route(route.index)?;
        let methods: Vec<_> = methods.iter().map(Method::as_str).collect();
        let text = format!(
            "`{}` never gets {}: they go to `{}`, as routes that list methods come before those that do not, whatever their headers",
            route.name,
            methods.join(", "),
            other.name
        );
        let place = written.get_ref().name.as_ref().map_or(written.span(), |name| name.span());
        Some(Issue::new(place, text).with_hint(format!("methods = {methods:?} here as well: then the route with more headers comes first")))
    })
}

/// Routes that ask for what no request has.
fn unmatched(whole: &Whole<'_>, route: &Route) -> Vec<Issue> {
    let Some(written) = whole.route(route.index).map(|written| written.get_ref()) else { return Vec::new() };
    let mut found = Vec::new();
    let refused = |text: &str| matches!(text, "CONNECT" | "TRACE");
    let methods = written.methods.iter().flatten().filter(|text| refused(text.get_ref()));
    for text in methods {
        let message = format!("`{}` never gets {}: the gateway refuses it on all routes", route.name, text.get_ref());
        found.push(Issue::new(text.span(), message).with_hint("leave it out"));
    }
    for (name, value) in &written.headers {
        if value.get_ref().trim() != value.get_ref() {
            let message = format!("`{}` never matches: the value of a field has no spaces around it", route.name);
            found.push(Issue::new(value.span(), message).with_hint(format!("{name} = \"{}\"", value.get_ref().trim())));
        }
    }
    found
}

/// Retries for which a slow first attempt leaves no time.
fn retries(whole: &Whole<'_>, route: &Route) -> Option<Issue> {
    let (timeout, RouteAction::Forward(split)) = (route.timeout?, &route.action) else { return None };
    let slow = |upstream: &&UpstreamSettings| upstream.retries > 0 && upstream.response_timeout >= timeout;
    let upstreams = split.upstreams().filter_map(|index| whole.runtime.upstreams.get(index));
    let upstream = upstreams.map(|upstream| &**upstream).find(slow)?;
    let place = whole.route(route.index)?.get_ref().timeout.as_ref()?.span();
    let text = format!(
        "the first attempt may take all of the `timeout` of `{}`: no time is left for the `retries` of `{}`, whose `response_timeout` is {:?}",
        route.name, upstream.name, upstream.response_timeout
    );
    let attempts = upstream.retries + 1;
    Some(Issue::new(place, text).with_hint(format!(
        "response_timeout = \"{}ms\" leaves time for {attempts} attempts",
        (timeout / attempts).as_millis()
    )))
}

/// What a cluster makes of routes with several identities.
pub(super) fn route_notes(whole: &Whole<'_>) -> Vec<Issue> {
    let is_cluster = whole
        .runtime
        .store
        .redis
        .as_ref()
        .is_some_and(|(servers, _)| matches!(servers, RedisDeployment::Cluster { .. }));
    let several = whole.runtime.routes.iter().filter(|route| is_cluster && route.rate_limits.identities.len() > 1);
    let notes = several.map(|route| {
        let text = format!(
            "route `{}` is up to {} calls at the same time, as its identities are kept by several masters: a request \
             that one denies holds units of the others for about a round trip",
            route.name,
            route.rate_limits.identities.len()
        );
        Issue { span: whole.route(route.index).map(|written| written.span()), message: text, hint: None }
    });
    notes.collect()
}
