//! HTTP building blocks that do not depend on routes or the configuration: bodies, canonical paths, header rules, CORS,
//! RateLimit headers and protocol upgrades.

pub mod aws_signature;
pub mod body;
pub mod body_limits;
pub mod compression;
pub mod cors;
pub mod error_pages;
pub mod flow;
pub mod google_account;
pub mod grpc;
pub mod headers;
pub mod memory_guard;
pub(crate) mod problem;
pub mod ratelimit_headers;
pub mod request_body;
pub mod slow_readers;
pub mod target;
pub mod text;
pub mod upgrade;
pub mod url;
