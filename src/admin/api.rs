//! `/api`: the JSON API of the admin listener, for example for the usage, resets and quota overrides of identities.

mod identities;

use std::time::Duration;

use bytes::Bytes;
use http::header::{ALLOW, CONTENT_TYPE, HeaderValue};
use http::{HeaderMap, Method, Request, StatusCode};
use http_body_util::{BodyExt, Limited};
use hyper::body::Incoming;
use jiff::Timestamp;
use jiff::civil::Date;
use percent_encoding::percent_decode_str;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize, Serializer};
use tokio::time::timeout;

use crate::admin::api::identities::IdentityQuery;
use crate::admin::configuration::{absolute_path, format_rfc3339};
use crate::admin::events::{ConnectionCounts, EventStream, PeriodStats};
use crate::admin::usage::{FilterError, GroupBy, IdentityFilter, UsageFilter, UsageReport};
use crate::admin::{AdminResponse, AdminServer, AdminState, typed_response};
use crate::http::problem;
use crate::http::problem::Problem;
use crate::identity::display::IdentityDisplay;
use crate::limiter::admin::LimiterAdmin;
use crate::limiter::clock::{monotonic, unix_us};
use crate::limiter::key::Identity;
use crate::limiter::metrics::MetricFamily;
use crate::limiter::store::UsageError;
use crate::limiter::verdict::StoreError;
use crate::proxy::metrics::{HeavyHitter, TopIdentities, WINDOW};
use crate::snapshot::cost::Cost;
use crate::snapshot::{CompiledConfig, CompiledLimit};
use crate::tls::Certificate;

/// Maximum size of a request body, in bytes.
const MAX_BODY_BYTES: usize = 16 * 1024;

/// Maximum time to receive a request body.
const BODY_TIMEOUT: Duration = Duration::from_secs(10);

/// Error text of the 404 response for paths that the API does not have.
const NOT_FOUND: &str = "not found: the API has /api/status, /api/config, /api/reload, /api/live, /api/top, \
                         /api/identities, /api/usage, /api/reset, /api/overrides, /api/certificates, \
                         /api/certificates/renew and /api/differences";

type Result<T> = std::result::Result<T, ApiError>;

/// The state that request handlers need.
struct ApiContext<'a> {
    /// The configuration that was active when the request arrived.
    config: &'a CompiledConfig,
    state: &'a AdminState,
    limiter_admin: &'a LimiterAdmin,
    event_stream: &'a EventStream,
}

/// Handle a request. The caller has already authorized it to read data. This function also authorizes requests that
/// change data.
pub(super) async fn handle(admin: &AdminServer, request: Request<Incoming>) -> AdminResponse {
    let methods: &[Method] = match request.uri().path() {
        "/api/top" | "/api/identities" | "/api/usage" | "/api/differences" | "/api/certificates" | "/api/status" => {
            &[Method::GET]
        }
        "/api/reset" | "/api/certificates/renew" => &[Method::POST],
        "/api/overrides" => &[Method::GET, Method::POST, Method::DELETE],
        _ => {
            return ApiError::new(StatusCode::NOT_FOUND, NOT_FOUND).into_response();
        }
    };
    if !methods.contains(request.method()) {
        let allowed = methods.iter().map(Method::as_str).collect::<Vec<_>>().join(", ");
        let mut response =
            ApiError::new(StatusCode::METHOD_NOT_ALLOWED, format!("method not allowed: use {allowed}")).into_response();
        // The conversion cannot fail, because method names are valid header values.
        response.headers_mut().extend(HeaderValue::try_from(allowed).ok().map(|allowed| (ALLOW, allowed)));
        return response;
    }
    dispatch(admin, request).await.unwrap_or_else(ApiError::into_response)
}

