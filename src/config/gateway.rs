//! The types of `gateway.toml` and of `consumers.toml`. They contain the values as written in the files, before
//! validation.
//!
//! The doc comments of the keys are user documentation: `make reference` copies them into the JSON Schema and the tables
//! of `docs/reference/configuration.md`.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::config::schema;
use crate::config::shorthand::{AccessLog, ClaimValues, ConsumerKey, HeaderNames, RouteNames, TokenWeights};
use crate::config::spanned::{Spanned, Text};
use crate::config::tables::{Descriptor, ErrorPages, Limit, LimitVariant, McpTools, Notify, Route, Upstream};

/// `gateway.toml`.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("required" = ["listener"]))]
pub struct Config {
    /// Files to include: paths or patterns relative to the directory of this file, such as `["routes/*.toml"]`. The
    /// `[[route]]`, `[limit.NAME]`, `[upstream.NAME]`, `[auth.NAME]` and `[prices.NAME]` tables of these files are added to this
    /// configuration.
    pub include: Vec<Text>,
    /// Worker threads, limits on client connections and requests, and shutdown.
    pub server: Server,
    /// Sockets on which the gateway accepts client connections.
    pub listener: Vec<Spanned<Listener>>,
    /// Obtain certificates by ACME (RFC 8555) for listeners with `tls.acme`. Default: the certificates are read from
    /// files.
    pub acme: Option<Spanned<Acme>>,
    /// Admin listener for health, metrics and the admin API. Default: no admin listener.
    pub admin: Option<Spanned<Admin>>,
    /// The metrics of the admin listener.
    pub metrics: Metrics,
    /// The process log and the access log.
    pub log: Log,
    /// Store for the rate limit state: the memory of the process, or Redis.
    pub store: Store,
    /// Trusted proxies, the header with the client address, and the prefix lengths of client networks.
    pub client_ip: ClientIp,
    /// Authentication providers by name: API keys, bearer tokens, client certificates, passwords, or authentication
    /// servers. Routes refer to providers by name in `require` and `identify`.
    pub auth: BTreeMap<String, Spanned<Auth>>,
    /// Source of the tier of a request. In each limit that has `tiers`, the tier selects the quota.
    pub tiers: Tiers,
    /// Destinations of quota events by name: webhooks and Redis streams. Limits refer to a destination by name in
    /// `notify`.
    pub notify: BTreeMap<String, Spanned<Notify>>,
    /// Prices of LLM models by name of the price list: `"gpt-5*" = { input = 1.25, cached_input = 0.125, output = 10 }`.
    /// A limit with `cost.llm` refers to a list by name in `cost.prices`. `*` in the name of a model matches any number
    /// of characters. `sluicegate prices update` writes such a list.
    pub prices: BTreeMap<String, Spanned<BTreeMap<String, Spanned<TokenWeights>>>>,
    /// Limits by name: identity, quota and algorithm. A limit has a separate state (such as a token bucket) for each
    /// identity. All routes that use the limit share these states.
    pub limit: BTreeMap<String, Spanned<Limit>>,
    /// Upstreams by name: servers, protocol, load balancing and timeouts.
    pub upstream: BTreeMap<String, Spanned<Upstream>>,
    /// Keys of `[[route]]` that apply to all routes, except where a route or its group has the key.
    #[schemars(schema_with = "schema::route_keys")]
    pub route_defaults: toml::Table,
    /// Groups of routes by name: keys of `[[route]]` that apply to all routes with this `group`.
    #[schemars(schema_with = "schema::route_groups")]
    pub route_group: toml::Table,
    /// Routes: the requests that the route matches, their upstream, and their limits. If several routes match, the most
    /// specific route wins. The order in the file does not matter.
    pub route: Vec<Spanned<Route>>,
    /// Descriptors: the limits of requests about which a proxy such as Envoy asks a listener with
    /// `protocol = "ratelimit"`. The most specific descriptor wins. The order in the file does not matter.
    pub descriptor: Vec<Spanned<Descriptor>>,
    /// Descriptors in the YAML of envoyproxy/ratelimit.
    pub ratelimit: RateLimitFiles,
}

/// `[ratelimit]`
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
pub struct RateLimitFiles {
    /// YAML file of envoyproxy/ratelimit, or a directory with such files (`*.yaml`, `*.yml`, also in directories below it),
    /// relative to the directory of this file. Each document has the descriptors of one domain. When a file changes, the gateway reloads the
    /// configuration.
    pub configuration: Option<Text>,
    /// True: all descriptors of a call are one decision, which charges all of them or none. False: each descriptor is
    /// decided and charged on its own, as in envoyproxy/ratelimit.
    #[schemars(extend("default" = true))]
    pub atomic: Option<Spanned<bool>>,
    /// Whether the metadata of each response contains the domain, the descriptors and the cost of its call, as with
    /// `RESPONSE_DYNAMIC_METADATA` of envoyproxy/ratelimit. Calls of more than 16KiB are not repeated.
    #[schemars(extend("default" = false))]
    pub dynamic_metadata: Option<Spanned<bool>>,
    /// Management server that sends descriptors (xDS), instead of `configuration`: `{ url = "http://envoy-gateway:18001",
    /// node_id = "envoy-ratelimit" }`. The gateway accepts or rejects each response, and keeps the last descriptors that
    /// it has accepted while there is no connection.
    pub xds: Option<Spanned<Xds>>,
    /// Whether several files or documents may have descriptors of the same domain. False: this is an error.
    #[schemars(extend("default" = false))]
    pub merge_domains: Option<Spanned<bool>>,
    /// Count the limits of the YAML, but deny no request, as if each descriptor had `shadow_mode: true`.
    #[schemars(extend("default" = false))]
    pub shadow: Option<Spanned<bool>>,
    /// Treat each descriptor of the YAML as if it had `quota_mode: true`: a call is denied only if all of them are over
    /// their limits.
    #[schemars(extend("default" = false))]
    pub quota_mode: Option<Spanned<bool>>,
    /// Names of the headers that tell clients the state of the limit that denies the request or is nearest to do so: `{
    /// limit = "RateLimit-Limit", remaining = "RateLimit-Remaining", reset = "RateLimit-Reset" }`. The values are its
    /// `requests_per_unit`, the remaining requests and the seconds until they are available again. Default: only
    /// `RateLimit` and `RateLimit-Policy`.
    pub headers: Option<Spanned<DescriptorHeaders>>,
    /// Share of a quota of the YAML beyond which requests count as `near_limit` in the metrics of envoyproxy/ratelimit.
    #[schemars(range(min = 0, max = 1), extend("default" = 0.8))]
    pub near_limit: Option<Spanned<f64>>,
    /// StatsD server that receives the metrics of envoyproxy/ratelimit: `{ address = "127.0.0.1:8125" }`. Default: none.
    pub statsd: Option<Spanned<Statsd>>,
}

