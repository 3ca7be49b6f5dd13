//! The JSON API of decisions: `POST /v1/check` on a listener with `protocol = "decisions"`. The schema is
//! `docs/decisions.openapi.json`.

use std::collections::BTreeMap;
use std::net::IpAddr;

use aws_lc_rs::constant_time::verify_slices_are_equal;
use bytes::Bytes;
use http::header::{AUTHORIZATION, CACHE_CONTROL, CONTENT_TYPE, WWW_AUTHENTICATE};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode};
use serde::{Deserialize, Serialize};

use crate::http::body::Body;
use crate::http::body_limits::BodyError;
use crate::http::problem::{NO_STORE, Problem};
use crate::http::request_body::ReadBody;
use crate::proxy::decisions;
use crate::proxy::decisions::{ClientRequest, Endpoint};
use crate::proxy::rejection::DescriptionError;
use crate::proxy::request::Peer;
use crate::snapshot::CompiledConfig;
use crate::snapshot::decisions::DecisionSettings;

/// Path of the only method.
pub(super) const CHECK: &str = "/v1/check";

/// Maximum length of a body in bytes.
pub(super) const MAX_BODY: usize = 1 << 20;

/// Maximum number of described requests in a body.
const MAX_REQUESTS: usize = 100;

/// A body: one described request, or a list of them.
#[derive(Deserialize)]
#[serde(untagged)]
enum Check {
    Several(Several),
    One(Described),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Several {
    requests: Vec<Described>,
}

/// A described request.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Described {
    method: String,
    url: String,
    client_ip: IpAddr,
    #[serde(default)]
    headers: BTreeMap<String, String>,
}

/// The decision about a described request.
#[derive(Serialize)]
pub(super) struct Decision {
    admitted: bool,
    status: u16,
    headers: BTreeMap<String, String>,
    #[serde(skip_serializing_if = "String::is_empty")]
    body: String,
}

/// Whether a body had a list of requests, so that the response has a list of decisions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    One,
    Several,
}

/// The described requests of a body.
pub(super) struct Batch {
    pub(super) form: Form,
    pub(super) requests: Vec<Described>,
}

/// The reason why a call of the API gets no decision.
#[derive(Debug)]
pub(super) struct ApiError {
    status: StatusCode,
    detail: String,
}

impl ApiError {
    fn new(status: StatusCode, detail: impl Into<String>) -> Self {
        ApiError { status, detail: detail.into() }
    }

    pub(super) fn into_response(self) -> Box<Response<Body>> {
        let mut response = Problem::new(self.status, &self.detail).into_response();
        if self.status == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

impl From<BodyError> for ApiError {
    fn from(error: BodyError) -> Self {
        ApiError::new(StatusCode::BAD_REQUEST, format!("the body cannot be read: {error}"))
    }
}

/// Check that the peer may use the listener, and the method and the token of its call.
pub(super) fn authorize<B>(request: &Request<B>, peer: &Peer, config: &CompiledConfig) -> Result<(), ApiError> {
    if !decisions::may_ask(peer, config) {
        return Err(ApiError::new(StatusCode::FORBIDDEN, "the client network may not use this listener"));
    }
    let settings = decisions::settings(config, peer.listener);
    let Some(token) = settings.and_then(|settings| settings.api_token.as_ref()) else {
        let detail = "the API is off: set `api_token` in the [[listener]]";
        return Err(ApiError::new(StatusCode::FORBIDDEN, detail));
    };
    let mut values = request.headers().get_all(AUTHORIZATION).iter();
    let value = values.next().filter(|_| values.next().is_none());
    let given = value.and_then(|value| bearer_token(value.as_bytes()));
    if given.is_none_or(|given| verify_slices_are_equal(given, token.as_bytes()).is_err()) {
        let detail = "send the `api_token` of the listener as `Authorization: Bearer …`";
        return Err(ApiError::new(StatusCode::UNAUTHORIZED, detail));
    }
    match *request.method() {
        Method::POST => Ok(()),
        _ => Err(ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "the method must be POST")),
    }
}

fn bearer_token(value: &[u8]) -> Option<&[u8]> {
    let (scheme, token) = value.split_at_checked("Bearer ".len())?;
    scheme.eq_ignore_ascii_case(b"Bearer ").then_some(token)
}

/// Parse a body.
pub(super) fn parse(body: ReadBody) -> Result<Batch, ApiError> {
    let bytes = match body {
        ReadBody::Whole(bytes) => bytes,
        ReadBody::TooLong => {
            let detail = format!("the body is longer than {MAX_BODY} bytes");
            return Err(ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, detail));
        }
        ReadBody::NoCapacity => {
            return Err(ApiError::new(
                StatusCode::SERVICE_UNAVAILABLE,
                "there is no memory for the body at the moment",
            ));
        }
    };
    let batch = match parse_check(&bytes)? {
        Check::One(request) => Batch { form: Form::One, requests: vec![request] },
        Check::Several(Several { requests }) => Batch { form: Form::Several, requests },
    };
    match batch.requests.len() {
        1..=MAX_REQUESTS => Ok(batch),
        count => {
            let detail = format!("`requests` must have 1 to {MAX_REQUESTS} elements, not {count}");
            Err(ApiError::new(StatusCode::BAD_REQUEST, detail))
        }
    }
}

