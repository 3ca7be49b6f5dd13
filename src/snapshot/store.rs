//! Compiles `[store]`: the store URL, TLS, timeouts and capacities.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use percent_encoding::percent_decode_str;
use redis::io::tcp::TcpSettings;
use redis::{
    Client, ClientTlsConfig, ConnectionAddr, ConnectionInfo, IntoConnectionInfo, RedisConnectionInfo, RedisError,
    TlsCertificates,
};

use crate::config;
use crate::config::error::{Issue, Spanned};
use crate::limiter::clock::Clock;
use crate::limiter::redis::script::AlgorithmSet;
use crate::limiter::redis::server::{Address, Login, RedisEndpoint, Sentinels};
use crate::limiter::redis::{RedisDeployment, RedisSettings, diagnosis};
use crate::snapshot::StoreSettings;
use crate::snapshot::client_tls::TlsFiles;
use crate::snapshot::routes::Route;
use crate::snapshot::validator::Validator;

/// Compile `gateway_count`.
pub(super) fn gateway_count(store: &config::Store, reader: &mut Validator<'_>) -> u64 {
    reader.number(store.gateway_count.as_ref(), 1..10_001, 1) as u64
}

/// Compile `[store]`. The routes determine which algorithms the scripts need.
pub(super) fn store(store: &config::Store, routes: &[Arc<Route>], reader: &mut Validator<'_>) -> StoreSettings {
    let timeout = reader.duration(store.timeout.as_ref(), Duration::from_millis(50));
    let connect_timeout = reader.duration(store.connect_timeout.as_ref(), Duration::from_secs(1)).max(timeout);
    let connections = reader.number(store.connections.as_ref(), 1..9, 1) as u32;
    let max_memory_states = reader.number(store.max_memory_states.as_ref(), 1..1 << 40, 1_000_000) as usize;
    let prefix = store.prefix.as_ref().map_or("rl", |prefix| prefix.get_ref()).to_owned();
    if let Some(text) = store.prefix.as_ref().filter(|_| prefix.is_empty() || prefix.contains(['{', '}'])) {
        // Braces would change the cluster slot, which the identity must determine.
        reader.push_issue(Issue::new(text.span(), "`prefix` must not be empty and must not contain braces"));
    }
    let denial_cache = reader.number(store.denial_cache.as_ref(), 0..1 << 32, 100_000) as usize;
    let name = "memory".to_owned();
    let mut settings = StoreSettings { redis: None, name, timeout, denial_cache, max_memory_states };
    let url = store.url.as_ref().map_or("memory:", |url| url.get_ref());
    let scheme = url.split_once(':').map_or("", |(scheme, _)| scheme);
    let tls = store.tls.as_ref().filter(|tls| {
        let used = scheme.starts_with("rediss");
        if !used {
            let issue = Issue::new(tls.span(), "`tls` is valid only for a store at `rediss://`");
            reader.push_issue(issue.with_hint("also `rediss+sentinel://` and `rediss+cluster://`"));
        }
        used
    });
    let Some(text) = store.url.as_ref().filter(|_| url != "memory:") else { return settings };
    let certificates = tls.map(|tls| tls_certificates(tls, reader));
    match parse(url, certificates.as_ref()) {
        Ok((name, servers)) => {
            settings.name = name;
            let limits = routes.iter().flat_map(|route| &route.rate_limits.limits);
            let algorithms = AlgorithmSet::for_rules(limits.map(|route_limit| &route_limit.limit.default_variant.rule));
            let redis =
                RedisSettings { prefix, connections, timeout, connect_timeout, algorithms, clock: Clock::Store };
            settings.redis = Some((servers, redis));
        }
        Err(UrlError { message: what, hint }) => reader.push_issue(Issue::new(text.span(), what).with_hint(hint)),
    }
    settings
}

/// Compile the trust roots and the client certificate for the store.
fn tls_certificates(tls: &Spanned<config::StoreTls>, reader: &mut Validator<'_>) -> TlsCertificates {
    let config::StoreTls { ca, cert, key } = tls.get_ref();
    let TlsFiles { ca, gateway_certificate: own } =
        TlsFiles::read(ca.as_ref(), [cert.as_ref(), key.as_ref()], tls.span(), reader);
    let client_tls = own.map(|[cert, key]| ClientTlsConfig { client_cert: cert.content, client_key: key.content });
    TlsCertificates { client_tls, root_cert: ca.map(|ca| ca.content) }
}

const URL_FORMS: &str = "\"memory:\", \"redis://127.0.0.1:6379/0\", \"rediss://…\", \
     \"redis+unix:///run/redis.sock?db=0\", \"redis+sentinel://host1,host2/mymaster\" or \"redis+cluster://host1,host2\"";
