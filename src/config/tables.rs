//! The tables `[[route]]`, `[limit.NAME]` and `[upstream.NAME]`, as they are written.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::Deserialize;

use crate::config::error::Spanned;
use crate::config::shorthand::{
    HealthCheck, LimitCost, LimitNotify, OneOrMany, Requirement, UpstreamServer, UpstreamWeights,
};
use crate::config::{Text, schema};

/// `[[route]]`
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("required" = ["name"]))]
pub struct Route {
    /// Unique name of the route.
    pub name: Option<Text>,
    /// Hosts without port: `["api.example.com", "*.example.org"]`. `*.` matches all subdomains. Default: any host.
    pub hosts: Option<Vec<Text>>,
    /// Names of listeners: the route matches only requests on connections of these listeners. Default: all listeners.
    pub listeners: Option<Vec<Text>>,
    /// Path pattern: `"/v1/search"`; `"/v1/users/{id}"`; `"/v1/{*rest}"` matches `/v1/` and all paths below it,
    /// `"/{*rest}"` matches every path. A route has either `path` or `path_regex`.
    pub path: Option<Text>,
    /// Regular expression that must match the whole path, such as `'/v[0-9]+/(?<name>[^/]+)'`. Named groups of the
    /// expression are path parameters.
    pub path_regex: Option<Text>,
    /// `"strict"`: `/a` does not match `/a/`. `"same"`: the route matches both. `"redirect"`: the other form is
    /// redirected with 308 to the form of the route. For `/a/{*rest}`, the other form is `/a`.
    #[schemars(extend("enum" = ["strict", "same", "redirect"], "default" = "strict"))]
    pub trailing_slash: Option<Text>,
    /// HTTP methods, such as `["GET"]`. Default: all.
    pub methods: Option<Vec<Text>>,
    /// Conditions on headers, query parameters and values of a JSON body. The request must meet all conditions:
    /// `{ headers = { x-version = { exact = "2" } } }`.
    #[serde(rename = "match")]
    pub conditions: Option<Spanned<MatchRules>>,
    /// Name of an upstream, or several upstreams with weights: `{ api = 9, canary = 1 }`. A route has exactly one of
    /// `upstream`, `respond` and `redirect`.
    pub upstream: Option<Spanned<UpstreamWeights>>,
    /// Response that the gateway sends without an upstream: `{ status = 200, body = "…", content_type = "text/plain"
    /// }`.
    pub respond: Option<Spanned<DirectResponse>>,
    /// Redirect: `{ to = "/v1/{rest}", status = 308 }`, or to another scheme with the same host, path and query:
    /// `{ scheme = "https" }`.
    pub redirect: Option<Spanned<Redirect>>,
    /// Client networks that may use the route: `["10.0.0.0/8", "file:office.txt"]`. All other clients get 403
    /// ([access rules](#access-rules)). Default: all.
    pub allow: Option<Vec<Text>>,
    /// Client networks that get 403, even if they are in `allow`. Default: none.
    pub deny: Option<Vec<Text>>,
    /// CORS: `{ origins = ["https://app.example.com"] }`. The gateway answers preflights and sets the CORS headers of
    /// all responses of the route ([CORS](#cors)). Default: the upstream answers preflights and sets CORS headers.
    pub cors: Option<Spanned<Cors>>,
    /// Providers (`[auth.NAME]`) of which one must verify the request: `["keys", ["mtls", "tokens"]]`. The gateway
    /// tries the providers in order; a nested list requires all of its members. If the credential is absent or in
    /// another format, the next alternative is tried. Requests with an invalid credential, or without any credential,
    /// get 401. Requests with a valid credential without permission get 403. Default: no credential is required.
    pub require: Option<Spanned<Vec<Spanned<Requirement>>>>,
    /// Providers that verify a credential if the request has one, for limits by credential. Requests with an invalid
    /// credential get 401.
    pub identify: Option<Vec<Text>>,
    /// Names of up to 16 limits. One atomic check charges all limits or none of them.
    pub limits: Vec<Text>,
    /// Cost of a request on each of these limits.
    #[schemars(range(min = 1, max = 9_007_199_254_740_991_i64), extend("default" = 1))]
    pub cost: Option<Spanned<i64>>,
    /// Path prefix that is removed before the request is forwarded, such as `"/v1"`. The prefix must consist of whole
    /// segments.
    pub strip_prefix: Option<Text>,
    /// Path that the upstream gets, such as `"/internal/{rest}"`. It may contain parameters of `path`.
    pub rewrite: Option<Text>,
    /// Maximum time for a request, from its headers to the end of the response, such as `"10s"`. Default: no maximum.
    #[schemars(schema_with = "schema::duration")]
    pub timeout: Option<Text>,
    /// Maximum size of a request body, such as `"1MiB"`. A larger body gets 413: at once if its `Content-Length` is
    /// larger, otherwise when the maximum is reached. In the second case, the upstream request is aborted. Default: no
    /// maximum.
    #[schemars(schema_with = "schema::size")]
    pub max_body: Option<Text>,
    /// Changes to the request headers that the upstream gets: `{ set = { x-user = "{consumer}" }, remove = ["x-debug"]
    /// }` ([variables](http.md#variables-in-header-rules)).
    pub request_headers: Option<Spanned<HeaderRules>>,
    /// Changes to the response headers: `{ set = { x-request-id = "{request_id}" }, remove = ["server"] }`.
    pub response_headers: Option<Spanned<ResponseHeaderRules>>,
    /// Send a copy of each forwarded request to another upstream and discard its response:
    /// `{ upstream = "next", percent = 10 }` ([mirroring](../how-to/mirror.md)).
    pub mirror: Option<Spanned<Mirror>>,
    /// Allow protocol upgrades, such as WebSocket.
    #[schemars(extend("default" = false))]
    pub websocket: Option<Spanned<bool>>,
    /// Styles of the RateLimit headers: `draft-11` (all limits), `draft-07`, `draft-03`, `github`, `openai` or
    /// `anthropic`. `ietf` is the newest draft, `draft-11`. `[]` = no headers. All other styles describe only one
    /// limit: the violated limit with the longest wait, otherwise the limit with the smallest remaining share. `openai`
    /// and `anthropic` describe one limit for each `unit`.
    #[schemars(schema_with = "schema::dialects", extend("default" = ["ietf"]))]
    pub ratelimit_headers: Option<Vec<Text>>,
    /// Add `Access-Control-Expose-Headers` with the RateLimit headers and `Retry-After` to the CORS headers of the
    /// upstream. The key has no effect on a route with `cors`, which always exposes these headers.
    #[schemars(extend("default" = false))]
    pub expose_headers: bool,
}

