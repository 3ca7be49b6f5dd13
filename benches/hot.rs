//! The hot path in process: a decision of the memory store for each algorithm, a route among 10 and among 10,000.
#![allow(missing_docs)] // criterion's macros make public items

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use http::{HeaderMap, Method};
use sluicegate::http::target::canonical_path;
use sluicegate::limiter::algorithm::Rule;
use sluicegate::limiter::algorithm::fixed_window::{FixedWindow, WindowStart};
use sluicegate::limiter::algorithm::sliding_log::SlidingLog;
use sluicegate::limiter::algorithm::token_bucket::TokenBucket;
use sluicegate::limiter::clock::Clock;
use sluicegate::limiter::key::{Identity, IdentityEncoder, IdentityHasher, Key, StateName};
use sluicegate::limiter::memory::MemoryStore;
use sluicegate::limiter::quota::Quota;
use sluicegate::limiter::verdict::{Charge, ChargeMode, Operation};
use sluicegate::routing::{RouteMatch, RouteRequest, RouteTable};

fn bench_decisions(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("memory store, 1,000 identities");
    let hasher = IdentityHasher::new("bench");
    let quota: Quota = "1000/min".parse().unwrap();
    for (name, rule) in [
        ("token-bucket", Rule::TokenBucket(TokenBucket::new(quota, 1000).unwrap())),
        ("fixed-window", Rule::FixedWindow(FixedWindow::new(quota, WindowStart::Aligned { phase: 0 }).unwrap())),
        ("first-request", Rule::FixedWindow(FixedWindow::new(quota, WindowStart::FirstRequest).unwrap())),
        ("sliding-log", Rule::SlidingLog(SlidingLog::new(quota).unwrap())),
    ] {
        let store = MemoryStore::new(1_000_000, Clock::Store);
        let bucket = StateName::new(&hasher, name, &rule.shape());
        let identities: Vec<Identity> = (0u64..1000).map(|number| hasher.hash(&number.to_be_bytes())).collect();
        let mut next_identity = identities.iter().cycle();
        group.bench_function(name, |bencher| {
            bencher.iter_batched(
                || *next_identity.next().unwrap(),
                |identity| {
                    let key = Key { identity, state_name: &bucket };
                    store.decide(
                        Operation::Check,
                        &[Charge {
                            key,
                            rule: &rule,
                            cost: 1,
                            mode: ChargeMode::Enforced,
                            permit_id: 0,
                            debt_before_us: 0,
                        }],
                    )
                },
                BatchSize::SmallInput,
            );
        });
    }
    group.finish();
    criterion.bench_function("identity of an API key", |bencher| {
        let mut encoder = IdentityEncoder::default();
        bencher.iter(|| {
            encoder.clear();
            encoder.push(b'k', b"0123456789abcdef0123456789abcdef");
            hasher.hash(encoder.as_bytes())
        });
    });
}

fn bench_routes(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("route");
    for count in [10, 10_000] {
        let mut table = RouteTable::default();
        for number in 0..count {
            let path = format!("/v1/service{number}/items/{{id}}").parse().unwrap();
            table.insert(&RouteMatch { methods: vec![Method::GET], ..RouteMatch::new(path) }, &number).unwrap();
        }
        let (path, headers) = (format!("/v1/service{}/items/77", count / 2), HeaderMap::new());
        group.bench_function(format!("among {count}"), |bencher| {
            let (host, path, method, uri) = ("api.example.com", &*path, &Method::GET, &path.parse().unwrap());
            let request = RouteRequest { host, path, uri, method, headers: &headers, listener: 0 };
            bencher.iter(|| *table.find(std::hint::black_box(&request)).unwrap());
        });
    }
    group.finish();
    criterion
        .bench_function("path that is canonical", |bencher| bencher.iter(|| canonical_path("/v1/service5/items/77")));
    criterion
        .bench_function("path that is not", |bencher| bencher.iter(|| canonical_path("/v1/./service5//it%65ms/77")));
}

criterion_group!(benches, bench_decisions, bench_routes);
criterion_main!(benches);