const SINGLE_FORM: &str = "\"redis://user:password@host:6379/0\"; certificates and keys are PEM files";
const SENTINEL_FORM: &str = "\"redis+sentinel://user:password@host1:26379,host2:26379/mymaster?db=0\"; \
     if the Sentinels require a password, add the query parameters `sentinel_user` and `sentinel_password`";
const CLUSTER_FORM: &str = "\"redis+cluster://user:password@host1:6379,host2:6379\"; a cluster has only database 0";

/// Error in a store URL, with the expected form as the hint.
#[derive(Debug)]
pub(crate) struct UrlError {
    /// What is wrong with the URL.
    pub(crate) message: String,
    /// The expected form.
    pub(crate) hint: &'static str,
}

/// Parse a store URL. Return the name for logs, and the deployment to connect to.
pub(crate) fn parse(url: &str, certificates: Option<&TlsCertificates>) -> Result<(String, RedisDeployment), UrlError> {
    let (scheme, rest) = url.split_once(':').unwrap_or(("", url));
    let hint = match scheme {
        "redis" | "rediss" | "redis+unix" => SINGLE_FORM,
        "redis+sentinel" | "rediss+sentinel" => SENTINEL_FORM,
        "redis+cluster" | "rediss+cluster" => CLUSTER_FORM,
        _ => return Err(UrlError { message: "this is not a store URL".to_owned(), hint: URL_FORMS }),
    };
    let (tls, kind) = scheme.split_once('+').unwrap_or((scheme, ""));
    let found = match kind {
        "sentinel" => sentinels(tls, rest, certificates),
        "cluster" => cluster(tls, rest, certificates),
        _ => build_client(url, certificates).map_err(|error| unusable_url(&error)).map(|client| {
            let address = client.get_connection_info().addr();
            (format!("redis at {address}"), RedisDeployment::Single(RedisEndpoint::Single(client)))
        }),
    };
    found.map_err(|what| UrlError { message: what, hint })
}

fn unusable_url(error: &RedisError) -> String {
    format!("invalid Redis URL: {}", diagnosis::diagnose_url(error))
}

fn build_client(url: impl IntoConnectionInfo, certificates: Option<&TlsCertificates>) -> Result<Client, RedisError> {
    // Disable the Nagle algorithm: pipelined calls must not wait for earlier replies.
    let info = url.into_connection_info()?.set_tcp_settings(TcpSettings::default().set_nodelay(true));
    match certificates {
        Some(certificates) => Client::build_with_tls(info, certificates.clone()),
        None => Client::open(info),
    }
}

/// Parts of `//user:password@host:port,host:port/path?query`. A URL with one host is a special case.
struct UrlParts<'a> {
    /// User and password, including the `@`.
    credentials: &'a str,
    hosts: Vec<&'a str>,
    path: &'a str,
    query: Vec<(&'a str, Cow<'a, str>)>,
}

fn split_url(rest: &str) -> Result<UrlParts<'_>, String> {
    let rest = rest.strip_prefix("//").ok_or("`//` is missing after the scheme")?;
    let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
    let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
    let hosts_from = authority.rfind('@').map_or(0, |at| at + 1);
    let (user, hosts) = authority.split_at(hosts_from);
    let hosts: Vec<_> = hosts.split(',').collect();
    if hosts.iter().any(|host| host.is_empty()) {
        return Err("a host is missing".to_owned());
    }
    let pairs = query.split('&').filter(|pair| !pair.is_empty()).map(|pair| {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        (name, percent_decode_str(value).decode_utf8_lossy())
    });
    Ok(UrlParts { credentials: user, hosts, path, query: pairs.collect() })
}

/// Build the connection info of the redis crate for one of the hosts.
fn connection_info(tls: &str, user: &str, host: &str, port: u16, database: &str) -> Result<ConnectionInfo, String> {
    let with_port = host.rsplit(']').next().unwrap_or(host).contains(':');
    let port = if with_port { String::new() } else { format!(":{port}") };
    format!("{tls}://{user}{host}{port}/{database}").into_connection_info().map_err(|error| unusable_url(&error))
}

fn address(client: &Client) -> Option<Address> {
    match client.get_connection_info().addr() {
        ConnectionAddr::Tcp(host, port) | ConnectionAddr::TcpTls { host, port, .. } => {
            Some(Address { host: host.as_str().into(), port: *port })
        }
        _ => None,
    }
}

