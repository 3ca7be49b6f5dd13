//! How many bytes of bodies are buffered, for a connection and for the process: beyond that nothing more is taken than what
//! keeps each stream going.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::{Buf, Bytes};

use super::flow::StreamFlow;

/// Counted for each piece besides its bytes: its frame, and the part of a read buffer that it keeps.
const CHUNK_OVERHEAD: usize = 256;

/// A number of bytes that may be buffered.
#[derive(Debug)]
pub struct BufferBudget {
    used: AtomicUsize,
    max: AtomicUsize,
    /// What it is a part of.
    parent: Option<Arc<BufferBudget>>,
}

/// A part of a budget, until it is dropped.
#[derive(Debug)]
pub struct BufferReservation {
    budget: Arc<BufferBudget>,
    size: usize,
}

/// A piece of a response body. It counts until the protocol has written it.
#[derive(Debug)]
pub struct DataChunk {
    bytes: Bytes,
    reservation: Option<ChunkReservation>,
}

/// What a piece takes of the budget of its stream.
#[derive(Debug)]
struct ChunkReservation {
    flow: Arc<StreamFlow>,
    size: usize,
}

impl BufferBudget {
    /// A budget of its own.
    pub fn new(max: usize) -> Self {
        BufferBudget { used: AtomicUsize::new(0), max: max.into(), parent: None }
    }

    /// A part of another budget.
    pub fn with_parent(parent: Arc<BufferBudget>, max: usize) -> Self {
        BufferBudget { used: AtomicUsize::new(0), max: max.into(), parent: Some(parent) }
    }

    /// Changes its size; what is held stays.
    pub fn resize(&self, max: usize) {
        self.max.store(max, Ordering::Relaxed);
    }

    /// Whether more may be buffered.
    pub(super) fn has_capacity(&self) -> bool {
        self.used.load(Ordering::Relaxed) < self.max.load(Ordering::Relaxed)
            && self.parent.as_ref().is_none_or(|parent| parent.has_capacity())
    }

    /// Takes so many bytes, if they are there.
    pub(super) fn try_reserve(self: &Arc<Self>, size: usize) -> Option<BufferReservation> {
        self.add(size);
        let reservation = BufferReservation { budget: self.clone(), size };
        let fits = |budget: &BufferBudget| budget.used.load(Ordering::Relaxed) <= budget.max.load(Ordering::Relaxed);
        (fits(self) && self.parent.as_ref().is_none_or(|parent| fits(parent))).then_some(reservation)
    }

    pub(super) fn add(&self, bytes: usize) {
        self.used.fetch_add(bytes, Ordering::Relaxed);
        self.parent.iter().for_each(|parent| parent.add(bytes));
    }

    pub(super) fn subtract(&self, bytes: usize) {
        self.used.fetch_sub(bytes, Ordering::Relaxed);
        self.parent.iter().for_each(|parent| parent.subtract(bytes));
    }
}

impl Drop for BufferReservation {
    fn drop(&mut self) {
        self.budget.subtract(self.size);
    }
}

impl DataChunk {
    /// A piece that is not counted.
    pub(super) fn untracked(bytes: Bytes) -> Self {
        DataChunk { bytes, reservation: None }
    }

    /// A piece that counts for a stream.
    pub(super) fn tracked(bytes: Bytes, flow: &Arc<StreamFlow>) -> Self {
        let reservation = ChunkReservation { flow: flow.clone(), size: bytes.len() + CHUNK_OVERHEAD };
        flow.add_buffered(reservation.size);
        DataChunk { bytes, reservation: Some(reservation) }
    }
}

impl Buf for DataChunk {
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
            self.reservation = None;
        }
    }

    fn copy_to_bytes(&mut self, count: usize) -> Bytes {
        self.bytes.copy_to_bytes(count)
    }
}

impl Drop for ChunkReservation {
    fn drop(&mut self) {
        self.flow.release_buffered(self.size);
    }
}
