//! What each composed script costs Redis: µs per request by `INFO commandstats`, 64 requests in the pipe, each in a call of its own
//! or 16 in one, as the gateway asks under load.

use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::process::{Command, Stdio};

use sluicegate::limit::algorithm::Rule;
use sluicegate::limit::algorithm::fixed_window::{FixedWindow, Start};
use sluicegate::limit::algorithm::sliding_log::SlidingLog;
use sluicegate::limit::algorithm::token_bucket::TokenBucket;
use sluicegate::limit::key::{Bucket, Identity, IdentityHasher, Key};
use sluicegate::limit::quota::Quota;
use sluicegate::limit::redis::script::{Parts, script};
use sluicegate::limit::redis::wire::{self, Terms};
use sluicegate::limit::store::{Charge, Mode, Operation};

/// The best of several rounds: other work on the machine only ever adds.
const ROUNDS: usize = 8;
const PIPES: usize = 200;
const PIPE: usize = 64;

fn main() {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let mut server = Command::new("redis-server")
        .args(["--port", &port.to_string(), "--save", "", "--bind", "127.0.0.1"])
        .stdout(Stdio::piped())
        .spawn()
        .expect("redis-server is needed; `make tools` installs it");
    let mut lines = BufReader::new(server.stdout.take().unwrap()).lines().map_while(Result::ok);
    assert!(lines.any(|line| line.contains("Ready to accept")), "redis-server does not start");
    let mut connection = redis::Client::open(format!("redis://127.0.0.1:{port}")).unwrap().get_connection().unwrap();

    let quota: Quota = "1000000/min".parse().unwrap();
    let bucket = Rule::TokenBucket(TokenBucket::new(quota, 1_000_000).unwrap());
    let window = Rule::FixedWindow(FixedWindow::new(quota, Start::Aligned { phase: 0 }).unwrap());
    let full = Rule::TokenBucket(TokenBucket::new("1/day".parse().unwrap(), 1).unwrap());
    let log = Rule::SlidingLog(SlidingLog::new("100/s".parse().unwrap()).unwrap());
    let first = Rule::FixedWindow(FixedWindow::new(quota, Start::FirstRequest).unwrap());
    println!("µs per request in Redis, 1,000 keys in turn");
    println!("{:40} {:>6} {:>6}", "requests in a call", 1, 16);
    for (name, rules) in [
        ("token-bucket, admitted", &[&bucket][..]),
        ("token-bucket, denied", &[&full]),
        ("fixed-window, admitted", &[&window]),
        ("fixed-window, first-request, admitted", &[&first]),
        ("sliding-log of 100", &[&log]),
        ("token-bucket + two fixed windows", &[&bucket, &window, &first]),
    ] {
        let mut best =
            |requests| (0..ROUNDS).map(|_| round(&mut connection, name, rules, requests)).fold(f64::MAX, f64::min);
        println!("{name:40} {:6.2} {:6.2}", best(1), best(16));
    }
    server.kill().unwrap();
    server.wait().unwrap();
}

fn round(connection: &mut redis::Connection, name: &str, rules: &[&Rule], requests: usize) -> f64 {
    let parts = Parts::of(rules.iter().copied());
    let bucket = |rule: &Rule| Bucket::new(&IdentityHasher::new(""), name, &rule.shape());
    let terms = |rule: &&Rule| {
        let key = Key { identity: Identity(0), bucket: &bucket(rule) };
        Terms::of(&Charge { key, rule, cost: 1, mode: Mode::Binding, lease: 0, debt_before_us: 0 }, 0)
    };
    let terms: Vec<_> = rules.iter().map(terms).collect();
    let script = script(wire::frame(Operation::Check, &terms), parts);
    redis::cmd("SCRIPT").arg("LOAD").arg(&script.text).exec(connection).unwrap();
    redis::cmd("CONFIG").arg("RESETSTAT").exec(connection).unwrap();
    let mut argument = wire::argument(0, 1, terms.len());
    wire::add(&mut argument, requests, Operation::Check, &terms);
    let mut asked = 0;
    for _ in 0..PIPES {
        let mut pipe = redis::pipe();
        for _ in 0..PIPE / requests {
            let call = pipe.cmd("EVALSHA").arg(&script.sha).arg(requests * rules.len());
            for request in asked..asked + requests {
                for index in 0..rules.len() {
                    call.arg(format!("rl:{{{:032}}}:{name}:{index}", request % 1000));
                }
            }
            asked += requests;
            call.arg(&argument).ignore();
        }
        pipe.exec(connection).unwrap();
    }
    let stats: String = redis::cmd("INFO").arg("commandstats").query(connection).unwrap();
    let line = stats.lines().find(|line| line.starts_with("cmdstat_evalsha")).unwrap();
    let spent: f64 = line.split("usec=").nth(1).unwrap().split(',').next().unwrap().parse().unwrap();
    spent / asked as f64
}
