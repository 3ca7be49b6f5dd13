//! The types of the configuration files, as they are written and before validation.
//!
//! Every value keeps its span in the file, so that errors of later steps can point to it. The doc comments of the keys
//! are user documentation: they appear in the JSON Schema and in the tables of `docs/reference/configuration.md` (`make
//! reference`).

pub mod diff;
pub mod error;
pub mod file;
pub mod include;
pub mod schema;
pub mod secrets;
pub mod shorthand;
pub mod tables;

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::config::error::Spanned;
use crate::config::shorthand::{AccessLog, ClaimValues, ConsumerKey, HeaderNames};
use crate::config::tables::{Limit, LimitVariant, Notify, Route, Upstream};

/// A string with its span.
pub type Text = Spanned<String>;

/// `gateway.toml`.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("required" = ["listener", "route"]))]
pub struct Config {
    /// Files whose `[[route]]`, `[limit.NAME]`, `[upstream.NAME]` and `[auth.NAME]` are added to this configuration:
    /// `["routes/*.toml"]`.
    pub include: Vec<Text>,
    /// Workers, connection limits, and limits on client requests.
    pub server: Server,
    /// Listening sockets.
    pub listener: Vec<Spanned<Listener>>,
    /// Certificates by ACME (RFC 8555), for listeners with `tls.acme`. Default: certificates are files.
    pub acme: Option<Spanned<Acme>>,
    /// Admin listener for health, metrics and the admin API. Default: no admin listener.
    pub admin: Option<Spanned<Admin>>,
    /// The process log and the access log.
    pub log: Log,
    /// Store for rate limit state.
    pub store: Store,
    /// Trusted proxies, and the prefix lengths of client networks.
    pub client_ip: ClientIp,
    /// Providers of authentication by name: API keys, bearer tokens, client certificates, passwords, authentication
    /// servers. Routes name providers in `require` and `identify`.
    pub auth: BTreeMap<String, Spanned<Auth>>,
    /// Source of the tier of a request. The tier selects the quota of each limit with `tiers`.
    pub tiers: Tiers,
    /// Destinations of quota events by name: webhooks and Redis streams. Limits name them in `notify`.
    pub notify: BTreeMap<String, Spanned<Notify>>,
    /// Limits by name: identity, quota and algorithm. Each identity has one bucket, which all routes with the limit
    /// share.
    pub limit: BTreeMap<String, Spanned<Limit>>,
    /// Upstreams by name: servers, protocol, load balancing and timeouts.
    pub upstream: BTreeMap<String, Spanned<Upstream>>,
    /// Routes: conditions on the request, the upstream, and the limits. The most specific route wins; the order in the
    /// file does not matter.
    pub route: Vec<Spanned<Route>>,
}

