//! How many connections there are: in all, of each client network, and such that only wait for their client to read.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::runtime::ServerSettings;
use crate::tally::Tally;

/// Connections that linger at the same time; beyond them a connection is closed at once.
const LINGERING: usize = 1024;

/// The connections of all workers.
#[derive(Debug)]
pub struct Connections {
    open: Arc<Semaphore>,
    most: usize,
    lingering: Arc<Semaphore>,
    /// Only those that have one: bounded by the connections. std's hasher, as clients choose the keys.
    networks: Mutex<HashMap<IpAddr, usize>>,
    per_network: usize,
    /// Connections that there were, and those of networks that had all they may.
    tally: Tally<2>,
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
            most: settings.max_connections,
            lingering: Arc::new(Semaphore::new(LINGERING)),
            networks: Mutex::default(),
            per_network: settings.max_connections_per_ip,
            tally: Tally::default(),
        }
    }

    /// Waits until there may be one more.
    pub(super) async fn open(&self) -> Option<OwnedSemaphorePermit> {
        // It is never closed.
        let place = self.open.clone().acquire_owned().await.ok();
        self.tally.count(0);
        place
    }

    /// How many are open, and may be.
    pub fn standing(&self) -> (usize, usize) {
        (self.most - self.open.available_permits(), self.most)
    }

    /// How many there were, and how many of them were refused since their network had all it may.
    pub fn counts(&self) -> [u64; 2] {
        self.tally.read()
    }

    /// Whether the next one has to wait.
    pub(super) fn are_full(&self) -> bool {
        self.open.available_permits() == 0
    }

    /// Leave to linger.
    pub(super) fn linger(&self) -> Option<OwnedSemaphorePermit> {
        self.lingering.clone().try_acquire_owned().ok()
    }

    /// Whether they are counted by network.
    pub(super) fn by_network(&self) -> bool {
        self.per_network > 0
    }

    /// A place for one more of a network; none if it has all that it may.
    pub(super) fn seat(self: &Arc<Self>, network: IpAddr) -> Option<Seat> {
        let mut networks = self.networks.lock().unwrap_or_else(PoisonError::into_inner);
        let taken = networks.get(&network).copied().unwrap_or(0);
        if taken >= self.per_network {
            self.tally.count(1);
            return None;
        }
        networks.insert(network, taken + 1);
        Some(Seat { connections: self.clone(), network })
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
