//! Where connections go: a server, the master that Sentinels name, or a node of a cluster.

use std::fmt;
use std::sync::Arc;

use futures_util::future::select_ok;
use redis::{AsyncConnectionConfig, Client, ConnectionAddr, ConnectionInfo, ErrorKind, RedisError, RedisResult};
use tokio::time::Duration;

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

/// How to log on at any address: credentials, database, TLS.
#[derive(Debug, Clone)]
pub struct Login(ConnectionInfo);

impl Login {
    /// As this client does.
    pub fn of(client: &Client) -> Self {
        Login(client.get_connection_info().clone())
    }

    /// A client for an address.
    ///
    /// # Errors
    /// The certificates cannot be used.
    pub fn at(&self, address: &Address) -> RedisResult<Client> {
        let (host, port) = (address.host.to_string(), address.port);
        let address = match self.0.addr().clone() {
            ConnectionAddr::TcpTls { insecure, tls_params, .. } => {
                ConnectionAddr::TcpTls { host, port, insecure, tls_params }
            }
            _ => ConnectionAddr::Tcp(host, port),
        };
        Client::open(self.0.clone().set_addr(address))
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
}

impl Server {
    /// The one to connect to now.
    ///
    /// # Errors
    /// No Sentinel can be asked, or none knows the master.
    pub async fn client(&self, within: Duration) -> RedisResult<Client> {
        match self {
            Server::Fixed(client) | Server::Node(client) => Ok(client.clone()),
            Server::Master(sentinels) => sentinels.master(within).await,
        }
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
}

impl Sentinels {
    /// Asks all of them at the same time; the first that knows the master is believed. One that is behind names a server
    /// that is a replica by now, which whoever connects finds out.
    async fn master(&self, within: Duration) -> RedisResult<Client> {
        let answers = self.sentinels.iter().map(|sentinel| Box::pin(self.ask(sentinel, within)));
        let (address, _) = select_ok(answers).await?;
        self.login.at(&address)
    }

    async fn ask(&self, sentinel: &Client, within: Duration) -> RedisResult<Address> {
        let config =
            AsyncConnectionConfig::new().set_connection_timeout(Some(within)).set_response_timeout(Some(within));
        let mut connection = sentinel.get_multiplexed_async_connection_with_config(&config).await?;
        let mut question = redis::cmd("SENTINEL");
        question.arg("GET-MASTER-ADDR-BY-NAME").arg(&self.name);
        let master: Option<(String, u16)> = question.query_async(&mut connection).await?;
        let (host, port) = master.ok_or_else(|| self.unknown())?;
        Ok(Address { host: host.into(), port })
    }

    fn unknown(&self) -> RedisError {
        let detail = format!("`{}`; the name after the `/` of store.url is that of `sentinel monitor`", self.name);
        (ErrorKind::MasterNameNotFoundBySentinel, "the Sentinels know no master of this name", detail).into()
    }
}
