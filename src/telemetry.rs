//! Telemetry: the process log, the access log, the output of `/metrics`, and traces. This module does not depend on the
//! types of the limiter.

pub mod access_log;
pub mod log;
pub mod outcome;
pub mod prometheus;
pub mod trace;

/// Format a count with its noun, such as `1 key` or `2 keys`.
pub fn pluralize(number: u64, what: &str) -> String {
    format!("{number} {what}{}", if number == 1 { "" } else { "s" })
}