/// `[server]`
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Server {
    /// Number of worker threads. 0 = one per CPU core.
    #[schemars(range(min = 0, max = 1024), extend("default" = 0))]
    pub workers: Option<Spanned<i64>>,
    /// `"per-core"`: each worker serves its own connections. `"work-stealing"`: all workers share one runtime that
    /// balances tasks.
    #[schemars(extend("enum" = ["per-core", "work-stealing"], "default" = "per-core"))]
    pub threading: Option<Text>,
    /// Time after SIGTERM or Ctrl-C during which the gateway accepts connections and serves requests as before, while
    /// `/readyz` returns 503, so that load balancers stop choosing the gateway. Then `drain_timeout` begins. A second
    /// signal ends the grace period. A hot restart has no grace period. `"0s"` = drain at once.
    #[schemars(schema_with = "schema::duration", extend("default" = "0s"))]
    pub accept_grace: Option<Text>,
    /// Maximum time to complete requests in flight at shutdown, after `accept_grace`. When it expires, the gateway
    /// exits with status 0. A further signal ends the process at once.
    #[schemars(schema_with = "schema::duration", extend("default" = "30s"))]
    pub drain_timeout: Option<Text>,
    /// Maximum number of client connections, for all workers together. Further connections wait in the kernel's listen
    /// queue. Default: derived from the limit on open files.
    #[schemars(range(min = 1, max = 1000000))]
    pub max_connections: Option<Spanned<i64>>,
    /// Maximum number of connections per client network (`[client_ip]` defines the prefix lengths). Excess connections
    /// are closed. Default: half of `max_connections`, with loopback addresses exempt. 0 = no limit.
    #[schemars(range(min = 0, max = 1000000))]
    pub max_connections_per_ip: Option<Spanned<i64>>,
    /// Maximum time from accepting a connection to the end of the first request headers, including the TLS handshake.
    /// For later requests, maximum time from the first byte to the end of the headers.
    #[schemars(schema_with = "schema::duration", extend("default" = "10s"))]
    pub header_timeout: Option<Text>,
    /// Maximum time between two requests on a connection. This is also the idle timeout of upgraded connections
    /// (`websocket`).
    #[schemars(schema_with = "schema::duration", extend("default" = "75s"))]
    pub idle_timeout: Option<Text>,
    /// Maximum time without progress on a request or response body.
    #[schemars(schema_with = "schema::duration", extend("default" = "30s"))]
    pub body_idle_timeout: Option<Text>,
    /// Minimum rate of a request body in bytes per second, after a grace period of 5s. A slower client gets 408. Only
    /// the time in which the gateway waits for the client counts. The rate does not apply to gRPC. 0B = no minimum.
    #[schemars(schema_with = "schema::size", extend("default" = "240B"))]
    pub min_body_rate: Option<Text>,
    /// Maximum time for a request body, from the first wait for the client to the end of the body. If the body takes
    /// longer, the client gets 408. Does not apply to gRPC. Default: no maximum.
    #[schemars(schema_with = "schema::duration")]
    pub body_timeout: Option<Text>,
    /// Maximum `Content-Length` of request bodies that the gateway buffers. The gateway buffers a body after the rate
    /// limit check, before the request takes an upstream connection. gRPC calls are not buffered. 0B = no buffering.
    #[schemars(schema_with = "schema::size", extend("default" = "64KiB"))]
    pub request_buffer: Option<Text>,
    /// Maximum number of bytes that the process buffers for slow HTTP/2 clients and for request bodies
    /// (`request_buffer`). When this maximum is reached, each HTTP/2 response buffers only one chunk, and request
    /// bodies are streamed.
    #[schemars(schema_with = "schema::size", extend("default" = "64MiB"))]
    pub max_buffered: Option<Text>,
    /// Maximum size of a JSON request body that is read for a route (`match.json`), for an identity (`json:POINTER`,
    /// `mcp:tool`, `mcp:method`, `jsonrpc:method`) or for a cost (`cost.tools`). A larger body gets 413.
    #[schemars(schema_with = "schema::size", extend("default" = "1MiB"))]
    pub inspect_body: Option<Text>,
    /// Maximum size of the request headers. Larger headers get 431. At least 8KiB.
    #[schemars(schema_with = "schema::size", extend("default" = "32KiB"))]
    pub max_header_size: Option<Text>,
    /// Maximum number of request header lines. A request with more lines gets 431.
    #[schemars(range(min = 1, max = 10000), extend("default" = 100))]
    pub max_headers: Option<Spanned<i64>>,
    /// Maximum length of the request target. A longer target gets 414.
    #[schemars(schema_with = "schema::size", extend("default" = "8KiB"))]
    pub max_uri: Option<Text>,
    /// Maximum number of concurrent streams per HTTP/2 connection.
    #[schemars(range(min = 1, max = 100000), extend("default" = 100))]
    pub http2_max_streams: Option<Spanned<i64>>,
    /// Reject requests with 421 if no route names their host, even if a route for any host would match.
    #[schemars(extend("default" = false))]
    pub block_unknown_hosts: Option<Spanned<bool>>,
    /// Add `Proxy-Status` (RFC 9209) to errors that the gateway generates ([error types](http.md#proxy-status)).
    #[schemars(extend("default" = true))]
    pub proxy_status: Option<Spanned<bool>>,
}

