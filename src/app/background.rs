//! What is done once for all workers, on a thread of its own: a worker that is busy says nothing about servers.

use std::convert::Infallible;
use std::io;
use std::sync::{Arc, mpsc};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use tokio::runtime::Builder;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::task::AbortHandle;
use tokio_util::sync::CancellationToken;

use super::AppError;
use crate::upstream::fleet::Fleet;
use crate::upstream::health;
use crate::upstream::resolve::Names;
use crate::upstream::resolve::directory::Directory;

/// For so long the addresses of upstreams are waited for. Those that have none by then are 503 until they have.
const FIRST_ADDRESSES: Duration = Duration::from_secs(1);

type Fleets = Arc<[Arc<Fleet>]>;

/// Looks up the names of upstreams and checks their health.
#[derive(Debug)]
pub(super) struct Background(UnboundedSender<(Fleets, mpsc::Sender<Infallible>)>);

/// What is being done.
#[derive(Default)]
struct Tasks {
    /// The fleets whose names are looked up, and the look-ups.
    names: (Vec<Arc<Fleet>>, Option<AbortHandle>),
    checks: Vec<(Arc<Fleet>, AbortHandle)>,
}

impl Background {
    /// Begins with nothing to do.
    pub(super) fn start(stop: CancellationToken) -> Result<(Self, JoinHandle<Result<(), AppError>>), AppError> {
        let (sender, fleets) = unbounded_channel();
        let run = move || {
            let runtime = Builder::new_current_thread().enable_all().build().map_err(AppError::Worker)?;
            runtime.block_on(stop.run_until_cancelled(attend(fleets)));
            Ok(())
        };
        let thread = thread::Builder::new().name("upstreams".to_owned()).spawn(run).map_err(AppError::Worker)?;
        Ok((Background(sender), thread))
    }

    /// Attends to these fleets from now on, and to no others. Comes back when their names have been looked up once.
    pub(super) fn attend(&self, fleets: &Fleets) -> io::Result<()> {
        let (first, looked_up) = mpsc::channel();
        self.0.send((fleets.clone(), first)).map_err(|_| io::ErrorKind::BrokenPipe)?;
        // Nothing is ever sent: it is over when all who could are gone, or when it takes too long.
        let _ = looked_up.recv_timeout(FIRST_ADDRESSES);
        Ok(())
    }
}

async fn attend(mut next: UnboundedReceiver<(Fleets, mpsc::Sender<Infallible>)>) {
    let mut tasks = Tasks::default();
    while let Some((fleets, first)) = next.recv().await {
        tasks.change(&fleets, first);
    }
}

impl Tasks {
    fn change(&mut self, fleets: &Fleets, first: mpsc::Sender<Infallible>) {
        self.checks.retain(|(fleet, checks)| {
            let stays = is_among(fleet, fleets);
            if !stays {
                checks.abort();
            }
            stays
        });
        for fleet in fleets.iter().filter(|fleet| fleet.settings.health.is_some()) {
            if !self.checks.iter().any(|(known, _)| Arc::ptr_eq(known, fleet)) {
                self.checks.push((fleet.clone(), tokio::spawn(health::watch(fleet.clone())).abort_handle()));
            }
        }
        let named: Vec<_> = fleets.iter().filter(|fleet| fleet.settings.has_names()).cloned().collect();
        let (known, look_ups) = &mut self.names;
        if named.len() == known.len() && named.iter().all(|fleet| is_among(fleet, known)) {
            return;
        }
        if let Some(before) = look_ups.take() {
            before.abort();
        }
        let names = Names::of(&named);
        *look_ups = Some(tokio::spawn(names.follow(Directory::System, first)).abort_handle());
        *known = named;
    }
}

fn is_among(fleet: &Arc<Fleet>, fleets: &[Arc<Fleet>]) -> bool {
    fleets.iter().any(|other| Arc::ptr_eq(fleet, other))
}
