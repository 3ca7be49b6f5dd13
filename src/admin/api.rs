//! The endpoints of the admin listener: a table of their methods and paths, and the handlers of the JSON API, for example
//! for the usage, resets and quota overrides of identities.

mod identities;

use std::sync::Arc;

use http::header::ACCEPT;
use http::{Method, Request, StatusCode};
use hyper::body::Incoming;
use jiff::Timestamp;
use jiff::civil::Date;
use serde::{Deserialize, Serialize, Serializer};
use serde_json::json;

use crate::admin::api::identities::IdentityQuery;
use crate::admin::configuration::{absolute_path, config_view, reload};
use crate::admin::events::{ConnectionCounts, PeriodStats};
use crate::admin::heartbeats::StalledWorker;
use crate::admin::request::{ApiContext, QueryParams, read_json, unknown_limit};
use crate::admin::response::{
    AdminResponse, ApiError, Result, format_rfc3339, json_response, store_error, text_response, typed_response,
};
use crate::admin::state::ProcessState;
use crate::admin::usage::{FilterError, GroupBy, IdentityFilter, UsageFilter, UsageReport};
use crate::clock::{monotonic, unix_us};
use crate::identity::display::IdentityDisplay;
use crate::limiter::key::Identity;
use crate::limiter::metrics::MetricFamily;
use crate::limiter::shared_data::UsageError;
use crate::proxy::metrics::{HeavyHitter, TopIdentities, WINDOW};
use crate::snapshot::CompiledConfig;
use crate::snapshot::cost::Cost;
use crate::snapshot::limits::CompiledLimit;
use crate::telemetry::prometheus as text_form;
use crate::telemetry::prometheus::ExpositionFormat;
use crate::tls::Certificate;

/// A method and path of the admin listener.
#[derive(Debug)]
pub struct Endpoint {
    /// The method. GET stands for GET and HEAD.
    pub method: Method,
    /// The path.
    pub path: &'static str,
    /// What a client must have and send.
    pub access: Access,
    /// What the response with the status 200 says, for the manual.
    pub success: &'static str,
    operation: Operation,
}

/// What a client must have and send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Reads only. If `admin.token` is set, the client must have it.
    Read,
    /// Changes something. Over TCP, the client must always have the token.
    Change,
    /// Changes something, and has a JSON body.
    ChangeWithBody,
}

/// The handler of an endpoint.
#[derive(Debug, Clone, Copy)]
enum Operation {
    Health,
    Readiness,
    Metrics,
    Status,
    Config,
    Reload,
    Live,
    Top,
    Identities,
    Usage,
    Reset,
    ListOverrides,
    PutOverride,
    RemoveOverride,
    ListCertificates,
    RenewCertificate,
    Differences,
}

const fn read(path: &'static str, success: &'static str, operation: Operation) -> Endpoint {
    Endpoint { method: Method::GET, path, access: Access::Read, success, operation }
}

const fn change(
    method: Method,
    path: &'static str,
    access: Access,
    success: &'static str,
    operation: Operation,
) -> Endpoint {
    Endpoint { method, path, access, success, operation }
}

/// All endpoints, without the files of the dashboard.
pub static ENDPOINTS: [Endpoint; 17] = [
    read("/healthz", "all workers run. 503 if a worker is [stalled](#health)", Operation::Health),
    read(
        "/readyz",
        "the gateway is [ready](#health). While a worker is stalled, the process stops, or a listener waits for its first certificate, the status is 503",
        Operation::Readiness,
    ),
    read("/metrics", "[metrics](metrics.md)", Operation::Metrics),
    read("/api/status", "version, uptime, listeners, store, and requests of the last minute", Operation::Status),
    read("/api/config", "the active configuration", Operation::Config),
    change(Method::POST, "/api/reload", Access::Change, "the configuration was reloaded", Operation::Reload),
    read("/api/live", "a stream of [events](#events)", Operation::Live),
    read("/api/top", "identities with the most denials or the highest cost", Operation::Top),
    read("/api/identities", "usage of an identity", Operation::Identities),
    read("/api/usage", "usage totals by day, month, identity or model", Operation::Usage),
    change(Method::POST, "/api/reset", Access::ChangeWithBody, "usage of an identity was cleared", Operation::Reset),
    read("/api/overrides", "the active overrides", Operation::ListOverrides),
    change(Method::POST, "/api/overrides", Access::ChangeWithBody, "an override was set", Operation::PutOverride),
    change(Method::DELETE, "/api/overrides", Access::Change, "an override was removed", Operation::RemoveOverride),
    read("/api/certificates", "certificates of all listeners", Operation::ListCertificates),
    change(
        Method::POST,
        "/api/certificates/renew",
        Access::ChangeWithBody,
        "the renewal of a certificate was requested",
        Operation::RenewCertificate,
    ),
    read("/api/differences", "the changed keys that would require a restart", Operation::Differences),
];