/// `match = { … }` of a route
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
pub struct MatchRules {
    /// Conditions by header name.
    pub headers: BTreeMap<String, Spanned<ValueRule>>,
    /// Conditions by name of a query parameter. Names are compared after decoding.
    pub query: BTreeMap<String, Spanned<ValueRule>>,
    /// Conditions by JSON pointer (RFC 6901) into the request body: `{ "/model" = { prefix = "gpt-" } }`. The gateway
    /// reads the body before it routes the request, if all other conditions of the route are met ([routes by
    /// body](../how-to/routing.md#by-the-body)).
    pub json: BTreeMap<String, Spanned<ValueRule>>,
}

/// `{ exact = "…" }`, or another single key: a condition on a header, a query parameter or a value of a JSON body.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
pub struct ValueRule {
    /// The value is equal to this text. Several values do not meet the condition.
    pub exact: Option<Text>,
    /// The value begins with this text. Several values do not meet the condition.
    pub prefix: Option<Text>,
    /// The regular expression matches the whole value. Several values do not meet the condition.
    pub regex: Option<Text>,
    /// `true`: there is a value, or there are several values.
    pub present: Option<Spanned<bool>>,
    /// `true`: there is no value.
    pub absent: Option<Spanned<bool>>,
}

/// `request_headers = { … }` of a route
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
pub struct HeaderRules {
    /// Headers to set. The value replaces all existing lines of the header. The value may contain variables:
    /// `{client_ip}`, `{request_id}`, `{consumer}`, `{route}`, `{host}`, `{method}`, `{path}`, `{scheme}`. If a
    /// variable has no content, the header is removed. `{{` and `}}` are literal braces.
    pub set: BTreeMap<String, Text>,
    /// Headers to remove, with all their lines.
    pub remove: Vec<Text>,
}

