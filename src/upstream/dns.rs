//! DNS resolution of upstream hosts. The gateway repeats the lookup of a host when its TTL expires.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::Duration;

use hickory_resolver::config::{LookupIpStrategy, ResolveHosts, ResolverConfig, ResolverOpts};
use hickory_resolver::net::runtime::TokioRuntimeProvider;
use hickory_resolver::net::{DnsError, NetError};
use hickory_resolver::proto::op::{Query, ResponseCode};
use hickory_resolver::proto::rr::{Name, RecordType};
use hickory_resolver::system_conf::read_system_conf;
use hickory_resolver::{Hosts, Resolver, TokioResolver};
use tokio::task::JoinSet;
use tokio::time::sleep;
use tracing::{debug, info, warn};
use uuid::Uuid;

use crate::upstream::cluster::UpstreamCluster;

/// Minimum time between lookups of a host. This is also the delay after the first failed lookup.
const MIN_TTL: Duration = Duration::from_secs(1);

/// Maximum time between lookups of a host, even if the TTL is longer.
const MAX_TTL: Duration = Duration::from_secs(300);

/// Maximum delay after a failed lookup. The delay starts at `MIN_TTL` and doubles with each consecutive failure.
const MAX_RETRY_DELAY: Duration = Duration::from_secs(30);

/// The host names of all upstream clusters, with their addresses.
#[derive(Debug)]
pub struct DnsCache(Vec<HostEntry>);

/// A host and its addresses.
#[derive(Debug)]
struct HostEntry {
    host: Box<str>,
    /// Servers that have this host.
    servers: Vec<ServerRef>,
    /// Last known addresses, sorted.
    addresses: Vec<IpAddr>,
    /// Number of consecutive failed lookups.
    consecutive_failures: u32,
    /// Error that was last logged. `None` after a successful lookup.
    last_error: Option<ResolveError>,
}

#[derive(Debug)]
struct ServerRef {
    cluster: Arc<UpstreamCluster>,
    server_index: usize,
    port: u16,
}

impl DnsCache {
    /// Collect the hosts of all clusters, each host once. Until the first lookup, the servers of a host use the
    /// addresses that the clusters have carried over from the previous configuration. Servers of new hosts have no
    /// address.
    pub fn new(clusters: &[Arc<UpstreamCluster>]) -> Self {
        let mut names = BTreeMap::<Box<str>, Vec<ServerRef>>::new();
        for cluster in clusters {
            for (index, server) in cluster.settings.servers.iter().enumerate() {
                if server.needs_dns() {
                    let server = ServerRef { cluster: cluster.clone(), server_index: index, port: server.port };
                    names
                        .entry(cluster.settings.servers[index].host.to_ascii_lowercase().into())
                        .or_default()
                        .push(server);
                }
            }
        }
        let name = |(host, servers): (_, Vec<_>)| {
            let name = HostEntry {
                host,
                addresses: known_addresses(&servers),
                servers,
                consecutive_failures: 0,
                last_error: None,
            };
            name.update_clusters();
            name
        };
        DnsCache(names.into_iter().map(name).collect())
    }

    /// Return whether there is nothing to resolve, because no upstream has a host name.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Resolve the hosts until the future is dropped. Each host holds a clone of `first` until its first lookup ends,
    /// so the channel closes when all hosts have been looked up once.
    pub async fn run(self, resolver: DnsResolver, first: Sender<Infallible>) {
        let mut tasks = JoinSet::new();
        for name in self.0 {
            tasks.spawn(name.run(resolver.clone(), first.clone()));
        }
        drop(first);
        tasks.join_all().await;
    }
}

/// Return the sorted addresses that the clusters have stored for these servers.
fn known_addresses(servers: &[ServerRef]) -> Vec<IpAddr> {
    let found = servers.iter().map(|server| server.cluster.addresses(server.server_index));
    let mut addresses = found.max_by_key(Vec::len).unwrap_or_default();
    addresses.sort_unstable();
    addresses
}

impl HostEntry {
    async fn run(mut self, resolver: DnsResolver, first: Sender<Infallible>) {
        let mut first = Some(first);
        loop {
            let wait = match resolver.lookup(&self.host, &self.addresses).await {
                Ok(resolved) => self.record_answer(resolved),
                Err(reason) => self.record_failure(reason),
            };
            drop(first.take());
            // Add a jitter of up to 10 %, so that gateways that start together do not make their lookups at the same
            // time.
            let jitter = wait.mul_f64(Uuid::new_v4().as_u128() as u8 as f64 / 2560.0);
            sleep(wait + jitter).await;
        }
    }

