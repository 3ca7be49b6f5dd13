//! From a rejection to a response: the only chooser of statuses that are ours.

use bytes::Bytes;
use http::header::{
    ACCESS_CONTROL_EXPOSE_HEADERS, ALLOW, CACHE_CONTROL, CONNECTION, CONTENT_TYPE, HeaderName, HeaderValue,
    RETRY_AFTER, WWW_AUTHENTICATE,
};
use http::{Method, Response, StatusCode};

use crate::http::body::Body;
use crate::http::headers::X_REQUEST_ID;
use crate::http::problem::{NO_STORE, Problem};
use crate::http::ratelimit_headers;
use crate::http::ratelimit_headers::{HeaderStyle, LimitStatus, limit_status};
use crate::http::target::PathError;
use crate::identity::IdentityError;
use crate::identity::descriptor::Descriptor;
use crate::limiter::algorithm::Status;
use crate::limiter::decision::Decision;
use crate::limiter::fallback::StoreUnavailable;
use crate::snapshot::cost::CostError;
use crate::upstream::UpstreamError;

/// The ways in which a request ends without an upstream's answer.
#[derive(Debug)]
pub enum Rejection<'a> {
    /// The path has no canonical form.
    InvalidPath(PathError),
    /// The host is missing, doubled or malformed.
    InvalidHost(&'static str),
    /// HTTP/2 with more headers than `server.max_headers`.
    TooManyHeaders,
    /// The target is longer than `server.max_uri`.
    UriTooLong,
    /// The body is longer than the route allows.
    BodyTooLarge,
    /// CONNECT and TRACE are not for gateways.
    MethodNotImplemented,
    /// The method has letters in lower case.
    LowercaseMethod,
    /// The body is coded in a way that would be lost on the way.
    UnsupportedTransferCoding,
    /// No route matches.
    NoRoute,
    /// Routes match, but for other methods.
    MethodNotAllowed(Vec<Method>),
    /// A limit of the route asks for an identity that the request does not have.
    Identity(IdentityError),
    /// A field that a limit's cost is taken from says none.
    InvalidCost(CostError),
    /// A limit is exceeded.
    RateLimited {
        /// Which, and for how long.
        decision: Decision<'a>,
        /// How the caller is told.
        header_styles: &'a [HeaderStyle],
        /// The Access-Control-Expose-Headers, if the route wants it.
        expose_headers: Option<&'a HeaderValue>,
        /// Whether the caller is a gRPC client.
        is_grpc: bool,
    },
    /// The limits cannot be checked.
    StoreUnavailable(StoreUnavailable),
    /// The upstream gave no answer.
    Upstream(UpstreamError),
}

/// Problem types of draft-ietf-httpapi-ratelimit-headers-11 §7; all others are fully said by their status.
const QUOTA_EXCEEDED: &str = "https://iana.org/assignments/http-problem-types#quota-exceeded";
const REDUCED_CAPACITY: &str = "https://iana.org/assignments/http-problem-types#temporary-reduced-capacity";
const ABOUT_BLANK: &str = "about:blank";

const BODY_TOO_LARGE: (StatusCode, &str, &str) =
    (StatusCode::PAYLOAD_TOO_LARGE, "the request body is longer than the route allows", "body-too-large");

/// How long to stay away while limits cannot be checked: the store is asked again within this time.
const STORE_RETRY_AFTER_S: u64 = 1;

/// How long to stay away from an upstream that has too much to do.
const OVERFLOW_RETRY_AFTER_S: u64 = 1;

