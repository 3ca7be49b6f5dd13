//! One look at the hosts file and at DNS.

use std::net::IpAddr;

use hickory_resolver::config::{LookupIpStrategy, ResolveHosts, ResolverConfig, ResolverOpts};
use hickory_resolver::net::runtime::TokioRuntimeProvider;
use hickory_resolver::net::{DnsError, NetError};
use hickory_resolver::proto::op::{Query, ResponseCode};
use hickory_resolver::proto::rr::{Name, RecordType};
use hickory_resolver::system_conf::read_system_conf;
use hickory_resolver::{Hosts, Resolver, TokioResolver};
use tokio::time::Duration;

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
pub(super) struct ResolvedAddresses {
    pub(super) addresses: Vec<IpAddr>,
    /// How long they hold.
    pub(super) ttl: Duration,
}

/// Why there are none.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum ResolveError {
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
    pub(super) async fn lookup(&self, host: &str, known: &[IpAddr]) -> Result<ResolvedAddresses, ResolveError> {
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