async fn dispatch(admin: &AdminServer, request: Request<Incoming>) -> Result<AdminResponse> {
    let path = request.uri().path().to_owned();
    let method = request.method().clone();
    let query = QueryParams::parse(request.uri().query());
    if method != Method::GET {
        admin.authorize_write(request.headers())?;
        require_json(&method, request.headers())?;
    }
    let active = admin.state.config_handle.active();
    let context = &ApiContext {
        config: &active.config,
        state: &admin.state,
        limiter_admin: &admin.limiter_admin,
        event_stream: &admin.event_stream,
    };
    match (&*path, method) {
        ("/api/top", _) => top_identities(context, query),
        ("/api/status", _) => Ok(show_status(context)),
        ("/api/differences", _) => differences(context, query),
        ("/api/certificates", _) => Ok(list_certificates(context)),
        ("/api/certificates/renew", _) => renew_certificate(context, &read_json(request).await?),
        ("/api/identities", _) => identities::identity_statuses(context, query).await,
        ("/api/usage", _) => usage(context, query).await,
        ("/api/reset", _) => identities::reset(context, read_json(request).await?).await,
        (_, Method::GET) => identities::list_overrides(context).await,
        (_, Method::DELETE) => identities::remove_override(context, query).await,
        _ => identities::put_override(context, read_json(request).await?).await,
    }
}

/// Decoded query parameters.
struct QueryParams(Vec<(String, String)>);

impl QueryParams {
    fn parse(query: Option<&str>) -> Self {
        let decode = |text: &str| percent_decode_str(&text.replace('+', " ")).decode_utf8_lossy().into_owned();
        let pairs = query.unwrap_or_default().split('&').filter(|pair| !pair.is_empty());
        let pairs = pairs.map(|pair| pair.split_once('=').unwrap_or((pair, "")));
        QueryParams(pairs.map(|(name, value)| (decode(name), decode(value))).collect())
    }

    /// Remove a parameter from the query and return its value.
    fn take(&mut self, name: &str) -> Option<String> {
        let index = self.0.iter().position(|(key, _)| key == name)?;
        Some(self.0.swap_remove(index).1)
    }

    /// Remove a numeric parameter from the query and return its value, or `default` if the query does not have it.
    ///
    /// # Errors
    /// The value is not a number in `range`.
    fn number(&mut self, name: &str, range: std::ops::RangeInclusive<u64>, default: u64) -> Result<u64> {
        let Some(text) = self.take(name) else { return Ok(default) };
        text.parse().ok().filter(|number| range.contains(number)).ok_or_else(|| {
            ApiError::bad_request(format!("`{name}` must be an integer from {} to {}", range.start(), range.end()))
        })
    }
}

/// CSRF protection: require the content type `application/json` or the method DELETE. Before a cross-origin request of
/// either kind, a browser sends a CORS preflight, which the admin listener rejects.
fn require_json(method: &Method, headers: &HeaderMap) -> Result<()> {
    let content_type = headers.get(CONTENT_TYPE).map(|value| value.to_str().unwrap_or_default());
    let media_type = content_type.map(|value| value.split(';').next().unwrap_or_default().trim());
    match media_type {
        Some(media_type) if media_type.eq_ignore_ascii_case("application/json") => Ok(()),
        None if method == Method::DELETE => Ok(()),
        _ => Err(ApiError::new(
            StatusCode::UNSUPPORTED_MEDIA_TYPE,
            "requests that change something need the content type application/json",
        )),
    }
}

async fn read_json<T: DeserializeOwned>(request: Request<Incoming>) -> Result<T> {
    let on_timeout = |_| ApiError::new(StatusCode::REQUEST_TIMEOUT, "timed out waiting for the request body");
    let collected =
        timeout(BODY_TIMEOUT, Limited::new(request.into_body(), MAX_BODY_BYTES).collect()).await.map_err(on_timeout)?;
    let body: Bytes = match collected {
        Ok(body) => body.to_bytes(),
        Err(error) if error.is::<http_body_util::LengthLimitError>() => {
            return Err(ApiError::new(
                StatusCode::PAYLOAD_TOO_LARGE,
                format!("the request body exceeds {MAX_BODY_BYTES} bytes"),
            ));
        }
        Err(_) => return Err(ApiError::bad_request("the request body is incomplete")),
    };
    // Return only serde's messages about field names. Other messages of serde may quote values, which may be secrets.
    serde_json::from_slice(&body).map_err(|error| match error.classify() {
        serde_json::error::Category::Data if error.to_string().starts_with("unknown field") => {
            ApiError::bad_request(error.to_string())
        }
        serde_json::error::Category::Data if error.to_string().starts_with("missing field") => {
            ApiError::bad_request(error.to_string())
        }
        serde_json::error::Category::Data => ApiError::bad_request("a field has a value of the wrong type"),
        _ => ApiError::bad_request(format!("invalid JSON at line {} column {}", error.line(), error.column())),
    })
}

