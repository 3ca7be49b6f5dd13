//! The queue of requests whose password hash must be computed. Client networks take turns, so that a network that sends
//! many passwords does not lock out the users of other networks.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::timeout;

/// Maximum number of queued requests. If the queue is full, a request takes the place of the last request of the network
/// with the most queued requests, unless its network has as many. The displaced request is rejected with 503.
const MAX_QUEUED: usize = 100;

/// Queue timeout: maximum time that a request waits until its hash is computed.
const QUEUE_TIMEOUT: Duration = Duration::from_secs(5);

/// The queue of password verifications is full, or the request has waited in the queue for 5 s. The client should retry
/// later.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("too many passwords are being verified at the moment")]
pub struct VerificationBusy;

/// Permits to compute hashes, and the requests that wait for a permit.
#[derive(Debug)]
pub(super) struct HashQueue(Mutex<State>);

#[derive(Debug)]
struct State {
    free_permits: usize,
    /// The networks with queued requests, in the order of their turns.
    networks: VecDeque<NetworkQueue>,
}

/// The queued requests of a client network.
#[derive(Debug)]
struct NetworkQueue {
    network: IpAddr,
    /// The requests, in the order of arrival. A sender is closed if its request was cancelled.
    requests: VecDeque<oneshot::Sender<HashPermit>>,
}

/// A permit to compute a hash. When it is dropped, the next queued request gets it.
#[derive(Debug)]
pub(super) struct HashPermit(Arc<HashQueue>);

impl Drop for HashPermit {
    fn drop(&mut self) {
        if let Some(next) = self.0.next() {
            // If the request was cancelled in the meantime, the permit is dropped here, and the request after it gets
            // the permit.
            let _ = next.send(HashPermit(self.0.clone()));
        }
    }
}

impl HashQueue {
    /// Create a queue with this number of permits.
    pub(super) fn new(permits: usize) -> Arc<Self> {
        Arc::new(HashQueue(Mutex::new(State { free_permits: permits, networks: VecDeque::new() })))
    }

    /// Wait for a permit for a request of a client network. If the future is dropped, the request leaves the queue.
    ///
    /// # Errors
    /// The queue is full, or the request has waited in it for 5 s.
    pub(super) async fn permit(self: &Arc<Self>, network: IpAddr) -> Result<HashPermit, VerificationBusy> {
        let receiver = {
            let mut state = self.lock();
            if state.free_permits > 0 {
                state.free_permits -= 1;
                return Ok(HashPermit(self.clone()));
            }
            let (sender, receiver) = oneshot::channel();
            state.push(network, sender)?;
            receiver
        };
        timeout(QUEUE_TIMEOUT, receiver).await.map_err(|_| VerificationBusy)?.map_err(|_| VerificationBusy)
    }

    fn next(&self) -> Option<oneshot::Sender<HashPermit>> {
        let mut state = self.lock();
        let next = state.pop();
        state.free_permits += usize::from(next.is_none());
        next
    }

    /// Return the number of queued requests.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        let mut state = self.lock();
        state.remove_cancelled();
        state.len()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn len(&self) -> usize {
        self.networks.iter().map(|queue| queue.requests.len()).sum()
    }

    fn remove_cancelled(&mut self) {
        self.networks.iter_mut().for_each(|queue| queue.requests.retain(|request| !request.is_closed()));
        self.networks.retain(|queue| !queue.requests.is_empty());
    }

    /// Queue a request of a network.
    fn push(&mut self, network: IpAddr, request: oneshot::Sender<HashPermit>) -> Result<(), VerificationBusy> {
        self.remove_cancelled();
        if self.len() >= MAX_QUEUED {
            let own = self.networks.iter().find(|queue| queue.network == network);
            let own = own.map_or(0, |queue| queue.requests.len());
            let longest = self.networks.iter_mut().max_by_key(|queue| queue.requests.len());
            let longest = longest.filter(|queue| queue.requests.len() > own + 1).ok_or(VerificationBusy)?;
            longest.requests.pop_back();
        }
        match self.networks.iter_mut().find(|queue| queue.network == network) {
            Some(queue) => queue.requests.push_back(request),
            None => self.networks.push_back(NetworkQueue { network, requests: [request].into() }),
        }
        Ok(())
    }

    /// Remove the next request from the queue. The network of the request then waits until all other networks have had
    /// their turn.
    fn pop(&mut self) -> Option<oneshot::Sender<HashPermit>> {
        let mut queue = self.networks.pop_front()?;
        let next = queue.requests.pop_front();
        if !queue.requests.is_empty() {
            self.networks.push_back(queue);
        }
        next
    }
}

#[cfg(test)]
mod tests {
    use futures_util::future::{FutureExt, join_all};

    use super::*;

    fn network(number: u8) -> IpAddr {
        [192, 0, 2, number].into()
    }

    #[tokio::test(start_paused = true)]
    async fn queue_is_bounded_in_number_and_time() {
        let queue = HashQueue::new(1);
        let permit = queue.permit(network(1)).await.unwrap();
        let results = join_all((0..=MAX_QUEUED).map(|_| queue.permit(network(1)))).await;
        assert!(
            results.iter().all(Result::is_err),
            "the last request is rejected at once, the others after {QUEUE_TIMEOUT:?}"
        );
        assert_eq!(queue.len(), 0);
        drop(permit);
        assert!(queue.permit(network(1)).await.is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn networks_take_turns_and_displace_requests_of_the_largest() {
        let queue = HashQueue::new(1);
        let permit = queue.permit(network(1)).await.unwrap();
        let mut flood: Vec<_> = (0..MAX_QUEUED).map(|_| Box::pin(queue.permit(network(1)))).collect();
        assert!(flood.iter_mut().all(|request| request.now_or_never().is_none()));
        let mut others: Vec<_> = (2..22).map(|number| Box::pin(queue.permit(network(number)))).collect();
        assert!(others.iter_mut().all(|request| request.now_or_never().is_none()), "each displaces a request");
        assert_eq!(queue.len(), MAX_QUEUED);
        assert_eq!(queue.permit(network(1)).now_or_never().unwrap().unwrap_err(), VerificationBusy);
        let displaced: Vec<_> = flood.iter_mut().map(|request| request.now_or_never().is_some()).collect();
        assert_eq!(displaced.iter().position(|is_displaced| *is_displaced), Some(MAX_QUEUED - others.len()));
        // The second request of the others is cancelled. The flood has a turn between them only once.
        drop(others.remove(1));
        drop(permit);
        let first = flood[0].as_mut().now_or_never().expect("the flood has queued first").unwrap();
        drop(first);
        for request in others {
            drop(request.now_or_never().expect("the other networks have their turn").unwrap());
        }
        assert!(flood[1].as_mut().now_or_never().is_some(), "the flood has its second turn");
    }
}
