//! How many connections there are: in all, of each client network, and such that only wait for their client to read.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::http::budget::Budget;
use crate::runtime::ServerSettings;
use crate::tally::Tally;

/// Connections that linger at the same time; beyond them a connection is closed at once.
const LINGERING: usize = 1024;

/// The connections of all workers.
#[derive(Debug)]
pub struct Connections {
    open: Arc<Semaphore>,
    most: Mutex<Bound>,
    lingering: Arc<Semaphore>,
    /// Only those that have one: bounded by the connections. std's hasher, as clients choose the keys.
    networks: Mutex<HashMap<IpAddr, usize>>,
    per_network: AtomicUsize,
    /// What they may buffer.
    budget: Arc<Budget>,
    /// Connections that there were, and those of networks that had all they may.
    tally: Tally<2>,
}

#[derive(Debug)]
struct Bound {
    most: usize,
    /// Connections from before there was a lower bound: so many that end make no room.
    excess: usize,
}

/// A connection's place among all, until it is dropped.
#[derive(Debug)]
pub(super) struct Opened {
    connections: Arc<Connections>,
    permit: Option<OwnedSemaphorePermit>,
}

/// A connection's place among those of its network, until it is dropped.
#[derive(Debug)]
pub(super) struct Seat {
    connections: Arc<Connections>,
    network: IpAddr,
}

impl Connections {
    /// None yet.
    pub fn new(settings: &ServerSettings) -> Self {
        Connections {
            open: Arc::new(Semaphore::new(settings.max_connections)),
            most: Mutex::new(Bound { most: settings.max_connections, excess: 0 }),
            lingering: Arc::new(Semaphore::new(LINGERING)),
            networks: Mutex::default(),
            per_network: settings.max_connections_per_ip.into(),
            budget: Arc::new(Budget::new(settings.max_buffered)),
            tally: Tally::default(),
        }
    }

    /// Waits until there may be one more.
    pub(super) async fn open(self: &Arc<Self>) -> Option<Opened> {
        // It is never closed.
        let permit = self.open.clone().acquire_owned().await.ok()?;
        self.tally.count(0);
        Some(Opened { connections: self.clone(), permit: Some(permit) })
    }

    /// As many as other settings say from now on; those that are open and too many stay until they end.
    pub fn resize(&self, settings: &ServerSettings) {
        self.per_network.store(settings.max_connections_per_ip, Ordering::Relaxed);
        self.budget.resize(settings.max_buffered);
        let mut bound = self.bound();
        let (before, now) = (bound.most, settings.max_connections);
        bound.most = now;
        if now >= before {
            let more = now - before;
            let forgiven = more.min(bound.excess);
            bound.excess -= forgiven;
            self.open.add_permits(more - forgiven);
        } else {
            bound.excess += before - now - self.open.forget_permits(before - now);
        }
    }

    /// How many are open, and may be.
    pub fn standing(&self) -> (usize, usize) {
        let Bound { most, excess } = *self.bound();
        (most + excess - self.open.available_permits(), most)
    }

    /// How many there were, and how many of them were refused since their network had all it may.
    pub fn counts(&self) -> [u64; 2] {
        self.tally.read()
    }

    /// Whether the next one has to wait.
    pub(super) fn are_full(&self) -> bool {
        self.open.available_permits() == 0
    }

    /// What they may buffer, all together.
    pub(super) fn budget(&self) -> Arc<Budget> {
        self.budget.clone()
    }

    /// Leave to linger.
    pub(super) fn linger(&self) -> Option<OwnedSemaphorePermit> {
        self.lingering.clone().try_acquire_owned().ok()
    }

    /// Whether they are counted by network.
    pub(super) fn by_network(&self) -> bool {
        self.per_network.load(Ordering::Relaxed) > 0
    }

    /// A place for one more of a network; none if it has all that it may.
    pub(super) fn seat(self: &Arc<Self>, network: IpAddr) -> Option<Seat> {
        let mut networks = self.networks.lock().unwrap_or_else(PoisonError::into_inner);
        let taken = networks.get(&network).copied().unwrap_or(0);
        if taken >= self.per_network.load(Ordering::Relaxed) {
            self.tally.count(1);
            return None;
        }
        networks.insert(network, taken + 1);
        Some(Seat { connections: self.clone(), network })
    }
}

impl Connections {
    fn bound(&self) -> MutexGuard<'_, Bound> {
        self.most.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        let mut bound = self.connections.bound();
        if bound.excess > 0
            && let Some(permit) = self.permit.take()
        {
            bound.excess -= 1;
            permit.forget();
        }
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut networks = self.connections.networks.lock().unwrap_or_else(PoisonError::into_inner);
        match networks.get_mut(&self.network) {
            Some(taken) if *taken > 1 => *taken -= 1,
            _ => {
                networks.remove(&self.network);
            }
        }
    }
}
