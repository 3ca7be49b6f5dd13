//! Sluicegate: an HTTP gateway with exact, distributed rate limits.
//!
//! Follow a request: [`server`] accepts its connection, [`proxy::Gateway::handle`] finds its route ([`route`]), its
//! identities ([`identity`]), asks its limits ([`limit`]) and sends it on ([`upstream`]) or turns it down ([`reply`]).
//! [`config`] is the file as written, [`runtime`] the same ready to use.

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
pub mod metrics;
pub mod proxy;
pub mod routing;
pub mod snapshot;
pub mod telemetry;
pub mod tls;
pub mod tools;
pub mod upstream;
