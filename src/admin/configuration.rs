//! `/api/config` shows the active configuration. `/api/reload` reloads it.

use std::path::{Path, PathBuf};

use aws_lc_rs::digest::{SHA256, digest};
use data_encoding::HEXLOWER;
use http::StatusCode;
use serde::Serialize;
use serde_json::Value;

use crate::admin::current::{ConfigChange, FileKind, ReloadCause, ReloadFailure};
use crate::admin::request::ApiContext;
use crate::admin::response::{AdminResponse, format_rfc3339, json_response};
use crate::clock::unix_us;
use crate::config::include::ConfigFiles;

/// Response body of `/api/config`.
#[derive(Debug, Serialize)]
struct ConfigView {
    /// Absolute path of the configuration file.
    file: String,
    /// Absolute paths of the files that the configuration includes.
    included: Vec<String>,
    /// Addresses of the listeners and of the admin listener.
    addresses: Vec<String>,
    /// Time at which the configuration became active, in RFC 3339.
    loaded_at: String,
    /// The first bytes of the SHA-256 hash of `configuration`, in hexadecimal digits.
    revision: String,
    /// Number of reloads since the start of the process.
    reloads: ReloadCounts,
    /// The error of the last reload. `None` if the last reload succeeded.
    last_error: Option<LastError>,
    /// The files whose newest content is not in use.
    rejected_files: Vec<RejectedFile>,
    /// The warnings about the configuration, each with its file and line.
    warnings: Vec<String>,
    /// The configuration as JSON. It contains the tables of included files. Secrets are redacted.
    configuration: Value,
}

#[derive(Debug, Serialize)]
struct ReloadCounts {
    ok: u64,
    error: u64,
}

#[derive(Debug, Serialize)]
struct RejectedFile {
    kind: &'static str,
    file: String,
    time: String,
    error: String,
}

#[derive(Debug, Serialize)]
struct LastError {
    time: String,
    error: String,
}

/// Response body of `/api/reload`.
#[derive(Debug, Serialize)]
struct ReloadResponse {
    result: &'static str,
    /// Absolute path of the configuration file.
    file: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
    /// The changes of the most recent reload that changed a key, as text. Usually this request caused that reload, but
    /// the file watcher may have reloaded the file shortly before.
    #[serde(skip_serializing_if = "Option::is_none")]
    changes: Option<Vec<String>>,
    /// Seconds since the most recent reload that changed a key. `None` if no reload has changed a key.
    #[serde(skip_serializing_if = "Option::is_none")]
    changed_seconds_ago: Option<f64>,
}

/// Return the active configuration.
pub(super) fn config_view(context: &ApiContext<'_>) -> AdminResponse {
    let active = context.state.config_handle.active();
    let ConfigFiles { main, included, .. } = &active.config.files;
    let configuration = active.config.redacted();
    let last_error = context.state.config_handle.last_failure();
    let last_error =
        last_error.map(|ReloadFailure { error, failed_at_us: at_us }| LastError { time: format_rfc3339(at_us), error });
    let file = absolute_path(&main.path);
    let included = included.iter().map(|file| absolute_path(&file.path)).collect();
    let loaded_at = format_rfc3339(active.active_since_us);
    let admin = active.config.admin.iter().map(|admin| admin.address.to_string());
    let addresses = active.config.listeners.iter().map(|listener| listener.address.to_string()).chain(admin).collect();
    let [ok, error] = context.state.config_handle.reload_counts();
    let view = ConfigView {
        file,
        included,
        addresses,
        loaded_at,
        revision: revision(&configuration),
        reloads: ReloadCounts { ok, error },
        last_error,
        rejected_files: rejected_files(context),
        warnings: context.state.config_handle.warnings().to_vec(),
        configuration,
    };
    json_response(StatusCode::OK, &view)
}

fn rejected_files(context: &ApiContext<'_>) -> Vec<RejectedFile> {
    let rejected = context.state.config_handle.rejected_files().into_iter();
    let view = |((kind, path), ReloadFailure { error, failed_at_us }): ((FileKind, PathBuf), ReloadFailure)| {
        RejectedFile { kind: kind.label(), file: absolute_path(&path), time: format_rfc3339(failed_at_us), error }
    };
    rejected.map(view).collect()
}

/// Reload the configuration file and return the result.
pub(super) async fn reload(context: &ApiContext<'_>) -> AdminResponse {
    let file = absolute_path(&context.state.config_handle.active().config.files.main.path);
    let (status, result) = match context.state.config_handle.reload(ReloadCause::Requested).await {
        Ok(Ok(change)) => (StatusCode::OK, Ok(change)),
        Ok(Err(error)) => (StatusCode::UNPROCESSABLE_ENTITY, Err(error)),
        Err(_) => (StatusCode::SERVICE_UNAVAILABLE, Err("the gateway is stopping".to_owned())),
    };
    let response = match result {
        Ok(ConfigChange { differences, at_us }) => ReloadResponse {
            result: "ok",
            file,
            error: None,
            changes: Some(differences.to_vec()),
            changed_seconds_ago: (at_us > 0).then(|| unix_us().saturating_sub(at_us) as f64 / 1e6),
        },
        Err(error) => {
            ReloadResponse { result: "error", file, error: Some(error), changes: None, changed_seconds_ago: None }
        }
    };
    json_response(status, &response)
}

/// Number of bytes of a revision. Six bytes are sufficient to distinguish the configurations of many gateways.
const REVISION_BYTES: usize = 6;

/// Return the hash of a configuration with redacted secrets. Gateways whose configurations differ only in secrets have
/// the same hash.
fn revision(redacted: &Value) -> String {
    let hash = digest(&SHA256, redacted.to_string().as_bytes());
    HEXLOWER.encode(&hash.as_ref()[..REVISION_BYTES])
}

/// Return the absolute path of a file whose path may be relative to the working directory of the gateway.
pub(super) fn absolute_path(path: &Path) -> String {
    std::path::absolute(path).map_or_else(|_| path.display().to_string(), |path| path.display().to_string())
}
