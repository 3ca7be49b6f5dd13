//! Local replies: the responses that the gateway generates itself. No other file chooses their status codes.

use std::io::ErrorKind;
use std::time::Duration;

use bytes::Bytes;
use http::header::{
    ALLOW, CACHE_CONTROL, CONNECTION, CONTENT_TYPE, HeaderName, HeaderValue, RETRY_AFTER, WWW_AUTHENTICATE,
};
use http::{Method, Response, StatusCode};
use serde_json::Value;

use crate::http::body::Body;
use crate::http::error_pages::ErrorPage;
use crate::http::grpc::{Code, set_status_headers};
use crate::http::headers::X_REQUEST_ID;
use crate::http::problem;
use crate::http::problem::{NO_STORE, Problem};
use crate::http::ratelimit_headers;
use crate::identity::auth::Challenge;
use crate::identity::spec::Descriptor;
use crate::identity::spec::IdentityError;
use crate::identity::verification::AuthError;
use crate::identity::verification::Denial;
use crate::limiter::decision::Decision;
use crate::payload::form::FormError;
use crate::payload::json::body::JsonError;
use crate::payload::json::rpc;
use crate::payload::llm::provider::{ApiError, Provider, Retry};
use crate::payload::llm::request::RequestError;
use crate::proxy::admission::Answer;
use crate::proxy::rejection::{AuthRejection, DescriptionError, InspectError, LlmError, Rejection, UnreadBody};
use crate::telemetry::outcome::RequestOutcome;
use crate::upstream::connector::TlsFailure;
use crate::upstream::error::{UpstreamError, is_protocol_error};

/// Problem types of draft-ietf-httpapi-ratelimit-headers-11 §7. All other problems are fully described by their status.
const QUOTA_EXCEEDED: &str = "https://iana.org/assignments/http-problem-types#quota-exceeded";
const REDUCED_CAPACITY: &str = "https://iana.org/assignments/http-problem-types#temporary-reduced-capacity";
const ABOUT_BLANK: &str = "about:blank";

const BODY_TOO_LARGE: (StatusCode, &str, RequestOutcome) =
    (StatusCode::PAYLOAD_TOO_LARGE, "the request body is longer than the route allows", RequestOutcome::BodyTooLarge);

const X_AMZN_ERRORTYPE: HeaderName = HeaderName::from_static("x-amzn-errortype");
const X_SHOULD_RETRY: HeaderName = HeaderName::from_static("x-should-retry");

/// `Retry-After` in seconds while limits cannot be checked. The gateway probes the store again within this time.
const STORE_RETRY_AFTER_S: u64 = 1;

/// `Retry-After` in seconds while requests cannot be authenticated.
const AUTH_RETRY_AFTER_S: u64 = 1;

/// `Retry-After` in seconds for an overloaded upstream.
const OVERFLOW_RETRY_AFTER_S: u64 = 1;

impl Answer {
    /// Return the response and its outcome.
    pub fn into_response(self) -> (Box<Response<Body>>, RequestOutcome) {
        match self {
            Answer::Challenge(key_authorization) => {
                let mut response = Box::new(Response::new(Body::full(Bytes::from(key_authorization))));
                let headers = response.headers_mut();
                headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
                headers.insert(CACHE_CONTROL, NO_STORE);
                (response, RequestOutcome::Ok)
            }
            Answer::Preflight(headers) => {
                let mut response = Box::new(Response::new(Body::full(Bytes::new())));
                *response.status_mut() = StatusCode::NO_CONTENT;
                *response.headers_mut() = *headers;
                (response, RequestOutcome::Preflight)
            }
        }
    }
}

/// What a local reply contains in addition to its problem document, and the format in which the client gets it.
#[derive(Debug)]
pub struct ReplyFormat<'a> {
    /// Id of the request. If the client did not cause the failure, the response contains the id, so that operators can
    /// find the request in the logs of the gateway and the upstream.
    pub request_id: Option<HeaderValue>,
    /// Whether error responses have the header `Proxy-Status`.
    pub proxy_status: bool,
    /// The id of the JSON-RPC message, if the client sent one.
    pub rpc_id: Option<&'a Value>,
    /// The LLM API whose error format the response has.
    pub api: Option<Provider>,
    /// Whether the request is a gRPC call.
    pub is_grpc: bool,
    /// The page that replaces the problem document.
    pub error_page: Option<ErrorPage<'a>>,
    /// `RateLimit-Policy` of the route.
    pub policy_header: Option<&'a HeaderValue>,
}