impl RateLimitFiles {
    /// Return whether the table names a source of descriptors.
    pub fn has_descriptors(&self) -> bool {
        self.configuration.is_some() || self.xds.is_some()
    }
}

/// `statsd` of `[ratelimit]`
#[derive(Debug, Default, Deserialize, Serialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("required" = ["address"]))]
pub struct Statsd {
    /// Host and port of the server.
    pub address: Option<Text>,
    /// Transport of the lines. `"tcp"`: one connection. `"udp"`: datagrams of at most 1432 bytes.
    #[schemars(extend("enum" = ["tcp", "udp"], "default" = "udp"))]
    pub protocol: Option<Text>,
    /// Format of the tags. `"statsd"`: `NAME.__KEY=VALUE`, as in envoyproxy/ratelimit. `"dogstatsd"`: `#KEY:VALUE` after
    /// the type.
    #[schemars(extend("enum" = ["statsd", "dogstatsd"], "default" = "statsd"))]
    pub format: Option<Text>,
    /// Time between two deliveries. Each has the increases since the delivery before.
    #[schemars(schema_with = "schema::duration", extend("default" = "10s"))]
    pub interval: Option<Text>,
    /// Tags of all metrics.
    pub tags: BTreeMap<String, Text>,
}

/// `xds` of `[ratelimit]`
#[derive(Debug, Default, Deserialize, Serialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("required" = ["url"]))]
pub struct Xds {
    /// URL of the management server, without a path. It is asked for the resources of type
    /// `ratelimit.config.ratelimit.v3.RateLimitConfig`, as an aggregated discovery service, state of the world.
    #[schemars(schema_with = "schema::url")]
    pub url: Option<Text>,
    /// Name by which the management server chooses the descriptors.
    #[schemars(extend("default" = "default"))]
    pub node_id: Option<Text>,
    /// Metadata of the node.
    pub node_metadata: BTreeMap<String, Text>,
    /// Additional headers of the call, such as `authorization`.
    #[schemars(extend("secret" = "always"))]
    pub headers: BTreeMap<String, Text>,
    /// TLS for an `https://` URL: `{ ca = "ca.pem", cert = "client.pem", key = "client.key" }`. The files are read again for
    /// each connection.
    pub tls: Option<Spanned<XdsTls>>,
    /// When `/readyz` and health checks succeed. `"start"`: at once. `"response"`: when the management server has sent
    /// valid descriptors. `"domain"`: when they have at least one domain. Calls get an error before the first response.
    #[schemars(extend("enum" = ["start", "response", "domain"], "default" = "response"))]
    pub ready_after: Option<Text>,
}

/// `tls` of `xds`
#[derive(Debug, Default, Deserialize, Serialize, JsonSchema)]
#[serde(default)]
pub struct XdsTls {
    /// PEM file of CA certificates that verify the server. Default: the trust roots of the system.
    pub ca: Option<Text>,
    /// PEM file of the client certificate that the gateway sends. Requires `key`.
    pub cert: Option<Text>,
    /// PEM file of the private key of `cert`.
    pub key: Option<Text>,
    /// Name that the certificate of the server must have. Default: the host of `url`.
    pub server_name: Option<Text>,
}

/// `headers` of `[ratelimit]`
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("required" = ["limit", "remaining", "reset"]))]
pub struct DescriptorHeaders {
    /// Name of the header with the quota.
    pub limit: Option<Text>,
    /// Name of the header with the remaining requests.
    pub remaining: Option<Text>,
    /// Name of the header with the seconds until requests are available again.
    pub reset: Option<Text>,
}

