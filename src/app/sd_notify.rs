//! State notifications to systemd (`Type=notify`), and to the old process of a hot restart.

use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::parent_id;
use std::{env, io};

use sd_notify::NotifyState;
use tracing::warn;

/// Environment variable with the process id of the old process. The new process notifies its parent only if the id
/// matches, because other processes can inherit the variable.
pub(super) const PARENT_PID_ENV: &str = "SLUICEGATE_PREDECESSOR";

/// Message that the new process writes to the socket on its standard input. The old process waits for this message.
pub(super) const READY_MESSAGE: &[u8] = b"serves";

/// Report that all workers serve requests.
pub(super) fn notify_ready() {
    notify(&[NotifyState::Ready]);
    if is_hot_restart()
        && let Err(error) = notify_parent()
    {
        warn!(%error, "cannot notify the old process that the new process is ready");
    }
}

/// Return whether this is the new process of a hot restart, and the old process is still running.
pub(super) fn is_hot_restart() -> bool {
    env::var(PARENT_PID_ENV).ok().and_then(|id| id.parse().ok()) == Some(parent_id())
}

fn notify_parent() -> io::Result<()> {
    UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?).write_all(READY_MESSAGE)
}

/// Report that a reload begins.
pub(super) fn notify_reloading() {
    // `RELOADING=1` needs `MONOTONIC_USEC=` (sd_notify(3)).
    if let Ok(now) = NotifyState::monotonic_usec_now() {
        notify(&[NotifyState::Reloading, now]);
    }
}

/// Report that a reload has ended, with or without success.
pub(super) fn notify_reloaded() {
    notify(&[NotifyState::Ready]);
}

/// Report that the process drains connections and then exits.
pub fn notify_stopping() {
    notify(&[NotifyState::Stopping]);
}

/// Report the new main process of the service after a hot restart.
pub(super) fn notify_main_pid(id: u32) {
    notify(&[NotifyState::MainPid(id)]);
}

/// Send a notification. Without a service manager (`NOTIFY_SOCKET` is not set), do nothing.
fn notify(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        warn!(%error, "cannot notify the service manager");
    }
}
