//! The tables `[[route]]`, `[limit.NAME]` and `[upstream.NAME]`, as written in the configuration file.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::Deserialize;

use crate::config::schema;
use crate::config::shorthand::{
    Compress, Fallback, HeaderRules, HealthCheck, LimitCost, LimitNotify, OneOrMany, Requirement, Respond, StatusRule,
    UpstreamServer, UpstreamWeights,
};
use crate::config::spanned::{Spanned, Text};

/// `[[route]]`
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("required" = ["name"]))]
pub struct Route {
    /// Unique name of the route.
    pub name: Option<Text>,
    /// Host names without port: `["api.example.com", "*.example.org"]`. `*.` matches all subdomains, but not the domain
    /// itself. Default: any host.
    pub hosts: Option<Vec<Text>>,
    /// Names of listeners. The route matches only requests on connections to these listeners. Default: all listeners.
    pub listeners: Option<Vec<Text>>,
    /// Name of a `[route_group.NAME]`, whose keys apply to the route ([defaults](#defaults-of-routes)).
    pub group: Option<Text>,
    /// Path pattern. `"/v1/search"` matches only this path. In `"/v1/users/{id}"`, `{id}` matches one segment.
    /// `"/v1/{*rest}"` matches `/v1/` and all paths below it. `"/{*rest}"` matches every path. A route has either
    /// `path` or `path_regex`.
    pub path: Option<Text>,
    /// Regular expression that must match the whole path, such as `'/v[0-9]+/(?<name>[^/]+)'`. Named groups are path
    /// parameters.
    pub path_regex: Option<Text>,
    /// How to handle a path that differs from `path` only in a trailing slash. `"strict"`: it does not match. `"same"`:
    /// it matches as well. `"redirect"`: redirect it to the form in `path` with 308. For `path = "/a/{*rest}"`, this
    /// setting applies to `/a`.
    #[schemars(extend("enum" = ["strict", "same", "redirect"], "default" = "strict"))]
    pub trailing_slash: Option<Text>,
    /// HTTP methods of the route, such as `["GET"]`. Default: all methods.
    pub methods: Option<Vec<Text>>,
    /// Conditions on headers, query parameters and values in a JSON body: `{ headers = { x-version = { exact = "2" } }
    /// }`. A request must meet all of them.
    #[serde(rename = "match")]
    pub conditions: Option<Spanned<MatchRules>>,
    /// Name of an upstream, or several names with weights: `{ api = 9, canary = 1 }`. A route has exactly one of
    /// `upstream`, `respond` and `redirect`.
    pub upstream: Option<Spanned<UpstreamWeights>>,
    /// Other names of models: `{ fast = "gpt-5-mini" }`. If a request to an LLM API names such models in its body, also
    /// as fallbacks, the gateway replaces the names. Limits and prices apply to the new names. Requires a limit with
    /// `cost.llm`.
    pub model_aliases: BTreeMap<String, Text>,
    /// MCP tools that clients of the route may call, by name; `*` matches any number of characters: `{ allow = ["get_*"],
    /// deny = ["get_secret"] }`. Calls of other tools get 403, and lists of tools do not contain them
    /// ([tools](limits.md#permitted-tools)). `{}` permits all tools, except those that `mcp_tools` of a consumer does not
    /// permit.
    pub mcp_tools: Option<Spanned<McpTools>>,
    /// `Host` that the servers of the upstream receive from this route: `"client"`, `"server"` or a name. Default: `host`
    /// of the upstream.
    pub upstream_host: Option<Text>,
    /// Maximum number of retries on other servers of the same upstream. Default: `retries` of the upstream.
    #[schemars(range(min = 0, max = 10))]
    pub retries: Option<Spanned<i64>>,
    /// Responses after which a request is sent again: status codes such as 503, classes such as `"5xx"`, and
    /// `"timeout"` for an expired `response_timeout`. Failed connections are always included. Default: only these.
    #[schemars(schema_with = "schema::retry_on")]
    pub retry_on: Option<Vec<Spanned<StatusRule>>>,
    /// Methods of requests that may be sent again although a server may have executed them
    /// ([retries](upstreams.md#retries-of-a-route)).
    #[schemars(extend("default" = ["GET", "HEAD", "OPTIONS"]))]
    pub retry_methods: Option<Vec<Text>>,
    /// Upstreams that get a request after `upstream` has failed, in this order: `["other"]`, or `[{ upstream = "other",
    /// rewrite = "/v2/{rest}", request_headers = { set = { authorization = "…" } } }]`. A request that a server may
    /// have executed is sent to a fallback only if its method is in `retry_methods` ([fallback](upstreams.md#fallback)).
    pub fallback: Option<Vec<Spanned<Fallback>>>,
    /// Response that the gateway sends itself, without an upstream: `{ status = 200, body = "…", content_type =
    /// "text/plain" }`. `"readiness"`: 200 if load balancers should send requests to this gateway, otherwise 503
    /// ([health](admin-api.md#health)).
    pub respond: Option<Spanned<Respond>>,
    /// Redirect to a path or URL: `{ to = "/v1/{rest}", status = 308 }`. To redirect to the same host, path and query
    /// with another scheme: `{ scheme = "https" }`.
    pub redirect: Option<Spanned<Redirect>>,
    /// Client networks that may use the route: `["10.0.0.0/8", "file:office.txt"]`. `file:` precedes the path of a file
    /// with one network per line. All other clients get 403 ([access rules](#access-rules)). Default: all networks.
    pub allow: Option<Vec<Text>>,
    /// Client networks that get 403, even if they are in `allow`. Default: none.
    pub deny: Option<Vec<Text>>,
    /// CORS: `{ origins = ["https://app.example.com"] }`. The gateway answers preflights and sets the CORS headers of
    /// all responses of the route ([CORS](#cors)). Default: the upstream answers preflights and sets CORS headers.
    pub cors: Option<Spanned<Cors>>,
    /// Authentication providers (`[auth.NAME]`), at least one of which must verify the request: `["keys", ["mtls",
    /// "tokens"]]`. The items of the list are alternatives, which the gateway tries in order. A nested list requires
    /// all of its providers. If the credential of an alternative is absent or has another format, the gateway tries the
    /// next one. A request with an invalid credential, or without any credential, gets 401. A request whose valid
    /// credential lacks permission gets 403. Default: no credential is required.
    pub require: Option<Spanned<Vec<Spanned<Requirement>>>>,
    /// Authentication providers that verify a credential only if the request has one. Use this key if a limit uses the
    /// credential as the identity, such as `by = "api-key"`. A request with an invalid credential gets 401.
    pub identify: Option<Vec<Text>>,
    /// Names of up to 16 limits. One atomic check charges all of these limits, or none of them if one denies the
    /// request.
    pub limits: Vec<Text>,
    /// Cost of a request, for the limits of the route that have no `cost`.
    #[schemars(range(min = 1, max = 9_007_199_254_740_991_i64), extend("default" = 1))]
    pub cost: Option<Spanned<i64>>,
    /// Path prefix to remove before the request is forwarded, such as `"/v1"`. It must consist of whole path segments.
    pub strip_prefix: Option<Text>,
    /// Path of the upstream request, such as `"/internal/{rest}"`. It may contain path parameters, and a query that
    /// precedes the query of the request.
    pub rewrite: Option<Text>,
    /// Maximum time for a request, from its headers to the end of the response, such as `"10s"`. If it expires before
    /// the response headers arrive, the client gets 504, or 408 if the client was slow to send the body. If it expires
    /// later, the gateway aborts the response. Default: no maximum.
    #[schemars(schema_with = "schema::duration")]
    pub timeout: Option<Text>,
    /// Maximum size of a request body, such as `"1MiB"`. A larger body gets 413. If the `Content-Length` of the body is
    /// too large, the gateway rejects the request at once. Otherwise, the gateway aborts the upstream request when the
    /// body reaches the maximum. Default: no maximum.
    #[schemars(schema_with = "schema::size")]
    pub max_body: Option<Text>,
    /// Changes to the headers of the upstream request: `{ set = { x-user = "{consumer}" }, remove = ["x-debug"] }`
    /// ([variables](http.md#variables-in-header-rules)).
    pub request_headers: Option<Spanned<HeaderRules>>,
    /// Changes to the response headers that the client receives: `{ set = { x-request-id = "{request_id}" }, remove =
    /// ["server"] }`.
    pub response_headers: Option<Spanned<ResponseHeaderRules>>,
    /// Set headers that protect browsers, unless the response has them: `X-Content-Type-Options: nosniff`,
    /// `X-Frame-Options: SAMEORIGIN`, `Referrer-Policy: strict-origin-when-cross-origin`, and for clients that use https
    /// `Strict-Transport-Security: max-age=31536000`. They are also set on error responses that the gateway generates.
    #[schemars(extend("default" = false))]
    pub security_headers: Option<Spanned<bool>>,
    /// Content of the error responses that the gateway generates for requests of the route: `{ html = "…", json = "…"
    /// }` ([error pages](http.md#error-pages)). Default of each key: that of `server.error_pages`.
    pub error_pages: Option<Spanned<ErrorPages>>,
    /// Compress responses with `zstd`, `br` (Brotli) or `gzip`, as the client accepts: `true`, or `{ types = ["text/*"],
    /// min_size = "4KiB", algorithms = ["br", "gzip"] }` ([compression](http.md#compression)). Default: responses are
    /// not compressed.
    pub compress: Option<Spanned<Compress>>,
    /// Send a copy of each forwarded request to another upstream and discard its response:
    /// `{ upstream = "next", percent = 10 }` ([mirroring](../how-to/mirror.md)).
    pub mirror: Option<Spanned<Mirror>>,
    /// Allow protocol upgrades, such as WebSocket, over HTTP/1.1, and WebSockets over HTTP/2 (RFC 8441).
    #[schemars(extend("default" = false))]
    pub websocket: Option<Spanned<bool>>,
    /// Styles of the RateLimit headers: `draft-11`, `draft-07`, `draft-03`, `github`, `openai` or `anthropic`. `ietf`
    /// is the newest draft, `draft-11`. `[]` = no headers. `draft-11` describes all limits. The other styles describe
    /// one limit, or with `openai` and `anthropic` one limit for each `unit`. In a denial, it is the violated limit
    /// with the longest wait. Otherwise, it is the limit with the smallest share of its quota left.
    #[schemars(schema_with = "schema::dialects", extend("default" = ["ietf"]))]
    pub ratelimit_headers: Option<Vec<Text>>,
    /// Add an `Access-Control-Expose-Headers` header that lists the RateLimit headers and `Retry-After` to responses,
    /// in addition to the CORS headers of the upstream. Has no effect on a route with `cors`, which always exposes
    /// these headers.
    #[schemars(extend("default" = false))]
    pub expose_headers: bool,
}