impl Rejection<'_> {
    /// The response, and one word for the access log. With `request_id` those that are not the client's doing say which request
    /// it was, for whoever reads our log or the upstream's.
    pub fn into_response(self, request_id: Option<HeaderValue>) -> (Response<Body>, &'static str) {
        match self {
            Rejection::InvalidPath(error) => {
                (problem_response(StatusCode::BAD_REQUEST, ABOUT_BLANK, &error.to_string()), "bad-path")
            }
            Rejection::InvalidHost(detail) => {
                (problem_response(StatusCode::BAD_REQUEST, ABOUT_BLANK, detail), "bad-host")
            }
            Rejection::TooManyHeaders => {
                let status = StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE;
                (problem_response(status, ABOUT_BLANK, "the request has too many headers"), "too-many-headers")
            }
            Rejection::UriTooLong => {
                (problem_response(StatusCode::URI_TOO_LONG, ABOUT_BLANK, "the target is too long"), "uri-too-long")
            }
            Rejection::BodyTooLarge => {
                let (status, detail, outcome) = BODY_TOO_LARGE;
                (problem_response(status, ABOUT_BLANK, detail), outcome)
            }
            Rejection::MethodNotImplemented => (
                problem_response(StatusCode::NOT_IMPLEMENTED, ABOUT_BLANK, "the gateway does not serve this method"),
                "unsupported-method",
            ),
            Rejection::LowercaseMethod => {
                (problem_response(StatusCode::BAD_REQUEST, ABOUT_BLANK, "methods are in upper case"), "bad-method")
            }
            Rejection::UnsupportedTransferCoding => {
                let detail = "the only transfer coding that the gateway understands is chunked";
                let mut response = problem_response(StatusCode::NOT_IMPLEMENTED, ABOUT_BLANK, detail);
                // RFC 9112 §6.1: nobody can be sure where the next request begins.
                response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
                (response, "unsupported-transfer-coding")
            }
            Rejection::NoRoute => {
                (problem_response(StatusCode::NOT_FOUND, ABOUT_BLANK, "no route matches the request"), "no-route")
            }
            Rejection::MethodNotAllowed(allowed) => {
                let mut response = problem_response(
                    StatusCode::METHOD_NOT_ALLOWED,
                    ABOUT_BLANK,
                    "the route does not serve this method",
                );
                let list = allowed.iter().map(Method::as_str).collect::<Vec<_>>().join(", ");
                // Methods are tokens, so the list is a valid value.
                response.headers_mut().extend(HeaderValue::try_from(list).ok().map(|value| (ALLOW, value)));
                (response, "method-not-allowed")
            }
            Rejection::Identity(error) => (identity_error_response(&error), "no-identity"),
            Rejection::InvalidCost(error) => {
                (problem_response(StatusCode::BAD_REQUEST, ABOUT_BLANK, &error.to_string()), "bad-cost")
            }
            Rejection::RateLimited { decision, header_styles, expose_headers, is_grpc } => {
                let mut response = rate_limited_response(&decision, header_styles, is_grpc);
                response
                    .headers_mut()
                    .extend(expose_headers.map(|names| (ACCESS_CONTROL_EXPOSE_HEADERS, names.clone())));
                (response, "rate-limited")
            }
            Rejection::StoreUnavailable(_) => {
                let detail = "limits cannot be checked at the moment";
                let mut response =
                    problem_response_with_id(StatusCode::SERVICE_UNAVAILABLE, REDUCED_CAPACITY, detail, request_id);
                response.headers_mut().insert(RETRY_AFTER, HeaderValue::from(STORE_RETRY_AFTER_S));
                (response, "store-unavailable")
            }
            Rejection::Upstream(error) => {
                let (status, detail, outcome) = upstream_failure(&error);
                let mut response = problem_response_with_id(status, ABOUT_BLANK, detail, request_id);
                match error {
                    UpstreamError::NoHealthyEndpoint { retry_after: after, .. } => {
                        ratelimit_headers::set_retry_after(response.headers_mut(), after.as_micros() as u64);
                    }
                    UpstreamError::Overflow { .. } => {
                        response.headers_mut().insert(RETRY_AFTER, HeaderValue::from(OVERFLOW_RETRY_AFTER_S));
                    }
                    _ => {}
                }
                (response, outcome)
            }
        }
    }
}

fn identity_error_response(error: &IdentityError) -> Response<Body> {
    // RFC 9110 §11.6.1: a 401 names a scheme; those of bearer tokens are RFC 6750's §3.
    let challenge = match error {
        IdentityError::MissingApiKey(_) | IdentityError::UnknownApiKey => Some("ApiKey"),
        IdentityError::Missing(Descriptor::Jwt(_)) => Some("Bearer"),
        // No registered scheme is for certificates, and a 401 has to name one.
        IdentityError::Missing(Descriptor::ClientCert) => Some("ClientCertificate"),
        IdentityError::Token(_) => Some("Bearer error=\"invalid_token\""),
        IdentityError::Ambiguous(_) | IdentityError::Malformed(_) | IdentityError::Missing(_) => None,
    };
    let status = if challenge.is_some() { StatusCode::UNAUTHORIZED } else { StatusCode::BAD_REQUEST };
    let mut response = problem_response(status, ABOUT_BLANK, &error.to_string());
    response.headers_mut().extend(challenge.map(|challenge| (WWW_AUTHENTICATE, HeaderValue::from_static(challenge))));
    response
}

/// Status, detail and one word for the access log.
fn upstream_failure(error: &UpstreamError) -> (StatusCode, &'static str, &'static str) {
    // What failed is in the log; the client is not told addresses.
    match error {
        UpstreamError::NoHealthyEndpoint { .. } => {
            (StatusCode::SERVICE_UNAVAILABLE, "the upstream has no healthy server at the moment", "no-healthy-upstream")
        }
        UpstreamError::Overflow { .. } => {
            (StatusCode::SERVICE_UNAVAILABLE, "the upstream has no room at the moment", "upstream-overflow")
        }
        UpstreamError::Connect { .. } => {
            (StatusCode::BAD_GATEWAY, "no connection to the upstream could be made", "upstream-connect-failure")
        }
        UpstreamError::ConnectTimeout { .. } => {
            (StatusCode::BAD_GATEWAY, "connecting to the upstream took longer than it may", "upstream-connect-failure")
        }
        UpstreamError::Reset { .. } | UpstreamError::InvalidResponse { .. } => (
            StatusCode::BAD_GATEWAY,
            "the upstream broke off before it answered, or sent no valid response",
            "upstream-reset",
        ),
        UpstreamError::UnexpectedUpgrade { .. } => {
            (StatusCode::BAD_GATEWAY, "the upstream switched to a protocol that it was not asked for", "upstream-reset")
        }
        UpstreamError::ResponseTimeout { .. } => (
            StatusCode::GATEWAY_TIMEOUT,
            "the upstream took longer than it may before its response began",
            "upstream-timeout",
        ),
        UpstreamError::RouteTimeout { .. } => {
            (StatusCode::GATEWAY_TIMEOUT, "the request took longer in all than its route allows", "route-timeout")
        }
        UpstreamError::ClientTimeout => {
            (StatusCode::REQUEST_TIMEOUT, "the request body did not arrive in time", "client-timeout")
        }
        UpstreamError::BodyTooLarge => BODY_TOO_LARGE,
        UpstreamError::ClientAborted(_) => (StatusCode::BAD_REQUEST, "the request body broke off", "client-aborted"),
    }
}

