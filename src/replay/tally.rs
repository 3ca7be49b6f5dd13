//! What a limit said to the requests of a log.

use std::collections::BTreeMap;

use super::resolve::{Asked, Seen};
use super::simulate::Said;

/// Seconds of a step of a series; each is a multiple of the one before it.
const STEPS: [u64; 13] = [1, 5, 15, 60, 300, 900, 3600, 10_800, 21_600, 43_200, 86_400, 604_800, 31_449_600];

/// Steps of a series at most.
const LONGEST: u64 = 120;

/// How many identities are named.
pub const WORST: usize = 10;

/// What was said to whom, and when.
#[derive(Debug, Clone, Default)]
pub struct Tally {
    /// Requests that asked.
    pub requests: u64,
    /// Those that it let pass.
    pub allowed: u64,
    /// Those that it denied.
    pub denied: u64,
    /// Those that another limit denied.
    pub others: u64,
    /// Requests and denials of each identity, by number.
    each: Vec<(u32, u32)>,
    /// The same over time.
    pub series: Series,
}

/// Requests and denials, by time.
#[derive(Debug, Clone, Default)]
pub struct Series {
    width: usize,
    steps: BTreeMap<u64, (u64, u64)>,
}

impl Tally {
    /// Counts an answer.
    pub fn count(&mut self, at_us: u64, asked: Asked, said: Said) {
        self.requests += 1;
        let counter = match said {
            Said::Allowed => &mut self.allowed,
            Said::Denied => &mut self.denied,
            Said::Others => &mut self.others,
        };
        *counter += 1;
        let who = asked.who as usize;
        if who >= self.each.len() {
            self.each.resize(who + 1, (0, 0));
        }
        let denied = said == Said::Denied;
        self.each[who].0 = self.each[who].0.saturating_add(1);
        self.each[who].1 = self.each[who].1.saturating_add(u32::from(denied));
        self.series.count(at_us / 1_000_000, denied);
    }

    /// The share of requests that it denied.
    pub fn share(&self) -> f64 {
        self.denied as f64 / self.requests.max(1) as f64
    }

    /// Identities that asked.
    pub fn identities(&self) -> usize {
        self.each.iter().filter(|(requests, _)| *requests > 0).count()
    }

    /// Identities that were denied.
    pub fn denied_identities(&self) -> usize {
        self.each.iter().filter(|(_, denied)| *denied > 0).count()
    }

    /// Who was denied most: what to call them, their requests, their denials.
    pub fn worst(&self, seen: &Seen) -> Vec<(String, u32, u32)> {
        let mut denied: Vec<_> = (0..self.each.len()).filter(|who| self.each[*who].1 > 0).collect();
        denied.sort_by(|one, other| {
            let order = self.each[*other].1.cmp(&self.each[*one].1);
            order.then_with(|| seen.labels[*one].cmp(&seen.labels[*other]))
        });
        denied.truncate(WORST);
        let named = |who: usize| (seen.labels[who].to_string(), self.each[who].0, self.each[who].1);
        denied.into_iter().map(named).collect()
    }
}

impl Series {
    fn count(&mut self, second: u64, denied: bool) {
        let step = self.steps.entry(second / STEPS[self.width]).or_default();
        *step = (step.0 + 1, step.1 + u64::from(denied));
        while self.is_too_long() {
            self.width += 1;
            let factor = STEPS[self.width] / STEPS[self.width - 1];
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
        self.width + 1 < STEPS.len() && ends.is_some_and(|((first, _), (last, _))| last - first >= LONGEST)
    }

    /// Seconds of a step.
    pub fn step_s(&self) -> u64 {
        STEPS[self.width]
    }

    /// Each step from the first to the last: when it begins, seconds since the Unix epoch, its requests and its denials.
    pub fn points(&self) -> Vec<(u64, u64, u64)> {
        let ends = self.steps.first_key_value().zip(self.steps.last_key_value());
        let Some(((first, _), (last, _))) = ends else { return Vec::new() };
        // Beyond the widest step there may be a gap of centuries.
        let all = (*first..=*last).take(2 * LONGEST as usize);
        let point = |step: u64| {
            let (requests, denied) = self.steps.get(&step).copied().unwrap_or_default();
            (step * self.step_s(), requests, denied)
        };
        all.map(point).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_series_stays_short_and_loses_nothing() {
        let mut series = Series::default();
        for second in (0..200_000).chain([50]) {
            series.count(1_000_000 + second, second % 10 == 0);
        }
        let points = series.points();
        assert!(points.len() <= LONGEST as usize, "{} points", points.len());
        assert_eq!(points.iter().map(|(_, requests, _)| requests).sum::<u64>(), 200_001);
        assert_eq!(points.iter().map(|(_, _, denied)| denied).sum::<u64>(), 20_001);
        assert!(points.windows(2).all(|pair| pair[1].0 - pair[0].0 == series.step_s()), "without gaps");
    }
}
