//! Configuration values that have a short form (such as a string) and a long form (such as a table).

use std::collections::BTreeMap;
use std::fmt;

use jiff::Timestamp;
use schemars::JsonSchema;
use serde::de::{self, Deserializer, MapAccess, SeqAccess, Unexpected, Visitor, value};
use serde::{Deserialize, Serialize};
use toml::value::Datetime;

use crate::config::schema;
use crate::config::spanned::{Spanned, Text};

/// The key `cost`: a number such as `5`, or a table that describes how to determine the cost.
#[derive(Debug, JsonSchema)]
#[schemars(untagged)]
pub enum LimitCost {
    /// A fixed cost per request.
    Fixed(#[schemars(range(min = 1, max = 9_007_199_254_740_991_i64))] i64),
    /// The cost from a header, from the token count of a request to an LLM API, or from the MCP tools that a request
    /// calls.
    Table(Box<CostTable>),
}

/// `{ request_header = "…", max = … }`, `{ response_header = "…" }`, `{ llm = "auto", … }` or `{ tools = { … } }`
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
pub struct CostTable {
    /// Request header that contains the cost. The gateway reads it only from trusted proxies. Requires `max`.
    pub request_header: Option<Text>,
    /// Response header that contains the cost.
    pub response_header: Option<Text>,
    /// Maximum cost. Larger values are reduced to this maximum.
    #[schemars(range(min = 1, max = 9_007_199_254_740_991_i64))]
    pub max: Option<Spanned<i64>>,
    /// Cost of an MCP call by tool name: `{ search = 5, "sql_*" = 20 }`. `*` matches any number of characters. If
    /// several patterns match, the pattern with the most characters other than `*` wins. A JSON-RPC batch costs the sum
    /// of the costs of its messages ([agents and MCP tools](limits.md#agents-and-mcp-tools)).
    #[schemars(schema_with = "schema::tool_costs")]
    pub tools: BTreeMap<String, Spanned<i64>>,
    /// With `tools`: cost of a message that calls none of these tools, and of a request without a body. 0 = free.
    #[schemars(range(min = 0), extend("default" = 1))]
    pub default: Option<Spanned<i64>>,
    /// `"auto"`: the cost is the number of tokens that a request to an LLM API uses. Before the request is forwarded,
    /// its input and its requested maximum output are reserved. When the response reports the usage, the charge is
    /// corrected ([token budgets](limits.md#token-budgets-for-llm-apis)). Requires `unit`. Cannot be combined with
    /// `sliding-log`, `concurrency` or `prefetch`.
    #[schemars(extend("enum" = ["auto"]))]
    pub llm: Option<Text>,
    /// With `llm`: number of output tokens to reserve if the request sets no maximum.
    #[schemars(range(min = 0, max = 1_000_000_000), extend("default" = 1024))]
    pub default_output: Option<Spanned<i64>>,
    /// With `llm`: maximum number of output tokens to reserve for each choice, although the request may ask for more.
    /// Agents often ask for 32,000 to 64,000 and use a small part. A response can then exceed its reservation by the
    /// difference between its requested maximum and this number. Default: the requested maximum is reserved.
    #[schemars(range(min = 1, max = 1_000_000_000), extend("secret" = "never"))]
    pub max_reserved_output: Option<Spanned<i64>>,
    /// With `llm`: output tokens to reserve. `"max"`: the requested maximum. `"p95"`: the number that 95 % of the
    /// responses to the same identity and model have not exceeded, if this gateway has seen 20 of them, and otherwise the
    /// requested maximum. The budget can then be exceeded by a tenth of the quota for each gateway ([learned
    /// reservations](limits.md#learned-reservations)). Cannot be combined with `on_exhausted = "cut"`.
    #[schemars(extend("enum" = ["max", "p95"], "default" = "max"))]
    pub reserve_output: Option<Text>,
    /// With `llm`: average number of bytes of text per token. The gateway uses it to estimate the input tokens, and the
    /// output tokens of a stream that reports no usage. Default: an estimate of the input by the kinds of characters
    /// ([reservation](limits.md#reservation)), and 4 for the output.
    #[schemars(range(min = 1, max = 1000), extend("secret" = "never"))]
    pub bytes_per_token: Option<Spanned<i64>>,
    /// With `llm`: estimated number of tokens of an image. Default: the formula of the provider for the size of a base64
    /// image, 1000 for a link.
    #[schemars(range(min = 0, max = 1_000_000_000), extend("secret" = "never"))]
    pub image_tokens: Option<Spanned<i64>>,
    /// With `llm`: estimated number of tokens of an audio part.
    #[schemars(range(min = 0, max = 1_000_000_000), extend("secret" = "never", "default" = 1000))]
    pub audio_tokens: Option<Spanned<i64>>,
    /// With `llm`: estimated number of tokens of each started 64 KiB of a base64 document (PDF) or video.
    #[schemars(range(min = 0, max = 1_000_000_000), extend("secret" = "never", "default" = 3000))]
    pub document_tokens: Option<Spanned<i64>>,
    /// With `llm`: cost of one token of each kind, such as `{ input = 1, cached_input = 0.1, output = 4 }`. With
    /// `unit = "usd-micros"`, a weight is a price in dollars per million tokens.
    pub weights: Option<Spanned<TokenWeights>>,
    /// With `llm`: weights by model name: `{ "gpt-5*" = { output = 8 } }`. `*` in a name matches any number of
    /// characters. If several patterns match, the pattern with the most characters other than `*` wins. For a weight
    /// that a pattern does not set, the value in `weights` applies.
    pub models: BTreeMap<String, Spanned<TokenWeights>>,
    /// With `llm`: name of a `[prices.NAME]` list, which sets the weights of each model. Models that match no name in the
    /// list have the costs in `weights`, by default the highest cost of each kind in the list. Requires
    /// `unit = "usd-micros"`. Cannot be combined with `models`.
    pub prices: Option<Text>,
    /// With `llm`: maximum size of the request body that the gateway reads before the rate limit check. A larger body
    /// gets 413, unless `reserve` is set. Must not exceed `server.max_buffered`. Default: `server.inspect_body` if it is set,
    /// otherwise 16MiB, but at most `server.max_buffered`.
    #[schemars(schema_with = "schema::size")]
    pub inspect_body: Option<Text>,
    /// With `llm`: cost to reserve if the gateway cannot read the request body, because the body is larger than
    /// `inspect_body`, compressed, or not a JSON object. Default: such a request gets 413 if its body is too large,
    /// otherwise 400.
    #[schemars(range(min = 0, max = 9_007_199_254_740_991_i64))]
    pub reserve: Option<Spanned<i64>>,
    /// With `llm`: what to do if the output of a stream of server-sent events exceeds the reserved maximum. `"finish"`:
    /// forward the whole stream and charge the excess. `"cut"`: end the stream with the final event of the API, and
    /// abort the provider's response.
    #[schemars(extend("enum" = ["finish", "cut"], "default" = "finish"))]
    pub on_exhausted: Option<Text>,
    /// With `llm`: what to charge if the client or the provider aborts a response before it has reported its usage.
    /// `"reservation"`: the reservation, or the usage so far if it is larger. `"estimate"`: the usage so far. When the
    /// client disconnects, the gateway continues to read the response for up to 2 s or 1 MiB.
    #[schemars(extend("enum" = ["reservation", "estimate"], "default" = "reservation"))]
    pub on_abort: Option<Text>,
    /// With `llm`: if the client does not request the usage of a stream from OpenAI's API, request it and remove the
    /// additional event from the response. This option changes the request body. It applies only to paths that end with
    /// `/completions`. Set it to false for servers that reject `stream_options`.
    #[schemars(extend("default" = true))]
    pub include_usage: Option<Spanned<bool>>,
    /// With `llm`: longest time that a client may wait before it retries a denied request. If the wait is longer, the
    /// response has `x-should-retry: false` and, in the format of OpenAI, the code `insufficient_quota`. SDKs then
    /// report the error at once instead of waiting for days.
    #[schemars(schema_with = "schema::duration", extend("default" = "2m"))]
    pub max_retry_wait: Option<Text>,
    /// With `llm`: whether clients get the rate limit headers of the provider (`x-ratelimit-…`,
    /// `anthropic-ratelimit-…`), which describe the account that all clients share. False: the gateway removes them.
    #[schemars(extend("default" = false))]
    pub provider_headers: Option<Spanned<bool>>,
    /// With `llm`: how to treat a request with a body whose path is no known operation of an LLM API
    /// ([operations](limits.md#operations)). `"reserve"`: reserve and count tokens. `"free"`: count nothing. `"reject"`:
    /// respond with 404.
    #[schemars(extend("enum" = ["reserve", "free", "reject"], "default" = "reserve"))]
    pub unknown: Option<Text>,
    /// With `llm`: JSON pointers (RFC 6901) to the token counts in responses and events, for providers with another
    /// format: `{ input = "/meta/in", output = "/meta/out" }`. Default: the formats of OpenAI, Anthropic, Gemini,
    /// Ollama, Mistral and Cohere.
    pub usage: Option<Spanned<UsagePointers>>,
}

/// `weights = { … }` of `cost`, and the prices of a model
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
pub struct TokenWeights {
    /// Cost of one input token, with up to six decimal places. In `[prices.NAME]`, the cost is in dollars per million
    /// tokens.
    #[schemars(range(min = 0, max = 1_000_000), extend("default" = 1))]
    pub input: Option<Spanned<f64>>,
    /// Cost of one input token that the provider read from its cache. Default: the value of `input`.
    #[schemars(range(min = 0, max = 1_000_000))]
    pub cached_input: Option<Spanned<f64>>,
    /// Cost of one input token that the provider wrote to its cache for 5 minutes. Default: the value of `input`, in
    /// `[prices.NAME]` 1.25 times this value.
    #[schemars(range(min = 0, max = 1_000_000))]
    pub cache_write_5m: Option<Spanned<f64>>,
    /// Cost of one input token that the provider wrote to its cache for 1 hour. Default: the value of `input`, in
    /// `[prices.NAME]` twice this value.
    #[schemars(range(min = 0, max = 1_000_000))]
    pub cache_write_1h: Option<Spanned<f64>>,
    /// Cost of one input token of audio. Default: the value of `input`.
    #[schemars(range(min = 0, max = 1_000_000))]
    pub audio_input: Option<Spanned<f64>>,
    /// Cost of one input token of an image. Default: the value of `input`.
    #[schemars(range(min = 0, max = 1_000_000))]
    pub image_input: Option<Spanned<f64>>,
    /// Cost of one output token.
    #[schemars(range(min = 0, max = 1_000_000), extend("default" = 1))]
    pub output: Option<Spanned<f64>>,
    /// Cost of one output token of the reasoning. Default: the value of `output`.
    #[schemars(range(min = 0, max = 1_000_000))]
    pub reasoning: Option<Spanned<f64>>,
    /// Cost of one output token of audio. Default: the value of `output`.
    #[schemars(range(min = 0, max = 1_000_000))]
    pub audio_output: Option<Spanned<f64>>,
    /// Cost of one output token of an image. Default: the value of `output`.
    #[schemars(range(min = 0, max = 1_000_000))]
    pub image_output: Option<Spanned<f64>>,
    /// Cost of each request in addition to its tokens, in millions of the unit of the limit: dollars with
    /// `unit = "usd-micros"`.
    #[schemars(range(min = 0, max = 1_000_000), extend("default" = 0))]
    pub request: Option<Spanned<f64>>,
    /// Share of the cost of the tokens if the provider reports that the request is part of a batch
    /// (`"service_tier": "batch"`), such as 0.5.
    #[schemars(range(min = 0, max = 1), extend("default" = 1))]
    pub batch: Option<Spanned<f64>>,
    /// Multiple of the cost of the tokens if the client requests priority processing (`"service_tier": "priority"`),
    /// such as 1.75, unless the provider reports another tier.
    #[schemars(range(min = 1, max = 100), extend("default" = 1))]
    pub priority: Option<Spanned<f64>>,
    /// Multiple of the cost of the tokens if the client requests fast output (`"speed": "fast"` of Anthropic, latency
    /// `optimized` of Bedrock), unless the provider reports another speed.
    #[schemars(range(min = 1, max = 100), extend("default" = 1))]
    pub fast: Option<Spanned<f64>>,
    /// Other costs of requests with a long input: `{ above = 200000, input = 2.5, output = 15 }`. The other kinds of
    /// input and output cost proportionally more. Default: the costs do not depend on the length of the input.
    pub long_context: Option<Spanned<LongContext>>,
}

/// `long_context = { … }` of a model
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("required" = ["above"]))]
pub struct LongContext {
    /// Number of input tokens above which the costs apply.
    #[schemars(range(min = 1, max = 1_000_000_000))]
    pub above: Option<Spanned<i64>>,
    /// Cost of one input token. Default: the value of `input` of the model.
    #[schemars(range(min = 0, max = 1_000_000))]
    pub input: Option<Spanned<f64>>,
    /// Cost of one output token. Default: the value of `output` of the model.
    #[schemars(range(min = 0, max = 1_000_000))]
    pub output: Option<Spanned<f64>>,
}

