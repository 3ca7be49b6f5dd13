//! A waker of one's own: what rarely happens is polled when it has happened, not whenever something else does.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Wake, Waker};

use futures_util::task::AtomicWaker;

/// Wakes a task, and tells it that it was this one.
#[derive(Debug)]
pub(super) struct Bell {
    ringing: Arc<Ringing>,
    waker: Waker,
}

#[derive(Debug)]
struct Ringing {
    rang: AtomicBool,
    task: AtomicWaker,
}

impl Bell {
    /// One that rings: nobody has been asked yet.
    pub(super) fn new() -> Self {
        let ringing = Arc::new(Ringing { rang: AtomicBool::new(true), task: AtomicWaker::new() });
        Bell { waker: ringing.clone().into(), ringing }
    }

    /// What to poll with, if it rang since the last time.
    pub(super) fn answer(&self, cx: &Context<'_>) -> Option<Context<'_>> {
        self.ringing.task.register(cx.waker());
        self.ringing.rang.swap(false, Ordering::AcqRel).then(|| Context::from_waker(&self.waker))
    }

    /// What it rings for is another thing now, which is to be asked.
    pub(super) fn ring(&self) {
        self.ringing.rang.store(true, Ordering::Release);
    }
}

impl Wake for Ringing {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.rang.store(true, Ordering::Release);
        self.task.wake();
    }
}
