//! Upstreams: endpoint selection, connections, and the exchange of a request and its response.

pub mod cluster;
mod connection_pool;
pub mod connector;
pub mod dns;
pub mod endpoint;
pub mod fetch;
pub mod health;
pub mod retry;

use std::error::Error;
use std::fmt;
use std::fmt::Display;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::{ArcSwap, Guard};
use tokio::time::timeout;

use crate::http::body_limits::{BodyError, NetworkShare};
use crate::upstream::cluster::UpstreamCluster;
use crate::upstream::connection_pool::EndpointPool;
use crate::upstream::connector::{EndpointTls, ProxiedConnection};
use crate::upstream::endpoint::{Endpoint, LoadBalancer, LoadBalancingPolicy, RequestPermit, Rng};
use crate::upstream::health::{EjectionSettings, HealthSettings};

/// `Retry-After` if no endpoint has an address yet and the upstream has no health checks.
const UNRESOLVED_RETRY: Duration = Duration::from_secs(1);

/// Protocol that the gateway uses for an upstream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Protocol {
    /// HTTP/1.1: one request at a time per connection.
    Http1,
    /// HTTP/2: with prior knowledge over plaintext, or negotiated by ALPN over TLS. The requests that a worker sends to
    /// an endpoint share a few connections.
    Http2,
}

/// Error of a request for which the gateway received no valid response from an upstream.
#[derive(Debug, thiserror::Error)]
pub enum UpstreamError {
    /// No endpoint is healthy enough to receive requests.
    #[error("upstream `{upstream}` has no healthy server")]
    NoHealthyEndpoint {
        /// Name of the upstream.
        upstream: Box<str>,
        /// Time after which the client should retry.
        retry_after: Duration,
    },
    /// All endpoints have `max_requests` in flight, and the queue is full or the wait in the queue timed out.
    #[error("all servers of upstream `{upstream}` are at `max_requests`")]
    Overflow {
        /// Name of the upstream.
        upstream: Box<str>,
    },
    /// The client network has too many unfinished uploads to an upstream with `max_requests`.
    #[error("the client network has too many unfinished uploads to upstream `{upstream}`, which has `max_requests`")]
    TooManyUploads {
        /// Name of the upstream.
        upstream: Box<str>,
    },
    /// Connecting failed for all endpoints that were tried.
    #[error("connecting to upstream `{upstream}` failed: {source}")]
    Connect {
        /// Name of the upstream.
        upstream: Box<str>,
        /// Error of the last attempt.
        source: std::io::Error,
    },
    /// No connection was established within `connect_timeout`.
    #[error("connecting to upstream `{upstream}` timed out")]
    ConnectTimeout {
        /// Name of the upstream.
        upstream: Box<str>,
    },
    /// The connection or the stream ended before the response headers.
    #[error("request to upstream `{upstream}` failed: {}", RootCause(source))]
    Reset {
        /// Name of the upstream.
        upstream: Box<str>,
        /// The error that hyper reported.
        source: hyper::Error,
    },
    /// The response of the upstream is malformed.
    #[error("invalid response from upstream `{upstream}`: {fault}")]
    InvalidResponse {
        /// Name of the upstream.
        upstream: Box<str>,
        /// The fault in the response.
        fault: &'static str,
    },
    /// The upstream responded with 101, although the request did not offer this upgrade.
    #[error("upstream `{upstream}` switched to a protocol that was not requested")]
    UnexpectedUpgrade {
        /// Name of the upstream.
        upstream: Box<str>,
    },
    /// The response headers did not arrive within `response_timeout`.
    #[error("upstream `{upstream}` did not respond within `response_timeout`")]
    ResponseTimeout {
        /// Name of the upstream.
        upstream: Box<str>,
    },
    /// The response headers did not arrive within the `timeout` of the route.
    #[error("upstream `{upstream}` did not respond within the `timeout` of the route")]
    RouteTimeout {
        /// Name of the upstream.
        upstream: Box<str>,
    },
    /// The client sent the request body too slowly, or stopped sending it.
    #[error("the client stopped sending the request body")]
    ClientTimeout,
    /// The request body exceeds the maximum of the route.
    #[error("the request body is longer than the route allows")]
    BodyTooLarge,
    /// The client aborted the request body.
    #[error("the client aborted the request body: {0}")]
    ClientAborted(Box<dyn Error + Send + Sync>),
}

impl From<BodyError> for UpstreamError {
    /// Convert an error that occurred while the request body was read before the request was sent to an upstream.
    fn from(error: BodyError) -> Self {
        match error {
            BodyError::TooLarge => UpstreamError::BodyTooLarge,
            BodyError::Aborted(_) | BodyError::MalformedTrailers => UpstreamError::ClientAborted(error.into()),
            BodyError::ClientTimeout | BodyError::UpstreamIdleTimeout | BodyError::RouteTimeout => {
                UpstreamError::ClientTimeout
            }
        }
    }
}