/// `match = { … }` of a route
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
pub struct MatchRules {
    /// Conditions on headers, by header name.
    #[schemars(extend("secret" = "by-name"))]
    pub headers: BTreeMap<String, Spanned<ValueRule>>,
    /// Conditions on query parameters, by name. Parameters are decoded before the comparison.
    #[schemars(extend("secret" = "by-name"))]
    pub query: BTreeMap<String, Spanned<ValueRule>>,
    /// Conditions on values in the request body, by JSON pointer (RFC 6901): `{ "/model" = { prefix = "gpt-" } }`. If a
    /// request meets all other conditions of the route, the gateway reads the body before it selects the route ([routes
    /// by body](../how-to/routing.md#by-the-body)).
    #[schemars(extend("secret" = "by-name"))]
    pub json: BTreeMap<String, Spanned<ValueRule>>,
}

/// A condition on a header, a query parameter or a value in a JSON body. The table has exactly one key, such as `{
/// exact = "…" }`.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
pub struct ValueRule {
    /// The value must be equal to this text. If there are several values, the condition is not met.
    pub exact: Option<Text>,
    /// The value must start with this text. If there are several values, the condition is not met.
    pub prefix: Option<Text>,
    /// The regular expression must match the whole value. If there are several values, the condition is not met.
    pub regex: Option<Text>,
    /// `true`: there must be at least one value.
    pub present: Option<Spanned<bool>>,
    /// `true`: there must be no value.
    pub absent: Option<Spanned<bool>>,
}