/// `[[listener]]`
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("required" = ["address"]))]
pub struct Listener {
    /// Unique name of the listener, for `listeners` of routes. Default: no name.
    pub name: Option<Text>,
    /// Address and port, such as `"127.0.0.1:8080"` or `"[::]:80"`. The listener serves HTTP/1.x, and HTTP/2 with prior
    /// knowledge, on the same port. A second gateway process with the same address does not start.
    pub address: Option<Text>,
    /// Require a PROXY protocol header (version 1 or 2) on every connection, from a proxy in
    /// `client_ip.trusted_proxies`.
    #[schemars(extend("default" = false))]
    pub proxy_protocol: Option<Spanned<bool>>,
    /// Serve TLS 1.2 and 1.3, with HTTP/2 or HTTP/1.1 by ALPN. Default: plaintext.
    pub tls: Option<Spanned<ListenerTls>>,
    /// Client networks that may use the listener: `["10.0.0.0/8", "file:office.txt"]`. All other clients get 403
    /// ([access rules](#access-rules)). Default: all.
    pub allow: Option<Vec<Text>>,
    /// Client networks that get 403, even if they are in `allow`. Default: none.
    pub deny: Option<Vec<Text>>,
}

/// `tls` of a listener
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
pub struct ListenerTls {
    /// Certificates: `[{ cert = "certs/dev.pem", key = "certs/dev.key" }]`. The gateway serves the first certificate
    /// that matches the SNI name of the client, or the first in the list if none matches.
    pub certificates: Vec<Spanned<Certificate>>,
    /// Obtain the certificates by ACME with the settings in `[acme]`, instead of `certificates` ([certificates by
    /// ACME](../how-to/acme.md)).
    #[schemars(extend("default" = false))]
    pub acme: Option<Spanned<bool>>,
    /// DNS names for which certificates are obtained with `acme`. Each name gets a separate certificate. Default: the
    /// hosts of all routes, except wildcards and IP addresses.
    pub names: Option<Vec<Text>>,
    /// PEM file of CA certificates. The gateway requests a client certificate that one of these CAs has signed.
    pub client_ca: Option<Text>,
    /// `"optional"`: clients may connect without a certificate. `"required"`: the TLS handshake fails without a client
    /// certificate.
    #[schemars(extend("enum" = ["optional", "required"], "default" = "optional"))]
    pub client_auth: Option<Text>,
}

/// `{ cert = "…", key = "…" }`
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("required" = ["cert", "key"]))]
pub struct Certificate {
    /// PEM file of the certificate, followed by its intermediate certificates.
    pub cert: Option<Text>,
    /// PEM file of the private key, without a password.
    pub key: Option<Text>,
}

/// `[acme]`
#[derive(Debug, Default, Deserialize, Serialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("required" = ["accept_terms"]))]
pub struct Acme {
    /// Acceptance of the terms of service of the CA. Must be `true`.
    pub accept_terms: Option<Spanned<bool>>,
    /// Email address for messages of the CA. Default: none.
    pub email: Option<Text>,
    /// URL of the CA's directory, `https://` only. Default: the directory of Let's Encrypt.
    #[schemars(extend("default" = "https://acme-v02.api.letsencrypt.org/directory"))]
    pub directory: Option<Text>,
    /// Use the staging environment of Let's Encrypt: higher rate limits, and certificates that clients do not trust.
    /// Cannot be combined with `directory`.
    #[schemars(extend("default" = false))]
    pub staging: Option<Spanned<bool>>,
    /// PEM file of CA certificates for the connection to the directory. Default: the trust roots of the system.
    pub ca: Option<Text>,
    /// Directory for the account, the certificates and their keys. Default: `acme` in `$STATE_DIRECTORY` if systemd
    /// sets it, otherwise `certs/acme`.
    pub storage: Option<Text>,
    /// Kinds of challenges in order of preference: after a failed attempt, the next attempt uses the next kind.
    /// Default: both kinds, or only `"tls-alpn-01"` without a plaintext listener.
    #[schemars(schema_with = "schema::challenges")]
    pub challenges: Option<Vec<Text>>,
    /// External account binding (EAB), for CAs that require it: `{ key_id = "…", mac_key = "…" }`.
    pub external_account: Option<Spanned<ExternalAccount>>,
}

