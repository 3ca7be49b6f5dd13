//! How large a body may be, how long it may take, and for how long it may stand still.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::time::{Duration, Instant, Sleep, sleep, sleep_until};

use super::pace::UploadLimits;

/// The bounds of an exchange with an upstream.
#[derive(Debug, Clone, Copy)]
pub struct BodyLimits {
    /// When all of it is to be over.
    pub deadline: Option<Instant>,
    /// What is demanded of the client while it sends the request body.
    pub upload: UploadLimits,
    /// Maximum silence of an upstream within a response of known length.
    pub idle_timeout: Duration,
    /// Bytes of a request body.
    pub max_body: Option<u64>,
}

/// Why a body ended early.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum BodyError {
    #[error(transparent)]
    Aborted(#[from] hyper::Error),
    #[error("the trailer section of the request is malformed")]
    MalformedTrailers,
    #[error("the request body is longer than the route allows")]
    TooLarge,
    #[error("the client stopped sending the request body")]
    ClientTimeout,
    #[error("the upstream stopped sending a response body of known length")]
    UpstreamIdleTimeout,
    #[error("the timeout of the route is over")]
    RouteTimeout,
}

/// When a body is to be over.
#[derive(Debug)]
pub(super) struct Deadline {
    pub(super) instant: Instant,
    timer: Pin<Box<Sleep>>,
}

impl Deadline {
    pub(super) fn new(instant: Instant) -> Self {
        Deadline { instant, timer: Box::pin(sleep_until(instant)) }
    }

    /// Ready when the time is over.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        self.timer.as_mut().poll(cx)
    }
}

/// Times a silence. Nothing is set for a body that never keeps anybody waiting.
#[derive(Debug)]
pub(super) struct IdleTimer {
    timeout: Duration,
    timer: Option<Pin<Box<Sleep>>>,
    /// Something came since the timer was set.
    has_progressed: bool,
}

impl IdleTimer {
    pub(super) fn new(timeout: Duration) -> Self {
        IdleTimer { timeout, timer: None, has_progressed: false }
    }

    /// Something came.
    pub(super) fn record_progress(&mut self) {
        self.has_progressed = true;
    }

    /// Nothing is there: ready when that has been so for too long.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let timeout = self.timeout;
        let has_progressed = std::mem::take(&mut self.has_progressed);
        let timer = match &mut self.timer {
            Some(timer) => {
                if has_progressed {
                    timer.as_mut().reset(Instant::now() + timeout);
                }
                timer
            }
            none => none.insert(Box::pin(sleep(timeout))),
        };
        timer.as_mut().poll(cx)
    }
}
