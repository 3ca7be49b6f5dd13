//! Which node of a cluster keeps which hash slot.

use redis::Value;

use super::server::Address;
use crate::limit::key::Identity;

/// Hash slots of a cluster.
const SLOTS: usize = 16_384;

/// The slot of all keys of an identity: its hash is what their braces hold (Redis Cluster specification, "Hash tags").
pub fn slot(identity: Identity) -> u16 {
    slot_of(&identity.hex())
}

/// The slot of a key without braces.
pub fn slot_of(key: &[u8]) -> u16 {
    crc16::State::<crc16::XMODEM>::calculate(key) % SLOTS as u16
}

/// The masters of a cluster and their slots.
#[derive(Debug)]
pub struct Slots {
    masters: Vec<Address>,
    /// All nodes, replicas as well: any of them can tell the slots.
    nodes: Vec<Address>,
    /// For each slot the number of its master.
    owners: Vec<Option<u16>>,
}

impl Slots {
    /// Reads the reply to `CLUSTER SLOTS` of the node at `asked`:
    /// `[[first, last, [host, port, id, …], [replica's host, …]…]…]`.
    pub fn read(reply: &Value, asked: &Address) -> Option<Self> {
        let mut slots = Slots { masters: Vec::new(), nodes: Vec::new(), owners: vec![None; SLOTS] };
        for range in array(reply)? {
            let [Value::Int(first), Value::Int(last), nodes @ ..] = &array(range)?[..] else { return None };
            let nodes: Vec<_> = nodes.iter().map(|node| address(node, asked)).collect::<Option<_>>()?;
            let master = place(&mut slots.masters, nodes.first()?);
            for node in &nodes {
                place(&mut slots.nodes, node);
            }
            let owned = usize::try_from(*first).ok()?..=usize::try_from(*last).ok()?;
            slots.owners.get_mut(owned)?.fill(u16::try_from(master).ok());
        }
        (!slots.masters.is_empty()).then_some(slots)
    }

    /// The node that keeps a slot, if one does.
    pub fn owner(&self, slot: u16) -> Option<&Address> {
        let master = self.owners.get(usize::from(slot)).copied().flatten()?;
        self.masters.get(usize::from(master))
    }

    /// All that keep slots.
    pub fn masters(&self) -> &[Address] {
        &self.masters
    }

    /// All masters and replicas.
    pub fn nodes(&self) -> &[Address] {
        &self.nodes
    }
}

/// Where an address stands in a list that it is added to when it is new.
fn place(list: &mut Vec<Address>, address: &Address) -> usize {
    list.iter().position(|known| known == address).unwrap_or_else(|| {
        list.push(address.clone());
        list.len() - 1
    })
}

fn array(value: &Value) -> Option<&Vec<Value>> {
    match value {
        Value::Array(items) => Some(items),
        _ => None,
    }
}

/// `[host, port, …]`; a node that does not know its own host is where it was asked.
fn address(node: &Value, asked: &Address) -> Option<Address> {
    let [host, Value::Int(port), ..] = &array(node)?[..] else { return None };
    let host = match host {
        Value::BulkString(bytes) if !matches!(&bytes[..], b"" | b"?") => std::str::from_utf8(bytes).ok()?.into(),
        Value::BulkString(_) | Value::Nil => asked.host.clone(),
        _ => return None,
    };
    Some(Address { host, port: u16::try_from(*port).ok()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(text: &str) -> Address {
        Address::parse(text).unwrap()
    }

    fn read(reply: &[u8]) -> Option<Slots> {
        Slots::read(&redis::parse_redis_value(reply).unwrap(), &at("seed:1"))
    }

    #[test]
    fn the_slot_is_that_of_the_hash_tag() {
        // CLUSTER KEYSLOT of Redis 7.0.15 for the keys of these identities.
        for (identity, expected) in [(0, 15_376), (1, 11_313), (u128::MAX, 14_242)] {
            assert_eq!(slot(Identity(identity)), expected, "{identity:x}");
        }
    }

    #[test]
    fn replies_say_who_keeps_what() {
        let slots = read(
            b"*2\r\n*4\r\n:0\r\n:8191\r\n*3\r\n$1\r\na\r\n:7000\r\n$2\r\nid\r\n*3\r\n$1\r\nb\r\n:7001\r\n$2\r\nid\r\n\
              *3\r\n:9000\r\n:16383\r\n*3\r\n$0\r\n\r\n:7002\r\n$2\r\nid\r\n",
        )
        .unwrap();
        assert_eq!(slots.masters(), [at("a:7000"), at("seed:7002")]);
        assert_eq!(slots.nodes(), [at("a:7000"), at("b:7001"), at("seed:7002")]);
        assert_eq!((slots.owner(0), slots.owner(8191)), (Some(&at("a:7000")), Some(&at("a:7000"))));
        assert_eq!((slots.owner(8192), slots.owner(16_383)), (None, Some(&at("seed:7002"))));
    }

    #[test]
    fn node_without_a_known_host_is_where_it_was_asked() {
        // Redis says an empty host, `?` or null, as cluster-preferred-endpoint-type has it.
        for host in ["$0\r\n\r\n", "$1\r\n?\r\n", "$-1\r\n"] {
            let reply = format!("*1\r\n*3\r\n:0\r\n:16383\r\n*3\r\n{host}:7000\r\n$2\r\nid\r\n");
            assert_eq!(read(reply.as_bytes()).unwrap().masters(), [at("seed:7000")], "{host:?}");
        }
    }

    #[test]
    fn what_is_no_map_of_slots_is_none() {
        for reply in
            ["*0\r\n", "+OK\r\n", "*1\r\n*2\r\n:0\r\n:1\r\n", "*1\r\n*3\r\n:0\r\n:16384\r\n*2\r\n$1\r\na\r\n:1\r\n"]
        {
            assert!(read(reply.as_bytes()).is_none(), "{reply:?}");
        }
    }
}