/// Return a 200 response with a JSON body.
fn json_response(value: &impl Serialize) -> AdminResponse {
    // Serialization cannot fail, because the value is a map with string keys.
    typed_response(StatusCode::OK, "application/json", serde_json::to_string(value).unwrap_or_default() + "\n")
}

/// Maximum number of limits that an error message lists.
const MAX_LISTED_LIMITS: usize = 20;

/// The error text for an unknown limit, with the names of the configured limits.
fn unknown_limit(config: &CompiledConfig, name: &str) -> String {
    let limits = &config.limits;
    let listed = limits.keys().take(MAX_LISTED_LIMITS).map(|known| format!("`{known}`")).collect::<Vec<_>>().join(", ");
    match limits.len().saturating_sub(MAX_LISTED_LIMITS) {
        _ if limits.is_empty() => format!("unknown limit `{name}`: the configuration has no limits"),
        0 => format!("unknown limit `{name}`: the limits are {listed}"),
        more => format!("unknown limit `{name}`: the limits are {listed} and {more} more"),
    }
}

fn store_error(error: &StoreError) -> ApiError {
    ApiError::new(StatusCode::SERVICE_UNAVAILABLE, error.to_string())
}

/// Convert µs to seconds, rounded up to the next ms, so that a client that waits this long does not retry too early.
fn seconds_rounded_up(us: u64) -> f64 {
    us.div_ceil(1000) as f64 / 1000.0
}

// === Problem details (RFC 9457) ===

/// An error response of the API.
#[derive(Debug)]
pub(super) struct ApiError {
    pub(super) status: StatusCode,
    pub(super) detail: String,
}

impl ApiError {
    pub(super) fn new(status: StatusCode, detail: impl Into<String>) -> Self {
        ApiError { status, detail: detail.into() }
    }

    /// Create a 400 response: the request is invalid.
    pub(super) fn bad_request(detail: impl Into<String>) -> Self {
        ApiError::new(StatusCode::BAD_REQUEST, detail)
    }

    pub(super) fn into_response(self) -> AdminResponse {
        let problem = Problem::new(self.status, &self.detail);
        typed_response(self.status, problem::CONTENT_TYPE, problem.to_json())
    }
}

// === `/api/differences`: keys whose change a reload would reject ===

#[derive(Serialize)]
struct Differences {
    /// Absolute path of the active configuration file.
    file: String,
    /// Configuration keys that differ and require a restart, in alphabetical order.
    restart: Vec<String>,
}

/// Compare digests of configuration values with the digests of the active values. In the query, the name of a parameter
/// is a configuration key, and the value of the parameter is a digest. The parameter `salt` is the salt of the digests.
/// The response contains only the names of keys, because configuration values may be secret.
fn differences(context: &ApiContext<'_>, mut query: QueryParams) -> Result<AdminResponse> {
    let salt = query.take("salt").ok_or_else(|| ApiError::bad_request("`salt` is missing"))?;
    let mut active_digests = context.config.restart_only_digests(&salt);
    let mut restart = Vec::new();
    for (key, digest) in query.0 {
        if active_digests.remove(&key) != Some(digest) {
            restart.push(key);
        }
    }
    restart.extend(active_digests.into_keys());
    restart.sort_unstable();
    let file = absolute_path(&context.config.files.main.path);
    Ok(json_response(&Differences { file, restart }))
}

// === `/api/top`: the identities with the most denials, or the highest costs of LLM requests ===

/// Number of identities per limit in a response if the query has no `count`.
const DEFAULT_COUNT: u64 = 10;
/// Maximum of the query parameter `count`.
const MAX_COUNT: u64 = 96;

#[derive(Serialize)]
struct TopResponse<L> {
    window_seconds: u64,
    limits: Vec<L>,
}

#[derive(Serialize)]
struct DeniedByLimit<'a> {
    limit: &'a str,
    shadow: bool,
    denied: u64,
    identities: Vec<DeniedIdentity>,
}

