//! The configuration as written: types for the file, nothing interpreted yet.
//!
//! Every value keeps its place in the file, so that whoever interprets it can point there. What stands above a key here is what its
//! users read: in the JSON Schema, and in the tables of `docs/configuration.md` (`make reference`).

pub mod error;
pub mod file;
pub mod redact;
pub mod schema;
mod secrets;
pub mod shorthand;
pub mod tables;

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::config::error::Spanned;
use crate::config::tables::{Limit, LimitVariant, Route, Upstream};

/// A string with its place.
pub type Text = Spanned<String>;

/// `gateway.toml`.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("required" = ["listener", "route"]))]
pub struct Config {
    /// Threads, connections, and the bounds of what a client may send.
    pub server: Server,
    /// Where to listen.
    pub listener: Vec<Spanned<Listener>>,
    /// Health and metrics for the operator; without it there is no such listener.
    pub admin: Option<Spanned<Admin>>,
    /// The log of the process and the access log.
    pub log: Log,
    /// Where the counters live.
    pub store: Store,
    /// Which proxies are believed about addresses, and how much of an address counts.
    pub client_ip: ClientIp,
    /// Where API keys stand, and who has which.
    pub api_key: ApiKey,
    /// Whose bearer tokens are believed.
    pub jwt: Jwt,
    /// Limits by name: by what, how much. One bucket for each identity, shared by all routes that name the limit.
    pub limit: BTreeMap<String, Spanned<Limit>>,
    /// Upstreams by name: the servers, and how to speak with them.
    pub upstream: BTreeMap<String, Spanned<Upstream>>,
    /// What a request must look like, where it goes, which limits it meets. The best match wins, whatever the order.
    pub route: Vec<Spanned<Route>>,
}

/// `[server]`
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Server {
    /// Threads that serve; 0 = one per core.
    #[schemars(range(min = 0, max = 1024), extend("default" = 0))]
    pub workers: Option<Spanned<i64>>,
    /// Each worker serves its own connections; `"work-stealing"`: all workers share one runtime that balances tasks.
    #[schemars(extend("enum" = ["per-core", "work-stealing"], "default" = "per-core"))]
    pub threading: Option<Text>,
    /// After SIGTERM or ctrl-c: finish what runs, then exit 0; a second signal exits at once.
    #[schemars(schema_with = "schema::duration", extend("default" = "30s"))]
    pub drain_timeout: Option<Text>,
    /// Connections of clients at the same time, on all workers; more wait in the kernel's queue. By default from the
    /// limit of open files.
    #[schemars(range(min = 1, max = 1000000))]
    pub max_connections: Option<Spanned<i64>>,
    /// Of them for each client network (the prefixes of `[client_ip]`); more are closed at once. By default half of
    /// `max_connections`, loopback addresses exempt. 0 = no cap.
    #[schemars(range(min = 0, max = 1000000))]
    pub max_connections_per_ip: Option<Spanned<i64>>,
    /// From accept to the first complete head, TLS handshake included; from the first byte of each further head to its end.
    #[schemars(schema_with = "schema::duration", extend("default" = "10s"))]
    pub header_timeout: Option<Text>,
    /// From the end of a request to the first byte of the next; silence of a tunnel (`websocket`).
    #[schemars(schema_with = "schema::duration", extend("default" = "75s"))]
    pub idle_timeout: Option<Text>,
    /// How long a body may stand still because of whoever is to send or to take it.
    #[schemars(schema_with = "schema::duration", extend("default" = "30s"))]
    pub body_idle_timeout: Option<Text>,
    /// Minimum bytes per second of a request body, after a grace of 5s; below it 408. Only the time for which the gateway waits for
    /// the client counts. Not for gRPC. 0B = no minimum.
    #[schemars(schema_with = "schema::size", extend("default" = "240B"))]
    pub min_body_rate: Option<Text>,
    /// Maximum time for a request body, from the first wait for the client to its end; beyond it 408. Not for gRPC. Default: no
    /// maximum.
    #[schemars(schema_with = "schema::duration")]
    pub body_timeout: Option<Text>,
    /// Request bodies with a `Content-Length` up to this size are read after the limits and before the request takes a connection to
    /// an upstream. Not for gRPC. 0B = no body is.
    #[schemars(schema_with = "schema::size", extend("default" = "64KiB"))]
    pub request_buffer: Option<Text>,
    /// Maximum bytes of bodies that the process buffers for HTTP/2 clients that do not read, and of request bodies
    /// (`request_buffer`). Beyond it each HTTP/2 response has one piece in memory, and request bodies are streamed.
    #[schemars(schema_with = "schema::size", extend("default" = "64MiB"))]
    pub max_buffered: Option<Text>,
    /// Of a head; beyond it 431. At least 8KiB.
    #[schemars(schema_with = "schema::size", extend("default" = "32KiB"))]
    pub max_header_size: Option<Text>,
    /// Lines of a head; beyond it 431.
    #[schemars(range(min = 1, max = 10000), extend("default" = 100))]
    pub max_headers: Option<Spanned<i64>>,
    /// Of a target; beyond it 414.
    #[schemars(schema_with = "schema::size", extend("default" = "8KiB"))]
    pub max_uri: Option<Text>,
    /// Concurrent streams of an HTTP/2 connection.
    #[schemars(range(min = 1, max = 100000), extend("default" = 100))]
    pub http2_max_streams: Option<Spanned<i64>>,
}

