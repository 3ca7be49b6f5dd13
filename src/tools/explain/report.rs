//! The explanation of a request, for text and JSON output. Values that may be secrets are omitted.

use std::net::IpAddr;

use serde::Serialize;

/// The report about a request: how the gateway would handle it. The fields are those of `explain --json`.
#[derive(Debug, Serialize)]
pub struct Explanation {
    /// The method.
    pub method: String,
    /// The canonical host that routes are matched with. None: missing or invalid.
    pub host: Option<String>,
    /// The path in canonical form. None: invalid.
    pub path: Option<String>,
    /// The path as received.
    pub raw_path: String,
    /// The client.
    pub client: ClientReport,
    /// The listener that the client is connected to: its name, or its address. None: no listener has a name.
    pub listener: Option<String>,
    /// The matched route.
    pub route: Option<MatchedRoute>,
    /// Other routes, closest match first.
    pub other_routes: Vec<OtherRoute>,
    /// Number of further routes that are not listed.
    pub other_routes_omitted: usize,
    /// The access rules that apply: the rules of the listener, then the rules of the route.
    pub access: Vec<AccessReport>,
    /// The CORS policy of the route. None: the route has no policy.
    pub cors: Option<CorsReport>,
    /// Name of the store.
    pub store: String,
    /// Why the counters were not read. None: they were read.
    pub counters_unavailable: Option<String>,
    /// The providers of the route, in the order in which they were checked.
    pub authentication: Vec<AuthReport>,
    /// The limits of the route.
    pub limits: Vec<LimitReport>,
    /// `allowed` or `denied`. None: no limit was checked, or the counters were not read.
    pub decision: Option<&'static str>,
    /// The response.
    pub response: ResponseReport,
    /// The request that an upstream would receive. None: nothing is forwarded.
    pub upstream: Option<UpstreamReport>,
}

/// The client of the request.
#[derive(Debug, Serialize)]
pub struct ClientReport {
    /// The address of the client.
    pub address: IpAddr,
    /// The address of the peer of the connection.
    pub peer: IpAddr,
    /// Whether the peer is a trusted proxy.
    pub trusted: bool,
    /// The header that contains the client address. None: it is the peer's address.
    pub header: Option<String>,
}

/// The route that matches the request.
#[derive(Debug, Serialize)]
pub struct MatchedRoute {
    /// The name.
    pub route: String,
    /// The path as configured.
    pub path: String,
    /// The host of the route that the request matches. None: any host.
    pub host: Option<String>,
    /// The names of its listeners. Empty: all.
    pub listeners: Vec<String>,
    /// Its methods. Empty: all.
    pub methods: Vec<String>,
    /// Its conditions on headers and query parameters.
    pub conditions: Vec<String>,
}

/// A route that was not chosen.
#[derive(Debug, Serialize)]
pub struct OtherRoute {
    /// The name.
    pub route: String,
    /// The path as configured.
    pub path: String,
    /// The condition that does not match: `host`, `path`, `listener`, `method`, `header` or `query`. `specific` if the
    /// route matches, but another one is more specific.
    pub mismatch: &'static str,
    /// The reason as text.
    pub reason: String,
}

/// The decision of an access rule.
#[derive(Debug, Serialize)]
pub struct AccessReport {
    /// `listener` or `route`.
    pub rule: &'static str,
    /// Whether the client is allowed.
    pub allowed: bool,
    /// The reason as text.
    pub reason: String,
}

/// The CORS policy of the route for the request.
#[derive(Debug, Serialize)]
pub struct CorsReport {
    /// The origin of the request. None: the request has no origin.
    pub origin: Option<String>,
    /// Whether scripts of the origin may read the response.
    pub allowed: bool,
    /// Whether the request is a preflight, which the gateway answers.
    pub preflight: bool,
}

/// The result of a provider of the route.
#[derive(Debug, Serialize)]
pub struct AuthReport {
    /// The name of the provider.
    pub provider: String,
    /// The kind of the provider.
    pub kind: &'static str,
    /// `absent`, `foreign` (not for this provider), `valid`, `invalid`, `forbidden`, `unavailable`, `pending` (an
    /// authentication server decides) or `not_checked`.
    pub result: &'static str,
    /// The reason as text.
    pub reason: String,
}

