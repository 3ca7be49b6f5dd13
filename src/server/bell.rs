//! A waker of one's own: what rarely happens is polled when it has happened, not whenever something else does.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Wake, Waker};

/// Wakes a task, and tells it that it was this one.
#[derive(Debug)]
pub(super) struct Bell {
    ringing: Arc<Ringing>,
    waker: Waker,
    /// The task that it wakes.
    task: Option<Waker>,
}

#[derive(Debug)]
struct Ringing {
    rang: AtomicBool,
    task: Mutex<Option<Waker>>,
}

impl Bell {
    /// One that rings: nobody has been asked yet.
    pub(super) fn new() -> Self {
        let ringing = Arc::new(Ringing { rang: AtomicBool::new(true), task: Mutex::default() });
        Bell { waker: ringing.clone().into(), ringing, task: None }
    }

    /// What to poll with, if it rang since the last time.
    pub(super) fn answer(&mut self, cx: &Context<'_>) -> Option<Context<'_>> {
        if !self.task.as_ref().is_some_and(|task| task.will_wake(cx.waker())) {
            self.task = Some(cx.waker().clone());
            // Before it is seen whether it rang: whoever rings from now on wakes this task.
            self.ringing.task().clone_from(&self.task);
        }
        // Mostly it did not: one look, and nothing that other cores would have to see.
        let rang = &self.ringing.rang;
        (rang.load(Ordering::Relaxed) && rang.swap(false, Ordering::AcqRel)).then(|| Context::from_waker(&self.waker))
    }

    /// What it rings for is another thing now, which is to be asked.
    pub(super) fn ring(&self) {
        self.ringing.rang.store(true, Ordering::Release);
    }
}

impl Ringing {
    fn task(&self) -> MutexGuard<'_, Option<Waker>> {
        self.task.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Wake for Ringing {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.rang.store(true, Ordering::Release);
        if let Some(task) = &*self.task() {
            task.wake_by_ref();
        }
    }
}