/// `usage = { … }` of `cost`
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("required" = ["input", "output"]))]
pub struct UsagePointers {
    /// JSON pointer to the number of input tokens, including cached tokens.
    pub input: Option<Text>,
    /// JSON pointer to the number of cached input tokens. Default: none.
    pub cached_input: Option<Text>,
    /// JSON pointer to the number of output tokens.
    pub output: Option<Text>,
}

/// `"stdout"` or `{ to = "syslog", … }`.
#[derive(Debug, Serialize, JsonSchema)]
#[serde(untagged)]
pub enum AccessLog {
    /// The destination.
    To(String),
    /// The destination with settings.
    Table(Box<AccessLogTable>),
}

/// `{ to = "syslog", … }`
#[derive(Debug, Default, Deserialize, Serialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("required" = ["to"]))]
pub struct AccessLogTable {
    /// Destination: `"stdout"`, `"off"`, `"syslog"`, `"journald"`, or the path of a file to append to.
    pub to: Option<Text>,
    /// syslog and journald: path of the daemon's Unix socket. Default: `"/dev/log"` for syslog,
    /// `"/run/systemd/journal/socket"` for journald.
    pub socket: Option<Text>,
    /// syslog: format of the message header. `"rfc3164"` is the format of syslog(3). On `/dev/log`, journald and the
    /// default parser of rsyslog read this format ([syslog](access-log.md#syslog)).
    #[schemars(extend("enum" = ["rfc5424", "rfc3164"], "default" = "rfc5424"))]
    pub protocol: Option<Text>,
    /// syslog: facility of the messages.
    #[schemars(extend("enum" = ["user", "mail", "daemon", "auth", "syslog", "lpr", "news", "uucp", "cron", "authpriv", "ftp", "local0", "local1", "local2", "local3", "local4", "local5", "local6", "local7"], "default" = "local0"))]
    pub facility: Option<Text>,
    /// syslog and journald: program name in the messages (`APP-NAME`, `SYSLOG_IDENTIFIER`).
    #[schemars(extend("default" = "sluicegate"))]
    pub tag: Option<Text>,
    /// Fraction of successful requests to log, above 0 and up to 1, such as 0.01. Errors and denials are always logged
    /// ([sampling](access-log.md#sampling)).
    #[schemars(extend("exclusiveMinimum" = 0, "maximum" = 1, "default" = 1))]
    pub sample: Option<Spanned<f64>>,
    /// Format of the access log, unless `to` is `"journald"`: `"json"`, `"text"`, `"combined"` (as nginx and Apache), or a
    /// template in the syntax of nginx's `log_format`, such as `'$remote_addr "$request" $status'`
    /// ([templates](access-log.md#templates)). Default: `format` of `[log]`; a short line per request on a terminal.
    pub format: Option<Text>,
    /// Fields of the records in `json` format and in the journal: names of [fields](access-log.md#fields), `"default"`
    /// for the fields that records have by default, `"all"` for all fields.
    #[schemars(extend("default" = ["default"]))]
    pub fields: Option<Spanned<Vec<Text>>>,
}