/// `cors = { … }` of a route
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("required" = ["origins"]))]
pub struct Cors {
    /// Origins whose scripts may read responses: `["https://app.example.com", "https://*.example.com"]`. `*` matches
    /// one or more DNS labels. Scheme and port must be the same. `["*"]` = all origins, without credentials.
    pub origins: Vec<Text>,
    /// Methods that preflight responses allow, in addition to GET, HEAD and POST. `["*"]` = any method. Default:
    /// `methods` of the route.
    pub methods: Option<Vec<Text>>,
    /// Request headers that preflight responses allow, in addition to headers that need no preflight. `["*"]` = any
    /// header. Default: none.
    pub headers: Option<Vec<Text>>,
    /// Allow browsers to send cookies, client certificates and HTTP authentication.
    #[schemars(extend("secret" = "never", "default" = false))]
    pub credentials: Option<Spanned<bool>>,
    /// Allow websites in public networks to send requests to the gateway in a private network: preflights that ask for
    /// it get `Access-Control-Allow-Private-Network`.
    #[schemars(extend("default" = false))]
    pub private_network: Option<Spanned<bool>>,
    /// Time for which browsers may cache a preflight response, in whole seconds. Browsers reduce it to their own
    /// maximum. Default: the browser's default, usually 5s.
    #[schemars(schema_with = "schema::duration")]
    pub max_age: Option<Text>,
    /// Response headers that scripts may read, in addition to `Retry-After` and the RateLimit headers of the route's
    /// limits. `["*"]` = all headers, without credentials. Default: none.
    pub expose: Vec<Text>,
}

/// `response_headers = { … }` of a route
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("secret" = "always"))]
pub struct ResponseHeaderRules {
    /// Headers to set. Values and variables are the same as in `request_headers`.
    pub set: BTreeMap<String, Text>,
    /// Headers to remove. If a header occurs several times, all occurrences are removed.
    #[schemars(extend("secret" = "never"))]
    pub remove: Vec<Text>,
    /// Also set the headers on error responses that the gateway generates for requests of the route, such as 401, 413,
    /// 429 and 502. Headers that such a response already has, such as `Cache-Control` and `Retry-After`, are not
    /// replaced.
    #[schemars(extend("default" = false))]
    pub on_errors: bool,
}

