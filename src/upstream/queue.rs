//! Requests that wait for a place at a server: in order, no more than there may be, gone when their client is.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::oneshot;

use super::member::Member;
use crate::http::body::OnComplete;

/// One request in flight at a member, until its answer's body is gone.
#[derive(Debug)]
pub(super) struct Place(Arc<Member>);

/// Those who wait for a place at any member of a fleet.
#[derive(Debug, Default)]
pub(super) struct Queue {
    most: AtomicUsize,
    /// As long as the line, for those who need not look at it.
    length: AtomicUsize,
    line: Mutex<Line>,
}

#[derive(Debug, Default)]
struct Line {
    next: u64,
    /// By number.
    waiting: VecDeque<(u64, oneshot::Sender<Place>)>,
}

/// A place in the line.
#[derive(Debug)]
pub(super) struct Waiting {
    queue: Arc<Queue>,
    number: u64,
    turn: oneshot::Receiver<Place>,
    /// Whether nobody is ahead.
    pub(super) first: bool,
}

impl Place {
    /// At this member, which has counted it.
    pub(super) fn at(member: Arc<Member>) -> Self {
        Place(member)
    }

    pub(super) fn member(&self) -> &Arc<Member> {
        &self.0
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        Member::leave(&self.0);
    }
}

impl OnComplete for Place {
    fn on_complete(self: Box<Self>, _sent: u64, _complete: bool) {}
}

impl Queue {
    /// For so many.
    pub(super) fn new(most: usize) -> Self {
        Queue { most: most.into(), ..Queue::default() }
    }

    /// For so many from now on.
    pub(super) fn resize(&self, most: usize) {
        self.most.store(most, Ordering::Relaxed);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.length.load(Ordering::SeqCst) == 0
    }

    /// A place at the end; none if the line is full.
    pub(super) fn join(self: &Arc<Self>) -> Option<Waiting> {
        let (sender, turn) = oneshot::channel();
        let mut line = self.line();
        if line.waiting.len() >= self.most.load(Ordering::Relaxed) {
            return None;
        }
        let (number, first) = (line.next, line.waiting.is_empty());
        line.next += 1;
        line.waiting.push_back((number, sender));
        // Before anybody looks again for a place: whoever leaves one from now on sees that somebody waits.
        self.length.store(line.waiting.len(), Ordering::SeqCst);
        Some(Waiting { queue: self.clone(), number, turn, first })
    }

    /// Gives the places that a member has to those who wait.
    pub(super) fn offer(&self, member: &Arc<Member>) {
        while !self.is_empty() {
            let Some(mut place) = Member::enter(member) else { return };
            loop {
                let next = {
                    let mut line = self.line();
                    let next = line.waiting.pop_front();
                    self.length.store(line.waiting.len(), Ordering::SeqCst);
                    next
                };
                let Some((_, turn)) = next else { return };
                match turn.send(place) {
                    Ok(()) => break,
                    Err(unwanted) => place = unwanted,
                }
            }
        }
    }

    fn line(&self) -> std::sync::MutexGuard<'_, Line> {
        self.line.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Waiting {
    /// The place, when it is there.
    pub(super) async fn turn(&mut self) -> Option<Place> {
        (&mut self.turn).await.ok()
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let mut line = self.queue.line();
        if let Ok(at) = line.waiting.binary_search_by_key(&self.number, |(number, _)| *number) {
            line.waiting.remove(at);
            self.queue.length.store(line.waiting.len(), Ordering::SeqCst);
        }
    }
}