/// `[[listener]]`
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("required" = ["address"]))]
pub struct Listener {
    /// `"127.0.0.1:8080"`, `"[::]:80"`. HTTP/1.x, and HTTP/2 by prior knowledge, on the same port. A second process
    /// on the same address is refused at its start.
    pub address: Option<Text>,
    /// Every connection begins with a PROXY header, version 1 or 2, from one of `client_ip.trusted_proxies`.
    #[schemars(extend("default" = false))]
    pub proxy_protocol: Option<Spanned<bool>>,
    /// TLS 1.2 and 1.3, HTTP/2 and HTTP/1.1 by ALPN; without it clear text.
    pub tls: Option<Spanned<ListenerTls>>,
}

/// `tls` of a listener
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("required" = ["certificates"]))]
pub struct ListenerTls {
    /// `[{ cert = "certs/dev.pem", key = "certs/dev.key" }]`: the first one that is for the name the client asks for
    /// (SNI), else the first of the list.
    pub certificates: Vec<Spanned<Certificate>>,
    /// A PEM file of authorities: clients are asked for a certificate that one of them has signed.
    pub client_ca: Option<Text>,
    /// A client may have no certificate; `"required"`: without one there is no connection.
    #[schemars(extend("enum" = ["optional", "required"], "default" = "optional"))]
    pub client_auth: Option<Text>,
}

/// `{ cert = "…", key = "…" }`
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("required" = ["cert", "key"]))]
pub struct Certificate {
    /// A PEM file: the certificate, then those that lead to its authority.
    pub cert: Option<Text>,
    /// A PEM file: its key, without a password.
    pub key: Option<Text>,
}

/// `[admin]`
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("required" = ["address"]))]
pub struct Admin {
    /// Such as `"127.0.0.1:9180"`; a port that nothing else listens on.
    pub address: Option<Text>,
    /// Asked for as `Authorization: Bearer …`; without it nothing can be changed, and `address` must be a loopback one.
    pub token: Option<Text>,
}

/// `[log]`
#[derive(Debug, Default, Deserialize, Serialize, JsonSchema)]
#[serde(default)]
pub struct Log {
    /// Of both logs; by default `"json"` for an access log in a file; otherwise `"text"` if standard error is a terminal, else
    /// `"json"`.
    #[schemars(extend("enum" = ["text", "json"]))]
    pub format: Option<Text>,
    /// The process' own log goes to standard error.
    #[schemars(extend("enum" = ["error", "warn", "info", "debug", "trace"], "default" = "info"))]
    pub level: Option<Text>,
    /// `"off"`, or a file that is appended to, and may be renamed at any time ([what it says](operating.md#the-access-log)).
    #[schemars(extend("default" = "stdout"))]
    pub access: Option<Text>,
    /// Where an OpenTelemetry collector takes spans, OTLP over HTTP: `"http://127.0.0.1:4318"`; by default nobody does
    /// ([traces](operating.md#traces)).
    pub trace_endpoint: Option<Text>,
}

