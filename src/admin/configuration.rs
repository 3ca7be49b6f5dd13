//! `/api/config` and `/api/reload`: the active configuration, and a reload on request.

use http::{HeaderMap, StatusCode};
use jiff::Timestamp;
use serde::Serialize;
use serde_json::Value;

use crate::admin::{AdminResponse, AdminServer, typed_response};
use crate::config::include::ConfigFiles;
use crate::config::redact::redacted_config;
use crate::snapshot::current::{ReloadCause, ReloadFailure};

/// Response body of `/api/config`.
#[derive(Debug, Serialize)]
struct ConfigView {
    file: String,
    /// The files that it includes.
    included: Vec<String>,
    /// When the configuration became active, in RFC 3339.
    loaded_at: String,
    /// The error of the last reload, if it failed.
    last_error: Option<LastError>,
    /// The configuration as JSON, with the tables of included files, and with secrets redacted.
    configuration: Value,
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
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

impl AdminServer {
    pub(super) fn config_view(&self) -> AdminResponse {
        let active = self.state.config_handle.active();
        let ConfigFiles { main, included, .. } = &active.config.files;
        // Always UTF-8 and valid TOML: the active configuration was compiled from them.
        let texts = std::iter::once(main).chain(included).map(|file| String::from_utf8_lossy(&file.content));
        let configuration = redacted_config(texts).unwrap_or_default();
        let last_error = self.state.config_handle.last_failure();
        let last_error = last_error
            .map(|ReloadFailure { error, failed_at_us: at_us }| LastError { time: format_rfc3339(at_us), error });
        let file = main.path.display().to_string();
        let included = included.iter().map(|file| file.path.display().to_string()).collect();
        let loaded_at = format_rfc3339(active.active_since_us);
        json_response(StatusCode::OK, &ConfigView { file, included, loaded_at, last_error, configuration })
    }

    /// Reload the configuration file and return the result.
    pub(super) async fn reload(&self, headers: &HeaderMap) -> AdminResponse {
        if let Err(error) = self.authorize_write(headers) {
            return error.into_response();
        }
        match self.state.config_handle.reload(ReloadCause::Requested).await {
            Ok(Ok(())) => json_response(StatusCode::OK, &ReloadResponse { result: "ok", error: None }),
            Ok(Err(error)) => {
                json_response(StatusCode::UNPROCESSABLE_ENTITY, &ReloadResponse { result: "error", error: Some(error) })
            }
            Err(_) => {
                let error = Some("the gateway is stopping".to_owned());
                json_response(StatusCode::SERVICE_UNAVAILABLE, &ReloadResponse { result: "error", error })
            }
        }
    }
}

fn json_response(status: StatusCode, body: &impl Serialize) -> AdminResponse {
    // Strings always serialize.
    typed_response(status, "application/json", serde_json::to_string(body).unwrap_or_default() + "\n")
}

/// Format µs since the Unix epoch in RFC 3339. A time out of range becomes the epoch.
pub(super) fn format_rfc3339(us: u64) -> String {
    Timestamp::from_microsecond(us as i64).unwrap_or_default().to_string()
}
