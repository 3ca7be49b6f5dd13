//! A deterministic simulation of the whole limiter in virtual time: gateways with their real queues, batches, caches,
//! circuit breakers, permits and overrides, on a simulated network and store.
//!
//! A seed determines a schedule of limits, requests and faults. `SCHEDULES=n` runs n schedules. `SEED=s` runs one
//! schedule and prints its events.

#![allow(unreachable_pub, clippy::disallowed_methods)] // a separate test crate, with tokio's clock

mod gateway;
mod invariants;
#[path = "../support/lua.rs"]
mod lua;
mod network;
mod overrides;
mod random;
mod run;
mod schedule;
mod store;

use std::collections::BTreeMap;
use std::fmt::Write;
use std::num::NonZero;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use run::{Played, collect_panics, play};

/// The number of schedules, unless `SCHEDULES` is set.
const SCHEDULES: u64 = 2000;

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name} is a number")))
}

#[test]
fn limits_hold_in_all_schedules() {
    collect_panics();
    if let Some(seed) = number("SEED") {
        let played = play(seed, true);
        println!("{}", report(seed, &played));
        assert!(played.violations.is_empty(), "seed {seed}: {} violations", played.violations.len());
        return;
    }
    let schedules = number("SCHEDULES").unwrap_or(SCHEDULES);
    let (next, requests) = (AtomicU64::new(0), AtomicUsize::new(0));
    let failed = Mutex::new(BTreeMap::new());
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, NonZero::get) {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= schedules {
                        return;
                    }
                    let played = play(seed, false);
                    requests.fetch_add(played.requests, Ordering::Relaxed);
                    if !played.violations.is_empty() {
                        failed.lock().unwrap().insert(seed, played.violations);
                    }
                }
            });
        }
    });
    let (failed, requests) = (failed.into_inner().unwrap(), requests.into_inner());
    println!("{schedules} schedules with {requests} requests, {} fail", failed.len());
    let Some((seed, violations)) = failed.first_key_value() else { return };
    let replayed = play(*seed, true);
    let mut summary = report(*seed, &replayed);
    let mut invariants: BTreeMap<_, Vec<u64>> = BTreeMap::new();
    for (seed, violations) in &failed {
        for violation in violations {
            let class = format!("{:?}", schedule::Schedule::new(*seed).class);
            let seeds = invariants.entry((violation.invariant, class)).or_default();
            if seeds.last() != Some(seed) {
                seeds.push(*seed);
            }
        }
    }
    for ((invariant, class), seeds) in invariants {
        let first = &seeds[..seeds.len().min(8)];
        writeln!(summary, "{:6} schedules, {class}: {invariant}; seeds {first:?}", seeds.len()).unwrap();
    }
    println!("{summary}");
    assert_eq!(&replayed.violations, violations, "SEED={seed} repeats the schedule exactly");
    panic!("{} of {schedules} schedules fail; SEED={seed} repeats the first one", failed.len());
}

#[test]
fn seed_repeats_its_schedule() {
    collect_panics();
    for seed in 0..20 {
        let [one, other] = [(); 2].map(|()| report(seed, &play(seed, true)));
        assert_eq!(one, other);
    }
}

/// Return a text with the events of a schedule and its violations.
fn report(seed: u64, played: &Played) -> String {
    let mut text = format!("SEED={seed}\n{:#?}\n", schedule::Schedule::new(seed).summary());
    for (at, event) in &played.trace {
        writeln!(text, "{:10.3} ms  {event}", at.as_secs_f64() * 1000.0).unwrap();
    }
    for violation in &played.violations {
        writeln!(text, "VIOLATED {violation}").unwrap();
    }
    text
}
