//! Where connections go: a server, the master that Sentinels name, or a node of a cluster.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use futures_util::future::{join_all, select_ok};
use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Client, ConnectionAddr, ConnectionInfo, RedisResult};
use tokio::time::Duration;

use super::advice::{of_connecting, of_silence};
use super::dial::Dial;
use super::hello::{self, Mode};
use crate::limit::clock::monotonic;

/// How often the Sentinels are asked whether another server is the master by now.
const ASK_AGAIN: Duration = Duration::from_secs(1);

/// A host and a port.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Address {
    /// A name or an IP address, without brackets.
    pub host: Arc<str>,
    /// The port.
    pub port: u16,
}

impl Address {
    /// Reads `host:port`, where the host may be an IPv6 address without brackets, as Redis writes it.
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

/// Why there is no connection, in a sentence that says what to do.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{0}")]
pub struct NoConnection(Arc<str>);

impl NoConnection {
    /// For this reason.
    pub fn new(reason: &str) -> Self {
        NoConnection(reason.into())
    }
}

/// How to log on at any address: credentials, database, TLS.
#[derive(Debug, Clone)]
pub struct Login {
    info: ConnectionInfo,
    /// Opens the streams, if the redis crate does not.
    dial: Option<Arc<dyn Dial>>,
}

impl Login {
    /// As this client does.
    pub fn of(client: &Client) -> Self {
        Login { info: client.get_connection_info().clone(), dial: None }
    }

    /// The same over streams that `dial` opens.
    pub fn over(self, dial: Arc<dyn Dial>) -> Self {
        Login { dial: Some(dial), ..self }
    }

    /// A client for an address.
    ///
    /// # Errors
    /// The certificates cannot be used.
    pub fn at(&self, address: &Address) -> RedisResult<Client> {
        let (host, port) = (address.host.to_string(), address.port);
        let address = match self.info.addr().clone() {
            ConnectionAddr::TcpTls { insecure, tls_params, .. } => {
                ConnectionAddr::TcpTls { host, port, insecure, tls_params }
            }
            _ => ConnectionAddr::Tcp(host, port),
        };
        Client::open(self.info.clone().set_addr(address))
    }

    /// A node of a cluster.
    ///
    /// # Errors
    /// The certificates cannot be used.
    pub fn node(&self, address: &Address) -> Result<Server, NoConnection> {
        let client = self.at(address).map_err(|error| NoConnection::new(&error.to_string()))?;
        Ok(match &self.dial {
            None => Server::Node(client),
            Some(dial) => Server::Dialed { client, mode: Mode::Cluster, dial: dial.clone() },
        })
    }
}

/// Where connections go.
#[derive(Debug, Clone)]
pub enum Server {
    /// To a server of its own.
    Fixed(Client),
    /// To the master that Sentinels name when the connection is made.
    Master(Arc<Sentinels>),
    /// To a node of a cluster.
    Node(Client),
    /// To any of these, over streams that the redis crate does not open.
    Dialed {
        /// The address and the login.
        client: Client,
        /// What it has to be.
        mode: Mode,
        /// Opens the streams.
        dial: Arc<dyn Dial>,
    },
}

impl Server {
    /// What it has to be.
    pub fn mode(&self) -> Mode {
        match self {
            Server::Fixed(_) | Server::Master(_) => Mode::Standalone,
            Server::Node(_) => Mode::Cluster,
            Server::Dialed { mode, .. } => *mode,
        }
    }

    /// Opens its streams, if the redis crate does not.
    pub(super) fn dial(&self) -> Option<&Arc<dyn Dial>> {
        match self {
            Server::Dialed { dial, .. } => Some(dial),
            Server::Fixed(_) | Server::Master(_) | Server::Node(_) => None,
        }
    }

    /// The one to connect to now.
    ///
    /// # Errors
    /// No Sentinel can be asked, or none knows the master.
    pub async fn client(&self, within: Duration) -> Result<Client, NoConnection> {
        match self {
            Server::Fixed(client) | Server::Node(client) | Server::Dialed { client, .. } => Ok(client.clone()),
            Server::Master(sentinels) => sentinels.master(within).await,
        }
    }

    /// The master that the Sentinels name now, asked once a second for all workers; none for other servers.
    pub async fn named(&self, within: Duration) -> Option<Client> {
        match self {
            Server::Fixed(_) | Server::Node(_) | Server::Dialed { .. } => None,
            Server::Master(sentinels) => sentinels.login.at(&sentinels.named(within).await?).ok(),
        }
    }