/// `[store]`
#[derive(Debug, Default, Deserialize, Serialize, JsonSchema)]
#[serde(default)]
pub struct Store {
    /// Or `redis://user:password@host:6379/0`, `rediss://…` (TLS), `redis+unix:///run/redis.sock?db=0`,
    /// `redis+sentinel://host1,host2/mymaster`, `redis+cluster://host1,host2`: see [redis.md](redis.md).
    #[schemars(extend("default" = "memory:"))]
    pub url: Option<Text>,
    /// For `rediss://`: `{ ca = "ca.pem", cert = "client.pem", key = "client.key" }`, each optional, `cert` and `key`
    /// together; without `ca` the roots of the system.
    pub tls: Option<Spanned<StoreTls>>,
    /// Maximum time for the rate limit check of a request, queuing included; what a response costs or gives back is a second call
    /// with the same maximum. A check that is late while the store answers others is rejected with 503.
    #[schemars(schema_with = "schema::duration", extend("default" = "50ms"))]
    pub timeout: Option<Text>,
    /// Maximum time to connect to the store: DNS, TCP, TLS, login, loading the scripts. No request waits for it longer than `timeout`.
    #[schemars(schema_with = "schema::duration", extend("default" = "1s"))]
    pub connect_timeout: Option<Text>,
    /// Per worker; calls are pipelined.
    #[schemars(range(min = 1, max = 8), extend("default" = 1))]
    pub connections: Option<Spanned<i64>>,
    /// First part of every key.
    #[schemars(extend("default" = "rl"))]
    pub prefix: Option<Text>,
    /// Keys the hash of identities; the same on all gateways. Without it a fixed published key: addresses can then be
    /// guessed from keys.
    pub secret: Option<Text>,
    /// Gateways that share the store: 1/n is the local share of a limit when the store is down.
    #[schemars(range(min = 1, max = 10000), extend("default" = 1))]
    pub gateway_count: Option<Spanned<i64>>,
    /// What Redis has denied is denied without asking again until it may have changed, for so many limits and
    /// identities; 0 = always ask.
    #[schemars(range(min = 0, max = 4_294_967_295_i64), extend("default" = 100000))]
    pub denial_cache: Option<Spanned<i64>>,
    /// Maximum number of states kept in this process, of all limits together. Each limit is guaranteed an equal part
    /// ([what happens when it is full](limits.md#what-you-can-rely-on)). A state takes about 150 bytes; sliding-buckets 9
    /// more for each part, sliding-log for each unit.
    #[schemars(range(min = 1, max = 1_099_511_627_775_i64), extend("default" = 1000000))]
    pub max_memory_states: Option<Spanned<i64>>,
}

/// `tls` of the store
#[derive(Debug, Default, Deserialize, Serialize, JsonSchema)]
#[serde(default)]
pub struct StoreTls {
    /// The authorities that sign certificates of the store, a PEM file; by default those of the system.
    pub ca: Option<Text>,
    /// Who we are, a PEM file; with `key`.
    pub cert: Option<Text>,
    /// Its key, a PEM file.
    pub key: Option<Text>,
}

/// `[client_ip]`
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
pub struct ClientIp {
    /// Addresses and networks whose word counts, such as `["10.0.0.0/8"]`; by default none.
    pub trusted_proxies: Option<Vec<Text>>,
    /// Or `"forwarded"` (RFC 7239), or a field with one address such as `"cf-connecting-ip"`.
    #[schemars(extend("default" = "x-forwarded-for"))]
    pub header: Option<Text>,
    /// Bits of an IPv4 address that make an identity.
    #[schemars(range(min = 0, max = 32), extend("default" = 32))]
    pub ipv4_prefix: Option<Spanned<i64>>,
    /// Bits of an IPv6 address that make an identity.
    #[schemars(range(min = 0, max = 128), extend("default" = 64))]
    pub ipv6_prefix: Option<Spanned<i64>>,
}

/// `[api_key]`
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
pub struct ApiKey {
    /// The one place of the key; two of them are a 400.
    #[schemars(extend("default" = "x-api-key"))]
    pub header: Option<Text>,
    /// The file of consumers, `"consumers.toml"`; read again when it changes. `sluicegate key` writes it.
    pub consumers: Option<Text>,
    /// 401; `"anonymous"`: the client's network is the identity.
    #[schemars(extend("enum" = ["reject", "anonymous"], "default" = "reject"))]
    pub on_missing: Option<Text>,
    /// 401; `"anonymous"`; `"accept"`: any string is an identity of its own.
    #[schemars(extend("enum" = ["reject", "anonymous", "accept"], "default" = "reject"))]
    pub on_unknown: Option<Text>,
}

/// `[jwt]`
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Jwt {
    /// The keys of the issuer, a JWK Set (RFC 7517): `"certs/jwks.json"`.
    pub jwks_file: Option<Text>,
    /// What `iss` must be; by default any.
    pub issuer: Option<Text>,
    /// What must stand in `aud`. Without it a token that has an `aud` is refused: it is meant for somebody else.
    pub audience: Option<Text>,
}

/// `consumers.toml`
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Consumers {
    /// Who has which keys. One who is left out is unknown.
    pub consumer: Vec<Spanned<Consumer>>,
}

/// `[[consumer]]`
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("required" = ["name"]))]
pub struct Consumer {
    /// Unique; the identity of all its keys.
    pub name: Option<Text>,
    /// The size that limits have for this tier (`tiers` of a limit).
    pub tier: Option<Text>,
    /// Hashes of its keys: `["sha256:…"]`. `sluicegate key new` makes one; `printf %s KEY | sha256sum` hashes
    /// another.
    #[schemars(schema_with = "schema::key_hashes")]
    pub keys: Option<Vec<Text>>,
    /// Sizes of its own, before those of its tier: `limit.NAME = { quota = "900/min", burst = 50 }`.
    pub limit: BTreeMap<String, Spanned<LimitVariant>>,
}