#[derive(Serialize)]
struct DeniedIdentity {
    identity: String,
    #[serde(serialize_with = "parts")]
    parts: IdentityDisplay,
    denied_at_least: u64,
    denied_at_most: u64,
}

#[derive(Serialize)]
struct CostOfLimit<'a> {
    limit: &'a str,
    unit: &'a str,
    cost: u64,
    identities: Vec<CostOfIdentity>,
}

#[derive(Serialize)]
struct CostOfIdentity {
    identity: String,
    #[serde(serialize_with = "parts")]
    parts: IdentityDisplay,
    cost_at_least: u64,
    cost_at_most: u64,
}

fn parts<S: Serializer>(name: &IdentityDisplay, serializer: S) -> std::result::Result<S::Ok, S::Error> {
    serializer.collect_map(name.0.iter().map(|part| (&part.label, &part.value)))
}

fn top_identities(context: &ApiContext<'_>, mut query: QueryParams) -> Result<AdminResponse> {
    let count = query.number("count", 1..=MAX_COUNT, DEFAULT_COUNT)?;
    let limit_name = query.take("limit");
    let by = query.take("by").unwrap_or_else(|| "denied".to_owned());
    if let Some((name, _)) = query.0.first() {
        return Err(ApiError::bad_request(format!("unknown parameter `{name}`: use `limit`, `count` and `by`")));
    }
    let limits = &context.config.limits;
    if let Some(name) = limit_name.as_ref().filter(|name| !limits.contains_key(*name)) {
        return Err(ApiError::bad_request(unknown_limit(context.config, name)));
    }
    let (metrics, now) = (&context.state.request_metrics, monotonic());
    let selected = limits.iter().filter(|(name, _)| limit_name.as_ref().is_none_or(|name_filter| name_filter == *name));
    let top = |family: &MetricFamily<TopIdentities>, name: &str| {
        let workers = family.all().into_iter().find(|(limit, _)| **limit == *name).map(|(_, workers)| workers);
        TopIdentities::top(&workers.unwrap_or_default(), now, count as usize)
    };
    let window_seconds = WINDOW.as_secs();
    match &*by {
        "denied" => {
            let limits = selected.map(|(name, compiled)| {
                let (denied, heavy_hitters) = top(&metrics.top_denied, name);
                let identities =
                    heavy_hitters.into_iter().map(|HeavyHitter { identity, name, lower_bound, upper_bound }| {
                        let identity = identity.to_string();
                        DeniedIdentity {
                            identity,
                            parts: name,
                            denied_at_least: lower_bound,
                            denied_at_most: upper_bound,
                        }
                    });
                DeniedByLimit { limit: name, shadow: compiled.limit.shadow, denied, identities: identities.collect() }
            });
            Ok(json_response(&TopResponse { window_seconds, limits: limits.collect() }))
        }
        "cost" => {
            let counts_tokens = |compiled: &CompiledLimit| compiled.cost.as_ref().and_then(Cost::llm).is_some();
            let limits = selected.filter(|(_, compiled)| counts_tokens(compiled)).map(|(name, compiled)| {
                let (cost, heavy_hitters) = top(&metrics.top_costs, name);
                let identities =
                    heavy_hitters.into_iter().map(|HeavyHitter { identity, name, lower_bound, upper_bound }| {
                        let identity = identity.to_string();
                        CostOfIdentity { identity, parts: name, cost_at_least: lower_bound, cost_at_most: upper_bound }
                    });
                CostOfLimit { limit: name, unit: &compiled.limit.unit, cost, identities: identities.collect() }
            });
            Ok(json_response(&TopResponse { window_seconds, limits: limits.collect() }))
        }
        _ => Err(ApiError::bad_request("`by` must be `denied` or `cost`")),
    }
}

// === `/api/status`: version, uptime, listeners, store and requests of the last minute ===

#[derive(Serialize)]
struct StatusResponse<'a> {
    version: &'static str,
    commit: &'static str,
    /// Process id.
    pid: u32,
    /// Time of this response in RFC 3339, from the clock of the gateway.
    time: String,
    started_at: String,
    uptime_seconds: u64,
    connections: ConnectionCounts,
    listeners: Vec<ListenerStatus<'a>>,
    store: StoreStatus<'a>,
    /// Requests of the last minute.
    last_minute: PeriodStats,
}

