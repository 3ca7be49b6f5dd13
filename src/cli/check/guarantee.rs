//! What each size of a limit guarantees, whatever its callers do.

use serde::Serialize;

use crate::cost::Cost;
use crate::limit::algorithm::Rule;
use crate::limit::plan::{LimitSpec, LimitVariant};
use crate::limit::quota::CalendarUnit;
use crate::runtime::CompiledLimit;

/// Seconds of the shortest month and of the shortest year.
const SHORTEST_MONTH_SECONDS: f64 = 28.0 * 86_400.0;
const SHORTEST_YEAR_SECONDS: f64 = 365.0 * 86_400.0;

/// What a size of a limit guarantees.
#[derive(Debug, Serialize)]
pub(super) struct Guarantee<'a> {
    limit: &'a str,
    /// Whose size; none = of everybody who has no other.
    tier: Option<&'a str>,
    /// No more than this in any window, or in flight.
    max_admitted: u64,
    /// The length of the window; none = at the same time.
    window_seconds: Option<f64>,
    capacity: u64,
    /// So many more for each gateway, taken ahead.
    prefetch: u64,
    /// Whether the last responses may cost more than is left.
    overdraft: bool,
    shadow: bool,
}

/// Those of all sizes of a limit.
pub(super) fn guarantees(compiled: &CompiledLimit) -> impl Iterator<Item = Guarantee<'_>> {
    let limit = &compiled.limit;
    limit.variants().map(|(tier, variant)| Guarantee {
        limit: &limit.name,
        tier,
        max_admitted: variant.worst_case(),
        window_seconds: window_seconds(variant),
        capacity: variant.rule.capacity(),
        prefetch: prefetch_per_gateway(limit, variant),
        overdraft: compiled.cost.as_ref().is_some_and(Cost::is_deferred),
        shadow: limit.shadow,
    })
}

fn window_seconds(variant: &LimitVariant) -> Option<f64> {
    match (variant.quota.window_us, variant.quota.calendar) {
        _ if matches!(variant.rule, Rule::Concurrency(_)) => None,
        (Some(us), _) => Some(us as f64 / 1e6),
        (None, Some(CalendarUnit::Year)) => Some(SHORTEST_YEAR_SECONDS),
        (None, _) => Some(SHORTEST_MONTH_SECONDS),
    }
}

/// What a limit gives up by what gateways take ahead; nothing where units end with their window.
fn prefetch_per_gateway(limit: &LimitSpec, variant: &LimitVariant) -> u64 {
    if matches!(variant.rule, Rule::FixedWindow(_)) { 0 } else { limit.prefetch }
}

impl Guarantee<'_> {
    /// In words.
    pub(super) fn text(&self) -> String {
        let mut text = self.limit.to_owned();
        if let Some(tier) = self.tier {
            text += &format!(", tier {tier}");
        }
        text += &format!(": at most {} ", self.max_admitted);
        text += &match self.window_seconds {
            None => "at the same time".to_owned(),
            Some(SHORTEST_MONTH_SECONDS) => format!("in any 28 days, {} at once", self.capacity),
            Some(SHORTEST_YEAR_SECONDS) => format!("in any 365 days, {} at once", self.capacity),
            Some(seconds) if seconds.fract() == 0.0 => format!("in any {seconds} s, {} at once", self.capacity),
            Some(seconds) => format!("in any {} ms, {} at once", seconds * 1e3, self.capacity),
        };
        if self.overdraft {
            text += ", and what the last responses overdraw";
        }
        if self.prefetch > 0 {
            text += &format!(", and up to {} more for each gateway", self.prefetch);
        }
        if self.shadow {
            text += " (shadow: never denies)";
        }
        text
    }
}