/// `cors = { … }` of a route
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("required" = ["origins"]))]
pub struct Cors {
    /// Origins whose scripts may read responses: `["https://app.example.com", "https://*.example.com"]`, where `*`
    /// stands for one or more labels. Scheme and port must match. `["*"]` = all origins, without credentials.
    pub origins: Vec<Text>,
    /// Methods that preflights allow, in addition to GET, HEAD and POST. `["*"]` = any method. Default: `methods` of
    /// the route.
    pub methods: Option<Vec<Text>>,
    /// Request headers that preflights allow, in addition to headers that need no preflight. `["*"]` = any headers.
    /// Default: none.
    pub headers: Option<Vec<Text>>,
    /// Whether browsers may send cookies, client certificates and HTTP authentication.
    #[schemars(extend("default" = false))]
    pub credentials: Option<Spanned<bool>>,
    /// Time for which browsers may cache a preflight, in whole seconds. Browsers limit it to their own maximum.
    /// Default: the default of the browser, usually 5s.
    #[schemars(schema_with = "schema::duration")]
    pub max_age: Option<Text>,
    /// Response headers that scripts may read, in addition to `Retry-After` and the RateLimit headers of the route's
    /// limits. `["*"]` = all headers, without credentials. Default: none.
    pub expose: Vec<Text>,
}

/// `response_headers = { … }` of a route
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
pub struct ResponseHeaderRules {
    /// Headers to set, as in `request_headers`.
    pub set: BTreeMap<String, Text>,
    /// Headers to remove, with all their lines.
    pub remove: Vec<Text>,
    /// Also set the headers on error responses that the gateway generates for requests of the route, such as 401, 413,
    /// 429 and 502. Headers that such a response already has, such as `Cache-Control` and `Retry-After`, do not change.
    #[schemars(extend("default" = false))]
    pub on_errors: bool,
}

/// `mirror = { … }` of a route
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("required" = ["upstream"]))]
pub struct Mirror {
    /// Name of the upstream that gets the copies. Its timeouts apply to the copies, but its `retries` do not.
    pub upstream: Option<Text>,
    /// Percentage of the requests that are copied, such as 10 or 0.1. 0 = none.
    #[schemars(range(min = 0, max = 100), extend("default" = 100))]
    pub percent: Option<Spanned<f64>>,
    /// Maximum size of a body that is copied. Requests with a larger body are not copied. The bodies of all copies use
    /// at most a quarter of `server.max_buffered`, in addition to the memory of `server.max_buffered`.
    /// 0B = copy only requests without a body.
    #[schemars(schema_with = "schema::size", extend("default" = "64KiB"))]
    pub max_body: Option<Text>,
    /// Maximum number of copies in flight per worker. When the maximum is reached, further requests are not copied.
    #[schemars(range(min = 1, max = 100000), extend("default" = 100))]
    pub max_in_flight: Option<Spanned<i64>>,
}

/// `respond = { … }` of a route
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("required" = ["status"]))]
pub struct DirectResponse {
    /// Status of the response.
    #[schemars(range(min = 200, max = 599))]
    pub status: Option<Spanned<i64>>,
    /// Body of the response. Default: empty.
    pub body: Option<Text>,
    /// Content type of the body.
    #[schemars(extend("default" = "text/plain; charset=utf-8"))]
    pub content_type: Option<Text>,
}

