//! Whether the memory of the process is nearly used up, how much work may still start, and how much the kernel buffers.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use socket2::SockRef;
use tokio::net::TcpStream;
use tokio::time::sleep;

use crate::clock::{elapsed_since, monotonic};
use crate::http::slow_readers::SlowReaders;

/// Memory that a new connection may need before its first request, in bytes.
const CONNECTION: i64 = 128 << 10;

/// Memory that a new request may need soon, in bytes: the buffers of the gateway, and those of the kernel for both
/// connections.
const REQUEST: i64 = 512 << 10;

/// Time between two measurements while much memory is used.
pub const MEASURE_INTERVAL: Duration = Duration::from_millis(10);

/// Time after which a connection or a request is expected to use all the memory that it needs.
pub const SETTLING_TIME: Duration = Duration::from_millis(200);

/// Maximum time for which a request waits until it has room.
const MAX_WAIT: Duration = Duration::from_secs(1);

/// Time between two connections that each worker accepts while the memory is nearly used up.
const FULL_ACCEPT_DELAY: Duration = Duration::from_millis(50);

/// The gateway refuses work from this part of the limit on, in 1/16, until it uses less than the other part.
const FULL_FROM: u64 = 12;
const FULL_UNTIL: u64 = 11;

/// Whether the memory is nearly used up. New connections then wait, new requests are refused, and responses that clients
/// do not read end.
#[derive(Debug)]
pub struct MemoryGuard {
    /// Whether the process has a memory limit.
    has_limit: AtomicBool,
    is_full: AtomicBool,
    used: AtomicU64,
    /// The room of each worker.
    rooms: Box<[Room]>,
    /// The clients that do not read their responses.
    pub slow_readers: Arc<SlowReaders>,
    /// Number of responses that were ended because their clients did not read.
    ended: AtomicU64,
}

/// Number of bytes for which a worker may start work until the next measurement. Each worker writes to a separate cache
/// line.
#[derive(Debug, Default)]
#[repr(align(64))]
struct Room(AtomicI64);

/// Room of a connection or a request. If it ends within [`SETTLING_TIME`], another one gets the room. Later, the memory is
/// part of what was measured.
#[derive(Debug)]
pub struct RoomPermit {
    guard: Arc<MemoryGuard>,
    worker: usize,
    bytes: i64,
    started_at: Instant,
}

impl Default for MemoryGuard {
    /// The default is the guard of a process with one worker and without a limit.
    fn default() -> Self {
        MemoryGuard::new(1)
    }
}

impl MemoryGuard {
    /// Create the guard of a process without a limit.
    pub fn new(workers: usize) -> Self {
        let rooms = (0..workers.max(1)).map(|_| Room::default()).collect();
        let [used, ended] = [(); 2].map(|()| AtomicU64::default());
        let [has_limit, is_full] = [(); 2].map(|()| AtomicBool::default());
        MemoryGuard { has_limit, is_full, used, rooms, slow_readers: Arc::default(), ended }
    }

    /// Return whether the memory is nearly used up.
    pub fn is_full(&self) -> bool {
        self.is_full.load(Ordering::Relaxed)
    }

    /// Return whether the process has a memory limit.
    pub fn has_limit(&self) -> bool {
        self.has_limit.load(Ordering::Relaxed)
    }

    /// Return the number of bytes that were last measured. 0 without a limit.
    pub fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// Return the time after which a worker may accept the next connection. `None`: at once.
    pub fn accept_delay(&self, worker: usize) -> Option<Duration> {
        match self.is_full() {
            true => Some(FULL_ACCEPT_DELAY),
            false => (self.has_limit() && !self.has_room(worker)).then_some(MEASURE_INTERVAL),
        }
    }

    /// Count a connection that a worker has accepted. Return `None` without a limit.
    pub fn start_connection(self: &Arc<Self>, worker: usize) -> Option<RoomPermit> {
        self.has_limit().then(|| self.take(worker, CONNECTION))
    }