impl Rejection<'_> {
    /// Return the response and its outcome.
    pub fn into_response(self, format: ReplyFormat<'_>) -> (Box<Response<Body>>, RequestOutcome) {
        let ReplyFormat { request_id, proxy_status, rpc_id, api, is_grpc, error_page, policy_header } = format;
        let status = proxy_status.then(|| self.proxy_status());
        let page_id = error_page.and(request_id.clone());
        let rpc_code = match &self {
            Rejection::Inspect(error) => error.rpc_code(),
            _ => None,
        };
        let (mut response, outcome) = self.into_local_reply(request_id, api, policy_header);
        if is_grpc {
            set_grpc_status(&mut response);
        } else if let Some(id) = rpc_id {
            set_rpc_error(&mut response, id, rpc_code);
        } else if let Some(api) = api {
            set_api_error(&mut response, api);
        }
        if let Some(page) = error_page {
            page.apply(&mut response, page_id.as_ref());
        }
        if let Some(status) = status {
            response.headers_mut().append(PROXY_STATUS, HeaderValue::from_static(status));
        }
        (response, outcome)
    }

    fn into_local_reply(
        self,
        request_id: Option<HeaderValue>,
        api: Option<Provider>,
        policy_header: Option<&HeaderValue>,
    ) -> (Box<Response<Body>>, RequestOutcome) {
        match self {
            Rejection::InvalidPath(error) => {
                (problem_response(StatusCode::BAD_REQUEST, ABOUT_BLANK, &error.to_string()), RequestOutcome::BadPath)
            }
            Rejection::InvalidHost(detail) => {
                (problem_response(StatusCode::BAD_REQUEST, ABOUT_BLANK, detail), RequestOutcome::BadHost)
            }
            Rejection::TooManyHeaders => {
                let status = StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE;
                (
                    problem_response(status, ABOUT_BLANK, "the request has too many headers"),
                    RequestOutcome::TooManyHeaders,
                )
            }
            Rejection::UriTooLong => (
                problem_response(StatusCode::URI_TOO_LONG, ABOUT_BLANK, "the request target is too long"),
                RequestOutcome::UriTooLong,
            ),
            Rejection::BodyTooLarge => {
                let (status, detail, outcome) = BODY_TOO_LARGE;
                (problem_response(status, ABOUT_BLANK, detail), outcome)
            }
            Rejection::MethodNotImplemented => (
                problem_response(StatusCode::NOT_IMPLEMENTED, ABOUT_BLANK, "the gateway does not serve this method"),
                RequestOutcome::UnsupportedMethod,
            ),
            Rejection::NoWebSocket => (
                problem_response(StatusCode::NOT_IMPLEMENTED, ABOUT_BLANK, "the route does not allow WebSockets"),
                RequestOutcome::WebsocketNotAllowed,
            ),
            Rejection::LowercaseMethod => (
                problem_response(StatusCode::BAD_REQUEST, ABOUT_BLANK, "the method must be in upper case"),
                RequestOutcome::BadMethod,
            ),
            Rejection::UnsupportedTransferCoding => {
                let detail = "the gateway supports no transfer coding except chunked";
                let mut response = problem_response(StatusCode::NOT_IMPLEMENTED, ABOUT_BLANK, detail);
                // Close the connection, because the gateway cannot determine where the next request on the connection
                // starts (RFC 9112 §6.1).
                response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
                (response, RequestOutcome::UnsupportedTransferCoding)
            }
            Rejection::NoRoute => (
                problem_response(StatusCode::NOT_FOUND, ABOUT_BLANK, "no route matches the request"),
                RequestOutcome::NoRoute,
            ),
            Rejection::UnknownHost => {
                let status = StatusCode::MISDIRECTED_REQUEST;
                (problem_response(status, ABOUT_BLANK, "no route serves this host"), RequestOutcome::UnknownHost)
            }
            Rejection::Misdirected => {
                let detail = "the client certificates of this host are verified in another way than those of this connection: \
                              open another connection for the host";
                (problem_response(StatusCode::MISDIRECTED_REQUEST, ABOUT_BLANK, detail), RequestOutcome::Misdirected)
            }
            Rejection::Forbidden => (
                problem_response(StatusCode::FORBIDDEN, ABOUT_BLANK, "the client address is not allowed"),
                RequestOutcome::Forbidden,
            ),
            Rejection::MethodNotAllowed(allowed) => {
                let mut response = problem_response(
                    StatusCode::METHOD_NOT_ALLOWED,
                    ABOUT_BLANK,
                    "the route does not serve this method",
                );
                let list = allowed.iter().map(Method::as_str).collect::<Vec<_>>().join(", ");
                // The conversion cannot fail, because methods are tokens.
                response.headers_mut().extend(HeaderValue::try_from(list).ok().map(|value| (ALLOW, value)));
                (response, RequestOutcome::MethodNotAllowed)
            }
            Rejection::Auth(rejection) => auth_response(&rejection, request_id),
            Rejection::Identity(error) => {
                let outcome = if error.is_credential_error() {
                    RequestOutcome::Unauthenticated
                } else {
                    RequestOutcome::NoIdentity
                };
                (identity_error_response(&error), outcome)
            }
            Rejection::InvalidCost(error) => {
                (problem_response(StatusCode::BAD_REQUEST, ABOUT_BLANK, &error.to_string()), RequestOutcome::BadCost)
            }
            Rejection::RateLimited { decision, rate_limits, is_grpc, max_retry_wait } => {
                let status = rate_limits.denial_status(&decision);
                let mut response = match api {
                    Some(api) if !is_grpc => api_rate_limited_response(&decision, status, api, max_retry_wait),
                    Some(_) | None => rate_limited_response(&decision, status, is_grpc),
                };
                rate_limits.append_headers(response.headers_mut(), &decision, policy_header);
                (response, RequestOutcome::RateLimited)
            }
            Rejection::Inspect(error) => {
                let (status, outcome) = match &error {
                    InspectError::Unread(
                        UnreadBody::TooLong(_)
                        | UnreadBody::Json(JsonError::TooManyValues)
                        | UnreadBody::Form(FormError::TooManyFields),
                    ) => (StatusCode::PAYLOAD_TOO_LARGE, RequestOutcome::BodyTooLarge),
                    InspectError::Unread(UnreadBody::NoCapacity) => {
                        (StatusCode::SERVICE_UNAVAILABLE, RequestOutcome::BufferOverflow)
                    }
                    InspectError::Unread(
                        UnreadBody::ContentCoding
                        | UnreadBody::MediaType
                        | UnreadBody::NoForm
                        | UnreadBody::Json(JsonError::Syntax(_))
                        | UnreadBody::Form(FormError::Syntax(_)),
                    )
                    | InspectError::Ambiguous(_)
                    | InspectError::Rpc(_) => (StatusCode::BAD_REQUEST, RequestOutcome::BadBody),
                    InspectError::Tool(_) => (StatusCode::FORBIDDEN, RequestOutcome::Forbidden),
                };
                let mut response = problem_response(status, ABOUT_BLANK, &error.to_string());
                if status == StatusCode::SERVICE_UNAVAILABLE {
                    response.headers_mut().insert(RETRY_AFTER, HeaderValue::from(OVERFLOW_RETRY_AFTER_S));
                }
                (response, outcome)
            }
            Rejection::Llm(error) => {
                let (status, outcome) = match &error {
                    LlmError::Body(RequestError::Body(JsonError::TooManyValues)) | LlmError::TooLong(_) => {
                        (StatusCode::PAYLOAD_TOO_LARGE, RequestOutcome::BodyTooLarge)
                    }
                    LlmError::Body(_)
                    | LlmError::ContentCoding
                    | LlmError::MediaType
                    | LlmError::HiddenUsage(_)
                    | LlmError::BatchFile => (StatusCode::BAD_REQUEST, RequestOutcome::BadBody),
                    LlmError::UnknownOperation => (StatusCode::NOT_FOUND, RequestOutcome::UnknownOperation),
                    LlmError::TooLarge { .. } => (StatusCode::BAD_REQUEST, RequestOutcome::ReservationTooLarge),
                    LlmError::NoCapacity => (StatusCode::SERVICE_UNAVAILABLE, RequestOutcome::BufferOverflow),
                };
                let message = error.to_string();
                let mut response = api_response(api.unwrap_or(Provider::OpenAi), ApiError::new(status, &message));
                if error == LlmError::NoCapacity {
                    response.headers_mut().insert(RETRY_AFTER, HeaderValue::from(OVERFLOW_RETRY_AFTER_S));
                }
                (response, outcome)
            }
            Rejection::StoreUnavailable(_) => {
                let detail = "limits cannot be checked at the moment";
                let mut response =
                    problem_response_with_id(StatusCode::SERVICE_UNAVAILABLE, REDUCED_CAPACITY, detail, request_id);
                response.headers_mut().insert(RETRY_AFTER, HeaderValue::from(STORE_RETRY_AFTER_S));
                (response, RequestOutcome::StoreUnavailable)
            }
            Rejection::Upstream(error) => {
                let (status, detail, outcome) = upstream_failure(&error);
                let mut response = problem_response_with_id(status, ABOUT_BLANK, detail, request_id);
                match error {
                    UpstreamError::NoHealthyEndpoint { retry_after: after, .. }
                    | UpstreamError::Unresolved { retry_after: after, .. } => {
                        ratelimit_headers::set_retry_after(response.headers_mut(), after.as_micros() as u64);
                    }
                    UpstreamError::NoAccessToken { .. }
                    | UpstreamError::Overflow { .. }
                    | UpstreamError::TooManyUploads { .. } => {
                        response.headers_mut().insert(RETRY_AFTER, HeaderValue::from(OVERFLOW_RETRY_AFTER_S));
                    }
                    _ => {}
                }
                (response, outcome)
            }
            Rejection::Undescribed(error) => {
                let (status, outcome) = match &error {
                    // Proxies pass the status on to their clients, for which 421 would be about their own connection.
                    DescriptionError::Peer(_) | DescriptionError::NotTrusted => {
                        (StatusCode::FORBIDDEN, RequestOutcome::Forbidden)
                    }
                    DescriptionError::UnknownEndpoint | DescriptionError::OnlyPrograms => {
                        (StatusCode::NOT_FOUND, RequestOutcome::NoRoute)
                    }
                    DescriptionError::Header(..) | DescriptionError::Attribute(_) => {
                        (StatusCode::BAD_REQUEST, RequestOutcome::BadDescription)
                    }
                    DescriptionError::Forged(_) => (StatusCode::BAD_REQUEST, RequestOutcome::ForgedHeader),
                };
                (problem_response(status, ABOUT_BLANK, &error.to_string()), outcome)
            }
        }
    }
}

