//! What the operator sees: logs, metrics and traces. Takes plain values, no types of the domain.

pub mod access;
pub mod log;
pub mod log_file;
pub mod metrics;
pub mod outbox;
pub mod spans;
mod throttle;
pub mod trace;
