//! A real Redis Cluster with masters, replicas, slot migrations and masters that the test kills.

use std::collections::BTreeSet;
use std::net::TcpListener;

use super::eventually;
use super::redis::{Redis, free_port, redis_version};

const SLOTS: usize = 16_384;

/// A cluster whose masters serve equal shares of the slots. All nodes are killed at the end of the test.
pub struct Cluster {
    /// The initial masters, followed by the replicas. Node `i` belongs to master `i % masters`.
    pub nodes: Vec<Redis>,
    masters: usize,
    killed: Vec<u16>,
    _directory: tempfile::TempDir,
}

/// Return two free ports. The second one is the default port of the cluster bus if a node uses the first one.
fn free_port_with_bus() -> (u16, u16) {
    let bus_of = |port: u16| port.checked_add(10_000).filter(|bus| TcpListener::bind(("127.0.0.1", *bus)).is_ok());
    (0..100).find_map(|_| Some(free_port()).and_then(|port| Some((port, bus_of(port)?)))).expect("a free pair of ports")
}

impl Cluster {
    /// Start a cluster. Wait until it serves all slots and all replicas are in sync. A promotion requires a majority of
    /// the masters: with three masters, one may fail.
    pub fn start(masters: usize, replicas_per_master: usize) -> Cluster {
        let directory = tempfile::tempdir().unwrap();
        // Redis 6.2 has no option for the port of the cluster bus.
        let has_bus_option = redis_version() >= (7, 0);
        let start = |index: usize| {
            let (port, bus) = if has_bus_option { (free_port(), free_port()) } else { free_port_with_bus() };
            let path = directory.path().join(format!("{index}-{port}"));
            std::fs::create_dir(&path).unwrap();
            let (port_text, bus_text) = (port.to_string(), bus.to_string());
            let arguments = [
                ["--port", &port_text],
                ["--cluster-enabled", "yes"],
                ["--cluster-node-timeout", "1000"],
                // Promote the replica even if it has had no contact with its master for long, because there is no other
                // replica.
                ["--cluster-replica-validity-factor", "0"],
                ["--repl-diskless-sync-delay", "0"],
                ["--dir", path.to_str().unwrap()],
            ];
            let bus_option = [["--cluster-port", &bus_text]];
            let options = if has_bus_option { &bus_option[..] } else { &[] };
            let node = Redis::start_with(port, [&arguments[..], options].concat().as_flattened())?;
            Some((node, bus))
        };
        let started = (0..masters * (1 + replicas_per_master)).map(|index| {
            (0..10).find_map(|_| start(index)).expect("redis-server does not start; `make tools` installs it")
        });
        let (nodes, buses): (Vec<_>, Vec<_>) = started.unzip();
        let cluster = Cluster { nodes, masters, killed: Vec::new(), _directory: directory };
        cluster.join(&buses);
        cluster
    }

    fn join(&self, buses: &[u16]) {
        for (index, node) in self.nodes.iter().enumerate() {
            // Give each node its own configuration epoch. Otherwise, the nodes resolve equal epochs pair by pair, which
            // takes long.
            cluster("SET-CONFIG-EPOCH").arg(index + 1).exec(&mut node.connection()).unwrap();
        }
        for (index, master) in self.nodes[..self.masters].iter().enumerate() {
            let (first, end) = (index * SLOTS / self.masters, (index + 1) * SLOTS / self.masters);
            // ADDSLOTSRANGE requires Redis 7.0.
            cluster("ADDSLOTS").arg((first..end).collect::<Vec<_>>()).exec(&mut master.connection()).unwrap();
        }
        let mut first = self.nodes[0].connection();
        for (node, bus) in self.nodes.iter().zip(buses).skip(1) {
            cluster("MEET").arg("127.0.0.1").arg(node.port).arg(*bus).exec(&mut first).unwrap();
        }
        eventually("all nodes know each other", || {
            self.nodes.iter().all(|node| {
                let known = known_nodes(node);
                known.len() == self.nodes.len() && !known.iter().any(|line| line.contains("handshake"))
            })
        });
        for (index, node) in self.nodes.iter().enumerate().skip(self.masters) {
            let master = id(&self.nodes[index % self.masters]);
            cluster("REPLICATE").arg(master).exec(&mut node.connection()).unwrap();
        }
        self.wait_until_whole();
    }

    /// Return a cluster URL with the addresses of the initial masters.
    pub fn url(&self) -> String {
        let addresses: Vec<_> =
            self.nodes[..self.masters].iter().map(|node| format!("127.0.0.1:{}", node.port)).collect();
        format!("redis+cluster://{}", addresses.join(","))
    }

    /// Return all nodes that have not been killed.
    pub fn alive(&self) -> Vec<&Redis> {
        self.nodes.iter().filter(|node| !self.killed.contains(&node.port)).collect()
    }

    /// Return the nodes that report the role `master`, in the order in which they were started.
    pub fn masters(&self) -> Vec<&Redis> {
        self.alive().into_iter().filter(|node| node.info("replication").contains("role:master")).collect()
    }

    /// Return how often a command was called, directly or by a script, on all nodes that have not been killed.
    pub fn calls(&self, command: &str) -> u64 {
        self.alive().iter().map(|node| node.calls(command)).sum()
    }

    /// Return the keys of all masters.
    pub fn keys(&self) -> Vec<String> {
        self.masters().iter().flat_map(|master| master.keys()).collect()
    }

    /// Return the slot of a key.
    pub fn slot(&self, key: &str) -> u16 {
        cluster("KEYSLOT").arg(key).query(&mut self.alive()[0].connection()).unwrap()
    }

