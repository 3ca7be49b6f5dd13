//! From a rejection to a response: the only chooser of statuses that are ours.

mod problem;

use bytes::Bytes;
use http::header::{
    ACCESS_CONTROL_EXPOSE_HEADERS, ALLOW, CACHE_CONTROL, CONNECTION, CONTENT_TYPE, HeaderName, HeaderValue,
    RETRY_AFTER, WWW_AUTHENTICATE,
};
use http::{Method, Response, StatusCode};

use crate::cost::CostError;
use crate::http::body::Body;
use crate::http::fields::{self, Counts, Dialect, Standing};
use crate::http::headers::X_REQUEST_ID;
use crate::http::path::PathError;
use crate::identity::{IdentityError, Source};
use crate::limit::algorithm::{Rule, Status};
use crate::limit::decision::{Decision, Judged};
use crate::limit::outage::Unavailable;
use crate::upstream::UpstreamError;
use problem::{NO_STORE, Problem};

/// The ways in which a request ends without an upstream's answer.
#[derive(Debug)]
pub enum Rejection<'a> {
    /// The path has no canonical form.
    Path(PathError),
    /// The host is missing, doubled or malformed.
    Host(&'static str),
    /// HTTP/2 with more headers than `server.max_headers`.
    TooManyHeaders,
    /// The target is longer than `server.max_uri`.
    UriTooLong,
    /// The body is longer than the route allows.
    BodyTooLarge,
    /// CONNECT and TRACE are not for gateways.
    Method,
    /// The method has letters in lower case.
    MethodCase,
    /// The body is coded in a way that would be lost on the way.
    TransferCoding,
    /// No route matches.
    NoRoute,
    /// Routes match, but for other methods.
    MethodNotAllowed(Vec<Method>),
    /// A limit of the route asks for an identity that the request does not have.
    Identity(IdentityError),
    /// A field that a limit's cost is taken from says none.
    Cost(CostError),
    /// A limit is exceeded.
    OverLimit {
        /// Which, and for how long.
        decision: Decision<'a>,
        /// How the caller is told.
        dialects: &'a [Dialect],
        /// The Access-Control-Expose-Headers, if the route wants it.
        expose: Option<&'a HeaderValue>,
        /// Whether the caller is a gRPC client.
        grpc: bool,
    },
    /// The limits cannot be checked.
    Unavailable(Unavailable),
    /// The upstream gave no answer.
    Upstream(UpstreamError),
}

/// Problem types of draft-ietf-httpapi-ratelimit-headers-11 §7; all others are fully said by their status.
const QUOTA_EXCEEDED: &str = "https://iana.org/assignments/http-problem-types#quota-exceeded";
const REDUCED_CAPACITY: &str = "https://iana.org/assignments/http-problem-types#temporary-reduced-capacity";
const BLANK: &str = "about:blank";

const TOO_LARGE: (StatusCode, &str, &str) =
    (StatusCode::PAYLOAD_TOO_LARGE, "the request body is longer than the route allows", "body-too-large");

/// How long to stay away while limits cannot be checked: the store is asked again within this time.
const STORE_RETRY_S: u64 = 1;

/// How long to stay away from an upstream that has too much to do.
const BUSY_RETRY_S: u64 = 1;

