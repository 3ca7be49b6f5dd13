//! The topology of a Redis Cluster, shared by all workers of a process.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use arc_swap::ArcSwapOption;
use redis::Value;
use tokio::time::sleep;

use crate::limiter::key::Identity;
use crate::limiter::redis::circuit_breaker::{CircuitBreaker, RecoverySignal};
use crate::limiter::redis::server::Address;
use crate::limiter::verdict::StoreError;

/// Minimum interval between refreshes of the slots.
const MIN_REFRESH_INTERVAL: Duration = Duration::from_millis(250);

/// The slots of the masters and the circuit breakers of the nodes.
#[derive(Debug, Default)]
pub struct ClusterMap {
    slots: ArcSwapOption<SlotMap>,
    /// The lock is held during the first discovery of the slots.
    discovery_lock: tokio::sync::Mutex<()>,
    /// Whether a task is refreshing the slots, or has done so within [`MIN_REFRESH_INTERVAL`].
    is_refreshing: AtomicBool,
    /// Number of refreshes.
    refreshes: AtomicUsize,
    breakers: Mutex<HashMap<Address, Arc<CircuitBreaker>>>,
    /// How often the circuit breakers of nodes that left the cluster have opened.
    departed_open_count: AtomicU64,
    /// Fires each time a node is available again after an outage.
    recovery: Arc<RecoverySignal>,
}

/// Permit to refresh the slots.
#[derive(Debug)]
pub struct RefreshPermit(Arc<ClusterMap>);

impl ClusterMap {
    /// Return the slots, if they are known.
    pub fn slots(&self) -> Option<Arc<SlotMap>> {
        self.slots.load_full()
    }

    /// Return the slots. The first caller discovers the slots, and concurrent callers wait.
    ///
    /// # Errors
    /// The error that `discover` returned.
    pub async fn slots_or_discover<F: Future<Output = Result<SlotMap, StoreError>>>(
        &self,
        discover: impl FnOnce() -> F,
    ) -> Result<Arc<SlotMap>, StoreError> {
        let _lock = self.discovery_lock.lock().await;
        if let Some(slots) = self.slots() {
            return Ok(slots);
        }
        let slots = Arc::new(discover().await?);
        self.slots.store(Some(slots.clone()));
        Ok(slots)
    }

    /// Return the nodes whose circuit breaker is open.
    pub fn open_nodes(&self) -> Vec<String> {
        let open =
            |(address, breaker): (&Address, &Arc<CircuitBreaker>)| breaker.is_open().then(|| address.to_string());
        self.breakers().iter().filter_map(open).collect()
    }

    /// Return how often the circuit breakers of all nodes have opened.
    pub fn open_count(&self) -> u64 {
        self.departed_open_count.load(Ordering::Relaxed)
            + self.breakers().values().map(|breaker| breaker.open_count()).sum::<u64>()
    }

    /// Replace the slots. Remove the circuit breakers of nodes that left the cluster.
    pub fn replace(&self, slots: SlotMap) {
        self.breakers().retain(|address, breaker| {
            let stays = slots.nodes().contains(address);
            if !stays {
                self.departed_open_count.fetch_add(breaker.open_count(), Ordering::Relaxed);
            }
            stays
        });
        self.slots.store(Some(Arc::new(slots)));
    }

    /// Return the breaker of a node.
    pub fn breaker(&self, address: &Address) -> Arc<CircuitBreaker> {
        let new = || Arc::new(CircuitBreaker::new(self.recovery.clone()));
        self.breakers().entry(address.clone()).or_insert_with(new).clone()
    }

    /// Return the signal that fires each time a node is available again after an outage.
    pub fn recovery(&self) -> &Arc<RecoverySignal> {
        &self.recovery
    }

    /// Return the number of this refresh. This number selects the master that is queried first.
    pub fn next_refresh_number(&self) -> usize {
        self.refreshes.fetch_add(1, Ordering::Relaxed)
    }

    /// Return the permit to refresh the slots, unless another task holds it.
    pub fn try_refresh(self: &Arc<Self>) -> Option<RefreshPermit> {
        (!self.is_refreshing.swap(true, Ordering::AcqRel)).then(|| RefreshPermit(self.clone()))
    }

    fn breakers(&self) -> std::sync::MutexGuard<'_, HashMap<Address, Arc<CircuitBreaker>>> {
        self.breakers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl RefreshPermit {
    /// Release the permit after [`MIN_REFRESH_INTERVAL`].
    pub async fn release(self) {
        sleep(MIN_REFRESH_INTERVAL).await;
    }
}

impl Drop for RefreshPermit {
    fn drop(&mut self) {
        self.0.is_refreshing.store(false, Ordering::Release);
    }
}

// The owners of the hash slots.

/// Number of hash slots.
const SLOT_COUNT: usize = 16_384;

/// Return the slot of all keys of an identity. Their hash tag (Redis Cluster specification, "Hash tags") is the hash of
/// the identity.
pub fn identity_slot(identity: Identity) -> u16 {
    key_slot(&identity.to_hex())
}

/// Return the slot of a key without a hash tag.
pub fn key_slot(key: &[u8]) -> u16 {
    crc16::State::<crc16::XMODEM>::calculate(key) % SLOT_COUNT as u16
}

/// The masters of a cluster and their slots.
#[derive(Debug)]
pub struct SlotMap {
    masters: Vec<Address>,
    /// All masters and replicas. Each node knows the slots of all nodes.
    nodes: Vec<Address>,
    /// For each slot, the index of its master.
    master_by_slot: Vec<Option<u16>>,
}

impl SlotMap {
    /// Parse the reply of the node at `asked_node` to `CLUSTER SLOTS`: `[[first, last, [host, port, id, …], [replica's
    /// host, …]…]…]`.
    pub fn from_reply(reply: &Value, asked_node: &Address) -> Option<Self> {
        let mut slots = SlotMap { masters: Vec::new(), nodes: Vec::new(), master_by_slot: vec![None; SLOT_COUNT] };
        for range in as_array(reply)? {
            let [Value::Int(first), Value::Int(last), nodes @ ..] = &as_array(range)?[..] else { return None };
            let nodes: Vec<_> = nodes.iter().map(|node| parse_address(node, asked_node)).collect::<Option<_>>()?;
            let master = index_or_push(&mut slots.masters, nodes.first()?);
            for node in &nodes {
                index_or_push(&mut slots.nodes, node);
            }
            let owned = usize::try_from(*first).ok()?..=usize::try_from(*last).ok()?;
            slots.master_by_slot.get_mut(owned)?.fill(u16::try_from(master).ok());
        }
        (!slots.masters.is_empty()).then_some(slots)
    }

