//! Problem documents (RFC 9457): what an answer of ours says of itself.

use http::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderValue};
use http::{Response, StatusCode};
use serde::Serialize;

use crate::http::body::Body;

/// For the Cache-Control of every rejection: it is about one request and one moment, and a shared cache would give it to others.
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

impl Problem<'_> {
    pub(crate) fn into_response(self) -> Response<Body> {
        // Strings and numbers always serialise.
        let mut body = serde_json::to_vec(&self).unwrap_or_default();
        body.push(b'\n');
        let mut response = Response::new(Body::full(body));
        *response.status_mut() = self.status;
        response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
        response.headers_mut().insert(CACHE_CONTROL, NO_STORE);
        response
    }
}
