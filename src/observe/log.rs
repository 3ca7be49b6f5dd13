//! Sets up the log of the process itself, on standard error.

use std::io::{IsTerminal, stderr};

use tracing_subscriber::EnvFilter;

/// How lines look.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// For people.
    Text,
    /// One object a line.
    Json,
}

/// Starts logging; a second call changes nothing.
pub fn start(format: Format, level: tracing::Level) {
    let filter = EnvFilter::new(format!("sluicegate={level},warn"));
    let lines = tracing_subscriber::fmt().with_env_filter(filter).with_target(false).with_writer(stderr);
    // An earlier subscriber, as in a test, stays.
    let _ = match format {
        Format::Text => lines.with_ansi(stderr().is_terminal()).try_init(),
        Format::Json => lines.json().flatten_event(true).try_init(),
    };
}