    /// Return the master of a slot, if it has one.
    pub fn owner(&self, slot: u16) -> Option<&Address> {
        let master = self.master_by_slot.get(usize::from(slot)).copied().flatten()?;
        self.masters.get(usize::from(master))
    }

    /// Return all masters with slots.
    pub fn masters(&self) -> &[Address] {
        &self.masters
    }

    /// Return all masters and replicas.
    pub fn nodes(&self) -> &[Address] {
        &self.nodes
    }
}

/// Return the index of an address in a list. Append the address if the list does not contain it.
fn index_or_push(list: &mut Vec<Address>, address: &Address) -> usize {
    list.iter().position(|existing| existing == address).unwrap_or_else(|| {
        list.push(address.clone());
        list.len() - 1
    })
}

fn as_array(value: &Value) -> Option<&Vec<Value>> {
    match value {
        Value::Array(items) => Some(items),
        _ => None,
    }
}

/// Parse `[host, port, …]`. If a node does not know its own host, the host that was queried is used.
fn parse_address(node: &Value, asked_node: &Address) -> Option<Address> {
    let [host, Value::Int(port), ..] = &as_array(node)?[..] else { return None };
    let host = match host {
        Value::BulkString(bytes) if !matches!(&bytes[..], b"" | b"?") => std::str::from_utf8(bytes).ok()?.into(),
        Value::BulkString(_) | Value::Nil => asked_node.host.clone(),
        _ => return None,
    };
    Some(Address { host, port: u16::try_from(*port).ok()? })
}

#[cfg(test)]
mod slots_tests {
    use super::*;

    fn parse(text: &str) -> Address {
        Address::parse(text).unwrap()
    }

    fn parse_slots(reply: &[u8]) -> Option<SlotMap> {
        SlotMap::from_reply(&redis::parse_redis_value(reply).unwrap(), &parse("seed:1"))
    }

    #[test]
    fn identity_slot_is_the_slot_of_its_hash_tag() {
        // The expected values are those of CLUSTER KEYSLOT in Redis 7.0.15 for the keys of these identities.
        for (identity, expected) in [(0, 15_376), (1, 11_313), (u128::MAX, 14_242)] {
            assert_eq!(identity_slot(Identity(identity)), expected, "{identity:x}");
        }
    }

    #[test]
    fn cluster_slots_reply_gives_the_owner_of_each_slot() {
        let slots = parse_slots(
            b"*2\r\n*4\r\n:0\r\n:8191\r\n*3\r\n$1\r\na\r\n:7000\r\n$2\r\nid\r\n*3\r\n$1\r\nb\r\n:7001\r\n$2\r\nid\r\n\
              *3\r\n:9000\r\n:16383\r\n*3\r\n$0\r\n\r\n:7002\r\n$2\r\nid\r\n",
        )
        .unwrap();
        assert_eq!(slots.masters(), [parse("a:7000"), parse("seed:7002")]);
        assert_eq!(slots.nodes(), [parse("a:7000"), parse("b:7001"), parse("seed:7002")]);
        assert_eq!((slots.owner(0), slots.owner(8191)), (Some(&parse("a:7000")), Some(&parse("a:7000"))));
        assert_eq!((slots.owner(8192), slots.owner(16_383)), (None, Some(&parse("seed:7002"))));
    }

    #[test]
    fn node_without_host_has_the_host_that_was_asked() {
        // Redis replies with an empty host, `?` or null, depending on `cluster-preferred-endpoint-type`.
        for host in ["$0\r\n\r\n", "$1\r\n?\r\n", "$-1\r\n"] {
            let reply = format!("*1\r\n*3\r\n:0\r\n:16383\r\n*3\r\n{host}:7000\r\n$2\r\nid\r\n");
            assert_eq!(parse_slots(reply.as_bytes()).unwrap().masters(), [parse("seed:7000")], "{host:?}");
        }
    }

    #[test]
    fn malformed_cluster_slots_reply_is_rejected() {
        for reply in
            ["*0\r\n", "+OK\r\n", "*1\r\n*2\r\n:0\r\n:1\r\n", "*1\r\n*3\r\n:0\r\n:16384\r\n*2\r\n$1\r\na\r\n:1\r\n"]
        {
            assert!(parse_slots(reply.as_bytes()).is_none(), "{reply:?}");
        }
    }
}