/// `[server]`
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Server {
    /// Number of worker threads. 0 = one per CPU core.
    #[schemars(range(min = 0, max = 1024), extend("default" = 0))]
    pub workers: Option<Spanned<i64>>,
    /// `"per-core"`: each worker serves its own connections. `"work-stealing"`: all workers share one tokio runtime, in
    /// which idle workers take over tasks from busy workers.
    #[schemars(extend("enum" = ["per-core", "work-stealing"], "default" = "per-core"))]
    pub threading: Option<Text>,
    /// Time after SIGTERM or Ctrl-C during which the gateway still accepts connections and serves requests. Meanwhile,
    /// `/readyz` returns 503, so that load balancers stop sending requests to the gateway. After this time,
    /// `drain_timeout` begins. A second signal ends this time early. A hot restart skips this time. `"0s"` = drain at
    /// once.
    #[schemars(schema_with = "schema::duration", extend("default" = "0s"))]
    pub accept_grace: Option<Text>,
    /// Maximum time at shutdown, after `accept_grace`, to complete the requests in flight. When this time expires, the
    /// gateway aborts the remaining requests and exits with status 0. Another signal during this time ends the process
    /// at once.
    #[schemars(schema_with = "schema::duration", extend("default" = "30s"))]
    pub drain_timeout: Option<Text>,
    /// Memory that the process may use. The defaults of `max_connections` and `max_buffered` fit into it. Default: the
    /// memory limit of the control group, which is that of the container or of the systemd service. 0B = no limit. If
    /// 3/4 of this memory are used, [new connections wait, and new requests get 503](#memory-limit).
    #[schemars(schema_with = "schema::size")]
    pub memory: Option<Text>,
    /// Maximum number of client connections of all workers together. Excess connections wait in the kernel's listen
    /// queue. Default: about half of the hard limit on open files (`ulimit -Hn`), because a connection may need a
    /// second file descriptor for the upstream. With a limit on memory, the default is at most three quarters of it,
    /// minus 24 MiB, divided by 16 KiB, or by 32 KiB if a listener has TLS.
    #[schemars(range(min = 1, max = 1000000))]
    pub max_connections: Option<Spanned<i64>>,
    /// Maximum number of connections per client network (`[client_ip]` defines the prefix lengths). Excess connections
    /// are closed. Default: half of `max_connections`; with this default, loopback addresses are exempt. 0 = no limit.
    #[schemars(range(min = 0, max = 1000000))]
    pub max_connections_per_ip: Option<Spanned<i64>>,
    /// For the first request on a connection: maximum time from accepting the connection to the end of the request
    /// headers, including the TLS handshake. For later requests: maximum time from the first byte to the end of the
    /// headers.
    #[schemars(schema_with = "schema::duration", extend("default" = "10s"))]
    pub header_timeout: Option<Text>,
    /// Maximum time between the end of a response and the next request on a client connection. This is also the idle
    /// timeout of upgraded connections (`websocket`).
    #[schemars(schema_with = "schema::duration", extend("default" = "75s"))]
    pub idle_timeout: Option<Text>,
    /// Maximum time without progress on the response to a client that has ended its side of the connection (TCP FIN or
    /// TLS `close_notify`) after a complete request ([half-closed
    /// connections](upstreams.md#half-closed-connections)). `"0s"`: cancel the request at once.
    #[schemars(schema_with = "schema::duration", extend("default" = "5s"))]
    pub half_close_timeout: Option<Text>,
    /// Maximum time without progress on a request or response body. If the client stops sending the request body, it
    /// gets 408. If a response body stops, the gateway aborts the response ([timeouts of bodies](#timeouts-of-bodies)).
    /// Does not apply while the upstream pauses a response of unknown length, such as server-sent events.
    #[schemars(schema_with = "schema::duration", extend("default" = "30s"))]
    pub body_idle_timeout: Option<Text>,
    /// Minimum rate at which a client must send a request body, in bytes per second, after a grace period of 5s. A
    /// slower client gets 408. Only the time in which the gateway waits for the client to send data counts. Does not
    /// apply to gRPC. 0B = no minimum.
    #[schemars(schema_with = "schema::size", extend("default" = "240B"))]
    pub min_body_rate: Option<Text>,
    /// Maximum time to receive a request body. It starts when the gateway first waits for the client to send data of
    /// the body. If the body takes longer, the client gets 408. Does not apply to gRPC. Default: no maximum.
    #[schemars(schema_with = "schema::duration")]
    pub body_timeout: Option<Text>,
    /// Maximum `Content-Length` of a request body that the gateway buffers. After the rate limit check, the gateway
    /// reads the whole body, and only then takes an upstream connection. Larger bodies and gRPC calls are streamed. 0B
    /// = no buffering.
    #[schemars(schema_with = "schema::size", extend("default" = "64KiB"))]
    pub request_buffer: Option<Text>,
    /// Maximum number of bytes that the process buffers in total, for responses to slow HTTP/2 clients and for request
    /// bodies (`request_buffer`). When this maximum is reached, each HTTP/2 response buffers only one chunk, and
    /// request bodies are streamed. With a limit on memory, the default is at most an eighth of it.
    #[schemars(schema_with = "schema::size", extend("default" = "64MiB"))]
    pub max_buffered: Option<Text>,
    /// Maximum size of a JSON request body or form that the gateway reads. It reads a body to select a route
    /// (`match.json`), to determine an identity (`json:POINTER`, `form:NAME`, `mcp:tool`, `mcp:method`, `jsonrpc:method`) or to compute a cost
    /// (`cost.tools`). A larger body gets 413. Must not exceed `max_buffered`.
    #[schemars(schema_with = "schema::size", extend("default" = "1MiB"))]
    pub inspect_body: Option<Text>,
    /// Maximum total size of the headers of a request. A request with larger headers gets 431. Must be at least 8KiB.
    #[schemars(schema_with = "schema::size", extend("default" = "32KiB"))]
    pub max_header_size: Option<Text>,
    /// Maximum number of headers in a request. If a header occurs several times, each occurrence counts. A request with
    /// more headers gets 431.
    #[schemars(range(min = 1, max = 10000), extend("default" = 100))]
    pub max_headers: Option<Spanned<i64>>,
    /// Maximum length of the request target (path and query). A longer target gets 414.
    #[schemars(schema_with = "schema::size", extend("default" = "8KiB"))]
    pub max_uri: Option<Text>,
    /// Maximum number of concurrent streams per HTTP/2 client connection.
    #[schemars(range(min = 1, max = 100000), extend("default" = 100))]
    pub http2_max_streams: Option<Spanned<i64>>,
    /// Reject a request with 421 if no route names its host in `hosts`, even if a route for any host would match.
    #[schemars(extend("default" = false))]
    pub block_unknown_hosts: Option<Spanned<bool>>,
    /// Add the `Proxy-Status` header (RFC 9209) to error responses that the gateway generates ([error
    /// types](http.md#proxy-status)).
    #[schemars(extend("default" = true))]
    pub proxy_status: Option<Spanned<bool>>,
    /// Slashes in paths that servers may interpret differently. `"canonical"`: requests with `%2F` get 400, and
    /// consecutive slashes are merged. `"keep-encoded-slashes"`: `%2F` is kept as a part of its segment, for npm
    /// registries and GitLab. `"keep-double-slashes"`: consecutive slashes are kept, except at the start of the path.
    /// `"keep-slashes"`: both are kept, for image proxies. Routing, limits and the upstream always see the same path
    /// ([path policies](http.md#path-policies)).
    #[schemars(extend("enum" = ["canonical", "keep-encoded-slashes", "keep-double-slashes", "keep-slashes"], "default" = "canonical"))]
    pub path_policy: Option<Text>,
    /// Ignore the case of ASCII letters in paths when the gateway selects routes and computes identities. The upstream
    /// gets the path as the client wrote it. Use this key if the upstream ignores the case: otherwise, a client could
    /// avoid the limits of `/login` with `/LOGIN`.
    #[schemars(extend("default" = false))]
    pub case_insensitive_paths: Option<Spanned<bool>>,
    /// Content of the error responses that the gateway generates: `{ html = "…", json = "…" }` ([error
    /// pages](http.md#error-pages)). Default: problem documents (RFC 9457).
    pub error_pages: Option<Spanned<ErrorPages>>,
}

