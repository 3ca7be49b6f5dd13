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
use super::vitals::Vitals;
use super::{Admin, Answer, LimiterAdmin, of_type};
use crate::limit::operator::AdminError;
use crate::limit::store::StoreError;
use crate::runtime::CompiledConfig;

/// Bytes of what is sent here.
const LARGEST: usize = 16 * 1024;

/// Within this time it is here.
const SENT_WITHIN: Duration = Duration::from_secs(10);

type Result<T> = std::result::Result<T, ApiError>;

/// What a request is answered from.
struct Desk<'a> {
    /// The configuration that was in force when it came.
    runtime: &'a CompiledConfig,
    vitals: &'a Vitals,
    operator: &'a LimiterAdmin,
}

/// Answers a request whose caller may look.
pub(super) async fn answer(admin: &Admin, request: Request<Incoming>) -> Answer {
    let methods: &[Method] = match request.uri().path() {
        "/api/top" | "/api/identities" | "/api/differences" => &[Method::GET],
        "/api/reset" => &[Method::POST],
        "/api/overrides" => &[Method::GET, Method::POST, Method::DELETE],
        _ => {
            let known = "there are /api/top, /api/identities, /api/reset, /api/overrides and /api/differences";
            return ApiError::new(StatusCode::NOT_FOUND, known).into_answer();
        }
    };
    if !methods.contains(request.method()) {
        let allowed = methods.iter().map(Method::as_str).collect::<Vec<_>>().join(", ");
        let mut answer = ApiError::new(StatusCode::METHOD_NOT_ALLOWED, format!("{allowed} only")).into_answer();
        // Names of methods are field values.
        answer.headers_mut().extend(HeaderValue::try_from(allowed).ok().map(|allowed| (ALLOW, allowed)));
        return answer;
    }
    respond(admin, request).await.unwrap_or_else(ApiError::into_answer)
}

async fn respond(admin: &Admin, request: Request<Incoming>) -> Result<Answer> {
    let (path, method) = (request.uri().path().to_owned(), request.method().clone());
    let query = Query::read(request.uri().query());
    if method != Method::GET {
        admin.may_write(request.headers())?;
        is_json(&method, request.headers())?;
    }
    let running = admin.vitals.configuration.active();
    let desk = &Desk { runtime: &running.config, vitals: &admin.vitals, operator: &admin.operator };
    match (&*path, method) {
        ("/api/top", _) => top::top(desk, query),
        ("/api/differences", _) => differences::differences(desk, query),
        ("/api/identities", _) => identities::standings(desk, query).await,
        ("/api/reset", _) => identities::reset(desk, body(request).await?).await,
        (_, Method::GET) => overrides::all(desk).await,
        (_, Method::DELETE) => overrides::remove(desk, query).await,
        _ => overrides::put(desk, body(request).await?).await,
    }
}

/// The parameters of a query.
struct Query(Vec<(String, String)>);

impl Query {
    fn read(query: Option<&str>) -> Self {
        let decoded = |text: &str| percent_decode_str(&text.replace('+', " ")).decode_utf8_lossy().into_owned();
        let pairs = query.unwrap_or_default().split('&').filter(|pair| !pair.is_empty());
        let pairs = pairs.map(|pair| pair.split_once('=').unwrap_or((pair, "")));
        Query(pairs.map(|(name, value)| (decoded(name), decoded(value))).collect())
    }

    /// Takes a parameter out.
    fn take(&mut self, name: &str) -> Option<String> {
        let place = self.0.iter().position(|(each, _)| each == name)?;
        Some(self.0.swap_remove(place).1)
    }

    /// Takes out a parameter that is a number in this range.
    fn number(&mut self, name: &str, range: std::ops::RangeInclusive<u64>, otherwise: u64) -> Result<u64> {
        let Some(text) = self.take(name) else { return Ok(otherwise) };
        text.parse().ok().filter(|number| range.contains(number)).ok_or_else(|| {
            ApiError::bad(format!("`{name}` is a whole number from {} to {}", range.start(), range.end()))
        })
    }
}

/// What a page of somebody else's cannot send here unasked: a browser would ask first, and nobody says yes.
fn is_json(method: &Method, headers: &HeaderMap) -> Result<()> {
    let said = headers.get(CONTENT_TYPE).map(|said| said.to_str().unwrap_or_default());
    let kind = said.map(|said| said.split(';').next().unwrap_or_default().trim());
    match kind {
        Some(kind) if kind.eq_ignore_ascii_case("application/json") => Ok(()),
        None if method == Method::DELETE => Ok(()),
        _ => Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "changes are sent as application/json")),
    }
}

async fn body<T: DeserializeOwned>(request: Request<Incoming>) -> Result<T> {
    let late = |_| ApiError::new(StatusCode::REQUEST_TIMEOUT, "the body did not come in time");
    let collected = timeout(SENT_WITHIN, Limited::new(request.into_body(), LARGEST).collect()).await.map_err(late)?;
    let body: Bytes = match collected {
        Ok(body) => body.to_bytes(),
        Err(error) if error.is::<http_body_util::LengthLimitError>() => {
            return Err(ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, format!("at most {LARGEST} bytes")));
        }
        Err(_) => return Err(ApiError::bad("the body did not come whole")),
    };
    // The message names fields and places, and what stands there may be a secret.
    serde_json::from_slice(&body).map_err(|error| match error.classify() {
        serde_json::error::Category::Data if error.to_string().starts_with("unknown field") => {
            ApiError::bad(error.to_string())
        }
        serde_json::error::Category::Data if error.to_string().starts_with("missing field") => {
            ApiError::bad(error.to_string())
        }
        serde_json::error::Category::Data => ApiError::bad("a field has a value of the wrong type"),
        _ => ApiError::bad(format!("not JSON from line {} column {} on", error.line(), error.column())),
    })
}

/// A good answer.
fn json(value: &impl Serialize) -> Answer {
    // Maps with text as keys always serialise.
    of_type(StatusCode::OK, "application/json", serde_json::to_string(value).unwrap_or_default() + "\n")
}

fn of_store(error: &StoreError) -> ApiError {
    ApiError::new(StatusCode::SERVICE_UNAVAILABLE, error.to_string())
}

fn refused(error: &AdminError) -> ApiError {
    match error {
        AdminError::Store(error) => of_store(error),
        AdminError::Quota(error) => ApiError::bad(error.to_string()),
        AdminError::TooManyOverrides => ApiError::new(StatusCode::CONFLICT, error.to_string()),
    }
}

/// µs as seconds, to the ms, rounded up: whoever waits so long does not come too early.
fn seconds(us: u64) -> f64 {
    us.div_ceil(1000) as f64 / 1000.0
}
