//! What the operator sees: logs and metrics. Takes plain values, no types of the domain.

pub mod access;
pub mod log;
pub mod metrics;
