//! Listening sockets: opened by this process, or inherited in `LISTEN_FDS` from systemd or from the old process of a
//! hot restart.

use std::io;
use std::net::{SocketAddr, TcpListener as StdListener};

use listenfd::ListenFd;
use socket2::{Domain, Protocol, Socket, Type};
use tracing::warn;

use crate::listener::BACKLOG;

/// The sockets of one listener.
#[derive(Debug)]
pub(super) struct ListenerSockets {
    /// Bound address. If port 0 was configured, the address has the port that the system chose.
    pub(super) address: SocketAddr,
    /// Sockets by worker. Each worker has at least one socket, and more than one if the process has inherited more
    /// sockets than it has workers.
    pub(super) by_worker: Vec<Vec<StdListener>>,
}

/// Inherited listening sockets that no listener has claimed yet.
#[derive(Debug)]
pub(super) struct InheritedSockets(Vec<StdListener>);

impl InheritedSockets {
    /// Take the sockets from the environment. Call this function once, before other threads start, because it changes
    /// environment variables.
    pub(super) fn from_env() -> Self {
        let mut handed = ListenFd::from_env();
        let count = handed.len();
        let take = |index| match handed.take_tcp_listener(index) {
            Ok(socket) => socket,
            Err(error) => {
                warn!(%error, "cannot use a descriptor of LISTEN_FDS");
                None
            }
        };
        InheritedSockets((0..count).filter_map(take).collect())
    }

    /// Take all inherited sockets that are bound to an address. If the port is 0, take the sockets of the first
    /// inherited address with the same IP address.
    fn claim(&mut self, wanted: SocketAddr) -> io::Result<Vec<StdListener>> {
        let fits = |found: &SocketAddr| found.ip() == wanted.ip() && [0, found.port()].contains(&wanted.port());
        let Some(address) = self.0.iter().filter_map(|socket| socket.local_addr().ok()).find(fits) else {
            return Ok(Vec::new());
        };
        let has_address = |socket: &mut StdListener| socket.local_addr().is_ok_and(|found| found == address);
        let claimed: Vec<_> = self.0.extract_if(.., has_address).collect();
        claimed.iter().try_for_each(|socket| socket.set_nonblocking(true))?;
        Ok(claimed)
    }

    /// Claim or open one socket, for a listener that is served by one thread.
    pub(super) fn open_single(&mut self, address: SocketAddr) -> io::Result<StdListener> {
        match self.claim(address)?.into_iter().next() {
            Some(socket) => Ok(socket),
            None => listen(address, false),
        }
    }

    /// Claim or open the sockets of a listener for all workers.
    pub(super) fn open(&mut self, address: SocketAddr, workers: usize) -> io::Result<ListenerSockets> {
        let mut by_worker: Vec<Vec<StdListener>> = (0..workers).map(|_| Vec::new()).collect();
        let mut address = address;
        for (index, socket) in self.claim(address)?.into_iter().enumerate() {
            address = socket.local_addr()?;
            by_worker[index % workers].push(socket);
        }
        if by_worker[0].is_empty() {
            // With SO_REUSEPORT, a second process would silently receive half of the connections. First bind a probe
            // socket without this option, which fails if another process listens. The probe socket does not listen,
            // because closing a listening socket would reset clients.
            let probe = bind(address, false)?;
            // If the port is 0, the system has chosen a port for the probe socket. Use this port for all workers.
            address = probe.local_addr()?.as_socket().unwrap_or(address);
        }
        for worker in 0..workers {
            if by_worker[worker].is_empty() {
                // Opening further sockets fails if the inherited socket lacks SO_REUSEPORT. The workers then share the
                // inherited socket.
                let socket = match (listen(address, true), by_worker[0].first()) {
                    (Err(_), Some(shared)) => shared.try_clone(),
                    (socket, _) => socket,
                };
                by_worker[worker].push(socket?);
            }
        }
        Ok(ListenerSockets { address, by_worker })
    }

    /// Close the sockets that no listener has claimed, and log them.
    pub(super) fn close_unclaimed(self) {
        for address in self.0.iter().filter_map(|socket| socket.local_addr().ok()) {
            warn!(%address, "closed an inherited socket: no listener has its address");
        }
    }
}

/// Check that an address can be bound. The socket is closed at once, and never listens. Port 0 can always be bound.
pub(crate) fn probe(address: SocketAddr) -> io::Result<()> {
    bind(address, false).map(drop)
}

fn listen(address: SocketAddr, reuse_port: bool) -> io::Result<StdListener> {
    let socket = bind(address, reuse_port)?;
    socket.listen(BACKLOG as i32)?;
    Ok(socket.into())
}

fn bind(address: SocketAddr, reuse_port: bool) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    // Set SO_REUSEADDR, so that a restart need not wait for connections of the previous process in TIME_WAIT.
    socket.set_reuse_address(true)?;
    socket.set_reuse_port(reuse_port)?;
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use std::net::TcpStream;

    use super::*;

    #[test]
    fn probe_refuses_connections_and_detects_an_address_in_use() {
        let any = "127.0.0.1:0".parse().unwrap();
        let probe = bind(any, false).unwrap();
        let address = probe.local_addr().unwrap().as_socket().unwrap();
        let refused = TcpStream::connect(address).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused, "{refused}");
        drop(probe);
        let _listener = listen(address, true).unwrap();
        let taken = bind(address, false).unwrap_err();
        assert_eq!(taken.kind(), io::ErrorKind::AddrInUse, "{taken}");
    }
}
