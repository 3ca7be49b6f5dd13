//! One server of a fleet, at one address: how it does, and how many requests it has.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::net::TcpStream;

use super::condition::Condition;
use super::connect::Stream;
use super::queue::{Place, Queue};
use super::settings::{ServerSettings, UpstreamSettings};
use crate::limit::clock::Seldom;

/// One that requests can be sent to: an address of a server.
#[derive(Debug)]
pub struct Member {
    /// Its place among the servers of the fleet.
    pub index: usize,
    /// As configured.
    pub server: ServerSettings,
    /// Where; none = the system finds it out for each connection.
    pub address: Option<SocketAddr>,
    /// One for all configurations that have it.
    pub(super) state: Arc<State>,
}

/// How a server does, whatever the configuration says of it.
#[derive(Debug)]
pub(super) struct State {
    condition: Mutex<Condition>,
    /// Whether it was said that it takes no connections.
    pub(super) unreachable: Seldom,
    /// Requests that failed, in a row.
    pub(super) errors: AtomicU32,
    in_flight: AtomicUsize,
    max_requests: AtomicUsize,
    queue: Arc<Queue>,
    /// Whether the table has it.
    pub(super) usable: AtomicBool,
}

impl Member {
    /// Without requests.
    pub(super) fn new(
        settings: &UpstreamSettings,
        index: usize,
        address: Option<SocketAddr>,
        condition: Condition,
        queue: Arc<Queue>,
    ) -> Self {
        let state = State {
            condition: Mutex::new(condition),
            unreachable: Seldom::new(),
            errors: AtomicU32::new(0),
            in_flight: AtomicUsize::new(0),
            max_requests: AtomicUsize::new(settings.max_requests),
            queue,
            usable: AtomicBool::new(true),
        };
        Member { index, server: settings.servers[index].clone(), address, state: Arc::new(state) }
    }

    /// The same as other settings have it, with its condition and the requests that it has.
    pub(super) fn under(&self, settings: &UpstreamSettings, index: usize) -> Self {
        let state = self.state.clone();
        state.max_requests.store(settings.max_requests, Ordering::Relaxed);
        if settings.health.is_none() {
            // Nobody would find out that it is healthy again.
            self.condition().uncheck();
        }
        Member { index, server: settings.servers[index].clone(), address: self.address, state }
    }

    /// Whether both are one server, as the same or as different configurations have it.
    pub(super) fn is(&self, other: &Member) -> bool {
        Arc::ptr_eq(&self.state, &other.state)
    }

    /// What logs call it, and what tells it from others.
    pub(super) fn name(&self) -> String {
        match self.address {
            Some(address) if self.server.host.parse::<IpAddr>().is_err() => {
                format!("{} ({address})", self.server.authority)
            }
            _ => self.server.authority.to_string(),
        }
    }

    pub(super) fn condition(&self) -> MutexGuard<'_, Condition> {
        self.state.condition.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn in_flight(&self) -> usize {
        self.state.in_flight.load(Ordering::Relaxed)
    }

    /// A place, if there is room for one more request.
    pub(super) fn enter(member: &Arc<Member>) -> Option<Place> {
        let (in_flight, most) = (&member.state.in_flight, member.state.max_requests.load(Ordering::Relaxed));
        if most == 0 {
            in_flight.fetch_add(1, Ordering::Relaxed);
        } else {
            let one_more = |now: usize| (now < most).then_some(now + 1);
            in_flight.fetch_update(Ordering::SeqCst, Ordering::SeqCst, one_more).ok()?;
        }
        Some(Place::at(member.clone()))
    }

    /// Gives a place back.
    pub(super) fn leave(member: &Arc<Member>) {
        let State { in_flight, queue, usable, .. } = &*member.state;
        in_flight.fetch_sub(1, Ordering::SeqCst);
        if !queue.is_empty() && usable.load(Ordering::Relaxed) {
            queue.offer(member);
        }
    }

    /// Connects.
    ///
    /// # Errors
    /// Nobody listens, the name has no address, or TLS fails.
    pub(super) async fn connect(&self) -> io::Result<Stream> {
        let stream = match self.address {
            Some(address) => TcpStream::connect(address).await?,
            None => TcpStream::connect((&*self.server.host, self.server.port)).await?,
        };
        Stream::over(stream, self.server.tls.as_ref()).await
    }
}