/// A limit of the route.
#[derive(Debug, Serialize)]
pub struct LimitReport {
    /// The name.
    pub limit: String,
    /// Whether the limit runs in shadow mode.
    pub shadow: bool,
    /// Whether the limit is announced to clients.
    pub announce: bool,
    /// Why the limit does not apply. None: it applies.
    pub skipped: Option<String>,
    /// Why the identity cannot be determined, so that the request is rejected. None: no error.
    pub error: Option<String>,
    /// The identity: a keyed hash, as in the access log.
    pub identity: Option<String>,
    /// The parts of the identity.
    pub parts: Vec<IdentityPartReport>,
    /// The quota that applies to this request.
    pub effective_quota: Option<EffectiveQuota>,
    /// The tokens that must be available.
    pub cost: Option<u64>,
    /// Whether the cost is charged after the response.
    pub post_paid: bool,
    /// The usage of the identity. None: the counters were not read.
    pub usage: Option<LimitUsage>,
}

/// A part of an identity.
#[derive(Debug, Serialize)]
pub struct IdentityPartReport {
    /// The descriptor in `by`, or the one that replaces it.
    pub part: String,
    /// The value. None: it may be a secret, or there is none.
    pub value: Option<String>,
    /// The source of the value.
    pub source: String,
}

/// The quota of a limit for a request.
#[derive(Debug, Serialize)]
pub struct EffectiveQuota {
    /// The source of the quota: `standard`, `tier NAME`, `consumer NAME` or `override`.
    pub source: String,
    /// Tokens per time.
    pub quota: String,
    /// Quota unit, such as `requests`.
    pub unit: String,
    /// The largest cost that the limit can ever allow.
    pub capacity: u64,
}

/// The usage of an identity.
#[derive(Debug, Serialize)]
pub struct LimitUsage {
    /// The decision of the limit, as in the access log. None: another limit denies the request.
    pub decision: Option<&'static str>,
    /// Remaining tokens now.
    pub remaining: u64,
    /// Remaining tokens after the request, if it is allowed.
    pub remaining_after: Option<u64>,
    /// Seconds until the quota is fully available again, without this request.
    pub reset_seconds: f64,
    /// Seconds until a denied request would be allowed. None: allowed now, or never.
    pub retry_seconds: Option<f64>,
    /// Seconds that a denied request may wait in the wait queue.
    pub max_wait_seconds: Option<f64>,
}

/// The response to the request.
#[derive(Debug, Default, Serialize)]
pub struct ResponseReport {
    /// Origin of the response: `gateway`, `upstream`, or `authentication-server` if the latter decides and was not
    /// called.
    pub source: &'static str,
    /// The status. None: the upstream determines it.
    pub status: Option<u16>,
    /// The outcome, as in the access log; `undecided` if an authentication server decides.
    pub outcome: &'static str,
    /// The headers; of an upstream's response only those that the gateway adds.
    pub headers: Vec<HeaderReport>,
    /// Headers that the route removes.
    pub removed_headers: Vec<String>,
    /// The body. None: the upstream determines it.
    pub body: Option<String>,
}

/// A header.
#[derive(Debug, Serialize)]
pub struct HeaderReport {
    /// The name.
    pub name: String,
    /// The value. None: it is from the configuration and may be a secret.
    pub value: Option<String>,
}

/// The request as an upstream would receive it.
#[derive(Debug, Serialize)]
pub struct UpstreamReport {
    /// The upstreams of the route.
    pub upstreams: Vec<String>,
    /// The path and query.
    pub target: String,
    /// Headers that the gateway adds or changes.
    pub set_headers: Vec<HeaderReport>,
    /// Received headers that are not forwarded.
    pub removed_headers: Vec<String>,
    /// The mirror of the route. None: no copy is sent.
    pub mirror: Option<MirrorReport>,
}

/// The mirror of a route.
#[derive(Debug, Serialize)]
pub struct MirrorReport {
    /// The upstream of the copies.
    pub upstream: String,
    /// Percentage of the requests that are copied.
    pub percent: f64,
    /// Maximum size of a copied body in bytes.
    pub max_body: usize,
    /// Why this request is not copied. None: it may be copied.
    pub skipped: Option<&'static str>,
}
