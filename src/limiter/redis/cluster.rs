//! The Redis Cluster client. The master of a slot keeps the states of the slot's identities, and has its own circuit
//! breaker.

mod scatter;
pub mod topology;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use redis::{Cmd, Value};
use tokio::time::{sleep, timeout};

use crate::limiter::clock::monotonic;
use crate::limiter::metrics::LimiterMetrics;
use crate::limiter::redis::RedisSettings;
use crate::limiter::redis::circuit_breaker::RecoverySignal;
use crate::limiter::redis::cluster::topology::{ClusterMap, SlotMap, identity_slot};
use crate::limiter::redis::server::{Address, Login};
use crate::limiter::redis::server_store::ServerStore;
use crate::limiter::verdict::{Charge, Operation, StoreError, Verdict};

/// Number of redirections that a call follows at once. Further redirections are followed after [`REDIRECTION_DELAY`],
/// because the nodes do not agree on the owner of the slot yet.
const MAX_REDIRECTIONS: u32 = 3;
const REDIRECTION_DELAY: Duration = Duration::from_millis(2);

/// A Redis Cluster as one worker calls it. Clones share it. Connections belong to the runtime that opened them, so
/// create one client for each runtime.
#[derive(Debug, Clone)]
pub struct ClusterStore(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    settings: RedisSettings,
    seeds: Vec<Address>,
    login: Login,
    cluster_map: Arc<ClusterMap>,
    metrics: Arc<LimiterMetrics>,
    nodes: Mutex<KnownNodes>,
}

/// The nodes that this worker has called.
#[derive(Debug, Default)]
struct KnownNodes {
    /// The slots with which `guards` was last cleaned up. Nodes that own none of these slots are removed.
    slots: Option<Arc<SlotMap>>,
    guards: HashMap<Address, ServerStore>,
}

/// A redirection to another node.
enum Redirection {
    /// The redirection applies to this and all later calls.
    Moved(Address),
    /// The redirection applies only to this call: the node is importing the slot.
    Ask(Address),
}

impl ClusterStore {
    /// Create the client of the cluster to which `seeds` belong. All workers share `cluster_map`.
    pub fn new(
        settings: RedisSettings,
        seeds: Vec<Address>,
        login: Login,
        cluster_map: Arc<ClusterMap>,
        metrics: Arc<LimiterMetrics>,
    ) -> Self {
        ClusterStore(Arc::new(Inner { settings, seeds, login, cluster_map, metrics, nodes: Mutex::default() }))
    }

    /// Return the maximum time from the start of a check to its verdict.
    pub fn timeout(&self) -> Duration {
        self.0.settings.timeout
    }

    /// Return the first part of every key.
    pub fn prefix(&self) -> &str {
        &self.0.settings.prefix
    }

    /// Return the clients of all masters.
    ///
    /// # Errors
    /// The slots of the cluster are not known.
    pub async fn master_nodes(&self) -> Result<Vec<ServerStore>, StoreError> {
        self.slots().await?.masters().iter().map(|address| self.guarded_node(address)).collect()
    }

    /// Return the signal that fires each time a node is available again after an outage.
    pub fn recovery(&self) -> &Arc<RecoverySignal> {
        self.0.cluster_map.recovery()
    }

    /// Connect to all masters, so that the first request finds connections.
    pub async fn connect(&self) {
        // Use the connect timeout, because discovering the cluster includes connecting, which takes several round
        // trips.
        let discovered =
            timeout(self.0.settings.connect_timeout, self.0.cluster_map.slots_or_discover(|| self.discover())).await;
        let nodes = match &discovered {
            Ok(Ok(slots)) => slots.masters(),
            // Connect to all nodes, so that unreachable nodes are detected before the first request.
            Ok(Err(_)) | Err(_) => &self.0.seeds,
        };
        self.connect_to(nodes).await;
    }

    async fn connect_to(&self, nodes: &[Address]) {
        let guards: Vec<_> = nodes.iter().filter_map(|node| self.guarded_node(node).ok()).collect();
        join_all(guards.iter().map(ServerStore::connect)).await;
    }