/// `redirect = { … }` of a route
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Redirect {
    /// Path, or `http://` or `https://` URL with a host. The value may contain parameters of the path: `"/v1/{rest}"`.
    /// A redirect has either `to` or `scheme`.
    pub to: Option<Text>,
    /// Scheme to redirect to. The redirect keeps the host, path and query of the request.
    #[schemars(extend("enum" = ["http", "https"]))]
    pub scheme: Option<Text>,
    /// Port to redirect to, together with `scheme`. Default: the port of the scheme, 80 or 443.
    #[schemars(range(min = 1, max = 65535))]
    pub port: Option<Spanned<i64>>,
    /// Status of the redirect: 308 or 301 (permanent), 307 or 302 (temporary), or 303 (the client sends GET to another
    /// URL).
    #[schemars(extend("enum" = [301, 302, 303, 307, 308], "default" = 308))]
    pub status: Option<Spanned<i64>>,
}

/// `[limit.NAME]`
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("required" = ["by", "quota"]))]
pub struct Limit {
    /// Identity that the limit counts: `api-key`, `ip`, `user:HEADER`, `header:NAME`, `cookie:NAME`, `query:NAME`,
    /// `path:PARAM`, `jwt:CLAIM`, `client-cert`, `basic` (the user name), `auth:HEADER` (of an authentication server),
    /// `host`, `route`, `method`, `json:POINTER` (a value of the JSON body, such as `json:/model`), `mcp:tool`,
    /// `mcp:method`, `jsonrpc:method`, `global`, or a list of them. A list counts each combination of values
    /// separately. `api-key`, `jwt:CLAIM`, `basic` and `auth:HEADER` need a provider of that kind in `require` or
    /// `identify` of the route. The first provider that has verified a credential determines the identity.
    pub by: Option<Spanned<OneOrMany>>,
    /// `gcra` and `leaky-bucket` are aliases of `token-bucket`. `sliding-log` allows a quota of at most 10,000.
    /// `concurrency` limits requests in flight: `quota = "20"`.
    #[schemars(extend("enum" = ["token-bucket", "gcra", "leaky-bucket", "fixed-window", "sliding-log", "sliding-window", "sliding-buckets", "concurrency"], "default" = "token-bucket"))]
    pub algorithm: Option<Text>,
    /// Quota per time unit, such as `"600/min"`.
    #[schemars(schema_with = "schema::quota")]
    pub quota: Option<Text>,
    /// token-bucket: capacity of the bucket. Default: the count of the quota.
    #[schemars(range(min = 1, max = 9_007_199_254_740_991_i64))]
    pub burst: Option<Spanned<i64>>,
    /// fixed-window: `"aligned"` windows follow the clock; with `"first-request"`, a window begins with the first
    /// request.
    #[schemars(extend("enum" = ["aligned", "first-request"], "default" = "aligned"))]
    pub start: Option<Text>,
    /// sliding-buckets: number of buckets in the window.
    #[schemars(range(min = 1, max = 1000), extend("default" = 10))]
    pub buckets: Option<Spanned<i64>>,
    /// fixed-window by day, week, month or year, and `usage`: time zone of the calendar, such as `"Europe/Berlin"`.
    /// Days on which daylight saving time begins or ends have 23 or 25 hours.
    #[schemars(extend("default" = "UTC"))]
    pub time_zone: Option<Text>,
    /// Handling of requests without the identity. `"reject"`: the request gets 400, or 401 for an API key, token or
    /// client certificate. `"skip"`: the limit does not apply. `"ip"`: the client network is the identity. Default:
    /// `"reject"`, except that a limit with `mcp:tool`, `mcp:method` or `jsonrpc:method` does not apply to requests
    /// without such a message.
    #[schemars(extend("enum" = ["reject", "skip", "ip"]))]
    pub on_missing: Option<Text>,
    /// Fallback while the store is unavailable. `"local"`: the local share of this gateway. `"allow"`: fail open.
    /// `"deny"`: fail closed with 503.
    #[schemars(extend("enum" = ["local", "allow", "deny"], "default" = "local"))]
    pub on_store_error: Option<Text>,
    /// Shadow mode: the limit decides and logs (`shadow_denied` in the access log), but never denies and sends no
    /// response headers.
    #[schemars(extend("default" = false))]
    pub shadow: bool,
    /// Announce the limit to clients in the RateLimit headers and in `violated-policies`. `false` hides the limit: a
    /// denial has `Retry-After`, but does not name the limit.
    #[schemars(extend("default" = true))]
    pub announce: Option<Spanned<bool>>,
    /// Quota unit in the RateLimit headers (`qu`): `requests`, `tokens` or another name of up to 32 lowercase letters,
    /// digits and `-`. The unit only names what `cost` counts. The key is not available for `concurrency`, whose unit
    /// is `concurrent-requests`.
    #[schemars(schema_with = "schema::unit", extend("default" = "requests"))]
    pub unit: Option<Text>,
    /// HTTP methods that the limit applies to, such as `["POST"]`. Default: all.
    pub methods: Option<Vec<Text>>,
    /// Identities to which the limit does not apply: `SOURCE=VALUE` with a source in `by`, such as `"api-key=batch"` (a
    /// consumer, never an unknown key) or `"client-cert=CN=alice,O=Acme"`. The value starts after the first `=`.
    /// `"ip=10.0.0.0/8"` also applies if the client network replaces another source. With `by = "ip"`, the network
    /// alone is sufficient.
    pub exempt: Vec<Text>,
    /// Quotas by tier: `{ free = { quota = "60/min", burst = 10 } }`. `[tiers]` selects the source of the tier. The
    /// default is the consumer, which requires `api-key` in `by`.
    pub tiers: BTreeMap<String, Spanned<LimitVariant>>,
    /// Cost of a request: `5`; `{ request_header = "x-cost", max = 100 }`; `{ response_header = "x-tokens-used" }`;
    /// `{ llm = "auto" }`; `{ tools = { search = 5 } }`. Default: the cost of the route.
    pub cost: Option<Spanned<LimitCost>>,
    /// Response statuses for which the charge is refunded: `["5xx", "404"]`. Default: none; with `cost.llm`,
    /// `["4xx", "5xx"]`.
    #[schemars(schema_with = "schema::statuses")]
    pub refund_on: Option<Vec<Text>>,
    /// Queue timeout: maximum time that a request waits in a queue instead of being denied. Default: no queue.
    #[schemars(schema_with = "schema::duration")]
    pub max_wait: Option<Text>,
    /// Maximum number of queued requests per identity on each gateway. Further requests are denied.
    #[schemars(range(min = 1, max = 2147483647), extend("default" = 1000))]
    pub max_queue: Option<Spanned<i64>>,
    /// Maximum number of tokens that a gateway may prefetch for an identity with many requests. 0 = no prefetching.
    #[schemars(range(min = 0, max = 4_294_967_295_i64), extend("default" = 0))]
    pub prefetch: Option<Spanned<i64>>,
    /// Add up the charged cost by identity and day (of `time_zone`) in the store, and keep it for 400 days.
    /// `sluicegate usage` prints these totals. The key is not available for `concurrency`.
    #[schemars(extend("default" = false))]
    pub usage: Option<Spanned<bool>>,
    /// Send a quota event when an identity has used 80 % and 100 % of the quota: `"NAME"` of a destination
    /// `[notify.NAME]`, or `{ to = "NAME", at = [50, 100] }`. All gateways together send one event for each threshold
    /// and window ([quota events](../how-to/events.md)). The key is not available for `concurrency`. Default: no
    /// events.
    pub notify: Option<Spanned<LimitNotify>>,
}