    /// Return the master that serves a slot.
    pub fn owner(&self, slot: u16) -> &Redis {
        let owner = self.masters().into_iter().find(|master| serves(master, slot));
        owner.unwrap_or_else(|| panic!("no node serves slot {slot}"))
    }

    /// Migrate a slot with all its keys.
    pub fn migrate(&self, slot: u16, from: &Redis, to: &Redis) {
        self.begin_migration(slot, from, to).finish();
    }

    /// Begin the migration of a slot. `from` then redirects commands for missing keys to `to`. No key has moved yet.
    pub fn begin_migration<'a>(&'a self, slot: u16, from: &'a Redis, to: &'a Redis) -> Migration<'a> {
        cluster("SETSLOT").arg(slot).arg("IMPORTING").arg(id(from)).exec(&mut to.connection()).unwrap();
        cluster("SETSLOT").arg(slot).arg("MIGRATING").arg(id(to)).exec(&mut from.connection()).unwrap();
        Migration { cluster: self, slot, from, to }
    }

    /// Kill one of [`Cluster::masters`] with SIGKILL. Return its port.
    pub fn kill_master(&mut self, index: usize) -> u16 {
        let port = self.masters()[index].port;
        let node = self.nodes.iter_mut().find(|node| node.port == port).unwrap();
        node.child.kill().unwrap();
        node.child.wait().unwrap();
        self.killed.push(port);
        port
    }

    /// Wait until a replica has replaced each killed master.
    pub fn wait_for_promotion(&self) {
        eventually("replicas are promoted", || self.masters().len() == self.masters);
        self.wait_until_whole();
    }

    /// Wait until all running nodes agree that all slots are served, and until all replicas are in sync.
    pub fn wait_until_whole(&self) {
        let killed = self.killed.len();
        let replicas = self.nodes.len() - self.masters - killed;
        eventually("the cluster serves and its replicas are in sync", || {
            self.alive().into_iter().all(|node| {
                let known = known_nodes(node);
                let count = |flag: &str| known.iter().filter(|line| has_flag(line, flag)).count();
                let state: String = cluster("INFO").query(&mut node.connection()).unwrap();
                let replication = node.info("replication");
                state.contains("cluster_state:ok")
                    && (count("fail"), count("fail?"), count("slave")) == (killed, 0, replicas)
                    && (replication.contains("role:master") || replication.contains("master_link_status:up"))
            })
        });
    }
}

/// A slot whose migration has begun.
pub struct Migration<'a> {
    cluster: &'a Cluster,
    slot: u16,
    from: &'a Redis,
    to: &'a Redis,
}

impl Migration<'_> {
    /// Move up to `most` keys. Return how many keys were moved.
    pub fn move_keys(&self, most: usize) -> usize {
        let mut from = self.from.connection();
        let keys: Vec<Vec<u8>> = cluster("GETKEYSINSLOT").arg(self.slot).arg(most).query(&mut from).unwrap();
        for key in &keys {
            // If a key expires in the meantime, MIGRATE replies NOKEY, which is not an error.
            redis::cmd("MIGRATE").arg("127.0.0.1").arg(self.to.port).arg(key).arg(0).arg(5000).exec(&mut from).unwrap();
        }
        keys.len()
    }

    /// Move the remaining keys, then assign the slot to the new owner.
    pub fn finish(self) {
        while self.move_keys(1000) > 0 {}
        let owner = id(self.to);
        let others =
            self.cluster.masters().into_iter().filter(|node| ![self.to.port, self.from.port].contains(&node.port));
        // Inform the new owner first, so that a node serves the slot at all times.
        for node in [self.to, self.from].into_iter().chain(others) {
            cluster("SETSLOT").arg(self.slot).arg("NODE").arg(&owner).exec(&mut node.connection()).unwrap();
        }
        // Wait until all nodes know the new epoch. Otherwise, a node that takes over a slot later may choose the same
        // epoch and lose the slot.
        eventually("all know the owner and its epoch", || {
            let nodes = self.cluster.masters();
            let epochs = nodes.iter().map(|node| epoch(node, &owner)).collect::<BTreeSet<_>>();
            epochs.len() == 1 && nodes.iter().all(|node| serves(node, self.slot) == (node.port == self.to.port))
        });
    }
}

fn cluster(subcommand: &str) -> redis::Cmd {
    let mut command = redis::cmd("CLUSTER");
    command.arg(subcommand);
    command
}

fn id(node: &Redis) -> String {
    cluster("MYID").query(&mut node.connection()).unwrap()
}

/// Return whether a node considers itself the owner of a slot.
fn serves(node: &Redis, slot: u16) -> bool {
    let known = known_nodes(node);
    let own = known.iter().find(|line| line.contains("myself")).unwrap();
    own.split(' ').skip(8).any(|range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        first.parse().is_ok_and(|first: u16| first <= slot) && last.parse().is_ok_and(|last: u16| slot <= last)
    })
}

/// Return the configuration epoch of the node `id`, as `node` knows it.
fn epoch(node: &Redis, id: &str) -> String {
    let known = known_nodes(node);
    known.iter().find(|line| line.starts_with(id)).unwrap().split(' ').nth(6).unwrap().to_owned()
}

fn known_nodes(node: &Redis) -> Vec<String> {
    let text: String = cluster("NODES").query(&mut node.connection()).unwrap();
    text.lines().map(str::to_owned).collect()
}

/// Return whether a line of CLUSTER NODES contains this flag.
fn has_flag(line: &str, flag: &str) -> bool {
    line.split(' ').nth(2).unwrap().split(',').any(|own| own == flag)
}
