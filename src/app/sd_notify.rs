//! Tells whoever started this process how it does: systemd (`Type=notify`), and the process whose place it takes.

use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::parent_id;
use std::{env, io};

use sd_notify::NotifyState;
use tracing::warn;

/// Says whose place this process takes, so that nobody else is taken for it.
pub(super) const PARENT_PID_ENV: &str = "SLUICEGATE_PREDECESSOR";

/// What it waits for at the other end of our standard input.
pub(super) const READY_MESSAGE: &[u8] = b"serves";

/// This process serves.
pub(super) fn notify_ready() {
    notify(&[NotifyState::Ready]);
    let parent = env::var(PARENT_PID_ENV).ok().and_then(|id| id.parse().ok());
    if parent == Some(parent_id())
        && let Err(error) = notify_parent()
    {
        warn!("the process before does not learn that this one serves: {error}");
    }
}

fn notify_parent() -> io::Result<()> {
    UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?).write_all(READY_MESSAGE)
}

/// The configuration is being read again.
pub(super) fn notify_reloading() {
    // systemd wants to know since when (sd_notify(3)).
    if let Ok(now) = NotifyState::monotonic_usec_now() {
        notify(&[NotifyState::Reloading, now]);
    }
}

/// That is done, whatever came of it.
pub(super) fn notify_reloaded() {
    notify(&[NotifyState::Ready]);
}

/// This process finishes what runs and ends.
pub fn notify_stopping() {
    notify(&[NotifyState::Stopping]);
}

/// From now on the service is another process.
pub(super) fn notify_main_pid(id: u32) {
    notify(&[NotifyState::MainPid(id)]);
}

/// Without a service manager there is nobody to tell.
fn notify(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        warn!("the service manager cannot be told: {error}");
    }
}
