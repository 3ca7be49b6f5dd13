//! Which route takes a request, and why the others do not.

use http::{HeaderName, HeaderValue, Request};

use super::facts::{Other, Taken};
use crate::gateway::addressed::RequestTarget;
use crate::route::explain::{Candidate, MismatchReason};
use crate::runtime::{CompiledConfig, Route};

type Beside<'r> = Candidate<'r, std::sync::Arc<Route>>;

/// The route that takes it.
pub(super) fn taken(route: &Route) -> Taken {
    Taken { route: route.name.to_string(), path: route.path.to_string() }
}

/// The routes that do not take a request, the nearest of them first, up to `most`; and how many more there are.
pub(super) fn others(
    runtime: &CompiledConfig,
    request: &Request<()>,
    target: &RequestTarget<'_>,
    taken: Option<usize>,
    most: usize,
) -> (Vec<Other>, usize) {
    let (method, headers) = (request.method(), request.headers());
    let mut all = runtime.table.candidates(&target.host, &target.path, method, headers);
    all.sort_by_key(|candidate| (candidate.distance(), candidate.target.index));
    let (winner, others): (Vec<_>, Vec<_>) = all.into_iter().partition(|other| Some(other.target.index) == taken);
    let others_left_out = others.len().saturating_sub(most);
    let other = |other: &Beside<'_>| {
        let (fails, why) = why(other, winner.first());
        Other {
            route: other.target.name.to_string(),
            path: other.target.path.to_string(),
            mismatch: fails,
            reason: why,
        }
    };
    (others.iter().take(most).map(other).collect(), others_left_out)
}

/// The criterion, and what the route wants.
fn why(other: &Beside<'_>, winner: Option<&Beside<'_>>) -> (&'static str, String) {
    match other.mismatch {
        Some(MismatchReason::Host) => ("host", format!("it is for the host {}", other.host.as_deref().unwrap_or("*"))),
        Some(MismatchReason::Path) => ("path", format!("its path is {}", other.target.path)),
        Some(MismatchReason::Method) => ("method", format!("it is for {} only", methods(other))),
        Some(MismatchReason::Header(name)) => ("header", format!("it wants `{}`", wanted(other.headers, name))),
        None => ("specific", winner.map_or_else(String::new, |winner| less_specific(other, winner))),
    }
}

/// In what another route is more specific, where both match: hosts come before paths, and these before methods and fields.
fn less_specific(other: &Beside<'_>, winner: &Beside<'_>) -> String {
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

fn methods(other: &Beside<'_>) -> String {
    other.methods.iter().map(http::Method::as_str).collect::<Vec<_>>().join(", ")
}

fn wanted(headers: &[(HeaderName, HeaderValue)], name: &HeaderName) -> String {
    let value = headers.iter().find(|(wanted, _)| wanted == name).map(|(_, value)| value.as_bytes());
    format!("{name}: {}", String::from_utf8_lossy(value.unwrap_or_default()))
}