/// The status of the answer for an upstream that gave none.
pub fn upstream_status(error: &UpstreamError) -> StatusCode {
    upstream_failure(error).0
}

/// The limit that older dialects tell of: the violated one with the longest wait, else the one with the smallest share left.
pub fn effective_limit<'a>(decision: &Decision<'a>) -> Option<LimitStatus<'a>> {
    let violated = violated_statuses(decision).max_by_key(|status| status.reset_us);
    let statuses = decision.results.iter().map(limit_status);
    // r1/q1 < r2/q2, without the division.
    let product = |one: &LimitStatus<'_>, other: &LimitStatus<'_>| u128::from(one.remaining) * u128::from(other.quota);
    violated.or_else(|| statuses.min_by(|one, other| product(one, other).cmp(&product(other, one))))
}

/// The violated limits with their waits, in whole seconds so that the largest agrees with Retry-After.
fn violated_statuses<'a, 'b>(decision: &'b Decision<'a>) -> impl Iterator<Item = LimitStatus<'a>> + use<'a, 'b> {
    decision.violated().filter(|result| result.outcome.status != Status::CostTooLarge).map(|result| {
        let wait_us = if result.outcome.status == Status::Saturated { 0 } else { result.outcome.retry_us };
        LimitStatus { reset_us: ratelimit_headers::ceil_seconds(wait_us).max(1) * 1_000_000, ..limit_status(result) }
    })
}

fn rate_limited_response(decision: &Decision<'_>, header_styles: &[HeaderStyle], is_grpc: bool) -> Response<Body> {
    let retry_us = decision.retry_us();
    let detail = match retry_us {
        Some(us) => format!("try again in {} s", ratelimit_headers::ceil_seconds(us).max(1)),
        None => "the request costs more than the limit ever allows".to_owned(),
    };
    let problem = Problem {
        kind: QUOTA_EXCEEDED,
        title: "Request cannot be satisfied as assigned quota has been exceeded",
        status: StatusCode::TOO_MANY_REQUESTS,
        detail: &detail,
        violated_policies: decision.violated().map(|result| &*result.limit.name).collect(),
        request_id: None,
    };
    let mut response = if is_grpc { resource_exhausted_response(&detail) } else { problem.into_response() };
    let headers = response.headers_mut();
    let policy = ratelimit_headers::ratelimit_policy(decision.results.iter().map(limit_status));
    ratelimit_headers::append_ratelimit_headers(
        headers,
        header_styles,
        policy,
        violated_statuses(decision),
        effective_limit(decision),
        decision.now_us,
    );
    if let Some(retry_us) = retry_us {
        ratelimit_headers::set_retry_after(headers, retry_us);
    }
    response
}

/// A response of trailers only, as gRPC over HTTP/2 has it: clients look at `grpc-status`, and take a 429 for UNAVAILABLE.
fn resource_exhausted_response(message: &str) -> Response<Body> {
    let mut response = Response::new(Body::full(Bytes::new()));
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    headers.insert(CACHE_CONTROL, NO_STORE);
    headers.insert("grpc-status", HeaderValue::from_static("8"));
    // Our own words, in ASCII: a valid value without percent-encoding.
    headers
        .extend(HeaderValue::from_str(message).ok().map(|message| (HeaderName::from_static("grpc-message"), message)));
    response
}

fn problem_response(status: StatusCode, kind: &str, detail: &str) -> Response<Body> {
    problem_response_with_id(status, kind, detail, None)
}

/// A problem that says which request it was about.
fn problem_response_with_id(
    status: StatusCode,
    kind: &str,
    detail: &str,
    request_id: Option<HeaderValue>,
) -> Response<Body> {
    let title = status.canonical_reason().unwrap_or("Error");
    let id = request_id.as_ref().and_then(|id| id.to_str().ok());
    let problem = Problem { kind, title, status, detail, violated_policies: Vec::new(), request_id: id };
    let mut response = problem.into_response();
    response.headers_mut().extend(request_id.map(|id| (X_REQUEST_ID, id)));
    response
}