/// `[notify.NAME]`: a destination of quota events, either `webhook` or `stream`.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Notify {
    /// URL that gets each event as a POST request, signed according to the Standard Webhooks specification.
    pub webhook: Option<Text>,
    /// Key of a Redis stream on the server of the store, to which events are added.
    pub stream: Option<Text>,
    /// webhook: key of the signature: `whsec_` and 24 to 64 bytes in base64. Required.
    pub secret: Option<Text>,
    /// webhook with `https://`: PEM file of CA certificates for the server. Default: the trust roots of the system.
    pub ca: Option<Text>,
    /// webhook: maximum time for a request and its response.
    #[schemars(schema_with = "schema::duration", extend("default" = "10s"))]
    pub timeout: Option<Text>,
    /// stream: approximate number of entries that Redis keeps.
    #[schemars(range(min = 1, max = 1_000_000_000), extend("default" = 10000))]
    pub max_length: Option<Spanned<i64>>,
}

/// `{ quota = "…", burst = … }`: a different quota of a limit, for a tier or a consumer.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
pub struct LimitVariant {
    /// Quota that replaces the quota of the limit. Without `quota` and `burst`, the values of the limit apply.
    #[schemars(schema_with = "schema::quota")]
    pub quota: Option<Text>,
    /// token-bucket: capacity of the bucket. Default: the count of the `quota` in the same table.
    #[schemars(range(min = 1, max = 9_007_199_254_740_991_i64))]
    pub burst: Option<Spanned<i64>>,
}

