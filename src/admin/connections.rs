//! The connections of the admin listener: their maximum number and their deadlines. To accept a new connection at the
//! maximum, the listener closes an idle connection.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;

use crate::clock::monotonic;

/// Maximum number of connections that serve all kinds of requests, unlike the reserved connections.
const MAX_CONNECTIONS: usize = 64;

/// Maximum number of connections per peer address.
const MAX_CONNECTIONS_PER_PEER: usize = 32;

/// Maximum number of additional connections that serve only health checks.
const RESERVED_CONNECTIONS: usize = 8;

/// Maximum time from the start of a connection, or from a response, to the complete headers of the next request. A
/// client that does not read its response sends no further request, so this deadline also limits the time of writes. On
/// an event stream, this is the maximum time between two events that the client reads.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(15);

/// The open connections.
#[derive(Debug, Default)]
pub(super) struct AdminConnections(Mutex<OpenConnections>);

#[derive(Debug, Default)]
struct OpenConnections {
    /// The open connections, in the order in which they were accepted.
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
    /// The connection has been idle since this instant: it has no request in progress.
    Idle(Instant),
    /// A request is in progress. The timeouts of the request apply instead of [`CONNECTION_TIMEOUT`].
    Busy,
    /// The connection is an event stream. Its client read the last event at this instant.
    Streaming(Instant),
}

/// An open connection. Dropping this value removes the connection from `connections`.
#[derive(Debug)]
pub(super) struct AdminConnection {
    connections: Arc<AdminConnections>,
    id: u64,
    /// Whether this connection serves only health checks.
    pub(super) is_reserved: bool,
    /// Cancelled to close this connection when a new connection takes its place.
    pub(super) close_token: CancellationToken,
}

impl AdminConnections {
    /// Register a new connection. If the maximum number of connections is reached, close the connection that has been
    /// idle for the longest time. If no connection is idle, the new connection serves only health checks.
    pub(super) fn admit(self: &Arc<Self>, peer: IpAddr) -> AdminConnection {
        let mut open = self.lock();
        let is_of_peer = |entry: &ConnectionEntry| !entry.is_reserved && entry.peer == peer;
        let is_general = |entry: &ConnectionEntry| !entry.is_reserved;
        let is_reserved =
            !open.make_room(MAX_CONNECTIONS_PER_PEER, is_of_peer) || !open.make_room(MAX_CONNECTIONS, is_general);
        if is_reserved && !open.make_room(RESERVED_CONNECTIONS, |entry| entry.is_reserved) {
            // If all reserved connections have a request in progress, close the oldest of them. This case is rare,
            // because the listener responds to health checks immediately.
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
    /// Make room for one more of the connections that `is_counted` selects. If there are `max` of these connections,
    /// close the one that has been idle for the longest time. Return false if none of them is idle.
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
    /// Mark the connection as busy, because the request headers are complete.
    pub(super) fn set_busy(&self) {
        self.set_state(ConnectionState::Busy);
    }

    /// Mark the connection as idle, because the response is ready.
    pub(super) fn set_idle(&self) {
        self.set_state(ConnectionState::Idle(monotonic()));
    }

    /// Mark the connection as an event stream whose client has just read an event.
    pub(super) fn set_streaming(&self) {
        self.set_state(ConnectionState::Streaming(monotonic()));
    }

    /// Return the time that remains of [`CONNECTION_TIMEOUT`].
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
