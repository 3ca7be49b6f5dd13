//! A Redis Cluster: each identity's states are kept by one of its masters, each behind a guard of its own.

mod apart;
pub mod topology;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use futures_util::future::join_all;
use redis::{Cmd, ErrorKind, RedisError, ServerErrorKind, Value};
use tokio::time::{Duration, sleep, timeout};

use super::clock::monotonic;
use super::guard::{Guard, Recovery};
use super::redis::server::{Address, Login};
use super::redis::slots::{Slots, slot};
use super::redis::{RedisSettings, RedisStore};
use super::store::{Charge, Operation, Store, StoreError, Verdict};
use super::tallies::Tallies;
use topology::Topology;

/// A call follows so many redirections at once. More come while the nodes do not yet agree about a slot: those it follows
/// after a pause.
const REDIRECTIONS: u32 = 3;
const PAUSE: Duration = Duration::from_millis(2);

/// The counters of one worker's requests, kept by a cluster. Make one for each runtime: connections live on the one that
/// made them.
#[derive(Debug, Clone)]
pub struct Cluster(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    settings: RedisSettings,
    seeds: Vec<Address>,
    login: Login,
    topology: Arc<Topology>,
    tallies: Arc<Tallies>,
    known: Mutex<Known>,
}

/// The servers that this worker has asked.
#[derive(Debug, Default)]
struct Known {
    /// Those that are none of these are forgotten.
    of: Option<Arc<Slots>>,
    guards: HashMap<Address, Guard>,
}

/// Where to ask instead.
enum Redirection {
    /// From now on.
    Moved(Address),
    /// This time only: the slot is just being taken over.
    Ask(Address),
}

impl Cluster {
    /// The cluster that these nodes belong to; what is known of it is shared by all workers.
    pub fn new(
        settings: RedisSettings,
        seeds: Vec<Address>,
        login: Login,
        topology: Arc<Topology>,
        tallies: Arc<Tallies>,
    ) -> Self {
        Cluster(Arc::new(Inner { settings, seeds, login, topology, tallies, known: Mutex::default() }))
    }

    /// Maximum time from when a request asks to its verdict.
    pub fn timeout(&self) -> Duration {
        self.0.settings.timeout
    }

    /// Told each time that a node answers again after an outage.
    pub fn recovery(&self) -> &Arc<Recovery> {
        self.0.topology.recovery()
    }

    /// Connects to all masters, so that the first request finds connections.
    pub async fn connect(&self) {
        // Connecting to the node that is asked takes longer than a call.
        let found = timeout(self.0.settings.connect_timeout, self.0.topology.discovered_by(|| self.discover())).await;
        let nodes = match &found {
            Ok(Ok(slots)) => slots.masters(),
            // Those that cannot be reached are found out before the first request.
            Ok(Err(_)) | Err(_) => &self.0.seeds,
        };
        self.connect_to(nodes).await;
    }

    async fn connect_to(&self, nodes: &[Address]) {
        let guards: Vec<_> = nodes.iter().filter_map(|node| self.guard(node).ok()).collect();
        join_all(guards.iter().map(Guard::connect)).await;
    }

