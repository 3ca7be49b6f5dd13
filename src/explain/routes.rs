//! Which route takes a request, and why the others do not.

use http::{HeaderName, HeaderValue, Request};

use super::facts::{MatchedRoute, OtherRoute};
use crate::gateway::addressed::RequestTarget;
use crate::route::explain::{Candidate, MismatchReason};
use crate::runtime::{CompiledConfig, Route};

type RouteCandidate<'r> = Candidate<'r, std::sync::Arc<Route>>;

/// The route that takes it.
pub(super) fn matched_route(route: &Route) -> MatchedRoute {
    MatchedRoute { route: route.name.to_string(), path: route.path.to_string() }
}

/// The routes that do not take a request, the nearest of them first, up to `most`; and how many more there are.
pub(super) fn other_routes(
    config: &CompiledConfig,
    request: &Request<()>,
    target: &RequestTarget<'_>,
    route_index: Option<usize>,
    max: usize,
) -> (Vec<OtherRoute>, usize) {
    let (method, headers) = (request.method(), request.headers());
    let mut all = config.table.candidates(&target.host, &target.path, method, headers);
    all.sort_by_key(|candidate| (candidate.distance(), candidate.target.index));
    let (winner, others): (Vec<_>, Vec<_>) =
        all.into_iter().partition(|to_report| Some(to_report.target.index) == route_index);
    let others_left_out = others.len().saturating_sub(max);
    let other = |other: &RouteCandidate<'_>| {
        let (mismatch, reason) = mismatch_reason(other, winner.first());
        OtherRoute { route: other.target.name.to_string(), path: other.target.path.to_string(), mismatch, reason }
    };
    (others.iter().take(max).map(other).collect(), others_left_out)
}

/// The criterion, and what the route wants.
fn mismatch_reason(other: &RouteCandidate<'_>, winner: Option<&RouteCandidate<'_>>) -> (&'static str, String) {
    match other.mismatch {
        Some(MismatchReason::Host) => ("host", format!("it is for the host {}", other.host.as_deref().unwrap_or("*"))),
        Some(MismatchReason::Path) => ("path", format!("its path is {}", other.target.path)),
        Some(MismatchReason::Method) => ("method", format!("it is for {} only", method_list(other))),
        Some(MismatchReason::Header(name)) => {
            ("header", format!("it wants `{}`", required_header(other.headers, name)))
        }
        None => ("specific", winner.map_or_else(String::new, |winner| specificity_reason(other, winner))),
    }
}

/// In what another route is more specific, where both match: hosts come before paths, and these before methods and fields.
fn specificity_reason(other: &RouteCandidate<'_>, winner: &RouteCandidate<'_>) -> String {
    let better = &winner.target.name;
    if other.host != winner.host {
        return format!("it matches, but the host of {better} is more specific");
    }
    if !other.target.path_pattern.matches_same_paths(&winner.target.path_pattern) {
        return format!("it matches, but the path of {better} is more specific");
    }
    if other.methods.is_empty() != winner.methods.is_empty() {
        return format!("it matches, but {better} lists the method");
    }
    format!("it matches, but {better} wants more fields")
}

fn method_list(other: &RouteCandidate<'_>) -> String {
    other.methods.iter().map(http::Method::as_str).collect::<Vec<_>>().join(", ")
}

fn required_header(headers: &[(HeaderName, HeaderValue)], name: &HeaderName) -> String {
    let value = headers.iter().find(|(wanted, _)| wanted == name).map(|(_, value)| value.as_bytes());
    format!("{name}: {}", String::from_utf8_lossy(value.unwrap_or_default()))
}