/// `error_pages = { … }` of a route or of the server
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
pub struct ErrorPages {
    /// Page for clients whose `Accept` names `text/html`. It may contain the variables `{status}`, `{reason}`,
    /// `{detail}` and `{request_id}`. Other text in braces is literal.
    pub html: Option<Text>,
    /// JSON document for all other clients, and for all clients without `html`, with the same variables inside of
    /// strings. Default: a problem document (RFC 9457).
    pub json: Option<Text>,
}

/// `mirror = { … }` of a route
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("required" = ["upstream"]))]
pub struct Mirror {
    /// Name of the upstream that gets the copies. The timeouts of this upstream apply to copies. Its `retries` do not.
    pub upstream: Option<Text>,
    /// Percentage of the route's requests to copy, such as 10 or 0.1. 0 = none.
    #[schemars(range(min = 0, max = 100), extend("default" = 100))]
    pub percent: Option<Spanned<f64>>,
    /// Maximum size of the body of a copied request. Requests with larger bodies are not copied. The bodies of all
    /// copies together use at most a quarter of `server.max_buffered`. This memory is in addition to
    /// `server.max_buffered`. 0B = copy only requests without a body.
    #[schemars(schema_with = "schema::size", extend("default" = "64KiB"))]
    pub max_body: Option<Text>,
    /// Maximum number of copies in flight per worker. While this maximum is reached, requests are not copied.
    #[schemars(range(min = 1, max = 100000), extend("default" = 100))]
    pub max_in_flight: Option<Spanned<i64>>,
}

/// `redirect = { … }` of a route
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Redirect {
    /// Path or `http://` or `https://` URL of the redirect, such as `"/v1/{rest}"` or `"https://example.com/"`. It may
    /// contain path parameters, but not in the host. A redirect has either `to` or `scheme`.
    #[schemars(schema_with = "schema::url")]
    pub to: Option<Text>,
    /// Scheme of the redirect. The redirect keeps the host, path and query of the request.
    #[schemars(extend("enum" = ["http", "https"]))]
    pub scheme: Option<Text>,
    /// Port of the redirect, in addition to `scheme`. Default: the default port of the scheme, 80 or 443.
    #[schemars(range(min = 1, max = 65535))]
    pub port: Option<Spanned<i64>>,
    /// Status code of the redirect: 308 or 301 (permanent), 307 or 302 (temporary), or 303 (the client sends a GET
    /// request to the target).
    #[schemars(extend("enum" = [301, 302, 303, 307, 308], "default" = 308))]
    pub status: Option<Spanned<i64>>,
}

