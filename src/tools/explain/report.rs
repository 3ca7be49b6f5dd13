//! The explanation of a request, as the source of the text and JSON output. The explanation omits values that may be
//! secrets.

use std::net::IpAddr;

use serde::Serialize;

/// A report on how the gateway would handle a request. The fields are those that `explain --json` prints.
#[derive(Debug, Serialize)]
pub struct Explanation {
    /// The method of the request.
    pub method: String,
    /// The host in canonical form, with which routes are matched. `None` if the host is missing or invalid.
    pub host: Option<String>,
    /// The path in canonical form. `None` if the path is invalid.
    pub path: Option<String>,
    /// The path as the gateway received it.
    pub raw_path: String,
    /// The client that sent the request.
    pub client: ClientReport,
    /// The listener that the client is connected to. The value is the name of the listener, or its address. `None` if
    /// no listener has a name.
    pub listener: Option<String>,
    /// The route that the request matches.
    pub route: Option<MatchedRoute>,
    /// Other routes, the closest match first.
    pub other_routes: Vec<OtherRoute>,
    /// Number of further routes that are not listed.
    pub other_routes_omitted: usize,
    /// The access rules that apply: first the rules of the listener, then the rules of the route.
    pub access: Vec<AccessReport>,
    /// The CORS policy of the route. `None` if the route has no CORS policy.
    pub cors: Option<CorsReport>,
    /// The name of the store.
    pub store: String,
    /// The reason why the counters were not read. `None` if the counters were read.
    pub counters_unavailable: Option<String>,
    /// The authentication providers of the route, in the order in which they were checked.
    pub authentication: Vec<AuthReport>,
    /// The limits of the route.
    pub limits: Vec<LimitReport>,
    /// `allowed` or `denied`. `None` if no limit was checked, or if the counters were not read.
    pub decision: Option<&'static str>,
    /// The response to the request.
    pub response: ResponseReport,
    /// The request that an upstream would receive. `None` if nothing is forwarded.
    pub upstream: Option<UpstreamReport>,
}

/// The client of the request.
#[derive(Debug, Serialize)]
pub struct ClientReport {
    /// The address of the client.
    pub address: IpAddr,
    /// The address of the peer, which opened the connection.
    pub peer: IpAddr,
    /// Whether the peer is a trusted proxy.
    pub trusted: bool,
    /// The header that contains the client address. `None` if the client address is the address of the peer.
    pub header: Option<String>,
}

/// The route that matches the request.
#[derive(Debug, Serialize)]
pub struct MatchedRoute {
    /// The name of the route.
    pub route: String,
    /// The path of the route as configured.
    pub path: String,
    /// The host of the route that the request matches. `None` if the route matches any host.
    pub host: Option<String>,
    /// The names of the listeners of the route. An empty list means all listeners.
    pub listeners: Vec<String>,
    /// The methods of the route. An empty list means all methods.
    pub methods: Vec<String>,
    /// The conditions of the route on headers and query parameters.
    pub conditions: Vec<String>,
}

/// A route that the request does not use.
#[derive(Debug, Serialize)]
pub struct OtherRoute {
    /// The name of the route.
    pub route: String,
    /// The path of the route as configured.
    pub path: String,
    /// The condition that does not match: `host`, `path`, `listener`, `method`, `header` or `query`. `specific` if the
    /// route matches, but another one is more specific.
    pub mismatch: &'static str,
    /// The reason, as text for users.
    pub reason: String,
}

/// The decision of an access rule.
#[derive(Debug, Serialize)]
pub struct AccessReport {
    /// The owner of the rule: `listener` or `route`.
    pub rule: &'static str,
    /// Whether the rule allows the client.
    pub allowed: bool,
    /// The reason, as text for users.
    pub reason: String,
}

/// The decision of the CORS policy of the route about the request.
#[derive(Debug, Serialize)]
pub struct CorsReport {
    /// The origin of the request. `None` if the request has no origin.
    pub origin: Option<String>,
    /// Whether scripts of the origin may read the response.
    pub allowed: bool,
    /// Whether the request is a preflight, which the gateway answers.
    pub preflight: bool,
}

/// The result of an authentication provider of the route.
#[derive(Debug, Serialize)]
pub struct AuthReport {
    /// The name of the provider.
    pub provider: String,
    /// The kind of the provider.
    pub kind: &'static str,
    /// One of `absent`, `foreign` (the credential is not for this provider), `valid`, `invalid`, `forbidden`,
    /// `unavailable`, `pending` (an authentication server decides) and `not_checked`.
    pub result: &'static str,
    /// The reason, as text for users.
    pub reason: String,
}

