//! What a limit said to the requests of a log.

use std::collections::BTreeMap;

use super::resolve::{ReplayCheck, SeenIdentities};
use super::simulate::ReplayDecision;

/// Seconds of a step of a series; each is a multiple of the one before it.
const STEP_SECONDS: [u64; 13] = [1, 5, 15, 60, 300, 900, 3600, 10_800, 21_600, 43_200, 86_400, 604_800, 31_449_600];

/// Steps of a series at most.
const MAX_STEPS: u64 = 120;

/// How many identities are named.
pub const MAX_TOP_DENIED: usize = 10;

/// What was said to whom, and when.
#[derive(Debug, Clone, Default)]
pub struct LimitStats {
    /// Requests that asked.
    pub requests: u64,
    /// Those that it let pass.
    pub allowed: u64,
    /// Those that it denied.
    pub denied: u64,
    /// Those that another limit denied.
    pub denied_by_others: u64,
    /// Requests and denials of each identity, by number.
    by_identity: Vec<(u32, u32)>,
    /// The same over time.
    pub series: TimeSeries,
}

/// Requests and denials, by time.
#[derive(Debug, Clone, Default)]
pub struct TimeSeries {
    step_index: usize,
    steps: BTreeMap<u64, (u64, u64)>,
}

impl LimitStats {
    /// Counts an answer.
    pub fn record(&mut self, time_us: u64, check: ReplayCheck, decision: ReplayDecision) {
        self.requests += 1;
        let counter = match decision {
            ReplayDecision::Allowed => &mut self.allowed,
            ReplayDecision::Denied => &mut self.denied,
            ReplayDecision::DeniedByOther => &mut self.denied_by_others,
        };
        *counter += 1;
        let identity_index = check.identity_index as usize;
        if identity_index >= self.by_identity.len() {
            self.by_identity.resize(identity_index + 1, (0, 0));
        }
        let denied = decision == ReplayDecision::Denied;
        self.by_identity[identity_index].0 = self.by_identity[identity_index].0.saturating_add(1);
        self.by_identity[identity_index].1 = self.by_identity[identity_index].1.saturating_add(u32::from(denied));
        self.series.record(time_us / 1_000_000, denied);
    }

    /// The share of requests that it denied.
    pub fn denied_ratio(&self) -> f64 {
        self.denied as f64 / self.requests.max(1) as f64
    }

    /// Identities that asked.
    pub fn identities(&self) -> usize {
        self.by_identity.iter().filter(|(requests, _)| *requests > 0).count()
    }

    /// Identities that were denied.
    pub fn denied_identities(&self) -> usize {
        self.by_identity.iter().filter(|(_, denied)| *denied > 0).count()
    }

    /// Who was denied most: what to call them, their requests, their denials.
    pub fn top_denied(&self, seen: &SeenIdentities) -> Vec<(String, u32, u32)> {
        let mut indices: Vec<_> = (0..self.by_identity.len()).filter(|index| self.by_identity[*index].1 > 0).collect();
        indices.sort_by(|left, right| {
            let order = self.by_identity[*right].1.cmp(&self.by_identity[*left].1);
            order.then_with(|| seen.labels[*left].cmp(&seen.labels[*right]))
        });
        indices.truncate(MAX_TOP_DENIED);
        let to_row =
            |index: usize| (seen.labels[index].to_string(), self.by_identity[index].0, self.by_identity[index].1);
        indices.into_iter().map(to_row).collect()
    }
}

impl TimeSeries {
    fn record(&mut self, second: u64, is_denied: bool) {
        let step = self.steps.entry(second / STEP_SECONDS[self.step_index]).or_default();
        *step = (step.0 + 1, step.1 + u64::from(is_denied));
        while self.is_too_long() {
            self.step_index += 1;
            let factor = STEP_SECONDS[self.step_index] / STEP_SECONDS[self.step_index - 1];
            let mut wider: BTreeMap<u64, (u64, u64)> = BTreeMap::new();
            for (step, (requests, denied)) in std::mem::take(&mut self.steps) {
                let sum = wider.entry(step / factor).or_default();
                *sum = (sum.0 + requests, sum.1 + denied);
            }
            self.steps = wider;
        }
    }

    fn is_too_long(&self) -> bool {
        let ends = self.steps.first_key_value().zip(self.steps.last_key_value());
        self.step_index + 1 < STEP_SECONDS.len()
            && ends.is_some_and(|((first, _), (last, _))| last - first >= MAX_STEPS)
    }

    /// Seconds of a step.
    pub fn step_seconds(&self) -> u64 {
        STEP_SECONDS[self.step_index]
    }

    /// Each step from the first to the last: when it begins, seconds since the Unix epoch, its requests and its denials.
    pub fn points(&self) -> Vec<(u64, u64, u64)> {
        let ends = self.steps.first_key_value().zip(self.steps.last_key_value());
        let Some(((first, _), (last, _))) = ends else { return Vec::new() };
        // Beyond the widest step there may be a gap of centuries.
        let steps = (*first..=*last).take(2 * MAX_STEPS as usize);
        let point = |step: u64| {
            let (requests, denied) = self.steps.get(&step).copied().unwrap_or_default();
            (step * self.step_seconds(), requests, denied)
        };
        steps.map(point).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_series_is_bounded_and_keeps_all_counts() {
        let mut series = TimeSeries::default();
        for second in (0..200_000).chain([50]) {
            series.record(1_000_000 + second, second % 10 == 0);
        }
        let points = series.points();
        assert!(points.len() <= MAX_STEPS as usize, "{} points", points.len());
        assert_eq!(points.iter().map(|(_, requests, _)| requests).sum::<u64>(), 200_001);
        assert_eq!(points.iter().map(|(_, _, denied)| denied).sum::<u64>(), 20_001);
        assert!(points.windows(2).all(|pair| pair[1].0 - pair[0].0 == series.step_seconds()), "without gaps");
    }
}
