//! The Redis store: one call of a Lua script performs all checks of a request.

mod batch;
pub mod batcher;
pub mod circuit_breaker;
pub mod cluster;
pub mod commands;
pub mod connection;
pub mod error;
pub mod overrides;
mod probe;
pub mod script;
pub mod server;

use std::borrow::Cow;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use percent_encoding::percent_decode_str;
use redis::io::tcp::TcpSettings;
use redis::{
    Client, ConnectionAddr, ConnectionInfo, IntoConnectionInfo, RedisConnectionInfo, RedisError, TlsCertificates,
};
use tokio::time::timeout;
use uuid::Uuid;

use crate::limiter::clock::Clock;
use crate::limiter::key::Identity;
use crate::limiter::redis::cluster::topology::{SlotMap, identity_slot};
use crate::limiter::redis::connection::checkout;
use crate::limiter::redis::script::AlgorithmSet;
use crate::limiter::redis::server::{Address, ConnectError, Login, RedisEndpoint, Sentinels};
use crate::limiter::verdict::StoreError;

/// Settings of the clients of a Redis server.
#[derive(Debug, Clone)]
pub struct RedisSettings {
    /// Prefix of every Redis key.
    pub prefix: String,
    /// Number of connections of one worker to one server.
    pub connections: u32,
    /// Maximum time from the start of a check to its verdict.
    pub timeout: Duration,
    /// Maximum time to connect, which takes several round trips. Requests wait at most `timeout` for a connection.
    pub connect_timeout: Duration,
    /// The algorithms whose scripts are loaded on each new connection.
    pub algorithms: AlgorithmSet,
    /// Clock of this process, for the boundaries of calendar windows.
    pub clock: Clock,
}

impl Default for RedisSettings {
    /// Return the defaults of `[store]` in the configuration. `algorithms` is empty, so no script is loaded on new
    /// connections.
    fn default() -> Self {
        RedisSettings {
            prefix: "rl".to_owned(),
            connections: 1,
            timeout: Duration::from_millis(50),
            connect_timeout: Duration::from_secs(1),
            algorithms: AlgorithmSet::default(),
            clock: Clock::Store,
        }
    }
}

/// A single Redis server or a Redis Cluster.
#[derive(Debug, Clone)]
pub enum RedisDeployment {
    /// One Redis server keeps the states of all limits.
    Single(RedisEndpoint),
    /// The masters of a cluster, each of which keeps the states of some identities.
    Cluster {
        /// The nodes from which a worker learns the other nodes of the cluster.
        seeds: Vec<Address>,
        /// The credentials for each node.
        login: Login,
    },
}

impl RedisDeployment {
    /// Return all masters, each with a random identity that no client has. In a cluster, the slot of this identity
    /// belongs to the master. The masters of a cluster are discovered from its seed nodes.
    ///
    /// # Errors
    /// No seed node can be queried.
    pub async fn masters(&self, connect_timeout: Duration) -> Result<Vec<(RedisEndpoint, Identity)>, ConnectError> {
        let mut unused_identities = std::iter::repeat_with(|| Identity(Uuid::new_v4().as_u128()));
        let (seeds, login) = match self {
            RedisDeployment::Single(server) => {
                return Ok(unused_identities.next().map(|identity| (server.clone(), identity)).into_iter().collect());
            }
            RedisDeployment::Cluster { seeds, login } => (seeds, login),
        };
        let mut failure = ConnectError::new("the cluster has no seed node");
        for seed in seeds {
            let slots = match fetch_slots(seed, login, connect_timeout).await {
                Ok(slots) => slots,
                Err(error) => {
                    failure = error;
                    continue;
                }
            };
            let mut endpoints = Vec::new();
            for master in slots.masters() {
                let probe_identity =
                    unused_identities.find(|identity| slots.owner(identity_slot(*identity)) == Some(master));
                endpoints.extend(probe_identity.map(|identity| Ok((login.node_endpoint(master)?, identity))));
            }
            return endpoints.into_iter().collect();
        }
        Err(failure)
    }
}

