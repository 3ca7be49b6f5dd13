//! Responses of the admin listener: text, JSON, and problem details (RFC 9457).

use std::convert::Infallible;

use bytes::Bytes;
use http::header::{ALLOW, CONTENT_TYPE, HeaderValue};
use http::{Response, StatusCode};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full};
use jiff::Timestamp;
use serde::Serialize;

use crate::http::problem;
use crate::http::problem::Problem;
use crate::limiter::verdict::StoreError;

/// A response of the admin listener.
pub(super) type AdminResponse = Response<UnsyncBoxBody<Bytes, Infallible>>;

pub(super) type Result<T> = std::result::Result<T, ApiError>;

pub(super) fn text_response(status: StatusCode, body: &str) -> AdminResponse {
    typed_response(status, "text/plain; charset=utf-8", body.to_owned())
}

pub(super) fn typed_response(status: StatusCode, content_type: &'static str, body: impl Into<Bytes>) -> AdminResponse {
    let mut response = Response::new(Full::new(body.into()).boxed_unsync());
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}

/// Return a response with a JSON body.
pub(super) fn json_response(status: StatusCode, body: &impl Serialize) -> AdminResponse {
    // Serialization cannot fail, because all map keys are strings.
    typed_response(status, "application/json", serde_json::to_string(body).unwrap_or_default() + "\n")
}

/// An error response of the API.
#[derive(Debug)]
pub(super) struct ApiError {
    pub(super) status: StatusCode,
    pub(super) detail: String,
    /// The `Allow` header of a 405 response.
    allow: Option<HeaderValue>,
}

impl ApiError {
    pub(super) fn new(status: StatusCode, detail: impl Into<String>) -> Self {
        ApiError { status, detail: detail.into(), allow: None }
    }

    /// Create a 400 response: the request is invalid.
    pub(super) fn bad_request(detail: impl Into<String>) -> Self {
        ApiError::new(StatusCode::BAD_REQUEST, detail)
    }

    /// Create a 405 response. `allowed` is the value of its `Allow` header.
    pub(super) fn method_not_allowed(allowed: &str) -> Self {
        // The conversion cannot fail, because method names are valid header values.
        let allow = HeaderValue::try_from(allowed).ok();
        let detail = format!("method not allowed: use {allowed}");
        ApiError { allow, ..ApiError::new(StatusCode::METHOD_NOT_ALLOWED, detail) }
    }

    pub(super) fn into_response(self) -> AdminResponse {
        let problem = Problem::new(self.status, &self.detail);
        let mut response = typed_response(self.status, problem::CONTENT_TYPE, problem.to_json());
        response.headers_mut().extend(self.allow.map(|allow| (ALLOW, allow)));
        response
    }
}

pub(super) fn store_error(error: &StoreError) -> ApiError {
    ApiError::new(StatusCode::SERVICE_UNAVAILABLE, error.to_string())
}

/// Convert µs to seconds, rounded up to the next ms, so that a client that waits this long does not retry too early.
pub(super) fn seconds_rounded_up(us: u64) -> f64 {
    us.div_ceil(1000) as f64 / 1000.0
}

/// Format µs since the Unix epoch as an RFC 3339 time. If the time is out of range, return the time of the epoch.
pub(super) fn format_rfc3339(us: u64) -> String {
    Timestamp::from_microsecond(us as i64).unwrap_or_default().to_string()
}
