//! Wait queues for requests that would otherwise be denied. Requests are queued in the order of their arrival.

use std::collections::HashMap;
use std::collections::hash_map::RandomState;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The wait queues of this process, one for each state with waiting requests.
#[derive(Debug, Default)]
pub struct WaitQueues(Mutex<HashMap<u128, WaitQueue, RandomState>>);

#[derive(Debug, Default)]
struct WaitQueue {
    // tokio's mutex is fair: waiters lock it in the order of their arrival.
    head: Arc<tokio::sync::Mutex<()>>,
    waiters: usize,
}

/// The ticket of a request in a wait queue. When the ticket is dropped, the request leaves the queue.
#[derive(Debug)]
pub struct WaitTicket<'a> {
    queues: &'a WaitQueues,
    key: u128,
    head: Arc<tokio::sync::Mutex<()>>,
}

impl WaitQueues {
    /// Return whether any requests are queued for this state.
    pub fn has_waiters(&self, key: u128) -> bool {
        self.lock().contains_key(&key)
    }

    /// Join the end of the queue. Return `None` if the queue already has `max_queue` requests.
    pub fn enqueue(&self, key: u128, max_queue: usize) -> Option<WaitTicket<'_>> {
        let mut queues = self.lock();
        let queue = queues.entry(key).or_default();
        if queue.waiters >= max_queue {
            return None;
        }
        queue.waiters += 1;
        Some(WaitTicket { queues: self, key, head: queue.head.clone() })
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u128, WaitQueue, RandomState>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl WaitTicket<'_> {
    /// Wait until all earlier requests have left the queue. The ticket stays first in the queue until the returned
    /// guard is dropped.
    pub async fn ready(&self) -> impl Sized {
        self.head.lock().await
    }
}

impl Drop for WaitTicket<'_> {
    fn drop(&mut self) {
        let mut queues = self.queues.lock();
        if let Some(queue) = queues.get_mut(&self.key) {
            queue.waiters -= 1;
            if queue.waiters == 0 {
                queues.remove(&self.key);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queue_is_removed_with_its_last_waiter() {
        let queues = WaitQueues::default();
        let one = queues.enqueue(1, 2).unwrap();
        let other = queues.enqueue(1, 2).unwrap();
        assert!(queues.enqueue(1, 2).is_none() && queues.enqueue(2, 2).is_some(), "each queue has its own bound");
        assert!(queues.has_waiters(1) && !queues.has_waiters(2));
        drop(one);
        assert!(queues.has_waiters(1));
        drop(other);
        assert!(!queues.has_waiters(1), "the empty queue is removed");
    }
}
