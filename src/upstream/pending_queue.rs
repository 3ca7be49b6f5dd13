//! Pending request queue of an upstream: bounded, first in, first out; requests whose client disconnects leave it.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::oneshot;

use crate::http::body::UpstreamLease;
use crate::upstream::endpoint::Endpoint;

/// One request in flight at an endpoint. Released when it is dropped, after the response body.
#[derive(Debug)]
pub(super) struct RequestPermit(Arc<Endpoint>);

/// Requests that wait for a request permit of any endpoint of a cluster.
#[derive(Debug, Default)]
pub(super) struct PendingQueue {
    max: AtomicUsize,
    /// Length of the queue, readable without the lock.
    length: AtomicUsize,
    state: Mutex<QueueState>,
}

#[derive(Debug, Default)]
struct QueueState {
    next_id: u64,
    /// Sorted by ID.
    waiters: VecDeque<(u64, oneshot::Sender<RequestPermit>)>,
}

/// A queued request. Dropping it removes the request from the queue.
#[derive(Debug)]
pub(super) struct Waiter {
    queue: Arc<PendingQueue>,
    id: u64,
    permit: oneshot::Receiver<RequestPermit>,
    /// Whether the queue was empty before.
    pub(super) is_first: bool,
}

impl RequestPermit {
    /// Wrap a permit that the endpoint has already counted.
    pub(super) fn new(endpoint: Arc<Endpoint>) -> Self {
        RequestPermit(endpoint)
    }

    pub(super) fn endpoint(&self) -> &Arc<Endpoint> {
        &self.0
    }
}

impl Drop for RequestPermit {
    fn drop(&mut self) {
        Endpoint::release(&self.0);
    }
}

impl UpstreamLease for RequestPermit {
    fn release(self: Box<Self>) {}
}

impl PendingQueue {
    /// Create a queue for at most `max` requests.
    pub(super) fn new(max: usize) -> Self {
        PendingQueue { max: max.into(), ..PendingQueue::default() }
    }

    /// Set the maximum length. Requests in the queue stay.
    pub(super) fn resize(&self, max: usize) {
        self.max.store(max, Ordering::Relaxed);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.length.load(Ordering::SeqCst) == 0
    }

    /// Append a request. Return `None` if the queue is full.
    pub(super) fn enqueue(self: &Arc<Self>) -> Option<Waiter> {
        let (sender, receiver) = oneshot::channel();
        let mut state = self.lock();
        if state.waiters.len() >= self.max.load(Ordering::Relaxed) {
            return None;
        }
        let (id, is_first) = (state.next_id, state.waiters.is_empty());
        state.next_id += 1;
        state.waiters.push_back((id, sender));
        // Published before the caller looks for a free permit again: every release from now on sees the waiter.
        self.length.store(state.waiters.len(), Ordering::SeqCst);
        Some(Waiter { queue: self.clone(), id, permit: receiver, is_first })
    }

    /// Give free permits of an endpoint to waiters, in order.
    pub(super) fn hand_over(&self, endpoint: &Arc<Endpoint>) {
        while !self.is_empty() {
            let Some(mut permit) = Endpoint::try_acquire(endpoint) else { return };
            loop {
                let next = {
                    let mut state = self.lock();
                    let next = state.waiters.pop_front();
                    self.length.store(state.waiters.len(), Ordering::SeqCst);
                    next
                };
                let Some((_, sender)) = next else { return };
                match sender.send(permit) {
                    Ok(()) => break,
                    Err(returned) => permit = returned,
                }
            }
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, QueueState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Waiter {
    /// Wait for the permit.
    pub(super) async fn ready(&mut self) -> Option<RequestPermit> {
        (&mut self.permit).await.ok()
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        let mut state = self.queue.lock();
        if let Ok(index) = state.waiters.binary_search_by_key(&self.id, |(number, _)| *number) {
            state.waiters.remove(index);
            self.queue.length.store(state.waiters.len(), Ordering::SeqCst);
        }
    }
}
