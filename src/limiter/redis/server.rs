//! Addresses of Redis: a single server, the master that Sentinels report, or a node of a cluster.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures_util::future::{join_all, select_ok};
use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Client, ConnectionAddr, ConnectionInfo, RedisResult};

use crate::clock::monotonic;
use crate::limiter::redis::connection;
use crate::limiter::redis::connection::{Dial, ServerMode};
use crate::limiter::redis::error::{diagnose_connect, diagnose_timeout};

/// Minimum interval between queries that ask the Sentinels for the current master.
const SENTINEL_QUERY_INTERVAL: Duration = Duration::from_secs(1);

/// Host and port of a Redis server.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Address {
    /// DNS name or IP address, without brackets.
    pub host: Arc<str>,
    /// TCP port.
    pub port: u16,
}

impl Address {
    /// Parse `host:port` in the form that Redis writes: an IPv6 address may have no brackets.
    pub fn parse(text: &str) -> Option<Self> {
        let (host, port) = text.rsplit_once(':')?;
        let host = host.trim_start_matches('[').trim_end_matches(']');
        Some(Address { host: host.into(), port: port.parse().ok()? })
    }
}

impl fmt::Display for Address {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(out, "[{}]:{}", self.host, self.port)
        } else {
            write!(out, "{}:{}", self.host, self.port)
        }
    }
}

/// The reason why there is no connection, and what to do.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{0}")]
pub struct ConnectError(Arc<str>);

impl ConnectError {
    /// Create a connection error with this reason.
    pub fn new(reason: &str) -> Self {
        ConnectError(reason.into())
    }
}

/// Credentials, database and TLS settings for any address.
#[derive(Debug, Clone)]
pub struct Login {
    info: ConnectionInfo,
    /// Opens the byte streams of connections. `None` if the redis crate opens them.
    dial: Option<Arc<dyn Dial>>,
}

impl Login {
    /// Create a login with the credentials, the database and the TLS settings of `client`.
    pub fn from_client(client: &Client) -> Self {
        Login { info: client.get_connection_info().clone(), dial: None }
    }

    /// Use streams that `dial` opens.
    pub fn with_dial(self, dial: Arc<dyn Dial>) -> Self {
        Login { dial: Some(dial), ..self }
    }

    /// Create a client for an address.
    ///
    /// # Errors
    /// The certificates are invalid.
    pub fn client_for(&self, address: &Address) -> RedisResult<Client> {
        let host = address.host.to_string();
        let port = address.port;
        let address = match self.info.addr().clone() {
            ConnectionAddr::TcpTls { insecure, tls_params, .. } => {
                ConnectionAddr::TcpTls { host, port, insecure, tls_params }
            }
            _ => ConnectionAddr::Tcp(host, port),
        };
        Client::open(self.info.clone().set_addr(address))
    }

    /// Create the endpoint of a cluster node.
    ///
    /// # Errors
    /// The certificates are invalid.
    pub fn node_endpoint(&self, address: &Address) -> Result<RedisEndpoint, ConnectError> {
        let client = self.client_for(address).map_err(|error| ConnectError::new(&error.to_string()))?;
        Ok(match &self.dial {
            None => RedisEndpoint::Node(client),
            Some(dial) => RedisEndpoint::Dialed { client, mode: ServerMode::Cluster, dial: dial.clone() },
        })
    }
}

/// The server to which connections lead.
#[derive(Debug, Clone)]
pub enum RedisEndpoint {
    /// A single server.
    Single(Client),
    /// The master that the Sentinels report when the connection is opened.
    Sentinel(Arc<Sentinels>),
    /// A node of a cluster.
    Node(Client),
    /// A single server or a node of a cluster, over streams that `dial` opens instead of the redis crate.
    Dialed {
        /// Address of the server, and the login for it.
        client: Client,
        /// The mode that the server must have.
        mode: ServerMode,
        /// Opens the byte streams of connections.
        dial: Arc<dyn Dial>,
    },
}

impl RedisEndpoint {
    /// Return the mode that the server must have.
    pub fn mode(&self) -> ServerMode {
        match self {
            RedisEndpoint::Single(_) | RedisEndpoint::Sentinel(_) => ServerMode::Standalone,
            RedisEndpoint::Node(_) => ServerMode::Cluster,
            RedisEndpoint::Dialed { mode, .. } => *mode,
        }
    }

    /// Return the dialer that opens the byte streams of connections. Return `None` if the redis crate opens them.
    pub(super) fn dial(&self) -> Option<&Arc<dyn Dial>> {
        match self {
            RedisEndpoint::Dialed { dial, .. } => Some(dial),
            RedisEndpoint::Single(_) | RedisEndpoint::Sentinel(_) | RedisEndpoint::Node(_) => None,
        }
    }

    /// Return the client of the server to connect to now.
    ///
    /// # Errors
    /// No Sentinel replies, or no Sentinel knows the master.
    pub async fn client(&self, connect_timeout: Duration) -> Result<Client, ConnectError> {
        match self {
            RedisEndpoint::Single(client) | RedisEndpoint::Node(client) | RedisEndpoint::Dialed { client, .. } => {
                Ok(client.clone())
            }
            RedisEndpoint::Sentinel(sentinels) => sentinels.query_master(connect_timeout).await,
        }
    }