fn auth_response(
    AuthRejection { error, challenges }: &AuthRejection<'_>,
    request_id: Option<HeaderValue>,
) -> (Box<Response<Body>>, RequestOutcome) {
    let status = error.status();
    match error {
        AuthError::Denied(denial) => {
            let outcome = if status == StatusCode::FORBIDDEN {
                RequestOutcome::Forbidden
            } else {
                RequestOutcome::Unauthenticated
            };
            return (denial_response(denial, challenges, error), outcome);
        }
        error if error.is_unavailable() => {
            let mut response = problem_response_with_id(status, REDUCED_CAPACITY, &error.to_string(), request_id);
            response.headers_mut().insert(RETRY_AFTER, HeaderValue::from(AUTH_RETRY_AFTER_S));
            return (response, RequestOutcome::AuthUnavailable);
        }
        _ => {}
    }
    let mut response = problem_response(status, ABOUT_BLANK, &error.to_string());
    if *error == AuthError::UntrustedCertificate {
        // The certificate belongs to the connection, so the gateway closes the connection.
        response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    }
    let outcome = match status {
        // List all kinds of credentials that the route accepts.
        StatusCode::UNAUTHORIZED => {
            for challenge in *challenges {
                response.headers_mut().append(WWW_AUTHENTICATE, challenge.value(error));
            }
            RequestOutcome::Unauthenticated
        }
        StatusCode::FORBIDDEN => {
            // Add a challenge for a token without the required claim (RFC 6750 §3.1). Add none for an API key that is
            // not allowed on this route, because another credential would not help.
            if matches!(error, AuthError::Claim(_)) {
                let challenge = HeaderValue::from_static("Bearer error=\"insufficient_scope\"");
                response.headers_mut().insert(WWW_AUTHENTICATE, challenge);
            }
            RequestOutcome::Forbidden
        }
        _ => RequestOutcome::NoIdentity,
    };
    (response, outcome)
}

