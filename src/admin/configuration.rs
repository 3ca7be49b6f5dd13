//! `/api/config` and `/api/reload`: what is in force, since when, and how to have the file read again.

use http::{HeaderMap, StatusCode};
use jiff::Timestamp;
use serde::Serialize;
use serde_json::Value;

use super::{Admin, Answer, of_type};
use crate::config::shown::redacted_config;
use crate::reload::configuration::{ReloadCause, ReloadFailure};

/// `/api/config`
#[derive(Debug, Serialize)]
struct Shown {
    file: String,
    /// RFC 3339.
    loaded_at: String,
    /// What is wrong with the file, if the last reload failed.
    last_error: Option<Error>,
    /// As it is written, without its secrets.
    configuration: Value,
}

#[derive(Debug, Serialize)]
struct Error {
    time: String,
    error: String,
}

/// `/api/reload`
#[derive(Debug, Serialize)]
struct Outcome {
    result: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

impl Admin {
    pub(super) fn configuration(&self) -> Answer {
        let running = self.vitals.configuration.active();
        let file = &running.config.file;
        // It was read as such.
        let configuration = redacted_config(&String::from_utf8_lossy(&file.content)).unwrap_or_default();
        let last_error = self.vitals.configuration.last_failure();
        let last_error =
            last_error.map(|ReloadFailure { error, failed_at_us: at_us }| Error { time: instant(at_us), error });
        let (file, since) = (file.path.display().to_string(), instant(running.active_since_us));
        json(StatusCode::OK, &Shown { file, loaded_at: since, last_error, configuration })
    }

    /// Has the file read again, and answers when that is done.
    pub(super) async fn reload(&self, headers: &HeaderMap) -> Answer {
        if let Err(problem) = self.may_write(headers) {
            return problem.into_answer();
        }
        match self.vitals.configuration.reload(ReloadCause::Requested).await {
            Ok(Ok(())) => json(StatusCode::OK, &Outcome { result: "ok", error: None }),
            Ok(Err(error)) => json(StatusCode::UNPROCESSABLE_ENTITY, &Outcome { result: "error", error: Some(error) }),
            Err(_) => {
                let error = Some("the gateway is stopping".to_owned());
                json(StatusCode::SERVICE_UNAVAILABLE, &Outcome { result: "error", error })
            }
        }
    }
}

fn json(status: StatusCode, body: &impl Serialize) -> Answer {
    // Strings always serialise.
    of_type(status, "application/json", serde_json::to_string(body).unwrap_or_default() + "\n")
}

/// In RFC 3339; a clock that is out of its range counts as not set.
pub(super) fn instant(us: u64) -> String {
    Timestamp::from_microsecond(us as i64).unwrap_or_default().to_string()
}