impl Rejection<'_> {
    /// The response, and one word for the access log. With `request_id` those that are not the client's doing say which request
    /// it was, for whoever reads our log or the upstream's.
    pub fn into_response(self, request_id: Option<HeaderValue>) -> (Response<Body>, &'static str) {
        match self {
            Rejection::Path(error) => (problem(StatusCode::BAD_REQUEST, BLANK, &error.to_string()), "bad-path"),
            Rejection::Host(detail) => (problem(StatusCode::BAD_REQUEST, BLANK, detail), "bad-host"),
            Rejection::TooManyHeaders => {
                let status = StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE;
                (problem(status, BLANK, "the request has too many headers"), "too-many-headers")
            }
            Rejection::UriTooLong => {
                (problem(StatusCode::URI_TOO_LONG, BLANK, "the target is too long"), "uri-too-long")
            }
            Rejection::BodyTooLarge => {
                let (status, detail, outcome) = TOO_LARGE;
                (problem(status, BLANK, detail), outcome)
            }
            Rejection::Method => (
                problem(StatusCode::NOT_IMPLEMENTED, BLANK, "the gateway does not serve this method"),
                "unsupported-method",
            ),
            Rejection::MethodCase => {
                (problem(StatusCode::BAD_REQUEST, BLANK, "methods are in upper case"), "bad-method")
            }
            Rejection::TransferCoding => {
                let detail = "the only transfer coding that the gateway understands is chunked";
                let mut response = problem(StatusCode::NOT_IMPLEMENTED, BLANK, detail);
                // RFC 9112 §6.1: nobody can be sure where the next request begins.
                response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
                (response, "unsupported-transfer-coding")
            }
            Rejection::NoRoute => (problem(StatusCode::NOT_FOUND, BLANK, "no route matches the request"), "no-route"),
            Rejection::MethodNotAllowed(allowed) => {
                let mut response =
                    problem(StatusCode::METHOD_NOT_ALLOWED, BLANK, "the route does not serve this method");
                let list = allowed.iter().map(Method::as_str).collect::<Vec<_>>().join(", ");
                // Methods are tokens, so the list is a valid value.
                response.headers_mut().extend(HeaderValue::try_from(list).ok().map(|value| (ALLOW, value)));
                (response, "method-not-allowed")
            }
            Rejection::Identity(error) => (unidentified(&error), "no-identity"),
            Rejection::Cost(error) => (problem(StatusCode::BAD_REQUEST, BLANK, &error.to_string()), "bad-cost"),
            Rejection::OverLimit { decision, dialects, expose, grpc } => {
                let mut response = over_limit(&decision, dialects, grpc);
                response.headers_mut().extend(expose.map(|names| (ACCESS_CONTROL_EXPOSE_HEADERS, names.clone())));
                (response, "rate-limited")
            }
            Rejection::Unavailable(_) => {
                let detail = "limits cannot be checked at the moment";
                let mut response = traceable(StatusCode::SERVICE_UNAVAILABLE, REDUCED_CAPACITY, detail, request_id);
                response.headers_mut().insert(RETRY_AFTER, HeaderValue::from(STORE_RETRY_S));
                (response, "store-unavailable")
            }
            Rejection::Upstream(error) => {
                let (status, detail, outcome) = upstream(&error);
                let mut response = traceable(status, BLANK, detail, request_id);
                match error {
                    UpstreamError::NoServer { after, .. } => {
                        fields::retry_after(response.headers_mut(), after.as_micros() as u64);
                    }
                    UpstreamError::Busy { .. } => {
                        response.headers_mut().insert(RETRY_AFTER, HeaderValue::from(BUSY_RETRY_S));
                    }
                    _ => {}
                }
                (response, outcome)
            }
        }
    }
}

fn unidentified(error: &IdentityError) -> Response<Body> {
    // RFC 9110 §11.6.1: a 401 names a scheme; those of bearer tokens are RFC 6750's §3.
    let challenge = match error {
        IdentityError::MissingKey(_) | IdentityError::UnknownKey => Some("ApiKey"),
        IdentityError::Missing(Source::Jwt(_)) => Some("Bearer"),
        // No registered scheme is for certificates, and a 401 has to name one.
        IdentityError::Missing(Source::ClientCert) => Some("ClientCertificate"),
        IdentityError::Token(_) => Some("Bearer error=\"invalid_token\""),
        IdentityError::Ambiguous(_) | IdentityError::Malformed(_) | IdentityError::Missing(_) => None,
    };
    let status = if challenge.is_some() { StatusCode::UNAUTHORIZED } else { StatusCode::BAD_REQUEST };
    let mut response = problem(status, BLANK, &error.to_string());
    response.headers_mut().extend(challenge.map(|challenge| (WWW_AUTHENTICATE, HeaderValue::from_static(challenge))));
    response
}

/// Status, detail and one word for the access log.
fn upstream(error: &UpstreamError) -> (StatusCode, &'static str, &'static str) {
    // What failed is in the log; the client is not told addresses.
    match error {
        UpstreamError::NoServer { .. } => {
            (StatusCode::SERVICE_UNAVAILABLE, "the upstream has no healthy server at the moment", "no-healthy-upstream")
        }
        UpstreamError::Busy { .. } => {
            (StatusCode::SERVICE_UNAVAILABLE, "the upstream has no room at the moment", "upstream-overflow")
        }
        UpstreamError::Connect { .. } => {
            (StatusCode::BAD_GATEWAY, "no connection to the upstream could be made", "upstream-connect-failure")
        }
        UpstreamError::ConnectTimeout { .. } => {
            (StatusCode::BAD_GATEWAY, "connecting to the upstream took longer than it may", "upstream-connect-failure")
        }
        UpstreamError::Broken { .. } | UpstreamError::Malformed { .. } => (
            StatusCode::BAD_GATEWAY,
            "the upstream broke off before it answered, or sent no valid response",
            "upstream-reset",
        ),
        UpstreamError::Switched { .. } => {
            (StatusCode::BAD_GATEWAY, "the upstream switched to a protocol that it was not asked for", "upstream-reset")
        }
        UpstreamError::ResponseTimeout { .. } => (
            StatusCode::GATEWAY_TIMEOUT,
            "the upstream took longer than it may before its response began",
            "upstream-timeout",
        ),
        UpstreamError::Overdue { .. } => {
            (StatusCode::GATEWAY_TIMEOUT, "the request took longer in all than its route allows", "route-timeout")
        }
        UpstreamError::ClientStalled => {
            (StatusCode::REQUEST_TIMEOUT, "the request body did not arrive in time", "client-timeout")
        }
        UpstreamError::BodyTooLarge => TOO_LARGE,
        UpstreamError::ClientBroken(_) => (StatusCode::BAD_REQUEST, "the request body broke off", "client-aborted"),
    }
}