/// Build the response to a request that an authentication server denied. Caches must not store the response, because
/// the next request may have a valid credential.
fn denial_response(denial: &Denial, challenges: &[Challenge], error: &AuthError) -> Box<Response<Body>> {
    let mut response = Box::new(Response::new(Body::full(denial.body.clone())));
    *response.status_mut() = denial.status;
    let headers = response.headers_mut();
    headers.clone_from(&denial.headers);
    headers.insert(CACHE_CONTROL, NO_STORE);
    // Add a challenge, because a 401 must contain an authentication scheme (RFC 9110 §11.6.1).
    if denial.status == StatusCode::UNAUTHORIZED && !headers.contains_key(WWW_AUTHENTICATE) {
        for challenge in challenges {
            headers.append(WWW_AUTHENTICATE, challenge.value(error));
        }
    }
    response
}

fn identity_error_response(error: &IdentityError) -> Box<Response<Body>> {
    // RFC 9110 §11.6.1: a 401 must contain an authentication scheme. `Bearer` challenges follow RFC 6750 §3.
    let challenge = match error {
        IdentityError::MissingApiKey(_) | IdentityError::Missing(Descriptor::ApiKey) => Some("ApiKey"),
        IdentityError::Missing(Descriptor::Jwt(_)) => Some("Bearer"),
        // Use an unregistered scheme. No scheme is registered for client certificates, but a 401 must contain one.
        IdentityError::Missing(Descriptor::ClientCert) => Some("ClientCertificate"),
        IdentityError::Missing(Descriptor::Basic) => Some("Basic"),
        IdentityError::Ambiguous(_)
        | IdentityError::Malformed(_)
        | IdentityError::Unusable(..)
        | IdentityError::Mixed(_)
        | IdentityError::Missing(_) => None,
    };
    let status = match error {
        _ if challenge.is_some() => StatusCode::UNAUTHORIZED,
        // Respond with 403 instead of 400, because the header is missing in the response of the authentication server, or
        // the group in the consumers file, where the client cannot add it.
        IdentityError::Missing(Descriptor::Forward(_) | Descriptor::Group(_)) => StatusCode::FORBIDDEN,
        _ => StatusCode::BAD_REQUEST,
    };
    let mut response = problem_response(status, ABOUT_BLANK, &error.to_string());
    response.headers_mut().extend(challenge.map(|challenge| (WWW_AUTHENTICATE, HeaderValue::from_static(challenge))));
    response
}