/// `[upstream.NAME]`
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("required" = ["servers"]))]
pub struct Upstream {
    /// URLs of the servers: `["http://10.0.0.1:9000", { url = "http://10.0.0.2:9000", weight = 2 }]`. `https://`
    /// selects TLS. Default port: 80 or 443.
    pub servers: Vec<Spanned<UpstreamServer>>,
    /// `"http1"`, or `"http2"`, which uses prior knowledge over plaintext and ALPN over TLS. With HTTP/2, all requests
    /// share one connection per worker and server. gRPC requires HTTP/2.
    #[schemars(extend("enum" = ["http1", "http2"], "default" = "http1"))]
    pub protocol: Option<Text>,
    /// Maximum time to connect, for all attempts together, including the TLS handshake. If connecting takes longer, the
    /// client gets 502.
    #[schemars(schema_with = "schema::duration", extend("default" = "2s"))]
    pub connect_timeout: Option<Text>,
    /// Maximum time from the end of the request to the response headers. If they arrive later, the client gets 504. The
    /// time in which the gateway waits for the body of the client does not count.
    #[schemars(schema_with = "schema::duration", extend("default" = "30s"))]
    pub response_timeout: Option<Text>,
    /// Maximum idle time after which a connection is still reused. With HTTP/2, a connection is idle if it has no
    /// request for this time.
    #[schemars(schema_with = "schema::duration", extend("default" = "4s"))]
    pub pool_idle_timeout: Option<Text>,
    /// Load balancing policy: `least-requests`, `round-robin`, `random` or `hash:HEADER`.
    #[schemars(schema_with = "schema::balance", extend("default" = "least-requests"))]
    pub balance: Option<Text>,
    /// Maximum number of requests in flight per server, from all workers. 0 = no limit.
    #[schemars(range(min = 0, max = 1000000), extend("default" = 0))]
    pub max_requests: Option<Spanned<i64>>,
    /// Maximum number of queued requests while all servers have `max_requests` requests in flight. A request waits at
    /// most `connect_timeout`. Further requests get 503.
    #[schemars(range(min = 0, max = 1000000), extend("default" = 0))]
    pub max_queue: Option<Spanned<i64>>,
    /// Active health checks of each server: `"/healthz"`, or `{ path = "/healthz", interval = "2s" }`. A server gets no
    /// requests after `unhealthy_threshold` failed checks, until `healthy_threshold` checks pass.
    pub health_check: Option<Spanned<HealthCheck>>,
    /// Outlier detection (`{}` = the defaults). After `consecutive_errors`, a server is ejected for
    /// `base_ejection_time` multiplied by the number of recent ejections, at most by 10.
    pub outlier_detection: Option<Spanned<Eject>>,
    /// Time in which the weight of a recovered server rises to its full value. `"0s"` = at once.
    #[schemars(schema_with = "schema::duration", extend("default" = "0s"))]
    pub slow_start: Option<Text>,
    /// Maximum number of retries on other servers, for GET, HEAD and OPTIONS requests without a body whose connection
    /// fails before the response. The retry budget is 20 % of all requests, plus 10 per second.
    #[schemars(range(min = 0, max = 10), extend("default" = 0))]
    pub retries: Option<Spanned<i64>>,
    /// Send the verified certificate of the client in `Client-Cert`, and its chain in `Client-Cert-Chain` (RFC 9440).
    /// If a client sends headers with these names, they are removed, even if a trusted proxy sent them.
    #[schemars(extend("default" = false))]
    pub client_cert_header: Option<Spanned<bool>>,
    /// `"v2"`: each connection to a server starts with a PROXY protocol header that contains the address of the client.
    /// Requests of different clients then share no connection. `proxy_protocol` cannot be combined with
    /// `protocol = "http2"`. Default: no header.
    #[schemars(extend("enum" = ["v2"]))]
    pub proxy_protocol: Option<Text>,
    /// TLS to servers at `https://`: `{ ca = "ca.pem", server_name = "api.internal", cert = "gate.pem", key =
    /// "gate.key" }`. Each key is optional, but `cert` and `key` require each other.
    pub tls: Option<Spanned<UpstreamTls>>,
}