/// The status of the answer for an upstream that gave none.
pub fn upstream_status(error: &UpstreamError) -> StatusCode {
    upstream(error).0
}

/// What a limit tells on success.
pub fn standing<'a>(judged: &Judged<'a>) -> Standing<'a> {
    let Judged { limit, quota, outcome, .. } = judged;
    // Nobody knows when requests in flight end.
    let (counts, until_us) = match limit.standard.rule {
        Rule::Concurrency(_) => (Counts::InFlight, 0),
        _ => (Counts::Units { window_s: quota.window_us.map(fields::seconds) }, outcome.reset_us),
    };
    Standing { name: &limit.name, quota: quota.count, counts, remaining: outcome.remaining, until_us }
}

/// The limit that older dialects tell of: the violated one with the longest wait, else the one with the smallest share left.
pub fn binding<'a>(decision: &Decision<'a>) -> Option<Standing<'a>> {
    let waits = waits(decision).max_by_key(|standing| standing.until_us);
    let shares = decision.limits.iter().map(standing);
    // r1/q1 < r2/q2, without the division.
    let product = |one: &Standing<'_>, other: &Standing<'_>| u128::from(one.remaining) * u128::from(other.quota);
    waits.or_else(|| shares.min_by(|one, other| product(one, other).cmp(&product(other, one))))
}

/// The violated limits with their waits, in whole seconds so that the largest agrees with Retry-After.
fn waits<'a, 'b>(decision: &'b Decision<'a>) -> impl Iterator<Item = Standing<'a>> + use<'a, 'b> {
    decision.violated().filter(|judged| judged.outcome.status != Status::Never).map(|judged| {
        let wait_us = if judged.outcome.status == Status::Busy { 0 } else { judged.outcome.retry_us };
        Standing { until_us: fields::seconds(wait_us).max(1) * 1_000_000, ..standing(judged) }
    })
}

fn over_limit(decision: &Decision<'_>, dialects: &[Dialect], grpc: bool) -> Response<Body> {
    let retry_us = decision.retry_us();
    let detail = match retry_us {
        Some(us) => format!("try again in {} s", fields::seconds(us).max(1)),
        None => "the request costs more than the limit ever allows".to_owned(),
    };
    let problem = Problem {
        kind: QUOTA_EXCEEDED,
        title: "Request cannot be satisfied as assigned quota has been exceeded",
        status: StatusCode::TOO_MANY_REQUESTS,
        detail: &detail,
        violated_policies: decision.violated().map(|judged| &*judged.limit.name).collect(),
        request_id: None,
    };
    let mut response = if grpc { resource_exhausted(&detail) } else { problem.into_response() };
    let headers = response.headers_mut();
    let policy = fields::policy(decision.limits.iter().map(standing));
    fields::advertise(headers, dialects, policy, waits(decision), binding(decision), decision.now_us);
    if let Some(retry_us) = retry_us {
        fields::retry_after(headers, retry_us);
    }
    response
}

/// A response of trailers only, as gRPC over HTTP/2 has it: clients look at `grpc-status`, and take a 429 for UNAVAILABLE.
fn resource_exhausted(message: &str) -> Response<Body> {
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

fn problem(status: StatusCode, kind: &str, detail: &str) -> Response<Body> {
    traceable(status, kind, detail, None)
}

/// A problem that says which request it was about.
fn traceable(status: StatusCode, kind: &str, detail: &str, request_id: Option<HeaderValue>) -> Response<Body> {
    let title = status.canonical_reason().unwrap_or("Error");
    let id = request_id.as_ref().and_then(|id| id.to_str().ok());
    let problem = Problem { kind, title, status, detail, violated_policies: Vec::new(), request_id: id };
    let mut response = problem.into_response();
    response.headers_mut().extend(request_id.map(|id| (X_REQUEST_ID, id)));
    response
}