/// `[limit.NAME]`
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("required" = ["by", "quota"]))]
pub struct Limit {
    /// Identity to which the limit applies: `api-key`, `ip`, `user:HEADER`, `header:NAME`, `cookie:NAME`, `query:NAME`,
    /// `path:PARAM`, `jwt:CLAIM`, `client-cert`, `basic` (the verified user name), `basic:user` (the user name
    /// that the client sends, not verified), `auth:HEADER` (a header from an authentication server), `host`, `route`,
    /// `method`, `json:POINTER` (a value in the JSON body, such as `json:/model`), `form:NAME` (a field of an HTML form
    /// in the body), `mcp:tool`, `mcp:method`, `jsonrpc:method`, `entry:KEY` (an entry of a `[[descriptor]]`), `global`,
    /// or a list of these. With a list, each combination of values is a separate identity. `api-key`, `jwt:CLAIM`,
    /// `basic` and `auth:HEADER` need an authentication provider that verifies this credential, in `require` or
    /// `identify` of the route. If several providers verify a credential, the first one determines the identity.
    pub by: Option<Spanned<OneOrMany>>,
    /// Algorithm of the limit. `gcra` and `leaky-bucket` are aliases of `token-bucket`. `sliding-log` supports quotas
    /// of up to 10,000. `concurrency` limits the number of requests in flight: `quota = "20"`.
    #[schemars(extend("enum" = ["token-bucket", "gcra", "leaky-bucket", "fixed-window", "sliding-log", "sliding-window", "sliding-buckets", "concurrency"], "default" = "token-bucket"))]
    pub algorithm: Option<Text>,
    /// Quota per unit of time, such as `"600/min"`. For `concurrency`: number of requests in flight, such as `"20"`.
    #[schemars(schema_with = "schema::quota")]
    pub quota: Option<Text>,
    /// token-bucket: capacity of the bucket. Default: the count in `quota`.
    #[schemars(range(min = 1, max = 9_007_199_254_740_991_i64))]
    pub burst: Option<Spanned<i64>>,
    /// fixed-window: when windows start. `"aligned"`: at clock and calendar boundaries, such as each full hour.
    /// `"first-request"`: a window starts with the first request of an identity.
    #[schemars(extend("enum" = ["aligned", "first-request"], "default" = "aligned"))]
    pub start: Option<Text>,
    /// sliding-buckets: number of buckets in the window.
    #[schemars(range(min = 1, max = 1000), extend("default" = 10))]
    pub buckets: Option<Spanned<i64>>,
    /// Time zone of the calendar, such as `"Europe/Berlin"`, for `usage` and for fixed windows of a day, week, month or
    /// year. Days on which daylight saving time begins or ends have 23 or 25 hours.
    #[schemars(extend("default" = "UTC"))]
    pub time_zone: Option<Text>,
    /// How to handle requests that lack a value in `by`. `"reject"`: reject with 401 if an API key, token, client
    /// certificate or user name (`basic`) is missing, with 403 if a header from an authentication server is missing,
    /// otherwise with 400. `"skip"`: do not apply the limit. `"ip"`: use the client network as the identity. Default:
    /// `"reject"`. A limit with `mcp:tool`, `mcp:method` or `jsonrpc:method` by default does not apply to requests
    /// without such a message.
    #[schemars(extend("enum" = ["reject", "skip", "ip"]))]
    pub on_missing: Option<Text>,
    /// Fallback while the store is unavailable. `"local"`: enforce the local share of this gateway. `"allow"`: fail
    /// open. `"deny"`: fail closed with 503.
    #[schemars(extend("enum" = ["local", "allow", "deny"], "default" = "local"))]
    pub on_store_error: Option<Text>,
    /// Shadow mode: check the limit and log denials (`shadow_denied` in the access log), but never deny a request, and
    /// send no response headers for this limit.
    #[schemars(extend("default" = false))]
    pub shadow: bool,
    /// Announce the limit to clients in the RateLimit headers and in `violated-policies`. `false` hides the limit: a
    /// denial still has `Retry-After`, but does not name the limit.
    #[schemars(extend("default" = true))]
    pub announce: Option<Spanned<bool>>,
    /// Quota unit in the RateLimit headers (`qu`): `requests`, `tokens` or another name of up to 32 lowercase letters,
    /// digits and `-`. It is only a name for what `cost` counts. Not available for `concurrency`, whose unit is
    /// `concurrent-requests`.
    #[schemars(schema_with = "schema::unit", extend("default" = "requests"))]
    pub unit: Option<Text>,
    /// HTTP methods to which the limit applies, such as `["POST"]`. Default: all methods.
    pub methods: Option<Vec<Text>>,
    /// Identities to which the limit does not apply: `SOURCE=VALUE`, where `SOURCE` is a source in `by`. Examples are
    /// `"api-key=batch"` (the name of a consumer, never an unknown key) and `"client-cert=CN=alice,O=Acme"`. The value
    /// starts after the first `=`. `"ip=10.0.0.0/8"` also exempts requests for which the client network replaces
    /// another source (`on_missing = "ip"`, or an API key provider with `"anonymous"`). With `by = "ip"`, the network
    /// without `ip=` is sufficient.
    pub exempt: Vec<Text>,
    /// Quotas by tier: `{ free = { quota = "60/min", burst = 10 } }`. `[tiers]` selects the source of the tier. By
    /// default, the `tier` of the consumer applies. This requires `api-key` in `by`.
    pub tiers: BTreeMap<String, Spanned<LimitVariant>>,
    /// Cost of a request, in one of these forms: `5`; `{ request_header = "x-cost", max = 100 }`;
    /// `{ response_header = "x-tokens-used" }`; `{ llm = "auto" }`; `{ tools = { search = 5 } }`. Default: the `cost`
    /// of the route.
    pub cost: Option<Spanned<LimitCost>>,
    /// Status of the responses to requests that the limit denies. If several limits deny a request, the status is that
    /// of the first one in `limits` of the route. gRPC calls get `grpc-status: 8`.
    #[schemars(range(min = 400, max = 599), extend("default" = 429))]
    pub status: Option<Spanned<i64>>,
    /// What a limit of a `[[descriptor]]` charges. `"admitted"`: the cost of admitted requests. `"always"`: also the cost
    /// of requests that the limit itself denies, so that it goes into debt ([token
    /// quotas](../how-to/envoy.md#quotas-that-are-charged-at-the-end-of-a-stream)).
    #[schemars(extend("enum" = ["admitted", "always"], "default" = "admitted"))]
    pub charge: Option<Text>,
    /// Response statuses for which the charge is refunded, such as `["5xx", "404"]`. Default: none. With `cost.llm`,
    /// the default is `["3xx", "4xx", "5xx"]`.
    #[schemars(schema_with = "schema::statuses")]
    pub refund_on: Option<Vec<Text>>,
    /// Queue timeout: maximum time for which a request that exceeds the limit waits for quota, instead of being denied
    /// at once. Default: no queue.
    #[schemars(schema_with = "schema::duration")]
    pub max_wait: Option<Text>,
    /// Maximum number of queued requests per identity on each gateway. Excess requests are denied. Requires `max_wait`.
    #[schemars(range(min = 1, max = 2147483647), extend("default" = 1000))]
    pub max_queue: Option<Spanned<i64>>,
    /// Maximum number of tokens that a gateway may charge in advance for an identity that sends many requests, so that
    /// most of these requests need no call to Redis. 0 = no prefetching.
    #[schemars(range(min = 0, max = 4_294_967_295_i64), extend("default" = 0))]
    pub prefetch: Option<Spanned<i64>>,
    /// Store the total charged cost of each identity for each day (in `time_zone`), and keep the totals for 400 days.
    /// `sluicegate usage` prints them. Not available for `concurrency`.
    #[schemars(extend("default" = false))]
    pub usage: Option<Spanned<bool>>,
    /// Send a quota event when an identity has used 80 % and 100 % of the quota. The value is `"NAME"` of a
    /// `[notify.NAME]` destination, or `{ to = "NAME", at = [50, 100] }`. All gateways together send one event per
    /// identity, threshold and window ([quota events](../how-to/events.md)). Not available for `concurrency`. Default:
    /// no events.
    pub notify: Option<Spanned<LimitNotify>>,
}

