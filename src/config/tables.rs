//! `[[route]]` as written.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::Deserialize;

use crate::config::error::Spanned;
use crate::config::shorthand::{LimitCost, OneOrMany, UpstreamServer, UpstreamWeights};
use crate::config::{Text, schema};

/// `[[route]]`
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("required" = ["name", "path"]))]
pub struct Route {
    /// Unique.
    pub name: Option<Text>,
    /// `"api.example.com"`, `"*.example.com"` for all below it; by default any.
    pub host: Option<Text>,
    /// `"/v1/search"`; `"/v1/users/{id}"`; `"/v1/{*rest}"` takes `/v1/` and all below it, `"/{*rest}"` everything.
    /// `/a` is not `/a/`.
    pub path: Option<Text>,
    /// `["GET"]`; by default all.
    pub methods: Option<Vec<Text>>,
    /// `{ "x-version" = "2" }`: fields that must be there with these values.
    pub headers: BTreeMap<String, Text>,
    /// An upstream's name, or several with weights: `{ api = 9, canary = 1 }`. A route has exactly one of `upstream`,
    /// `respond` and `redirect`.
    pub upstream: Option<Spanned<UpstreamWeights>>,
    /// The gateway answers itself: `{ status = 200, body = "…", content_type = "text/plain" }`.
    pub respond: Option<Spanned<DirectResponse>>,
    /// The client is sent elsewhere: `{ to = "/v1/{rest}", status = 308 }`.
    pub redirect: Option<Spanned<Redirect>>,
    /// Names of limits, up to 16, decided together.
    pub limits: Vec<Text>,
    /// Units that a request costs on each of them.
    #[schemars(range(min = 1, max = 9_007_199_254_740_991_i64), extend("default" = 1))]
    pub cost: Option<Spanned<i64>>,
    /// `"/v1"`: whole segments that the upstream does not see.
    pub strip_prefix: Option<Text>,
    /// `"/internal/{rest}"`: the path that the upstream sees instead, with parameters of `path`.
    pub rewrite: Option<Text>,
    /// `"10s"`: for all of a request, from its head to the end of its answer.
    #[schemars(schema_with = "schema::duration")]
    pub timeout: Option<Text>,
    /// Bytes of a request body, `"1MiB"`; beyond it 413: at once if the request says its length, otherwise as soon as
    /// it is reached, and the request to the upstream breaks off.
    #[schemars(schema_with = "schema::size")]
    pub max_body: Option<Text>,
    /// What the upstream gets instead: `{ set = { x-gateway = "sluicegate" }, remove = ["x-debug"] }`.
    pub request_headers: Option<Spanned<HeaderRules>>,
    /// The same for answers: `{ remove = ["server"] }`.
    pub response_headers: Option<Spanned<HeaderRules>>,
    /// Lets a client switch to another protocol.
    #[schemars(extend("default" = false))]
    pub websocket: Option<Spanned<bool>>,
    /// `draft-11` (every limit) or `draft-07`; `draft-03`; `github`; `ietf` = the newest draft, `draft-11`; any of them, `[]` = none. The older ones
    /// tell of the binding limit: the violated one with the longest wait, else the one with the smallest share left.
    #[schemars(schema_with = "schema::dialects", extend("default" = ["ietf"]))]
    pub ratelimit_headers: Option<Vec<Text>>,
    /// Access-Control-Expose-Headers for these fields.
    #[schemars(extend("default" = false))]
    pub expose_headers: bool,
}

/// `request_headers`, `response_headers` of a route
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
pub struct HeaderRules {
    /// Fields that get one line with this value instead of all that they had.
    pub set: BTreeMap<String, Text>,
    /// Fields of which all lines are taken away.
    pub remove: Vec<Text>,
}

/// `respond = { … }` of a route
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("required" = ["status"]))]
pub struct DirectResponse {
    /// Of the answer.
    #[schemars(range(min = 200, max = 599))]
    pub status: Option<Spanned<i64>>,
    /// Of the answer; by default empty.
    pub body: Option<Text>,
    /// What the body is.
    #[schemars(extend("default" = "text/plain; charset=utf-8"))]
    pub content_type: Option<Text>,
}

/// `redirect = { … }` of a route
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("required" = ["to"]))]
pub struct Redirect {
    /// A path, or a URL with `http://` or `https://` and a host, with parameters of `path`: `"/v1/{rest}"`.
    pub to: Option<Text>,
    /// 308 and 301 for good, 307 and 302 for now, 303 to GET another resource.
    #[schemars(extend("enum" = [301, 302, 303, 307, 308], "default" = 308))]
    pub status: Option<Spanned<i64>>,
}

// `[limit.NAME]` as written.

