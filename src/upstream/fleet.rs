//! The servers of an upstream, and what all workers know of them.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};

use arc_swap::ArcSwap;
use tokio::net::TcpStream;
use tokio::time::Duration;

use super::Protocol;
use super::connect::Stream;
use super::tls::ServerTls;

/// `[upstream.NAME]`
#[derive(Debug)]
pub struct UpstreamSettings {
    /// The name that the configuration gives it.
    pub name: Box<str>,
    /// Where it listens; not empty.
    pub servers: Vec<ServerSettings>,
    /// What is spoken there.
    pub protocol: Protocol,
    /// Bound of connecting, TLS included.
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
    /// With TLS; none = clear text.
    pub tls: Option<ServerTls>,
}

/// The servers of an upstream.
#[derive(Debug)]
pub struct Fleet {
    /// As configured.
    pub settings: Arc<UpstreamSettings>,
    members: ArcSwap<Vec<Arc<Member>>>,
    /// Held by whoever replaces members.
    replacing: Mutex<()>,
}

/// One that requests can be sent to: an address of a server.
#[derive(Debug)]
pub struct Member {
    /// Its place among the servers of the fleet.
    pub index: usize,
    /// As configured.
    pub server: ServerSettings,
    /// Where; none = the system finds it out for each connection.
    pub address: Option<SocketAddr>,
}

impl Fleet {
    /// A member for each server as the configuration has it.
    pub fn new(settings: Arc<UpstreamSettings>) -> Self {
        let members = settings.servers.iter().enumerate().map(|(index, server)| {
            let address = server.host.parse::<IpAddr>().ok().map(|host| SocketAddr::new(host, server.port));
            Arc::new(Member { index, server: server.clone(), address })
        });
        let members = ArcSwap::from_pointee(members.collect::<Vec<_>>());
        Fleet { settings, members, replacing: Mutex::default() }
    }

    /// Who can be asked. It is another list after each change.
    pub fn members(&self) -> Arc<Vec<Arc<Member>>> {
        self.members.load_full()
    }

    /// These are the addresses of one of its servers from now on. Members that stay are the same as before.
    pub fn resolved(&self, index: usize, addresses: &[SocketAddr]) {
        let _replacing = self.replacing.lock().unwrap_or_else(PoisonError::into_inner);
        let before = self.members.load();
        let (own, others): (Vec<_>, Vec<_>) = before.iter().cloned().partition(|member| member.index == index);
        let server = &self.settings.servers[index];
        let mut now: Vec<_> = addresses.to_vec();
        now.sort_unstable();
        now.dedup();
        if own.len() == now.len() && own.iter().all(|member| member.address.is_some_and(|known| now.contains(&known))) {
            return;
        }
        let member = |address| {
            let known = own.iter().find(|member| member.address == Some(address)).cloned();
            known.unwrap_or_else(|| Arc::new(Member { index, server: server.clone(), address: Some(address) }))
        };
        self.members.store(Arc::new(others.into_iter().chain(now.into_iter().map(member)).collect()));
    }
}

impl Member {
    /// Connects.
    ///
    /// # Errors
    /// Nobody listens, the name has no address, or TLS fails.
    pub(super) async fn connect(&self) -> io::Result<Stream> {
        let stream = match self.address {
            Some(address) => TcpStream::connect(address).await?,
            None => TcpStream::connect((&*self.server.host, self.server.port)).await?,
        };
        Stream::over(stream, self.server.tls.as_ref()).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fleet(servers: &[&str]) -> Fleet {
        let server =
            |host: &&str| ServerSettings { authority: (*host).into(), host: (*host).into(), port: 80, tls: None };
        let second = Duration::from_secs(1);
        Fleet::new(Arc::new(UpstreamSettings {
            name: "api".into(),
            servers: servers.iter().map(server).collect(),
            protocol: Protocol::Http1,
            connect_timeout: second,
            response_timeout: second,
            pool_idle_timeout: second,
        }))
    }

    #[test]
    fn members_that_stay_are_the_same() {
        let fleet = fleet(&["name", "10.0.0.9"]);
        let [one, two, three] = ["10.0.0.1:80", "10.0.0.2:80", "10.0.0.3:80"].map(|text| text.parse().unwrap());
        let of = |address| fleet.members().iter().find(|member| member.address == Some(address)).cloned();
        let literal = of("10.0.0.9:80".parse().unwrap()).expect("an address has a member from the start");
        fleet.resolved(0, &[one, two, one]);
        let kept = of(two).unwrap();
        assert_eq!(fleet.members().len(), 3, "each address once, and the other server");
        fleet.resolved(0, &[three, two]);
        assert!(Arc::ptr_eq(&kept, &of(two).unwrap()) && of(one).is_none() && of(three).is_some());
        let before = fleet.members();
        fleet.resolved(0, &[two, three]);
        assert!(Arc::ptr_eq(&before, &fleet.members()), "nothing has changed");
        fleet.resolved(0, &[]);
        assert!(fleet.members().iter().all(|member| Arc::ptr_eq(member, &literal)), "{:?}", fleet.members());
    }
}
