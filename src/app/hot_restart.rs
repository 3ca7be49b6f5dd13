//! Hot restart: start a new process that inherits the listening sockets of this process. When the new process serves
//! requests, this process drains its connections. The listening sockets are never closed, so no connection is refused
//! or reset. This file also sends state notifications to systemd and to the old process.

use std::io::Write;
use std::net::TcpListener as StdListener;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream as StdStream;
use std::os::unix::process::parent_id;
use std::process::{Child, Command, ExitStatus};
use std::sync::Arc;
use std::time::Duration;
use std::{env, io};

use ::sd_notify::NotifyState;
use rustix::io::{FdFlags, fcntl_dupfd_cloexec, fcntl_setfd};
use tokio::io::AsyncReadExt;
use tokio::net::UnixStream;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tracing::warn;

use crate::limiter::metrics::Counter;

/// Maximum time in which the new process must become ready.
const READY_TIMEOUT: Duration = Duration::from_secs(60);

/// First file descriptor after standard input, output and error.
const FIRST_FREE_FD: RawFd = 3;

/// The sockets to pass to the new process.
#[derive(Debug)]
pub struct HotRestart {
    /// Sockets in the order of the listeners, followed by the socket of the admin listener.
    pub(super) sockets: Vec<StdListener>,
    /// Stops the admin listener of the old process.
    pub(super) admin_stop: CancellationToken,
    /// See [`counter`].
    pub(super) results: Arc<Counter<2>>,
    /// Whether the configuration was read from the standard input.
    pub(super) reads_input: bool,
}

/// The reason why a hot restart failed. The old process continues to serve requests.
#[derive(Debug, thiserror::Error)]
pub enum HotRestartError {
    /// The sockets cannot be duplicated, or the program cannot be executed.
    #[error("cannot start the new process: {0}")]
    Spawn(#[from] io::Error),
    /// The new process exited before it was ready.
    #[error("the new process exited before it was ready: {0}; the preceding log messages show why")]
    Exited(ExitStatus),
    /// A new process cannot read the configuration.
    #[error("the configuration was read from standard input, which a new process cannot read again")]
    StandardInput,
    /// The new process was not ready in time.
    #[error("the new process was not ready within {READY_TIMEOUT:?}")]
    Timeout,
}

impl HotRestart {
    /// Start the program again. Return the process id of the new process when it serves requests. The program is the
    /// file to which the path in `argv[0]` refers, so it may be a new version. If the future is dropped before it
    /// completes, the new process is killed.
    ///
    /// # Errors
    /// The new process cannot be started, or does not become ready. The old process keeps its sockets.
    pub async fn start(&self) -> Result<u32, HotRestartError> {
        notify(&[NotifyState::Status("hot restart: starting a new process")]);
        let started = self.try_start().await;
        if let Err(error) = &started {
            self.results.increment(FAILED);
            notify(&[NotifyState::Status(&format!("{FAILED_STATUS}: {error}"))]);
        }
        started
    }

    async fn try_start(&self) -> Result<u32, HotRestartError> {
        if self.reads_input {
            return Err(HotRestartError::StandardInput);
        }
        let (ours, theirs) = StdStream::pair()?;
        let mut process = ChildProcess(Some(self.spawn(theirs)?));
        ours.set_nonblocking(true)?;
        let mut ready_pipe = UnixStream::from_std(ours)?;
        let mut message = Vec::new();
        match timeout(READY_TIMEOUT, (&mut ready_pipe).take(READY_MESSAGE.len() as u64).read_to_end(&mut message)).await
        {
            Ok(Ok(_)) if message == READY_MESSAGE => Ok(process.disarm()),
            Ok(_) => Err(HotRestartError::Exited(process.kill()?)),
            Err(_) => Err(HotRestartError::Timeout),
        }
    }

    /// Make the new process the main process of the systemd service, and stop the admin listener of the old process.
    pub fn finish(self, child_id: u32) {
        notify(&[NotifyState::MainPid(child_id), NotifyState::Status("")]);
        self.admin_stop.cancel();
    }

    fn spawn(&self, ready_pipe: StdStream) -> io::Result<Child> {
        let (first, copies) = inheritable_copies(&self.sockets)?;
        let mut arguments = env::args_os();
        let program = arguments.next().ok_or(io::ErrorKind::NotFound)?;
        let child = Command::new(program)
            .args(arguments)
            // Do not set LISTEN_PID. The process id of the child is unknown before it starts. Without LISTEN_PID, the
            // child uses the sockets regardless of its process id.
            .env_remove("LISTEN_PID")
            .env("LISTEN_FDS", copies.len().to_string())
            .env("LISTEN_FDS_FIRST_FD", first.to_string())
            .env(PARENT_PID_ENV, std::process::id().to_string())
            .stdin(OwnedFd::from(ready_pipe))
            .spawn();
        // The child process has inherited the duplicates. Close them in this process, so that no other child inherits
        // them.
        drop(copies);
        child
    }
}

/// Index of failed hot restarts in the counter of results. Index 0 counts the one that has started this process.
const FAILED: usize = 1;

/// Begin of the status that systemd shows after a failed hot restart. `packaging/hot-restart` waits for it.
const FAILED_STATUS: &str = "hot restart failed";

/// Return the counter of hot restarts.
pub(super) fn counter() -> Arc<Counter<2>> {
    let results = Arc::<Counter<2>>::default();
    results.add(0, is_hot_restart().into());
    results
}

/// A child process that is killed on drop, unless [`disarm`](Self::disarm) was called.
struct ChildProcess(Option<Child>);

impl ChildProcess {
    fn disarm(&mut self) -> u32 {
        self.0.take().map_or(0, |process| process.id())
    }

