//! `/api/differences`: which keys of another configuration a reload would refuse.

use serde::Serialize;

use super::{Answer, Desk, Query, Result, json};
use crate::admin::problem::ApiError;

#[derive(Serialize)]
struct Differences {
    /// Keys that need a restart, in alphabetical order.
    restart: Vec<String>,
}

/// Compares the digests of the query, by the names of their keys, with those of the configuration in force. The caller chooses
/// the salt and learns names only: values may be secret.
pub(super) fn differences(desk: &Desk<'_>, mut query: Query) -> Result<Answer> {
    let salt = query.take("salt").ok_or_else(|| ApiError::bad("`salt` is missing"))?;
    let mut own = desk.runtime.restart_only_digests(&salt);
    let mut restart = Vec::new();
    for (key, digest) in query.0 {
        if own.remove(&key) != Some(digest) {
            restart.push(key);
        }
    }
    restart.extend(own.into_keys());
    restart.sort_unstable();
    Ok(json(&Differences { restart }))
}
