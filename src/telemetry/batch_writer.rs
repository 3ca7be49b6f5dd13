//! A background writer: workers queue items without waiting, and a thread delivers the items in batches.

use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use std::{io, mem, thread};

use tracing::warn;

use crate::limiter::clock::LogThrottle;

/// Minimum interval between two warnings about lost records.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// Maximum capacity, in items, that an empty batch keeps for reuse.
const RETAINED_CAPACITY: usize = 64 << 10;

/// Settings of a [`BatchWriter`].
#[derive(Debug, Clone, Copy)]
pub struct BatchConfig {
    /// Name of the writer in the log, and of the thread (with hyphens).
    pub name: &'static str,
    /// Delay from the first item of a batch to its delivery. Waking the thread for each item would cost more than
    /// writing the item.
    pub delay: Duration,
    /// Maximum number of queued items. Further records are dropped and counted.
    pub capacity: usize,
}

/// A queue of items for the thread that delivers them. Clones share the queue.
#[derive(Debug)]
pub struct BatchWriter<T> {
    inner: Arc<Inner<T>>,
    commands: Sender<Command>,
}

#[derive(Debug)]
struct Inner<T> {
    config: BatchConfig,
    pending: Mutex<PendingItems<T>>,
    throttle: LogThrottle,
}

#[derive(Debug)]
struct PendingItems<T> {
    items: Vec<T>,
    /// Total number of records that were dropped or could not be delivered.
    dropped: u64,
}

enum Command {
    Deliver,
    Flush(Sender<()>),
}

impl<T> Clone for BatchWriter<T> {
    fn clone(&self) -> Self {
        BatchWriter { inner: self.inner.clone(), commands: self.commands.clone() }
    }
}

impl<T: Send + 'static> BatchWriter<T> {
    /// Start the thread. The thread calls `deliver` with each batch. The result of `deliver` is the number of records
    /// that were lost.
    ///
    /// # Errors An error if the thread cannot be started.
    pub fn start(
        config: BatchConfig,
        mut deliver: impl FnMut(&mut Vec<T>) -> u64 + Send + 'static,
    ) -> io::Result<Self> {
        let pending = Mutex::new(PendingItems { items: Vec::new(), dropped: 0 });
        let inner = Arc::new(Inner { config, pending, throttle: LogThrottle::new() });
        let (commands, command_receiver) = channel();
        let thread_inner = inner.clone();
        thread::Builder::new().name(config.name.replace(' ', "-")).spawn(move || {
            let mut batch = Vec::new();
            for command in command_receiver {
                if let Command::Deliver = command {
                    thread::sleep(config.delay);
                }
                mem::swap(&mut batch, &mut thread_inner.lock_pending().items);
                if !batch.is_empty() {
                    let dropped = deliver(&mut batch);
                    thread_inner.lock_pending().dropped += dropped;
                }
                batch.clear();
                batch.shrink_to(RETAINED_CAPACITY);
                if let Command::Flush(done) = command {
                    // Ignore the error of `send`: the receiver may have stopped waiting.
                    let _ = done.send(());
                }
            }
        })?;
        Ok(BatchWriter { inner, commands })
    }

    /// Queue the items that `add` appends. All items belong to one record. If the queue is full, drop the record and
    /// count it.
    pub fn push(&self, add: impl FnOnce(&mut Vec<T>)) {
        let Inner { config, throttle, .. } = &*self.inner;
        let mut pending = self.inner.lock_pending();
        if pending.items.len() >= config.capacity {
            pending.dropped += 1;
            let lost = pending.dropped;
            drop(pending);
            if throttle.should_log(LOG_INTERVAL) {
                warn!(dropped = lost, writer = config.name, "the queue is full: records are lost");
            }
            return;
        }
        let was_empty = pending.items.is_empty();
        add(&mut pending.items);
        drop(pending);
        if was_empty {
            // Sending cannot fail, because the thread runs as long as a sender exists.
            let _ = self.commands.send(Command::Deliver);
        }
    }

    /// Return the number of lost records.
    pub fn dropped(&self) -> u64 {
        self.inner.lock_pending().dropped
    }

    /// Wait until all queued items are delivered, but at most for `timeout`.
    pub fn flush(&self, timeout: Duration) {
        let (done, delivered) = channel();
        if self.commands.send(Command::Flush(done)).is_ok() {
            let _ = delivered.recv_timeout(timeout);
        }
    }
}

impl<T> Inner<T> {
    fn lock_pending(&self) -> MutexGuard<'_, PendingItems<T>> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn dropped_items_are_counted_and_the_rest_is_delivered_in_order() {
        let (release, held) = mpsc::channel::<()>();
        let (sink, delivered) = mpsc::channel();
        let config = BatchConfig { name: "test", delay: Duration::ZERO, capacity: 3 };
        let writer = BatchWriter::start(config, move |batch: &mut Vec<u32>| {
            sink.send(batch.clone()).unwrap();
            held.recv().unwrap();
            u64::from(batch.contains(&0))
        });
        let writer = writer.unwrap();
        writer.push(|items| items.push(0));
        assert_eq!(delivered.recv().unwrap(), [0], "the first batch is in delivery and blocks the rest");
        (1..=5).for_each(|item| writer.push(|items| items.push(item)));
        assert_eq!(writer.dropped(), 2, "the capacity is three");
        release.send(()).unwrap();
        assert_eq!(delivered.recv().unwrap(), [1, 2, 3]);
        release.send(()).unwrap();
        writer.flush(Duration::from_secs(20));
        assert_eq!(writer.dropped(), 3, "including the one that was not delivered");
    }
}