/// `external_account` of `[acme]`
#[derive(Debug, Default, Deserialize, Serialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("required" = ["key_id", "mac_key"]))]
pub struct ExternalAccount {
    /// Key identifier from the CA.
    pub key_id: Option<Text>,
    /// MAC key from the CA, in base64url.
    pub mac_key: Option<Text>,
}

/// `[admin]`
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Admin {
    /// Address and port, such as `"127.0.0.1:9180"`. The port must not be used by a listener. Optional if `socket` is
    /// set.
    pub address: Option<Text>,
    /// Path of the admin socket, or `"off"`. The unix socket serves the same endpoints as `address`, including changes,
    /// and needs no token: only the user of the gateway and root can connect (mode 0600). `sluicegate reload` uses this
    /// socket. Default: `admin.sock` in the directory of `RUNTIME_DIRECTORY` if systemd sets that variable, otherwise
    /// no socket.
    pub socket: Option<Text>,
    /// Token that clients send as `Authorization: Bearer …`. Without a token, the admin API is read-only and `address`
    /// must be a loopback address.
    pub token: Option<Text>,
}

/// `[log]`
#[derive(Debug, Default, Deserialize, Serialize, JsonSchema)]
#[serde(default)]
pub struct Log {
    /// Format of the process log and the access log. Default: `"text"` for a log that is written to a terminal,
    /// `"json"` for a file, a pipe or syslog. The key does not apply to `"journald"`, whose entries have the fields of
    /// the record.
    #[schemars(extend("enum" = ["text", "json"]))]
    pub format: Option<Text>,
    /// Level of the process log, which is written to standard error.
    #[schemars(extend("enum" = ["error", "warn", "info", "debug", "trace"], "default" = "info"))]
    pub level: Option<Text>,
    /// Destination of the access log: `"stdout"`, `"off"`, `"syslog"`, `"journald"`, or a file to append to. Log
    /// rotation may rename the file at any time. A table has more settings:
    /// `{ to = "syslog", facility = "local1", sample = 0.1 }` ([access log](access-log.md)).
    #[schemars(extend("default" = "stdout"))]
    pub access: Option<Spanned<AccessLog>>,
    /// URL of an OpenTelemetry collector that receives spans (OTLP over HTTP), such as `"http://127.0.0.1:4318"`.
    /// Default: no traces ([traces](traces.md)).
    pub trace_endpoint: Option<Text>,
}