/// `[[descriptor]]`
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("required" = ["domain", "entries"]))]
pub struct Descriptor {
    /// Domain that the proxy is configured with.
    pub domain: Option<Text>,
    /// Entries in the order in which the proxy sends them: `["generic_key=login", "remote_address"]`. `KEY=VALUE`
    /// matches one value, and `*` in the value matches any number of characters. `KEY` matches every value. A
    /// descriptor of the proxy matches if it has the same number of entries, and all of them match.
    pub entries: Option<Spanned<Vec<Text>>>,
    /// Names of limits. Their `by` refers to the values of entries: `by = "entry:remote_address"`.
    pub limits: Vec<Text>,
    /// Admit all requests with this descriptor, instead of `limits`.
    #[schemars(extend("default" = false))]
    pub unlimited: Option<Spanned<bool>>,
    /// Deny a call only if all its descriptors with `quota_mode` are over their limits. Each of them is decided and
    /// charged on its own.
    #[schemars(extend("default" = false))]
    pub quota_mode: Option<Spanned<bool>>,
    /// Metadata for the filters of the proxy, such as the name of an upstream. If the descriptor is not over its limits,
    /// the response contains it as `metadata`. If several descriptors have a value for a name, the first one applies.
    #[schemars(schema_with = "schema::free_table")]
    pub metadata: Option<Spanned<toml::Table>>,
}

/// `[notify.NAME]`: a destination of quota events. Either `webhook` or `stream` is set.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Notify {
    /// URL to which the gateway posts each event, signed according to the Standard Webhooks specification.
    #[schemars(schema_with = "schema::secret")]
    pub webhook: Option<Text>,
    /// Key of a Redis stream in the store, to which the gateway adds each event.
    pub stream: Option<Text>,
    /// webhook: signing key, written as `whsec_` and 24 to 64 bytes in base64. Required for webhooks.
    #[schemars(schema_with = "schema::secret")]
    pub secret: Option<Text>,
    /// webhook with `https://`: PEM file of CA certificates that verify the server. Default: the trust roots of the
    /// system.
    pub ca: Option<Text>,
    /// webhook: maximum time for a request, including its response.
    #[schemars(schema_with = "schema::duration", extend("default" = "10s"))]
    pub timeout: Option<Text>,
    /// stream: approximate maximum number of entries. Redis removes the oldest entries.
    #[schemars(range(min = 1, max = 1_000_000_000), extend("default" = 10000))]
    pub max_length: Option<Spanned<i64>>,
}

/// `{ quota = "…", burst = … }`: a quota of a limit that applies to a tier or a consumer.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
pub struct LimitVariant {
    /// Quota that replaces the `quota` of the limit. Default: the `quota` of the limit.
    #[schemars(schema_with = "schema::quota")]
    pub quota: Option<Text>,
    /// token-bucket: capacity of the bucket. Default: the count in the `quota` of this table. If this table has no
    /// `quota`, the default is the capacity of the limit's bucket.
    #[schemars(range(min = 1, max = 9_007_199_254_740_991_i64))]
    pub burst: Option<Spanned<i64>>,
}

