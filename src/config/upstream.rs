//! `[upstream.NAME]` as written.

use serde::Deserialize;
use toml::Spanned;

use super::{Text, UpstreamServer};

/// `[upstream.NAME]`
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
#[allow(missing_docs)]
pub struct Upstream {
    pub servers: Vec<Spanned<UpstreamServer>>,
    pub protocol: Option<Text>,
    pub connect_timeout: Option<Text>,
    pub response_timeout: Option<Text>,
    pub pool_idle_timeout: Option<Text>,
    pub balance: Option<Text>,
    pub max_requests: Option<Spanned<i64>>,
    pub max_queue: Option<Spanned<i64>>,
    pub health: Option<Spanned<Health>>,
    pub eject: Option<Spanned<Eject>>,
    pub slow_start: Option<Text>,
    pub retries: Option<Spanned<i64>>,
    pub tls: Option<Spanned<UpstreamTls>>,
}

/// `tls` of an upstream
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
#[allow(missing_docs)]
pub struct UpstreamTls {
    pub ca: Option<Text>,
    pub server_name: Option<Text>,
    pub cert: Option<Text>,
    pub key: Option<Text>,
}

/// `health = { … }` of an upstream
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
#[allow(missing_docs)]
pub struct Health {
    pub path: Option<Text>,
    pub status: Option<Vec<Spanned<i64>>>,
    pub interval: Option<Text>,
    pub timeout: Option<Text>,
    pub unhealthy_after: Option<Spanned<i64>>,
    pub healthy_after: Option<Spanned<i64>>,
}

/// `eject = { … }` of an upstream
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
#[allow(missing_docs)]
pub struct Eject {
    pub errors: Option<Spanned<i64>>,
    #[serde(rename = "for")]
    pub time: Option<Text>,
}
