//! `/api/top`: who is being limited now.

use serde::{Serialize, Serializer};

use super::ApiContext;
use super::{AdminResponse, QueryParams, Result, json_response};
use crate::admin::problem::ApiError;
use crate::gateway::denied::{TopDenied, WINDOW};
use crate::identity::name::IdentityDisplay;
use crate::limit::clock::monotonic;

/// Identities of each limit, if nothing else is said, and at most.
const DEFAULT_COUNT: u64 = 10;
const MAX_COUNT: u64 = 96;

#[derive(Serialize)]
struct TopResponse<'a> {
    window_seconds: u64,
    limits: Vec<DeniedByLimit<'a>>,
}

#[derive(Serialize)]
struct DeniedByLimit<'a> {
    limit: &'a str,
    shadow: bool,
    denied: u64,
    identities: Vec<DeniedIdentity>,
}

#[derive(Serialize)]
struct DeniedIdentity {
    identity: String,
    #[serde(serialize_with = "parts")]
    parts: IdentityDisplay,
    denied_at_least: u64,
    denied_at_most: u64,
}

fn parts<S: Serializer>(name: &IdentityDisplay, serializer: S) -> std::result::Result<S::Ok, S::Error> {
    serializer.collect_map(name.0.iter().map(|part| (&part.label, &part.value)))
}

pub(super) fn top_denied(context: &ApiContext<'_>, mut query: QueryParams) -> Result<AdminResponse> {
    let count = query.number("count", 1..=MAX_COUNT, DEFAULT_COUNT)?;
    let limit_name = query.take("limit");
    if let Some((name, _)) = query.0.first() {
        return Err(ApiError::bad_request(format!("unknown parameter `{name}`; known here: limit, count")));
    }
    let limits = &context.config.limits;
    if limit_name.as_ref().is_some_and(|limit_name| !limits.contains_key(limit_name)) {
        return Err(ApiError::bad_request("there is no such limit"));
    }
    let top_denied = context.state.request_metrics.top_denied.all();
    let workers =
        |name: &str| top_denied.iter().find(|(limit, _)| **limit == *name).map_or(&[][..], |(_, workers)| workers);
    let now = monotonic();
    let selected = limits.iter().filter(|(name, _)| limit_name.as_ref().is_none_or(|name_filter| name_filter == *name));
    let limits = selected.map(|(name, compiled)| {
        let (denied, heavy_hitters) = TopDenied::top(workers(name), now, count as usize);
        let identities = heavy_hitters.into_iter().map(|heavy_hitter| DeniedIdentity {
            identity: heavy_hitter.identity.to_string(),
            parts: heavy_hitter.name,
            denied_at_least: heavy_hitter.lower_bound,
            denied_at_most: heavy_hitter.upper_bound,
        });
        DeniedByLimit { limit: name, shadow: compiled.limit.shadow, denied, identities: identities.collect() }
    });
    Ok(json_response(&TopResponse { window_seconds: WINDOW.as_secs(), limits: limits.collect() }))
}