/// `[upstream.NAME]`
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("required" = ["servers"]))]
pub struct Upstream {
    /// URLs of the servers: `["http://10.0.0.1:9000", { url = "http://10.0.0.2:9000", weight = 2 }]`. `https://`
    /// selects TLS. Default port: 80 for `http://`, 443 for `https://`. A URL contains neither credentials nor a path:
    /// use `request_headers` and `rewrite` of the route. `srv:NAME` and, with TLS, `srv+https:NAME` are the targets of
    /// an [SRV record](upstreams.md#srv-records).
    #[schemars(extend("secret" = "url"))]
    pub servers: Vec<Spanned<UpstreamServer>>,
    /// Protocol of the servers: `"http1"` or `"http2"`. HTTP/2 uses prior knowledge over plaintext, and ALPN over TLS.
    /// With HTTP/2, the requests of a worker to a server share up to four connections. gRPC requires HTTP/2.
    #[schemars(extend("enum" = ["http1", "http2"], "default" = "http1"))]
    pub protocol: Option<Text>,
    /// `Host` that the servers receive: `"client"` (the host of the client's request), `"server"` (the host and port in
    /// the URL of the server), or a name such as `"api.example.com"` ([table](http.md#host-for-upstreams)). Servers at
    /// hosting providers usually require `"server"`.
    #[schemars(extend("default" = "client"))]
    pub host: Option<Text>,
    /// Which addresses of names the gateway uses: `"ipv4"` (A records), `"ipv6"` (AAAA records) or `"both"`.
    #[schemars(extend("enum" = ["ipv4", "ipv6", "both"], "default" = "both"))]
    pub resolve: Option<Text>,
    /// Maximum time to connect, including the TLS handshake and attempts at other servers. If it expires, the client
    /// gets 502.
    #[schemars(schema_with = "schema::duration", extend("default" = "2s"))]
    pub connect_timeout: Option<Text>,
    /// Maximum time from the end of the request to the response headers. If it expires, the client gets 504. Time in
    /// which the gateway waits for the client's request body does not count.
    #[schemars(schema_with = "schema::duration", extend("default" = "30s"))]
    pub response_timeout: Option<Text>,
    /// Maximum time for which an idle connection is kept for reuse. With HTTP/2, this time begins when the last request
    /// was sent, even if this request is still in flight.
    #[schemars(schema_with = "schema::duration", extend("default" = "4s"))]
    pub pool_idle_timeout: Option<Text>,
    /// Load balancing policy: `least-requests`, `round-robin`, `random`, `hash:HEADER`, `hash:cookie:NAME` or `sticky`.
    /// `hash:HEADER` sends requests with the same value of this header to the same server, and `hash:cookie:NAME` those
    /// with the same value of this cookie. `sticky` keeps a client on its server with a cookie that the gateway sets
    /// ([sticky sessions](upstreams.md#sticky-sessions)); it requires `store.secret`.
    #[schemars(schema_with = "schema::balance", extend("default" = "least-requests"))]
    pub balance: Option<Text>,
    /// Cookie of `balance = "sticky"`: `{ name = "route", max_age = "1h", secure = true }`.
    pub sticky_cookie: Option<Spanned<StickyCookie>>,
    /// Maximum number of requests in flight per server, counted over all workers. One client network may have half of
    /// this number of unfinished uploads. 0 = no limit.
    #[schemars(range(min = 0, max = 1000000), extend("default" = 0))]
    pub max_requests: Option<Spanned<i64>>,
    /// Maximum number of requests that wait while all servers have `max_requests` requests in flight. A request waits
    /// for at most `connect_timeout`. Excess requests get 503.
    #[schemars(range(min = 0, max = 1000000), extend("default" = 0))]
    pub max_queue: Option<Spanned<i64>>,
    /// Active health checks of each server: `"/healthz"`, or `{ path = "/healthz", interval = "2s" }`. After
    /// `unhealthy_threshold` failed checks, a server gets no requests until `healthy_threshold` checks pass. Default:
    /// no health checks.
    pub health_check: Option<Spanned<HealthCheck>>,
    /// Outlier detection. `{}` enables it with default settings. After `consecutive_errors` consecutive errors, the
    /// gateway sends no requests to the server for `base_ejection_time`, multiplied by the number of recent ejections
    /// of the server (at most 10). Default: disabled.
    pub outlier_detection: Option<Spanned<Eject>>,
    /// Time in which the weight of a server that has recovered rises from a tenth to its full value. `"0s"` =
    /// immediately.
    #[schemars(schema_with = "schema::duration", extend("default" = "0s"))]
    pub slow_start: Option<Text>,
    /// Maximum number of retries on other servers. A request is retried if its connection fails before the response,
    /// its method is GET, HEAD or OPTIONS, and it has no body. The retry budget is 20 % of all requests, plus 10
    /// retries per second.
    #[schemars(range(min = 0, max = 10), extend("default" = 0))]
    pub retries: Option<Spanned<i64>>,
    /// Send the client's verified certificate in `Client-Cert`, and its chain in `Client-Cert-Chain` (RFC 9440). The
    /// gateway removes headers with these names from all client requests, even if a trusted proxy sent them.
    #[schemars(extend("default" = false))]
    pub client_cert_header: Option<Spanned<bool>>,
    /// Keys of AWS with which the gateway signs requests (Signature Version 4): `{ region = "us-east-1", access_key =
    /// "${AWS_ACCESS_KEY_ID}", secret_key = "${AWS_SECRET_ACCESS_KEY}" }`. Requires `host = "server"` and a single
    /// server, or a name in `host`.
    pub aws: Option<Spanned<UpstreamAws>>,
    /// Service account of Google Cloud with whose access tokens the gateway sends requests: `{ service_account =
    /// "account.json" }`. Requires `https://` servers.
    pub google: Option<Spanned<UpstreamGoogle>>,
    /// `false`: the servers reject `stream_options`, as those of Mistral do. The gateway then does not request the usage
    /// of streams from them ([`cost.include_usage`](#cost)).
    #[schemars(extend("default" = true))]
    pub include_usage: Option<Spanned<bool>>,
    /// `"v2"`: start each connection to a server with a PROXY protocol header that contains the client address.
    /// Requests of different clients then never share a connection. Cannot be combined with `protocol = "http2"`.
    /// Default: no header.
    #[schemars(extend("enum" = ["v2"]))]
    pub proxy_protocol: Option<Text>,
    /// TLS settings for `https://` servers: `{ ca = "ca.pem", server_name = "api.internal", cert = "gate.pem", key =
    /// "gate.key" }`. Each key is optional, but `cert` and `key` require each other.
    pub tls: Option<Spanned<UpstreamTls>>,
}

