//! `[upstream.NAME]` ready to use.

use std::net::IpAddr;

use tokio::time::Duration;

use super::Protocol;
use super::balance::LoadBalancingPolicy;
use super::condition::EjectionSettings;
use super::health::HealthSettings;
use super::tls::EndpointTls;

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
    pub(super) fn needs_dns(&self) -> bool {
        self.host.parse::<IpAddr>().is_err()
    }

    /// Whether both are the same server.
    pub(super) fn is_same_server(&self, other: &UpstreamServerSettings) -> bool {
        (&self.host, self.port, self.tls.is_some()) == (&other.host, other.port, other.tls.is_some())
    }
}