/// `[[listener]]`
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("required" = ["address"]))]
pub struct Listener {
    /// Unique name of the listener. Routes refer to it in `listeners`. Default: no name.
    pub name: Option<Text>,
    /// Address and port, such as `"127.0.0.1:8080"` or `"[::]:80"`. The listener serves HTTP/1.x and HTTP/2 with prior
    /// knowledge on this port. A second gateway process with the same address does not start. `"unix:/run/http.sock"`: a
    /// Unix socket with the permissions of the umask, whose clients have the address `::`.
    pub address: Option<Text>,
    /// What the listener serves. `"http"`: requests, by the routes. `"ratelimit"`: calls of Envoy's rate limit service
    /// over HTTP/2, by the descriptors ([Envoy](../how-to/envoy.md)). `"ratelimit-http"`: the same calls as JSON, and
    /// health checks, over HTTP/1.1 and HTTP/2. `"decisions"`: decisions about the requests of another proxy, such as
    /// nginx or Traefik, by the routes ([decisions](../how-to/decisions.md)).
    #[schemars(extend("enum" = ["http", "ratelimit", "ratelimit-http", "decisions"], "default" = "http"))]
    pub protocol: Option<Text>,
    /// Status of each response that denies a request with a status other than 401 and 403, for proxies such as nginx
    /// that forward only these two. The header `X-Decision-Status` then contains the status of the decision. Requires
    /// `protocol = "decisions"`. Default: the status of the decision.
    #[schemars(range(min = 400, max = 499))]
    pub denied_status: Option<Spanned<i64>>,
    /// Token that programs must send to the [JSON API](../how-to/decisions.md#json-api) of the listener, as
    /// `Authorization: Bearer …`. Requires `protocol = "decisions"`. Default: the API is off.
    #[schemars(schema_with = "schema::secret")]
    pub api_token: Option<Text>,
    /// Maximum time between a decision and its settlement by `POST /v1/settle` or `/v1/release`. The listener then
    /// serves only programs, and its routes may have concurrency limits, `refund_on`, and costs by `response_header`.
    /// Requires `api_token`. Default: decisions cannot be settled.
    #[schemars(schema_with = "schema::duration")]
    pub settle_timeout: Option<Text>,
    /// Require a PROXY protocol header (version 1 or 2) at the start of every connection. The peer must be a proxy in
    /// `client_ip.trusted_proxies`.
    #[schemars(extend("default" = false))]
    pub proxy_protocol: Option<Spanned<bool>>,
    /// Serve TLS 1.2 and 1.3: `{ certificates = [{ cert = "certs/dev.pem", key = "certs/dev.key" }] }`. ALPN selects
    /// HTTP/2 or HTTP/1.1. Default: plaintext.
    pub tls: Option<Spanned<ListenerTls>>,
    /// Client networks that may use the listener: `["10.0.0.0/8", "file:office.txt"]`. `file:` precedes the path of a
    /// file with one network per line. All other clients get 403 ([access rules](#access-rules)). Default: all
    /// networks.
    pub allow: Option<Vec<Text>>,
    /// Client networks that get 403, even if they are in `allow`. Default: none.
    pub deny: Option<Vec<Text>>,
}

/// `tls` of a listener
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
pub struct ListenerTls {
    /// Certificates: `[{ cert = "certs/dev.pem", key = "certs/dev.key" }]`. The gateway serves the first certificate
    /// that matches the SNI name of the client and whose key the client supports, and prefers ECDSA keys to RSA keys. If
    /// none matches the name, the gateway selects from all certificates.
    pub certificates: Vec<Spanned<Certificate>>,
    /// Obtain the certificates by ACME with the settings in `[acme]`, instead of `certificates` ([certificates by
    /// ACME](../how-to/acme.md)).
    #[schemars(extend("default" = false))]
    pub acme: Option<Spanned<bool>>,
    /// DNS names for which the gateway obtains certificates if `acme` is `true`. Each name gets a separate certificate.
    /// Default: the hosts of all routes, except wildcards and IP addresses.
    pub names: Option<Vec<Text>>,
    /// PEM file of CA certificates. The gateway requests a client certificate that one of these CAs has issued.
    pub client_ca: Option<Text>,
    /// Whether clients must send a certificate. Requires `client_ca`. `"optional"`: clients may connect without a
    /// certificate. `"required"`: the TLS handshake fails without a client certificate.
    #[schemars(extend("enum" = ["optional", "required"], "default" = "optional"))]
    pub client_auth: Option<Text>,
    /// DNS names and IP addresses of which a client certificate must have at least one in its `subjectAltName`, such as
    /// `["envoy.example.com"]`. The TLS handshake fails with another certificate. Requires `client_ca`. Default: any
    /// name.
    pub client_names: Option<Vec<Text>>,
    /// Other client certificates for single hosts: `[{ hosts = ["admin.example.com"], client_ca = "certs/staff-ca.pem",
    /// client_auth = "required" }]`. The SNI name of the client selects the entry. `client_ca` and `client_auth` of the
    /// listener apply to all other hosts. Requires `protocol = "http"`.
    pub per_host: Option<Vec<Spanned<HostClients>>>,
}