/// `true` or `{ types = […], … }`.
#[derive(Debug, JsonSchema)]
#[schemars(untagged)]
pub enum Compress {
    /// Whether responses are compressed, with default settings.
    On(bool),
    /// Responses are compressed with these settings.
    Table(CompressTable),
}

/// `compress = { … }` of a route
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
pub struct CompressTable {
    /// Media types of the responses to compress: `"application/json"`, `"text/*"` or `"*/*"`. Default: the usual types
    /// of text ([compression](http.md#compression)).
    pub types: Option<Vec<Text>>,
    /// Minimum `Content-Length` of the responses to compress. Responses without `Content-Length` are compressed.
    #[schemars(schema_with = "schema::size", extend("default" = "1KiB"))]
    pub min_size: Option<Text>,
    /// The codings that the gateway uses. If the client accepts several of them equally, the first one is used.
    #[schemars(schema_with = "schema::codings", extend("default" = ["zstd", "br", "gzip"]))]
    pub algorithms: Option<Spanned<Vec<Text>>>,
}

/// `"readiness"` or `{ status = 200, … }`.
#[derive(Debug, JsonSchema)]
#[schemars(untagged)]
pub enum Respond {
    /// The name of a response that depends on the state of the gateway.
    Named(#[schemars(extend("enum" = ["readiness"]))] String),
    /// A fixed response.
    Fixed(DirectResponse),
}

/// `respond = { … }` of a route
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("required" = ["status"]))]
pub struct DirectResponse {
    /// Status code of the response.
    #[schemars(range(min = 200, max = 599))]
    pub status: Option<Spanned<i64>>,
    /// Body of the response. Default: an empty body.
    pub body: Option<Text>,
    /// Value of the `Content-Type` header.
    #[schemars(extend("default" = "text/plain; charset=utf-8"))]
    pub content_type: Option<Text>,
}

