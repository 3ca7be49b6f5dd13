//! A master, two replicas, and three Sentinels that monitor them.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::eventually;
use super::redis::Redis;

/// The name under which the Sentinels monitor the master.
pub const NAME: &str = "mymaster";

/// All servers. They are killed at the end of the test.
pub struct Sentinels {
    /// The initial master, followed by its replicas.
    pub nodes: Vec<Redis>,
    pub sentinels: Vec<Redis>,
    _alone: MutexGuard<'static, ()>,
    _directory: tempfile::TempDir,
}

impl Sentinels {
    /// Start all servers and wait until they know each other and all replicas are in sync.
    pub fn start() -> Sentinels {
        // Only one group of servers may run at a time. Two groups of seven processes would delay each other, and the
        // Sentinels would take the delays for failures.
        static ALONE: Mutex<()> = Mutex::new(());
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let directory = tempfile::tempdir().unwrap();
        let master = Redis::start();
        let replica = || replica_of(&master, &tempfile::tempdir_in(&directory).unwrap().keep());
        let replicas = [replica(), replica()];
        let sentinel = || {
            let file = tempfile::NamedTempFile::new_in(&directory).unwrap().into_temp_path().keep().unwrap();
            let text = format!(
                "sentinel monitor {NAME} 127.0.0.1 {} 2\nsentinel down-after-milliseconds {NAME} 500\n\
                 sentinel failover-timeout {NAME} 2000\nsentinel parallel-syncs {NAME} 2\n",
                master.port
            );
            std::fs::write(&file, text).unwrap();
            // A Sentinel writes to its configuration file, so each Sentinel has its own file.
            Redis::start_as(&[file.to_str().unwrap(), "--sentinel"])
        };
        let sentinels = vec![sentinel(), sentinel(), sentinel()];
        let nodes = [master].into_iter().chain(replicas).collect();
        let all = Sentinels { nodes, sentinels, _alone: alone, _directory: directory };
        all.wait_until_ready();
        all
    }

    /// Return a URL with the addresses of all Sentinels.
    pub fn url(&self) -> String {
        let addresses: Vec<_> = self.sentinels.iter().map(|node| format!("127.0.0.1:{}", node.port)).collect();
        format!("redis+sentinel://{}/{NAME}", addresses.join(","))
    }

    /// Return the port of the master according to a Sentinel.
    pub fn master_port(&self) -> u16 {
        master_port(&self.sentinels[0])
    }

    /// Return the master according to a Sentinel.
    pub fn master(&self) -> &Redis {
        let port = self.master_port();
        self.nodes.iter().find(|node| node.port == port).unwrap()
    }

    /// Kill the master with SIGKILL. Wait until all Sentinels agree on a new master. Return its port.
    pub fn fail_over_by_kill(&mut self) -> u16 {
        let old = self.master_port();
        let index = self.nodes.iter().position(|node| node.port == old).unwrap();
        let mut dead = self.nodes.remove(index);
        dead.child.kill().unwrap();
        dead.child.wait().unwrap();
        self.wait_for_another_than(old)
    }

    /// Request a failover from a Sentinel. Wait until all Sentinels agree on the new master, and return its port. The
    /// old master becomes a replica.
    pub fn fail_over_by_command(&self) -> u16 {
        let old = self.master_port();
        // A Sentinel rejects the command until the last failover is complete and the replicas have reported.
        eventually("a Sentinel begins a failover", || {
            sentinel("FAILOVER").exec(&mut self.sentinels[0].connection()).is_ok()
        });
        self.wait_for_another_than(old)
    }

    fn wait_for_another_than(&self, old: u16) -> u16 {
        eventually("all Sentinels agree on a new master", || {
            let ports: Vec<_> = self.sentinels.iter().map(master_port).collect();
            ports[0] != old && ports.iter().all(|port| *port == ports[0])
        });
        let info = self.master().info("replication");
        assert!(info.contains("role:master"), "{info}");
        self.master_port()
    }

    /// Wait until each Sentinel is able to lead a failover.
    fn wait_until_ready(&self) {
        eventually("the Sentinels know each other and both replicas", || {
            self.sentinels.iter().all(|node| {
                let mut connection = node.connection();
                let master: BTreeMap<String, String> = sentinel("MASTER").query(&mut connection).unwrap();
                let replicas: Vec<BTreeMap<String, String>> = sentinel("REPLICAS").query(&mut connection).unwrap();
                let in_sync = |replica: &&BTreeMap<String, String>| {
                    replica["flags"] == "slave" && replica["master-link-status"] == "ok"
                };
                master["num-other-sentinels"] == "2"
                    && master["flags"] == "master"
                    && replicas.iter().filter(in_sync).count() == 2
            })
        });
    }
}

/// Start a replica that keeps its files in `folder`. Wait until it is in sync.
pub fn replica_of(master: &Redis, folder: &Path) -> Redis {
    redis::cmd("CONFIG").arg("SET").arg("repl-diskless-sync-delay").arg(0).exec(&mut master.connection()).unwrap();
    let (host, port) = ("127.0.0.1", master.port.to_string());
    let replica = Redis::start_as(&["--replicaof", host, &port, "--dir", folder.to_str().unwrap()]);
    eventually("the replica is in sync", || replica.info("replication").contains("master_link_status:up"));
    replica
}

/// Return a SENTINEL command for the master.
fn sentinel(subcommand: &str) -> redis::Cmd {
    let mut command = redis::cmd("SENTINEL");
    command.arg(subcommand).arg(NAME);
    command
}

fn master_port(node: &Redis) -> u16 {
    let mut command = redis::cmd("SENTINEL");
    let command = command.arg("GET-MASTER-ADDR-BY-NAME").arg(NAME);
    let (_, port): (String, String) = command.query(&mut node.connection()).unwrap();
    port.parse().unwrap()
}
