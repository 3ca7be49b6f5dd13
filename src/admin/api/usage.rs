//! `/api/usage`: usage totals of limits by day, month, identity or model.

use http::StatusCode;
use jiff::civil::Date;

use crate::admin::AdminResponse;
use crate::admin::api::identities::IdentityQuery;
use crate::admin::api::{ApiContext, ApiError, QueryParams, Result, json_response, store_error, unknown_limit};
use crate::admin::usage::{FilterError, GroupBy, IdentityFilter, UsageFilter, UsageReport};
use crate::limiter::clock::unix_us;
use crate::limiter::key::Identity;
use crate::limiter::store::UsageError;

/// Maximum number of totals in a response. Each total needs about 130 bytes.
const MAX_ROWS: usize = 50_000;

pub(super) async fn usage(context: &ApiContext<'_>, mut query: QueryParams) -> Result<AdminResponse> {
    let by = match query.take("by") {
        None => GroupBy::Day,
        Some(name) => GroupBy::from_name(&name)
            .ok_or_else(|| ApiError::bad_request(format!("`by` must be one of {}", GroupBy::NAMES.join(", "))))?,
    };
    let [from, to] = ["from", "to"].map(|name| date(&mut query, name));
    let limit = query.take("limit");
    let identity = match IdentityQuery::from_query(query)? {
        IdentityQuery::Parts(parts) if parts.is_empty() => None,
        IdentityQuery::Parts(parts) => Some(IdentityFilter::Parts(parts)),
        IdentityQuery::Hash(hash) => {
            let invalid = || ApiError::bad_request("`identity` must be 32 hexadecimal digits, as in Redis keys");
            Some(IdentityFilter::Hash(Identity::from_hex(&hash).ok_or_else(invalid)?))
        }
    };
    let filter = UsageFilter { limit, identity, from: from?, to: to? };
    let usage_query = filter.query(context.config, by, unix_us(), MAX_ROWS).map_err(|error| match error {
        FilterError::UnknownLimit(name) => ApiError::new(StatusCode::NOT_FOUND, unknown_limit(context.config, &name)),
        FilterError::NoUsage | FilterError::EmptyRange { .. } | FilterError::Identity(_) => {
            ApiError::bad_request(error.to_string())
        }
    })?;
    let rows = context.limiter_admin.usage(&usage_query).await.map_err(|error| match error {
        UsageError::Store(error) => store_error(&error),
        UsageError::TooMany(_) => {
            ApiError::bad_request(format!("{error}: select fewer totals with `limit`, `from`, `to` or an identity"))
        }
    })?;
    Ok(json_response(&UsageReport::new(context.config, &usage_query, &filter, rows, by)))
}

fn date(query: &mut QueryParams, name: &str) -> Result<Option<Date>> {
    let Some(text) = query.take(name) else { return Ok(None) };
    let date =
        text.parse().map_err(|_| ApiError::bad_request(format!("`{name}` must be a date such as 2026-11-23")))?;
    Ok(Some(date))
}