    /// Return the master that the Sentinels report now. All workers together query the Sentinels at most once a second.
    /// Return `None` for other endpoints.
    pub async fn current_master(&self, connect_timeout: Duration) -> Option<Client> {
        match self {
            RedisEndpoint::Single(_) | RedisEndpoint::Node(_) | RedisEndpoint::Dialed { .. } => None,
            RedisEndpoint::Sentinel(sentinels) => {
                sentinels.login.client_for(&sentinels.current_master(connect_timeout).await?).ok()
            }
        }
    }

    /// Return the error for an attempt to connect that timed out.
    pub fn timeout_error(&self) -> ConnectError {
        ConnectError::new(&match self {
            RedisEndpoint::Single(client) | RedisEndpoint::Node(client) | RedisEndpoint::Dialed { client, .. } => {
                diagnose_timeout(client.get_connection_info().addr())
            }
            RedisEndpoint::Sentinel(sentinels) => {
                format!(
                    "no answer in time from the Sentinels or from the master `{}`; check whether all of them are running",
                    sentinels.master_name
                )
            }
        })
    }
}

/// The Sentinels of a master.
#[derive(Debug)]
pub struct Sentinels {
    /// All known Sentinels.
    pub sentinels: Vec<Client>,
    /// The name of the master in the Sentinels.
    pub master_name: String,
    /// The credentials for the master.
    pub login: Login,
    last_master: Mutex<LastMaster>,
}

/// The last known master, and the time at which the Sentinels were queried.
#[derive(Debug, Default)]
struct LastMaster {
    queried_at: Option<Instant>,
    address: Option<Address>,
}

impl Sentinels {
    /// Create the Sentinels of the master `master_name`.
    pub fn new(sentinels: Vec<Client>, master_name: String, login: Login) -> Self {
        Sentinels { sentinels, master_name, login, last_master: Mutex::default() }
    }

    /// Return the master with the highest configuration epoch that the Sentinels report. If the Sentinels were queried
    /// less than [`SENTINEL_QUERY_INTERVAL`] ago, or if no Sentinel replies, return the last known master. After a
    /// graceful failover, the previous master accepts writes for about ten seconds. Then the Sentinels close all its
    /// connections, so connections must move to the new master within these ten seconds.
    async fn current_master(&self, connect_timeout: Duration) -> Option<Address> {
        if self.is_due(monotonic()) {
            let replies = self.sentinels.iter().map(|sentinel| Box::pin(self.query_epoch(sentinel, connect_timeout)));
            let latest = join_all(replies).await.into_iter().flatten().max_by_key(|(epoch, _)| *epoch);
            if let Some((_, master)) = latest {
                self.lock_last_master().address = Some(master);
            }
        }
        self.lock_last_master().address.clone()
    }

    fn is_due(&self, now: Instant) -> bool {
        let mut last_master = self.lock_last_master();
        let due = last_master
            .queried_at
            .is_none_or(|queried_at| now.saturating_duration_since(queried_at) >= SENTINEL_QUERY_INTERVAL);
        if due {
            last_master.queried_at = Some(now);
        }
        due
    }

    fn lock_last_master(&self) -> MutexGuard<'_, LastMaster> {
        self.last_master.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Query one Sentinel for the address of the master and for the configuration epoch. Each failover increments the
    /// epoch.
    async fn query_epoch(&self, sentinel: &Client, connect_timeout: Duration) -> Option<(u64, Address)> {
        let mut connection = self.connect(sentinel, connect_timeout).await.ok()?;
        let mut command = redis::cmd("SENTINEL");
        let state: HashMap<String, String> =
            command.arg("MASTER").arg(&self.master_name).query_async(&mut connection).await.ok()?;
        let master = Address { host: state.get("ip")?.as_str().into(), port: state.get("port")?.parse().ok()? };
        Some((state.get("config-epoch")?.parse().ok()?, master))
    }

    /// Query all Sentinels in parallel and use the first reply. An outdated Sentinel may report a replica, which is
    /// detected when a connection is opened.
    async fn query_master(&self, connect_timeout: Duration) -> Result<Client, ConnectError> {
        let queries = self.sentinels.iter().map(|sentinel| {
            Box::pin(async move {
                let result = self.query_one(sentinel, connect_timeout).await;
                let address = sentinel.get_connection_info().addr();
                result.map_err(|error| ConnectError::new(&diagnose_connect(&error, address)))
            })
        });
        match select_ok(queries).await {
            Ok((Some(master), _)) => {
                self.login.client_for(&master).map_err(|error| ConnectError::new(&error.to_string()))
            }
            Ok((None, _)) => Err(ConnectError::new(&format!(
                "the Sentinels know no master `{}`; the name after the `/` in store.url must be the name in \
                 `sentinel monitor`",
                self.master_name
            ))),
            Err(error) => Err(error),
        }
    }

    async fn connect(&self, sentinel: &Client, connect_timeout: Duration) -> RedisResult<MultiplexedConnection> {
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(connect_timeout))
            .set_response_timeout(Some(connect_timeout));
        let mut connection = sentinel.get_multiplexed_async_connection_with_config(&config).await?;
        connection::verify_server(&mut connection, ServerMode::Sentinel, sentinel.get_connection_info().addr()).await?;
        Ok(connection)
    }

    async fn query_one(&self, sentinel: &Client, connect_timeout: Duration) -> RedisResult<Option<Address>> {
        let mut connection = self.connect(sentinel, connect_timeout).await?;
        let mut command = redis::cmd("SENTINEL");
        command.arg("GET-MASTER-ADDR-BY-NAME").arg(&self.master_name);
        let master: Option<(String, u16)> = command.query_async(&mut connection).await?;
        Ok(master.map(|(host, port)| Address { host: host.into(), port }))
    }
}