/// `per_host` of `tls`
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("required" = ["hosts"]))]
pub struct HostClients {
    /// Names of hosts. `"*.example.com"` includes all subdomains. A long name takes precedence over a short one.
    pub hosts: Option<Vec<Text>>,
    /// PEM file of CA certificates that issue the client certificates of these hosts. Default: the gateway requests no
    /// client certificate for these hosts.
    pub client_ca: Option<Text>,
    /// Whether clients of these hosts must send a certificate. Requires `client_ca`.
    #[schemars(extend("enum" = ["optional", "required"], "default" = "optional"))]
    pub client_auth: Option<Text>,
    /// Names of which a client certificate for these hosts must have at least one. Requires `client_ca`. Default: any
    /// name.
    pub client_names: Option<Vec<Text>>,
}

impl ListenerTls {
    /// Return whether the gateway requests a client certificate for at least one host.
    pub fn requests_client_certificates(&self) -> bool {
        let mut per_host = self.per_host.iter().flatten();
        self.client_ca.is_some() || per_host.any(|hosts| hosts.get_ref().client_ca.is_some())
    }
}

/// `{ cert = "…", key = "…" }`
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("required" = ["cert", "key"]))]
pub struct Certificate {
    /// PEM file with the certificate, followed by its intermediate certificates.
    pub cert: Option<Text>,
    /// PEM file with the unencrypted private key.
    pub key: Option<Text>,
}

/// `[acme]`
#[derive(Debug, Default, Deserialize, Serialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("required" = ["accept_terms"]))]
pub struct Acme {
    /// Accept the CA's terms of service. Must be `true`.
    pub accept_terms: Option<Spanned<bool>>,
    /// Email address to which the CA sends messages. Default: none.
    pub email: Option<Text>,
    /// URL of the CA's ACME directory, with `https://`. Default: the directory of Let's Encrypt.
    #[schemars(schema_with = "schema::url", extend("default" = "https://acme-v02.api.letsencrypt.org/directory"))]
    pub directory: Option<Text>,
    /// Use the staging environment of Let's Encrypt: higher rate limits, and certificates that clients do not trust.
    /// Cannot be combined with `directory`.
    #[schemars(extend("default" = false))]
    pub staging: Option<Spanned<bool>>,
    /// PEM file of CA certificates that verify the ACME server. Default: the trust roots of the system.
    pub ca: Option<Text>,
    /// Directory for the ACME account, the certificates and their private keys. Default: `acme` in `$STATE_DIRECTORY`
    /// if systemd sets this variable, otherwise `certs/acme`.
    pub storage: Option<Text>,
    /// ACME challenge types in order of preference. After a failed attempt, the next attempt uses the next type.
    /// Default: `"http-01"`, then `"tls-alpn-01"`. Without a plaintext listener, the default is only `"tls-alpn-01"`.
    #[schemars(schema_with = "schema::challenges")]
    pub challenges: Option<Vec<Text>>,
    /// External account binding (EAB), for CAs that require it: `{ key_id = "…", mac_key = "…" }`. Default: none.
    pub external_account: Option<Spanned<ExternalAccount>>,
}

/// `external_account` of `[acme]`
#[derive(Debug, Default, Deserialize, Serialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("required" = ["key_id", "mac_key"]))]
pub struct ExternalAccount {
    /// Key identifier that the CA issued.
    pub key_id: Option<Text>,
    /// MAC key that the CA issued, in base64url.
    #[schemars(schema_with = "schema::secret")]
    pub mac_key: Option<Text>,
}

/// `[admin]`
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Admin {
    /// Address and port, such as `"127.0.0.1:9180"`. They must not overlap with the address and port of a
    /// `[[listener]]`. Optional if `socket` is set.
    pub address: Option<Text>,
    /// Path of a Unix socket for the admin API, or `"off"`. The socket serves the same endpoints as `address`,
    /// including the endpoints that change something. Clients need no token, because the mode of the socket is 0600:
    /// only the gateway's user and root can connect. `sluicegate reload` uses this socket. Default: `admin.sock` in
    /// `$RUNTIME_DIRECTORY` if systemd sets this variable, otherwise no socket.
    pub socket: Option<Text>,
    /// Token that clients must send as `Authorization: Bearer …`. Without a token, the admin API at `address` is
    /// read-only, and `address` must be a loopback address or serve only `open`.
    #[schemars(schema_with = "schema::secret")]
    pub token: Option<Text>,
    /// Paths that need no token, for clients that cannot send one: `["/healthz", "/readyz", "/metrics"]`. Without a
    /// token, `/readyz` returns only the status. If neither `token` nor a loopback `address` is set, these are the only
    /// paths that `address` serves.
    #[schemars(schema_with = "schema::open_paths", extend("secret" = "never"))]
    pub open: Option<Vec<Text>>,
}

/// `[metrics]`
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Metrics {
    /// Routes with separate series, about 40 each: `"all"`, `"none"`, or a list of names. The other routes are counted
    /// together, with the label `route="other"`.
    #[schemars(extend("default" = "all"))]
    pub routes: Option<Spanned<RouteNames>>,
}