/// `"/healthz"` or `{ path = "/healthz", … }`.
#[derive(Debug, JsonSchema)]
#[schemars(untagged)]
pub enum HealthCheck {
    /// The path, with default settings.
    Path(String),
    /// The path with settings.
    Table(Health),
}

/// `health_check = { … }` of an upstream
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("required" = ["path"]))]
pub struct Health {
    /// Path and query of the health check request, such as `"/healthz"`.
    pub path: Option<Text>,
    /// Response statuses that mean that the server is healthy.
    #[schemars(extend("default" = [200]))]
    pub status: Option<Vec<Spanned<i64>>>,
    /// Time between two checks of the same server.
    #[schemars(schema_with = "schema::duration", extend("default" = "5s"))]
    pub interval: Option<Text>,
    /// Maximum time for a check, including the time to connect.
    #[schemars(schema_with = "schema::duration", extend("default" = "1s"))]
    pub timeout: Option<Text>,
    /// Number of consecutive failed checks after which a server is unhealthy.
    #[schemars(range(min = 1, max = 100), extend("default" = 3))]
    pub unhealthy_threshold: Option<Spanned<i64>>,
    /// Number of consecutive passed checks after which a server is healthy again.
    #[schemars(range(min = 1, max = 100), extend("default" = 2))]
    pub healthy_threshold: Option<Spanned<i64>>,
}

