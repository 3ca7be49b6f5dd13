//! The servers of an upstream, and what all workers know of them.

use std::io;
use std::sync::Arc;

use tokio::net::TcpStream;
use tokio::time::Duration;

use super::Protocol;

/// `[upstream.NAME]`
#[derive(Debug)]
pub struct UpstreamSettings {
    /// The name that the configuration gives it.
    pub name: Box<str>,
    /// Where it listens; not empty.
    pub servers: Vec<ServerSettings>,
    /// What is spoken there.
    pub protocol: Protocol,
    /// Bound of connecting, name resolution included.
    pub connect_timeout: Duration,
    /// Bound of waiting for the response head once the request is sent.
    pub response_timeout: Duration,
    /// Idle connections older than this are not used again.
    pub pool_idle_timeout: Duration,
}

/// One of its `servers`
#[derive(Debug, Clone)]
pub struct ServerSettings {
    /// Host and port as the configuration writes them.
    pub authority: Box<str>,
    /// Host name or address.
    pub host: Box<str>,
    /// Port.
    pub port: u16,
}

/// The servers of an upstream.
#[derive(Debug)]
pub struct Fleet {
    /// As configured.
    pub settings: Arc<UpstreamSettings>,
    members: Vec<Arc<Member>>,
}

/// One that requests can be sent to.
#[derive(Debug)]
pub struct Member {
    /// As configured.
    pub server: ServerSettings,
}

impl Fleet {
    /// As the configuration has it.
    pub fn new(settings: Arc<UpstreamSettings>) -> Self {
        let members = settings.servers.iter().map(|server| Arc::new(Member { server: server.clone() })).collect();
        Fleet { settings, members }
    }

    /// Who can be asked.
    pub fn members(&self) -> &[Arc<Member>] {
        &self.members
    }
}

impl Member {
    /// Connects.
    ///
    /// # Errors
    /// Nobody listens, or the name has no address.
    pub async fn connect(&self) -> io::Result<TcpStream> {
        let stream = TcpStream::connect((&*self.server.host, self.server.port)).await?;
        stream.set_nodelay(true)?;
        Ok(stream)
    }
}