/// `aws = { … }` of an upstream
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("required" = ["region", "access_key", "secret_key"]))]
pub struct UpstreamAws {
    /// Region of the service, such as `"us-east-1"`.
    pub region: Option<Text>,
    /// Name of the service in signatures. It may differ from the host.
    #[schemars(extend("default" = "bedrock"))]
    pub service: Option<Text>,
    /// ID of the access key.
    #[schemars(schema_with = "schema::secret")]
    pub access_key: Option<Text>,
    /// Secret of the access key.
    #[schemars(schema_with = "schema::secret")]
    pub secret_key: Option<Text>,
    /// Token of temporary keys. Default: the keys are not temporary.
    #[schemars(schema_with = "schema::secret")]
    pub session_token: Option<Text>,
}

/// `google = { … }` of an upstream
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("required" = ["service_account"]))]
pub struct UpstreamGoogle {
    /// Key file of the service account (JSON). The gateway reads the file again when it reloads the configuration.
    pub service_account: Option<Text>,
    /// Scope of the access tokens.
    #[schemars(extend("default" = "https://www.googleapis.com/auth/cloud-platform"))]
    pub scope: Option<Text>,
}

/// `mcp_tools = { … }` of a route or a consumer
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("secret" = "never"))]
pub struct McpTools {
    /// Names of the permitted tools. Default: all tools.
    pub allow: Option<Vec<Text>>,
    /// Names of tools that are not permitted, although they are in `allow`.
    pub deny: Option<Vec<Text>>,
}

/// `sticky_cookie = { … }` of an upstream
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("secret" = "never"))]
pub struct StickyCookie {
    /// Name of the cookie. Upstreams whose responses a browser gets from the same host need different names. Default:
    /// `sticky-` and a hash of the name of the upstream.
    pub name: Option<Text>,
    /// Path for which browsers send the cookie.
    #[schemars(extend("default" = "/"))]
    pub path: Option<Text>,
    /// Domain for which browsers send the cookie. Default: the host of the request only.
    pub domain: Option<Text>,
    /// Lifetime of the cookie. `"0s"`: until the browser is closed.
    #[schemars(schema_with = "schema::duration", extend("default" = "0s"))]
    pub max_age: Option<Text>,
    /// Whether browsers send the cookie only over HTTPS.
    #[schemars(extend("default" = false))]
    pub secure: Option<Spanned<bool>>,
    /// `SameSite` of the cookie: `"strict"`, `"lax"` or `"none"`. `"none"` requires `secure = true`.
    #[schemars(extend("enum" = ["strict", "lax", "none"], "default" = "lax"))]
    pub same_site: Option<Text>,
}

/// `tls` of an upstream
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
pub struct UpstreamTls {
    /// PEM file of CA certificates that verify the servers. Default: the trust roots of the system.
    pub ca: Option<Text>,
    /// Server name for SNI and for the verification of server certificates. Default: the host of the URL.
    pub server_name: Option<Text>,
    /// List of SHA-256 fingerprints of the certificates of the servers, in hexadecimal digits with or without colons
    /// (`openssl x509 -noout -fingerprint -sha256`). The gateway then accepts only these certificates, whatever their
    /// CA, names and dates. Cannot be combined with `ca`.
    pub fingerprint: Option<Vec<Text>>,
    /// `false`: accept every certificate. Anyone between the gateway and the server can then read and change requests.
    #[schemars(extend("default" = true))]
    pub verify: Option<Spanned<bool>>,
    /// PEM file of the client certificate that the gateway sends to servers. Requires `key`.
    pub cert: Option<Text>,
    /// PEM file of the private key of `cert`.
    pub key: Option<Text>,
}

/// `outlier_detection = { … }` of an upstream
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Eject {
    /// Number of consecutive errors after which a server is ejected. An error is a failed connection, an invalid
    /// response, a response timeout, or the status 502, 503 or 504.
    #[schemars(range(min = 1, max = 1000), extend("default" = 5))]
    pub consecutive_errors: Option<Spanned<i64>>,
    /// Duration of the first ejection.
    #[schemars(schema_with = "schema::duration", extend("default" = "10s"))]
    pub base_ejection_time: Option<Text>,
}
