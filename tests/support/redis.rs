//! A real redis-server on a free port.

use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// A running server without persistence; it is killed when the test is over.
pub struct Redis {
    pub port: u16,
    pub child: Child,
}

impl Redis {
    pub fn start() -> Redis {
        Redis::start_as(&[])
    }

    /// Starts a server with these arguments on a free port.
    pub fn start_as(arguments: &[&str]) -> Redis {
        let on = |port: u16| Redis::start_with(port, &[arguments, &["--port", &port.to_string()]].concat());
        // Another process may take the port between the look and the start: then another port is as good.
        (0..10).find_map(|_| on(free_port())).expect("redis-server does not start; `make tools` installs it")
    }

    /// Starts a server on this port; none if it cannot listen there.
    pub fn start_on(port: u16) -> Option<Redis> {
        Redis::start_with(port, &["--port", &port.to_string()])
    }

    /// Starts a server with these arguments, by which it listens on this port.
    pub fn start_with(port: u16, arguments: &[&str]) -> Option<Redis> {
        let mut child = Command::new("redis-server")
            // A configuration file must come first.
            .args(arguments)
            .args(["--bind", "127.0.0.1", "--save", "", "--appendonly", "no"])
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("redis-server is needed; `make tools` installs it");
        // A Sentinel is ready when it watches its master.
        let ready = ["ready to accept connections", "+monitor master"];
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
        if lines.any(|line| ready.iter().any(|ready| line.to_lowercase().contains(ready))) {
            // Keep reading, so that the pipe never fills.
            std::thread::spawn(move || lines.for_each(drop));
            return Some(Redis { port, child });
        }
        let _ = child.wait();
        None
    }

    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}/0", self.port)
    }

    /// The [store] table for tests that are not about its deadline: a busy machine does not make an error of it.
    pub fn store(&self) -> String {
        format!("[store]\nurl = \"{}\"\ntimeout = \"5s\"\n", self.url())
    }

    pub fn client(&self) -> redis::Client {
        redis::Client::open(self.url()).unwrap()
    }

    pub fn connection(&self) -> redis::Connection {
        let began = sluicegate::limiter::clock::monotonic();
        loop {
            // A Sentinel that has just given it another role closes all connections.
            match self.client().get_connection() {
                Err(_) if began.elapsed() < Duration::from_secs(20) => std::thread::yield_now(),
                connection => return connection.unwrap(),
            }
        }
    }

    pub fn keys(&self) -> Vec<String> {
        redis::cmd("KEYS").arg("*").query(&mut self.connection()).unwrap()
    }

    /// The three numbers of a limit's state, of which the second is what a window counts.
    pub fn state(&self, key: &str) -> [u64; 3] {
        let state: Vec<u8> = redis::cmd("GET").arg(key).query(&mut self.connection()).unwrap();
        // Before them, when its key ends.
        std::array::from_fn(|number| u64::from_le_bytes(state[8 * number + 8..][..8].try_into().unwrap()))
    }

    /// How often a command was called, by itself or in a script.
    pub fn calls(&self, command: &str) -> u64 {
        self.figure("commandstats", &format!("cmdstat_{command}:calls="))
    }

    /// How often a command was not even begun, since the user has no right to it.
    pub fn rejections(&self, command: &str) -> u64 {
        let info = self.info("commandstats");
        let line = info.lines().find(|line| line.starts_with(&format!("cmdstat_{command}:")));
        let figure = line.and_then(|line| line.split("rejected_calls=").nth(1)?.split(',').next());
        figure.map_or(0, |figure| figure.parse().unwrap())
    }

    /// How many keys there are, and how many of them expire.
    pub fn keyspace(&self) -> (u64, u64) {
        let info = self.info("keyspace");
        let figure = |name: &str| info.split(name).nth(1).unwrap().split(',').next().unwrap().trim().parse().unwrap();
        (figure("keys="), figure("expires="))
    }

    /// How many keys have expired.
    pub fn expired(&self) -> u64 {
        self.figure("stats", "expired_keys:")
    }

    /// How many calls were answered with this error.
    pub fn errors(&self, code: &str) -> u64 {
        self.figure("errorstats", &format!("errorstat_{code}:count="))
    }

    /// A section of INFO.
    pub fn info(&self, section: &str) -> String {
        redis::cmd("INFO").arg(section).query(&mut self.connection()).unwrap()
    }

    /// A figure of INFO, or the first of a list of them.
    pub fn figure(&self, section: &str, name: &str) -> u64 {
        let info = self.info(section);
        let figure = info.lines().find_map(|line| line.strip_prefix(name));
        figure.map_or(0, |figure| figure.split(',').next().unwrap().parse().unwrap())
    }

    /// Lets time pass for all keys: those that would have expired are gone.
    pub fn age(&self, ms: i64) {
        let mut connection = self.connection();
        for key in self.keys() {
            let ttl_ms: i64 = redis::cmd("PTTL").arg(&key).query(&mut connection).unwrap();
            assert_ne!(ttl_ms, -1, "{key} never expires");
            redis::cmd("PEXPIRE").arg(&key).arg(ttl_ms - ms).exec(&mut connection).unwrap();
        }
    }

    /// No key may live for ever.
    pub fn assert_every_key_expires(&self) {
        let mut connection = self.connection();
        for key in self.keys() {
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

/// A port that nothing listens on right now.
pub fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}
