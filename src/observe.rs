//! What the operator sees: logs. Takes plain values, no types of the domain.

pub mod access;
pub mod log;