/// `[log]`
#[derive(Debug, Default, Deserialize, Serialize, JsonSchema)]
#[serde(default)]
pub struct Log {
    /// Format of the process log and the access log. Default: `"text"` for a process log that is written to a terminal,
    /// a short line per request for an access log that is written to a terminal, `"json"` for a file, a pipe or syslog.
    /// Does not apply to an access log with the destination `"journald"`: each journal entry has the fields of the
    /// access log record.
    #[schemars(extend("enum" = ["text", "json"]))]
    pub format: Option<Text>,
    /// Minimum level of records in the process log. The process log is written to standard error.
    #[schemars(extend("enum" = ["error", "warn", "info", "debug", "trace"], "default" = "info"))]
    pub level: Option<Text>,
    /// Destination of the access log: `"stdout"`, `"off"`, `"syslog"`, `"journald"`, or the path of a file to append
    /// to. Log rotation may rename the file at any time: the gateway then opens a new file at the path. The table form
    /// has more settings: `{ to = "syslog", facility = "local1", sample = 0.1 }` ([access log](access-log.md)).
    #[schemars(extend("default" = "stdout"))]
    pub access: Option<Spanned<AccessLog>>,
    /// URL of an OpenTelemetry collector that receives spans (OTLP over HTTP), such as `"http://127.0.0.1:4318"`.
    /// Default: no traces ([traces](traces.md)).
    #[schemars(schema_with = "schema::url")]
    pub trace_endpoint: Option<Text>,
    /// Share of the traces to record that start at the gateway. The flag `sampled` of the caller decides about other
    /// traces. 1 = all.
    #[schemars(range(min = 0, max = 1), extend("default" = 1.0))]
    pub trace_sample: Option<Spanned<f64>>,
    /// Resource attributes of all spans, such as `{ "service.name" = "edge" }`. They take precedence over the [environment
    /// variables](traces.md#configuration).
    pub trace_resource: BTreeMap<String, Text>,
}

/// `[store]`
#[derive(Debug, Default, Deserialize, Serialize, JsonSchema)]
#[serde(default)]
pub struct Store {
    /// URL of the store: `memory:`, `redis://host:6379/0`, `rediss://…` (TLS), `redis+unix:///run/redis.sock?db=0`,
    /// `redis+sentinel://host1,host2/mymaster` or `redis+cluster://host1,host2` ([Redis](../how-to/redis.md)). It may
    /// contain [credentials](../how-to/redis.md#credentials).
    #[schemars(schema_with = "schema::url", extend("default" = "memory:"))]
    pub url: Option<Text>,
    /// User name for Redis, instead of a user name in `url`. Requires `password` or `password_file`. Default: the Redis
    /// user `default`.
    pub username: Option<Text>,
    /// Password for Redis, such as `"${REDIS_PASSWORD}"`, instead of a password in `url`. It may contain any character,
    /// and is not percent-encoded. An empty value is ignored.
    #[schemars(schema_with = "schema::secret")]
    pub password: Option<Text>,
    /// File that contains the password for Redis, instead of `password`. A line break at the end of the file is ignored.
    /// The gateway reads the file only when it starts.
    #[schemars(extend("secret" = "never"))]
    pub password_file: Option<Text>,
    /// Credentials for the Sentinels of `redis+sentinel://`: `{ username = "gateway", password =
    /// "${SENTINEL_PASSWORD}" }`.
    pub sentinel: Option<Spanned<StoreSentinel>>,
    /// TLS for `rediss://`: `{ ca = "ca.pem", cert = "client.pem", key = "client.key" }`. Each key is optional, but
    /// `cert` and `key` require each other. Default for `ca`: the trust roots of the system.
    pub tls: Option<Spanned<StoreTls>>,
    /// Maximum time for the rate limit check of a request, including the time for which the check is queued before it
    /// is sent to the store. Deferred costs and refunds use a second call, which also takes at most `timeout`. If a
    /// check times out while the store replies to other checks, the request gets 503.
    #[schemars(schema_with = "schema::duration", extend("default" = "50ms"))]
    pub timeout: Option<Text>,
    /// Maximum time to connect to the store: DNS, TCP, TLS, authentication, and loading the Lua scripts. A request
    /// waits for a connection for at most `timeout`.
    #[schemars(schema_with = "schema::duration", extend("default" = "1s"))]
    pub connect_timeout: Option<Text>,
    /// Number of connections to the store per worker. Each connection pipelines calls.
    #[schemars(range(min = 1, max = 8), extend("default" = 1))]
    pub connections: Option<Spanned<i64>>,
    /// Prefix of every key in the store.
    #[schemars(extend("default" = "rl"))]
    pub prefix: Option<Text>,
    /// Secret key with which identities are hashed. All gateways that share the store need the same secret. Without a
    /// secret, the gateway uses a key that is publicly known. Attackers who can read the store can then find IP
    /// addresses by hashing every possible address.
    #[schemars(schema_with = "schema::secret")]
    pub secret: Option<Text>,
    /// Minimum number of gateways that share the store. While the store is unavailable, each gateway enforces its local
    /// share, which is 1/n of each limit for n gateways. The gateways [count themselves](../explanation/failures.md#number-of-gateways)
    /// in Redis; n is at least the minimum. A reload applies a new value.
    #[schemars(range(min = 1, max = 10000), extend("default" = 1))]
    pub gateway_count: Option<Spanned<i64>>,
    /// Maximum number of denials that the gateway caches, at most one per limit and identity. While a denial is cached,
    /// the gateway denies further requests of the identity without a call to Redis. A denial is cached for at most 1 s,
    /// and not longer than its retry time. 0 = no cache.
    #[schemars(range(min = 0, max = 4_294_967_295_i64), extend("default" = 100000))]
    pub denial_cache: Option<Spanned<i64>>,
    /// Maximum number of rate limit states in the memory of this process. There is one state for each limit and
    /// identity. Each limit is guaranteed an equal share of the maximum ([what happens when the memory is
    /// full](limits.md#memory)). A state takes about 150 bytes. With `sliding-buckets`, it takes 9 more bytes per
    /// bucket. With `sliding-log`, it takes 9 more bytes per logged token.
    #[schemars(range(min = 1, max = 1_099_511_627_775_i64), extend("default" = 1000000))]
    pub max_memory_states: Option<Spanned<i64>>,
}

