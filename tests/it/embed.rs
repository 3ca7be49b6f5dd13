//! Runs `examples/embed.rs` as a process. This example uses the limiter in an HTTP service without the gateway.
//!
//! `cargo test` builds the example. `cargo test --test it` does not build it, so run `cargo build --example embed`
//! first.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;

use crate::support::client::{Client, Reply};
use crate::support::eventually;
use crate::support::redis::{Redis, free_port};

/// A running example. Dropping it kills the process.
struct Embed {
    child: Child,
    address: SocketAddr,
}

fn example() -> Command {
    // Cargo puts examples beside the binaries of the same profile.
    let directory = Path::new(env!("CARGO_BIN_EXE_sluicegate")).parent().unwrap();
    let mut command = Command::new(directory.join("examples/embed"));
    command.env_remove("REDIS_URL");
    command
}

impl Embed {
    /// Start the example on a free port. The timeout for Redis is long, because the machine may be busy.
    fn start(arguments: &[&str]) -> Embed {
        let mut child = example()
            .args(["--listen", "127.0.0.1:0", "--redis-timeout", "10000"])
            .args(arguments)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("`cargo build --example embed` builds the example");
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let address = line.trim_end().strip_prefix("listening on http://").map(|address| address.parse().unwrap());
        Embed { child, address: address.unwrap_or_else(|| panic!("the example did not start: {line:?}")) }
    }

    fn get_from(&self, client: [u8; 4]) -> Reply {
        Client::connect_from(IpAddr::from(client), self.address).get("/")
    }
}

impl Drop for Embed {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Send `requests` concurrent requests from one client address to each process. Return the number of responses by
/// status.
fn send_concurrently(processes: &[&Embed], requests: usize) -> BTreeMap<u16, usize> {
    let replies: Vec<_> = thread::scope(|scope| {
        let send = |process: &Embed| process.get_from([127, 0, 0, 1]).status;
        let threads: Vec<_> = processes
            .iter()
            .flat_map(|process| (0..requests).map(move |_| process))
            .map(|process| scope.spawn(move || send(process)))
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let mut counts = BTreeMap::new();
    for status in replies {
        *counts.entry(status).or_default() += 1;
    }
    counts
}

#[test]
fn memory_store_admits_the_quota_of_each_client() {
    // With a quota of 5 per hour, a token refills in 12 minutes.
    let embed = Embed::start(&["--quota", "5/hour"]);
    let mut client = Client::connect(embed.address);
    for remaining in (0..5).rev() {
        let reply = client.get("/");
        assert_eq!((reply.status, reply.text()), (200, "hello\n"));
        assert_eq!(reply.header("ratelimit-policy"), Some("\"per-client\";q=5;w=3600"));
        assert_eq!(reply.remaining("per-client"), remaining);
        assert_eq!(reply.header("retry-after"), None);
    }
    let denied = client.get("/");
    assert_eq!((denied.status, denied.text()), (429, "too many requests\n"));
    assert_eq!(denied.header("ratelimit-policy"), Some("\"per-client\";q=5;w=3600"));
    assert_eq!(denied.remaining("per-client"), 0);
    let retry_after: u64 = denied.header("retry-after").unwrap().parse().unwrap();
    assert!((1..=720).contains(&retry_after), "{retry_after}");
    assert_eq!(embed.get_from([127, 0, 0, 2]).remaining("per-client"), 4, "another client has its own tokens");
}

#[test]
fn memory_store_admits_exactly_the_quota_of_concurrent_requests() {
    let embed = Embed::start(&["--quota", "7/hour"]);
    assert_eq!(send_concurrently(&[&embed], 32), BTreeMap::from([(200, 7), (429, 25)]));
}

#[test]
fn processes_on_one_redis_admit_exactly_the_quota_together() {
    let redis = Redis::start();
    let url = redis.url();
    let [one, other] = [(), ()].map(|()| Embed::start(&["--quota", "7/hour", "--redis", &url]));
    assert_eq!(send_concurrently(&[&one, &other], 16), BTreeMap::from([(200, 7), (429, 25)]));
    let keys = redis.keys();
    assert_eq!(keys.len(), 1, "{keys:?}");
    assert!(keys[0].starts_with("rl:{") && keys[0].ends_with("}:states"), "{keys:?}");
    redis.assert_every_key_expires();
}

#[test]
fn requests_get_503_while_redis_is_down() {
    let port = free_port();
    let url = format!("redis://127.0.0.1:{port}");
    let embed = Embed::start(&["--quota", "7/hour", "--redis", &url]);
    let reply = embed.get_from([127, 0, 0, 1]);
    assert_eq!((reply.status, reply.text()), (503, "rate limits cannot be checked\n"));
    assert_eq!(reply.header("ratelimit"), None);
    // The circuit breaker probes Redis, so the process needs no restart.
    let redis = Redis::start_on(port).expect("the port is free");
    eventually("the process connects to Redis", || embed.get_from([127, 0, 0, 2]).status == 200);
    drop(redis);
    // This client was not denied earlier, so the denial cache has no entry for it.
    assert_eq!(embed.get_from([127, 0, 0, 3]).status, 503);
}

#[test]
fn invalid_options_are_usage_errors() {
    for (option, value, message) in
        [("--quota", "5/fortnight", "is not a unit of time"), ("--redis", "http://a", "this is not a store")]
    {
        let output = example().args([option, value]).output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(2) && stderr.contains(message), "{stderr}");
    }
}
