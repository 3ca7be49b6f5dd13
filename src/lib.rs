//! Sluicegate: an HTTP gateway with exact, distributed rate limits, and its rate limiter as a library.
//!
//! # The limiter
//!
//! [`limiter`] decides whether to admit a request. It is independent of HTTP and of the other modules of the gateway.
//! Its state is in the memory of the process or in Redis, and its algorithms are the same as those of the gateway.
//! `examples/embed.rs` is a complete HTTP service with limits, and `docs/how-to/embed.md` explains the options.
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
//! // Each user may log in once per minute. The store receives only keyed hashes of user names.
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
//! The gateway passes a request through [`listener`], [`proxy::Gateway::handle`], [`routing`], [`identity`],
//! [`limiter`] and [`upstream`]. [`config`] contains the types of the configuration files, and [`snapshot`] the
//! compiled configuration. `ARCHITECTURE.md` describes each step.
//!
//! # Stability
//!
//! Before 1.0, the library has no stability promise: any release may change any item of this crate. Depend on an exact
//! version. Only [`limiter`] and [`http::ratelimit_headers`] are intended for other programs. All other modules are
//! public only for the binary, the tests and the benchmarks of this repository.

// rustc checks that futures are `Send` to a nesting depth of 128 types by default. The futures of a connection are
// nested more deeply.
#![recursion_limit = "256"]
// Tests and benchmarks may print. The library returns errors, and writes only to outputs that the caller passes.
#![warn(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout, clippy::print_stderr)]

pub mod admin;
pub mod app;
mod boxed;
pub mod cli;
pub mod clock;
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

/// Compiles and runs the Rust code in `docs/how-to/embed.md` as a documentation test.
#[cfg(doctest)]
#[doc = include_str!("../docs/how-to/embed.md")]
pub struct EmbeddingPage;
