//! HTTP functions that are independent of routing and limits: canonical paths, header rules, bodies, response headers.
//! The module does not depend on limits or the configuration.

pub mod body;
pub mod body_limits;
pub mod cors;
pub mod flow;
pub mod headers;
pub(crate) mod problem;
pub mod ratelimit_headers;
pub mod request_body;
pub mod target;
pub mod upgrade;
