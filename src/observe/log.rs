//! Sets up the log of the process itself, on standard error.

use std::io::{IsTerminal, stderr};

use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer, fmt};

use super::throttle::Throttle;

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
    let lines = fmt::layer().with_target(false).with_writer(stderr);
    let lines = match format {
        Format::Text => lines.with_ansi(stderr().is_terminal()).boxed(),
        Format::Json => lines.json().flatten_event(true).boxed(),
    };
    // An earlier subscriber, as in a test, stays.
    let _ = tracing_subscriber::registry().with(filter).with(lines).with(Throttle::default()).try_init();
}
