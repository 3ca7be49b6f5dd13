//! What each size of a limit guarantees, whatever its callers do.

use serde::Serialize;

use crate::cost::Cost;
use crate::limit::algorithm::Rule;
use crate::limit::plan::{LimitSpec, LimitVariant};
use crate::limit::quota::CalendarUnit;
use crate::runtime::CompiledLimit;

/// Seconds of the shortest month and of the shortest year.
const MONTH: f64 = 28.0 * 86_400.0;
const YEAR: f64 = 365.0 * 86_400.0;

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
pub(super) fn guarantees(terms: &CompiledLimit) -> impl Iterator<Item = Guarantee<'_>> {
    let limit = &terms.limit;
    limit.variants().map(|(tier, plan)| Guarantee {
        limit: &limit.name,
        tier,
        max_admitted: plan.worst_case(),
        window_seconds: window(plan),
        capacity: plan.rule.capacity(),
        prefetch: ahead(limit, plan),
        overdraft: terms.cost.as_ref().is_some_and(Cost::is_deferred),
        shadow: limit.shadow,
    })
}

fn window(plan: &LimitVariant) -> Option<f64> {
    match (plan.quota.window_us, plan.quota.calendar) {
        _ if matches!(plan.rule, Rule::Concurrency(_)) => None,
        (Some(us), _) => Some(us as f64 / 1e6),
        (None, Some(CalendarUnit::Year)) => Some(YEAR),
        (None, _) => Some(MONTH),
    }
}

/// What a limit gives up by what gateways take ahead; nothing where units end with their window.
fn ahead(limit: &LimitSpec, plan: &LimitVariant) -> u64 {
    if matches!(plan.rule, Rule::FixedWindow(_)) { 0 } else { limit.prefetch }
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
            Some(MONTH) => format!("in any 28 days, {} at once", self.capacity),
            Some(YEAR) => format!("in any 365 days, {} at once", self.capacity),
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
