//! Upstreams: sends a request on and hands its answer back.

pub mod cluster;
pub mod connector;
pub mod dns;
pub mod endpoint;
mod endpoint_pool;
pub mod health;
mod http1;
mod http2;
mod lazy_timer;
pub mod load_balancer;
mod pending_queue;
pub mod retry;

use std::error::Error;
use std::fmt;
use std::fmt::Display;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::{ArcSwap, Guard};
use tokio::time::timeout;

use crate::http::body_limits::BodyError;
use crate::upstream::cluster::UpstreamCluster;
use crate::upstream::connector::EndpointTls;
use crate::upstream::endpoint::Endpoint;
use crate::upstream::endpoint_pool::EndpointPool;
use crate::upstream::health::{EjectionSettings, HealthSettings};
use crate::upstream::load_balancer::{LoadBalancer, LoadBalancingPolicy, Rng};
use crate::upstream::pending_queue::RequestPermit;

/// When to ask again for an upstream whose servers have no addresses.
const UNRESOLVED_RETRY: Duration = Duration::from_secs(1);

/// What is spoken with an upstream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Protocol {
    /// HTTP/1.1, a connection for each request at a time.
    Http1,
    /// HTTP/2 by prior knowledge, with TLS by ALPN; one connection for all.
    Http2,
}

/// Why an upstream gave no answer.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum UpstreamError {
    #[error("upstream `{upstream}` has no healthy server")]
    NoHealthyEndpoint { upstream: Box<str>, retry_after: Duration },
    #[error("all servers of upstream `{upstream}` have as many requests as they may")]
    Overflow { upstream: Box<str> },
    #[error("connecting to upstream `{upstream}` failed: {source}")]
    Connect { upstream: Box<str>, source: std::io::Error },
    #[error("connecting to upstream `{upstream}` took too long")]
    ConnectTimeout { upstream: Box<str> },
    #[error("upstream `{upstream}` broke off: {}", RootCause(source))]
    Reset { upstream: Box<str>, source: hyper::Error },
    #[error("upstream `{upstream}` sent no valid response: {fault}")]
    InvalidResponse { upstream: Box<str>, fault: &'static str },
    #[error("upstream `{upstream}` switched to a protocol that it was not asked for")]
    UnexpectedUpgrade { upstream: Box<str> },
    #[error("upstream `{upstream}` did not answer in time")]
    ResponseTimeout { upstream: Box<str> },
    #[error("upstream `{upstream}` did not answer before the timeout of the route was over")]
    RouteTimeout { upstream: Box<str> },
    #[error("the client stopped sending the request body")]
    ClientTimeout,
    #[error("the request body is longer than the route allows")]
    BodyTooLarge,
    #[error("the client broke off the request body: {0}")]
    ClientAborted(Box<dyn Error + Send + Sync>),
}

impl From<BodyError> for UpstreamError {
    /// A request body did not come as it should, before any upstream had to do with it.
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
    /// Whether the upstream has nothing to do with it.
    pub fn is_client_error(&self) -> bool {
        matches!(self, UpstreamError::ClientTimeout | UpstreamError::BodyTooLarge | UpstreamError::ClientAborted(_))
    }
}

/// What hyper says of a failure, and what was behind it.
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
            // What answers to plain text, then, is an alert.
            write!(f, "; a server that speaks TLS is written https://")?;
        }
        Ok(())
    }
}

/// One worker's way to an upstream.
#[derive(Debug)]
pub struct Upstream {
    cluster: Arc<UpstreamCluster>,
    pools: ArcSwap<EndpointPools>,
    rng: Rng,
}

/// The ways to the members of a fleet.
#[derive(Debug)]
struct EndpointPools {
    load_balancer: Arc<LoadBalancer>,
    /// By which the fleet tells that table from others.
    version: u64,
    /// To each of its members, in their order.
    pools: Vec<Arc<EndpointPool>>,
}

/// What the members for a request are chosen by.
struct PickState {
    /// The hash of the header that decides, if one does.
    hash_key: Option<u64>,
    /// Those that will not do.
    tried: Vec<Arc<Endpoint>>,
}

impl Upstream {
    /// Without connections yet.
    pub fn new(cluster: Arc<UpstreamCluster>) -> Self {
        Upstream::with_pools(cluster, &[])
    }

    /// With these ways to its members.
    fn with_pools(cluster: Arc<UpstreamCluster>, known: &[Arc<EndpointPool>]) -> Self {
        let pools = ArcSwap::from_pointee(EndpointPools::new(&cluster, cluster.version(), known));
        Upstream { cluster, pools, rng: Rng::from_random_seed() }
    }

    /// Whether it leads there.
    pub fn is_for(&self, cluster: &Arc<UpstreamCluster>) -> bool {
        Arc::ptr_eq(&self.cluster, cluster)
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.cluster.settings.name
    }

    /// What it speaks.
    pub fn protocol(&self) -> Protocol {
        self.cluster.settings.protocol
    }

    /// Host and port, for requests that name no host.
    pub fn authority(&self) -> &str {
        &self.cluster.settings.servers[0].authority
    }