    /// Store the addresses of a successful lookup. Return the time until the next lookup.
    fn record_answer(&mut self, mut resolved: ResolvedAddresses) -> Duration {
        resolved.addresses.sort_unstable();
        resolved.addresses.dedup();
        let host = &self.host;
        let was_failing = self.last_error.take().is_some();
        if self.addresses != resolved.addresses {
            if self.addresses.is_empty() && !was_failing {
                debug!(%host, addresses = ?resolved.addresses, "resolved host");
            } else {
                info!(%host, addresses = ?resolved.addresses, "resolved host to new addresses");
            }
            self.addresses = resolved.addresses;
            self.update_clusters();
        } else if was_failing {
            info!(%host, "resolved host; its addresses are unchanged");
        }
        self.consecutive_failures = 0;
        resolved.ttl.clamp(MIN_TTL, MAX_TTL)
    }

    /// Set the addresses in all clusters that have servers with this host.
    fn update_clusters(&self) {
        for ServerRef { cluster: fleet, server_index: index, port } in &self.servers {
            let addresses = self.addresses.iter().map(|address| SocketAddr::new(*address, *port));
            fleet.set_addresses(*index, &addresses.collect::<Vec<_>>());
        }
    }

    /// Record a failed lookup. The addresses do not change. Return the time until the next lookup.
    fn record_failure(&mut self, reason: ResolveError) -> Duration {
        if self.last_error.as_ref() != Some(&reason) {
            let host = &self.host;
            let upstreams: Vec<_> = self.servers.iter().map(|server| &*server.cluster.settings.name).collect();
            let upstreams = upstreams.join(", ");
            if self.addresses.is_empty() {
                warn!(%host, %upstreams, error = %reason, "cannot resolve host; the host has no address yet");
            } else {
                warn!(%host, %upstreams, error = %reason, "cannot resolve host; using its last addresses");
            }
            self.last_error = Some(reason);
        }
        let wait = MIN_TTL * 2_u32.saturating_pow(self.consecutive_failures.min(16));
        self.consecutive_failures += 1;
        wait.min(MAX_RETRY_DELAY)
    }
}

// Lookup in the hosts file and in DNS.

/// TTL of entries from the hosts file, which does not contain TTLs. The TTL is short, because reading the file costs
/// little.
const HOSTS_TTL: Duration = Duration::from_secs(5);

/// Source of the addresses of hosts.
#[derive(Debug, Clone)]
pub enum DnsResolver {
    /// The addresses come from /etc/hosts and the name servers in /etc/resolv.conf. Both files are read for each
    /// lookup.
    System,
    /// The addresses come only from these name servers. Tests use this variant.
    Servers(Box<ResolverConfig>, Box<ResolverOpts>),
}

/// Addresses of a host.
#[derive(Debug)]
pub(crate) struct ResolvedAddresses {
    pub(crate) addresses: Vec<IpAddr>,
    /// Time for which the addresses may be cached.
    pub(crate) ttl: Duration,
}

/// Reason why a lookup failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ResolveError {
    #[error("the name does not exist (NXDOMAIN)")]
    NxDomain,
    #[error("the name has no A or AAAA record")]
    NoRecords,
    #[error("no name server responded in time; check /etc/resolv.conf")]
    Timeout,
    #[error("the name server returned an error ({0})")]
    ErrorResponse(ResponseCode),
    #[error("{0}")]
    Other(String),
}