/// Return the status, the problem detail and the outcome for the access log.
fn upstream_failure(error: &UpstreamError) -> (StatusCode, &'static str, RequestOutcome) {
    // Do not describe the cause, because clients must not see the addresses of upstreams. The log contains the cause.
    match error {
        UpstreamError::NoHealthyEndpoint { .. }
        | UpstreamError::Unresolved { .. }
        | UpstreamError::NoAccessToken { .. } => (
            StatusCode::SERVICE_UNAVAILABLE,
            "the upstream has no healthy server at the moment",
            RequestOutcome::NoHealthyUpstream,
        ),
        UpstreamError::Overflow { .. } => (
            StatusCode::SERVICE_UNAVAILABLE,
            "all servers of the upstream are at their request limit at the moment",
            RequestOutcome::UpstreamOverflow,
        ),
        UpstreamError::TooManyUploads { .. } => (
            StatusCode::SERVICE_UNAVAILABLE,
            "too many uploads from the network of the client are in progress",
            RequestOutcome::UpstreamOverflow,
        ),
        UpstreamError::Connect { .. } => (
            StatusCode::BAD_GATEWAY,
            "no connection to the upstream could be made",
            RequestOutcome::UpstreamConnectFailure,
        ),
        UpstreamError::ConnectTimeout { .. } => {
            (StatusCode::BAD_GATEWAY, "connecting to the upstream timed out", RequestOutcome::UpstreamConnectFailure)
        }
        UpstreamError::Reset { .. } | UpstreamError::InvalidResponse { .. } => (
            StatusCode::BAD_GATEWAY,
            "the upstream closed the connection before its response, or sent an invalid response",
            RequestOutcome::UpstreamReset,
        ),
        UpstreamError::UnexpectedUpgrade { .. } => (
            StatusCode::BAD_GATEWAY,
            "the upstream switched to a protocol that was not requested",
            RequestOutcome::UpstreamReset,
        ),
        UpstreamError::ResponseTimeout { .. } => {
            (StatusCode::GATEWAY_TIMEOUT, "the upstream did not respond in time", RequestOutcome::UpstreamTimeout)
        }
        UpstreamError::RouteTimeout { .. } => {
            (StatusCode::GATEWAY_TIMEOUT, "the request exceeded the timeout of its route", RequestOutcome::RouteTimeout)
        }
        UpstreamError::ClientDeadline { .. } => (
            StatusCode::GATEWAY_TIMEOUT,
            "the upstream did not respond before the deadline of the client",
            RequestOutcome::ClientDeadline,
        ),
        UpstreamError::ClientTimeout => {
            (StatusCode::REQUEST_TIMEOUT, "the request body did not arrive in time", RequestOutcome::ClientTimeout)
        }
        UpstreamError::BodyTooLarge => BODY_TOO_LARGE,
        UpstreamError::ClientAborted(_) => {
            (StatusCode::BAD_REQUEST, "the client aborted the request body", RequestOutcome::ClientAborted)
        }
    }
}

