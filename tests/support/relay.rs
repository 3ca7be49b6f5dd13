//! A TCP relay between a gateway and Redis. It can redirect connections, delay replies and drop replies.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use sluicegate::clock::monotonic;

use super::upstream::serve;

/// A running relay. Its threads end with the test process.
pub struct Relay {
    pub address: SocketAddr,
    server: Arc<AtomicU16>,
    losing: Arc<AtomicBool>,
    /// The delay of replies, µs.
    delay_us: Arc<AtomicU64>,
    streams: Streams,
}

/// Both streams of each open connection.
type Streams = Arc<Mutex<HashMap<usize, [TcpStream; 2]>>>;

impl Relay {
    /// Start a relay to the Redis server on this port.
    pub fn start(port: u16) -> Relay {
        Relay::delayed(port, Duration::ZERO)
    }

    /// Start a relay that delays each reply by `round_trip`.
    pub fn delayed(port: u16, round_trip: Duration) -> Relay {
        let server = Arc::new(AtomicU16::new(port));
        let losing = Arc::<AtomicBool>::default();
        let delay_us = Arc::new(AtomicU64::new(round_trip.as_micros() as u64));
        let (streams, number) = (Streams::default(), AtomicUsize::new(0));
        let (target, deaf, delay, open) = (server.clone(), losing.clone(), delay_us.clone(), streams.clone());
        let address = serve(move |gateway| {
            // If Redis is down, close the connection of the gateway, as a dead server would.
            let Ok(mut redis) = TcpStream::connect(("127.0.0.1", target.load(Ordering::SeqCst))) else { return };
            let (mut calls, mut to_redis) = (gateway.try_clone().unwrap(), redis.try_clone().unwrap());
            let number = number.fetch_add(1, Ordering::SeqCst);
            open.lock().unwrap().insert(number, [gateway.try_clone().unwrap(), redis.try_clone().unwrap()]);
            std::thread::spawn(move || {
                let _ = std::io::copy(&mut calls, &mut to_redis);
                let _ = to_redis.shutdown(Shutdown::Both);
            });
            // Write each reply one round-trip time after it was read, in order.
            let (sent, due) = std::sync::mpsc::channel::<(Instant, Vec<u8>)>();
            let mut replies = gateway.try_clone().unwrap();
            let deaf = deaf.clone();
            let line = std::thread::spawn(move || {
                for (at, bytes) in due {
                    std::thread::sleep(at.saturating_duration_since(monotonic()));
                    if !deaf.load(Ordering::SeqCst) && replies.write_all(&bytes).is_err() {
                        return;
                    }
                }
            });
            let mut buffer = [0; 4096];
            while let Ok(count @ 1..) = redis.read(&mut buffer) {
                let due = monotonic() + Duration::from_micros(delay.load(Ordering::SeqCst));
                if sent.send((due, buffer[..count].to_vec())).is_err() {
                    break;
                }
            }
            drop(sent);
            let _ = line.join();
            let _ = gateway.shutdown(Shutdown::Both);
            open.lock().unwrap().remove(&number);
        });
        Relay { address, server, losing, delay_us, streams }
    }

    pub fn url(&self) -> String {
        format!("redis://{}", self.address)
    }

    /// Redirect new connections to another server, and close all open connections.
    pub fn redirect_to(&self, port: u16) {
        self.server.store(port, Ordering::SeqCst);
        for stream in self.streams.lock().unwrap().drain().flat_map(|(_, both)| both) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    /// Delay the replies that arrive from now on by this time.
    pub fn set_delay(&self, delay: Duration) {
        self.delay_us.store(delay.as_micros() as u64, Ordering::SeqCst);
    }

    /// Start or stop dropping the replies of Redis.
    pub fn drop_replies(&self, lose: bool) {
        self.losing.store(lose, Ordering::SeqCst);
    }
}
