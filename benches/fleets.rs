//! Measures how a slow server of an upstream affects the latency of all requests, for each `balance` algorithm. The
//! results are in docs/reference/upstreams.md.
#![allow(clippy::disallowed_methods)] // the benchmark measures wall-clock time

#[path = "../tests/support/mod.rs"]
mod support;

use std::time::{Duration, Instant};

use support::gateway::Gateway;
use support::server::{Behaviour, Server};

const CLIENTS: usize = 16;
const REQUESTS: usize = 500;

fn main() {
    println!("one of four servers takes 200 ms, the others 2 ms; {CLIENTS} clients, {REQUESTS} requests each");
    for balance in ["round-robin", "random", "least-requests"] {
        let servers = Server::start_many::<4>();
        servers.iter().for_each(|server| server.set(Behaviour::RespondAfter(2)));
        servers[0].set(Behaviour::RespondAfter(200));
        let urls: Vec<_> = servers.iter().map(|server| format!("\"{}\"", server.url())).collect();
        let gateway = Gateway::start(&format!(
            "[upstream.api]\nservers = [{}]\nbalance = \"{balance}\"\n\
             [[route]]\nname = \"all\"\npath = \"/\"\nupstream = \"api\"\n",
            urls.join(", ")
        ));
        let started = Instant::now();
        let mut times: Vec<Duration> = std::thread::scope(|scope| {
            let clients: Vec<_> = (0..CLIENTS).map(|_| scope.spawn(|| requests(&gateway))).collect();
            clients.into_iter().flat_map(|client| client.join().unwrap()).collect()
        });
        let rate = times.len() as f64 / started.elapsed().as_secs_f64();
        times.sort_unstable();
        let ms = |part: f64| times[(times.len() as f64 * part) as usize].as_secs_f64() * 1e3;
        let slow = 100.0 * servers[0].count() as f64 / times.len() as f64;
        println!(
            "{balance:15} {rate:6.0}/s   median {:6.1} ms   p98 {:6.1} ms   p99 {:6.1} ms   {slow:.1} % to the slow one",
            ms(0.5),
            ms(0.98),
            ms(0.99)
        );
    }
}

fn requests(gateway: &Gateway) -> Vec<Duration> {
    let mut client = gateway.client();
    (0..REQUESTS)
        .map(|_| {
            let started = Instant::now();
            assert_eq!(client.get("/").status, 200);
            started.elapsed()
        })
        .collect()
}