impl DnsResolver {
    /// Resolve a host. `known` contains its last known addresses. If only the lookup of one address family fails, also
    /// return the known addresses of this family.
    pub(crate) async fn lookup(&self, host: &str, known: &[IpAddr]) -> Result<ResolvedAddresses, ResolveError> {
        let (config, options) = match self {
            DnsResolver::System => {
                if let Some(addresses) = lookup_hosts_file(host) {
                    return Ok(ResolvedAddresses { addresses, ttl: HOSTS_TTL });
                }
                let (mut config, options) = read_system_conf()?;
                // Remove the local domain if there is a `search` list, which overrides it (resolv.conf(5)).
                config.domain = config.domain.filter(|_| config.search.is_empty());
                (config, options)
            }
            DnsResolver::Servers(config, options) => ((**config).clone(), (**options).clone()),
        };
        let resolver = build_resolver(config, options)?;
        let found = resolver.lookup_ip(host).await?;
        let found = found.as_lookup();
        let mut addresses: Vec<_> = found.answers().iter().filter_map(|record| record.data.ip_addr()).collect();
        let ttl = found.answers().iter().map(|record| record.ttl).min().unwrap_or(0);
        for (record_type, is_v6) in [(RecordType::A, false), (RecordType::AAAA, true)] {
            let of_family = |address: &&IpAddr| address.is_ipv6() == is_v6;
            let lost = known.iter().any(|address| of_family(&address)) && !addresses.iter().any(|a| of_family(&a));
            // hickory succeeds if the lookup of one address family succeeds. Query the missing family again, to find
            // out whether its lookup failed.
            if lost
                && resolver
                    .lookup(found.query().name().clone(), record_type)
                    .await
                    .is_err_and(|error| is_failure(&error))
            {
                addresses.extend(known.iter().filter(of_family));
            }
        }
        match addresses.is_empty() {
            true => Err(ResolveError::NoRecords),
            false => Ok(ResolvedAddresses { addresses, ttl: Duration::from_secs(ttl.into()) }),
        }
    }
}

/// Look up a host in /etc/hosts. As in getaddrinfo, a host that is found there is not queried in DNS.
fn lookup_hosts_file(host: &str) -> Option<Vec<IpAddr>> {
    let hosts = Hosts::from_system().ok()?;
    let name = Name::from_utf8(host).ok()?;
    let found = [RecordType::A, RecordType::AAAA].map(|record_type| Query::query(name.clone(), record_type));
    let found = found.iter().filter_map(|query| hosts.lookup_static_host(query));
    let addresses: Vec<_> = found
        .flat_map(|found| found.answers().iter().filter_map(|record| record.data.ip_addr()).collect::<Vec<_>>())
        .collect();
    (!addresses.is_empty()).then_some(addresses)
}

fn build_resolver(config: ResolverConfig, options: ResolverOpts) -> Result<TokioResolver, NetError> {
    let mut builder = Resolver::builder_with_config(config, TokioRuntimeProvider::default()).with_options(options);
    let options = builder.options_mut();
    options.ip_strategy = LookupIpStrategy::Ipv4AndIpv6;
    options.use_hosts_file = ResolveHosts::Never;
    builder.build()
}

/// Return whether the lookup failed. A response without addresses is not a failure.
fn is_failure(error: &NetError) -> bool {
    !matches!(ResolveError::from(error.clone()), ResolveError::NxDomain | ResolveError::NoRecords)
}

impl From<NetError> for ResolveError {
    fn from(error: NetError) -> Self {
        match &error {
            NetError::Timeout => ResolveError::Timeout,
            NetError::Dns(DnsError::ResponseCode(code)) => ResolveError::ErrorResponse(*code),
            NetError::Dns(DnsError::NoRecordsFound(none)) => match none.response_code {
                ResponseCode::NXDomain => ResolveError::NxDomain,
                ResponseCode::NoError => ResolveError::NoRecords,
                code => ResolveError::ErrorResponse(code),
            },
            _ => ResolveError::Other(error.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry() -> HostEntry {
        HostEntry {
            host: "api.test".into(),
            servers: Vec::new(),
            addresses: Vec::new(),
            consecutive_failures: 0,
            last_error: None,
        }
    }

    #[test]
    fn next_lookup_follows_ttl_within_bounds() {
        for (ttl, wait) in [(0, 1), (1, 1), (60, 60), (300, 300), (86_400, 300)] {
            let resolved = ResolvedAddresses { addresses: vec![[192, 0, 2, 1].into()], ttl: Duration::from_secs(ttl) };
            assert_eq!(entry().record_answer(resolved), Duration::from_secs(wait), "a TTL of {ttl} s");
        }
    }

    #[test]
    fn failed_lookups_back_off_exponentially() {
        let mut entry = entry();
        let mut fail = || entry.record_failure(ResolveError::Timeout).as_secs();
        assert_eq!([(); 7].map(|()| fail()), [1, 2, 4, 8, 16, 30, 30]);
        entry.record_answer(ResolvedAddresses { addresses: vec![[192, 0, 2, 1].into()], ttl: MIN_TTL });
        assert_eq!(entry.record_failure(ResolveError::Timeout), MIN_TTL, "a successful lookup resets the backoff");
    }
}