fn parse_check(bytes: &Bytes) -> Result<Check, ApiError> {
    serde_json::from_slice(bytes).map_err(|_| {
        let detail = "the body must be JSON: {\"method\": \"GET\", \"url\": \"https://host/path\", \"client_ip\": \
                      \"192.0.2.1\", \"headers\": {}}, or {\"requests\": […]} with such objects";
        ApiError::new(StatusCode::BAD_REQUEST, detail)
    })
}

impl Described {
    /// Return the request of the client.
    pub(super) fn client_request(self, settings: Option<&DecisionSettings>) -> Result<ClientRequest, DescriptionError> {
        let Described { method, url, client_ip, headers: written } = self;
        let mut headers = HeaderMap::new();
        for (name, value) in &written {
            let name = HeaderName::from_bytes(name.as_bytes()).map_err(|_| DescriptionError::Attribute("headers"))?;
            let value = HeaderValue::from_str(value).map_err(|_| DescriptionError::Attribute("headers"))?;
            headers.try_append(name, value).map_err(|_| DescriptionError::Attribute("headers"))?;
        }
        decisions::check_headers(&headers, settings)?;
        const URL: DescriptionError = DescriptionError::Attribute("url");
        let (scheme, rest) = url.split_once("://").ok_or(URL)?;
        let (host, target) = rest.split_at(rest.find(['/', '?', '#']).ok_or(URL)?);
        Ok(ClientRequest {
            method: Method::from_bytes(method.as_bytes()).map_err(|_| DescriptionError::Attribute("method"))?,
            target: decisions::target(target.as_bytes()).ok_or(URL)?,
            headers,
            host: HeaderValue::from_str(host).map_err(|_| URL)?,
            scheme: decisions::scheme(scheme.as_bytes()).ok_or(URL)?,
            address: client_ip.to_canonical(),
            endpoint: Endpoint::Forwarded,
        })
    }
}

impl Decision {
    /// Return the decision in the response to a request for a decision.
    pub(super) fn new(mut response: Response<Body>) -> Self {
        let body = response.body_mut().take_content().unwrap_or_default();
        let mut headers = BTreeMap::new();
        for name in response.headers().keys().filter(|name| **name != CACHE_CONTROL) {
            let values = response.headers().get_all(name).iter().map(|value| String::from_utf8_lossy(value.as_bytes()));
            headers.insert(name.as_str().to_owned(), values.collect::<Vec<_>>().join(", "));
        }
        let status = response.status();
        let body = String::from_utf8_lossy(&body).into_owned();
        Decision { admitted: status == StatusCode::OK, status: status.as_u16(), headers, body }
    }
}

/// Return the response to a call.
pub(super) fn response(form: Form, decisions: &[Decision]) -> Box<Response<Body>> {
    // The structs contain only texts and numbers, so serialization cannot fail.
    let body = match (form, decisions) {
        (Form::One, [decision]) => serde_json::to_vec(decision),
        (Form::One | Form::Several, _) => serde_json::to_vec(&BTreeMap::from([("decisions", decisions)])),
    };
    let mut response = Box::new(Response::new(Body::full(body.unwrap_or_default())));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response.headers_mut().insert(CACHE_CONTROL, NO_STORE);
    response
}
