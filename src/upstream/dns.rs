//! DNS resolution of upstream hosts. The gateway repeats the lookup of a host when its TTL expires.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::net::{IpAddr, SocketAddr};
use std::pin::pin;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::future::{BoxFuture, join_all};
use futures_util::stream::FuturesUnordered;
use hickory_resolver::config::{ResolveHosts, ResolverConfig, ResolverOpts};
use hickory_resolver::lookup::Lookup;
use hickory_resolver::net::runtime::TokioRuntimeProvider;
use hickory_resolver::net::{DnsError, NetError};
use hickory_resolver::proto::op::{Query, ResponseCode};
use hickory_resolver::proto::rr::{Name, RData, Record, RecordType};
use hickory_resolver::system_conf::read_system_conf;
use hickory_resolver::{Hosts, Resolver, TokioResolver};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout_at};
use tracing::{debug, info, warn};
use uuid::Uuid;

use crate::clock::monotonic;
use crate::upstream::cluster::UpstreamCluster;
use crate::upstream::endpoint::EndpointAddress;
use crate::upstream::settings::{AddressFamilies, SrvTarget};

/// Minimum time between lookups of a host. This is also the delay after the first failed lookup.
const MIN_TTL: Duration = Duration::from_secs(1);

/// Maximum time between lookups of a host, even if the TTL is longer.
const MAX_TTL: Duration = Duration::from_secs(300);

/// Maximum delay after a failed lookup. The delay starts at `MIN_TTL` and doubles with each consecutive failure.
const MAX_RETRY_DELAY: Duration = Duration::from_secs(30);

/// Maximum time to wait for the addresses of the other family after one family has been resolved (Resolution Delay, RFC
/// 8305 §3).
const RESOLUTION_DELAY: Duration = Duration::from_millis(50);

/// The host names of all upstream clusters, with their addresses.
#[derive(Debug)]
pub struct DnsCache(Vec<HostEntry>);

/// Maximum number of targets of an SRV record that the gateway uses.
const MAX_SRV_TARGETS: usize = 256;

/// A host or the name of an SRV record, and its addresses.
#[derive(Debug)]
struct HostEntry {
    host: Box<str>,
    resolve: AddressFamilies,
    is_srv: bool,
    /// Servers that have this host.
    servers: Vec<ServerRef>,
    /// Last known addresses, sorted.
    addresses: Vec<HostAddress>,
    /// Number of consecutive failed lookups.
    consecutive_failures: u32,
    /// Error that was last logged. `None` after a successful lookup.
    last_error: Option<ResolveError>,
}

/// An address of a host.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct HostAddress {
    pub(crate) ip: IpAddr,
    /// The target of the SRV record that led to the address. `None` for hosts without SRV records.
    pub(crate) target: Option<Arc<SrvTarget>>,
}

