//! Requests to the admin listener: what their handlers need, query parameters, and JSON bodies.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{HeaderMap, Request, StatusCode};
use http_body_util::{BodyExt, Limited};
use hyper::body::Incoming;
use percent_encoding::percent_decode_str;
use serde::de::DeserializeOwned;
use tokio::time::timeout;

use crate::admin::connections::AdminConnection;
use crate::admin::events::EventStream;
use crate::admin::response::{ApiError, Result};
use crate::admin::state::ProcessState;
use crate::limiter::admin::LimiterAdmin;
use crate::snapshot::CompiledConfig;

/// Maximum size of a request body, in bytes.
const MAX_BODY_BYTES: usize = 16 * 1024;

/// Maximum time to receive a request body.
const BODY_TIMEOUT: Duration = Duration::from_secs(10);

/// The state that request handlers need.
pub(super) struct ApiContext<'a> {
    /// The configuration that was active when the request arrived.
    pub(super) config: &'a CompiledConfig,
    pub(super) state: &'a Arc<ProcessState>,
    pub(super) limiter_admin: &'a LimiterAdmin,
    pub(super) event_stream: &'a EventStream,
    /// The connection of the client.
    pub(super) connection: &'a Arc<AdminConnection>,
}

/// Decoded query parameters.
pub(super) struct QueryParams(pub(super) Vec<(String, String)>);

impl QueryParams {
    pub(super) fn parse(query: Option<&str>) -> Self {
        let decode = |text: &str| percent_decode_str(&text.replace('+', " ")).decode_utf8_lossy().into_owned();
        let pairs = query.unwrap_or_default().split('&').filter(|pair| !pair.is_empty());
        let pairs = pairs.map(|pair| pair.split_once('=').unwrap_or((pair, "")));
        QueryParams(pairs.map(|(name, value)| (decode(name), decode(value))).collect())
    }

    /// Remove a parameter from the query and return its value.
    pub(super) fn take(&mut self, name: &str) -> Option<String> {
        let index = self.0.iter().position(|(key, _)| key == name)?;
        Some(self.0.swap_remove(index).1)
    }

    /// Remove a numeric parameter from the query and return its value, or `default` if the query does not have it.
    ///
    /// # Errors
    /// The value is not a number in `range`.
    pub(super) fn number(&mut self, name: &str, range: std::ops::RangeInclusive<u64>, default: u64) -> Result<u64> {
        let Some(text) = self.take(name) else { return Ok(default) };
        text.parse().ok().filter(|number| range.contains(number)).ok_or_else(|| {
            ApiError::bad_request(format!("`{name}` must be an integer from {} to {}", range.start(), range.end()))
        })
    }
}

/// CSRF protection: require the content type `application/json`. Before a cross-origin request with this type, a browser
/// sends a CORS preflight, which the admin listener rejects.
pub(super) fn require_json(headers: &HeaderMap) -> Result<()> {
    let content_type = headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let media_type = content_type.split(';').next().unwrap_or_default().trim();
    if media_type.eq_ignore_ascii_case("application/json") {
        return Ok(());
    }
    Err(ApiError::new(
        StatusCode::UNSUPPORTED_MEDIA_TYPE,
        "requests with a body need the content type application/json",
    ))
}

pub(super) async fn read_json<T: DeserializeOwned>(request: Request<Incoming>) -> Result<T> {
    let on_timeout = |_| ApiError::new(StatusCode::REQUEST_TIMEOUT, "timed out waiting for the request body");
    let collected =
        timeout(BODY_TIMEOUT, Limited::new(request.into_body(), MAX_BODY_BYTES).collect()).await.map_err(on_timeout)?;
    let body: Bytes = match collected {
        Ok(body) => body.to_bytes(),
        Err(error) if error.is::<http_body_util::LengthLimitError>() => {
            return Err(ApiError::new(
                StatusCode::PAYLOAD_TOO_LARGE,
                format!("the request body exceeds {MAX_BODY_BYTES} bytes"),
            ));
        }
        Err(_) => return Err(ApiError::bad_request("the request body is incomplete")),
    };
    // Return only serde's messages about field names. Other messages of serde may quote values, which may be secrets.
    serde_json::from_slice(&body).map_err(|error| match error.classify() {
        serde_json::error::Category::Data if error.to_string().starts_with("unknown field") => {
            ApiError::bad_request(error.to_string())
        }
        serde_json::error::Category::Data if error.to_string().starts_with("missing field") => {
            ApiError::bad_request(error.to_string())
        }
        serde_json::error::Category::Data => ApiError::bad_request("a field has a value of the wrong type"),
        _ => ApiError::bad_request(format!("invalid JSON at line {} column {}", error.line(), error.column())),
    })
}

/// Maximum number of limits that an error message lists.
pub(super) const MAX_LISTED_LIMITS: usize = 20;

/// The error text for an unknown limit, with the names of the configured limits.
pub(super) fn unknown_limit(config: &CompiledConfig, name: &str) -> String {
    let limits = config.listed_limits();
    let listed = limits.keys().take(MAX_LISTED_LIMITS).map(|known| format!("`{known}`")).collect::<Vec<_>>().join(", ");
    match limits.len().saturating_sub(MAX_LISTED_LIMITS) {
        _ if limits.is_empty() => format!("unknown limit `{name}`: the configuration has no limits"),
        0 => format!("unknown limit `{name}`: the limits are {listed}"),
        more => format!("unknown limit `{name}`: the limits are {listed} and {more} more"),
    }
}
