//! The watchdog of systemd (`WatchdogSec`): systemd restarts the gateway if a worker is stalled.

use std::env;
use std::io;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use sd_notify::NotifyState;

use crate::admin::heartbeats::Heartbeats;
use crate::app::hot_restart::notify;

/// Variable in which systemd passes `WatchdogSec` in µs (sd_watchdog_enabled(3)). `WATCHDOG_PID` is ignored, because
/// another process serves after a hot restart.
const WATCHDOG_USEC: &str = "WATCHDOG_USEC";

/// Notify systemd twice per `WatchdogSec`, as long as no worker is stalled. Do nothing if no watchdog is configured.
///
/// # Errors
/// The thread cannot be started.
pub(super) fn start(heartbeats: Arc<Heartbeats>) -> io::Result<()> {
    let Some(timeout) = timeout() else { return Ok(()) };
    let run = move || {
        loop {
            if heartbeats.stalled().is_none() {
                notify(&[NotifyState::Watchdog]);
            }
            thread::sleep(timeout / 2);
        }
    };
    // Do not join the thread. It ends with the process.
    thread::Builder::new().name("watchdog".to_owned()).spawn(run).map(drop)
}

fn timeout() -> Option<Duration> {
    let usec: u64 = env::var(WATCHDOG_USEC).ok()?.parse().ok()?;
    (usec > 0).then(|| Duration::from_micros(usec))
}
