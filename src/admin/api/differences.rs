//! `/api/differences`: which keys of another configuration a reload would refuse.

use serde::Serialize;

use super::{AdminResponse, ApiContext, QueryParams, Result, json_response};
use crate::admin::problem::ApiError;

#[derive(Serialize)]
struct Differences {
    /// Keys that need a restart, in alphabetical order.
    restart: Vec<String>,
}

/// Compares the digests of the query, by the names of their keys, with those of the configuration in force. The caller chooses
/// the salt and learns names only: values may be secret.
pub(super) fn differences(context: &ApiContext<'_>, mut query: QueryParams) -> Result<AdminResponse> {
    let salt = query.take("salt").ok_or_else(|| ApiError::bad_request("`salt` is missing"))?;
    let mut active_digests = context.config.restart_only_digests(&salt);
    let mut restart = Vec::new();
    for (key, digest) in query.0 {
        if active_digests.remove(&key) != Some(digest) {
            restart.push(key);
        }
    }
    restart.extend(active_digests.into_keys());
    restart.sort_unstable();
    Ok(json_response(&Differences { restart }))
}
