//! Sluicegate: an HTTP gateway with exact, distributed rate limits, and its rate limiter as a library.
//!
//! # The limiter
//!
//! [`limiter`] decides whether a request may pass. It knows no HTTP and needs no other part of the gateway. It counts in
//! the memory of the process or in Redis, with the algorithms of the gateway. `examples/embed.rs` is a complete HTTP
//! service; `docs/how-to/embed.md` explains the choices.
//!
//! ```
//! use std::time::Duration;
//!
//! use sluicegate::limiter::Limiter;
//! use sluicegate::limiter::decision::LimitCheck;
//! use sluicegate::limiter::key::IdentityHasher;
//! use sluicegate::limiter::spec::LimitSpec;
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // One login per minute and user. The store gets keyed hashes of user names.
//! let hasher = IdentityHasher::new("a secret");
//! let limit = LimitSpec::token_bucket(&hasher, "login", "1/min".parse()?)?;
//! let limiter = Limiter::in_memory(100_000);
//!
//! let alice = hasher.hash(b"alice");
//! assert!(limiter.check(&[LimitCheck::new(&limit, alice)]).await?.admitted);
//!
//! let decision = limiter.check(&[LimitCheck::new(&limit, alice)]).await?;
//! assert!(!decision.admitted);
//! let retry_after = Duration::from_micros(decision.retry_us().expect("the bucket refills"));
//! println!("login of alice denied, retry after {} s", retry_after.as_secs_f64().ceil());
//! assert!(retry_after <= Duration::from_secs(60));
//!
//! let bob = hasher.hash(b"bob");
//! assert!(limiter.check(&[LimitCheck::new(&limit, bob)]).await?.admitted);
//! # Ok(())
//! # }
//! ```
//!
//! # The gateway
//!
//! A request walks through [`listener`], [`proxy::Gateway::handle`], [`routing`], [`identity`], [`limiter`] and
//! [`upstream`]. [`config`] is the file as written, [`snapshot`] the compiled configuration. `ARCHITECTURE.md` describes
//! each step.
//!
//! # Stability
//!
//! Before 1.0 the library has no stability promise: any release may change any item of this crate. Pin the exact version.
//! [`limiter`] and [`http::ratelimit_headers`] are meant for other programs. The other modules are public only for the
//! binary, the tests and the benchmarks of this repository.

// The futures of a connection are nested deeper than the 128 types that rustc follows to see that they are `Send`.
#![recursion_limit = "256"]
// Tests and benches may; the library returns errors and writes where it is told to.
#![warn(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout, clippy::print_stderr)]

pub mod admin;
pub mod app;
pub mod cli;
pub mod config;
pub mod http;
pub mod identity;
pub mod limiter;
pub mod listener;
pub mod payload;
pub mod proxy;
pub mod routing;
pub mod snapshot;
pub mod telemetry;
pub mod tls;
pub mod tools;
pub mod upstream;

/// Compiles and runs the Rust code of the page.
#[cfg(doctest)]
#[doc = include_str!("../docs/how-to/embed.md")]
pub struct EmbeddingPage;
