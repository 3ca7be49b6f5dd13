//! The JSON API of decisions on a listener with `protocol = "decisions"`: `POST /v1/check`, `/v1/settle` and
//! `/v1/release`. The schema is `docs/decisions.openapi.json`.

use std::collections::BTreeMap;
use std::net::IpAddr;

use aws_lc_rs::constant_time::verify_slices_are_equal;
use bytes::Bytes;
use http::header::{AUTHORIZATION, CACHE_CONTROL, CONTENT_TYPE, WWW_AUTHENTICATE};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use uuid::Uuid;

use crate::http::body::Body;
use crate::http::body_limits::BodyError;
use crate::http::problem::{NO_STORE, Problem};
use crate::http::request_body::ReadBody;
use crate::limiter::quota::EXACT_INTEGER_LIMIT;
use crate::proxy::decisions;
use crate::proxy::decisions::{ClientRequest, Endpoint};
use crate::proxy::named_limits::NamedLimit;
use crate::proxy::rejection::DescriptionError;
use crate::proxy::request::Peer;
use crate::snapshot::CompiledConfig;
use crate::snapshot::decisions::DecisionSettings;

/// A method of the API.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ApiMethod {
    Check,
    Settle,
    Release,
}

impl ApiMethod {
    /// Return the method at a path.
    pub(super) fn at(path: &str) -> Option<Self> {
        match path {
            "/v1/check" => Some(ApiMethod::Check),
            "/v1/settle" => Some(ApiMethod::Settle),
            "/v1/release" => Some(ApiMethod::Release),
            _ => None,
        }
    }
}

/// Maximum length of a body in bytes.
pub(super) const MAX_BODY: usize = 1 << 20;

/// Maximum number of described requests in a body.
const MAX_REQUESTS: usize = 100;

/// What `/v1/check` has to decide.
pub(super) enum Check {
    /// One described request.
    One(Described),
    /// Described requests, each with a decision.
    Several(Several),
    /// Limits, all with one decision.
    Limits(Limits),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Several {
    pub(super) requests: Vec<Described>,
}

/// Limits that are checked without a request.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Limits {
    pub(super) limits: Vec<NamedLimit>,
    /// Whether `/v1/settle` will correct the costs.
    #[serde(default)]
    pub(super) reserve: bool,
}

/// The body of `/v1/settle`: what is known about the response to the client.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Settle {
    pub(super) id: Uuid,
    #[serde(default)]
    status: Option<u16>,
    #[serde(default)]
    headers: BTreeMap<String, String>,
    /// Actual costs by the names of the limits.
    #[serde(default)]
    pub(super) costs: BTreeMap<String, u64>,
}

/// The body of `/v1/release`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Release {
    pub(super) id: Uuid,
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
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<Uuid>,
}

/// The id with which a program settles or releases a decision, as an extension of the response that admits the request.
#[derive(Debug, Clone, Copy)]
pub(super) struct DecisionId(pub(super) Uuid);

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

    pub(super) fn bad_request(detail: impl Into<String>) -> Self {
        ApiError::new(StatusCode::BAD_REQUEST, detail)
    }

    /// No decision with this id is held here.
    pub(super) fn unknown_decision() -> Self {
        let detail = "this gateway holds no decision with this `id`: another gateway has made it, or it is settled, \
                      released or older than `settle_timeout`";
        ApiError::new(StatusCode::NOT_FOUND, detail)
    }

    /// Too many decisions are held.
    pub(super) fn too_many_decisions() -> Self {
        ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "too many decisions wait for /v1/settle or /v1/release")
    }

    /// The store failed.
    pub(super) fn store_unavailable() -> Self {
        ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "the limits cannot be checked at the moment")
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
        ApiError::bad_request(format!("the body cannot be read: {error}"))
    }
}

/// Check that the peer may use the listener, and the method and the token of its call.
pub(super) fn authorize<B>(request: &Request<B>, peer: &Peer, config: &CompiledConfig) -> Result<(), ApiError> {
    peer.check_listener(config).map_err(|error| ApiError::new(error.status(), error.to_string()))?;
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

/// Return a body that was read whole.
fn whole(body: ReadBody) -> Result<Bytes, ApiError> {
    match body {
        ReadBody::Whole(bytes) => Ok(bytes),
        ReadBody::TooLong => {
            let detail = format!("the body is longer than {MAX_BODY} bytes");
            Err(ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, detail))
        }
        ReadBody::NoCapacity => {
            Err(ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "there is no memory for the body at the moment"))
        }
    }
}