async fn fetch_slots(seed: &Address, login: &Login, connect_timeout: Duration) -> Result<SlotMap, ConnectError> {
    let connections = connection::new_pool(login.node_endpoint(seed)?, AlgorithmSet::default(), 1, connect_timeout);
    let connect_error = |error: StoreError| ConnectError::new(&error.to_string());
    let mut connection = checkout(&connections).await.map_err(connect_error)?;
    let reply_in_time = timeout(connect_timeout, connection.send(redis::cmd("CLUSTER").arg("SLOTS"))).await;
    let reply = reply_in_time.map_err(|_| connect_error(StoreError::Timeout))?;
    let reply = reply.map_err(|error| ConnectError::new(&error::diagnose_call(&error)))?;
    SlotMap::from_reply(&reply, seed).ok_or_else(|| connect_error(StoreError::MalformedReply))
}

// === URLs: `redis://`, `rediss://`, `redis+unix://`, `redis+sentinel://` and `redis+cluster://` ===

const URL_FORMS: &str = "\"memory:\", \"redis://127.0.0.1:6379/0\", \"rediss://…\", \
     \"redis+unix:///run/redis.sock?db=0\", \"redis+sentinel://host1,host2/mymaster\" or \"redis+cluster://host1,host2\"";
const SINGLE_FORM: &str = "\"redis://user:password@host:6379/0\"; certificates and keys are PEM files";
const SENTINEL_FORM: &str = "\"redis+sentinel://user:password@host1:26379,host2:26379/mymaster?db=0\"; \
     if the Sentinels require a password, add the query parameters `sentinel_user` and `sentinel_password`";
const CLUSTER_FORM: &str = "\"redis+cluster://user:password@host1:6379,host2:6379\"; a cluster has only database 0";

/// An invalid store URL.
#[derive(Debug, thiserror::Error)]
#[error("{message}; expected {hint}")]
pub struct UrlError {
    /// The reason why the URL is invalid.
    pub message: String,
    /// The form that the URL must have.
    pub hint: &'static str,
}

impl FromStr for RedisDeployment {
    type Err = UrlError;

    /// Parse a Redis URL in the syntax of `store.url`. `rediss://` trusts the CA certificates of the system.
    fn from_str(url: &str) -> Result<Self, UrlError> {
        parse_redis_url(url, None).map(|(_, deployment)| deployment)
    }
}

/// Parse a store URL. Return the name for logs, and the deployment to connect to.
///
/// # Errors
/// The scheme is unknown, or the rest of the URL is invalid.
pub fn parse_redis_url(
    url: &str,
    certificates: Option<&TlsCertificates>,
) -> Result<(String, RedisDeployment), UrlError> {
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
    format!("invalid Redis URL: {}", error::diagnose_url(error))
}

fn build_client(url: impl IntoConnectionInfo, certificates: Option<&TlsCertificates>) -> Result<Client, RedisError> {
    // Disable the Nagle algorithm, because pipelined calls must not wait for earlier replies.
    let info = url.into_connection_info()?.set_tcp_settings(TcpSettings::default().set_nodelay(true));
    match certificates {
        Some(certificates) => Client::build_with_tls(info, certificates.clone()),
        None => Client::open(info),
    }
}

/// Parts of `//user:password@host:port,host:port/path?query`. A URL with one host is a special case of this form.
struct UrlParts<'a> {
    /// User and password, with the `@` at the end.
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
    // Use the first host as a placeholder: the Sentinels report the address of the master later.
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
        match parse_redis_url(url, None).unwrap() {
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
        let (name, RedisDeployment::Single(RedisEndpoint::Sentinel(found))) = parse_redis_url(url, None).unwrap()
        else {
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
            let wrong = parse_redis_url(url, None).unwrap_err();
            assert!(wrong.message.contains(what), "{url}: {}", wrong.message);
        }
    }
}