/// `sentinel` of the store
#[derive(Debug, Default, Deserialize, Serialize, JsonSchema)]
#[serde(default)]
pub struct StoreSentinel {
    /// User name for the Sentinels. Requires `password` or `password_file`. Default: the user `default`.
    pub username: Option<Text>,
    /// Password for the Sentinels. It may contain any character. An empty value is ignored.
    #[schemars(schema_with = "schema::secret")]
    pub password: Option<Text>,
    /// File that contains the password for the Sentinels, instead of `password`.
    #[schemars(extend("secret" = "never"))]
    pub password_file: Option<Text>,
}

/// `tls` of the store
#[derive(Debug, Default, Deserialize, Serialize, JsonSchema)]
#[serde(default)]
pub struct StoreTls {
    /// PEM file of CA certificates that verify the store's certificate. Default: the trust roots of the system.
    pub ca: Option<Text>,
    /// PEM file of the client certificate that the gateway sends to the store. Requires `key`.
    pub cert: Option<Text>,
    /// PEM file of the private key of `cert`.
    pub key: Option<Text>,
    /// Whether the certificate of the store must be valid for the host in `url`. False: any certificate that the CA has
    /// issued is accepted, also one of another server.
    #[schemars(extend("default" = true))]
    pub verify_name: Option<Spanned<bool>>,
}

/// `[client_ip]`
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
pub struct ClientIp {
    /// Addresses and networks of trusted proxies, such as `["10.0.0.0/8"]`. Default: none.
    pub trusted_proxies: Option<Vec<Text>>,
    /// Header that contains the client address: `"x-forwarded-for"`, `"forwarded"` (RFC 7239), or a header with a
    /// single address such as `"cf-connecting-ip"`. The gateway reads it only from trusted proxies.
    #[schemars(extend("default" = "x-forwarded-for"))]
    pub header: Option<Text>,
    /// Prefix length of an IPv4 client network. All addresses in a network count as one client.
    #[schemars(range(min = 0, max = 32), extend("default" = 32))]
    pub ipv4_prefix: Option<Spanned<i64>>,
    /// Prefix length of an IPv6 client network. All addresses in a network count as one client.
    #[schemars(range(min = 0, max = 128), extend("default" = 64))]
    pub ipv6_prefix: Option<Spanned<i64>>,
}

/// `[auth.NAME]`
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("required" = ["kind"]))]
pub struct Auth {
    /// Kind of credential. `"api-key"`: API keys of consumers. `"jwt"`: bearer tokens (JSON Web Tokens) signed with
    /// RS256, ES256 or EdDSA. `"client-cert"`: the certificate that the client sent in the TLS handshake. `"basic"`:
    /// user names and passwords. `"forward"`: an external authentication server decides whether to admit each request.
    #[schemars(extend("enum" = ["api-key", "jwt", "client-cert", "basic", "forward"]))]
    pub kind: Option<Text>,
    /// api-key: header that contains the key, or a list of up to 8 headers. In `authorization` and
    /// `proxy-authorization`, a scheme precedes the key. Several headers of a request may contain the same key. A
    /// request with different keys, or with one of these headers twice, gets 400.
    #[schemars(extend("default" = "x-api-key"))]
    pub header: Option<Spanned<HeaderNames>>,
    /// api-key: authentication scheme that precedes the key in `authorization` and `proxy-authorization`.
    #[schemars(extend("default" = "Bearer"))]
    pub scheme: Option<Text>,
    /// api-key: consumers file, such as `"consumers.toml"`. The gateway reloads the file when it changes. `sluicegate
    /// key` edits the file. Consumer names must be unique across all consumers files.
    pub consumers: Option<Text>,
    /// api-key, for routes with `identify`: how to handle requests without a key. `"reject"`: apply the `on_missing` of
    /// each limit by API key. By default, it rejects the request with 401. `"anonymous"`: use the client network as the
    /// identity.
    #[schemars(extend("enum" = ["reject", "anonymous"], "default" = "reject"))]
    pub on_missing: Option<Text>,
    /// api-key, for routes with `identify`: how to handle unknown keys. `"reject"`: reject with 401. `"anonymous"`: use
    /// the client network as the identity. `"accept"`: treat each key as a separate identity.
    #[schemars(extend("enum" = ["reject", "anonymous", "accept"], "default" = "reject"))]
    pub on_unknown: Option<Text>,
    /// jwt: file with a JWK Set (RFC 7517) that contains the issuer's public keys, such as `"certs/jwks.json"`. The
    /// gateway reloads the file when it changes.
    pub jwks_file: Option<Text>,
    /// jwt: URL of the JWK Set, such as `"https://issuer.example/.well-known/jwks.json"`. Cannot be combined with
    /// `jwks_file`. Requests with tokens get 503 until the first successful fetch. If a later fetch fails, the gateway
    /// keeps the previous keys.
    #[schemars(schema_with = "schema::url")]
    pub jwks_url: Option<Text>,
    /// jwt with `jwks_url`: time between two fetches, varied randomly by up to 10 %. A token with an unknown `kid`
    /// triggers an immediate fetch, at most once every 10s. From 1s to 1d.
    #[schemars(schema_with = "schema::duration", extend("default" = "10m"))]
    pub refresh_interval: Option<Text>,
    /// jwt: required value of the claim `iss`. Default: any value. If there are several jwt providers, each of them
    /// must have an `issuer`.
    pub issuer: Option<Text>,
    /// jwt: value that the claim `aud` must contain. If this key is not set, tokens with an `aud` claim are rejected,
    /// because they are meant for another audience.
    pub audience: Option<Text>,
    /// jwt: claims that a token must have, such as `{ scope = "write", role = ["admin", "editor"] }`. If the value is a
    /// list, the claim must have one of its items. A nested list requires all of its values ([claims](#claims)). A
    /// request whose token lacks a required claim gets 403.
    pub claims: Option<Spanned<BTreeMap<String, Spanned<ClaimValues>>>>,
    /// basic: users file in the format of Apache's `htpasswd`, with bcrypt (`htpasswd -B`) or apr1 (the default of
    /// `htpasswd`) hashes. The gateway reloads the file when it changes.
    pub users: Option<Text>,
    /// basic: name of the protected area (realm), which browsers show. Default: the name of the provider.
    pub realm: Option<Text>,
    /// forward: URL of the authentication server, such as `"http://127.0.0.1:4181/verify"`. For each client request,
    /// the gateway sends a GET request without a body to this URL. If the server responds with a 2xx status, the
    /// gateway admits the client's request. If it responds with any other status, the gateway sends this response to
    /// the client.
    #[schemars(schema_with = "schema::url")]
    pub url: Option<Text>,
    /// forward: request headers of the client that the gateway sends to the authentication server.
    #[schemars(extend("default" = ["authorization", "cookie"]))]
    pub request_headers: Option<Vec<Text>>,
    /// forward: headers of the authentication server's response that the gateway adds to the upstream request, such as
    /// `["x-user"]`. The gateway always removes headers with these names from client requests.
    pub response_headers: Option<Vec<Text>>,
    /// forward: maximum time for the authentication server's response, including the time to connect.
    #[schemars(schema_with = "schema::duration", extend("default" = "2s"))]
    pub timeout: Option<Text>,
    /// forward: how to handle requests while the authentication server does not respond. `"deny"`: reject with 503.
    /// `"allow"`: admit the request, without the `response_headers`.
    #[schemars(extend("enum" = ["deny", "allow"], "default" = "deny"))]
    pub on_error: Option<Text>,
    /// forward: cache admissions, so that the gateway does not call the server for each request: `{ by =
    /// ["authorization", "cookie"], ttl = "10s" }`. Default: no cache.
    pub cache: Option<Spanned<AuthCache>>,
    /// forward and jwt, with an `https://` URL: PEM file of CA certificates that verify the server. Default: the trust
    /// roots of the system.
    pub ca: Option<Text>,
    /// Forward the verified credential to the upstream. Default: `false` for api-key and basic, `true` for jwt,
    /// client-cert and forward. Credentials that the gateway did not verify are never forwarded.
    #[schemars(extend("secret" = "never"))]
    pub forward_credential: Option<Spanned<bool>>,
}

