//! The connections of the admin listener: how many, which one is closed for a new one, and their deadline.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use tokio::time::Duration;
use tokio_util::sync::CancellationToken;

use crate::limit::clock::monotonic;

/// Maximum number of connections for all requests.
const MOST: usize = 64;

/// Maximum number of them for one peer address.
const MOST_OF_PEER: usize = 32;

/// Connections beyond these bounds that are served health checks only.
const RESERVED: usize = 8;

/// Maximum time from accept, or from a response, to the next complete request head. A client that does not read its response
/// sends no next request, so the same deadline bounds writes. Of an event stream, the time between two events that the client takes.
const DEADLINE: Duration = Duration::from_secs(15);

/// The open connections.
#[derive(Debug, Default)]
pub(super) struct Connections(Mutex<Open>);

#[derive(Debug, Default)]
struct Open {
    /// In the order of their accept.
    all: BTreeMap<u64, Entry>,
    accepted: u64,
}

#[derive(Debug)]
struct Entry {
    peer: IpAddr,
    reserved: bool,
    state: State,
    closed: CancellationToken,
}

#[derive(Debug, Clone, Copy)]
enum State {
    /// No request is in progress since then.
    Idle(Instant),
    /// A request is being answered; what it waits for has deadlines of its own.
    Busy,
    /// The client took an event then.
    Streaming(Instant),
}

/// One of the connections, until it is dropped.
#[derive(Debug)]
pub(super) struct Connection {
    connections: Arc<Connections>,
    id: u64,
    /// Whether only health checks are served.
    pub(super) reserved: bool,
    /// Cancelled to make room for another connection.
    pub(super) closed: CancellationToken,
}

impl Connections {
    /// Admits a new connection. Where there is no room, the connection that has been idle for the longest time is closed; where
    /// none is idle, the new one is for health checks only.
    pub(super) fn open(self: &Arc<Self>, peer: IpAddr) -> Connection {
        let mut open = self.lock();
        let by_peer = |entry: &Entry| !entry.reserved && entry.peer == peer;
        let general = |entry: &Entry| !entry.reserved;
        let reserved = !open.make_room(MOST_OF_PEER, by_peer) || !open.make_room(MOST, general);
        if reserved && !open.make_room(RESERVED, |entry| entry.reserved) {
            // Their requests wait for nothing, so hardly ever all of them are busy.
            open.close_first(|entry| entry.reserved);
        }
        let id = open.accepted;
        open.accepted += 1;
        let closed = CancellationToken::new();
        let state = State::Idle(monotonic());
        open.all.insert(id, Entry { peer, reserved, state, closed: closed.clone() });
        Connection { connections: self.clone(), id, reserved, closed }
    }

    fn lock(&self) -> MutexGuard<'_, Open> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Open {
    /// Whether there is room for one more of `most` connections, after closing an idle one if necessary.
    fn make_room(&mut self, most: usize, of: impl Fn(&Entry) -> bool) -> bool {
        if self.all.values().filter(|entry| of(entry)).count() < most {
            return true;
        }
        let idle = self.all.iter().filter(|(_, entry)| of(entry)).filter_map(|(id, entry)| match entry.state {
            State::Idle(since) => Some((since, *id)),
            State::Busy | State::Streaming(_) => None,
        });
        let longest = idle.min();
        longest.into_iter().for_each(|(_, id)| self.close(id));
        longest.is_some()
    }

    fn close_first(&mut self, of: impl Fn(&Entry) -> bool) {
        let first = self.all.iter().find(|(_, entry)| of(entry)).map(|(id, _)| *id);
        first.into_iter().for_each(|id| self.close(id));
    }

    fn close(&mut self, id: u64) {
        if let Some(entry) = self.all.remove(&id) {
            entry.closed.cancel();
        }
    }
}

impl Connection {
    /// A request head is complete.
    pub(super) fn busy(&self) {
        self.enter(State::Busy);
    }

    /// The response is ready.
    pub(super) fn idle(&self) {
        self.enter(State::Idle(monotonic()));
    }

    /// The client takes an event.
    pub(super) fn streaming(&self) {
        self.enter(State::Streaming(monotonic()));
    }

    /// Time until the deadline, as it stands.
    pub(super) fn left(&self) -> Duration {
        match self.connections.lock().all.get(&self.id).map(|entry| entry.state) {
            Some(State::Idle(since) | State::Streaming(since)) => DEADLINE.saturating_sub(since.elapsed()),
            Some(State::Busy) | None => DEADLINE,
        }
    }

    fn enter(&self, state: State) {
        if let Some(entry) = self.connections.lock().all.get_mut(&self.id) {
            entry.state = state;
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.connections.lock().all.remove(&self.id);
    }
}