impl Endpoint {
    /// Find the endpoint of a request.
    ///
    /// # Errors
    /// The admin listener does not have the path, or the path does not support the method.
    pub(super) fn find(method: &Method, path: &str) -> Result<&'static Endpoint> {
        let method = if method == Method::HEAD { &Method::GET } else { method };
        let mut others = ENDPOINTS.iter().filter(|endpoint| endpoint.path == path).peekable();
        if others.peek().is_none() {
            return Err(ApiError::new(StatusCode::NOT_FOUND, not_found()));
        }
        let methods: Vec<_> = others.clone().map(|endpoint| endpoint.methods()).collect();
        others
            .find(|endpoint| endpoint.method == *method)
            .ok_or_else(|| ApiError::method_not_allowed(&methods.join(", ")))
    }

    /// Return the methods as in an `Allow` header.
    pub fn methods(&self) -> &str {
        if self.method == Method::GET { "GET, HEAD" } else { self.method.as_str() }
    }

    /// Respond to a request that is authorized to use the endpoint.
    pub(super) async fn respond(&self, context: &ApiContext<'_>, request: Request<Incoming>) -> Result<AdminResponse> {
        let query = QueryParams::parse(request.uri().query());
        match self.operation {
            Operation::Health => Ok(health(context.state)),
            Operation::Readiness => Ok(readiness(context.state, Detail::All)),
            Operation::Metrics => metrics(context.state, &request),
            Operation::Status => Ok(show_status(context)),
            Operation::Config => Ok(config_view(context)),
            Operation::Reload => Ok(reload(context).await),
            Operation::Live => context.event_stream.subscribe(context.state, context.connection),
            Operation::Top => top_identities(context, query),
            Operation::Identities => identities::identity_statuses(context, query).await,
            Operation::Usage => usage(context, query).await,
            Operation::Reset => identities::reset(context, read_json(request).await?).await,
            Operation::ListOverrides => identities::list_overrides(context).await,
            Operation::PutOverride => identities::put_override(context, read_json(request).await?).await,
            Operation::RemoveOverride => identities::remove_override(context, query).await,
            Operation::ListCertificates => Ok(list_certificates(context)),
            Operation::RenewCertificate => renew_certificate(context, &read_json(request).await?),
            Operation::Differences => differences(context, query),
        }
    }
}

/// Return the error text for a path that the admin listener does not have.
fn not_found() -> String {
    let mut paths: Vec<_> = ENDPOINTS.iter().map(|endpoint| endpoint.path).collect();
    paths.dedup();
    format!("not found: the paths are / for the dashboard, {}", paths.join(", "))
}

// === `/healthz`, `/readyz` and `/metrics` ===

pub(super) fn health(state: &ProcessState) -> AdminResponse {
    match state.heartbeats.stalled() {
        None => text_response(StatusCode::OK, "ok\n"),
        Some(StalledWorker { worker, age }) => {
            let text = format!("worker {worker} has not run its tasks for {} s\n", age.as_secs());
            text_response(StatusCode::SERVICE_UNAVAILABLE, &text)
        }
    }
}

/// How much of the readiness a client learns.
#[derive(Debug, Clone, Copy)]
pub(super) enum Detail {
    Status,
    All,
}

pub(super) fn readiness(state: &ProcessState, detail: Detail) -> AdminResponse {
    let health = state.readiness();
    let status = if health.is_ready() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    match detail {
        Detail::Status => json_response(status, &json!({ "status": health.status })),
        Detail::All => json_response(status, &health),
    }
}

