//! `/api`: who is limited and what to do about it, as JSON.

mod differences;
mod identities;
mod overrides;
mod top;

use bytes::Bytes;
use http::header::{ALLOW, CONTENT_TYPE, HeaderValue};
use http::{HeaderMap, Method, Request, StatusCode};
use http_body_util::{BodyExt, Limited};
use hyper::body::Incoming;
use percent_encoding::percent_decode_str;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::time::{Duration, timeout};

use super::problem::ApiError;
use super::vitals::AdminState;
use super::{AdminResponse, AdminServer, LimiterAdmin, typed_response};
use crate::limit::operator::AdminError;
use crate::limit::store::StoreError;
use crate::runtime::CompiledConfig;

/// Bytes of what is sent here.
const MAX_BODY_BYTES: usize = 16 * 1024;

/// Within this time it is here.
const BODY_TIMEOUT: Duration = Duration::from_secs(10);

type Result<T> = std::result::Result<T, ApiError>;

/// What a request is answered from.
struct ApiContext<'a> {
    /// The configuration that was in force when it came.
    config: &'a CompiledConfig,
    state: &'a AdminState,
    limiter_admin: &'a LimiterAdmin,
}

/// Answers a request whose caller may look.
pub(super) async fn handle(admin: &AdminServer, request: Request<Incoming>) -> AdminResponse {
    let methods: &[Method] = match request.uri().path() {
        "/api/top" | "/api/identities" | "/api/differences" => &[Method::GET],
        "/api/reset" => &[Method::POST],
        "/api/overrides" => &[Method::GET, Method::POST, Method::DELETE],
        _ => {
            let message = "there are /api/top, /api/identities, /api/reset, /api/overrides and /api/differences";
            return ApiError::new(StatusCode::NOT_FOUND, message).into_response();
        }
    };
    if !methods.contains(request.method()) {
        let allowed = methods.iter().map(Method::as_str).collect::<Vec<_>>().join(", ");
        let mut response = ApiError::new(StatusCode::METHOD_NOT_ALLOWED, format!("{allowed} only")).into_response();
        // Names of methods are field values.
        response.headers_mut().extend(HeaderValue::try_from(allowed).ok().map(|allowed| (ALLOW, allowed)));
        return response;
    }
    dispatch(admin, request).await.unwrap_or_else(ApiError::into_response)
}

async fn dispatch(admin: &AdminServer, request: Request<Incoming>) -> Result<AdminResponse> {
    let (path, method) = (request.uri().path().to_owned(), request.method().clone());
    let query = QueryParams::parse(request.uri().query());
    if method != Method::GET {
        admin.authorize_write(request.headers())?;
        require_json(&method, request.headers())?;
    }
    let active = admin.state.config_handle.active();
    let context = &ApiContext { config: &active.config, state: &admin.state, limiter_admin: &admin.limiter_admin };
    match (&*path, method) {
        ("/api/top", _) => top::top_denied(context, query),
        ("/api/differences", _) => differences::differences(context, query),
        ("/api/identities", _) => identities::identity_statuses(context, query).await,
        ("/api/reset", _) => identities::reset(context, read_json(request).await?).await,
        (_, Method::GET) => overrides::list_overrides(context).await,
        (_, Method::DELETE) => overrides::remove_override(context, query).await,
        _ => overrides::put_override(context, read_json(request).await?).await,
    }
}

/// The parameters of a query.
struct QueryParams(Vec<(String, String)>);

impl QueryParams {
    fn parse(query: Option<&str>) -> Self {
        let decode = |text: &str| percent_decode_str(&text.replace('+', " ")).decode_utf8_lossy().into_owned();
        let pairs = query.unwrap_or_default().split('&').filter(|pair| !pair.is_empty());
        let pairs = pairs.map(|pair| pair.split_once('=').unwrap_or((pair, "")));
        QueryParams(pairs.map(|(name, value)| (decode(name), decode(value))).collect())
    }

    /// Takes a parameter out.
    fn take(&mut self, name: &str) -> Option<String> {
        let index = self.0.iter().position(|(key, _)| key == name)?;
        Some(self.0.swap_remove(index).1)
    }

    /// Takes out a parameter that is a number in this range.
    fn number(&mut self, name: &str, range: std::ops::RangeInclusive<u64>, default: u64) -> Result<u64> {
        let Some(text) = self.take(name) else { return Ok(default) };
        text.parse().ok().filter(|number| range.contains(number)).ok_or_else(|| {
            ApiError::bad_request(format!("`{name}` is a whole number from {} to {}", range.start(), range.end()))
        })
    }
}

/// What a page of somebody else's cannot send here unasked: a browser would ask first, and nobody says yes.
fn require_json(method: &Method, headers: &HeaderMap) -> Result<()> {
    let content_type = headers.get(CONTENT_TYPE).map(|value| value.to_str().unwrap_or_default());
    let media_type = content_type.map(|value| value.split(';').next().unwrap_or_default().trim());
    match media_type {
        Some(media_type) if media_type.eq_ignore_ascii_case("application/json") => Ok(()),
        None if method == Method::DELETE => Ok(()),
        _ => Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "changes are sent as application/json")),
    }
}

async fn read_json<T: DeserializeOwned>(request: Request<Incoming>) -> Result<T> {
    let on_timeout = |_| ApiError::new(StatusCode::REQUEST_TIMEOUT, "the body did not come in time");
    let collected =
        timeout(BODY_TIMEOUT, Limited::new(request.into_body(), MAX_BODY_BYTES).collect()).await.map_err(on_timeout)?;
    let body: Bytes = match collected {
        Ok(body) => body.to_bytes(),
        Err(error) if error.is::<http_body_util::LengthLimitError>() => {
            return Err(ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, format!("at most {MAX_BODY_BYTES} bytes")));
        }
        Err(_) => return Err(ApiError::bad_request("the body did not come whole")),
    };
    // The message names fields and places, and what stands there may be a secret.
    serde_json::from_slice(&body).map_err(|error| match error.classify() {
        serde_json::error::Category::Data if error.to_string().starts_with("unknown field") => {
            ApiError::bad_request(error.to_string())
        }
        serde_json::error::Category::Data if error.to_string().starts_with("missing field") => {
            ApiError::bad_request(error.to_string())
        }
        serde_json::error::Category::Data => ApiError::bad_request("a field has a value of the wrong type"),
        _ => ApiError::bad_request(format!("not JSON from line {} column {} on", error.line(), error.column())),
    })
}

/// A good answer.
fn json_response(value: &impl Serialize) -> AdminResponse {
    // Maps with text as keys always serialise.
    typed_response(StatusCode::OK, "application/json", serde_json::to_string(value).unwrap_or_default() + "\n")
}

fn store_error(error: &StoreError) -> ApiError {
    ApiError::new(StatusCode::SERVICE_UNAVAILABLE, error.to_string())
}

fn admin_error(error: &AdminError) -> ApiError {
    match error {
        AdminError::Store(error) => store_error(error),
        AdminError::Quota(error) => ApiError::bad_request(error.to_string()),
        AdminError::TooManyOverrides => ApiError::new(StatusCode::CONFLICT, error.to_string()),
    }
}

/// µs as seconds, to the ms, rounded up: whoever waits so long does not come too early.
fn seconds_rounded_up(us: u64) -> f64 {
    us.div_ceil(1000) as f64 / 1000.0
}