/// `[store]`
#[derive(Debug, Default, Deserialize, Serialize, JsonSchema)]
#[serde(default)]
pub struct Store {
    /// URL of the store: `memory:`, `redis://user:password@host:6379/0`, `rediss://…` (TLS),
    /// `redis+unix:///run/redis.sock?db=0`, `redis+sentinel://host1,host2/mymaster` or `redis+cluster://host1,host2`
    /// ([Redis](../how-to/redis.md)).
    #[schemars(extend("default" = "memory:"))]
    pub url: Option<Text>,
    /// TLS for `rediss://`: `{ ca = "ca.pem", cert = "client.pem", key = "client.key" }`. Each key is optional, but
    /// `cert` and `key` require each other. Default for `ca`: the trust roots of the system.
    pub tls: Option<Spanned<StoreTls>>,
    /// Maximum time for the rate limit check of a request, including the time in the queue. Deferred costs and refunds
    /// need a second call with the same maximum time. If a check takes longer while the store replies to other checks,
    /// the request gets 503.
    #[schemars(schema_with = "schema::duration", extend("default" = "50ms"))]
    pub timeout: Option<Text>,
    /// Maximum time to connect to the store: DNS, TCP, TLS, authentication, and loading the scripts. A request waits at
    /// most `timeout` for a connection.
    #[schemars(schema_with = "schema::duration", extend("default" = "1s"))]
    pub connect_timeout: Option<Text>,
    /// Number of connections to the store per worker. Calls are pipelined.
    #[schemars(range(min = 1, max = 8), extend("default" = 1))]
    pub connections: Option<Spanned<i64>>,
    /// Prefix of every key in the store.
    #[schemars(extend("default" = "rl"))]
    pub prefix: Option<Text>,
    /// Secret for the keyed hash of identities. The secret must be the same on all gateways. Without a secret, the
    /// gateway uses a public key, and attackers who read the store can find IP addresses by hashing all of them.
    pub secret: Option<Text>,
    /// Number of gateways that share the store. While the store is down, each gateway enforces 1/n of each limit as its
    /// local share.
    #[schemars(range(min = 1, max = 10000), extend("default" = 1))]
    pub gateway_count: Option<Spanned<i64>>,
    /// Maximum number of cached denials. Each limit and identity has at most one cached denial. The gateway repeats a
    /// cached denial without a call to Redis for up to 1 s, but not after its retry time. 0 = no cache.
    #[schemars(range(min = 0, max = 4_294_967_295_i64), extend("default" = 100000))]
    pub denial_cache: Option<Spanned<i64>>,
    /// Maximum number of rate limit states (one for each limit and identity) in the memory of this process. Each limit
    /// is guaranteed an equal part ([what happens when the memory is full](limits.md#memory)). A state takes about 150
    /// bytes. A state of `sliding-buckets` takes 9 more bytes for each bucket, and a state of `sliding-log` 9 more for
    /// each logged token.
    #[schemars(range(min = 1, max = 1_099_511_627_775_i64), extend("default" = 1000000))]
    pub max_memory_states: Option<Spanned<i64>>,
}

/// `tls` of the store
#[derive(Debug, Default, Deserialize, Serialize, JsonSchema)]
#[serde(default)]
pub struct StoreTls {
    /// PEM file of CA certificates for the store. Default: the trust roots of the system.
    pub ca: Option<Text>,
    /// PEM file of the client certificate. Requires `key`.
    pub cert: Option<Text>,
    /// PEM file of the private key of `cert`.
    pub key: Option<Text>,
}

/// `[client_ip]`
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
pub struct ClientIp {
    /// Addresses and networks of trusted proxies, such as `["10.0.0.0/8"]`. Default: none.
    pub trusted_proxies: Option<Vec<Text>>,
    /// Header with the client address: `"x-forwarded-for"`, `"forwarded"` (RFC 7239), or a header with a single address
    /// such as `"cf-connecting-ip"`.
    #[schemars(extend("default" = "x-forwarded-for"))]
    pub header: Option<Text>,
    /// Prefix length of an IPv4 client network.
    #[schemars(range(min = 0, max = 32), extend("default" = 32))]
    pub ipv4_prefix: Option<Spanned<i64>>,
    /// Prefix length of an IPv6 client network.
    #[schemars(range(min = 0, max = 128), extend("default" = 64))]
    pub ipv6_prefix: Option<Spanned<i64>>,
}

