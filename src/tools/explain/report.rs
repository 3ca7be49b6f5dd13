//! What is found out about a request, for people and programs. Values that may be secrets are left out, as everywhere.

use std::net::IpAddr;

use serde::Serialize;

/// What the gateway would do with a request.
#[derive(Debug, Serialize)]
pub struct Explanation {
    /// Its method.
    pub method: String,
    /// The host that it is routed on; none = it has no valid one.
    pub host: Option<String>,
    /// Its path in canonical form; none = it has none.
    pub path: Option<String>,
    /// Its path as it came.
    pub raw_path: String,
    /// Who asks.
    pub client: ClientReport,
    /// The route that takes it.
    pub route: Option<MatchedRoute>,
    /// Other routes, the nearest first.
    pub other_routes: Vec<OtherRoute>,
    /// So many more are there.
    pub other_routes_omitted: usize,
    /// Where the counters are.
    pub store: String,
    /// Why they were not looked at; none = they were.
    pub counters_unavailable: Option<String>,
    /// The limits of the route.
    pub limits: Vec<LimitReport>,
    /// `allowed` or `denied`; none if limits were not asked, or the counters not looked at.
    pub decision: Option<&'static str>,
    /// The answer.
    pub response: ResponseReport,
    /// What would be sent on; none = nothing.
    pub upstream: Option<UpstreamReport>,
}

/// Who asks.
#[derive(Debug, Serialize)]
pub struct ClientReport {
    /// Its address.
    pub address: IpAddr,
    /// The other end of the connection.
    pub peer: IpAddr,
    /// Whether that is a trusted proxy.
    pub trusted: bool,
    /// The field that says the address; none = it is that of the peer.
    pub header: Option<String>,
}

/// The route that takes the request.
#[derive(Debug, Serialize)]
pub struct MatchedRoute {
    /// Its name.
    pub route: String,
    /// Its path, as configured.
    pub path: String,
}

/// A route that does not take the request.
#[derive(Debug, Serialize)]
pub struct OtherRoute {
    /// Its name.
    pub route: String,
    /// Its path, as configured.
    pub path: String,
    /// What of the request is otherwise than it wants; `specific` where it only is less specific.
    pub mismatch: &'static str,
    /// In words.
    pub reason: String,
}

/// A limit of the route.
#[derive(Debug, Serialize)]
pub struct LimitReport {
    /// Its name.
    pub limit: String,
    /// Whether it is on trial.
    pub shadow: bool,
    /// Why it has no say; none = it has.
    pub skipped: Option<String>,
    /// Why it refuses the request whatever is left; none = it does not.
    pub error: Option<String>,
    /// Whose units: a keyed hash, as in the access log.
    pub identity: Option<String>,
    /// What that is made of.
    pub parts: Vec<IdentityPartReport>,
    /// The size that it has for the request.
    pub effective_quota: Option<EffectiveQuota>,
    /// Units that must be there.
    pub cost: Option<u64>,
    /// Whether the response says what is charged.
    pub post_paid: bool,
    /// Where the identity stands; none = it was not looked.
    pub usage: Option<LimitUsage>,
}

/// A part of an identity.
#[derive(Debug, Serialize)]
pub struct IdentityPartReport {
    /// Its word in `by`, or of what stands in for it.
    pub part: String,
    /// Its value; none = it may be a secret, or there is none.
    pub value: Option<String>,
    /// Where the value comes from.
    pub source: String,
}

/// A size of a limit.
#[derive(Debug, Serialize)]
pub struct EffectiveQuota {
    /// Whose it is: `standard`, `tier NAME`, `consumer NAME` or `override`.
    pub source: String,
    /// Units per time.
    pub quota: String,
    /// Units at once.
    pub capacity: u64,
}

/// Where an identity stands.
#[derive(Debug, Serialize)]
pub struct LimitUsage {
    /// What the limit has to do with the decision, as in the access log; none if another limit denies.
    pub decision: Option<&'static str>,
    /// Units that are left now.
    pub remaining: u64,
    /// Units that are left after the request, if it is allowed.
    pub remaining_after: Option<u64>,
    /// Seconds until all is back, without this request.
    pub reset_seconds: f64,
    /// Seconds until it would pass, where it is denied; none if never.
    pub retry_seconds: Option<f64>,
    /// Seconds for which the gateway would let it wait for that.
    pub max_wait_seconds: Option<f64>,
}

/// The answer.
#[derive(Debug, Default, Serialize)]
pub struct ResponseReport {
    /// Who gives it: `gateway` or `upstream`.
    pub source: &'static str,
    /// Its status; none = the upstream's.
    pub status: Option<u16>,
    /// As in the access log.
    pub outcome: &'static str,
    /// Its fields; of an upstream's answer those that are added.
    pub headers: Vec<HeaderReport>,
    /// Fields that the route removes.
    pub removed_headers: Vec<String>,
    /// Its body; none = the upstream's.
    pub body: Option<String>,
}

/// A field of a header section.
#[derive(Debug, Serialize)]
pub struct HeaderReport {
    /// Its name.
    pub name: String,
    /// Its value; none = the configuration says it, and it may be a secret.
    pub value: Option<String>,
}

/// What would be sent on.
#[derive(Debug, Serialize)]
pub struct UpstreamReport {
    /// The upstreams that share the requests of the route.
    pub upstreams: Vec<String>,
    /// Path and query.
    pub target: String,
    /// Fields that are not as they came.
    pub set_headers: Vec<HeaderReport>,
    /// Fields that came and do not go on.
    pub removed_headers: Vec<String>,
}