    /// Why there is no connection when nobody said so in time.
    pub fn silence(&self) -> NoConnection {
        NoConnection::new(&match self {
            Server::Fixed(client) | Server::Node(client) | Server::Dialed { client, .. } => {
                of_silence(client.get_connection_info().addr())
            }
            Server::Master(sentinels) => {
                format!("neither a Sentinel nor the master `{}` answers in time; are they stopped?", sentinels.name)
            }
        })
    }
}

/// Sentinels, and the master that they watch.
#[derive(Debug)]
pub struct Sentinels {
    /// All that are known.
    pub sentinels: Vec<Client>,
    /// What they call the master.
    pub name: String,
    /// How to log on at the master.
    pub login: Login,
    latest: Mutex<Latest>,
}

/// The master that the Sentinels named last, and when they were asked.
#[derive(Debug, Default)]
struct Latest {
    asked: Option<Instant>,
    master: Option<Address>,
}

impl Sentinels {
    /// `sentinels` watch a master that they call `name`.
    pub fn new(sentinels: Vec<Client>, name: String, login: Login) -> Self {
        Sentinels { sentinels, name, login, latest: Mutex::default() }
    }

    /// The master of the latest failover. After a graceful failover the earlier master stays writable for about ten seconds, then its
    /// Sentinels close all connections to it: connections have to move before.
    async fn named(&self, within: Duration) -> Option<Address> {
        if self.is_due(monotonic()) {
            let replies = self.sentinels.iter().map(|sentinel| Box::pin(self.ask_epoch(sentinel, within)));
            let latest = join_all(replies).await.into_iter().flatten().max_by_key(|(epoch, _)| *epoch);
            if let Some((_, master)) = latest {
                self.latest().master = Some(master);
            }
        }
        self.latest().master.clone()
    }

    fn is_due(&self, now: Instant) -> bool {
        let mut latest = self.latest();
        let due = latest.asked.is_none_or(|asked| now.saturating_duration_since(asked) >= ASK_AGAIN);
        if due {
            latest.asked = Some(now);
        }
        due
    }

    fn latest(&self) -> MutexGuard<'_, Latest> {
        self.latest.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The master, and the epoch of the failover that made it one.
    async fn ask_epoch(&self, sentinel: &Client, within: Duration) -> Option<(u64, Address)> {
        let mut connection = self.connect(sentinel, within).await.ok()?;
        let mut question = redis::cmd("SENTINEL");
        let state: HashMap<String, String> =
            question.arg("MASTER").arg(&self.name).query_async(&mut connection).await.ok()?;
        let master = Address { host: state.get("ip")?.as_str().into(), port: state.get("port")?.parse().ok()? };
        Some((state.get("config-epoch")?.parse().ok()?, master))
    }

    /// Asks all of them at the same time; the first that knows the master is believed. One that is behind names a server
    /// that is a replica by now, which whoever connects finds out.
    async fn master(&self, within: Duration) -> Result<Client, NoConnection> {
        let answers = self.sentinels.iter().map(|sentinel| {
            Box::pin(async move {
                let answer = self.ask(sentinel, within).await;
                let address = sentinel.get_connection_info().addr();
                answer.map_err(|error| NoConnection::new(&of_connecting(&error, address)))
            })
        });
        match select_ok(answers).await {
            Ok((Some(master), _)) => self.login.at(&master).map_err(|error| NoConnection::new(&error.to_string())),
            Ok((None, _)) => Err(NoConnection::new(&format!(
                "the Sentinels know no master `{}`; the name after the `/` of store.url is that of `sentinel monitor`",
                self.name
            ))),
            Err(error) => Err(error),
        }
    }

    async fn connect(&self, sentinel: &Client, within: Duration) -> RedisResult<MultiplexedConnection> {
        let config =
            AsyncConnectionConfig::new().set_connection_timeout(Some(within)).set_response_timeout(Some(within));
        let mut connection = sentinel.get_multiplexed_async_connection_with_config(&config).await?;
        hello::expect(&mut connection, Mode::Sentinel, sentinel.get_connection_info().addr()).await?;
        Ok(connection)
    }

    async fn ask(&self, sentinel: &Client, within: Duration) -> RedisResult<Option<Address>> {
        let mut connection = self.connect(sentinel, within).await?;
        let mut question = redis::cmd("SENTINEL");
        question.arg("GET-MASTER-ADDR-BY-NAME").arg(&self.name);
        let master: Option<(String, u16)> = question.query_async(&mut connection).await?;
        Ok(master.map(|(host, port)| Address { host: host.into(), port }))
    }
}