impl From<IpAddr> for HostAddress {
    fn from(ip: IpAddr) -> Self {
        HostAddress { ip, target: None }
    }
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
        let mut names = BTreeMap::<(Box<str>, AddressFamilies, bool), Vec<ServerRef>>::new();
        for cluster in clusters {
            for (index, server) in cluster.settings.servers.iter().enumerate() {
                if server.needs_dns() {
                    let key = (server.host.to_ascii_lowercase().into(), cluster.settings.resolve, server.is_srv);
                    let server = ServerRef { cluster: cluster.clone(), server_index: index, port: server.port };
                    names.entry(key).or_default().push(server);
                }
            }
        }
        let name = |((host, resolve, is_srv), servers): (_, Vec<_>)| {
            let name = HostEntry {
                host,
                resolve,
                is_srv,
                addresses: known_addresses(&servers, resolve),
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

/// Return the sorted addresses of these families that the clusters have stored for these servers.
fn known_addresses(servers: &[ServerRef], resolve: AddressFamilies) -> Vec<HostAddress> {
    let record_types = resolve.record_types(false);
    let found = servers.iter().map(|server| server.cluster.addresses(server.server_index));
    let found = found.max_by_key(Vec::len).unwrap_or_default().into_iter();
    let found = found.filter(|known| record_types.contains(&record_type_of(&known.address.ip())));
    let mut addresses: Vec<_> =
        found.map(|known| HostAddress { ip: known.address.ip(), target: known.target }).collect();
    addresses.sort_unstable();
    addresses
}

impl HostEntry {
    /// Count a lookup for each upstream that has servers with this host.
    fn count_lookup(&self, is_failed: bool) {
        for (index, ServerRef { cluster, .. }) in self.servers.iter().enumerate() {
            let is_counted = self.servers[..index].iter().any(|earlier| Arc::ptr_eq(&earlier.cluster, cluster));
            if !is_counted {
                cluster.metrics().lookups.increment(usize::from(is_failed));
            }
        }
    }

    async fn run(mut self, resolver: DnsResolver, first: Sender<Infallible>) {
        let mut first = Some(first);
        loop {
            let mut pending = PendingLookups::new();
            let found = match self.is_srv {
                true => resolver.lookup_srv(&self.host, self.resolve, &self.addresses).await,
                false => resolver.lookup(&self.host, None, self.resolve, &ips(&self.addresses)).await,
            };
            self.count_lookup(found.is_err());
            let wait = match found {
                Ok(mut resolved) => {
                    pending = std::mem::take(&mut resolved.pending);
                    self.record_answer(resolved)
                }
                Err(reason) => self.record_failure(reason),
            };
            drop(first.take());
            // Add a jitter of up to 10 %, so that gateways that start together do not make their lookups at the same
            // time.
            let jitter = wait.mul_f64(Uuid::new_v4().as_u128() as u8 as f64 / 2560.0);
            let mut next = pin!(sleep(wait + jitter));
            loop {
                tokio::select! {
                    () = &mut next => break,
                    Some(late) = pending.next() => self.record_late(late),
                }
            }
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

    /// Store the addresses of a family whose lookup took longer than that of the other family.
    fn record_late(&mut self, FamilyLookup { target, is_v6, result }: FamilyLookup) {
        let found = match result {
            Ok(lookup) => addresses(&lookup),
            Err(error) if is_failure(&error) => return,
            Err(_) => Vec::new(),
        };
        let is_other = |known: &&HostAddress| known.ip.is_ipv6() != is_v6 || known.target != target;
        let others = self.addresses.iter().filter(is_other).cloned();
        let found = found.into_iter().map(|ip| HostAddress { ip, target: target.clone() });
        let mut now: Vec<_> = others.chain(found).collect();
        now.sort_unstable();
        now.dedup();
        if now != self.addresses {
            info!(host = %self.host, addresses = ?now, "resolved host to new addresses");
            self.addresses = now;
            self.update_clusters();
        }
    }

    /// Set the addresses in all clusters that have servers with this host.
    fn update_clusters(&self) {
        for ServerRef { cluster: fleet, server_index: index, port } in &self.servers {
            let endpoint_address = |HostAddress { ip, target }: &HostAddress| {
                let port = target.as_ref().map_or(*port, |target| target.port);
                EndpointAddress { address: SocketAddr::new(*ip, port), target: target.clone() }
            };
            fleet.set_addresses(*index, self.addresses.iter().map(endpoint_address).collect());
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
    pub(crate) addresses: Vec<HostAddress>,
    /// Time for which the addresses may be cached.
    pub(crate) ttl: Duration,
    /// Lookups of a family that take longer than [`RESOLUTION_DELAY`].
    pending: PendingLookups,
}

type PendingLookups = FuturesUnordered<BoxFuture<'static, FamilyLookup>>;

/// The result of the lookup of one address family.
#[derive(Debug)]
struct FamilyLookup {
    /// The target of the SRV record that led to the lookup. `None` for hosts without SRV records.
    target: Option<Arc<SrvTarget>>,
    is_v6: bool,
    result: Result<Lookup, NetError>,
}

fn ips(addresses: &[HostAddress]) -> Vec<IpAddr> {
    addresses.iter().map(|address| address.ip).collect()
}

/// Return the addresses in a response.
fn addresses(lookup: &Lookup) -> Vec<IpAddr> {
    lookup.answers().iter().filter_map(|record| record.data.ip_addr()).collect()
}

impl AddressFamilies {
    /// Return the record types to query. `no_aaaa` is the option of resolv.conf(5).
    fn record_types(self, no_aaaa: bool) -> &'static [RecordType] {
        match self {
            AddressFamilies::Ipv4 => &[RecordType::A],
            AddressFamilies::Both if no_aaaa => &[RecordType::A],
            AddressFamilies::Ipv6 => &[RecordType::AAAA],
            AddressFamilies::Both => &[RecordType::A, RecordType::AAAA],
        }
    }
}

/// Return whether resolv.conf(5) has the option `no-aaaa`, which hickory does not read.
fn has_no_aaaa(resolv_conf: &str) -> bool {
    let options = resolv_conf.lines().filter_map(|line| line.trim_start().strip_prefix("options"));
    options.flat_map(str::split_whitespace).any(|option| option == "no-aaaa")
}

/// Reason why a lookup failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ResolveError {
    #[error("the name does not exist (NXDOMAIN)")]
    NxDomain,
    #[error("the name has no A or AAAA record")]
    NoRecords,
    #[error("the name has no SRV record with a target")]
    NoTarget,
    #[error("no name server responded in time; check /etc/resolv.conf")]
    Timeout,
    #[error("the name server returned an error ({0})")]
    ErrorResponse(ResponseCode),
    #[error("{0}")]
    Other(String),
}

impl DnsResolver {
    /// Resolve a host, which may be the target of an SRV record. `known` contains its last known addresses. If only the
    /// lookup of one address family fails, or takes longer than that of the other family by more than
    /// [`RESOLUTION_DELAY`], also return the known addresses of this family.
    pub(crate) async fn lookup(
        &self,
        host: &str,
        target: Option<Arc<SrvTarget>>,
        resolve: AddressFamilies,
        known: &[IpAddr],
    ) -> Result<ResolvedAddresses, ResolveError> {
        let mut no_aaaa = false;
        if let DnsResolver::System = self {
            if let Some(found) = lookup_hosts_file(host.trim_end_matches('.')) {
                let is_wanted = |ip: &IpAddr| resolve.record_types(false).contains(&record_type_of(ip));
                let addresses: Vec<_> = found.into_iter().filter(is_wanted).map(HostAddress::from).collect();
                let found = ResolvedAddresses { addresses, ttl: HOSTS_TTL, pending: PendingLookups::new() };
                return if found.addresses.is_empty() { Err(ResolveError::NoRecords) } else { Ok(found) };
            }
            no_aaaa = std::fs::read_to_string("/etc/resolv.conf").is_ok_and(|text| has_no_aaaa(&text));
        }
        let resolver = self.build()?;
        let record_types = resolve.record_types(no_aaaa);
        let pending = PendingLookups::new();
        for record_type in record_types {
            let (resolver, host, target) = (resolver.clone(), host.to_owned(), target.clone());
            let is_v6 = *record_type == RecordType::AAAA;
            let lookup = async move {
                let result = resolver.lookup(host, *record_type).await;
                FamilyLookup { target, is_v6, result }
            };
            pending.push(Box::pin(lookup));
        }
        // Forget known addresses of a family that is no longer looked up.
        let known: Vec<_> = known.iter().copied().filter(|ip| record_types.contains(&record_type_of(ip))).collect();
        gather(pending, &known).await
    }

    /// Resolve the name of an SRV record (RFC 2782) and all its targets. `known` contains the last known addresses. If
    /// the lookup of a target fails, also return its known addresses.
    pub(crate) async fn lookup_srv(
        &self,
        name: &str,
        resolve: AddressFamilies,
        known: &[HostAddress],
    ) -> Result<ResolvedAddresses, ResolveError> {
        let found =
            self.build()?.lookup(name, RecordType::SRV).await.map_err(|error| match ResolveError::from(error) {
                ResolveError::NoRecords => ResolveError::NoTarget,
                other => other,
            })?;
        let ttl = found.answers().iter().map(|record| record.ttl).min().unwrap_or(0);
        let target = |record: &Record| match &record.data {
            // The target `.` means that the service is not available.
            RData::SRV(srv) if !srv.target.is_root() => Some(Arc::new(SrvTarget {
                host: srv.target.to_ascii().trim_end_matches('.').to_ascii_lowercase().into(),
                port: srv.port,
                priority: srv.priority,
                weight: srv.weight,
            })),
            _ => None,
        };
        let targets: Vec<_> = found.answers().iter().filter_map(target).take(MAX_SRV_TARGETS).collect();
        let lookups = targets.into_iter().map(async |target| {
            let of_target = |known: &&HostAddress| known.target.as_ref().is_some_and(|of| of.host == target.host);
            let known: Vec<_> = known.iter().filter(of_target).map(|known| known.ip).collect();
            // The dot keeps the resolver from appending search domains to the name.
            let found = self.lookup(&format!("{}.", target.host), Some(target.clone()), resolve, &known).await;
            (target, known, found)
        });
        let mut resolved = ResolvedAddresses {
            addresses: Vec::new(),
            ttl: Duration::from_secs(ttl.into()),
            pending: PendingLookups::new(),
        };
        let mut failure = ResolveError::NoTarget;
        for (target, known, found) in join_all(lookups).await {
            let found = match found {
                Ok(found) => {
                    resolved.ttl = resolved.ttl.min(found.ttl);
                    resolved.pending.extend(found.pending);
                    ips(&found.addresses)
                }
                Err(error) => {
                    let is_gone = matches!(error, ResolveError::NxDomain | ResolveError::NoRecords);
                    failure = error;
                    if is_gone { Vec::new() } else { known }
                }
            };
            let address = |ip| HostAddress { ip, target: Some(target.clone()) };
            resolved.addresses.extend(found.into_iter().map(address));
        }
        if resolved.addresses.is_empty() { Err(failure) } else { Ok(resolved) }
    }

    /// Create a client of the name servers.
    fn build(&self) -> Result<TokioResolver, NetError> {
        let (config, options) = match self {
            DnsResolver::System => {
                let (mut config, options) = read_system_conf()?;
                // Remove the local domain if there is a `search` list, which overrides it (resolv.conf(5)).
                config.domain = config.domain.filter(|_| config.search.is_empty());
                (config, options)
            }
            DnsResolver::Servers(config, options) => ((**config).clone(), (**options).clone()),
        };
        build_resolver(config, options)
    }
}

fn record_type_of(ip: &IpAddr) -> RecordType {
    if ip.is_ipv6() { RecordType::AAAA } else { RecordType::A }
}

/// Wait for the lookups of the address families.
async fn gather(mut pending: PendingLookups, known: &[IpAddr]) -> Result<ResolvedAddresses, ResolveError> {
    let known_of = |is_v6: bool| known.iter().copied().filter(move |address| address.is_ipv6() == is_v6);
    let (mut found, mut kept, mut ttl) = (Vec::<IpAddr>::new(), Vec::new(), u32::MAX);
    let mut failure = None;
    let (mut answered, mut deadline) = ([false; 2], None);
    loop {
        let next = match deadline {
            None => pending.next().await,
            Some(deadline) => match timeout_at(deadline, pending.next()).await {
                Ok(next) => next,
                Err(_) => break,
            },
        };
        let Some(FamilyLookup { is_v6, result, .. }) = next else { break };
        answered[usize::from(is_v6)] = true;
        match result {
            Ok(lookup) => {
                found.extend(addresses(&lookup));
                ttl = lookup.answers().iter().map(|record| record.ttl).fold(ttl, u32::min);
            }
            Err(error) => {
                if is_failure(&error) {
                    kept.extend(known_of(is_v6));
                }
                // A failed lookup says more than a response without addresses.
                if failure.is_none() || is_failure(&error) {
                    failure = Some(ResolveError::from(error));
                }
            }
        }
        if !found.is_empty() {
            deadline = Some((monotonic() + RESOLUTION_DELAY).into());
        }
    }
    if found.is_empty() {
        return Err(failure.unwrap_or(ResolveError::NoRecords));
    }
    for (is_v6, answered) in [(false, answered[0]), (true, answered[1])] {
        found.extend(known_of(is_v6).filter(|_| !answered));
    }
    found.extend(kept);
    let found = found.into_iter().map(HostAddress::from).collect();
    Ok(ResolvedAddresses { addresses: found, ttl: Duration::from_secs(ttl.into()), pending })
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
    builder.options_mut().use_hosts_file = ResolveHosts::Never;
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
            resolve: AddressFamilies::Both,
            is_srv: false,
            servers: Vec::new(),
            addresses: Vec::new(),
            consecutive_failures: 0,
            last_error: None,
        }
    }

    fn resolved(ttl: Duration) -> ResolvedAddresses {
        ResolvedAddresses { addresses: vec![IpAddr::from([192, 0, 2, 1]).into()], ttl, pending: PendingLookups::new() }
    }

    #[test]
    fn option_no_aaaa_is_read_from_resolv_conf() {
        for (text, expected) in [
            ("nameserver 192.0.2.1\noptions ndots:2 no-aaaa timeout:1\n", true),
            ("options no-aaaa", true),
            ("# options no-aaaa\noptions ndots:2\n", false),
            ("", false),
        ] {
            assert_eq!(has_no_aaaa(text), expected, "{text}");
        }
        assert_eq!(AddressFamilies::Both.record_types(true), [RecordType::A]);
        assert_eq!(AddressFamilies::Ipv6.record_types(true), [RecordType::AAAA]);
    }

    #[test]
    fn next_lookup_follows_ttl_within_bounds() {
        for (ttl, wait) in [(0, 1), (1, 1), (60, 60), (300, 300), (86_400, 300)] {
            let resolved = resolved(Duration::from_secs(ttl));
            assert_eq!(entry().record_answer(resolved), Duration::from_secs(wait), "a TTL of {ttl} s");
        }
    }

    #[test]
    fn failed_lookups_back_off_exponentially() {
        let mut entry = entry();
        let mut fail = || entry.record_failure(ResolveError::Timeout).as_secs();
        assert_eq!([(); 7].map(|()| fail()), [1, 2, 4, 8, 16, 30, 30]);
        entry.record_answer(resolved(MIN_TTL));
        assert_eq!(entry.record_failure(ResolveError::Timeout), MIN_TTL, "a successful lookup resets the backoff");
    }
}
