//! `/api/overrides`: list, set and remove temporary quota overrides of single identities.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::admin::AdminResponse;
use crate::admin::api::identities::{IdentityQuery, find_limit};
use crate::admin::api::{ApiContext, ApiError, QueryParams, Result, admin_error, json_response, store_error};
use crate::limiter::algorithm::Rule;
use crate::limiter::overrides::{MAX_OVERRIDES, Override, OverrideQuota};
use crate::limiter::quota::{EXACT_INTEGER_LIMIT, parse_duration_us};

/// Maximum `ttl`. Longer overrides belong in the configuration.
const MAX_TTL: Duration = Duration::from_secs(31 * 86_400);
/// Minimum `ttl`: other gateways need some seconds to read an override.
const MIN_TTL: Duration = Duration::from_secs(5);

/// Maximum length of `note`, in bytes.
const MAX_NOTE_BYTES: usize = 200;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PutOverride {
    limit: String,
    identity: IdentityQuery,
    quota: String,
    burst: Option<u64>,
    #[serde(rename = "ttl")]
    ttl: String,
    note: Option<String>,
}

/// An override in responses.
#[derive(Debug, Serialize)]
pub(super) struct OverrideView {
    limit: String,
    identity: String,
    #[serde(flatten)]
    quota: OverrideQuota,
    expires_in_seconds: u64,
}

impl OverrideView {
    pub(super) fn from_override(entry: &Override) -> Self {
        OverrideView {
            limit: entry.limit.name.to_string(),
            identity: entry.identity.to_string(),
            quota: entry.quota.clone(),
            expires_in_seconds: entry.ttl().as_millis().div_ceil(1000) as u64,
        }
    }
}

pub(super) async fn put_override(context: &ApiContext<'_>, request: PutOverride) -> Result<AdminResponse> {
    let PutOverride { limit: name, identity, quota, burst, ttl, note } = request;
    let compiled = find_limit(context, &name)?;
    let consumers = context.config.auth.consumers();
    let identity = identity.resolve(compiled, context, &consumers)?.identity;
    if let Some(burst) = burst {
        if !matches!(compiled.limit.default_variant.rule, Rule::TokenBucket(_)) {
            return Err(ApiError::bad_request("`burst` is allowed for token-bucket limits only"));
        }
        if !(1..EXACT_INTEGER_LIMIT).contains(&burst) {
            return Err(ApiError::bad_request(format!("`burst` must be from 1 to {}", EXACT_INTEGER_LIMIT - 1)));
        }
    }
    if note.as_ref().is_some_and(|note| note.len() > MAX_NOTE_BYTES) {
        return Err(ApiError::bad_request(format!("`note` must not exceed {MAX_NOTE_BYTES} bytes")));
    }
    let ttl = parse_duration_us(&ttl).map(Duration::from_micros).filter(|ttl| (MIN_TTL..=MAX_TTL).contains(ttl));
    let ttl = ttl.ok_or_else(|| {
        ApiError::bad_request("`ttl` must be a duration from 5s to 31d, such as \"90s\", \"15m\", \"12h\" or \"7d\"")
    })?;
    let override_quota = OverrideQuota { quota, burst, note };
    let entry = context
        .limiter_admin
        .put(&compiled.limit, identity, override_quota, ttl)
        .await
        .map_err(|error| admin_error(&error))?;
    Ok(json_response(&serde_json::json!({ "override": OverrideView::from_override(&entry) })))
}

pub(super) async fn list_overrides(context: &ApiContext<'_>) -> Result<AdminResponse> {
    let (mut entries, error) = context.limiter_admin.overrides().await;
    entries.sort_by(|left, right| (&left.limit.name, left.identity.0).cmp(&(&right.limit.name, right.identity.0)));
    let views: Vec<_> = entries.iter().map(|entry| OverrideView::from_override(entry)).collect();
    let mut response = serde_json::json!({ "max_overrides": MAX_OVERRIDES, "overrides": views });
    if let Some(error) = error {
        response["store_error"] = error.to_string().into();
    }
    Ok(json_response(&response))
}

pub(super) async fn remove_override(context: &ApiContext<'_>, mut query: QueryParams) -> Result<AdminResponse> {
    let name = query.take("limit").ok_or_else(|| ApiError::bad_request("`limit` is missing"))?;
    let compiled = find_limit(context, &name)?;
    let consumers = context.config.auth.consumers();
    let identity = IdentityQuery::from_query(query)?.resolve(compiled, context, &consumers)?.identity;
    let removed = context.limiter_admin.remove(&compiled.limit, identity).await.map_err(|error| store_error(&error))?;
    let response = serde_json::json!({ "limit": name, "identity": identity.to_string(), "removed": removed });
    Ok(json_response(&response))
}