/// `tls` of an upstream
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
pub struct UpstreamTls {
    /// PEM file of CA certificates for the servers. Default: the trust roots of the system.
    pub ca: Option<Text>,
    /// Name for which the server certificates must be valid, and which is sent as SNI. Default: the host of the URL.
    pub server_name: Option<Text>,
    /// PEM file of the client certificate. Requires `key`.
    pub cert: Option<Text>,
    /// PEM file of the private key of `cert`.
    pub key: Option<Text>,
}

/// `health_check = { … }` of an upstream
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("required" = ["path"]))]
pub struct Health {
    /// Path and query of the check, such as `"/healthz"`.
    pub path: Option<Text>,
    /// Response statuses of a healthy server.
    #[schemars(extend("default" = [200]))]
    pub status: Option<Vec<Spanned<i64>>>,
    /// Time between two checks of a server.
    #[schemars(schema_with = "schema::duration", extend("default" = "5s"))]
    pub interval: Option<Text>,
    /// Maximum time for a check, including the connection.
    #[schemars(schema_with = "schema::duration", extend("default" = "1s"))]
    pub timeout: Option<Text>,
    /// Consecutive failed checks after which a server is unhealthy.
    #[schemars(range(min = 1, max = 100), extend("default" = 3))]
    pub unhealthy_threshold: Option<Spanned<i64>>,
    /// Consecutive passed checks after which a server is healthy again.
    #[schemars(range(min = 1, max = 100), extend("default" = 2))]
    pub healthy_threshold: Option<Spanned<i64>>,
}

/// `outlier_detection = { … }` of an upstream
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Eject {
    /// Consecutive errors after which a server is ejected.
    #[schemars(range(min = 1, max = 1000), extend("default" = 5))]
    pub consecutive_errors: Option<Spanned<i64>>,
    /// Duration of the first ejection.
    #[schemars(schema_with = "schema::duration", extend("default" = "10s"))]
    pub base_ejection_time: Option<Text>,
}
