//! An upstream server whose behaviour the test controls: it can respond, hang, reset connections, stop and start again.

use std::collections::HashMap;
use std::io::Write;
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use super::upstream::{Seen, read_request};

/// How the server handles requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Behaviour {
    /// Respond with this status.
    Respond(u16),
    /// Respond after this many ms.
    RespondAfter(u64),
    /// Respond only when the behaviour changes.
    Hang,
    /// Close the connection after reading the request.
    Reset,
}

/// The server. Its threads end with the test process.
pub struct Server {
    pub address: SocketAddr,
    inner: Arc<Inner>,
}

struct Inner {
    behaviour: Mutex<Behaviour>,
    changed: Condvar,
    /// All requests except health checks.
    seen: Mutex<Vec<Seen>>,
    checks: AtomicUsize,
    /// The number of accepted connections so far, and the number of open connections.
    accepted: AtomicUsize,
    connections: AtomicUsize,
    /// The current number of requests in flight, and its maximum.
    running: AtomicUsize,
    most: AtomicUsize,
    /// The listener, while the server is running.
    open: Mutex<Option<Open>>,
}

struct Open {
    closed: Arc<AtomicBool>,
    connections: Arc<Mutex<Vec<TcpStream>>>,
}

impl Server {
    pub fn start() -> Server {
        let inner = Arc::new(Inner {
            behaviour: Mutex::new(Behaviour::Respond(200)),
            changed: Condvar::new(),
            seen: Mutex::default(),
            checks: AtomicUsize::new(0),
            accepted: AtomicUsize::new(0),
            connections: AtomicUsize::new(0),
            running: AtomicUsize::new(0),
            most: AtomicUsize::new(0),
            open: Mutex::default(),
        });
        let address = open(&inner, "127.0.0.1:0".parse().unwrap());
        Server { address, inner }
    }

    pub fn start_many<const N: usize>() -> [Server; N] {
        std::array::from_fn(|_| Server::start())
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub fn set(&self, behaviour: Behaviour) {
        *self.inner.behaviour.lock().unwrap() = behaviour;
        self.inner.changed.notify_all();
    }

    /// Stop the server: close all open connections and refuse new ones.
    pub fn stop(&self) {
        let Some(open) = self.inner.open.lock().unwrap().take() else { return };
        open.closed.store(true, Ordering::SeqCst);
        // Wake the accepting thread. Wait until the port refuses connections.
        while TcpStream::connect(self.address).is_ok() {
            std::thread::yield_now();
        }
        for connection in open.connections.lock().unwrap().drain(..) {
            let _ = connection.shutdown(Shutdown::Both);
        }
    }

    /// Start the server again on the same address.
    pub fn start_again(&self) {
        open(&self.inner, self.address);
    }

    /// Return the number of requests so far.
    pub fn count(&self) -> usize {
        self.inner.seen.lock().unwrap().len()
    }

    /// Return the number of health checks so far.
    pub fn checks(&self) -> usize {
        self.inner.checks.load(Ordering::SeqCst)
    }

    /// Return the number of accepted connections.
    pub fn accepted(&self) -> usize {
        self.inner.accepted.load(Ordering::SeqCst)
    }

    /// Return the number of open connections.
    pub fn connections(&self) -> usize {
        self.inner.connections.load(Ordering::SeqCst)
    }

    /// Return the maximum number of concurrent requests.
    pub fn max_running(&self) -> usize {
        self.inner.most.load(Ordering::SeqCst)
    }

    /// Return the number of requests in flight.
    pub fn running(&self) -> usize {
        self.inner.running.load(Ordering::SeqCst)
    }

    /// Count how often each value of a header occurred in the requests.
    pub fn count_values(&self, header: &str, counts: &mut HashMap<String, usize>) {
        for seen in self.inner.seen.lock().unwrap().iter() {
            seen.headers(header).into_iter().for_each(|id| *counts.entry(id.to_owned()).or_default() += 1);
        }
    }
}

fn open(inner: &Arc<Inner>, address: SocketAddr) -> SocketAddr {
    let listener = TcpListener::bind(address).unwrap();
    let address = listener.local_addr().unwrap();
    let (closed, connections) = (Arc::<AtomicBool>::default(), Arc::<Mutex<Vec<TcpStream>>>::default());
    *inner.open.lock().unwrap() = Some(Open { closed: closed.clone(), connections: connections.clone() });
    let inner = inner.clone();
    std::thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            if closed.load(Ordering::SeqCst) {
                return;
            }
            connections.lock().unwrap().push(stream.try_clone().unwrap());
            let inner = inner.clone();
            inner.accepted.fetch_add(1, Ordering::SeqCst);
            inner.connections.fetch_add(1, Ordering::SeqCst);
            std::thread::spawn(move || {
                serve(&inner, stream);
                inner.connections.fetch_sub(1, Ordering::SeqCst);
            });
        }
    });
    address
}

fn serve(inner: &Inner, mut stream: TcpStream) {
    stream.set_nodelay(true).unwrap();
    while let Some(request) = read_request(&mut stream) {
        if request.headers("user-agent") == ["sluicegate-health"] {
            inner.checks.fetch_add(1, Ordering::SeqCst);
        } else {
            inner.seen.lock().unwrap().push(request);
        }
        let running = inner.running.fetch_add(1, Ordering::SeqCst) + 1;
        inner.most.fetch_max(running, Ordering::SeqCst);
        let status = answer(inner);
        inner.running.fetch_sub(1, Ordering::SeqCst);
        let Some(status) = status else { break };
        let head = format!("HTTP/1.1 {status} Status\r\nContent-Length: 2\r\n\r\nok");
        if stream.write_all(head.as_bytes()).is_err() {
            break;
        }
    }
    let _ = stream.shutdown(Shutdown::Both);
}

fn answer(inner: &Inner) -> Option<u16> {
    let behaviour = *inner.behaviour.lock().unwrap();
    match behaviour {
        Behaviour::Respond(status) => Some(status),
        Behaviour::RespondAfter(ms) => {
            std::thread::sleep(Duration::from_millis(ms));
            Some(200)
        }
        Behaviour::Hang => {
            let behaviour = inner.behaviour.lock().unwrap();
            drop(inner.changed.wait_while(behaviour, |behaviour| *behaviour == Behaviour::Hang).unwrap());
            Some(200)
        }
        Behaviour::Reset => None,
    }
}