/// Parse the body of `/v1/settle` or `/v1/release`.
pub(super) fn parse<T: DeserializeOwned>(body: ReadBody) -> Result<T, ApiError> {
    serde_json::from_slice(&whole(body)?)
        .map_err(|error| ApiError::bad_request(format!("the body is invalid: {error}")))
}

/// Parse the body of `/v1/check`. Its keys tell what it contains.
pub(super) fn parse_check(body: ReadBody) -> Result<Check, ApiError> {
    let invalid = |error: serde_json::Error| {
        let detail = format!(
            "the body is invalid: {error}; it must be JSON: {{\"method\": \"GET\", \"url\": \
             \"https://host/path\", \"client_ip\": \"192.0.2.1\", \"headers\": {{}}}}, or {{\"requests\": […]}} with such \
             objects, or {{\"limits\": [{{\"limit\": \"NAME\", \"identity\": {{\"ip\": \"192.0.2.1\"}}, \"cost\": 1}}]}}"
        );
        ApiError::bad_request(detail)
    };
    let bytes = whole(body)?;
    let value: Value = serde_json::from_slice(&bytes).map_err(invalid)?;
    // Parse the text again, because its errors have a position, and repeated keys are errors.
    let check = match value {
        value if value.get("limits").is_some() => serde_json::from_slice(&bytes).map(Check::Limits),
        value if value.get("requests").is_some() => serde_json::from_slice(&bytes).map(Check::Several),
        _ => serde_json::from_slice(&bytes).map(Check::One),
    };
    match check.map_err(invalid)? {
        Check::Several(Several { requests }) if !(1..=MAX_REQUESTS).contains(&requests.len()) => {
            let count = requests.len();
            Err(ApiError::bad_request(format!("`requests` must have 1 to {MAX_REQUESTS} elements, not {count}")))
        }
        check => Ok(check),
    }
}

impl Settle {
    /// Return the response that the client has got, as far as the program describes it.
    pub(super) fn response(&self) -> Result<Response<Body>, ApiError> {
        if let Some((name, _)) = self.costs.iter().find(|(_, cost)| **cost >= EXACT_INTEGER_LIMIT) {
            return Err(ApiError::bad_request(format!("the cost of `{name}` is not below 2^53")));
        }
        let status = StatusCode::from_u16(self.status.unwrap_or(200));
        let mut response = Response::new(Body::full(""));
        *response.status_mut() = status.map_err(|_| ApiError::bad_request("`status` is no HTTP status"))?;
        *response.headers_mut() =
            header_map(&self.headers).ok_or_else(|| ApiError::bad_request("`headers` has an invalid header"))?;
        Ok(response)
    }
}

fn header_map(written: &BTreeMap<String, String>) -> Option<HeaderMap> {
    let mut headers = HeaderMap::new();
    for (name, value) in written {
        let name = HeaderName::from_bytes(name.as_bytes()).ok()?;
        headers.try_append(name, HeaderValue::from_str(value).ok()?).ok()?;
    }
    Some(headers)
}

impl Described {
    /// Return the request of the client.
    pub(super) fn client_request(self, settings: Option<&DecisionSettings>) -> Result<ClientRequest, DescriptionError> {
        let Described { method, url, client_ip, headers: written } = self;
        let headers = header_map(&written).ok_or(DescriptionError::Attribute("headers"))?;
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
        let id = response.extensions().get().map(|DecisionId(id)| *id);
        Decision { admitted: status == StatusCode::OK, status: status.as_u16(), headers, body, id }
    }
}

/// Return the response to a call of `/v1/check` about one request or about limits.
pub(super) fn decision(decision: &Decision) -> Box<Response<Body>> {
    json_response(decision)
}

/// Return the response to a call of `/v1/check` about several requests.
pub(super) fn decisions(decisions: &[Decision]) -> Box<Response<Body>> {
    json_response(&BTreeMap::from([("decisions", decisions)]))
}

fn json_response(value: &impl Serialize) -> Box<Response<Body>> {
    // The structs contain only texts and numbers, so serialization cannot fail.
    let body = serde_json::to_vec(value).unwrap_or_default();
    let mut response = Box::new(Response::new(Body::full(body)));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response.headers_mut().insert(CACHE_CONTROL, NO_STORE);
    response
}

/// Return the response to a call of `/v1/settle` or `/v1/release`.
pub(super) fn done() -> Box<Response<Body>> {
    let mut response = Box::new(Response::new(Body::full("")));
    *response.status_mut() = StatusCode::NO_CONTENT;
    response
}
