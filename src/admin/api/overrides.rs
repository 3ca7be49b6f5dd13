//! `/api/overrides`: other sizes for single identities, for a time.

use serde::{Deserialize, Serialize};
use tokio::time::Duration;

use super::Desk;
use super::identities::{Given, limit};
use super::{Answer, Query, Result, json, of_store, refused};
use crate::admin::problem::ApiError;
use crate::limit::algorithm::Rule;
use crate::limit::overrides::{MAX_OVERRIDES, Override, OverrideQuota};
use crate::limit::quota::{EXACT_INTEGER_LIMIT, parse_duration_us};

/// What is to last longer belongs into the configuration.
const LONGEST: Duration = Duration::from_secs(31 * 86_400);
/// Shorter than it takes until all gateways have it is of no use.
const SHORTEST: Duration = Duration::from_secs(5);

/// Bytes of a note.
const NOTE: usize = 200;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ToPut {
    limit: String,
    identity: Given,
    quota: String,
    burst: Option<u64>,
    #[serde(rename = "ttl")]
    lasts: String,
    note: Option<String>,
}

/// An override as it is shown.
#[derive(Debug, Serialize)]
pub(super) struct Shown {
    limit: String,
    identity: String,
    #[serde(flatten)]
    size: OverrideQuota,
    expires_in_seconds: u64,
}

impl Shown {
    pub(super) fn of(other: &Override) -> Self {
        Shown {
            limit: other.limit.name.to_string(),
            identity: other.identity.to_string(),
            size: other.quota.clone(),
            expires_in_seconds: other.ttl().as_millis().div_ceil(1000) as u64,
        }
    }
}

pub(super) async fn put(desk: &Desk<'_>, asked: ToPut) -> Result<Answer> {
    let ToPut { limit: name, identity, quota, burst, lasts, note } = asked;
    let terms = limit(desk, &name)?;
    let consumers = desk.runtime.consumers.load();
    let identity = identity.meant(terms, desk, &consumers)?.identity;
    if let Some(burst) = burst {
        if !matches!(terms.limit.default_variant.rule, Rule::TokenBucket(_)) {
            return Err(ApiError::bad("`burst` goes with token-bucket only"));
        }
        if !(1..EXACT_INTEGER_LIMIT).contains(&burst) {
            return Err(ApiError::bad("`burst` is 1 or more"));
        }
    }
    if note.as_ref().is_some_and(|note| note.len() > NOTE) {
        return Err(ApiError::bad(format!("`note` has at most {NOTE} bytes")));
    }
    let lasts =
        parse_duration_us(&lasts).map(Duration::from_micros).filter(|lasts| (SHORTEST..=LONGEST).contains(lasts));
    let lasts =
        lasts.ok_or_else(|| ApiError::bad("`ttl` is a duration from 5s to 31d: \"90s\", \"15m\", \"12h\", \"7d\""))?;
    let size = OverrideQuota { quota, burst, note };
    let new = desk.operator.put(&terms.limit, identity, size, lasts).await.map_err(|error| refused(&error))?;
    Ok(json(&serde_json::json!({ "override": Shown::of(&new) })))
}

pub(super) async fn all(desk: &Desk<'_>) -> Result<Answer> {
    let (mut all, error) = desk.operator.overrides().await;
    all.sort_by(|one, other| (&one.limit.name, one.identity.0).cmp(&(&other.limit.name, other.identity.0)));
    let shown: Vec<_> = all.iter().map(|each| Shown::of(each)).collect();
    let mut answer = serde_json::json!({ "max_overrides": MAX_OVERRIDES, "overrides": shown });
    if let Some(error) = error {
        answer["store_error"] = error.to_string().into();
    }
    Ok(json(&answer))
}

pub(super) async fn remove(desk: &Desk<'_>, mut query: Query) -> Result<Answer> {
    let name = query.take("limit").ok_or_else(|| ApiError::bad("`limit` is missing"))?;
    let terms = limit(desk, &name)?;
    let consumers = desk.runtime.consumers.load();
    let identity = Given::of(query)?.meant(terms, desk, &consumers)?.identity;
    let removed = desk.operator.remove(&terms.limit, identity).await.map_err(|error| of_store(&error))?;
    let answer = serde_json::json!({ "limit": name, "identity": identity.to_string(), "removed": removed });
    Ok(json(&answer))
}