impl UpstreamError {
    /// Return whether the upstream has sent a response that cannot be used.
    pub fn is_invalid_response(&self) -> bool {
        match self {
            UpstreamError::InvalidResponse { .. } | UpstreamError::UnexpectedUpgrade { .. } => true,
            UpstreamError::Reset { source, .. } => is_protocol_error(source),
            _ => false,
        }
    }

    /// Return whether the client caused the error.
    pub fn is_client_error(&self) -> bool {
        matches!(self, UpstreamError::ClientTimeout | UpstreamError::BodyTooLarge | UpstreamError::ClientAborted(_))
    }
}

/// Return whether the upstream violated HTTP: hyper cannot parse its response, or h2 rejects its frames.
pub fn is_protocol_error(error: &hyper::Error) -> bool {
    let frames = error.source().and_then(|cause| cause.downcast_ref::<h2::Error>());
    error.is_parse() || frames.is_some_and(h2::Error::is_library)
}

/// Formats a `hyper::Error` with its innermost cause.
struct RootCause<'a>(&'a hyper::Error);

impl Display for RootCause<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let RootCause(error) = self;
        write!(f, "{error}")?;
        let mut root = error.source();
        while let Some(deeper) = root.and_then(Error::source) {
            root = Some(deeper);
        }
        if let Some(root) = root {
            write!(f, ": {root}")?;
        }
        if error.is_parse() {
            // A TLS server responds to a plaintext request with a TLS alert, which hyper cannot parse.
            write!(f, "; if the server speaks TLS, use https://")?;
        }
        Ok(())
    }
}

/// An upstream as one worker uses it: the cluster, which all workers share, and the connection pools of the worker.
#[derive(Debug)]
pub struct Upstream {
    cluster: Arc<UpstreamCluster>,
    pools: ArcSwap<EndpointPools>,
    rng: Rng,
}

/// Connection pools for the endpoints of one load balancer.
#[derive(Debug)]
struct EndpointPools {
    load_balancer: Arc<LoadBalancer>,
    /// Version of the cluster for which the pools were built.
    version: u64,
    /// One pool per endpoint, in the order of `load_balancer.endpoints`.
    pools: Vec<Arc<EndpointPool>>,
}

/// State of the endpoint selection of one request.
struct PickState {
    /// Hash of the header that selects the endpoint, for [`LoadBalancingPolicy::Hash`].
    hash_key: Option<u64>,
    /// Endpoints that this request has tried.
    tried: Vec<Arc<Endpoint>>,
    /// Connection of the client, if the gateway sends PROXY headers to the endpoints. The value is boxed, because only
    /// few upstreams need it.
    client: Option<Box<ProxiedConnection>>,
}

impl Upstream {
    /// Create an upstream without connections.
    pub fn new(cluster: Arc<UpstreamCluster>) -> Self {
        Upstream::with_pools(cluster, &[])
    }

    /// Create an upstream. For endpoints that have a pool in `known`, take over this pool.
    fn with_pools(cluster: Arc<UpstreamCluster>, known: &[Arc<EndpointPool>]) -> Self {
        let pools = ArcSwap::from_pointee(EndpointPools::new(&cluster, cluster.version(), known));
        Upstream { cluster, pools, rng: Rng::from_random_seed() }
    }

    /// Return whether this upstream belongs to `cluster`.
    pub fn is_for(&self, cluster: &Arc<UpstreamCluster>) -> bool {
        Arc::ptr_eq(&self.cluster, cluster)
    }

    /// Return the name of the upstream.
    pub fn name(&self) -> &str {
        &self.cluster.settings.name
    }

    /// Return the protocol of the upstream.
    pub fn protocol(&self) -> Protocol {
        self.cluster.settings.protocol
    }

    /// Return the maximum time to wait for the response headers.
    pub fn response_timeout(&self) -> Duration {
        self.cluster.settings.response_timeout
    }

    /// Return the maximum number of requests in flight per server. 0 means that there is no limit.
    pub fn max_requests(&self) -> usize {
        self.cluster.settings.max_requests
    }

    /// Count an upload of a client network. One network may have as many unfinished uploads as half of the requests
    /// that one server may have in flight, so that slow uploads of one client do not delay others.
    ///
    /// # Errors
    /// [`UpstreamError::TooManyUploads`] if the network has reached this number.
    pub fn start_upload(&self, network: IpAddr) -> Result<NetworkShare, UpstreamError> {
        let share = self.cluster.uploads.start_upload(network, self.max_requests().div_ceil(2));
        share.ok_or_else(|| UpstreamError::TooManyUploads { upstream: self.name().into() })
    }