/// `"ip"` or `["ip", "route"]`.
#[derive(Debug, Default, JsonSchema)]
pub struct OneOrMany(#[schemars(schema_with = "schema::identities")] pub Vec<String>);

/// `"x-api-key"` or `["authorization", "x-api-key"]`.
#[derive(Debug, Default, JsonSchema)]
pub struct HeaderNames(#[schemars(schema_with = "schema::one_or_many")] pub Vec<String>);

/// `"all"`, `"none"` or `["checkout", "search"]`.
#[derive(Debug, Default, JsonSchema)]
pub struct RouteNames(#[schemars(schema_with = "schema::one_or_many")] pub Vec<String>);

/// `"keys"` or `["mtls", "tokens"]`: providers that must all verify the request.
#[derive(Debug, Default, JsonSchema)]
pub struct Requirement(#[schemars(schema_with = "schema::one_or_many")] pub Vec<String>);

/// `"write"` or `["admin", ["read", "write"]]`: a list of alternatives. The claim must have all values of at least one
/// alternative.
#[derive(Debug, Default, JsonSchema)]
pub struct ClaimValues(#[schemars(schema_with = "schema::claim_values")] pub Vec<Requirement>);

/// `"sha256:…"` or `{ hash = "sha256:…", name = "ci", … }`.
#[derive(Debug, JsonSchema)]
#[schemars(untagged)]
pub enum ConsumerKey {
    /// The hash of a key that is valid on all routes and never expires.
    Hash(#[schemars(schema_with = "schema::key_hash")] String),
    /// The hash of a key, and the restrictions of the key.
    Table(KeyTable),
}

/// `{ hash = "sha256:…", … }`
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("required" = ["hash"]))]
pub struct KeyTable {
    /// SHA-256 hash of the key.
    #[schemars(extend("secret" = "unless-hash"), schema_with = "schema::key_hash")]
    pub hash: Option<Text>,
    /// Name of the key. `sluicegate key list` and the log show this name.
    #[schemars(extend("secret" = "never"))]
    pub name: Option<Text>,
    /// Time at which the key was created, such as `2026-01-01T00:00:00Z`. For information only.
    #[schemars(extend("secret" = "unless-time"), schema_with = "schema::timestamp")]
    pub created: Option<Spanned<Datetime>>,
    /// Time at which the key expires: a time with a UTC offset, or a date, which means 00:00 UTC on that day. Requests
    /// with an expired key get 401. Default: never.
    #[schemars(extend("secret" = "unless-time"), schema_with = "schema::timestamp")]
    pub expires: Option<Spanned<Datetime>>,
    /// Disable the key: requests with it get 401.
    #[schemars(extend("secret" = "unless-boolean", "default" = false))]
    pub disabled: bool,
    /// Names of the routes on which the key is valid. Requests with the key on other routes get 403. Default: all
    /// routes.
    #[schemars(extend("secret" = "unless-list"))]
    pub routes: Option<Vec<Text>>,
}

/// Convert a time with a UTC offset, or the start of a day in UTC, to µs since the Unix epoch. Return 0 for times
/// before the epoch, and `None` for a time without an offset.
pub fn datetime_us(written: &Datetime) -> Option<u64> {
    let text = match (written.date, written.time, written.offset) {
        (Some(_), Some(_), Some(_)) => written.to_string(),
        (Some(date), None, None) => format!("{date}T00:00:00Z"),
        _ => return None,
    };
    let instant: Timestamp = text.parse().ok()?;
    Some(instant.as_microsecond().max(0) as u64)
}

/// `"api"` or `{ api = 9, canary = 1 }`.
#[derive(Debug, JsonSchema)]
#[schemars(untagged)]
pub enum UpstreamWeights {
    /// All requests go to one upstream.
    Single(String),
    /// Requests are split between upstreams by weight.
    Weighted(#[schemars(schema_with = "schema::weights")] BTreeMap<String, Spanned<i64>>),
}

/// `"http://…"` or `{ url = "http://…", weight = … }`.
#[derive(Debug, Default, JsonSchema)]
#[schemars(with = "ServerForms")]
pub struct UpstreamServer {
    /// Scheme, host and port of the server. Empty if the table has no `url`.
    pub url: String,
    /// Weight relative to the upstream's other servers.
    pub weight: Option<Spanned<i64>>,
}

#[derive(JsonSchema)]
#[schemars(untagged)]
#[allow(dead_code)] // used for the JSON Schema only
enum ServerForms {
    Url(String),
    Table(ServerTable),
}

/// `"other"` or `{ upstream = "other", … }`.
#[derive(Debug, JsonSchema)]
#[schemars(untagged)]
pub enum Fallback {
    /// Name of the upstream.
    Name(String),
    /// An upstream with settings for the requests that it gets.
    Table(Box<FallbackTable>),
}

/// A status code, a class such as `"5xx"`, or `"timeout"`.
#[derive(Debug, JsonSchema)]
#[schemars(transparent)]
pub struct StatusRule(pub String);

/// `request_headers = { … }` of a route
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("secret" = "always"))]
pub struct HeaderRules {
    /// Headers to set. The value replaces all occurrences of the header. It may contain variables: `{client_ip}`,
    /// `{request_id}`, `{consumer}`, `{route}`, `{host}`, `{method}`, `{path}`, `{scheme}`. If a variable is empty, the
    /// header is removed. `{{` and `}}` are literal braces.
    pub set: BTreeMap<String, Text>,
    /// Headers to remove. If a header occurs several times, all occurrences are removed.
    #[schemars(extend("secret" = "never"))]
    pub remove: Vec<Text>,
}

/// `{ upstream = "other", … }` in `fallback` of a route
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("required" = ["upstream"]))]
pub struct FallbackTable {
    /// Name of the upstream.
    pub upstream: Option<Text>,
    /// `Host` that its servers receive: `"client"`, `"server"` or a name. Default: `host` of this upstream.
    pub upstream_host: Option<Text>,
    /// Path of the request to this upstream. Default: the same path as for `upstream` of the route.
    pub rewrite: Option<Text>,
    /// Changes to the headers of the request to this upstream, which replace `request_headers` of the route. Default:
    /// `request_headers` of the route.
    pub request_headers: Option<Spanned<HeaderRules>>,
    /// Names that models have at this upstream: `{ gpt-5-mini = "my-deployment" }`. They replace the names that
    /// `upstream` of the route gets. Requires a limit with `cost.llm` ([aliases](limits.md#aliases-of-models)).
    pub model_aliases: BTreeMap<String, Text>,
}

/// A value with two forms: a short form, and a list or table.
struct Either<T, L> {
    /// The two forms, for the error about a value of another type.
    expected: &'static str,
    short: fn(Short<'_>) -> Option<T>,
    form: LongForm,
    long: fn(L) -> T,
}

/// The value in its short form.
enum Short<'a> {
    Text(&'a str),
    Integer(i64),
    Boolean(bool),
}

#[derive(PartialEq, Eq)]
enum LongForm {
    List,
    Table,
}

impl Short<'_> {
    fn text(&self) -> Option<String> {
        match self {
            Short::Text(text) => Some((*text).to_owned()),
            Short::Integer(_) | Short::Boolean(_) => None,
        }
    }

    fn integer(&self) -> Option<i64> {
        match self {
            Short::Text(_) | Short::Boolean(_) => None,
            Short::Integer(number) => Some(*number),
        }
    }

    fn boolean(&self) -> Option<bool> {
        match self {
            Short::Text(_) | Short::Integer(_) => None,
            Short::Boolean(value) => Some(*value),
        }
    }
}

impl<'de, T, L: Deserialize<'de>> Visitor<'de> for Either<T, L> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.expected)
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<T, E> {
        (self.short)(Short::Text(text)).ok_or_else(|| E::invalid_type(Unexpected::Str(text), &self))
    }

    fn visit_i64<E: de::Error>(self, number: i64) -> Result<T, E> {
        (self.short)(Short::Integer(number)).ok_or_else(|| E::invalid_type(Unexpected::Signed(number), &self))
    }

    fn visit_bool<E: de::Error>(self, value: bool) -> Result<T, E> {
        (self.short)(Short::Boolean(value)).ok_or_else(|| E::invalid_type(Unexpected::Bool(value), &self))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, items: A) -> Result<T, A::Error> {
        match self.form {
            LongForm::List => L::deserialize(value::SeqAccessDeserializer::new(items)).map(self.long),
            LongForm::Table => Err(de::Error::invalid_type(Unexpected::Seq, &self)),
        }
    }

    fn visit_map<A: MapAccess<'de>>(self, table: A) -> Result<T, A::Error> {
        match self.form {
            LongForm::Table => L::deserialize(value::MapAccessDeserializer::new(table)).map(self.long),
            LongForm::List => Err(de::Error::invalid_type(Unexpected::Map, &self)),
        }
    }
}

