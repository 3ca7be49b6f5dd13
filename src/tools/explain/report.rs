//! The explanation of a request. The text output and the JSON output are generated from it. The explanation omits
//! values that may be secrets.

use std::net::IpAddr;

use serde::Serialize;

/// A report on how the gateway would handle a request. `explain --json` prints its fields.
#[derive(Debug, Serialize)]
pub struct Explanation {
    /// The method of the request.
    pub method: String,
    /// The host in the canonical form that the routes match. `None` if the host is missing or invalid.
    pub host: Option<String>,
    /// The path in canonical form. `None` if the path is invalid.
    pub path: Option<String>,
    /// The path as the gateway received it.
    pub raw_path: String,
    /// The client that sent the request.
    pub client: ClientReport,
    /// The name of the listener that the client is connected to, or its address if it has no name. `None` if no
    /// listener of the configuration has a name.
    pub listener: Option<String>,
    /// The client certificate that the TLS handshake for the host needs. `None` if it needs none.
    pub client_certificate: Option<String>,
    /// The route that the request matches.
    pub route: Option<MatchedRoute>,
    /// Routes that the request does not use. The route that comes closest to a match is first.
    pub other_routes: Vec<OtherRoute>,
    /// Number of routes that `other_routes` omits.
    pub other_routes_omitted: usize,
    /// The results of the access rules: first the rules of the listener, then the rules of the route.
    pub access: Vec<AccessReport>,
    /// The decision of the route's CORS policy. `None` if the route has no CORS policy.
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
    /// The request that an upstream would receive. `None` if the gateway would forward nothing.
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
    /// The header from which the client address was read. `None` if the client address is the address of the peer.
    pub header: Option<String>,
}

/// The route that matches the request.
#[derive(Debug, Serialize)]
pub struct MatchedRoute {
    /// The name of the route.
    pub route: String,
    /// The path of the route as configured.
    pub path: String,
    /// The entry of the route's `hosts` that the request matches. `None` if the route matches any host.
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
    /// The condition that does not match: `host`, `path`, `listener`, `method`, `header` or `query`. The value is
    /// `specific` if the route matches, but another matching route is more specific.
    pub mismatch: &'static str,
    /// The reason, as text for users.
    pub reason: String,
}

/// The decision of an access rule.
#[derive(Debug, Serialize)]
pub struct AccessReport {
    /// Where the rule is configured: `listener` or `route`.
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
    /// Whether the request is a preflight. The gateway responds to preflights itself.
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
    /// `unavailable`, `pending` (`explain` does not call the authentication server that decides) and `not_checked`.
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
    /// The keyed hash of the identity, as in the access log.
    pub identity: Option<String>,
    /// The parts of the identity that the limit counts.
    pub parts: Vec<IdentityPartReport>,
    /// The quota that applies to this request.
    pub effective_quota: Option<EffectiveQuota>,
    /// The number of tokens that must be available to admit the request.
    pub cost: Option<u64>,
    /// Whether the cost is charged after the response.
    pub post_paid: bool,
    /// The usage of the identity. `None` if the counters were not read.
    pub usage: Option<LimitUsage>,
}

/// A part of an identity.
#[derive(Debug, Serialize)]
pub struct IdentityPartReport {
    /// The descriptor in `by`, or the descriptor that replaces it if the request lacks the value.
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
    /// The quota as text, such as `600/min`.
    pub quota: String,
    /// The unit of the quota, such as `requests`.
    pub unit: String,
    /// The largest cost of a single request that the limit can allow.
    pub capacity: u64,
}

/// The usage of an identity.
#[derive(Debug, Serialize)]
pub struct LimitUsage {
    /// The decision of the limit, with the values of the access log, such as `denied`. `None` if another limit denies
    /// the request.
    pub decision: Option<&'static str>,
    /// The tokens that remain before the request.
    pub remaining: u64,
    /// The tokens that remain after the request, if the limit allows the request.
    pub remaining_after: Option<u64>,
    /// Seconds until the quota is fully available again, if no further request arrives.
    pub reset_seconds: f64,
    /// Seconds until a denied request would be allowed. `None` if the request is allowed already, or if it would never
    /// be allowed.
    pub retry_seconds: Option<f64>,
    /// Maximum time that a denied request may wait in the wait queue, in seconds.
    pub max_wait_seconds: Option<f64>,
}

/// The response to the request.
#[derive(Debug, Default, Serialize)]
pub struct ResponseReport {
    /// Origin of the response: `gateway`, `upstream` or `authentication-server`. `authentication-server` means that an
    /// authentication server determines the response. `explain` does not call this server.
    pub source: &'static str,
    /// The status of the response. `None` if the upstream determines the status.
    pub status: Option<u16>,
    /// The outcome, with the values of the access log's field `outcome`, or `undecided` if an authentication server
    /// decides.
    pub outcome: &'static str,
    /// The headers of the response. If the response comes from an upstream, the list has only the headers that the
    /// gateway adds.
    pub headers: Vec<HeaderReport>,
    /// The headers that the route removes from the response.
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
    /// The mirror of the route. `None` if the route has no mirror.
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