    /// Start a request if there is room. If the request may wait, wait for room. A connection must not have many
    /// requests that wait, because they need memory as well.
    ///
    /// # Errors
    /// The memory is nearly used up, or other requests have used up the room, for [`MAX_WAIT`] if the request may wait.
    pub async fn start_request(self: &Arc<Self>, worker: usize, may_wait: bool) -> Result<RoomPermit, NoMemory> {
        let since = monotonic();
        while !self.is_full() {
            if self.has_room(worker) {
                return Ok(self.take(worker, REQUEST));
            }
            if !may_wait || elapsed_since(since) >= MAX_WAIT {
                break;
            }
            sleep(MEASURE_INTERVAL).await;
        }
        Err(NoMemory)
    }

    fn has_room(&self, worker: usize) -> bool {
        self.rooms[worker].0.load(Ordering::Relaxed) > 0
    }

    fn take(self: &Arc<Self>, worker: usize, bytes: i64) -> RoomPermit {
        self.rooms[worker].0.fetch_sub(bytes, Ordering::Relaxed);
        RoomPermit { guard: self.clone(), worker, bytes, started_at: monotonic() }
    }

    /// Return the room that is left, of all workers. It is negative if they have started more work than there was room.
    pub fn room(&self) -> i64 {
        self.rooms.iter().map(|room| room.0.load(Ordering::Relaxed)).sum()
    }

    /// Set the number of bytes in use. They do not contain `unsettled` bytes that work of the last [`SETTLING_TIME`] may
    /// still need. Return the room until the next measurement.
    pub fn set_used(&self, used: u64, limit: u64, unsettled: i64) -> i64 {
        self.has_limit.store(true, Ordering::Relaxed);
        self.slow_readers.set_has_limit(true);
        self.used.store(used, Ordering::Relaxed);
        let part = if self.is_full() { FULL_UNTIL } else { FULL_FROM };
        self.is_full.store(used >= limit / 16 * part, Ordering::Relaxed);
        let free = (limit / 16 * FULL_FROM).saturating_sub(used);
        let room = i64::try_from(free).unwrap_or(i64::MAX) - unsettled;
        for shard in &self.rooms {
            // Add the difference, so that no change of a worker is lost.
            let before = shard.0.load(Ordering::Relaxed);
            shard.0.fetch_add(room / self.rooms.len() as i64 - before, Ordering::Relaxed);
        }
        room
    }

    /// Record that the process has no limit.
    pub fn set_unlimited(&self) {
        self.has_limit.store(false, Ordering::Relaxed);
        self.slow_readers.set_has_limit(false);
        self.used.store(0, Ordering::Relaxed);
        self.is_full.store(false, Ordering::Relaxed);
    }

    /// End the responses of the clients that have not read for the longest time: few of them if little more memory is
    /// used than [`FULL_FROM`] permits, and all if the limit is reached. Return the number of ended responses.
    pub fn end_slow_responses(&self, limit: u64) -> u64 {
        let full = limit / 16 * FULL_FROM;
        let excess = self.used().saturating_sub(full).min(limit - full);
        let count = (self.slow_readers.count() as u64 * excess).div_ceil((limit - full).max(1));
        let ended = self.slow_readers.end_slowest(count.max(1) as usize) as u64;
        self.ended.fetch_add(ended, Ordering::Relaxed);
        ended
    }

    /// Return the number of responses that were ended because their clients did not read.
    pub fn ended(&self) -> u64 {
        self.ended.load(Ordering::Relaxed)
    }
}

/// Bounds of what the kernel buffers for a connection. By default, a peer that does not read occupies up to 4 MiB
/// (`tcp_wmem` in tcp(7)), and a connection that the gateway does not read up to 6 MiB (`tcp_rmem`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SocketBuffers {
    /// Maximum number of bytes that are not sent yet.
    pub unsent: u32,
    /// Maximum number of received bytes. The kernel doubles it for its own data. `None`: the kernel chooses.
    pub received: Option<u32>,
}