impl<'de> Deserialize<'de> for StatusRule {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct NumberOrText;
        impl Visitor<'_> for NumberOrText {
            type Value = StatusRule;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a status code or a string")
            }
            fn visit_i64<E>(self, status: i64) -> Result<StatusRule, E> {
                Ok(StatusRule(status.to_string()))
            }
            fn visit_str<E>(self, text: &str) -> Result<StatusRule, E> {
                Ok(StatusRule(text.to_owned()))
            }
        }
        deserializer.deserialize_any(NumberOrText)
    }
}

/// Implement `Deserialize` for a type with two forms.
macro_rules! either {
    ($type:ident, $expected:literal, $short:expr, $form:ident, $long:expr) => {
        impl<'de> Deserialize<'de> for $type {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                deserializer.deserialize_any(Either {
                    expected: $expected,
                    short: $short,
                    form: LongForm::$form,
                    long: $long,
                })
            }
        }
    };
}

either!(AccessLog, "a destination or a table with `to`", |short| short.text().map(AccessLog::To), Table, |table| {
    AccessLog::Table(Box::new(table))
});
either!(Compress, "a boolean or a table", |short| short.boolean().map(Compress::On), Table, Compress::Table);
either!(
    Respond,
    "\"readiness\" or a table with `status`",
    |short| short.text().map(Respond::Named),
    Table,
    Respond::Fixed
);
either!(
    HealthCheck,
    "a path or a table with `path`",
    |short| short.text().map(HealthCheck::Path),
    Table,
    HealthCheck::Table
);
either!(
    Fallback,
    "the name of an upstream or a table with `upstream`",
    |short| short.text().map(Fallback::Name),
    Table,
    |table| Fallback::Table(Box::new(table))
);
either!(OneOrMany, "a string or a list of strings", |short| Some(OneOrMany(vec![short.text()?])), List, OneOrMany);
either!(
    RouteNames,
    "\"all\", \"none\" or a list of routes",
    |short| Some(RouteNames(vec![short.text()?])),
    List,
    RouteNames
);
either!(
    HeaderNames,
    "a string or a list of strings",
    |short| Some(HeaderNames(vec![short.text()?])),
    List,
    HeaderNames
);
either!(
    Requirement,
    "a string or a list of strings",
    |short| Some(Requirement(vec![short.text()?])),
    List,
    Requirement
);
either!(
    ClaimValues,
    "a string or a list of strings and lists",
    |short| Some(ClaimValues(vec![Requirement(vec![short.text()?])])),
    List,
    ClaimValues
);
either!(
    ConsumerKey,
    "the hash of a key or a table with `hash`",
    |short| short.text().map(ConsumerKey::Hash),
    Table,
    ConsumerKey::Table
);
either!(
    UpstreamWeights,
    "the name of an upstream or a table of names and weights",
    |short| short.text().map(UpstreamWeights::Single),
    Table,
    UpstreamWeights::Weighted
);
either!(
    UpstreamServer,
    "a URL or a table with `url`",
    |short| Some(UpstreamServer { url: short.text()?, weight: None }),
    Table,
    |ServerTable { url, weight }| UpstreamServer { url: url.unwrap_or_default(), weight }
);
either!(
    LimitCost,
    "an integer or a table with `request_header`, `response_header`, `llm` or `tools`",
    |short| short.integer().map(LimitCost::Fixed),
    Table,
    |table| LimitCost::Table(Box::new(table))
);
either!(
    LimitNotify,
    "the name of a destination or a table with `to`",
    |short| short.text().map(LimitNotify::To),
    Table,
    LimitNotify::Table
);

/// The name of a destination, or a table with the name and thresholds.
#[derive(Debug, JsonSchema)]
#[schemars(untagged)]
pub enum LimitNotify {
    /// Name of the destination.
    To(String),
    /// Name of the destination, and the thresholds.
    Table(LimitNotifyTable),
}

/// `{ to = "…", at = […] }`
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("required" = ["to"]))]
pub struct LimitNotifyTable {
    /// Name of a `[notify.NAME]` destination.
    pub to: Option<Text>,
    /// Thresholds in percent of the limit's capacity (its `burst`, otherwise the count of its quota), from 1 to 100.
    #[schemars(schema_with = "schema::percentages", extend("default" = [80, 100]))]
    pub at: Option<Vec<Spanned<i64>>>,
}

/// The table form of a server.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("required" = ["url"]))]
pub(super) struct ServerTable {
    /// Scheme, host and port of the server.
    url: Option<String>,
    /// Weight relative to the upstream's other servers. 0 = drained: the server gets no new requests.
    #[schemars(range(min = 0, max = 1000), extend("default" = 1))]
    weight: Option<Spanned<i64>>,
}
