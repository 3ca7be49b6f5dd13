//! A waker of one's own: what rarely happens is polled when it has happened, not whenever something else does.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Wake, Waker};

/// Wakes a task, and tells it that it was this one.
#[derive(Debug)]
pub(super) struct SelectiveWaker {
    state: Arc<WakeState>,
    waker: Waker,
    /// The task that it wakes.
    task: Option<Waker>,
}

#[derive(Debug)]
struct WakeState {
    woken: AtomicBool,
    task: Mutex<Option<Waker>>,
}

impl SelectiveWaker {
    /// One that rings: nobody has been asked yet.
    pub(super) fn new() -> Self {
        let state = Arc::new(WakeState { woken: AtomicBool::new(true), task: Mutex::default() });
        SelectiveWaker { waker: state.clone().into(), state, task: None }
    }

    /// What to poll with, if it rang since the last time.
    pub(super) fn take_context(&mut self, cx: &Context<'_>) -> Option<Context<'_>> {
        if !self.task.as_ref().is_some_and(|task| task.will_wake(cx.waker())) {
            self.task = Some(cx.waker().clone());
            // Before it is seen whether it rang: whoever rings from now on wakes this task.
            self.state.lock_task().clone_from(&self.task);
        }
        // Mostly it did not: one look, and nothing that other cores would have to see.
        let woken = &self.state.woken;
        (woken.load(Ordering::Relaxed) && woken.swap(false, Ordering::AcqRel)).then(|| Context::from_waker(&self.waker))
    }

    /// What it rings for is another thing now, which is to be asked.
    pub(super) fn mark_ready(&self) {
        self.state.woken.store(true, Ordering::Release);
    }
}

impl WakeState {
    fn lock_task(&self) -> MutexGuard<'_, Option<Waker>> {
        self.task.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Wake for WakeState {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.woken.store(true, Ordering::Release);
        if let Some(task) = &*self.lock_task() {
            task.wake_by_ref();
        }
    }
}
