//! Connection limits: for all connections, for each client network, and for connections in lingering close.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::http::body_limits::BufferBudget;
use crate::limiter::metrics::Counter;
use crate::snapshot::settings::ServerSettings;

/// Maximum number of connections in lingering close. Further connections are closed without a lingering close.
const MAX_LINGERING: usize = 1024;

/// The connections of all workers, and the limits for them.
#[derive(Debug)]
pub struct ConnectionLimits {
    permits: Arc<Semaphore>,
    capacity: Mutex<Capacity>,
    /// Number of open connections of each listener.
    open_by_listener: Box<[AtomicUsize]>,
    lingering_permits: Arc<Semaphore>,
    /// Networks with open connections, at most one network per connection. The hasher of std has a random key, because
    /// clients choose the keys of this map.
    counts_by_network: Mutex<HashMap<IpAddr, usize>>,
    max_per_ip: AtomicUsize,
    /// Memory budget for the buffers of all connections.
    buffer_budget: Arc<BufferBudget>,
    /// Number of connections so far, and number of connections that the limit per network rejected.
    counter: Counter<2>,
}

#[derive(Debug)]
struct Capacity {
    max: usize,
    /// Number of open connections above `max` since `max` was lowered. This number of connections must end before a
    /// permit becomes available.
    excess: usize,
}

/// Permit of a connection that counts against `max_connections`. Dropping the permit releases it.
#[derive(Debug)]
pub(super) struct ConnectionPermit {
    limits: Arc<ConnectionLimits>,
    permit: Option<OwnedSemaphorePermit>,
    listener_index: usize,
}

/// Permit of a connection that counts against `max_connections_per_ip`. Dropping the permit releases it.
#[derive(Debug)]
pub(super) struct PerIpPermit {
    limits: Arc<ConnectionLimits>,
    network: IpAddr,
}

impl ConnectionLimits {
    /// Create the limits for a number of listeners, without connections.
    pub fn new(settings: &ServerSettings, listeners: usize) -> Self {
        ConnectionLimits {
            permits: Arc::new(Semaphore::new(settings.max_connections)),
            capacity: Mutex::new(Capacity { max: settings.max_connections, excess: 0 }),
            open_by_listener: (0..listeners).map(|_| AtomicUsize::new(0)).collect(),
            lingering_permits: Arc::new(Semaphore::new(MAX_LINGERING)),
            counts_by_network: Mutex::default(),
            max_per_ip: settings.max_connections_per_ip.into(),
            buffer_budget: Arc::new(BufferBudget::new(settings.max_buffered)),
            counter: Counter::default(),
        }
    }

    /// Wait for a permit for a connection to a listener. The result is always `Some`, because the semaphore is never
    /// closed.
    pub(super) async fn acquire(self: &Arc<Self>, listener_index: usize) -> Option<ConnectionPermit> {
        let permit = self.permits.clone().acquire_owned().await.ok()?;
        self.counter.increment(0);
        self.open_by_listener[listener_index].fetch_add(1, Ordering::Relaxed);
        Some(ConnectionPermit { limits: self.clone(), permit: Some(permit), listener_index })
    }

    /// Apply new settings. Open connections above a lower limit stay open.
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

    /// Return the number of open connections and the limit of this number.
    pub fn open_and_max(&self) -> (usize, usize) {
        let Capacity { max, excess } = *self.lock_capacity();
        (max + excess - self.permits.available_permits(), max)
    }

    /// Return the number of open connections of each listener.
    pub fn open_by_listener(&self) -> impl Iterator<Item = usize> {
        self.open_by_listener.iter().map(|open| open.load(Ordering::Relaxed))
    }

    /// Return the number of connections so far, and the number that the limit per network rejected.
    pub fn totals(&self) -> [u64; 2] {
        self.counter.values()
    }

    /// Return whether the next connection has to wait.
    pub(super) fn is_full(&self) -> bool {
        self.permits.available_permits() == 0
    }

    /// Return the memory budget of all connections.
    pub(super) fn buffer_budget(&self) -> Arc<BufferBudget> {
        self.buffer_budget.clone()
    }

    /// Acquire a permit for a lingering close.
    pub(super) fn try_acquire_lingering(&self) -> Option<OwnedSemaphorePermit> {
        self.lingering_permits.clone().try_acquire_owned().ok()
    }

    /// Return whether connections per network are limited.
    pub(super) fn has_per_ip_limit(&self) -> bool {
        self.max_per_ip.load(Ordering::Relaxed) > 0
    }

    /// Acquire a permit for a connection from `network`. Return `None` if the network is at its limit.
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
        self.limits.open_by_listener[self.listener_index].fetch_sub(1, Ordering::Relaxed);
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