/// Return the status of the response to an upstream error.
pub fn upstream_status(error: &UpstreamError) -> StatusCode {
    upstream_failure(error).0
}

/// Replace a problem document with a JSON-RPC error that has the document and the seconds of `Retry-After` as its `data`. The error code is the HTTP
/// status, unless JSON-RPC or MCP defines a code for the error. The codes of JSON-RPC and MCP are negative, so they
/// never collide with a status.
fn set_rpc_error(response: &mut Response<Body>, id: &Value, code: Option<i32>) {
    if !problem::is_problem(response.headers()) {
        return;
    }
    let Some(problem) = response.body_mut().take_content() else { return };
    let mut problem: Value = serde_json::from_slice(&problem).unwrap_or_default();
    // JSON-RPC clients hide the HTTP headers from programs.
    let retry_after = response.headers().get(RETRY_AFTER).and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
    if let Some(seconds) = retry_after {
        problem["retry_after"] = seconds.into();
    }
    let message = problem["detail"].as_str().unwrap_or_default();
    let code = code.unwrap_or(response.status().as_u16().into());
    *response.body_mut() = Body::full(rpc::error_body(id, code, message, &problem));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
}

/// Replace a problem document with an error in the format of an LLM API, so that its SDKs understand the error.
fn set_api_error(response: &mut Response<Body>, api: Provider) {
    if response.headers().get(CONTENT_TYPE).is_none_or(|kind| kind != problem::CONTENT_TYPE) {
        return;
    }
    let Some(problem) = response.body_mut().take_content() else { return };
    let problem: Value = serde_json::from_slice(&problem).unwrap_or_default();
    let message = problem["detail"].as_str().unwrap_or_default();
    let (parts, body) = api_response(api, ApiError::new(response.status(), message)).into_parts();
    *response.body_mut() = body;
    response.headers_mut().extend(parts.headers);
}

/// Build an error response in the format of an LLM API.
fn api_response(api: Provider, error: ApiError<'_>) -> Box<Response<Body>> {
    let mut response = Box::new(Response::new(Body::full(api.error_body(error))));
    *response.status_mut() = error.status;
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers.insert(CACHE_CONTROL, NO_STORE);
    headers.extend(api.error_type(error).map(|kind| (X_AMZN_ERRORTYPE, HeaderValue::from_static(kind))));
    response
}

/// Build the response to a denied request to an LLM API.
fn api_rate_limited_response(
    decision: &Decision<'_>,
    status: StatusCode,
    api: Provider,
    max_retry_wait: Option<Duration>,
) -> Box<Response<Body>> {
    let names = announced_names(decision).join("`, `");
    let limits = if names.is_empty() { String::new() } else { format!(" of `{names}`") };
    let message = format!("the rate limit{limits} is exceeded: {}", denial_detail(decision));
    let is_too_long = |us| max_retry_wait.is_some_and(|max| Duration::from_micros(us) > max);
    let retry = if decision.retry_us().is_none_or(is_too_long) { Retry::Useless } else { Retry::Useful };
    let limit_unit = decision.violated().next().map(|result| &*result.limit.unit);
    let error = ApiError { status, message: &message, limit_unit, retry };
    let mut response = api_response(api, error);
    if retry == Retry::Useless {
        // The SDKs of OpenAI and Anthropic read this header. Without it, they wait for the time in `Retry-After`.
        response.headers_mut().insert(X_SHOULD_RETRY, HeaderValue::from_static("false"));
    }
    response
}

