//! Measures the CPU time of Redis for the gateway's Lua script, in µs per request, for several combinations of limits: of
//! the script, from `INFO commandstats`, and of the whole server, from `/proc`. A pipeline contains 64 requests: 64 calls
//! with one request each, or 4 calls with 16 requests each. Under load, the gateway sends several requests per call as
//! well. `make bench-script` runs it. `IO_THREADS` is the number of I/O threads of Redis (1).

use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::process::{Command, Stdio};

use sluicegate::limiter::algorithm::Rule;
use sluicegate::limiter::algorithm::fixed_window::{FixedWindow, WindowStart};
use sluicegate::limiter::algorithm::sliding_log::SlidingLog;
use sluicegate::limiter::algorithm::token_bucket::TokenBucket;
use sluicegate::limiter::key::{Identity, IdentityHasher, Key, StateName};
use sluicegate::limiter::quota::Quota;
use sluicegate::limiter::redis::StateLayout;
use sluicegate::limiter::redis::script;
use sluicegate::limiter::redis::script::LimitArgs;
use sluicegate::limiter::redis::script::{AlgorithmSet, script};
use sluicegate::limiter::usage::UsageDays;
use sluicegate::limiter::verdict::{Charge, ChargeMode, Operation};

/// Number of rounds. The result is that of the fastest round, because other load of the machine can only slow a round
/// down.
const ROUNDS: usize = 8;
const PIPELINES_PER_ROUND: usize = 200;
const PIPELINE_LENGTH: usize = 64;

fn main() {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let io_threads = std::env::var("IO_THREADS").unwrap_or_else(|_| "1".to_owned());
    let mut server = Command::new("redis-server")
        .args(["--port", &port.to_string(), "--save", "", "--bind", "127.0.0.1", "--io-threads", &io_threads])
        .stdout(Stdio::piped())
        .spawn()
        .expect("redis-server is needed; `make tools` installs it");
    let mut lines = BufReader::new(server.stdout.take().unwrap()).lines().map_while(Result::ok);
    assert!(lines.any(|line| line.contains("Ready to accept")), "redis-server does not start");
    let mut connection = redis::Client::open(format!("redis://127.0.0.1:{port}")).unwrap().get_connection().unwrap();

    let quota: Quota = "1000000/min".parse().unwrap();
    let bucket = Rule::TokenBucket(TokenBucket::new(quota, 1_000_000).unwrap());
    let window = Rule::FixedWindow(FixedWindow::new(quota, WindowStart::Aligned { phase: 0 }).unwrap());
    let denied_bucket = Rule::TokenBucket(TokenBucket::new("1/day".parse().unwrap(), 1).unwrap());
    let sliding_log = Rule::SlidingLog(SlidingLog::new("100/s".parse().unwrap()).unwrap());
    let first_request = Rule::FixedWindow(FixedWindow::new(quota, WindowStart::FirstRequest).unwrap());
    let lengths = ["s", "10s", "1m", "10m", "1h", "2h", "12h", "24h"];
    let windows = lengths.map(|length| {
        let quota = format!("1000000/{length}").parse().unwrap();
        Rule::FixedWindow(FixedWindow::new(quota, WindowStart::Aligned { phase: 0 }).unwrap())
    });
    let windows: Vec<_> = windows.iter().collect();
    println!("µs of the script and of Redis per request, 1,000 identities in turn, {io_threads} I/O threads");
    println!("{:40} {:>13} {:>13}", "requests in a call", 1, 16);
    for (name, rules, usages) in [
        ("token-bucket, admitted", &[&bucket][..], 0),
        ("token-bucket, denied", &[&denied_bucket], 0),
        ("fixed-window, admitted", &[&window], 0),
        ("fixed-window, first-request, admitted", &[&first_request], 0),
        ("sliding-log of 100", &[&sliding_log], 0),
        ("token-bucket + two fixed windows", &[&bucket, &window, &first_request], 0),
        ("three fixed windows", &windows[5..], 0),
        ("eight fixed windows", &windows, 0),
        ("token-bucket with usage, admitted", &[&bucket], 1),
        ("token-bucket with usage, denied", &[&denied_bucket], 1),
        ("sliding-log of 100 with usage", &[&sliding_log], 1),
        ("three limits, one of them with usage", &[&bucket, &window, &first_request], 1),
        ("three limits with usage", &[&bucket, &window, &first_request], 3),
    ] {
        // Otherwise the values of the identities would have the states of the other combinations as well.
        redis::cmd("FLUSHALL").exec(&mut connection).unwrap();
        let process = server.id();
        let mut best_of_rounds = |requests| {
            let rounds = (0..ROUNDS).map(|_| measure_round(&mut connection, process, name, rules, usages, requests));
            rounds.reduce(|best, round| (best.0.min(round.0), best.1.min(round.1))).unwrap()
        };
        let [one, many] = [1, 16].map(&mut best_of_rounds);
        println!("{name:40} {:6.2} {:6.2} {:6.2} {:6.2}", one.0, one.1, many.0, many.1);
    }
    server.kill().unwrap();
    server.wait().unwrap();
}

