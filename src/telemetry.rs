//! What the operator sees: logs, metrics and traces. Takes plain values, no types of the domain.

pub mod access_log;
pub mod batch_writer;
pub mod log;
pub mod prometheus;
pub mod trace;

// Numbers in sentences.

/// `1 key`, `2 keys`.
pub fn pluralize(number: u64, what: &str) -> String {
    format!("{number} {what}{}", if number == 1 { "" } else { "s" })
}