/// Replace a problem document with a gRPC status in the response headers (trailers-only). gRPC clients read
/// `grpc-status`, and would map most HTTP statuses to UNKNOWN or UNAVAILABLE.
fn set_grpc_status(response: &mut Response<Body>) {
    if !problem::is_problem(response.headers()) {
        return;
    }
    let Some(document) = response.body_mut().take_content() else { return };
    let document: Value = serde_json::from_slice(&document).unwrap_or_default();
    let code = match response.status() {
        StatusCode::BAD_REQUEST => Code::InvalidArgument,
        StatusCode::REQUEST_TIMEOUT | StatusCode::GATEWAY_TIMEOUT => Code::DeadlineExceeded,
        StatusCode::FORBIDDEN => Code::PermissionDenied,
        StatusCode::PAYLOAD_TOO_LARGE
        | StatusCode::URI_TOO_LONG
        | StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE
        | StatusCode::TOO_MANY_REQUESTS => Code::ResourceExhausted,
        StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED | StatusCode::NOT_IMPLEMENTED => Code::Unimplemented,
        StatusCode::BAD_GATEWAY | StatusCode::SERVICE_UNAVAILABLE | StatusCode::MISDIRECTED_REQUEST => {
            Code::Unavailable
        }
        StatusCode::UNAUTHORIZED => Code::Unauthenticated,
        _ => Code::Unknown,
    };
    *response.status_mut() = StatusCode::OK;
    let detail = document["detail"].as_str().unwrap_or_default();
    set_status_headers(response.headers_mut(), code, detail);
}

fn denial_detail(decision: &Decision<'_>) -> String {
    match decision.retry_us() {
        Some(us) => retry_detail(ratelimit_headers::ceil_seconds(us).max(1)),
        None => "the request costs more than the limit ever allows".to_owned(),
    }
}

fn rate_limited_response(decision: &Decision<'_>, status: StatusCode, is_grpc: bool) -> Box<Response<Body>> {
    let detail = denial_detail(decision);
    if is_grpc {
        return resource_exhausted_response(&detail);
    }
    let problem = Problem {
        kind: QUOTA_EXCEEDED,
        title: "Request cannot be satisfied as assigned quota has been exceeded",
        status,
        detail: &detail,
        violated_policies: announced_names(decision),
        request_id: None,
    };
    problem.into_response()
}

/// Return the names of the violated limits that are announced to clients.
fn announced_names<'a>(decision: &Decision<'a>) -> Vec<&'a str> {
    decision.violated().filter(|result| result.limit.announce).map(|result| &*result.limit.name).collect()
}

/// Return the time until a retry as text, rounded up to whole units, so that a client that waits this long does not
/// retry too early. Programs use the number of seconds in `Retry-After` instead.
fn retry_detail(seconds: u64) -> String {
    let (unit, name) = match seconds {
        ..120 => (1, "s"),
        120..7200 => (60, "minutes"),
        7200..172_800 => (3600, "hours"),
        172_800.. => (86_400, "days"),
    };
    ["try again in ", itoa::Buffer::new().format(seconds.div_ceil(unit)), " ", name].concat()
}

/// Build a gRPC response with the status RESOURCE_EXHAUSTED (8) in its headers (trailers-only). gRPC clients read
/// `grpc-status`, and would map a 429 to UNAVAILABLE.
fn resource_exhausted_response(message: &str) -> Box<Response<Body>> {
    let mut response = Box::new(Response::new(Body::full(Bytes::new())));
    set_status_headers(response.headers_mut(), Code::ResourceExhausted, message);
    response
}

fn problem_response(status: StatusCode, kind: &'static str, detail: &str) -> Box<Response<Body>> {
    problem_response_with_id(status, kind, detail, None)
}

/// Build a problem response with the request id in its body and header.
fn problem_response_with_id(
    status: StatusCode,
    kind: &'static str,
    detail: &str,
    request_id: Option<HeaderValue>,
) -> Box<Response<Body>> {
    let id = request_id.as_ref().and_then(|id| id.to_str().ok());
    let problem = Problem { kind, request_id: id, ..Problem::new(status, detail) };
    let mut response = problem.into_response();
    response.headers_mut().extend(request_id.map(|id| (X_REQUEST_ID, id)));
    response
}

// === Proxy-Status (RFC 9209): an error type for clients and CDNs, without names and addresses of upstreams ===

const PROXY_STATUS: HeaderName = HeaderName::from_static("proxy-status");