#[derive(Serialize)]
struct ListenerStatus<'a> {
    /// Name of the listener, if it has one.
    name: Option<&'a str>,
    /// The bound address.
    address: String,
    tls: bool,
    proxy_protocol: bool,
    /// Open connections.
    connections: usize,
}

#[derive(Serialize)]
struct StoreStatus<'a> {
    /// The store, without credentials.
    name: &'a str,
    /// `open` if at least one circuit breaker of the store is open, otherwise `closed`. `None` for the memory store.
    circuit_breaker: Option<&'static str>,
    /// The store if its circuit breaker is open, or the cluster nodes whose circuit breakers are open.
    failing: Vec<String>,
    /// How often circuit breakers have opened since the start of the process.
    circuit_breaker_openings: u64,
}

/// Return the status of the process.
fn show_status(context: &ApiContext<'_>) -> AdminResponse {
    let ApiContext { config, state, .. } = context;
    let (open, max) = state.connection_limits.open_and_max();
    let connections = state.listener_addresses.iter().zip(state.connection_limits.open_by_listener());
    let listeners = config.listeners.iter().zip(connections).map(|(listener, (address, connections))| ListenerStatus {
        name: listener.name.as_deref(),
        address: address.to_string(),
        tls: listener.tls.is_some(),
        proxy_protocol: listener.proxy_protocol,
        connections,
    });
    let failing = state.failing_stores();
    let breaker_state = if failing.is_empty() { "closed" } else { "open" };
    let now_us = unix_us();
    json_response(&StatusResponse {
        version: env!("CARGO_PKG_VERSION"),
        commit: env!("SLUICEGATE_COMMIT"),
        pid: std::process::id(),
        time: format_rfc3339(now_us),
        started_at: format_rfc3339(state.started_at_s * 1_000_000),
        uptime_seconds: (now_us / 1_000_000).saturating_sub(state.started_at_s),
        connections: ConnectionCounts { open, max },
        listeners: listeners.collect(),
        store: StoreStatus {
            name: &state.store_name,
            circuit_breaker: config.store.redis.as_ref().map(|_| breaker_state),
            failing,
            circuit_breaker_openings: state.breaker_open_count(),
        },
        last_minute: context.event_stream.last_minute(state),
    })
}

// === `/api/certificates`: the certificates of all listeners, and requests to renew a certificate ===

#[derive(Serialize)]
struct CertificatesResponse {
    certificates: Vec<CertificateView>,
}

/// One certificate. Times are RFC 3339.
#[derive(Serialize)]
struct CertificateView {
    /// DNS names and IP addresses of the certificate.
    names: Vec<String>,
    /// `file` or `acme`.
    source: &'static str,
    /// The issuer of the certificate. `None` if the gateway has not obtained a certificate by ACME yet.
    issuer: Option<String>,
    not_before: Option<String>,
    not_after: Option<String>,
    /// Time at which the next order is planned. `None` for certificates from files.
    next_renewal: Option<String>,
    /// Number of failed attempts to obtain the certificate since the last success.
    failures: u32,
    /// The reason why the last attempt failed.
    error: Option<Box<str>>,
}

/// Body of `POST /api/certificates/renew`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RenewRequest {
    name: String,
}

#[derive(Serialize)]
struct RenewResponse {
    name: String,
    requested: bool,
}

fn format_time(time_s: i64) -> Option<String> {
    Timestamp::from_second(time_s).ok().map(|time| time.to_string())
}

impl CertificateView {
    fn new(certificate: Option<&Certificate>, source: &'static str) -> Self {
        let (start, end) = certificate.map(Certificate::validity_s).unzip();
        CertificateView {
            names: certificate.map(Certificate::names).unwrap_or_default(),
            source,
            issuer: certificate.map(Certificate::issuer),
            not_before: start.and_then(format_time),
            not_after: end.and_then(format_time),
            next_renewal: None,
            failures: 0,
            error: None,
        }
    }
}