/// `[limit.NAME]`
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("required" = ["by", "quota"]))]
pub struct Limit {
    /// `api-key`, `ip`, `user:HEADER`, `header:NAME`, `cookie:NAME`, `query:NAME`, `path:PARAM`, `jwt:CLAIM`,
    /// `client-cert`, `host`, `route`, `method`, `global`, or a list of them: one bucket for each combination.
    pub by: Option<Spanned<OneOrMany>>,
    /// `gcra` and `leaky-bucket` are other names of `token-bucket`; `sliding-log`: a quota of at most 10,000;
    /// `concurrency`: `quota = "20"` is so many requests in flight at the same time.
    #[schemars(extend("enum" = ["token-bucket", "gcra", "leaky-bucket", "fixed-window", "sliding-log", "sliding-window", "sliding-buckets", "concurrency"], "default" = "token-bucket"))]
    pub algorithm: Option<Text>,
    /// `"600/min"`.
    #[schemars(schema_with = "schema::quota")]
    pub quota: Option<Text>,
    /// token-bucket: how many at once; by default the quota's count.
    #[schemars(range(min = 1, max = 9_007_199_254_740_991_i64))]
    pub burst: Option<Spanned<i64>>,
    /// fixed-window: `"first-request"` opens the window with the first request.
    #[schemars(extend("enum" = ["aligned", "first-request"], "default" = "aligned"))]
    pub start: Option<Text>,
    /// sliding-buckets: parts of the window.
    #[schemars(range(min = 1, max = 1000), extend("default" = 10))]
    pub buckets: Option<Spanned<i64>>,
    /// fixed-window by day, week, month or year: whose calendar, such as `"Europe/Berlin"`; days of 23 and 25 hours
    /// are right.
    #[schemars(extend("default" = "UTC"))]
    pub time_zone: Option<Text>,
    /// A request without the identity: 400 (401 for a key, a token or a certificate); `"skip"` the limit; `"ip"`
    /// stands in.
    #[schemars(extend("enum" = ["reject", "skip", "ip"], "default" = "reject"))]
    pub on_missing: Option<Text>,
    /// While the store cannot answer: this gateway's share; `"allow"`; `"deny"` with 503.
    #[schemars(extend("enum" = ["local", "allow", "deny"], "default" = "local"))]
    pub on_store_error: Option<Text>,
    /// Decide and log (`shadow_denied` in the access log), but never deny and tell nobody.
    #[schemars(extend("default" = false))]
    pub shadow: bool,
    /// The methods that the limit is about, `["POST"]`; by default all.
    pub methods: Option<Vec<Text>>,
    /// Never limited: `SOURCE=VALUE`, the source as in `by`, the value after the first `=` as the source has it:
    /// `"api-key=batch"` (a consumer, never an unknown key), `"client-cert=CN=alice,O=Acme"`. `"ip=10.0.0.0/8"` also
    /// where the address stands in; with `by = "ip"` a network alone will do.
    pub exempt: Vec<Text>,
    /// Other sizes for the consumers of a tier: `{ free = { quota = "60/min", burst = 10 } }`; with `api-key` in
    /// `by`.
    pub tiers: BTreeMap<String, Spanned<LimitVariant>>,
    /// Units that a request costs: `5`; `{ request_header = "x-cost", max = 100 }`; `{ response_header =
    /// "x-tokens-used" }`; by default the cost of the route.
    pub cost: Option<Spanned<LimitCost>>,
    /// Statuses of the response that give the charge back: `["5xx", "404"]`.
    #[schemars(schema_with = "schema::statuses")]
    pub refund_on: Vec<Text>,
    /// Hold a request until its turn, at most so long, instead of denying it.
    #[schemars(schema_with = "schema::duration")]
    pub max_wait: Option<Text>,
    /// So many at a time for each identity on each gateway; whoever comes then is denied.
    #[schemars(range(min = 1, max = 2147483647), extend("default" = 1000))]
    pub max_queue: Option<Spanned<i64>>,
    /// Units that a gateway may take ahead for a hot identity; 0 = none.
    #[schemars(range(min = 0, max = 4_294_967_295_i64), extend("default" = 0))]
    pub prefetch: Option<Spanned<i64>>,
}

/// `{ quota = "…", burst = … }`: another size of a limit.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
pub struct LimitVariant {
    /// Instead of that of the limit. Without `quota` and `burst` both are those of the limit.
    #[schemars(schema_with = "schema::quota")]
    pub quota: Option<Text>,
    /// token-bucket: how many at once; by default the count of a `quota` that stands beside it.
    #[schemars(range(min = 1, max = 9_007_199_254_740_991_i64))]
    pub burst: Option<Spanned<i64>>,
}

// `[upstream.NAME]` as written.

