//! Benchmarks of the hot path without I/O: a decision of the memory store for each algorithm, the lookup of a route
//! among 10 and among 10,000 routes, the verification of a JWT with and without the cache of verified tokens, and the
//! time to parse hostile bodies, in ms per MiB.
#![allow(missing_docs)] // criterion's macros generate public items

#[allow(unreachable_pub)] // tests use the module, too
#[path = "../tests/support/hostile_bodies.rs"]
mod hostile_bodies;

use std::sync::Arc;

use arc_swap::ArcSwapOption;
use aws_lc_rs::rand::SystemRandom;
use aws_lc_rs::rsa::KeySize;
use aws_lc_rs::signature::{
    ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, Ed25519KeyPair, KeyPair, RSA_PKCS1_SHA256, RsaKeyPair,
};
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use hostile_bodies::{
    NamedBody, Parsers, bodies_with_models, json_bodies, measure_stream, ordinary_body, ordinary_stream, streams,
};
use http::{HeaderMap, Method};
use serde_json::json;
use sluicegate::clock::{Clock, monotonic};
use sluicegate::http::target::{PathPolicy, canonical_path};
use sluicegate::identity::jwt::{JwtVerifier, KeySet};
use sluicegate::limiter::algorithm::Rule;
use sluicegate::limiter::algorithm::fixed_window::{FixedWindow, WindowStart};
use sluicegate::limiter::algorithm::sliding_log::SlidingLog;
use sluicegate::limiter::algorithm::token_bucket::TokenBucket;
use sluicegate::limiter::key::{Identity, IdentityEncoder, IdentityHasher, Key, StateName};
use sluicegate::limiter::memory::MemoryStore;
use sluicegate::limiter::quota::Quota;
use sluicegate::limiter::verdict::{Charge, ChargeMode, Operation};
use sluicegate::payload::llm::request::with_models;
use sluicegate::routing::condition::RouteBody;
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
                            usage: None,
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
            let request =
                RouteRequest { host, path, uri, method, headers: &headers, listener: 0, body: RouteBody::Unread };
            bencher.iter(|| *table.find(std::hint::black_box(&request)).unwrap());
        });
    }
    group.finish();
    criterion.bench_function("path that is canonical", |bencher| {
        bencher.iter(|| canonical_path("/v1/service5/items/77", PathPolicy::Canonical))
    });
    criterion.bench_function("path that is not", |bencher| {
        bencher.iter(|| canonical_path("/v1/./service5//it%65ms/77", PathPolicy::Canonical))
    });
}

fn bench_tokens(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("token");
    let (random, encode) = (SystemRandom::new(), |bytes: &[u8]| URL_SAFE_NO_PAD.encode(bytes));
    let rsa = RsaKeyPair::generate(KeySize::Rsa2048).unwrap();
    let ec = EcdsaKeyPair::generate(&ECDSA_P256_SHA256_FIXED_SIGNING).unwrap();
    let ed = Ed25519KeyPair::generate().unwrap();
    let rsa_sign = |message: &[u8]| {
        let mut signature = vec![0; rsa.public_modulus_len()];
        rsa.sign(&RSA_PKCS1_SHA256, &random, message, &mut signature).unwrap();
        signature
    };
    let modulus = encode(rsa.public_key().modulus().big_endian_without_leading_zero());
    let exponent = encode(rsa.public_key().exponent().big_endian_without_leading_zero());
    let point = ec.public_key().as_ref();
    let ec_jwk = json!({ "kty": "EC", "crv": "P-256", "x": encode(&point[1..33]), "y": encode(&point[33..]) });
    let ed_jwk = json!({ "kty": "OKP", "crv": "Ed25519", "x": encode(ed.public_key().as_ref()) });
    let claims = json!({
        "iss": "https://issuer.example/", "sub": "auth0|65f1c0ffee", "aud": ["api"], "iat": 1, "exp": 9_000_000_000_u64,
        "scope": "openid profile email read:reports write:reports", "azp": "x".repeat(32), "permissions": ["read", "write"],
    });
    type Sign<'a> = &'a dyn Fn(&[u8]) -> Vec<u8>;
    for (algorithm, jwk, sign) in [
        ("RS256", json!({ "kty": "RSA", "n": modulus, "e": exponent }), &rsa_sign as Sign<'_>),
        ("ES256", ec_jwk, &|message: &[u8]| ec.sign(&random, message).unwrap().as_ref().to_vec()),
        ("EdDSA", ed_jwk, &|message: &[u8]| ed.sign(message).as_ref().to_vec()),
    ] {
        let header = json!({ "alg": algorithm, "typ": "JWT" }).to_string();
        let message = format!("{}.{}", encode(header.as_bytes()), encode(claims.to_string().as_bytes()));
        let token = format!("{message}.{}", encode(&sign(message.as_bytes())));
        let jwks = json!({ "keys": [jwk] }).to_string();
        let keys = || KeySet::parse(jwks.as_bytes()).unwrap();
        let audience = Some("api".into());
        let verifier =
            JwtVerifier { keys: Arc::new(ArcSwapOption::from_pointee(keys())), audience, ..JwtVerifier::default() };
        group.bench_function(format!("{algorithm} for the first time"), |bencher| {
            bencher.iter_batched(
                || verifier.keys.store(Some(keys().into())),
                |()| verifier.verify(token.as_bytes(), 1000.0).unwrap(),
                BatchSize::PerIteration,
            );
        });
        group.bench_function(format!("{algorithm} again"), |bencher| {
            bencher.iter(|| verifier.verify(token.as_bytes(), 1000.0).unwrap());
        });
    }
    group.finish();
}

/// 1 MiB in bytes, the length of the hostile bodies.
const MIB: usize = 1 << 20;

/// Print the shortest of ten times to parse each hostile body, in ms per MiB.
#[expect(clippy::print_stdout)]
fn bench_hostile_bodies(_: &mut Criterion) {
    let shortest = |run: &dyn Fn()| {
        let time = |_| {
            let start = monotonic();
            run();
            monotonic() - start
        };
        (0..10).map(time).min().unwrap().as_secs_f64() * 1000.0
    };
    let parsers = Parsers::new();
    println!("ms per MiB by parser of request bodies: a pointer, 64 pointers, JSON-RPC, LLM, all");
    for NamedBody { name, bytes } in [ordinary_body(MIB)].into_iter().chain(json_bodies(MIB)) {
        print!("{name:50}");
        parsers.each(&bytes, |_, parse| print!("{:7.2}", shortest(parse)));
        println!();
    }
    println!("ms per MiB to replace aliases of models");
    let alias = |name: &str| (name == "fast").then_some("gpt-5-mini");
    for NamedBody { name, bytes } in bodies_with_models(MIB) {
        println!("{name:50}{:7.2}", shortest(&|| drop(with_models(&bytes, alias))));
    }
    println!("ms per MiB of an event stream whose usage is measured");
    for NamedBody { name, bytes } in [ordinary_stream(MIB)].into_iter().chain(streams(MIB)) {
        println!("{name:50}{:7.2}", shortest(&|| measure_stream(&bytes)));
    }
}

criterion_group!(benches, bench_decisions, bench_routes, bench_tokens, bench_hostile_bodies);
criterion_main!(benches);
