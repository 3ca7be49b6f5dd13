//! `[upstream.NAME]` as written.

use schemars::JsonSchema;
use serde::Deserialize;

use super::{Spanned, Text, UpstreamServer, schema};

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