/// `[upstream.NAME]`
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("required" = ["servers"]))]
pub struct Upstream {
    /// `["http://10.0.0.1:9000", { url = "http://10.0.0.2:9000", weight = 2 }]`; `https://` for TLS, port 80 or 443
    /// where none is said.
    pub servers: Vec<Spanned<UpstreamServer>>,
    /// `"http2"`: in clear text by prior knowledge and with TLS by ALPN, one connection of each worker for all
    /// requests; what gRPC needs.
    #[schemars(extend("enum" = ["http1", "http2"], "default" = "http1"))]
    pub protocol: Option<Text>,
    /// To any server, all that are tried together, TLS handshake included; beyond it 502.
    #[schemars(schema_with = "schema::duration", extend("default" = "2s"))]
    pub connect_timeout: Option<Text>,
    /// Until the response head, once the request is sent; beyond it 504. Waiting for the client's body does not
    /// count.
    #[schemars(schema_with = "schema::duration", extend("default" = "30s"))]
    pub response_timeout: Option<Text>,
    /// Idle connections older than this are not used again; with `http2` one on which nothing was asked for so long.
    #[schemars(schema_with = "schema::duration", extend("default" = "4s"))]
    pub pool_idle_timeout: Option<Text>,
    /// Who is asked.
    #[schemars(schema_with = "schema::balance", extend("default" = "least-requests"))]
    pub balance: Option<Text>,
    /// Requests in flight at each server, from all workers; 0 = no cap.
    #[schemars(range(min = 0, max = 1000000), extend("default" = 0))]
    pub max_requests: Option<Spanned<i64>>,
    /// Requests that wait for a server with room, for `connect_timeout` at most; beyond it 503.
    #[schemars(range(min = 0, max = 1000000), extend("default" = 0))]
    pub max_queue: Option<Spanned<i64>>,
    /// `{ path = "/healthz" }`: each server is asked; one that fails so many checks in a row gets no requests until
    /// it passes so many.
    pub health_check: Option<Spanned<Health>>,
    /// `{}` or with other numbers: so many errors in a row put a server out for a time, longer each time, up to ten
    /// times.
    pub outlier_detection: Option<Spanned<Eject>>,
    /// Time in which a server that is back gets its whole weight; `"0s"` = at once.
    #[schemars(schema_with = "schema::duration", extend("default" = "0s"))]
    pub slow_start: Option<Text>,
    /// So often a GET, HEAD or OPTIONS without a body that breaks off before its answer goes to another server; a
    /// fifth of all requests at most.
    #[schemars(range(min = 0, max = 10), extend("default" = 0))]
    pub retries: Option<Spanned<i64>>,
    /// For servers at `https://`: `{ ca = "ca.pem", server_name = "api.internal", cert = "gate.pem", key = "gate.key"
    /// }`, each optional, `cert` and `key` together.
    pub tls: Option<Spanned<UpstreamTls>>,
}

/// `tls` of an upstream
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
pub struct UpstreamTls {
    /// The authorities that sign the certificates of servers, a PEM file; by default those of the system.
    pub ca: Option<Text>,
    /// What the certificates must be for; by default the host of the URL.
    pub server_name: Option<Text>,
    /// Who we are, a PEM file; with `key`.
    pub cert: Option<Text>,
    /// Its key, a PEM file.
    pub key: Option<Text>,
}

/// `health_check = { … }` of an upstream
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("required" = ["path"]))]
pub struct Health {
    /// What is asked for: `"/healthz"`.
    pub path: Option<Text>,
    /// The statuses of a healthy server.
    #[schemars(extend("default" = [200]))]
    pub status: Option<Vec<Spanned<i64>>>,
    /// Between two checks.
    #[schemars(schema_with = "schema::duration", extend("default" = "5s"))]
    pub interval: Option<Text>,
    /// For one check.
    #[schemars(schema_with = "schema::duration", extend("default" = "1s"))]
    pub timeout: Option<Text>,
    /// Failed checks in a row that put a server out.
    #[schemars(range(min = 1, max = 100), extend("default" = 3))]
    pub unhealthy_threshold: Option<Spanned<i64>>,
    /// Passed checks in a row that bring it back.
    #[schemars(range(min = 1, max = 100), extend("default" = 2))]
    pub healthy_threshold: Option<Spanned<i64>>,
}

/// `outlier_detection = { … }` of an upstream
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Eject {
    /// In a row.
    #[schemars(range(min = 1, max = 1000), extend("default" = 5))]
    pub consecutive_errors: Option<Spanned<i64>>,
    /// How long the server is out, the first time.
    #[schemars(schema_with = "schema::duration", extend("default" = "10s"))]
    pub base_ejection_time: Option<Text>,
}
