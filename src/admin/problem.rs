//! Why the operator does not get what he asked for: a problem document (RFC 9457).

use http::StatusCode;

use super::{AdminResponse, typed_response};

/// What is said instead of an answer.
#[derive(Debug)]
pub(super) struct ApiError {
    pub(super) status: StatusCode,
    pub(super) detail: String,
}

impl ApiError {
    pub(super) fn new(status: StatusCode, detail: impl Into<String>) -> Self {
        ApiError { status, detail: detail.into() }
    }

    /// What is asked for cannot be understood.
    pub(super) fn bad_request(detail: impl Into<String>) -> Self {
        ApiError::new(StatusCode::BAD_REQUEST, detail)
    }

    pub(super) fn into_response(self) -> AdminResponse {
        let ApiError { status, detail } = self;
        let title = status.canonical_reason().unwrap_or_default();
        let body =
            serde_json::json!({ "type": "about:blank", "title": title, "status": status.as_u16(), "detail": detail });
        typed_response(status, "application/problem+json", body.to_string() + "\n")
    }
}
