//! Shared test support: the real binary on a free port, a real redis-server, raw clients and upstreams.
#![allow(dead_code, unreachable_pub)] // each test crate uses a part
#![allow(clippy::disallowed_methods)] // waits need the system clock

pub mod acme;
pub mod admin_listener;
pub mod ca_proxy;
pub mod certificates;
pub mod client;
pub mod cluster;
pub mod dns;
pub mod fixtures;
pub mod frames;
pub mod gateway;
pub mod google_key;
pub mod grpc;
pub mod hostile_bodies;
pub mod http2;
pub mod management;
pub mod pages;
pub mod pebble;
pub mod pictures;
pub mod random;
pub mod redis;
pub mod reference;
pub mod relay;
pub mod reload;
pub mod resp;
pub mod sentinel;
pub mod server;
pub mod stores;
pub mod tls_upstream;
pub mod tokens;
pub mod upstream;
pub mod walk;

use std::io::{ErrorKind, Read};
use std::net::TcpStream;
use std::process::{Child, Command};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Maximum time to wait for a condition, long enough for a busy machine. A wait ends as soon as its condition is true.
pub const MAX_WAIT: Duration = Duration::from_secs(20);

/// Wait until a condition is true, at most for [`MAX_WAIT`].
pub fn eventually(what: &str, mut done: impl FnMut() -> bool) {
    let started = Instant::now();
    while !done() {
        assert!(started.elapsed() < MAX_WAIT, "gave up waiting: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Assert that no byte arrives within `time` and that the stream does not end.
#[track_caller]
pub fn assert_silent(stream: &mut TcpStream, time: Duration) {
    stream.set_read_timeout(Some(time)).unwrap();
    let read = stream.read(&mut [0]);
    let kind = read.as_ref().map_err(std::io::Error::kind);
    assert!(matches!(kind, Err(ErrorKind::WouldBlock | ErrorKind::TimedOut)), "{read:?}");
    stream.set_read_timeout(Some(MAX_WAIT)).unwrap();
}

/// Assert that the connection stays open for `time`. Frames such as SETTINGS may arrive.
#[track_caller]
pub fn assert_silent_but_for_settings(stream: &mut TcpStream, time: Duration, what: &str) {
    let started = Instant::now();
    while let Some(left) = time.checked_sub(started.elapsed()).filter(|left| !left.is_zero()) {
        stream.set_read_timeout(Some(left)).unwrap();
        let read = stream.read(&mut [0; 1024]);
        let kind = read.as_ref().map_err(std::io::Error::kind);
        assert!(matches!(kind, Ok(1..) | Err(ErrorKind::WouldBlock | ErrorKind::TimedOut)), "{what}: {read:?}");
    }
}

/// Set a flag when dropped, even after a panic. Threads that run until the flag is set then end, so they do not prevent
/// the end of the test.
pub struct SetOnDrop<'a>(pub &'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// Send a signal to a process that this test has started. For STOP, wait until the process has stopped.
pub fn signal(child: &Child, name: &str) {
    let status = Command::new("kill").arg(format!("-{name}")).arg(child.id().to_string()).status().unwrap();
    assert!(status.success(), "kill -{name}");
    if name == "STOP" {
        eventually("all threads are stopped", || is_stopped(child));
    }
}

/// Return whether all threads of a process have stopped. A thread may continue to run for a moment after the signal.
fn is_stopped(child: &Child) -> bool {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", child.id())).unwrap();
    tasks.map_while(Result::ok).all(|task| {
        let stat = std::fs::read_to_string(task.path().join("stat")).unwrap_or_default();
        // The state follows the process name, which is in parentheses.
        stat.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with('T'))
    })
}