fn views(config: &CompiledConfig) -> Vec<CertificateView> {
    let tls = config.listeners.iter().filter_map(|listener| listener.tls.as_ref());
    let mut shown = Vec::new();
    let files = tls.flat_map(|tls| tls.tls.certificates()).filter(|certificate| {
        // List a certificate only once, even if several listeners use its file.
        let leaf = certificate.certified_key.cert.first().cloned();
        let is_new = !shown.contains(&leaf);
        shown.push(leaf);
        is_new
    });
    let mut views: Vec<_> = files.map(|certificate| CertificateView::new(Some(&certificate), "file")).collect();
    for (acme, name) in config.acme.iter().flat_map(|acme| acme.names.iter().map(move |name| (acme, name))) {
        let managed = acme.certificates.get(name);
        views.push(CertificateView {
            names: vec![name.to_string()],
            next_renewal: managed.next_order_s.and_then(|time_s| format_time(time_s as i64)),
            failures: managed.failures,
            error: managed.last_error,
            ..CertificateView::new(managed.certificate.as_deref(), "acme")
        });
    }
    views
}

/// Return the certificates of all listeners.
fn list_certificates(context: &ApiContext<'_>) -> AdminResponse {
    json_response(&CertificatesResponse { certificates: views(context.config) })
}

/// Request the renewal of a certificate by ACME. The log and `GET /api/certificates` show the result.
fn renew_certificate(context: &ApiContext<'_>, request: &RenewRequest) -> Result<AdminResponse> {
    let name = request.name.to_ascii_lowercase();
    match context.config.acme.as_ref().filter(|acme| acme.names.iter().any(|known| **known == *name)) {
        Some(acme) => {
            acme.certificates.request_renewal(&name);
            Ok(json_response(&RenewResponse { name, requested: true }))
        }
        None => Err(ApiError::new(
            StatusCode::NOT_FOUND,
            format!(
                "no listener obtains a certificate for `{name}` by ACME; `sluicegate certificates` lists all certificates"
            ),
        )),
    }
}

// === `/api/usage`: usage totals of limits by day, month, identity or model ===

/// Maximum number of totals in a response. Each total takes about 130 bytes.
const MAX_ROWS: usize = 50_000;

async fn usage(context: &ApiContext<'_>, mut query: QueryParams) -> Result<AdminResponse> {
    let by = match query.take("by") {
        None => GroupBy::Day,
        Some(name) => GroupBy::from_name(&name)
            .ok_or_else(|| ApiError::bad_request(format!("`by` must be one of {}", GroupBy::NAMES.join(", "))))?,
    };
    let [from, to] = ["from", "to"].map(|name| date(&mut query, name));
    let limit = query.take("limit");
    let identity = match IdentityQuery::from_query(query)? {
        IdentityQuery::Parts(parts) if parts.is_empty() => None,
        IdentityQuery::Parts(parts) => Some(IdentityFilter::Parts(parts)),
        IdentityQuery::Hash(hash) => {
            let invalid = || ApiError::bad_request("`identity` must be 32 hexadecimal digits, as in Redis keys");
            Some(IdentityFilter::Hash(Identity::from_hex(&hash).ok_or_else(invalid)?))
        }
    };
    let filter = UsageFilter { limit, identity, from: from?, to: to? };
    let usage_query = filter.query(context.config, by, unix_us(), MAX_ROWS).map_err(|error| match error {
        FilterError::UnknownLimit(name) => ApiError::new(StatusCode::NOT_FOUND, unknown_limit(context.config, &name)),
        FilterError::NoUsage | FilterError::EmptyRange { .. } | FilterError::Identity(_) => {
            ApiError::bad_request(error.to_string())
        }
    })?;
    let rows = context.limiter_admin.usage(&usage_query).await.map_err(|error| match error {
        UsageError::Store(error) => store_error(&error),
        UsageError::TooMany(_) => {
            ApiError::bad_request(format!("{error}: select fewer totals with `limit`, `from`, `to` or an identity"))
        }
    })?;
    Ok(json_response(&UsageReport::new(context.config, &usage_query, &filter, rows, by)))
}

fn date(query: &mut QueryParams, name: &str) -> Result<Option<Date>> {
    let Some(text) = query.take(name) else { return Ok(None) };
    let date =
        text.parse().map_err(|_| ApiError::bad_request(format!("`{name}` must be a date such as 2026-11-23")))?;
    Ok(Some(date))
}
