//! Lines of requests that wait for their turn, in the order in which they came.

use std::collections::HashMap;
use std::collections::hash_map::RandomState;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The lines of this process, each for one state that requests wait for.
#[derive(Debug, Default)]
pub struct Lines(Mutex<HashMap<u128, Line, RandomState>>);

#[derive(Debug, Default)]
struct Line {
    // tokio's mutex lets those who wait in in their order.
    turn: Arc<tokio::sync::Mutex<()>>,
    waiting: usize,
}

/// A place in a line; leaving it frees the place.
#[derive(Debug)]
pub struct Place<'a> {
    lines: &'a Lines,
    key: u128,
    turn: Arc<tokio::sync::Mutex<()>>,
}

impl Lines {
    /// Whether somebody waits for this state.
    pub fn is_waited_for(&self, key: u128) -> bool {
        self.lock().contains_key(&key)
    }

    /// A place at the end of the line, if it has fewer than `places`.
    pub fn join(&self, key: u128, places: usize) -> Option<Place<'_>> {
        let mut lines = self.lock();
        let line = lines.entry(key).or_default();
        if line.waiting >= places {
            return None;
        }
        line.waiting += 1;
        Some(Place { lines: self, key, turn: line.turn.clone() })
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u128, Line, RandomState>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Place<'_> {
    /// Waits until everybody before has gone; the turn lasts as long as what is given back.
    pub async fn turn(&self) -> impl Sized {
        self.turn.lock().await
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let mut lines = self.lines.lock();
        if let Some(line) = lines.get_mut(&self.key) {
            line.waiting -= 1;
            if line.waiting == 0 {
                lines.remove(&self.key);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queue_is_gone_when_its_last_request_has_left() {
        let lines = Lines::default();
        let (one, other) = (lines.join(1, 2).unwrap(), lines.join(1, 2).unwrap());
        assert!(lines.join(1, 2).is_none() && lines.join(2, 2).is_some(), "each queue has its own bound");
        assert!(lines.is_waited_for(1) && !lines.is_waited_for(2));
        drop(one);
        assert!(lines.is_waited_for(1));
        drop(other);
        assert!(!lines.is_waited_for(1), "the next request is decided at once");
    }
}
