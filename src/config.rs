//! The configuration as written: types for the file, nothing interpreted yet.
//!
//! Every value keeps its place in the file, so that whoever interprets it can point there.

pub mod error;
pub mod file;
mod forms;
mod keys;
pub mod shown;
mod upstream;

use std::collections::BTreeMap;

pub use forms::{CostTable, LimitCost, OneOrMany, Shares, UpstreamServer};
use serde::{Deserialize, Serialize};
use toml::Spanned;
pub use upstream::{Eject, Health, Upstream, UpstreamTls};

/// A string with its place.
pub type Text = Spanned<String>;

/// `gateway.toml`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
#[allow(missing_docs)]
pub struct Config {
    pub server: Server,
    pub listener: Vec<Spanned<Listener>>,
    pub admin: Option<Spanned<Admin>>,
    pub log: Log,
    pub store: Store,
    pub client_ip: ClientIp,
    pub api_key: ApiKey,
    pub jwt: Jwt,
    pub limit: BTreeMap<String, Spanned<Limit>>,
    pub upstream: BTreeMap<String, Spanned<Upstream>>,
    pub route: Vec<Spanned<Route>>,
}

/// `[server]`
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
#[allow(missing_docs)]
pub struct Server {
    pub workers: Option<Spanned<i64>>,
    pub runtime: Option<Text>,
    pub drain_timeout: Option<Text>,
    pub max_connections: Option<Spanned<i64>>,
    pub max_connections_per_ip: Option<Spanned<i64>>,
    pub header_timeout: Option<Text>,
    pub idle_timeout: Option<Text>,
    pub body_idle_timeout: Option<Text>,
    pub max_header_size: Option<Text>,
    pub max_headers: Option<Spanned<i64>>,
    pub max_uri: Option<Text>,
    pub http2_max_streams: Option<Spanned<i64>>,
}

/// `[[listener]]`
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
#[allow(missing_docs)]
pub struct Listener {
    pub address: Option<Text>,
    pub proxy_protocol: Option<Spanned<bool>>,
    pub tls: Option<Spanned<ListenerTls>>,
}

/// `tls` of a listener
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
#[allow(missing_docs)]
pub struct ListenerTls {
    pub certificates: Vec<Spanned<Certificate>>,
    pub client_ca: Option<Text>,
    pub client_auth: Option<Text>,
}

/// `{ cert = "…", key = "…" }`
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
#[allow(missing_docs)]
pub struct Certificate {
    pub cert: Option<Text>,
    pub key: Option<Text>,
}

/// `[admin]`
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
#[allow(missing_docs)]
pub struct Admin {
    pub address: Option<Text>,
    pub token: Option<Text>,
}

/// `[log]`
#[derive(Debug, Default, Deserialize, Serialize)]
#[serde(default)]
#[allow(missing_docs)]
pub struct Log {
    pub format: Option<Text>,
    pub level: Option<Text>,
    pub access: Option<Text>,
}

/// `[store]`
#[derive(Debug, Default, Deserialize, Serialize)]
#[serde(default)]
#[allow(missing_docs)]
pub struct Store {
    pub url: Option<Text>,
    pub tls: Option<Spanned<StoreTls>>,
    pub timeout: Option<Text>,
    pub connections: Option<Spanned<i64>>,
    pub prefix: Option<Text>,
    pub secret: Option<Text>,
    pub instances: Option<Spanned<i64>>,
    pub denial_cache: Option<Spanned<i64>>,
    pub memory_identities: Option<Spanned<i64>>,
}

/// `tls` of the store
#[derive(Debug, Default, Deserialize, Serialize)]
#[serde(default)]
#[allow(missing_docs)]
pub struct StoreTls {
    pub ca: Option<Text>,
    pub cert: Option<Text>,
    pub key: Option<Text>,
}

/// `[client_ip]`
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
#[allow(missing_docs)]
pub struct ClientIp {
    pub trusted_proxies: Vec<Text>,
    pub header: Option<Text>,
    pub ipv4_prefix: Option<Spanned<i64>>,
    pub ipv6_prefix: Option<Spanned<i64>>,
}

/// `[api_key]`
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
#[allow(missing_docs)]
pub struct ApiKey {
    pub header: Option<Text>,
    pub consumers: Option<Text>,
    pub on_missing: Option<Text>,
    pub on_unknown: Option<Text>,
}

/// `[jwt]`
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
#[allow(missing_docs)]
pub struct Jwt {
    pub jwks_file: Option<Text>,
    pub issuer: Option<Text>,
    pub audience: Option<Text>,
}

/// `[limit.NAME]`
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
#[allow(missing_docs)]
pub struct Limit {
    pub by: Option<Spanned<OneOrMany>>,
    pub algorithm: Option<Text>,
    pub quota: Option<Text>,
    pub burst: Option<Spanned<i64>>,
    pub start: Option<Text>,
    pub buckets: Option<Spanned<i64>>,
    pub time_zone: Option<Text>,
    pub on_missing: Option<Text>,
    pub on_store_error: Option<Text>,
    pub shadow: bool,
    pub methods: Option<Vec<Text>>,
    pub exempt: Vec<Text>,
    pub tiers: BTreeMap<String, Spanned<Size>>,
    pub cost: Option<Spanned<LimitCost>>,
    pub refund_on: Vec<Text>,
    pub max_wait: Option<Text>,
    pub max_waiting: Option<Spanned<i64>>,
    pub lease: Option<Spanned<i64>>,
}

/// `{ quota = "…", burst = … }`: another size of a limit.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
#[allow(missing_docs)]
pub struct Size {
    pub quota: Option<Text>,
    pub burst: Option<Spanned<i64>>,
}

/// `[[route]]`
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
#[allow(missing_docs)]
pub struct Route {
    pub name: Option<Text>,
    pub host: Option<Text>,
    pub path: Option<Text>,
    pub methods: Option<Vec<Text>>,
    pub headers: BTreeMap<String, Text>,
    pub upstream: Option<Spanned<Shares>>,
    pub respond: Option<Spanned<Respond>>,
    pub redirect: Option<Spanned<Redirect>>,
    pub limits: Vec<Text>,
    pub cost: Option<Spanned<i64>>,
    pub strip_prefix: Option<Text>,
    pub rewrite: Option<Text>,
    pub timeout: Option<Text>,
    pub max_body: Option<Text>,
    pub request_headers: Option<Spanned<HeaderRules>>,
    pub response_headers: Option<Spanned<HeaderRules>>,
    pub websocket: Option<Spanned<bool>>,
    pub ratelimit_headers: Option<Vec<Text>>,
    pub expose_headers: bool,
}

/// `request_headers`, `response_headers` of a route
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
#[allow(missing_docs)]
pub struct HeaderRules {
    pub set: BTreeMap<String, Text>,
    pub remove: Vec<Text>,
}

/// `respond = { … }` of a route
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
#[allow(missing_docs)]
pub struct Respond {
    pub status: Option<Spanned<i64>>,
    pub body: Option<Text>,
    pub content_type: Option<Text>,
}

/// `redirect = { … }` of a route
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
#[allow(missing_docs)]
pub struct Redirect {
    pub to: Option<Text>,
    pub status: Option<Spanned<i64>>,
}

/// `consumers.toml`
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
#[allow(missing_docs)]
pub struct Consumers {
    pub consumer: Vec<Spanned<Consumer>>,
}

/// `[[consumer]]`
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
#[allow(missing_docs)]
pub struct Consumer {
    pub name: Option<Text>,
    pub tier: Option<Text>,
    pub keys: Vec<Text>,
    pub limit: BTreeMap<String, Spanned<Size>>,
}
