//! Clients that do not read their responses. While the memory is nearly used up, the gateway ends the responses of those
//! that have not read for the longest time: the kernel and the gateway hold more memory for them than for others.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::task::AtomicWaker;
use tokio::time::Instant;

/// Time without progress after which a client is listed.
pub(super) const SLOW_AFTER: Duration = Duration::from_millis(250);

/// The clients of all workers that do not read their responses.
#[derive(Debug, Default)]
pub struct SlowReaders {
    /// Whether the process has a memory limit. Without a limit, no client is listed.
    has_limit: AtomicBool,
    list: Mutex<SlowReaderList>,
}

#[derive(Debug, Default)]
struct SlowReaderList {
    next_number: u64,
    /// The clients by the time since which they have not read, and by a number that makes the key unique.
    waiting: BTreeMap<(Instant, u64), Arc<ReaderState>>,
}

#[derive(Debug, Default)]
struct ReaderState {
    is_ended: AtomicBool,
    /// Wakes the task that writes the response.
    waker: AtomicWaker,
}

/// The entry of a client in the list, until the value is dropped.
#[derive(Debug)]
pub(super) struct SlowReader {
    readers: Arc<SlowReaders>,
    key: (Instant, u64),
    state: Arc<ReaderState>,
}

impl SlowReaders {
    /// Set whether the process has a memory limit.
    pub fn set_has_limit(&self, has_limit: bool) {
        self.has_limit.store(has_limit, Ordering::Relaxed);
    }

    pub(super) fn has_limit(&self) -> bool {
        self.has_limit.load(Ordering::Relaxed)
    }

    /// List a client that has not read since this time.
    pub(super) fn add(self: &Arc<Self>, since: Instant) -> SlowReader {
        let state = Arc::new(ReaderState::default());
        let mut list = self.lock();
        let key = (since, list.next_number);
        list.next_number += 1;
        list.waiting.insert(key, state.clone());
        SlowReader { readers: self.clone(), key, state }
    }

    /// Return the number of listed clients.
    pub fn count(&self) -> usize {
        self.lock().waiting.len()
    }

    /// End the responses of the `count` clients that have not read for the longest time. Return the number of responses
    /// that were ended.
    pub fn end_slowest(&self, count: usize) -> usize {
        let mut list = self.lock();
        let slowest: Vec<_> = (0..count).map_while(|_| list.waiting.pop_first()).collect();
        drop(list);
        for (_, state) in &slowest {
            state.is_ended.store(true, Ordering::Release);
            state.waker.wake();
        }
        slowest.len()
    }

    fn lock(&self) -> MutexGuard<'_, SlowReaderList> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl SlowReader {
    /// Return whether the response must end, even if the client has begun to read it.
    pub(super) fn is_ended(&self) -> bool {
        self.state.is_ended.load(Ordering::Acquire)
    }

    /// Return `Poll::Ready` when the response must end.
    pub(super) fn poll_ended(&self, cx: &Context<'_>) -> Poll<()> {
        self.state.waker.register(cx.waker());
        if self.is_ended() { Poll::Ready(()) } else { Poll::Pending }
    }
}

impl Drop for SlowReader {
    fn drop(&mut self) {
        self.readers.lock().waiting.remove(&self.key);
    }
}

#[cfg(test)]
mod tests {
    use futures_util::task::noop_waker_ref;

    use super::*;

    #[test]
    fn responses_of_the_slowest_clients_end_first() {
        let readers = Arc::new(SlowReaders::default());
        let now = Instant::now();
        let [newest, oldest, gone, middle] = [3, 1, 0, 2].map(|s| readers.add(now + Duration::from_secs(s)));
        drop(gone);
        assert_eq!((readers.count(), readers.end_slowest(2)), (3, 2));
        let is_ended = |reader: &SlowReader| reader.poll_ended(&Context::from_waker(noop_waker_ref())).is_ready();
        assert_eq!([&oldest, &middle, &newest].map(is_ended), [true, true, false]);
        assert_eq!((readers.end_slowest(9), readers.count()), (1, 0));
    }
}