    fn kill(&mut self) -> io::Result<ExitStatus> {
        let Some(mut process) = self.0.take() else { return Ok(ExitStatus::default()) };
        process.kill()?;
        process.wait()
    }
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        // `kill` fails if the process has already exited.
        let _ = self.kill();
    }
}

/// Duplicate the sockets for a child process. The duplicates have consecutive descriptors without CLOEXEC. Return the
/// first descriptor.
fn inheritable_copies(sockets: &[StdListener]) -> io::Result<(RawFd, Vec<OwnedFd>)> {
    let mut first = FIRST_FREE_FD;
    'next: loop {
        let mut copies = Vec::with_capacity(sockets.len());
        for (number, socket) in (first..).zip(sockets) {
            let copy = fcntl_dupfd_cloexec(socket, number)?;
            if copy.as_raw_fd() != number {
                // The descriptor number is in use. Start over at the next free number.
                first = copy.as_raw_fd();
                continue 'next;
            }
            fcntl_setfd(&copy, FdFlags::empty())?;
            copies.push(copy);
        }
        return Ok((first, copies));
    }
}

// === State notifications to systemd (`Type=notify`), and to the old process of a hot restart ===

/// Environment variable with the process id of the old process. The new process notifies its parent only if the parent
/// has this id, because other processes can inherit the variable.
pub(super) const PARENT_PID_ENV: &str = "SLUICEGATE_PREDECESSOR";

/// Message that the new process sends to the old process when the new process serves requests. The standard input of
/// the new process is a socket to the old process.
pub(super) const READY_MESSAGE: &[u8] = b"serves";

/// Notify systemd, and the old process of a hot restart, that all workers serve requests.
pub(super) fn notify_ready() {
    notify(&[NotifyState::Ready]);
    if is_hot_restart()
        && let Err(error) = notify_parent()
    {
        warn!(%error, "cannot notify the old process that the new process is ready");
    }
}

/// Return whether this process was started by a hot restart and the old process is still running.
pub(super) fn is_hot_restart() -> bool {
    env::var(PARENT_PID_ENV).ok().and_then(|id| id.parse().ok()) == Some(parent_id())
}

fn notify_parent() -> io::Result<()> {
    StdStream::from(io::stdin().as_fd().try_clone_to_owned()?).write_all(READY_MESSAGE)
}

/// Notify systemd that a reload begins.
pub(super) fn notify_reloading() {
    // `RELOADING=1` must come with `MONOTONIC_USEC=` (sd_notify(3)).
    if let Ok(now) = NotifyState::monotonic_usec_now() {
        notify(&[NotifyState::Reloading, now]);
    }
}

/// Notify systemd that a reload has ended, successfully or not.
pub(super) fn notify_reloaded() {
    notify(&[NotifyState::Ready]);
}

/// Notify systemd that the process drains its connections and then exits.
pub fn notify_stopping() {
    notify(&[NotifyState::Stopping]);
}

/// Send a notification to systemd. Do nothing if the gateway does not run under systemd (`NOTIFY_SOCKET` is not set).
pub(super) fn notify(states: &[NotifyState<'_>]) {
    if let Err(error) = ::sd_notify::notify(states) {
        warn!(%error, "cannot notify the service manager");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_have_consecutive_descriptors_despite_open_files() {
        let sockets: Vec<_> = (0..5).map(|_| StdListener::bind("127.0.0.1:0").unwrap()).collect();
        // Occupy descriptors so that the free descriptor numbers have gaps of one and two.
        let mut others: Vec<_> = (0..40).map(|_| StdListener::bind("127.0.0.1:0").unwrap()).collect();
        for index in [30, 29, 25, 20, 19, 10] {
            others.swap_remove(index);
        }
        let (first, copies) = inheritable_copies(&sockets).unwrap();
        let numbers: Vec<_> = copies.iter().map(AsRawFd::as_raw_fd).collect();
        assert_eq!(numbers, (first..first + 5).collect::<Vec<_>>());
        for (copy, socket) in copies.into_iter().zip(&sockets) {
            let copy = StdListener::from(copy);
            assert_eq!(copy.local_addr().unwrap(), socket.local_addr().unwrap());
        }
    }
}