/// `[auth.NAME]`
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("required" = ["kind"]))]
pub struct Auth {
    /// `"api-key"`: keys of consumers. `"jwt"`: bearer tokens, JSON Web Tokens signed with RS256, ES256 or EdDSA.
    /// `"client-cert"`: the certificate that the client sent in the TLS handshake. `"basic"`: user names and passwords.
    /// `"forward"`: your own authentication server decides about each request.
    #[schemars(extend("enum" = ["api-key", "jwt", "client-cert", "basic", "forward"]))]
    pub kind: Option<Text>,
    /// api-key: header with the key, or a list of up to 8 headers. `authorization` and `proxy-authorization` have a
    /// scheme before the key. A request may have the same key in several headers. A request with different keys, or
    /// with the same header twice, gets 400.
    #[schemars(extend("default" = "x-api-key"))]
    pub header: Option<Spanned<HeaderNames>>,
    /// api-key: scheme before the key in `authorization` and `proxy-authorization`.
    #[schemars(extend("default" = "Bearer"))]
    pub scheme: Option<Text>,
    /// api-key: file of consumers, such as `"consumers.toml"`. The gateway reloads the file when it changes.
    /// `sluicegate key` edits the file. Consumer names must be unique in all files.
    pub consumers: Option<Text>,
    /// api-key, for routes with `identify`: handling of requests without a key. `"reject"`: `on_missing` of the limits
    /// by API key applies, which is 401 by default. `"anonymous"`: the client network is the identity.
    #[schemars(extend("enum" = ["reject", "anonymous"], "default" = "reject"))]
    pub on_missing: Option<Text>,
    /// api-key, for routes with `identify`: handling of unknown keys. `"reject"`: 401. `"anonymous"`: the client
    /// network is the identity. `"accept"`: each key is a separate identity.
    #[schemars(extend("enum" = ["reject", "anonymous", "accept"], "default" = "reject"))]
    pub on_unknown: Option<Text>,
    /// jwt: JWK Set (RFC 7517) with the public keys of the issuer, such as `"certs/jwks.json"`. The gateway reloads the
    /// file when it changes.
    pub jwks_file: Option<Text>,
    /// jwt: URL of the JWK Set, such as `"https://issuer.example/.well-known/jwks.json"`, instead of `jwks_file`.
    /// Requests with tokens get 503 until the JWK Set has been fetched once. If a later fetch fails, the last keys stay
    /// in use.
    pub jwks_url: Option<Text>,
    /// jwt with `jwks_url`: time between two fetches, with a jitter of 10 %. A token with an unknown `kid` causes an
    /// immediate fetch, at most once every 10s. At least 1s.
    #[schemars(schema_with = "schema::duration", extend("default" = "10m"))]
    pub refresh_interval: Option<Text>,
    /// jwt: required value of `iss`. Default: any. If several providers of this kind exist, each of them needs its
    /// `issuer`.
    pub issuer: Option<Text>,
    /// jwt: required value in `aud`. If the key is not set, tokens with an `aud` are rejected, because they are for
    /// another audience.
    pub audience: Option<Text>,
    /// jwt: required claims, such as `{ scope = "write", role = ["admin", "editor"] }`. One value of a list is enough;
    /// a nested list requires all of its values ([claims](#claims)). Tokens without these claims get 403.
    pub claims: Option<Spanned<BTreeMap<String, Spanned<ClaimValues>>>>,
    /// basic: file of users that Apache's `htpasswd` writes, with bcrypt (`htpasswd -B`) or apr1 (its default). The
    /// gateway reloads the file when it changes.
    pub users: Option<Text>,
    /// basic: name of the protected area (realm), which browsers show. Default: the name of the provider.
    pub realm: Option<Text>,
    /// forward: URL of the authentication server, such as `"http://127.0.0.1:4181/verify"`. For each request, the
    /// server gets a GET without a body. A 2xx status admits the request. For any other status, the client gets the
    /// response of the server.
    pub url: Option<Text>,
    /// forward: headers of the client that are sent to the server.
    #[schemars(extend("default" = ["authorization", "cookie"]))]
    pub request_headers: Option<Vec<Text>>,
    /// forward: response headers of the server that are sent to the upstream, such as `["x-user"]`. If the client sends
    /// headers with these names, they are always removed.
    pub response_headers: Option<Vec<Text>>,
    /// forward: maximum time for the response of the server, including the connection.
    #[schemars(schema_with = "schema::duration", extend("default" = "2s"))]
    pub timeout: Option<Text>,
    /// forward: handling of requests while the server does not respond. `"deny"`: 503. `"allow"`: the request is
    /// admitted, without headers of the server.
    #[schemars(extend("enum" = ["deny", "allow"], "default" = "deny"))]
    pub on_error: Option<Text>,
    /// forward: cache of admissions, `{ by = ["authorization", "cookie"], ttl = "10s" }`. Default: no cache.
    pub cache: Option<Spanned<AuthCache>>,
    /// forward and jwt, with an `https://` URL: PEM file of CA certificates for the server. Default: the trust roots of
    /// the system.
    pub ca: Option<Text>,
    /// Whether the gateway forwards the verified credential to the upstream. Default: `false` for api-key and basic,
    /// `true` for jwt, client-cert and forward. A credential that was not verified is never forwarded.
    pub forward_credential: Option<Spanned<bool>>,
}

