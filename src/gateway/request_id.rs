//! What tells a request from all others: given by a trusted proxy or made here, the same upstream, in the logs and in our own errors.

use http::{HeaderMap, HeaderValue};
use uuid::{NoContext, Timestamp, Uuid};

use crate::http::headers::X_REQUEST_ID;

/// The id of a request.
#[derive(Debug, Clone)]
pub enum RequestId {
    /// Of our own; in the form of text when somebody asks for it.
    Generated(Uuid),
    /// Of a trusted proxy.
    Received(HeaderValue),
}

impl RequestId {
    /// That of a request with this header section.
    pub fn from_headers(headers: &HeaderMap, trusted: bool) -> Self {
        match trusted.then(|| headers.get(X_REQUEST_ID)).flatten() {
            Some(received) => RequestId::Received(received.clone()),
            // In order by the millisecond. A finer order, as of `now_v7`, is a lock that all workers share.
            None => RequestId::Generated(Uuid::new_v7(Timestamp::now(NoContext))),
        }
    }

    /// As the value of a field.
    pub fn to_header_value(&self) -> HeaderValue {
        match self {
            RequestId::Received(value) => value.clone(),
            RequestId::Generated(id) => {
                let mut text = [0; uuid::fmt::Hyphenated::LENGTH];
                let text = id.hyphenated().encode_lower(&mut text);
                // Hex digits and hyphens are a valid value.
                HeaderValue::from_str(text).unwrap_or(HeaderValue::from_static("-"))
            }
        }
    }
}
