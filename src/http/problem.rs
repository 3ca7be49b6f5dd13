//! Problem documents (RFC 9457): the bodies of error responses that the gateway generates, also on the admin listener.

use http::header::{CACHE_CONTROL, CONTENT_TYPE as CONTENT_TYPE_HEADER, HeaderValue};
use http::{Response, StatusCode};
use serde::Serialize;

use crate::http::body::Body;

/// Media type of a problem document.
pub(crate) const CONTENT_TYPE: &str = "application/problem+json";

/// `Cache-Control` of every rejection. A rejection applies only to one request at one time, but a shared cache would
/// send it to other clients.
pub(crate) const NO_STORE: HeaderValue = HeaderValue::from_static("no-store");

/// A problem document (RFC 9457).
#[derive(Serialize)]
pub(crate) struct Problem<'a> {
    #[serde(rename = "type")]
    pub(crate) kind: &'a str,
    pub(crate) title: &'a str,
    #[serde(serialize_with = "number")]
    pub(crate) status: StatusCode,
    pub(crate) detail: &'a str,
    #[serde(rename = "violated-policies", skip_serializing_if = "Vec::is_empty")]
    pub(crate) violated_policies: Vec<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) request_id: Option<&'a str>,
}

fn number<S: serde::Serializer>(status: &StatusCode, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_u16(status.as_u16())
}

impl<'a> Problem<'a> {
    /// Create a problem document that is fully described by its status, so its type is `about:blank` (RFC 9457 §4.2.1).
    pub(crate) fn new(status: StatusCode, detail: &'a str) -> Self {
        let title = status.canonical_reason().unwrap_or("Error");
        Problem { kind: "about:blank", title, status, detail, violated_policies: Vec::new(), request_id: None }
    }

    /// Return the document, with a newline at its end for output on terminals.
    pub(crate) fn to_json(&self) -> Vec<u8> {
        // Serializing strings and numbers cannot fail.
        let mut body = serde_json::to_vec(self).unwrap_or_default();
        body.push(b'\n');
        body
    }

    pub(crate) fn into_response(self) -> Response<Body> {
        let mut response = Response::new(Body::full(self.to_json()));
        *response.status_mut() = self.status;
        response.headers_mut().insert(CONTENT_TYPE_HEADER, HeaderValue::from_static(CONTENT_TYPE));
        response.headers_mut().insert(CACHE_CONTROL, NO_STORE);
        response
    }
}
