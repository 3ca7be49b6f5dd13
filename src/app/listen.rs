//! Listening sockets and Unix sockets. The process opens TCP sockets, or inherits them in `LISTEN_FDS` from systemd or
//! from the old process of a hot restart. It opens a Unix socket again, and replaces the file of the old process.

use std::net::{SocketAddr, TcpListener as StdListener};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::{env, fs, io};

use listenfd::ListenFd;
use socket2::{Domain, Protocol, SockAddr, Socket, Type};
use tokio::net::TcpListener;
use tracing::warn;

use crate::app::hot_restart::is_hot_restart;
use crate::listener::{Acceptor, BACKLOG};
use crate::snapshot::listeners::ListenAddress;
use crate::snapshot::settings::AdminSocket;

/// A listening socket.
#[derive(Debug)]
pub(super) enum ListeningSocket {
    Tcp(StdListener),
    Unix(UnixListener),
}

impl ListeningSocket {
    /// Register the socket with the current tokio runtime.
    pub(super) fn into_acceptor(self) -> io::Result<Acceptor> {
        Ok(match self {
            ListeningSocket::Tcp(socket) => Acceptor::Tcp(TcpListener::from_std(socket)?),
            ListeningSocket::Unix(socket) => Acceptor::Unix(tokio::net::UnixListener::from_std(socket)?),
        })
    }

    /// Return the TCP socket. Return `None` for a Unix socket.
    pub(super) fn tcp(&self) -> Option<&StdListener> {
        match self {
            ListeningSocket::Tcp(socket) => Some(socket),
            ListeningSocket::Unix(_) => None,
        }
    }
}

/// The sockets of one listener.
#[derive(Debug)]
pub(super) struct ListenerSockets {
    /// The bound address. If the configured port is 0, it contains the port that the kernel chose.
    pub(super) address: ListenAddress,
    /// Sockets by worker. Each worker has at least one socket. A worker has several sockets if the process inherited
    /// more sockets than it has workers.
    pub(super) by_worker: Vec<Vec<ListeningSocket>>,
}

/// Inherited listening sockets that have not been assigned to a listener yet.
#[derive(Debug)]
pub(super) struct InheritedSockets(Vec<StdListener>);

impl InheritedSockets {
    /// Take the sockets from the environment. Call this function only once, and before other threads start, because it
    /// changes environment variables.
    pub(super) fn from_env() -> Self {
        let mut handed = ListenFd::from_env();
        let count = handed.len();
        let take = |index| match handed.take_tcp_listener(index) {
            Ok(socket) => socket,
            Err(error) => {
                warn!(%error, "cannot use an inherited socket (LISTEN_FDS)");
                None
            }
        };
        InheritedSockets((0..count).filter_map(take).collect())
    }

    /// Take all inherited sockets with this address. If the port is 0, use the address of the first inherited socket
    /// with the same IP address.
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

    /// Claim or open one socket, for a listener that a single thread serves.
    pub(super) fn open_single(&mut self, address: SocketAddr) -> io::Result<StdListener> {
        match self.claim(address)?.into_iter().next() {
            Some(socket) => Ok(socket),
            None => listen(address, false),
        }
    }

    /// Claim or open the sockets of a listener, at least one for each worker.
    pub(super) fn open(&mut self, address: SocketAddr, workers: usize) -> io::Result<ListenerSockets> {
        let mut by_worker: Vec<Vec<StdListener>> = (0..workers).map(|_| Vec::new()).collect();
        let mut address = address;
        for (index, socket) in self.claim(address)?.into_iter().enumerate() {
            address = socket.local_addr()?;
            by_worker[index % workers].push(socket);
        }
        if by_worker[0].is_empty() {
            // With SO_REUSEPORT, a second gateway process would silently receive half of the connections. Therefore,
            // first bind a probe socket without this option, which fails if another process listens on the address. Do
            // not listen on the probe socket, because closing a listening socket resets its connections.
            let probe = bind(address, false)?;
            // If the port is 0, the kernel has chosen a port for the probe socket. Use this port for all workers.
            address = probe.local_addr()?.as_socket().unwrap_or(address);
        }
        for worker in 0..workers {
            if by_worker[worker].is_empty() {
                // Opening another socket fails if the inherited socket has no SO_REUSEPORT. The workers then share the
                // inherited socket.
                let socket = match (listen(address, true), by_worker[0].first()) {
                    (Err(_), Some(shared)) => shared.try_clone(),
                    (socket, _) => socket,
                };
                by_worker[worker].push(socket?);
            }
        }
        let by_worker = by_worker.into_iter().map(|own| own.into_iter().map(ListeningSocket::Tcp).collect()).collect();
        Ok(ListenerSockets { address: ListenAddress::Tcp(address), by_worker })
    }

    /// Close the sockets that no listener claimed, and log a warning for each.
    pub(super) fn close_unclaimed(self) {
        for address in self.0.iter().filter_map(|socket| socket.local_addr().ok()) {
            warn!(%address, "closed an inherited socket: no listener has its address");
        }
    }
}

/// Check that an address can be bound. The socket never listens, and is closed immediately. Port 0 can always be bound.
pub(crate) fn probe(address: SocketAddr) -> io::Result<()> {
    bind(address, false).map(drop)
}

