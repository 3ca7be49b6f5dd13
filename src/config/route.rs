//! `[[route]]` as written.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::Deserialize;

use super::{Spanned, Text, UpstreamWeights, schema};

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
    pub direct_response: Option<Spanned<DirectResponse>>,
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
