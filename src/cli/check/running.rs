//! What a reload of the running gateway would refuse: keys whose values need a restart.

use std::ops::Range;
use std::path::Path;

use http::Method;
use serde_json::Value;
use tokio::time::Duration;
use toml::Spanned;
use toml::de::{DeTable, DeValue};
use uuid::Uuid;

use crate::cli::operate::{AdminClient, request_target};
use crate::config::Config;
use crate::config::error::Issue;
use crate::runtime::CompiledConfig;

/// Maximum time to ask the gateway. A file can be valid while no gateway runs.
const ADMIN_TIMEOUT: Duration = Duration::from_secs(1);

/// The names of restart-only keys that differ from those of the gateway at `[admin]`; none if no gateway answers there.
///
/// # Errors
/// The gateway refuses the token.
pub(super) fn restart_only_differences(path: &Path, config: &CompiledConfig) -> anyhow::Result<Vec<String>> {
    if config.admin.is_none() {
        return Ok(Vec::new());
    }
    let salt = Uuid::new_v4().to_string();
    let mut query: Vec<_> = config.restart_only_digests(&salt).into_iter().collect();
    query.push(("salt".to_owned(), salt));
    let query: Vec<_> = query.iter().map(|(name, value)| (&**name, &**value)).collect();
    let client = AdminClient::from_config(path, config)?;
    let response = client.try_request(ADMIN_TIMEOUT, &Method::GET, &request_target("/api/differences", &query))?;
    let keys = response.as_ref().and_then(|response| response["restart"].as_array()).into_iter().flatten();
    Ok(keys.filter_map(Value::as_str).map(str::to_owned).collect())
}

/// The warning about a key.
pub(super) fn restart_required_warning(key: &str, parsed: &Config, text: &str) -> Issue {
    let message = format!("a reload will refuse this: `{key}` differs from the running gateway");
    let span = match key {
        "listener.address" => parsed.listener.first().map(|listener| listener.span()),
        key => key_span(key, text),
    };
    Issue { span, message, hint: Some("restart the gateway, or leave the key as it was".to_owned()) }
}

/// The place of a key, else of its table, in the file.
fn key_span(key: &str, text: &str) -> Option<Range<usize>> {
    let file = DeTable::parse(text).ok()?;
    let (table, key) = key.split_once('.')?;
    let table: &Spanned<DeValue<'_>> = file.get_ref().get(table)?;
    let value = table.get_ref().as_table().and_then(|table| table.get(key));
    Some(value.unwrap_or(table).span())
}