    /// To the members that there are now; connections to those that were there before stay.
    fn pools(&self) -> Guard<Arc<EndpointPools>> {
        let version = self.cluster.version();
        let pools = self.pools.load();
        if pools.version == version {
            return pools;
        }
        self.pools.store(Arc::new(EndpointPools::new(&self.cluster, version, &pools.pools)));
        self.pools.load()
    }

    /// A place at the member whose turn it is, and the way there; none if there is no room.
    fn pick(&self, key: Option<u64>, tried: &[Arc<Endpoint>]) -> Option<(Arc<EndpointPool>, RequestPermit)> {
        let pools = self.pools();
        let (index, permit) = self.cluster.pick(&pools.load_balancer, key, &self.rng, tried)?;
        Some((pools.pools[index].clone(), permit))
    }

    /// A place as soon as there is one.
    async fn pick_queued(&self, key: Option<u64>) -> Result<(Arc<EndpointPool>, RequestPermit), UpstreamError> {
        let settings = &self.cluster.settings;
        let busy = || UpstreamError::Overflow { upstream: settings.name.clone() };
        if self.pools().load_balancer.usable.is_empty() {
            let after = settings.health.as_ref().map_or(UNRESOLVED_RETRY, |health| health.interval);
            return Err(UpstreamError::NoHealthyEndpoint { upstream: settings.name.clone(), retry_after: after });
        }
        let mut waiting = self.cluster.queue.enqueue().ok_or_else(busy)?;
        if waiting.is_first {
            // A place may have become free before anybody could know that somebody waits for it.
            self.pick(key, &[]);
        }
        let permit = timeout(settings.connect_timeout, waiting.ready()).await.ok().flatten().ok_or_else(busy)?;
        let pool = self.pools().pools.iter().find(|pool| pool.is_for(permit.endpoint())).cloned();
        Ok((pool.unwrap_or_else(|| Arc::new(EndpointPool::new(settings, permit.endpoint().clone()))), permit))
    }
}

impl EndpointPools {
    /// Those of a fleet at this change of it or a later one, with what is known.
    fn new(cluster: &UpstreamCluster, version: u64, known: &[Arc<EndpointPool>]) -> Self {
        let table = Guard::into_inner(cluster.load_balancer());
        let pool = |endpoint: &Arc<Endpoint>| {
            let known = known.iter().find(|pool| pool.is_for(endpoint)).cloned();
            known.unwrap_or_else(|| Arc::new(EndpointPool::new(&cluster.settings, endpoint.clone())))
        };
        EndpointPools { pools: table.endpoints.iter().map(pool).collect(), load_balancer: table, version }
    }
}

// `[upstream.NAME]` ready to use.

/// `[upstream.NAME]`
#[derive(Debug, PartialEq)]
pub struct UpstreamSettings {
    /// The name that the configuration gives it.
    pub name: Box<str>,
    /// Where it listens; not empty.
    pub servers: Vec<UpstreamServerSettings>,
    /// What is spoken there.
    pub protocol: Protocol,
    /// Bound of connecting, TLS included.
    pub connect_timeout: Duration,
    /// Bound of waiting for the response head once the request is sent.
    pub response_timeout: Duration,
    /// Idle connections older than this are not used again.
    pub pool_idle_timeout: Duration,
    /// Who is asked.
    pub balance: LoadBalancingPolicy,
    /// Requests in flight at each member; 0 = as many as come.
    pub max_requests: usize,
    /// Requests that wait for a place at a member.
    pub max_queue: usize,
    /// How members are checked; none = they are not.
    pub health: Option<HealthSettings>,
    /// When errors put a member out; none = never.
    pub ejection: Option<EjectionSettings>,
    /// Time in which a member that is back gets its whole weight.
    pub slow_start: Duration,
    /// Further attempts of a request that broke off and may be repeated.
    pub retries: u32,
}

impl UpstreamSettings {
    /// Whether the address of a server has to be looked up.
    pub fn needs_dns(&self) -> bool {
        self.servers.iter().any(UpstreamServerSettings::needs_dns)
    }
}

/// One of its `servers`
#[derive(Debug, Clone, PartialEq)]
pub struct UpstreamServerSettings {
    /// Host and port as the configuration writes them.
    pub authority: Box<str>,
    /// Host name or address.
    pub host: Box<str>,
    /// Port.
    pub port: u16,
    /// With TLS; none = clear text.
    pub tls: Option<EndpointTls>,
    /// Its share of the requests, beside those of the others; 0 = none.
    pub weight: u32,
}

impl UpstreamServerSettings {
    /// Whether its address has to be looked up.
    pub(crate) fn needs_dns(&self) -> bool {
        self.host.parse::<IpAddr>().is_err()
    }

    /// Whether both are the same server.
    pub(crate) fn is_same_server(&self, other: &UpstreamServerSettings) -> bool {
        (&self.host, self.port, self.tls.is_some()) == (&other.host, other.port, other.tls.is_some())
    }
}