/// Return the CPU time that all threads of a process have used, in µs.
fn cpu_us(process: u32) -> f64 {
    let tasks = std::fs::read_dir(format!("/proc/{process}/task")).unwrap();
    let used_ns = |task: std::io::Result<std::fs::DirEntry>| {
        let schedstat = std::fs::read_to_string(task.unwrap().path().join("schedstat")).unwrap();
        schedstat.split_whitespace().next().unwrap().parse::<f64>().unwrap()
    };
    tasks.map(used_ns).sum::<f64>() / 1000.0
}

/// Measure requests with these limits, and return the µs of the script and of the server per request. The first `usages`
/// limits count usage totals. A call contains `requests` requests.
fn measure_round(
    connection: &mut redis::Connection,
    process: u32,
    name: &str,
    rules: &[&Rule],
    usages: usize,
    requests: usize,
) -> (f64, f64) {
    let parts = AlgorithmSet::for_rules(rules.iter().copied()).with_usage(usages > 0);
    let days = UsageDays::new("UTC").unwrap();
    let state_of = |(index, rule): (usize, &&Rule)| {
        StateName::new(&IdentityHasher::new(""), &format!("{name} {index}"), &rule.shape())
    };
    let states: Vec<_> = rules.iter().enumerate().map(state_of).collect();
    let charge = |(rule, state_name)| {
        let key = Key { identity: Identity(0), state_name };
        Charge { key, rule, cost: 1, mode: ChargeMode::Enforced, permit_id: 0, debt_before_us: 0, usage: None }
    };
    let charges: Vec<_> = rules.iter().copied().zip(&states).map(charge).collect();
    let day = |index| (index < usages).then(|| days.day_at(0).at_any_time());
    let terms: Vec<_> =
        (0..charges.len()).map(|index| LimitArgs::new(&charges, index, 0).with_usage(day(index))).collect();
    let layout = StateLayout::default();
    let script = script(script::script_variant(&layout, Operation::Check, &terms), parts);
    redis::cmd("SCRIPT").arg("LOAD").arg(&script.source).exec(connection).unwrap();
    redis::cmd("CONFIG").arg("RESETSTAT").exec(connection).unwrap();
    let started_us = cpu_us(process);
    let mut argument = script::start_argument(0, &layout, 1, terms.len());
    script::append_group(&mut argument, requests, Operation::Check, &terms);
    let names = script::state_names_argument(states.iter().map(|state| &**state.name()));
    let keys_per_request = terms.iter().filter(|limit| limit.has_key()).count();
    let mut sent = 0;
    for _ in 0..PIPELINES_PER_ROUND {
        let mut pipe = redis::pipe();
        for _ in 0..PIPELINE_LENGTH / requests {
            let call = pipe.cmd("EVALSHA").arg(&script.sha).arg(requests * (keys_per_request + usages));
            for request in sent..sent + requests {
                for limit in terms.iter().filter(|limit| limit.has_key()) {
                    let mut key = Vec::new();
                    let identity = Identity(request as u128 % 1000);
                    limit.write_key(&Key { identity, state_name: &states[0] }, "rl", &mut key);
                    call.arg(key);
                }
            }
            for request in sent..sent + requests {
                for index in 0..usages {
                    call.arg(format!("rl:{{{:032}}}:{name} {index}:usage:2026-11", request % 1000));
                }
            }
            sent += requests;
            call.arg(&argument).arg(&names);
            if usages > 0 {
                let groups = std::iter::once(&*terms);
                call.arg(script::usage_argument(groups));
            }
            call.ignore();
        }
        pipe.exec(connection).unwrap();
    }
    let server_us = cpu_us(process) - started_us;
    let stats: String = redis::cmd("INFO").arg("commandstats").query(connection).unwrap();
    let line = stats.lines().find(|line| line.starts_with("cmdstat_evalsha")).unwrap();
    let used_us: f64 = line.split("usec=").nth(1).unwrap().split(',').next().unwrap().parse().unwrap();
    (used_us / sent as f64, server_us / sent as f64)
}
