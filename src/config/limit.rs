//! `[limit.NAME]` as written.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::Deserialize;

use super::{LimitCost, OneOrMany, Spanned, Text, schema};

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
