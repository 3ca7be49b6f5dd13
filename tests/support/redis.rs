//! A real redis-server on a free port.

use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::ops::Range;
use std::process::{Child, Command, Stdio};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use tempfile::TempDir;

/// A running server. It is killed at the end of the test.
pub struct Redis {
    pub port: u16,
    pub child: Child,
    /// The working directory. A replica writes data from its master to a temporary file there. If the replica is
    /// killed, the file remains.
    pub directory: TempDir,
}

impl Redis {
    pub fn start() -> Redis {
        Redis::start_as(&[])
    }

    /// Start a server with these arguments on a free port.
    pub fn start_as(arguments: &[&str]) -> Redis {
        let on = |port: u16| Redis::start_with(port, &[arguments, &["--port", &port.to_string()]].concat());
        // Another process may take the free port in the meantime. In this case, try another port.
        (0..10).find_map(|_| on(free_port())).expect("redis-server does not start; `make tools` installs it")
    }

    /// Start a server on this port. Return `None` if the port is in use.
    pub fn start_on(port: u16) -> Option<Redis> {
        Redis::start_with(port, &["--port", &port.to_string()])
    }

    /// Start a server with these arguments, which must make it listen on `port`. It keeps no data on disk unless the
    /// arguments contain `--appendonly`.
    pub fn start_with(port: u16, arguments: &[&str]) -> Option<Redis> {
        let is_persistent = arguments.contains(&"--appendonly");
        let directory = tempfile::tempdir().unwrap();
        let mut child = Command::new("redis-server")
            .current_dir(&directory)
            // A configuration file must be the first argument.
            .args(arguments)
            .args(["--bind", "127.0.0.1", "--save", ""])
            .args(if is_persistent { &[][..] } else { &["--appendonly", "no"] })
            // Before Redis 7.0, replication writes a file by default. The next server in this directory would load it.
            .args(["--repl-diskless-sync", "yes"])
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("redis-server is needed; `make tools` installs it");
        // A Sentinel is ready as soon as it monitors its master.
        let ready = ["ready to accept connections", "+monitor master"];
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
        if lines.any(|line| ready.iter().any(|ready| line.to_lowercase().contains(ready))) {
            // Keep reading, so that the pipe never fills up.
            std::thread::spawn(move || lines.for_each(drop));
            return Some(Redis { port, child, directory });
        }
        let _ = child.wait();
        None
    }

    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}/0", self.port)
    }

    /// Return a `[store]` table with a long timeout, so that a busy machine causes no store errors.
    pub fn store(&self) -> String {
        format!("[store]\nurl = \"{}\"\ntimeout = \"5s\"\n", self.url())
    }

    pub fn client(&self) -> redis::Client {
        redis::Client::open(self.url()).unwrap()
    }

    pub fn connection(&self) -> redis::Connection {
        let began = sluicegate::clock::monotonic();
        loop {
            // Retry, because a Redis server closes all connections when a Sentinel changes its role.
            match self.client().get_connection() {
                Err(_) if began.elapsed() < Duration::from_secs(20) => std::thread::yield_now(),
                connection => return connection.unwrap(),
            }
        }
    }

    /// Return all keys, except those with which gateways count themselves.
    pub fn keys(&self) -> Vec<String> {
        let keys: Vec<String> = redis::cmd("KEYS").arg("*").query(&mut self.connection()).unwrap();
        keys.into_iter().filter(|key| !key.ends_with(":gateways")).collect()
    }

    /// Return the three numbers of each state in the value of an identity. For windows, the second number is the count.
    pub fn states(&self, key: &str) -> Vec<[u64; 3]> {
        let value: Vec<u8> = redis::cmd("GET").arg(key).query(&mut self.connection()).unwrap();
        let numbers: Vec<_> = value.as_chunks().0.iter().map(|bytes| f64::from_le_bytes(*bytes) as u64).collect();
        // After the expiry of the key, each state has two numbers in the heads and then three in the bodies.
        let (heads, bodies) = numbers[1..].split_at((numbers.len() - 1) / 5 * 2);
        let states = heads.chunks(2).zip(bodies.chunks(3));
        states.map(|(head, body)| [body[1], body[2], head[1]]).collect()
    }

    /// Return the three numbers of the only state in the value of an identity.
    pub fn state(&self, key: &str) -> [u64; 3] {
        let states = self.states(key);
        assert_eq!(states.len(), 1, "{key}");
        states[0]
    }

    /// Return how often a command was called, directly or by a script.
    pub fn calls(&self, command: &str) -> u64 {
        self.info_number("commandstats", &format!("cmdstat_{command}:calls="))
    }

    /// Return how often a command was rejected because the user lacks a permission.
    pub fn rejections(&self, command: &str) -> u64 {
        let info = self.info("commandstats");
        let line = info.lines().find(|line| line.starts_with(&format!("cmdstat_{command}:")));
        let figure = line.and_then(|line| line.split("rejected_calls=").nth(1)?.split(',').next());
        figure.map_or(0, |figure| figure.parse().unwrap())
    }

    /// Return the number of keys, and how many of them have a TTL.
    pub fn keyspace(&self) -> (u64, u64) {
        let info = self.info("keyspace");
        let figure = |name: &str| info.split(name).nth(1).unwrap().split(',').next().unwrap().trim().parse().unwrap();
        (figure("keys="), figure("expires="))
    }

    /// Return how many keys have expired.
    pub fn expired(&self) -> u64 {
        self.info_number("stats", "expired_keys:")
    }

    /// Return how many calls failed with this error.
    pub fn errors(&self, code: &str) -> u64 {
        self.info_number("errorstats", &format!("errorstat_{code}:count="))
    }

    /// Return a section of INFO.
    pub fn info(&self, section: &str) -> String {
        redis::cmd("INFO").arg(section).query(&mut self.connection()).unwrap()
    }

    /// Return a number in INFO. If the value is a list, return its first number.
    pub fn info_number(&self, section: &str, name: &str) -> u64 {
        let info = self.info(section);
        let figure = info.lines().find_map(|line| line.strip_prefix(name));
        figure.map_or(0, |figure| figure.split(',').next().unwrap().parse().unwrap())
    }

    /// Reduce the TTL of all keys by `ms`.
    pub fn age(&self, ms: i64) {
        let mut connection = self.connection();
        for key in self.keys() {
            let ttl_ms: i64 = redis::cmd("PTTL").arg(&key).query(&mut connection).unwrap();
            assert_ne!(ttl_ms, -1, "{key} never expires");
            redis::cmd("PEXPIRE").arg(&key).arg(ttl_ms - ms).exec(&mut connection).unwrap();
        }
    }

    /// Assert that every key has a TTL.
    pub fn assert_every_key_expires(&self) {
        let mut connection = self.connection();
        let keys: Vec<String> = redis::cmd("KEYS").arg("*").query(&mut connection).unwrap();
        for key in keys {
            let ttl: i64 = redis::cmd("PTTL").arg(&key).query(&mut connection).unwrap();
            assert_ne!(ttl, -1, "{key} never expires");
        }
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The ports that [`free_port`] returns. These ports, and those of the cluster bus (10,000 higher), are below the range
/// from which Linux takes the ports of clients and of listeners with port 0 (from 32,768). Otherwise, another test could
/// get such a port before this test listens on it.
const FREE_PORTS: Range<u16> = 10_000..22_000;

/// Return a port that is currently free. Each call returns another port.
pub fn free_port() -> u16 {
    // Begin at different ports in test processes that run at the same time.
    static NEXT: LazyLock<AtomicU32> = LazyLock::new(|| AtomicU32::new(std::process::id().wrapping_mul(997)));
    let length = u32::from(FREE_PORTS.end - FREE_PORTS.start);
    let mut ports = (0..length).map(|_| FREE_PORTS.start + (NEXT.fetch_add(1, Ordering::Relaxed) % length) as u16);
    ports.find(|port| TcpListener::bind(("127.0.0.1", *port)).is_ok()).expect("a free port")
}

/// Return the version of the installed redis-server, such as `(7, 0)`.
pub fn redis_version() -> (u32, u32) {
    let output = Command::new("redis-server").arg("--version").output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let version = text.split_once("server v=").expect("a version").1;
    let mut parts = version.split('.').map(|part| part.parse().unwrap_or(0));
    (parts.next().unwrap(), parts.next().unwrap())
}
