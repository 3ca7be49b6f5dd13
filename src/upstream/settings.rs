//! Compiled settings of upstreams (`[upstream.NAME]`).

use std::fmt;
use std::hash::Hasher;
use std::net::IpAddr;
use std::time::Duration;

use aws_lc_rs::digest::{SHA256, digest};
use http::uri::PathAndQuery;
use http::{HeaderName, HeaderValue, StatusCode};
use siphasher::sip::SipHasher24;

use crate::http::aws_signature::AwsSigner;
use crate::http::google_account::ServiceAccount;
use crate::http::memory_guard::SocketBuffers;
use crate::upstream::connector::{EndpointTls, Protocol};

/// Settings of one upstream (`[upstream.NAME]`).
#[derive(Debug, PartialEq)]
pub struct UpstreamSettings {
    /// Name of the upstream in the configuration.
    pub name: Box<str>,
    /// Servers of the upstream. The list is not empty.
    pub servers: Vec<UpstreamServerSettings>,
    /// Protocol of all servers.
    pub protocol: Protocol,
    /// The address families of names.
    pub resolve: AddressFamilies,
    /// `Host` of requests to the servers, for routes without `upstream_host`.
    pub host: HostPolicy,
    /// Maximum time until a connection to any endpoint is established, including the TLS handshake and attempts to
    /// connect to other endpoints. This is also the maximum time in the wait queue.
    pub connect_timeout: Duration,
    /// Maximum time to wait for the response headers after the request was sent.
    pub response_timeout: Duration,
    /// Connections that have been idle for longer than this time are not reused.
    pub pool_idle_timeout: Duration,
    /// Load balancing policy.
    pub balance: LoadBalancingPolicy,
    /// Maximum number of requests in flight per endpoint, from all workers. 0 disables the limit.
    pub max_requests: usize,
    /// Maximum number of requests that wait for a request permit of any endpoint.
    pub max_queue: usize,
    /// Health checks. `None` disables them.
    pub health: Option<HealthSettings>,
    /// Ejection after consecutive errors. `None` disables ejections.
    pub ejection: Option<EjectionSettings>,
    /// Time until a recovered or new endpoint has its full weight. Zero disables slow start.
    pub slow_start: Duration,
    /// Maximum number of retries on other endpoints, for requests that are safe to repeat.
    pub retries: u32,
    /// Whether each connection starts with a PROXY header, and carries the requests of only one client connection.
    pub proxy_protocol: bool,
    /// Whether requests contain the certificate of the client in `Client-Cert` (RFC 9440).
    pub client_cert_header: bool,
    /// Whether the servers of an LLM API accept that the gateway requests the usage of streams.
    pub includes_usage: bool,
    /// Signs the requests with keys of AWS.
    pub aws: Option<AwsSigner>,
    /// Sends the requests with access tokens of Google Cloud.
    pub google: Option<GoogleAccess>,
    /// Bounds of what the kernel buffers for a connection. `None` without a memory limit.
    pub socket_buffers: Option<SocketBuffers>,
}

/// A service account of Google Cloud, and how its tokens are fetched.
#[derive(Debug)]
pub struct GoogleAccess {
    /// The account, with its current token.
    pub account: ServiceAccount,
    /// TLS settings of the token endpoint. `None` for plaintext.
    pub tls: Option<EndpointTls>,
}

/// The account determines the TLS settings.
impl PartialEq for GoogleAccess {
    fn eq(&self, other: &Self) -> bool {
        self.account == other.account
    }
}

impl UpstreamSettings {
    /// Return whether any server has a host name that must be resolved.
    pub fn needs_dns(&self) -> bool {
        self.servers.iter().any(UpstreamServerSettings::needs_dns)
    }
}

/// The address families that the gateway looks up for a name (`resolve`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum AddressFamilies {
    /// IPv4 addresses (A records).
    Ipv4,
    /// IPv6 addresses (AAAA records).
    Ipv6,
    /// Addresses of both families.
    Both,
}

/// The `Host` that servers receive (`host` of an upstream, `upstream_host` of a route).
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HostPolicy {
    /// The host of the client's request.
    Client,
    /// The host and port in the URL of the server that receives the request.
    Server,
    /// This host.
    Name(HeaderValue),
}

/// Settings of one entry of `servers`.
#[derive(Debug, Clone, PartialEq)]
pub struct UpstreamServerSettings {
    /// Host and port as they are written in the configuration.
    pub authority: Box<str>,
    /// Host name or IP address.
    pub host: Box<str>,
    /// TCP port.
    pub port: u16,
    /// TLS settings. `None` for plaintext.
    pub tls: Option<EndpointTls>,
    /// Weight relative to the other servers. A server with weight 0 receives no requests.
    pub weight: u32,
    /// Whether `host` is the name of an SRV record, which contains the hosts and ports. `port` is then 0.
    pub is_srv: bool,
}

