//! Bounds what libraries log: one that warns of each thing a client does would fill the log.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use tokio::time::Duration;
use tracing::{Event, Subscriber, warn};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;

use crate::limit::clock::monotonic;

/// Lines of a library in each period.
const MAX_LINES_PER_PERIOD: u64 = 10;

/// How long a period is.
const PERIOD: Duration = Duration::from_secs(60);

/// Lets a few lines of each library through, and all of the gateway's own.
#[derive(Debug, Default)]
pub(super) struct DependencyLogThrottle(Mutex<HashMap<&'static str, Period>>);

#[derive(Debug, Clone, Copy)]
struct Period {
    started_at: Instant,
    line_count: u64,
}

impl DependencyLogThrottle {
    /// Whether a line may be written, and how many were not in the period before.
    fn admit(&self, library: &'static str) -> (bool, u64) {
        let mut periods = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let now = monotonic();
        let period = periods.entry(library).or_insert(Period { started_at: now, line_count: 0 });
        let mut suppressed = 0;
        if now - period.started_at >= PERIOD {
            suppressed = period.line_count.saturating_sub(MAX_LINES_PER_PERIOD);
            *period = Period { started_at: now, line_count: 0 };
        }
        period.line_count += 1;
        (period.line_count <= MAX_LINES_PER_PERIOD, suppressed)
    }
}

impl<S: Subscriber> Layer<S> for DependencyLogThrottle {
    fn event_enabled(&self, event: &Event<'_>, _: Context<'_, S>) -> bool {
        let library = event.metadata().target().split("::").next().unwrap_or_default();
        if library == "sluicegate" {
            return true;
        }
        let (admitted, suppressed) = self.admit(library);
        if suppressed > 0 {
            warn!(library, suppressed, "a library logged more than 10 lines a minute");
        }
        admitted
    }
}
