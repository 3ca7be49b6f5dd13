//! The admin socket: a unix socket to which only the user of the gateway and root can connect.

use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::{env, fs, io};

use socket2::{Domain, SockAddr, Socket, Type};
use tracing::warn;

use crate::app::sd_notify::is_hot_restart;
use crate::snapshot::settings::AdminSocket;

/// Permissions of the socket: read and write for its owner.
const MODE: u32 = 0o600;

/// Length of the queue of connections that are not accepted yet.
const BACKLOG: i32 = 64;

/// Name of the default socket in the runtime directory.
const DEFAULT_NAME: &str = "admin.sock";

/// Return the path of the admin socket. The default is `admin.sock` in the runtime directory that systemd sets
/// (`RuntimeDirectory=`). Without a runtime directory, there is no socket.
pub(crate) fn socket_path(configured: &AdminSocket) -> Option<PathBuf> {
    match configured {
        AdminSocket::Off => None,
        AdminSocket::Path(path) => Some(path.clone()),
        AdminSocket::Default => default_path(),
    }
}

/// Return `$RUNTIME_DIRECTORY/admin.sock`, if the variable is set.
pub(crate) fn default_path() -> Option<PathBuf> {
    let directories = env::var("RUNTIME_DIRECTORY").ok()?;
    // Use the first directory, because systemd separates several directories by colons.
    let first = directories.split(':').next().filter(|directory| !directory.is_empty())?;
    Some(Path::new(first).join(DEFAULT_NAME))
}

/// The listening socket. The socket has a temporary name until [`publish`](Self::publish). During a hot restart, the
/// new process therefore does not replace the socket of the old process before it serves requests. Dropping the value
/// removes the file.
#[derive(Debug)]
pub(super) struct AdminSocketFile {
    path: PathBuf,
    /// Current path of the socket file, which changes when the socket is renamed.
    current: PathBuf,
    /// Device and inode of the file, because another process may have replaced it.
    id: (u64, u64),
}

impl AdminSocketFile {
    /// Create the socket with its temporary name, and start to listen.
    ///
    /// # Errors
    /// The directory does not exist or is not writable, another gateway uses the path, or the path is another kind of
    /// file.
    pub(super) fn open(path: &Path) -> io::Result<(UnixListener, Self)> {
        match fs::symlink_metadata(path) {
            Ok(found) if !found.file_type().is_socket() => {
                return Err(io::Error::new(
                    io::ErrorKind::AlreadyExists,
                    "a file that is not a socket exists at this path",
                ));
            }
            // A connection succeeds only while a process listens on the socket. In a hot restart, the new process
            // replaces the socket of its parent, although a process listens on it.
            Ok(_) if !is_hot_restart() && UnixStream::connect(path).is_ok() => {
                return Err(io::Error::new(io::ErrorKind::AddrInUse, "another process listens there"));
            }
            Ok(_) | Err(_) => {}
        }
        let current = path.with_extension(format!("{}.new", std::process::id()));
        let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
        // Remove the file of an earlier process that had the same process ID and was killed.
        let _ = fs::remove_file(&current);
        socket.bind(&SockAddr::unix(&current)?)?;
        // Set the permissions between `bind` and `listen`: connections fail before `listen`, so no other user can have
        // connected before.
        fs::set_permissions(&current, fs::Permissions::from_mode(MODE))?;
        socket.listen(BACKLOG)?;
        socket.set_nonblocking(true)?;
        let found = fs::symlink_metadata(&current)?;
        let file = AdminSocketFile { path: path.to_owned(), current, id: (found.dev(), found.ino()) };
        Ok((socket.into(), file))
    }

    /// Rename the socket to its final name, and replace a file that an earlier process has left.
    ///
    /// # Errors
    /// The directory is not writable anymore.
    pub(super) fn publish(&mut self) -> io::Result<()> {
        fs::rename(&self.current, &self.path)?;
        self.current.clone_from(&self.path);
        Ok(())
    }
}

impl Drop for AdminSocketFile {
    fn drop(&mut self) {
        let is_own = |found: fs::Metadata| (found.dev(), found.ino()) == self.id;
        if fs::symlink_metadata(&self.current).is_ok_and(is_own)
            && let Err(error) = fs::remove_file(&self.current)
        {
            warn!(path = %self.current.display(), %error, "cannot remove the admin socket");
        }
    }
}