/// `cache` of a provider of kind `forward`
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("required" = ["ttl"]))]
pub struct AuthCache {
    /// Values that form the cache key: all `request_headers`, and optionally `method`, `host`, `uri` (path and query)
    /// and `ip`. The server receives only these values, so that its decision cannot depend on a value that is not in
    /// the key. Default: all of them.
    pub by: Option<Spanned<Vec<Text>>>,
    /// Lifetime of a cached admission, at most 1h. The `Cache-Control` header of the server may shorten this time or
    /// forbid caching.
    #[schemars(schema_with = "schema::duration")]
    pub ttl: Option<Text>,
    /// Maximum number of cached admissions. When the maximum is reached, the least used admissions are removed.
    #[schemars(range(min = 1, max = 1_000_000), extend("default" = 10000))]
    pub max_entries: Option<Spanned<i64>>,
}

/// `[tiers]`
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Tiers {
    /// Source of the tier of a request. `"api-key"`: the `tier` of the consumer. `"jwt:CLAIM"`: a claim of the bearer
    /// token. `"auth:HEADER"`: one of the `response_headers` of an authentication server. A value that is not a tier of
    /// a limit selects the default quota of the limit.
    #[schemars(schema_with = "schema::tier_source", extend("default" = "api-key"))]
    pub from: Option<Text>,
}

impl Auth {
    /// Return whether the provider is of this kind.
    pub fn is_of_kind(&self, label: &str) -> bool {
        self.kind.as_ref().is_some_and(|kind| kind.get_ref() == label)
    }
}

/// `consumers.toml`
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Consumers {
    /// Consumers and the hashes of their keys. A key that is not in the file is unknown.
    pub consumer: Vec<Spanned<Consumer>>,
}

/// `[[consumer]]`
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("required" = ["name"]))]
pub struct Consumer {
    /// Unique name. All keys of the consumer have this identity.
    pub name: Option<Text>,
    /// Tier that selects the quota of each limit (`tiers` of a limit).
    pub tier: Option<Text>,
    /// API keys: the hash, or a table with the hash: `["sha256:…", { hash = "sha256:…", name = "ci" }]`.
    /// `sluicegate key new` creates a key; `printf %s KEY | sha256sum` computes the hash of an existing key.
    pub keys: Option<Vec<Spanned<ConsumerKey>>>,
    /// Quotas of this consumer, which take precedence over the quotas of its tier:
    /// `limit.NAME = { quota = "900/min", burst = 50 }`.
    pub limit: BTreeMap<String, Spanned<LimitVariant>>,
}
