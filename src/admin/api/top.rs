//! `/api/top`: who is being limited now.

use serde::{Serialize, Serializer};

use super::Desk;
use super::{Answer, Query, Result, json};
use crate::admin::problem::ApiError;
use crate::gateway::denied::{TopDenied, WINDOW};
use crate::identity::name::IdentityDisplay;
use crate::limit::clock::monotonic;

/// Identities of each limit, if nothing else is said, and at most.
const COUNT: u64 = 10;
const MOST: u64 = 96;

#[derive(Serialize)]
struct Top<'a> {
    window_seconds: u64,
    limits: Vec<OfLimit<'a>>,
}

#[derive(Serialize)]
struct OfLimit<'a> {
    limit: &'a str,
    shadow: bool,
    denied: u64,
    identities: Vec<OfIdentity>,
}

#[derive(Serialize)]
struct OfIdentity {
    identity: String,
    #[serde(serialize_with = "parts")]
    parts: IdentityDisplay,
    denied_at_least: u64,
    denied_at_most: u64,
}

fn parts<S: Serializer>(name: &IdentityDisplay, serializer: S) -> std::result::Result<S::Ok, S::Error> {
    serializer.collect_map(name.0.iter().map(|part| (&part.label, &part.value)))
}

pub(super) fn top(desk: &Desk<'_>, mut query: Query) -> Result<Answer> {
    let count = query.number("count", 1..=MOST, COUNT)?;
    let only = query.take("limit");
    if let Some((name, _)) = query.0.first() {
        return Err(ApiError::bad(format!("unknown parameter `{name}`; known here: limit, count")));
    }
    let limits = &desk.runtime.limits;
    if only.as_ref().is_some_and(|only| !limits.contains_key(only)) {
        return Err(ApiError::bad("there is no such limit"));
    }
    let denied = desk.vitals.tallies.top_denied.all();
    let workers = |name: &str| denied.iter().find(|(of, _)| **of == *name).map_or(&[][..], |(_, workers)| workers);
    let now = monotonic();
    let chosen = limits.iter().filter(|(name, _)| only.as_ref().is_none_or(|only| only == *name));
    let limits = chosen.map(|(name, terms)| {
        let (denied, often) = TopDenied::top(workers(name), now, count as usize);
        let identities = often.into_iter().map(|often| OfIdentity {
            identity: often.identity.to_string(),
            parts: often.name,
            denied_at_least: often.lower_bound,
            denied_at_most: often.upper_bound,
        });
        OfLimit { limit: name, shadow: terms.limit.shadow, denied, identities: identities.collect() }
    });
    Ok(json(&Top { window_seconds: WINDOW.as_secs(), limits: limits.collect() }))
}