/// A target of an SRV record (RFC 2782).
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct SrvTarget {
    /// Host name without the trailing dot.
    pub host: Box<str>,
    /// TCP port.
    pub port: u16,
    /// Priority. Targets with a higher number receive requests only if no target with a lower number is usable.
    pub priority: u16,
    /// Weight relative to the other targets with the same priority.
    pub weight: u16,
}

impl SrvTarget {
    /// Return the share of the target among the targets with the same priority. A target with weight 0 receives few
    /// requests if other targets have a higher weight, as RFC 2782 requires, and otherwise as many as each of them.
    pub(super) fn share(&self) -> u64 {
        (u64::from(self.weight) * 100).max(1)
    }
}

impl UpstreamServerSettings {
    /// Return whether the host is a name that must be resolved.
    pub fn needs_dns(&self) -> bool {
        self.host.parse::<IpAddr>().is_err()
    }

    /// Return whether both servers have the same host and port, and both or neither use TLS.
    pub(crate) fn is_same_server(&self, other: &UpstreamServerSettings) -> bool {
        (&self.host, self.port, self.tls.is_some(), self.is_srv)
            == (&other.host, other.port, other.tls.is_some(), other.is_srv)
    }
}

/// Load balancing policy (`balance`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LoadBalancingPolicy {
    /// Draw two endpoints and take the endpoint with fewer requests in flight relative to its weight.
    LeastRequests,
    /// Take the endpoints in turn. The number of turns of an endpoint is proportional to its weight.
    RoundRobin,
    /// Draw a random endpoint. The probability of an endpoint is proportional to its weight.
    Random,
    /// Take the endpoint that owns the value of this header or cookie (rendezvous hashing).
    Hash(HashSource),
    /// Take the endpoint that the cookie of the request names, otherwise as `LeastRequests`.
    Sticky(StickyCookie),
}

/// The value of a request that selects an endpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HashSource {
    /// The first value of a header.
    Header(HeaderName),
    /// The value of a cookie.
    Cookie(Box<str>),
}

/// The cookie of `balance = "sticky"`. Its value is a keyed hash of the name of an endpoint, so that clients can
/// neither learn the name nor choose an endpoint.
#[derive(Clone, PartialEq, Eq)]
pub struct StickyCookie {
    /// Name of the cookie.
    pub name: Box<str>,
    /// Attributes of the cookie, from the first `;`.
    pub attributes: Box<str>,
    key: [u8; 16],
}

impl StickyCookie {
    /// Create the cookie of the upstream `upstream`. `secret` is `store.secret`.
    pub fn new(name: &str, attributes: &str, secret: &str, upstream: &str) -> Self {
        let digest = digest(&SHA256, format!("sticky cookie\0{upstream}\0{secret}").as_bytes());
        let mut key = [0; 16];
        key.copy_from_slice(&digest.as_ref()[..16]);
        StickyCookie { name: name.into(), attributes: attributes.into(), key }
    }

    /// Return the token of an endpoint.
    pub(super) fn token(&self, endpoint: &str) -> u64 {
        let mut hasher = SipHasher24::new_with_key(&self.key);
        hasher.write(endpoint.as_bytes());
        hasher.finish()
    }

    /// Parse the value of a cookie.
    pub(super) fn parse(value: &[u8]) -> Option<u64> {
        let digits = std::str::from_utf8(value).ok().filter(|digits| digits.len() == 16)?;
        u64::from_str_radix(digits, 16).ok()
    }

    /// Return the value of `Set-Cookie` for an endpoint.
    pub(super) fn set_cookie(&self, token: u64) -> Option<HeaderValue> {
        HeaderValue::try_from(format!("{}={token:016x}{}", self.name, self.attributes)).ok()
    }
}

impl fmt::Debug for StickyCookie {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StickyCookie").field("name", &self.name).finish_non_exhaustive()
    }
}

/// Settings of active health checks (`health_check`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HealthSettings {
    /// Path and query of the check request.
    pub path: PathAndQuery,
    /// Statuses of a healthy server.
    pub expected_statuses: Vec<StatusCode>,
    /// Mean time between two checks of an endpoint. The actual time differs randomly by up to 10 %.
    pub interval: Duration,
    /// Maximum duration of a check, including the time to connect.
    pub timeout: Duration,
    /// Number of consecutive failed checks after which an endpoint becomes unhealthy.
    pub unhealthy_after: u32,
    /// Number of consecutive passed checks after which an endpoint becomes healthy.
    pub healthy_after: u32,
}

/// Settings of ejections (`outlier_detection`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EjectionSettings {
    /// Number of consecutive errors after which an endpoint is ejected.
    pub consecutive_errors: u32,
    /// Duration of the first ejection. The n-th consecutive ejection lasts n times as long, but at most ten times as
    /// long.
    pub base_ejection_time: Duration,
}