impl Rejection<'_> {
    /// Return the value of `Proxy-Status`: the name of this gateway and an error type of RFC 9209 §2.3.
    fn proxy_status(&self) -> &'static str {
        match self {
            Rejection::NoRoute
            | Rejection::UnknownHost
            | Rejection::Undescribed(DescriptionError::UnknownEndpoint | DescriptionError::OnlyPrograms) => {
                "sluicegate;error=destination_not_found"
            }
            Rejection::Forbidden
            | Rejection::RateLimited { .. }
            | Rejection::Undescribed(DescriptionError::Peer(_) | DescriptionError::NotTrusted) => {
                "sluicegate;error=http_request_denied"
            }
            Rejection::Identity(error) if error.is_credential_error() => "sluicegate;error=http_request_denied",
            Rejection::Auth(rejection) if rejection.error.is_unavailable() => "sluicegate;error=proxy_internal_error",
            Rejection::Auth(rejection) if rejection.error.status() != StatusCode::BAD_REQUEST => {
                "sluicegate;error=http_request_denied"
            }
            Rejection::InvalidPath(_)
            | Rejection::InvalidHost(_)
            | Rejection::TooManyHeaders
            | Rejection::UriTooLong
            | Rejection::BodyTooLarge
            | Rejection::MethodNotImplemented
            | Rejection::NoWebSocket
            | Rejection::Misdirected
            | Rejection::LowercaseMethod
            | Rejection::UnsupportedTransferCoding
            | Rejection::MethodNotAllowed(_)
            | Rejection::Auth(_)
            | Rejection::Identity(_)
            | Rejection::InvalidCost(_)
            | Rejection::Undescribed(
                DescriptionError::Header(..) | DescriptionError::Attribute(_) | DescriptionError::Forged(_),
            ) => "sluicegate;error=http_request_error",
            Rejection::Llm(LlmError::NoCapacity) | Rejection::Inspect(InspectError::Unread(UnreadBody::NoCapacity)) => {
                "sluicegate;error=proxy_internal_error"
            }
            Rejection::Inspect(InspectError::Tool(_)) => "sluicegate;error=http_request_denied",
            Rejection::Llm(_) | Rejection::Inspect(_) => "sluicegate;error=http_request_error",
            Rejection::StoreUnavailable(_) => "sluicegate;error=proxy_internal_error",
            Rejection::Upstream(error) => upstream_proxy_status(error),
        }
    }
}

fn upstream_proxy_status(error: &UpstreamError) -> &'static str {
    match error {
        UpstreamError::NoHealthyEndpoint { .. }
        | UpstreamError::Unresolved { .. }
        | UpstreamError::NoAccessToken { .. } => "sluicegate;error=destination_unavailable",
        UpstreamError::Overflow { .. } | UpstreamError::TooManyUploads { .. } => {
            "sluicegate;error=connection_limit_reached"
        }
        UpstreamError::Connect { source, .. } => match (TlsFailure::from_error(source), source.kind()) {
            (Some(TlsFailure::Certificate), _) => "sluicegate;error=tls_certificate_error",
            (Some(TlsFailure::Alert), _) => "sluicegate;error=tls_alert_received",
            (Some(TlsFailure::Protocol), _) => "sluicegate;error=tls_protocol_error",
            (None, ErrorKind::ConnectionRefused) => "sluicegate;error=connection_refused",
            (None, ErrorKind::TimedOut) => "sluicegate;error=connection_timeout",
            (None, ErrorKind::HostUnreachable | ErrorKind::NetworkUnreachable) => {
                "sluicegate;error=destination_ip_unroutable"
            }
            (None, _) => "sluicegate;error=destination_unavailable",
        },
        UpstreamError::ConnectTimeout { .. } => "sluicegate;error=connection_timeout",
        UpstreamError::Reset { source, .. } if !is_protocol_error(source) => "sluicegate;error=connection_terminated",
        UpstreamError::Reset { .. }
        | UpstreamError::InvalidResponse { .. }
        | UpstreamError::UnexpectedUpgrade { .. } => "sluicegate;error=http_protocol_error",
        UpstreamError::ResponseTimeout { .. }
        | UpstreamError::RouteTimeout { .. }
        | UpstreamError::ClientDeadline { .. } => "sluicegate;error=http_response_timeout",
        UpstreamError::ClientTimeout | UpstreamError::BodyTooLarge | UpstreamError::ClientAborted(_) => {
            "sluicegate;error=http_request_error"
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retry_detail_rounds_up_to_a_readable_unit() {
        for (seconds, expected) in [
            (1, "1 s"),
            (119, "119 s"),
            (120, "2 minutes"),
            (121, "3 minutes"),
            (7199, "120 minutes"),
            (7200, "2 hours"),
            (86_400, "24 hours"),
            (172_800, "2 days"),
            (870_626, "11 days"),
        ] {
            assert_eq!(retry_detail(seconds), format!("try again in {expected}"));
        }
    }
}