    /// Return whether connections start with a PROXY header.
    pub fn sends_proxy_header(&self) -> bool {
        self.cluster.settings.proxy_protocol
    }

    /// Return whether requests contain the certificate of the client.
    pub fn sends_client_cert(&self) -> bool {
        self.cluster.settings.client_cert_header
    }

    /// Return host and port of the first server. The gateway sends this value as `Host` if a request has no host.
    pub fn authority(&self) -> &str {
        &self.cluster.settings.servers[0].authority
    }

    /// Return the pools of the current endpoints. If the cluster has changed, rebuild the list of pools, but keep the
    /// pools of endpoints that still exist.
    fn pools(&self) -> Guard<Arc<EndpointPools>> {
        let version = self.cluster.version();
        let pools = self.pools.load();
        if pools.version == version {
            return pools;
        }
        self.pools.store(Arc::new(EndpointPools::new(&self.cluster, version, &pools.pools)));
        self.pools.load()
    }

    /// Pick an endpoint and acquire a request permit. Return `None` if no endpoint is usable, or if all usable
    /// endpoints have `max_requests` in flight.
    fn pick(&self, key: Option<u64>, tried: &[Arc<Endpoint>]) -> Option<(Arc<EndpointPool>, RequestPermit)> {
        let pools = self.pools();
        let (index, permit) = self.cluster.pick(&pools.load_balancer, key, &self.rng, tried)?;
        Some((pools.pools[index].clone(), permit))
    }

    /// Wait in the queue for a request permit, at most `connect_timeout`.
    ///
    /// # Errors
    /// [`UpstreamError::NoHealthyEndpoint`] if no endpoint is usable; [`UpstreamError::Overflow`] if the queue is full
    /// or the wait timed out.
    async fn pick_queued(&self, key: Option<u64>) -> Result<(Arc<EndpointPool>, RequestPermit), UpstreamError> {
        let settings = &self.cluster.settings;
        let busy = || UpstreamError::Overflow { upstream: settings.name.clone() };
        if self.pools().load_balancer.usable.is_empty() {
            let after = settings.health.as_ref().map_or(UNRESOLVED_RETRY, |health| health.interval);
            return Err(UpstreamError::NoHealthyEndpoint { upstream: settings.name.clone(), retry_after: after });
        }
        let mut waiting = self.cluster.queue.enqueue().ok_or_else(busy)?;
        if waiting.is_first {
            // A permit may have been released just before this request joined the empty queue, so that no waiter got
            // it. Acquire a permit and drop it: `Endpoint::release` passes it to the first waiter.
            self.pick(key, &[]);
        }
        let permit = timeout(settings.connect_timeout, waiting.ready()).await.ok().flatten().ok_or_else(busy)?;
        let pool = self.pools().pools.iter().find(|pool| pool.is_for(permit.endpoint())).cloned();
        Ok((pool.unwrap_or_else(|| Arc::new(EndpointPool::new(settings, permit.endpoint().clone()))), permit))
    }
}

impl EndpointPools {
    /// Create the pools for the current load balancer of the cluster. It may be newer than `version`, because the
    /// caller has read `version` earlier. Reuse the pools in `known`.
    fn new(cluster: &UpstreamCluster, version: u64, known: &[Arc<EndpointPool>]) -> Self {
        let table = Guard::into_inner(cluster.load_balancer());
        let pool = |endpoint: &Arc<Endpoint>| {
            let known = known.iter().find(|pool| pool.is_for(endpoint)).cloned();
            known.unwrap_or_else(|| Arc::new(EndpointPool::new(&cluster.settings, endpoint.clone())))
        };
        EndpointPools { pools: table.endpoints.iter().map(pool).collect(), load_balancer: table, version }
    }
}

// Compiled `[upstream.NAME]`.

/// Settings of one upstream (`[upstream.NAME]`).
#[derive(Debug, PartialEq)]
pub struct UpstreamSettings {
    /// Name of the upstream in the configuration.
    pub name: Box<str>,
    /// Servers of the upstream. The list is not empty.
    pub servers: Vec<UpstreamServerSettings>,
    /// Protocol of all servers.
    pub protocol: Protocol,
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
}

impl UpstreamSettings {
    /// Return whether any server has a host name that must be resolved.
    pub fn needs_dns(&self) -> bool {
        self.servers.iter().any(UpstreamServerSettings::needs_dns)
    }
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
}

impl UpstreamServerSettings {
    /// Return whether the host is a name that must be resolved.
    pub(crate) fn needs_dns(&self) -> bool {
        self.host.parse::<IpAddr>().is_err()
    }

    /// Return whether both servers have the same host and port, and both or neither use TLS.
    pub(crate) fn is_same_server(&self, other: &UpstreamServerSettings) -> bool {
        (&self.host, self.port, self.tls.is_some()) == (&other.host, other.port, other.tls.is_some())
    }
}
