//! Takes what workers produce to a thread of its own, in batches, without ever making them wait.

use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use std::{io, mem, thread};

use tracing::warn;

use crate::limit::clock::Seldom;

/// That something is lost is said once in this time.
const SAID: Duration = Duration::from_secs(10);

/// Room of an empty batch that is kept for the next one.
const KEPT: usize = 64 << 10;

/// How an outbox works.
#[derive(Debug, Clone, Copy)]
pub struct Terms {
    /// What it is called in logs, and its thread.
    pub name: &'static str,
    /// Items wait this long for company: waking the thread for each costs more than the item.
    pub pause: Duration,
    /// Items that may wait; beyond that whoever takes them is too slow, and more are lost and counted.
    pub most: usize,
}

/// Where items go. Clones share it.
#[derive(Debug)]
pub struct Outbox<T> {
    shared: Arc<Shared<T>>,
    wake: Sender<Wake>,
}

#[derive(Debug)]
struct Shared<T> {
    terms: Terms,
    pending: Mutex<Pending<T>>,
    said: Seldom,
}

#[derive(Debug)]
struct Pending<T> {
    items: Vec<T>,
    /// Of all times.
    lost: u64,
}

enum Wake {
    Items,
    Flush(Sender<()>),
}

impl<T> Clone for Outbox<T> {
    fn clone(&self) -> Self {
        Outbox { shared: self.shared.clone(), wake: self.wake.clone() }
    }
}

impl<T: Send + 'static> Outbox<T> {
    /// Starts the thread, which calls `deliver` with each batch, and is told how much of it was lost.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn start(terms: Terms, mut deliver: impl FnMut(&mut Vec<T>) -> u64 + Send + 'static) -> io::Result<Self> {
        let pending = Mutex::new(Pending { items: Vec::new(), lost: 0 });
        let shared = Arc::new(Shared { terms, pending, said: Seldom::new() });
        let (wake, woken) = channel();
        let of_thread = shared.clone();
        thread::Builder::new().name(terms.name.replace(' ', "-")).spawn(move || {
            let mut batch = Vec::new();
            for cause in woken {
                if let Wake::Items = cause {
                    thread::sleep(terms.pause);
                }
                mem::swap(&mut batch, &mut of_thread.pending().items);
                if !batch.is_empty() {
                    let lost = deliver(&mut batch);
                    of_thread.pending().lost += lost;
                }
                batch.clear();
                batch.shrink_to(KEPT);
                if let Wake::Flush(done) = cause {
                    // Nobody waiting any more is no loss.
                    let _ = done.send(());
                }
            }
        })?;
        Ok(Outbox { shared, wake })
    }

    /// Adds one thing, which may be several items.
    pub fn put(&self, add: impl FnOnce(&mut Vec<T>)) {
        let Shared { terms, said, .. } = &*self.shared;
        let mut pending = self.shared.pending();
        if pending.items.len() >= terms.most {
            pending.lost += 1;
            let lost = pending.lost;
            drop(pending);
            if said.unsaid_for(SAID) {
                warn!(dropped = lost, "the {} is too slow for what happens: some of it is lost", terms.name);
            }
            return;
        }
        let first = pending.items.is_empty();
        add(&mut pending.items);
        drop(pending);
        if first {
            // The thread lives as long as a sender does.
            let _ = self.wake.send(Wake::Items);
        }
    }

    /// So much was lost.
    pub fn lost(&self) -> u64 {
        self.shared.pending().lost
    }

    /// Waits until all so far is delivered, but not longer than this.
    pub fn flush(&self, within: Duration) {
        let (done, delivered) = channel();
        if self.wake.send(Wake::Flush(done)).is_ok() {
            let _ = delivered.recv_timeout(within);
        }
    }
}

impl<T> Shared<T> {
    fn pending(&self) -> MutexGuard<'_, Pending<T>> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn what_nobody_takes_is_counted_and_the_rest_arrives_in_order() {
        let (release, held) = mpsc::channel::<()>();
        let (sink, taken) = mpsc::channel();
        let terms = Terms { name: "test", pause: Duration::ZERO, most: 3 };
        let outbox = Outbox::start(terms, move |batch: &mut Vec<u32>| {
            sink.send(batch.clone()).unwrap();
            held.recv().unwrap();
            u64::from(batch.contains(&0))
        });
        let outbox = outbox.unwrap();
        outbox.put(|items| items.push(0));
        assert_eq!(taken.recv().unwrap(), [0], "it is being delivered, and holds up the rest");
        (1..=5).for_each(|item| outbox.put(|items| items.push(item)));
        assert_eq!(outbox.lost(), 2, "three may wait");
        release.send(()).unwrap();
        assert_eq!(taken.recv().unwrap(), [1, 2, 3]);
        release.send(()).unwrap();
        outbox.flush(Duration::from_secs(20));
        assert_eq!(outbox.lost(), 3, "and what was not delivered");
    }
}