impl SocketBuffers {
    /// Set the bounds of a connection.
    ///
    /// # Errors
    /// The kernel rejects a bound.
    pub fn apply_to(self, stream: &TcpStream) -> io::Result<()> {
        let socket = SockRef::from(stream);
        socket.set_tcp_notsent_lowat(self.unsent)?;
        self.received.map_or(Ok(()), |size| socket.set_recv_buffer_size(size as usize))
    }
}

/// There is no memory for a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NoMemory;

impl Drop for RoomPermit {
    fn drop(&mut self) {
        if elapsed_since(self.started_at) < SETTLING_TIME {
            self.guard.rooms[self.worker].0.fetch_add(self.bytes, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: u64 = 64 << 20;
    const FULL: u64 = LIMIT / 16 * FULL_FROM;

    #[test]
    fn guard_refuses_work_until_enough_memory_is_free() {
        let guard = MemoryGuard::new(1);
        let is_full = [1100, 1199, 1200, 1600, 1100, 1099, 1199, 1200].map(|used| {
            guard.set_used(used, 1600, 0);
            guard.is_full()
        });
        assert_eq!(is_full, [false, false, true, true, true, false, false, true]);
        guard.set_unlimited();
        assert_eq!((guard.is_full(), guard.used(), guard.accept_delay(0)), (false, 0, None));
    }

    #[test]
    fn each_worker_accepts_what_has_room() {
        let guard = Arc::new(MemoryGuard::new(2));
        assert!(guard.start_connection(0).is_none(), "there is no limit");
        assert_eq!(guard.set_used(FULL - 8 * CONNECTION as u64, LIMIT, 4 * CONNECTION), 4 * CONNECTION);
        let mut permits: Vec<_> = (0..2).map(|_| guard.start_connection(0)).collect();
        assert_eq!([0, 1].map(|worker| guard.accept_delay(worker)), [Some(MEASURE_INTERVAL), None]);
        assert_eq!(guard.room(), 2 * CONNECTION);
        permits.pop();
        assert_eq!(guard.accept_delay(0), None, "a connection that ends soon makes room for another one");
        let settled = monotonic() - SETTLING_TIME;
        permits.iter_mut().flatten().for_each(|permit| permit.started_at = settled);
        permits.clear();
        assert_eq!(guard.room(), 3 * CONNECTION, "the memory of a settled connection is in `used`");
    }

    #[tokio::test(start_paused = true)]
    async fn request_waits_for_room_and_is_refused_without_memory() {
        let guard = Arc::new(MemoryGuard::new(1));
        guard.set_used(FULL - REQUEST as u64, LIMIT, 0);
        let first = guard.start_request(0, true).await.unwrap();
        let second = guard.start_request(0, true);
        let ends = async {
            sleep(3 * MEASURE_INTERVAL).await;
            drop(first);
        };
        let (second, ()) = tokio::join!(second, ends);
        let third = guard.start_request(0, false).await;
        assert_eq!((second.is_ok(), third.is_err()), (true, true));
        guard.set_used(FULL, LIMIT, 0);
        assert_eq!(guard.start_request(0, true).await.unwrap_err(), NoMemory);
    }

    #[test]
    fn number_of_ended_responses_follows_the_excess() {
        let guard = MemoryGuard::new(1);
        let readers = [(); 8].map(|()| guard.slow_readers.add(tokio::time::Instant::now()));
        for (used, ended) in [(FULL, 1), ((FULL + LIMIT) / 2, 4), (LIMIT + 1, 3), (LIMIT, 0)] {
            guard.set_used(used, LIMIT, 0);
            assert_eq!(guard.end_slow_responses(LIMIT), ended, "{used}");
        }
        assert_eq!((guard.ended(), readers.len()), (8, 8));
    }
}
