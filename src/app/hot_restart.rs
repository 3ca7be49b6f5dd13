//! Another process takes the place of this one: it is started with our listening sockets, and once it serves, this one
//! finishes what runs. The sockets never close, so no connection is refused or reset.

use std::net::TcpListener as StdListener;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream as StdStream;
use std::process::{Child, Command, ExitStatus};
use std::time::Duration;
use std::{env, io};

use rustix::io::{FdFlags, fcntl_dupfd_cloexec, fcntl_setfd};
use tokio::io::AsyncReadExt;
use tokio::net::UnixStream;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use crate::app::sd_notify;
use crate::app::sd_notify::{PARENT_PID_ENV, READY_MESSAGE};

/// The new process has so long until it serves.
const READY_TIMEOUT: Duration = Duration::from_secs(60);

/// The first descriptor that is no standard stream.
const FIRST_FREE_FD: RawFd = 3;

/// What is handed over.
#[derive(Debug)]
pub struct HotRestart {
    /// In the order of the listeners, that of the operator last.
    pub(super) sockets: Vec<StdListener>,
    /// Cancelled when the operator is to ask the other process.
    pub(super) admin_stop: CancellationToken,
}

/// Why this process stays.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum HotRestartError {
    #[error("the new process cannot be started: {0}")]
    Spawn(#[from] io::Error),
    #[error("the new process has ended: {0}; what it says is above")]
    Exited(ExitStatus),
    #[error("the new process does not serve after {READY_TIMEOUT:?}")]
    Timeout,
}

impl HotRestart {
    /// Starts the program again, as it is found now under the name that this process was started with, and comes back with
    /// its id when it serves. Dropping the future ends it before.
    ///
    /// # Errors
    /// It does not come so far; everything is as before.
    pub async fn start(&self) -> Result<u32, HotRestartError> {
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

    /// Leaves all to the other process.
    pub fn finish(self, child_id: u32) {
        sd_notify::notify_main_pid(child_id);
        self.admin_stop.cancel();
    }

    fn spawn(&self, ready_pipe: StdStream) -> io::Result<Child> {
        let (first, copies) = inheritable_copies(&self.sockets)?;
        let mut arguments = env::args_os();
        let program = arguments.next().ok_or(io::ErrorKind::NotFound)?;
        let child = Command::new(program)
            .args(arguments)
            // No process can know the id of another before it is there: without LISTEN_PID it is for whoever gets it.
            .env_remove("LISTEN_PID")
            .env("LISTEN_FDS", copies.len().to_string())
            .env("LISTEN_FDS_FIRST_FD", first.to_string())
            .env(PARENT_PID_ENV, std::process::id().to_string())
            .stdin(OwnedFd::from(ready_pipe))
            .spawn();
        // It has them, and nobody else should.
        drop(copies);
        child
    }
}

/// A process that is ended unless it serves.
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
        // It may have ended by itself.
        let _ = self.kill();
    }
}

/// Copies of sockets that a child inherits, with numbers that follow each other from the first one's.
fn inheritable_copies(sockets: &[StdListener]) -> io::Result<(RawFd, Vec<OwnedFd>)> {
    let mut first = FIRST_FREE_FD;
    'next: loop {
        let mut copies = Vec::with_capacity(sockets.len());
        for (number, socket) in (first..).zip(sockets) {
            let copy = fcntl_dupfd_cloexec(socket, number)?;
            if copy.as_raw_fd() != number {
                // That one is taken: perhaps from here on.
                first = copy.as_raw_fd();
                continue 'next;
            }
            fcntl_setfd(&copy, FdFlags::empty())?;
            copies.push(copy);
        }
        return Ok((first, copies));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_follow_each_other_whatever_is_open() {
        let sockets: Vec<_> = (0..5).map(|_| StdListener::bind("127.0.0.1:0").unwrap()).collect();
        // Gaps of one and two.
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
