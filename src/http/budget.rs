//! How many bytes of bodies are buffered, for a connection and for the process: beyond that nothing more is taken than what
//! keeps each stream going.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::{Buf, Bytes};

use super::flow::Flow;

/// Counted for each piece besides its bytes: its frame, and the part of a read buffer that it keeps.
const OVERHEAD: usize = 256;

/// A number of bytes that may be buffered.
#[derive(Debug)]
pub struct Budget {
    held: AtomicUsize,
    most: AtomicUsize,
    /// What it is a part of.
    whole: Option<Arc<Budget>>,
}

/// A part of a budget, until it is dropped.
#[derive(Debug)]
pub struct Reserved {
    budget: Arc<Budget>,
    bytes: usize,
}

/// A piece of a response body. It counts until the protocol has written it.
#[derive(Debug)]
pub struct Piece {
    bytes: Bytes,
    hold: Option<Hold>,
}

/// What a piece takes of the budget of its stream.
#[derive(Debug)]
struct Hold {
    flow: Arc<Flow>,
    bytes: usize,
}

impl Budget {
    /// A budget of its own.
    pub fn new(most: usize) -> Self {
        Budget { held: AtomicUsize::new(0), most: most.into(), whole: None }
    }

    /// A part of another budget.
    pub fn within(whole: Arc<Budget>, most: usize) -> Self {
        Budget { held: AtomicUsize::new(0), most: most.into(), whole: Some(whole) }
    }

    /// Changes its size; what is held stays.
    pub fn resize(&self, most: usize) {
        self.most.store(most, Ordering::Relaxed);
    }

    /// Whether more may be buffered.
    pub(super) fn has_room(&self) -> bool {
        self.held.load(Ordering::Relaxed) < self.most.load(Ordering::Relaxed)
            && self.whole.as_ref().is_none_or(|whole| whole.has_room())
    }

    /// Takes so many bytes, if they are there.
    pub(super) fn reserve(self: &Arc<Self>, bytes: usize) -> Option<Reserved> {
        self.add(bytes);
        let reserved = Reserved { budget: self.clone(), bytes };
        let fits = |budget: &Budget| budget.held.load(Ordering::Relaxed) <= budget.most.load(Ordering::Relaxed);
        (fits(self) && self.whole.as_ref().is_none_or(|whole| fits(whole))).then_some(reserved)
    }

    pub(super) fn add(&self, bytes: usize) {
        self.held.fetch_add(bytes, Ordering::Relaxed);
        self.whole.iter().for_each(|whole| whole.add(bytes));
    }

    pub(super) fn subtract(&self, bytes: usize) {
        self.held.fetch_sub(bytes, Ordering::Relaxed);
        self.whole.iter().for_each(|whole| whole.subtract(bytes));
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        self.budget.subtract(self.bytes);
    }
}

impl Piece {
    /// A piece that is not counted.
    pub(super) fn free(bytes: Bytes) -> Self {
        Piece { bytes, hold: None }
    }

    /// A piece that counts for a stream.
    pub(super) fn held(bytes: Bytes, flow: &Arc<Flow>) -> Self {
        let hold = Hold { flow: flow.clone(), bytes: bytes.len() + OVERHEAD };
        flow.take(hold.bytes);
        Piece { bytes, hold: Some(hold) }
    }
}

impl Buf for Piece {
    fn remaining(&self) -> usize {
        self.bytes.remaining()
    }

    fn chunk(&self) -> &[u8] {
        self.bytes.chunk()
    }

    fn advance(&mut self, count: usize) {
        self.bytes.advance(count);
        if self.bytes.is_empty() {
            self.bytes = Bytes::new();
            self.hold = None;
        }
    }

    fn copy_to_bytes(&mut self, count: usize) -> Bytes {
        self.bytes.copy_to_bytes(count)
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.flow.give_back(self.bytes);
    }
}