    /// Call the master that owns the slot of the identity. All charges have the same identity.
    async fn call_owner(
        &self,
        deadline: Instant,
        operation: Operation,
        charges: &[Charge<'_>],
    ) -> Result<Verdict, StoreError> {
        let Some(charge) = charges.first() else { return Err(StoreError::MalformedReply) };
        let call = |node: ServerStore, asking| async move { node.call(deadline, asking, operation, charges).await };
        self.with_owner(identity_slot(charge.key.identity), deadline, call).await
    }

    /// Send an administrator's command about keys in one slot; see [`ServerStore::admin_command`].
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn admin_command(&self, slot: u16, command: &Cmd) -> Result<Value, StoreError> {
        let deadline = monotonic() + self.timeout();
        let call = |node: ServerStore, asking| async move {
            node.admin_command(deadline.saturating_duration_since(monotonic()), asking, command).await
        };
        self.with_owner(slot, deadline, call).await
    }

    /// Run `call` with the master of a slot, and follow redirections.
    async fn with_owner<T, F: Future<Output = Result<T, StoreError>>>(
        &self,
        slot: u16,
        deadline: Instant,
        call: impl Fn(ServerStore, bool) -> F,
    ) -> Result<T, StoreError> {
        let mut address = self.owner(slot).await?;
        let mut asking = false;
        for redirections in 0_u32.. {
            if redirections > MAX_REDIRECTIONS {
                sleep(REDIRECTION_DELAY).await;
            }
            if monotonic() >= deadline {
                if redirections == 0 {
                    return Err(StoreError::Overloaded);
                }
                break;
            }
            let error = match call(self.guarded_node(&address)?, asking).await {
                Ok(answer) => return Ok(answer),
                Err(error) => error,
            };
            // After an error that is not a redirection, look up the owner of the slot again, because another node may
            // have become the master.
            match parse_redirection(&error, &address) {
                Some(Redirection::Moved(to)) => (address, asking) = (to, false),
                Some(Redirection::Ask(to)) => {
                    (address, asking) = (to, true);
                    continue;
                }
                None if is_try_again(&error) => return Err(error),
                None => {
                    self.refresh_topology();
                    return Err(error);
                }
            }
            self.refresh_topology();
        }
        Err(StoreError::Unreachable("the cluster nodes did not agree on the owner of the slot in time".to_owned()))
    }

    async fn owner(&self, slot: u16) -> Result<Address, StoreError> {
        self.slots().await?.owner(slot).cloned().ok_or_else(|| {
            self.refresh_topology();
            StoreError::Unreachable(format!("no cluster node owns slot {slot}"))
        })
    }

    /// Return the slots of all nodes. The first caller discovers the slots.
    async fn slots(&self) -> Result<Arc<SlotMap>, StoreError> {
        let cluster_map = &self.0.cluster_map;
        if let Some(slots) = cluster_map.slots() {
            return Ok(slots);
        }
        let discovered = timeout(self.timeout(), cluster_map.slots_or_discover(|| self.discover())).await;
        discovered.unwrap_or(Err(StoreError::Timeout))
    }

    /// Query the slots from one node after another until a node replies.
    async fn discover(&self) -> Result<SlotMap, StoreError> {
        let slots = self.0.cluster_map.slots();
        let (masters, all_nodes) = slots.as_ref().map_or((&[][..], &[][..]), |slots| (slots.masters(), slots.nodes()));
        // Begin with a different master each time, because a single master may have outdated slots. Query the replicas
        // last.
        let first = self.0.cluster_map.next_refresh_number() % masters.len().max(1);
        let nodes = masters[first..].iter().chain(&masters[..first]).chain(&self.0.seeds);
        let replicas = all_nodes.iter().filter(|node| !masters.contains(node));
        let mut failure = StoreError::BreakerOpen;
        for address in nodes.chain(replicas) {
            match self.guarded_node(address)?.slots(address).await {
                Ok(slots) => return Ok(slots),
                Err(StoreError::BreakerOpen) => {}
                Err(error) => failure = error,
            }
        }
        Err(failure)
    }

    /// Refresh the slots in the background, because a call has shown that they may be outdated.
    fn refresh_topology(&self) {
        let Some(permit) = self.0.cluster_map.try_refresh() else { return };
        let cluster = self.clone();
        tokio::spawn(async move {
            if let Ok(slots) = cluster.discover().await {
                let masters = slots.masters().to_vec();
                cluster.0.cluster_map.replace(slots);
                // Connect before the first request needs the connection, because a promoted replica was not called
                // before.
                let is_known = |master: &Address| cluster.lock_nodes().guards.contains_key(master);
                let new: Vec<_> = masters.into_iter().filter(|master| !is_known(master)).collect();
                cluster.connect_to(&new).await;
            }
            permit.release().await;
        });
    }

    fn lock_nodes(&self) -> MutexGuard<'_, KnownNodes> {
        self.0.nodes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Return the client of a node. Remove the clients of nodes that left the cluster.
    fn guarded_node(&self, address: &Address) -> Result<ServerStore, StoreError> {
        let Inner { settings, login, cluster_map, .. } = &*self.0;
        let slots = cluster_map.slots();
        let mut known_nodes = self.lock_nodes();
        if known_nodes.slots.as_ref().map(Arc::as_ptr) != slots.as_ref().map(Arc::as_ptr) {
            let is_member = |address: &Address| slots.as_ref().is_none_or(|slots| slots.nodes().contains(address));
            // Keep a client only if it uses the current circuit breaker of its node. A node that left the cluster and
            // returned has a new circuit breaker.
            known_nodes
                .guards
                .retain(|address, guard| is_member(address) && guard.uses_breaker(&cluster_map.breaker(address)));
            known_nodes.slots = slots;
        }
        if let Some(guard) = known_nodes.guards.get(address) {
            return Ok(guard.clone());
        }
        let server = login.node_endpoint(address).map_err(|error| StoreError::Unreachable(error.to_string()))?;
        let breaker = cluster_map.breaker(address);
        let guard = ServerStore::for_node(settings, server, breaker, address.clone(), self.0.metrics.clone());
        known_nodes.guards.insert(address.clone(), guard.clone());
        Ok(guard)
    }
}

impl ClusterStore {
    /// Decide all of `charges` before `deadline`.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn call(
        &self,
        deadline: Instant,
        operation: Operation,
        charges: &[Charge<'_>],
    ) -> Result<Verdict, StoreError> {
        if !is_single_slot(charges) {
            let is_same_identity = |one: &Charge<'_>, other: &Charge<'_>| one.key.identity == other.key.identity;
            return self.scatter(deadline, operation, charges, is_same_identity).await;
        }
        match self.call_owner(deadline, operation, charges).await {
            // Call the node for each key separately, because the slot is being migrated and its keys are on two nodes.
            Err(error) if is_try_again(&error) => self.scatter(deadline, operation, charges, |_, _| false).await,
            result => result,
        }
    }
}

/// Return whether one server keeps all states of these charges, because an identity has only one slot.
pub fn is_single_slot(charges: &[Charge<'_>]) -> bool {
    charges.windows(2).all(|pair| pair[0].key.identity == pair[1].key.identity)
}

/// Return whether the keys of the call are on two nodes while their slot migrates. While a slot migrates, calls with
/// single keys succeed.
fn is_try_again(error: &StoreError) -> bool {
    matches!(error, StoreError::Redirected(reply) if reply.code() == "TRYAGAIN")
}

/// Parse `MOVED SLOT ADDRESS` or `ASK SLOT ADDRESS`.
fn parse_redirection(error: &StoreError, asked_node: &Address) -> Option<Redirection> {
    let StoreError::Redirected(reply) = error else { return None };
    let mut node = Address::parse(reply.detail().split_ascii_whitespace().nth(1)?)?;
    if node.host.is_empty() {
        // If a node does not know its own host, the address refers to the host of the node that replied.
        node.host = asked_node.host.clone();
    }
    match reply.code() {
        "ASK" => Some(Redirection::Ask(node)),
        "MOVED" => Some(Redirection::Moved(node)),
        _ => None,
    }
}