/// A limit of the route.
#[derive(Debug, Serialize)]
pub struct LimitReport {
    /// The name of the limit.
    pub limit: String,
    /// Whether the limit runs in shadow mode.
    pub shadow: bool,
    /// Whether response headers announce the limit to clients.
    pub announce: bool,
    /// The reason why the limit does not apply. `None` if the limit applies.
    pub skipped: Option<String>,
    /// The reason why the identity cannot be determined, so that the request is rejected. `None` if there is no error.
    pub error: Option<String>,
    /// The identity as a keyed hash, which is the same as in the access log.
    pub identity: Option<String>,
    /// The parts of the identity that the limit counts.
    pub parts: Vec<IdentityPartReport>,
    /// The quota that applies to this request.
    pub effective_quota: Option<EffectiveQuota>,
    /// The number of tokens that must be available.
    pub cost: Option<u64>,
    /// Whether the cost is charged after the response.
    pub post_paid: bool,
    /// The usage of the identity. `None` if the counters were not read.
    pub usage: Option<LimitUsage>,
}

/// A part of an identity.
#[derive(Debug, Serialize)]
pub struct IdentityPartReport {
    /// The descriptor in `by`, or the descriptor that replaces it.
    pub part: String,
    /// The value of the part. `None` if there is no value, or if the value may be a secret.
    pub value: Option<String>,
    /// Where the value comes from.
    pub source: String,
}

/// The quota of a limit that applies to a request.
#[derive(Debug, Serialize)]
pub struct EffectiveQuota {
    /// Where the quota comes from: `standard`, `tier NAME`, `consumer NAME` or `override`.
    pub source: String,
    /// The number of tokens per period.
    pub quota: String,
    /// The unit of the quota, such as `requests`.
    pub unit: String,
    /// The largest cost that the limit can ever allow.
    pub capacity: u64,
}

/// The usage of an identity.
#[derive(Debug, Serialize)]
pub struct LimitUsage {
    /// The decision of the limit, with the same words as in the access log. `None` if another limit denies the request.
    pub decision: Option<&'static str>,
    /// The tokens that remain now.
    pub remaining: u64,
    /// The tokens that remain after the request, if the limit allows it.
    pub remaining_after: Option<u64>,
    /// Seconds until the quota is fully available again, without this request.
    pub reset_seconds: f64,
    /// Seconds until a denied request would be allowed. `None` if the request would be allowed now or never.
    pub retry_seconds: Option<f64>,
    /// Seconds that a denied request may wait in the wait queue.
    pub max_wait_seconds: Option<f64>,
}

/// The response to the request.
#[derive(Debug, Default, Serialize)]
pub struct ResponseReport {
    /// Origin of the response: `gateway`, `upstream`, or `authentication-server` if such a server decides, because it
    /// was not called.
    pub source: &'static str,
    /// The status of the response. `None` if the upstream determines the status.
    pub status: Option<u16>,
    /// The outcome, with the same words as in the access log, or `undecided` if an authentication server decides.
    pub outcome: &'static str,
    /// The headers of the response. For the response of an upstream, only the headers that the gateway adds.
    pub headers: Vec<HeaderReport>,
    /// The headers that the route removes.
    pub removed_headers: Vec<String>,
    /// The body of the response. `None` if the upstream determines the body.
    pub body: Option<String>,
}

/// A header of a request or response.
#[derive(Debug, Serialize)]
pub struct HeaderReport {
    /// The name of the header.
    pub name: String,
    /// The value of the header. `None` if the value is from the configuration and may be a secret.
    pub value: Option<String>,
}

/// The request as an upstream would receive it.
#[derive(Debug, Serialize)]
pub struct UpstreamReport {
    /// The upstreams of the route.
    pub upstreams: Vec<String>,
    /// The path and the query.
    pub target: String,
    /// Headers that the gateway adds or changes.
    pub set_headers: Vec<HeaderReport>,
    /// Headers of the request that are not forwarded.
    pub removed_headers: Vec<String>,
    /// The mirror of the route. `None` if no copy is sent.
    pub mirror: Option<MirrorReport>,
}

/// The mirror of a route.
#[derive(Debug, Serialize)]
pub struct MirrorReport {
    /// The upstream that receives the copies.
    pub upstream: String,
    /// Percentage of the requests that are copied.
    pub percent: f64,
    /// Maximum size of a copied body in bytes.
    pub max_body: usize,
    /// The reason why this request is not copied. `None` if the request may be copied.
    pub skipped: Option<&'static str>,
}
