//! The connections of the admin listener: how many, which one is closed for a new one, and their deadline.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;

use crate::limiter::clock::monotonic;

/// Maximum number of connections for all requests.
const MAX_CONNECTIONS: usize = 64;

/// Maximum number of them for one peer address.
const MAX_CONNECTIONS_PER_PEER: usize = 32;

/// Connections beyond these bounds that are served health checks only.
const RESERVED_CONNECTIONS: usize = 8;

/// Maximum time from accept, or from a response, to the next complete request head. A client that does not read its response
/// sends no next request, so the same deadline bounds writes. Of an event stream, the time between two events that the client takes.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(15);

/// The open connections.
#[derive(Debug, Default)]
pub(super) struct AdminConnections(Mutex<OpenConnections>);

#[derive(Debug, Default)]
struct OpenConnections {
    /// In the order of their accept.
    entries: BTreeMap<u64, ConnectionEntry>,
    accepted_count: u64,
}

#[derive(Debug)]
struct ConnectionEntry {
    peer: IpAddr,
    is_reserved: bool,
    state: ConnectionState,
    close_token: CancellationToken,
}

#[derive(Debug, Clone, Copy)]
enum ConnectionState {
    /// No request is in progress since then.
    Idle(Instant),
    /// A request is being answered; what it waits for has deadlines of its own.
    Busy,
    /// The client took an event then.
    Streaming(Instant),
}

/// One of the connections, until it is dropped.
#[derive(Debug)]
pub(super) struct AdminConnection {
    connections: Arc<AdminConnections>,
    id: u64,
    /// Whether only health checks are served.
    pub(super) is_reserved: bool,
    /// Cancelled to make room for another connection.
    pub(super) close_token: CancellationToken,
}

impl AdminConnections {
    /// Admits a new connection. Where there is no room, the connection that has been idle for the longest time is closed; where
    /// none is idle, the new one is for health checks only.
    pub(super) fn admit(self: &Arc<Self>, peer: IpAddr) -> AdminConnection {
        let mut open = self.lock();
        let is_of_peer = |entry: &ConnectionEntry| !entry.is_reserved && entry.peer == peer;
        let is_general = |entry: &ConnectionEntry| !entry.is_reserved;
        let is_reserved =
            !open.make_room(MAX_CONNECTIONS_PER_PEER, is_of_peer) || !open.make_room(MAX_CONNECTIONS, is_general);
        if is_reserved && !open.make_room(RESERVED_CONNECTIONS, |entry| entry.is_reserved) {
            // Their requests wait for nothing, so hardly ever all of them are busy.
            open.close_oldest(|entry| entry.is_reserved);
        }
        let id = open.accepted_count;
        open.accepted_count += 1;
        let close_token = CancellationToken::new();
        let state = ConnectionState::Idle(monotonic());
        open.entries.insert(id, ConnectionEntry { peer, is_reserved, state, close_token: close_token.clone() });
        AdminConnection { connections: self.clone(), id, is_reserved, close_token }
    }

    fn lock(&self) -> MutexGuard<'_, OpenConnections> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl OpenConnections {
    /// Whether there is room for one more of `most` connections, after closing an idle one if necessary.
    fn make_room(&mut self, max: usize, is_counted: impl Fn(&ConnectionEntry) -> bool) -> bool {
        if self.entries.values().filter(|entry| is_counted(entry)).count() < max {
            return true;
        }
        let idle =
            self.entries.iter().filter(|(_, entry)| is_counted(entry)).filter_map(|(id, entry)| match entry.state {
                ConnectionState::Idle(since) => Some((since, *id)),
                ConnectionState::Busy | ConnectionState::Streaming(_) => None,
            });
        let longest_idle = idle.min();
        longest_idle.into_iter().for_each(|(_, id)| self.close(id));
        longest_idle.is_some()
    }

    fn close_oldest(&mut self, is_candidate: impl Fn(&ConnectionEntry) -> bool) {
        let first = self.entries.iter().find(|(_, entry)| is_candidate(entry)).map(|(id, _)| *id);
        first.into_iter().for_each(|id| self.close(id));
    }

    fn close(&mut self, id: u64) {
        if let Some(entry) = self.entries.remove(&id) {
            entry.close_token.cancel();
        }
    }
}

impl AdminConnection {
    /// A request head is complete.
    pub(super) fn set_busy(&self) {
        self.set_state(ConnectionState::Busy);
    }

    /// The response is ready.
    pub(super) fn set_idle(&self) {
        self.set_state(ConnectionState::Idle(monotonic()));
    }

    /// The client takes an event.
    pub(super) fn set_streaming(&self) {
        self.set_state(ConnectionState::Streaming(monotonic()));
    }

    /// Time until the deadline, as it stands.
    pub(super) fn time_left(&self) -> Duration {
        match self.connections.lock().entries.get(&self.id).map(|entry| entry.state) {
            Some(ConnectionState::Idle(since) | ConnectionState::Streaming(since)) => {
                CONNECTION_TIMEOUT.saturating_sub(since.elapsed())
            }
            Some(ConnectionState::Busy) | None => CONNECTION_TIMEOUT,
        }
    }

    fn set_state(&self, state: ConnectionState) {
        if let Some(entry) = self.connections.lock().entries.get_mut(&self.id) {
            entry.state = state;
        }
    }
}

impl Drop for AdminConnection {
    fn drop(&mut self) {
        self.connections.lock().entries.remove(&self.id);
    }
}