/// Open the Unix socket of a listener. All workers share it, because the kernel distributes the connections of TCP
/// sockets only.
pub(super) fn open_unix(path: &Path, workers: usize) -> io::Result<(ListenerSockets, SocketFile)> {
    let (socket, file) = SocketFile::open(path, None, BACKLOG as i32)?;
    let by_worker = (0..workers).map(|_| Ok(vec![ListeningSocket::Unix(socket.try_clone()?)]));
    let by_worker = by_worker.collect::<io::Result<_>>()?;
    Ok((ListenerSockets { address: ListenAddress::Unix(path.to_owned()), by_worker }, file))
}

fn listen(address: SocketAddr, reuse_port: bool) -> io::Result<StdListener> {
    let socket = bind(address, reuse_port)?;
    socket.listen(BACKLOG as i32)?;
    Ok(socket.into())
}

fn bind(address: SocketAddr, reuse_port: bool) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    // With SO_REUSEADDR, a restart does not wait for connections of the previous process in the state TIME_WAIT.
    socket.set_reuse_address(true)?;
    socket.set_reuse_port(reuse_port)?;
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    Ok(socket)
}

// === Unix sockets. Only the gateway's user and root can connect to the admin socket ===

/// Permissions of the admin socket: read and write for its owner.
const ADMIN_SOCKET_MODE: u32 = 0o600;

/// Maximum length of the listen queue of the admin socket.
const ADMIN_BACKLOG: i32 = 64;

/// File name of the default socket in the runtime directory.
const DEFAULT_NAME: &str = "admin.sock";

/// Return the path of the admin socket. The default is `admin.sock` in the runtime directory that systemd creates
/// (`RuntimeDirectory=`). Without such a directory, return `None`.
pub(crate) fn socket_path(configured: &AdminSocket) -> Option<PathBuf> {
    match configured {
        AdminSocket::Off => None,
        AdminSocket::Path(path) => Some(path.clone()),
        AdminSocket::Default => default_path(),
    }
}

/// Return `$RUNTIME_DIRECTORY/admin.sock`. Return `None` if the variable is not set.
pub(crate) fn default_path() -> Option<PathBuf> {
    let directories = env::var("RUNTIME_DIRECTORY").ok()?;
    // systemd separates several directories with colons. Use the first one.
    let first = directories.split(':').next().filter(|directory| !directory.is_empty())?;
    Some(Path::new(first).join(DEFAULT_NAME))
}

/// The file of a Unix socket. It has a temporary name until [`publish`](Self::publish). In a hot restart, the new
/// process therefore replaces the socket of the old process only when the new process serves requests. The file is
/// removed on drop.
#[derive(Debug)]
pub(super) struct SocketFile {
    path: PathBuf,
    /// Current path of the file: the temporary path, or the final path after renaming.
    current: PathBuf,
    /// Device and inode of the file. They show whether another process has replaced the file.
    id: (u64, u64),
}

impl SocketFile {
    /// Create the admin socket.
    ///
    /// # Errors
    /// See [`Self::open`].
    pub(super) fn open_admin(path: &Path) -> io::Result<(UnixListener, Self)> {
        SocketFile::open(path, Some(ADMIN_SOCKET_MODE), ADMIN_BACKLOG)
    }

    /// Create the socket with its temporary name, and listen on it. Its permissions are `mode`, or those of the umask.
    ///
    /// # Errors
    /// The directory does not exist or is not writable, another process listens on the path, or the path is not a
    /// socket.
    fn open(path: &Path, mode: Option<u32>, backlog: i32) -> io::Result<(UnixListener, Self)> {
        match fs::symlink_metadata(path) {
            Ok(found) if !found.file_type().is_socket() => {
                return Err(io::Error::new(
                    io::ErrorKind::AlreadyExists,
                    "a file that is not a socket exists at this path",
                ));
            }
            // Connecting succeeds only if a process listens on the socket. In a hot restart, the old process still
            // listens. The new process may replace the socket of the old process.
            Ok(_) if !is_hot_restart() && UnixStream::connect(path).is_ok() => {
                return Err(io::Error::new(io::ErrorKind::AddrInUse, "another process listens on this socket"));
            }
            Ok(_) | Err(_) => {}
        }
        let current = path.with_extension(format!("{}.new", std::process::id()));
        let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
        // A killed process with the same process id may have left this file.
        let _ = fs::remove_file(&current);
        socket.bind(&SockAddr::unix(&current)?)?;
        // Set the permissions before `listen`. Connecting fails before `listen`, so no other user can connect before
        // the permissions are set.
        if let Some(mode) = mode {
            fs::set_permissions(&current, fs::Permissions::from_mode(mode))?;
        }
        socket.listen(backlog)?;
        socket.set_nonblocking(true)?;
        let found = fs::symlink_metadata(&current)?;
        let file = SocketFile { path: path.to_owned(), current, id: (found.dev(), found.ino()) };
        Ok((socket.into(), file))
    }

    /// Rename the socket to its final name. Replace a file that an earlier process left there.
    ///
    /// # Errors
    /// The directory is not writable.
    pub(super) fn publish(&mut self) -> io::Result<()> {
        fs::rename(&self.current, &self.path)?;
        self.current.clone_from(&self.path);
        Ok(())
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let is_own = |found: fs::Metadata| (found.dev(), found.ino()) == self.id;
        if fs::symlink_metadata(&self.current).is_ok_and(is_own)
            && let Err(error) = fs::remove_file(&self.current)
        {
            warn!(path = %self.current.display(), %error, "cannot remove the Unix socket");
        }
    }
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
