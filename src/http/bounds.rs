//! How large a body may be, how long it may take, and for how long it may stand still.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::time::{Duration, Instant, Sleep, sleep, sleep_until};

use super::pace::Demand;

/// The bounds of an exchange with an upstream.
#[derive(Debug, Clone, Copy)]
pub struct Bounds {
    /// When all of it is to be over.
    pub deadline: Option<Instant>,
    /// What is demanded of the client while it sends the request body.
    pub demand: Demand,
    /// Maximum silence of an upstream within a response of known length.
    pub idle: Duration,
    /// Bytes of a request body.
    pub max_body: Option<u64>,
}

/// Why a body ended early.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum BodyError {
    #[error(transparent)]
    Broken(#[from] hyper::Error),
    #[error("the trailer section of the request is malformed")]
    Trailers,
    #[error("the request body is longer than the route allows")]
    TooLarge,
    #[error("the client stopped sending the request body")]
    ClientStalled,
    #[error("the upstream stopped sending a response body of known length")]
    UpstreamStalled,
    #[error("the timeout of the route is over")]
    Overdue,
}

/// When a body is to be over.
#[derive(Debug)]
pub(super) struct Deadline {
    pub(super) at: Instant,
    timer: Pin<Box<Sleep>>,
}

impl Deadline {
    pub(super) fn new(at: Instant) -> Self {
        Deadline { at, timer: Box::pin(sleep_until(at)) }
    }

    /// Ready when the time is over.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        self.timer.as_mut().poll(cx)
    }
}

/// Times a silence. Nothing is set for a body that never keeps anybody waiting.
#[derive(Debug)]
pub(super) struct Silence {
    limit: Duration,
    timer: Option<Pin<Box<Sleep>>>,
    /// Something came since the timer was set.
    broken: bool,
}

impl Silence {
    pub(super) fn new(limit: Duration) -> Self {
        Silence { limit, timer: None, broken: false }
    }

    /// Something came.
    pub(super) fn end(&mut self) {
        self.broken = true;
    }

    /// Nothing is there: ready when that has been so for too long.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let limit = self.limit;
        let broken = std::mem::take(&mut self.broken);
        let timer = match &mut self.timer {
            Some(timer) => {
                if broken {
                    timer.as_mut().reset(Instant::now() + limit);
                }
                timer
            }
            none => none.insert(Box::pin(sleep(limit))),
        };
        timer.as_mut().poll(cx)
    }
}