/// Respond with the metrics.
pub(super) fn metrics(state: &Arc<ProcessState>, request: &Request<Incoming>) -> Result<AdminResponse> {
    let accept = request.headers().get(ACCEPT).and_then(|accept| accept.to_str().ok()).unwrap_or_default();
    let form = ExpositionFormat::from_accept(accept);
    let page = text_form::render(state, form)
        .map_err(|error| ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()))?;
    Ok(typed_response(StatusCode::OK, form.content_type(), page))
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
    Ok(json_response(StatusCode::OK, &Differences { file, restart }))
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
    if let Some(name) = limit_name.as_ref().filter(|name| context.config.find_limit(name).is_none()) {
        return Err(ApiError::bad_request(unknown_limit(context.config, name)));
    }
    let metrics = &context.state.request_metrics;
    let now = monotonic();
    let is_selected = |name: &str| limit_name.as_ref().is_none_or(|selected| selected == name);
    let top = |family: &MetricFamily<TopIdentities>, name: &str| {
        let workers = family.all().into_iter().find(|(limit, _)| **limit == *name).map(|(_, workers)| workers);
        TopIdentities::top(&workers.unwrap_or_default(), now, count as usize)
    };
    let window_seconds = WINDOW.as_secs();
    match &*by {
        "denied" => {
            let mut listed = context.config.listed_limits();
            listed.extend(limit_name.iter().filter_map(|name| Some((&**name, context.config.find_limit(name)?))));
            let limits = listed.into_iter().filter(|(name, _)| is_selected(name)).map(|(name, limit)| {
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
                DeniedByLimit { limit: name, shadow: limit.shadow, denied, identities: identities.collect() }
            });
            Ok(json_response(StatusCode::OK, &TopResponse { window_seconds, limits: limits.collect() }))
        }
        "cost" => {
            let counts_tokens = |compiled: &CompiledLimit| compiled.cost.as_ref().and_then(Cost::llm).is_some();
            let selected = limits.iter().filter(|(name, compiled)| is_selected(name) && counts_tokens(compiled));
            let limits = selected.map(|(name, compiled)| {
                let (cost, heavy_hitters) = top(&metrics.top_costs, name);
                let identities =
                    heavy_hitters.into_iter().map(|HeavyHitter { identity, name, lower_bound, upper_bound }| {
                        let identity = identity.to_string();
                        CostOfIdentity { identity, parts: name, cost_at_least: lower_bound, cost_at_most: upper_bound }
                    });
                CostOfLimit { limit: name, unit: &compiled.limit.unit, cost, identities: identities.collect() }
            });
            Ok(json_response(StatusCode::OK, &TopResponse { window_seconds, limits: limits.collect() }))
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
    json_response(
        StatusCode::OK,
        &StatusResponse {
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
        },
    )
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
    json_response(StatusCode::OK, &CertificatesResponse { certificates: views(context.config) })
}

/// Request the renewal of a certificate by ACME. The log and `GET /api/certificates` show the result.
fn renew_certificate(context: &ApiContext<'_>, request: &RenewRequest) -> Result<AdminResponse> {
    let name = request.name.to_ascii_lowercase();
    match context.config.acme.as_ref().filter(|acme| acme.names.iter().any(|known| **known == *name)) {
        Some(acme) => {
            acme.certificates.request_renewal(&name);
            Ok(json_response(StatusCode::OK, &RenewResponse { name, requested: true }))
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
    let count = query.number("count", 1..=MAX_ROWS as u64, MAX_ROWS as u64)? as usize;
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
    let mut report = UsageReport::new(context.config, &usage_query, &filter, rows, by);
    if count < MAX_ROWS {
        report.keep_highest(count);
    }
    Ok(json_response(StatusCode::OK, &report))
}

fn date(query: &mut QueryParams, name: &str) -> Result<Option<Date>> {
    let Some(text) = query.take(name) else { return Ok(None) };
    let date =
        text.parse().map_err(|_| ApiError::bad_request(format!("`{name}` must be a date such as 2026-11-23")))?;
    Ok(Some(date))
}
