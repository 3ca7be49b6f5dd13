//! Names of servers: looked up, again when their addresses may have changed, and told to the fleets.

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

/// Answers that may be kept for less time, even for none, are kept for so long.
const MIN_TTL: Duration = Duration::from_secs(1);

/// However long an answer may be kept, a server that has moved is found within this time.
const MAX_TTL: Duration = Duration::from_secs(300);

/// Between two attempts that fail; the first comes after the shortest time, and each waits twice as long as the one before.
const MAX_RETRY_DELAY: Duration = Duration::from_secs(30);

/// The names of the servers of all fleets.
#[derive(Debug)]
pub struct DnsCache(Vec<HostEntry>);

/// A name, and what is known of it.
#[derive(Debug)]
struct HostEntry {
    host: Box<str>,
    /// The servers that have it.
    servers: Vec<ServerRef>,
    /// Sorted.
    addresses: Vec<IpAddr>,
    /// Attempts that failed, in a row.
    consecutive_failures: u32,
    /// Why, as it was logged.
    last_error: Option<ResolveError>,
}

#[derive(Debug)]
struct ServerRef {
    cluster: Arc<UpstreamCluster>,
    server_index: usize,
    port: u16,
}

impl DnsCache {
    /// Each of them once, however many servers have it. Until they are looked up these servers are where they, or others
    /// of the name, were found before; those of new names have no address.
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

    /// Whether there is nothing to look up.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Looks them up again and again, as long as the future lives. All copies of `first` are gone when each has been
    /// looked up once.
    pub async fn run(self, resolver: DnsResolver, first: Sender<Infallible>) {
        let mut tasks = JoinSet::new();
        for name in self.0 {
            tasks.spawn(name.run(resolver.clone(), first.clone()));
        }
        drop(first);
        tasks.join_all().await;
    }
}

/// Where servers of one name were found before, sorted.
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
            // Many gateways that began together do not go on asking together.
            let jitter = wait.mul_f64(Uuid::new_v4().as_u128() as u8 as f64 / 2560.0);
            sleep(wait + jitter).await;
        }
    }

    /// How long to wait before the next look.
    fn record_answer(&mut self, mut resolved: ResolvedAddresses) -> Duration {
        resolved.addresses.sort_unstable();
        resolved.addresses.dedup();
        let (host, was_failing) = (&self.host, self.last_error.take().is_some());
        if self.addresses != resolved.addresses {
            if self.addresses.is_empty() && !was_failing {
                debug!("`{host}` is at {:?}", resolved.addresses);
            } else {
                info!("`{host}` is at {:?} now", resolved.addresses);
            }
            self.addresses = resolved.addresses;
            self.update_clusters();
        } else if was_failing {
            info!("`{host}` is found again, where it was");
        }
        self.consecutive_failures = 0;
        resolved.ttl.clamp(MIN_TTL, MAX_TTL)
    }

    /// Tells the fleets.
    fn update_clusters(&self) {
        for ServerRef { cluster: fleet, server_index: index, port } in &self.servers {
            let addresses = self.addresses.iter().map(|address| SocketAddr::new(*address, *port));
            fleet.set_addresses(*index, &addresses.collect::<Vec<_>>());
        }
    }

    /// The same; the addresses of before stay.
    fn record_failure(&mut self, reason: ResolveError) -> Duration {
        if self.last_error.as_ref() != Some(&reason) {
            let consequence =
                if self.addresses.is_empty() { "it has no address yet" } else { "its last addresses are used" };
            let upstreams: Vec<_> = self.servers.iter().map(|server| &*server.cluster.settings.name).collect();
            warn!("`{}` of upstream `{}` is not found: {reason}; {consequence}", self.host, upstreams.join("`, `"));
            self.last_error = Some(reason);
        }
        let wait = MIN_TTL * 2_u32.saturating_pow(self.consecutive_failures.min(16));
        self.consecutive_failures += 1;
        wait.min(MAX_RETRY_DELAY)
    }
}

// One look at the hosts file and at DNS.

/// The hosts file says nothing of how long it holds; reading it costs little.
const HOSTS_TTL: Duration = Duration::from_secs(5);

/// Where names are looked up.
#[derive(Debug, Clone)]
pub enum DnsResolver {
    /// In /etc/hosts, and by what /etc/resolv.conf says; both as they are when a name is looked up.
    System,
    /// By these name servers alone.
    Servers(Box<ResolverConfig>, Box<ResolverOpts>),
}

/// The addresses of a name.
#[derive(Debug)]
pub(crate) struct ResolvedAddresses {
    pub(crate) addresses: Vec<IpAddr>,
    /// How long they hold.
    pub(crate) ttl: Duration,
}

/// Why there are none.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ResolveError {
    #[error("there is no such name")]
    NxDomain,
    #[error("it has neither an A nor an AAAA record")]
    NoRecords,
    #[error("no name server answers in time; /etc/resolv.conf says whom to ask")]
    Timeout,
    #[error("the name server cannot answer ({0})")]
    ErrorResponse(ResponseCode),
    #[error("{0}")]
    Other(String),
}

impl DnsResolver {
    /// Looks a name up. Of two families one may fail alone: the addresses that were `known` of it stay then.
    pub(crate) async fn lookup(&self, host: &str, known: &[IpAddr]) -> Result<ResolvedAddresses, ResolveError> {
        let (config, options) = match self {
            DnsResolver::System => {
                if let Some(addresses) = lookup_hosts_file(host) {
                    return Ok(ResolvedAddresses { addresses, ttl: HOSTS_TTL });
                }
                let (mut config, options) = read_system_conf()?;
                // `search` replaces the domain of this machine (resolv.conf(5)).
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
            // The library takes one answer for both.
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

/// As the resolver of the C library: who stands there is not asked for elsewhere.
fn lookup_hosts_file(host: &str) -> Option<Vec<IpAddr>> {
    let (hosts, name) = (Hosts::from_system().ok()?, Name::from_utf8(host).ok()?);
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

/// Whether the question has no answer, which is another thing than the answer that there is nothing.
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

    fn name() -> HostEntry {
        HostEntry {
            host: "api.test".into(),
            servers: Vec::new(),
            addresses: Vec::new(),
            consecutive_failures: 0,
            last_error: None,
        }
    }

    #[test]
    fn an_answer_holds_for_its_ttl_within_bounds() {
        for (ttl, wait) in [(0, 1), (1, 1), (60, 60), (300, 300), (86_400, 300)] {
            let resolved = ResolvedAddresses { addresses: vec![[192, 0, 2, 1].into()], ttl: Duration::from_secs(ttl) };
            assert_eq!(name().record_answer(resolved), Duration::from_secs(wait), "a TTL of {ttl} s");
        }
    }

    #[test]
    fn failures_are_repeated_less_and_less_often() {
        let mut name = name();
        let mut missing = || name.record_failure(ResolveError::Timeout).as_secs();
        assert_eq!([(); 7].map(|()| missing()), [1, 2, 4, 8, 16, 30, 30]);
        name.record_answer(ResolvedAddresses { addresses: vec![[192, 0, 2, 1].into()], ttl: MIN_TTL });
        assert_eq!(name.record_failure(ResolveError::Timeout), MIN_TTL, "an answer in between begins anew");
    }
}