/// `cache` of a provider of kind `forward`
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("required" = ["ttl"]))]
pub struct AuthCache {
    /// Values that form the cache key: all `request_headers`, and optionally `method`, `host`, `uri` (path and query)
    /// and `ip`. With a cache, the gateway sends only these values to the authentication server, so that its decision
    /// cannot depend on other values. Default: all of these values.
    pub by: Option<Spanned<Vec<Text>>>,
    /// Lifetime of a cached admission, at most 1h. The `Cache-Control` header of the authentication server's response
    /// may shorten this time or forbid caching.
    #[schemars(schema_with = "schema::duration")]
    pub ttl: Option<Text>,
    /// Maximum number of cached admissions. When this number is reached, the gateway evicts the least used admissions.
    #[schemars(range(min = 1, max = 1_000_000), extend("default" = 10000))]
    pub max_entries: Option<Spanned<i64>>,
}

/// `[tiers]`
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Tiers {
    /// Source of a request's tier. `"api-key"`: the `tier` of the consumer. `"jwt:CLAIM"`: a claim of the bearer token.
    /// `"auth:HEADER"`: one of the `response_headers` of an authentication server. If a limit has no tier with this
    /// value, the request gets the limit's default quota.
    #[schemars(schema_with = "schema::tier_source", extend("default" = "api-key"))]
    pub from: Option<Text>,
}

impl Auth {
    /// Return whether the provider has this `kind`.
    pub fn is_of_kind(&self, label: &str) -> bool {
        self.kind.as_ref().is_some_and(|kind| kind.get_ref() == label)
    }
}

/// `consumers.toml`
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Consumers {
    /// Consumers and the hashes of their API keys. Keys that are not in the file are unknown.
    pub consumer: Vec<Spanned<Consumer>>,
    /// Groups of consumers, such as teams, and groups of groups, such as organisations. Limits count by them with `by =
    /// "group:LEVEL"`.
    pub group: Vec<Spanned<ConsumerGroup>>,
}

/// `[[group]]`
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("required" = ["name", "level"]))]
pub struct ConsumerGroup {
    /// Name of the group, which is its identity in limits. Unique in the file.
    pub name: Option<Text>,
    /// Level of the group in the hierarchy, such as `"team"` or `"organisation"`. A limit with `by = "group:team"` counts
    /// by the groups of this level.
    pub level: Option<Text>,
    /// Name of the group to which this group belongs. Its level must be another one. Default: no parent.
    pub parent: Option<Text>,
}

/// `[[consumer]]`
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("required" = ["name"]))]
pub struct Consumer {
    /// Unique name of the consumer. All keys of the consumer have this name as their identity, so they share the
    /// consumer's quotas.
    pub name: Option<Text>,
    /// Name of the `[[group]]` to which the consumer belongs. It also belongs to the parents of this group. Default: no
    /// group.
    pub group: Option<Text>,
    /// Tier of the consumer. It selects the quota of each limit that has this tier in `tiers`. Default: no tier.
    pub tier: Option<Text>,
    /// API keys of the consumer. Each entry is a hash, or a table with the hash: `["sha256:…", { hash = "sha256:…",
    /// name = "ci" }]`. `sluicegate key new` creates a key. `printf %s KEY | sha256sum` computes the hash of an
    /// existing key.
    #[schemars(extend("secret" = "unless-hash"))]
    pub keys: Option<Vec<Spanned<ConsumerKey>>>,
    /// MCP tools that the consumer may call on routes with `mcp_tools`, in addition to the rules of the route: `{ allow =
    /// ["get_*"], deny = ["get_secret"] }`. Default: all tools that the route permits.
    pub mcp_tools: Option<Spanned<McpTools>>,
    /// Quotas of this consumer, by limit. They take precedence over the quotas of the consumer's tier: `limit.NAME = {
    /// quota = "900/min", burst = 50 }`.
    pub limit: BTreeMap<String, Spanned<LimitVariant>>,
}
