//! How many connections there are: in all, of each client network, and such that only wait for their client to read.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::http::buffer_budget::BufferBudget;
use crate::metrics::Counter;
use crate::snapshot::settings::ServerSettings;

/// Connections that linger at the same time; beyond them a connection is closed at once.
const MAX_LINGERING: usize = 1024;

/// The connections of all workers.
#[derive(Debug)]
pub struct ConnectionLimits {
    permits: Arc<Semaphore>,
    capacity: Mutex<Capacity>,
    lingering_permits: Arc<Semaphore>,
    /// Only those that have one: bounded by the connections. std's hasher, as clients choose the keys.
    counts_by_network: Mutex<HashMap<IpAddr, usize>>,
    max_per_ip: AtomicUsize,
    /// What they may buffer.
    buffer_budget: Arc<BufferBudget>,
    /// Connections that there were, and those of networks that had all they may.
    counter: Counter<2>,
}

#[derive(Debug)]
struct Capacity {
    max: usize,
    /// Connections from before there was a lower bound: so many that end make no room.
    excess: usize,
}

/// A connection's place among all, until it is dropped.
#[derive(Debug)]
pub(super) struct ConnectionPermit {
    limits: Arc<ConnectionLimits>,
    permit: Option<OwnedSemaphorePermit>,
}

/// A connection's place among those of its network, until it is dropped.
#[derive(Debug)]
pub(super) struct PerIpPermit {
    limits: Arc<ConnectionLimits>,
    network: IpAddr,
}

impl ConnectionLimits {
    /// None yet.
    pub fn new(settings: &ServerSettings) -> Self {
        ConnectionLimits {
            permits: Arc::new(Semaphore::new(settings.max_connections)),
            capacity: Mutex::new(Capacity { max: settings.max_connections, excess: 0 }),
            lingering_permits: Arc::new(Semaphore::new(MAX_LINGERING)),
            counts_by_network: Mutex::default(),
            max_per_ip: settings.max_connections_per_ip.into(),
            buffer_budget: Arc::new(BufferBudget::new(settings.max_buffered)),
            counter: Counter::default(),
        }
    }

    /// Waits until there may be one more.
    pub(super) async fn acquire(self: &Arc<Self>) -> Option<ConnectionPermit> {
        // It is never closed.
        let permit = self.permits.clone().acquire_owned().await.ok()?;
        self.counter.increment(0);
        Some(ConnectionPermit { limits: self.clone(), permit: Some(permit) })
    }

    /// As many as other settings say from now on; those that are open and too many stay until they end.
    pub fn resize(&self, settings: &ServerSettings) {
        self.max_per_ip.store(settings.max_connections_per_ip, Ordering::Relaxed);
        self.buffer_budget.resize(settings.max_buffered);
        let mut capacity = self.lock_capacity();
        let (old_max, new_max) = (capacity.max, settings.max_connections);
        capacity.max = new_max;
        if new_max >= old_max {
            let added = new_max - old_max;
            let absorbed = added.min(capacity.excess);
            capacity.excess -= absorbed;
            self.permits.add_permits(added - absorbed);
        } else {
            capacity.excess += old_max - new_max - self.permits.forget_permits(old_max - new_max);
        }
    }

    /// How many are open, and may be.
    pub fn open_and_max(&self) -> (usize, usize) {
        let Capacity { max, excess } = *self.lock_capacity();
        (max + excess - self.permits.available_permits(), max)
    }

    /// How many there were, and how many of them were refused since their network had all it may.
    pub fn totals(&self) -> [u64; 2] {
        self.counter.values()
    }

    /// Whether the next one has to wait.
    pub(super) fn is_full(&self) -> bool {
        self.permits.available_permits() == 0
    }

    /// What they may buffer, all together.
    pub(super) fn buffer_budget(&self) -> Arc<BufferBudget> {
        self.buffer_budget.clone()
    }

    /// Leave to linger.
    pub(super) fn try_acquire_lingering(&self) -> Option<OwnedSemaphorePermit> {
        self.lingering_permits.clone().try_acquire_owned().ok()
    }

    /// Whether they are counted by network.
    pub(super) fn has_per_ip_limit(&self) -> bool {
        self.max_per_ip.load(Ordering::Relaxed) > 0
    }

    /// A place for one more of a network; none if it has all that it may.
    pub(super) fn permit(self: &Arc<Self>, network: IpAddr) -> Option<PerIpPermit> {
        let mut networks = self.counts_by_network.lock().unwrap_or_else(PoisonError::into_inner);
        let taken = networks.get(&network).copied().unwrap_or(0);
        if taken >= self.max_per_ip.load(Ordering::Relaxed) {
            self.counter.increment(1);
            return None;
        }
        networks.insert(network, taken + 1);
        Some(PerIpPermit { limits: self.clone(), network })
    }
}

impl ConnectionLimits {
    fn lock_capacity(&self) -> MutexGuard<'_, Capacity> {
        self.capacity.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for ConnectionPermit {
    fn drop(&mut self) {
        let mut capacity = self.limits.lock_capacity();
        if capacity.excess > 0
            && let Some(permit) = self.permit.take()
        {
            capacity.excess -= 1;
            permit.forget();
        }
    }
}

impl Drop for PerIpPermit {
    fn drop(&mut self) {
        let mut counts = self.limits.counts_by_network.lock().unwrap_or_else(PoisonError::into_inner);
        match counts.get_mut(&self.network) {
            Some(count) if *count > 1 => *count -= 1,
            _ => {
                counts.remove(&self.network);
            }
        }
    }
}