    /// Asks the master of the one identity that these charges have, wherever it may be by now.
    async fn follow(&self, due: Instant, operation: Operation, charges: &[Charge<'_>]) -> Result<Verdict, StoreError> {
        let Some(charge) = charges.first() else { return Err(StoreError::Malformed) };
        let ask = |guard: Guard, asking| async move { guard.ask(due, asking, operation, charges).await };
        self.at_the_owner(slot(charge.key.identity), due, ask).await
    }

    /// Sends an operator's command about keys of one slot; see [`Guard::aside`].
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn aside(&self, slot: u16, command: &Cmd) -> Result<Value, StoreError> {
        let due = monotonic() + self.timeout();
        let ask = |guard: Guard, asking| async move {
            guard.aside(due.saturating_duration_since(monotonic()), asking, command).await
        };
        self.at_the_owner(slot, due, ask).await
    }

    /// Asks the master of a slot.
    async fn at_the_owner<T, F: Future<Output = Result<T, StoreError>>>(
        &self,
        slot: u16,
        due: Instant,
        ask: impl Fn(Guard, bool) -> F,
    ) -> Result<T, StoreError> {
        let mut address = self.owner(slot).await?;
        let mut asking = false;
        for redirections in 0_u32.. {
            if redirections > REDIRECTIONS {
                sleep(PAUSE).await;
            }
            if monotonic() >= due {
                if redirections == 0 {
                    return Err(StoreError::Overloaded);
                }
                break;
            }
            let error = match ask(self.guard(&address)?, asking).await {
                Ok(answer) => return Ok(answer),
                Err(error) => error,
            };
            // Whatever it is, another node may know better.
            match redirection(&error, &address) {
                Some(Redirection::Moved(to)) => (address, asking) = (to, false),
                Some(Redirection::Ask(to)) => {
                    (address, asking) = (to, true);
                    continue;
                }
                None if is_of_multiple_keys(&error) => return Err(error),
                None => {
                    self.look_again();
                    return Err(error);
                }
            }
            self.look_again();
        }
        Err(StoreError::Unreachable(
            "the nodes of the cluster did not agree in time which of them is to be asked".to_owned(),
        ))
    }

    async fn owner(&self, slot: u16) -> Result<Address, StoreError> {
        self.slots().await?.owner(slot).cloned().ok_or_else(|| {
            self.look_again();
            StoreError::Unreachable(format!("no node of the cluster keeps slot {slot}"))
        })
    }

    /// Which node keeps which slot; the first who asks finds it out.
    async fn slots(&self) -> Result<Arc<Slots>, StoreError> {
        let topology = &self.0.topology;
        if let Some(slots) = topology.slots() {
            return Ok(slots);
        }
        let found = timeout(self.timeout(), topology.discovered_by(|| self.discover())).await;
        found.unwrap_or(Err(StoreError::Timeout))
    }

    /// Asks one node after the other which of them keeps what.
    async fn discover(&self) -> Result<Slots, StoreError> {
        let slots = self.0.topology.slots();
        let (masters, all) = slots.as_ref().map_or((&[][..], &[][..]), |slots| (slots.masters(), slots.nodes()));
        // Not always the same one first: it may be behind the others. Replicas only where nobody else is left.
        let first = self.0.topology.next_turn() % masters.len().max(1);
        let nodes = masters[first..].iter().chain(&masters[..first]).chain(&self.0.seeds);
        let replicas = all.iter().filter(|node| !masters.contains(node));
        let mut failure = StoreError::Open;
        for address in nodes.chain(replicas) {
            match self.guard(address)?.slots(address).await {
                Ok(slots) => return Ok(slots),
                Err(StoreError::Open) => {}
                Err(error) => failure = error,
            }
        }
        Err(failure)
    }

    /// Asks for the slots again, soon, when a call found that what is known of them may be wrong.
    fn look_again(&self) {
        let Some(turn) = self.0.topology.turn() else { return };
        let cluster = self.clone();
        tokio::spawn(async move {
            if let Ok(slots) = cluster.discover().await {
                let masters = slots.masters().to_vec();
                cluster.0.topology.replace(slots);
                // Before the first request needs them: a replica that was promoted has not been asked yet.
                let known = |master: &Address| cluster.known().guards.contains_key(master);
                let new: Vec<_> = masters.into_iter().filter(|master| !known(master)).collect();
                cluster.connect_to(&new).await;
            }
            turn.over().await;
        });
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.0.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The guard of a node; those of nodes that left the cluster are forgotten.
    fn guard(&self, address: &Address) -> Result<Guard, StoreError> {
        let Inner { settings, login, topology, .. } = &*self.0;
        let slots = topology.slots();
        let mut known = self.known();
        if known.of.as_ref().map(Arc::as_ptr) != slots.as_ref().map(Arc::as_ptr) {
            let is_there = |address: &Address| slots.as_ref().is_none_or(|slots| slots.nodes().contains(address));
            // A node that left and came back has a new breaker; nobody probes for the old one any more.
            known.guards.retain(|address, guard| is_there(address) && guard.is_behind(&topology.breaker(address)));
            known.of = slots;
        }
        if let Some(guard) = known.guards.get(address) {
            return Ok(guard.clone());
        }
        let server = login.node(address).map_err(|error| StoreError::Unreachable(error.to_string()))?;
        let store = RedisStore::new(settings, server, self.0.tallies.clone());
        let guard = Guard::of_node(store, topology.breaker(address), address.clone());
        known.guards.insert(address.clone(), guard.clone());
        Ok(guard)
    }
}

impl Cluster {
    /// Decides by `due`; see [`Store::call`].
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn ask(&self, due: Instant, operation: Operation, charges: &[Charge<'_>]) -> Result<Verdict, StoreError> {
        if !is_one_call(charges) {
            let same = |one: &Charge<'_>, other: &Charge<'_>| one.key.identity == other.key.identity;
            return self.apart(due, operation, charges, same).await;
        }
        match self.follow(due, operation, charges).await {
            // The slot is on its way to another node, some of its keys before others.
            Err(error) if is_of_multiple_keys(&error) => self.apart(due, operation, charges, |_, _| false).await,
            result => result,
        }
    }
}

impl Store for Cluster {
    async fn call(&self, operation: Operation, charges: &[Charge<'_>]) -> Result<Verdict, StoreError> {
        self.ask(monotonic() + self.timeout(), operation, charges).await
    }
}

/// Whether one server keeps all that is asked about: an identity has one slot.
pub fn is_one_call(charges: &[Charge<'_>]) -> bool {
    charges.windows(2).all(|pair| pair[0].key.identity == pair[1].key.identity)
}

fn redis_error(error: &StoreError) -> Option<&RedisError> {
    match error {
        StoreError::Elsewhere(error) => Some(error),
        _ => None,
    }
}

/// Whether single keys could be asked about, but not all at once.
fn is_of_multiple_keys(error: &StoreError) -> bool {
    redis_error(error).is_some_and(|error| error.kind() == ErrorKind::Server(ServerErrorKind::TryAgain))
}

fn redirection(error: &StoreError, asked: &Address) -> Option<Redirection> {
    let error = redis_error(error)?;
    let (node, _) = error.redirect_node()?;
    let mut node = Address::parse(node)?;
    if node.host.is_empty() {
        // A node that does not know its own host means the one where it was asked.
        node.host = asked.host.clone();
    }
    match error.kind() {
        ErrorKind::Server(ServerErrorKind::Ask) => Some(Redirection::Ask(node)),
        _ => Some(Redirection::Moved(node)),
    }
}
