//! What is done once for all workers, on threads of its own.

use std::convert::Infallible;
use std::sync::{Arc, mpsc};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use tokio::runtime::Builder;
use tokio_util::sync::CancellationToken;

use super::AppError;
use crate::upstream::fleet::Fleet;
use crate::upstream::health;
use crate::upstream::resolve::Names;
use crate::upstream::resolve::directory::Directory;

/// For so long the start waits for the addresses of upstreams. Those that have none by then are 503 until they have.
const FIRST_ADDRESSES: Duration = Duration::from_secs(1);

/// Looks up the names of upstreams, on a thread of its own for all workers.
pub(super) fn look_up(
    fleets: &[Arc<Fleet>],
    stop: CancellationToken,
) -> Result<Option<JoinHandle<Result<(), AppError>>>, AppError> {
    let names = Names::of(fleets);
    if names.is_empty() {
        return Ok(None);
    }
    let runtime = Builder::new_current_thread().enable_all().build().map_err(AppError::Worker)?;
    let (first, looked_up) = mpsc::channel::<Infallible>();
    let run = move || {
        runtime.block_on(stop.run_until_cancelled(names.follow(Directory::System, first)));
        Ok(())
    };
    let thread = thread::Builder::new().name("names".to_owned()).spawn(run).map_err(AppError::Worker)?;
    // Nothing is ever sent: it is over when all who could are gone, or when it takes too long.
    let _ = looked_up.recv_timeout(FIRST_ADDRESSES);
    Ok(Some(thread))
}

/// Checks the health of upstreams, on a thread of its own: a worker that is busy says nothing about servers.
pub(super) fn check_health(
    fleets: &[Arc<Fleet>],
    stop: CancellationToken,
) -> Result<Option<JoinHandle<Result<(), AppError>>>, AppError> {
    let checked: Vec<_> = fleets.iter().filter(|fleet| fleet.settings.health.is_some()).cloned().collect();
    if checked.is_empty() {
        return Ok(None);
    }
    let run = move || {
        let runtime = Builder::new_current_thread().enable_all().build().map_err(AppError::Worker)?;
        runtime.block_on(async {
            checked.into_iter().for_each(|fleet| drop(tokio::spawn(health::watch(fleet))));
            stop.cancelled().await;
        });
        Ok(())
    };
    thread::Builder::new().name("health".to_owned()).spawn(run).map(Some).map_err(AppError::Worker)
}