fn sentinels(
    tls: &str,
    rest: &str,
    certificates: Option<&TlsCertificates>,
) -> Result<(String, RedisDeployment), String> {
    let UrlParts { credentials: user, hosts, path, query } = split_url(rest)?;
    if path.is_empty() || path.contains('/') {
        return Err("the name of the master is missing".to_owned());
    }
    let mut database = Cow::Borrowed("0");
    let mut sentinel_login = RedisConnectionInfo::default();
    for (name, value) in query {
        match name {
            "db" => database = value,
            "sentinel_user" => sentinel_login = sentinel_login.set_username(value),
            "sentinel_password" => sentinel_login = sentinel_login.set_password(value),
            _ => return Err(format!("unknown query parameter `{name}`")),
        }
    }
    let sentinels = hosts.iter().map(|host| {
        let info = connection_info(tls, "", host, 26_379, "")?.set_redis_settings(sentinel_login.clone());
        build_client(info, certificates).map_err(|error| unusable_url(&error))
    });
    let sentinels: Vec<_> = sentinels.collect::<Result<_, String>>()?;
    // The Sentinels report the address of the master. The first host stands in for it in this template.
    let template = build_client(connection_info(tls, user, hosts[0], 6379, &database)?, certificates)
        .map_err(|error| unusable_url(&error))?;
    let name = percent_decode_str(path).decode_utf8_lossy().into_owned();
    let log_name = format!("redis master {name} by Sentinels at {}", hosts.join(", "));
    let sentinels = Sentinels::new(sentinels, name, Login::from_client(&template));
    Ok((log_name, RedisDeployment::Single(RedisEndpoint::Sentinel(Arc::new(sentinels)))))
}

fn cluster(tls: &str, rest: &str, certificates: Option<&TlsCertificates>) -> Result<(String, RedisDeployment), String> {
    let UrlParts { credentials: user, hosts, path, query } = split_url(rest)?;
    if !matches!(path, "" | "0") || !query.is_empty() {
        return Err("a cluster URL has no path and no query".to_owned());
    }
    let clients = hosts.iter().map(|host| {
        let info = connection_info(tls, user, host, 6379, "0")?;
        build_client(info, certificates).map_err(|error| unusable_url(&error))
    });
    let clients: Vec<_> = clients.collect::<Result<_, String>>()?;
    let seeds: Vec<_> = clients.iter().filter_map(address).collect();
    let name = format!("redis cluster at {}", hosts.join(", "));
    Ok((name, RedisDeployment::Cluster { seeds, login: Login::from_client(&clients[0]) }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seeds(url: &str) -> Vec<String> {
        match parse(url, None).unwrap() {
            (_, RedisDeployment::Cluster { seeds, .. }) => seeds.iter().map(Address::to_string).collect(),
            (_, RedisDeployment::Single(_)) => panic!("{url} is no cluster"),
        }
    }

    #[test]
    fn cluster_urls_have_several_hosts() {
        assert_eq!(
            seeds("redis+cluster://a,b:7001,[::1]:7002,[::2]"),
            ["a:6379", "b:7001", "[::1]:7002", "[::2]:6379"]
        );
        assert_eq!(seeds("rediss+cluster://user:p%40ss@a:1/"), ["a:1"]);
    }

    #[test]
    fn sentinel_urls_have_separate_credentials_for_sentinels() {
        let url = "redis+sentinel://user:p%40ss@a,b:1/my%20master?db=3&sentinel_user=s&sentinel_password=p%26";
        let (name, RedisDeployment::Single(RedisEndpoint::Sentinel(found))) = parse(url, None).unwrap() else {
            panic!()
        };
        assert_eq!((&*name, &*found.master_name), ("redis master my master by Sentinels at a, b:1", "my master"));
        let addresses: Vec<_> = found.sentinels.iter().map(|client| address(client).unwrap().to_string()).collect();
        assert_eq!(addresses, ["a:26379", "b:1"]);
        let own = found.sentinels[0].get_connection_info().redis_settings();
        assert_eq!((own.username(), own.password()), (Some("s"), Some("p&")));
        let master = found.login.client_for(&Address::parse("m:2").unwrap()).unwrap();
        let settings = master.get_connection_info().redis_settings();
        assert_eq!((settings.username(), settings.password(), settings.db()), (Some("user"), Some("p@ss"), 3));
        assert_eq!(address(&master).unwrap().to_string(), "m:2");
    }

    #[test]
    fn invalid_urls_are_rejected_with_the_reason() {
        for (url, what) in [
            ("http://a", "this is not a store URL"),
            ("redis", "this is not a store URL"),
            ("redis+cluster:a", "`//` is missing"),
            ("redis+cluster://a,,b", "a host is missing"),
            ("redis+cluster://", "a host is missing"),
            ("redis+cluster://a/3", "no path and no query"),
            ("redis+cluster://a?db=1", "no path and no query"),
            ("redis+cluster://a:b", "invalid Redis URL"),
            ("redis+sentinel://a", "name of the master is missing"),
            ("redis+sentinel://a/m?typo=1", "unknown query parameter `typo`"),
            ("redis+sentinel://a/m?db=x", "invalid Redis URL"),
            ("redis://a:b", "invalid Redis URL"),
        ] {
            let wrong = parse(url, None).unwrap_err();
            assert!(wrong.message.contains(what), "{url}: {}", wrong.message);
        }
    }
}
