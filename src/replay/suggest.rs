//! The smallest quota that denies fewer than a share of the requests of a log, found by replaying it.

use std::sync::Arc;

use super::resolve::{Asked, Resolver};
use super::simulate::{Moment, Said, Simulation};
use super::size::sized;
use super::tally::Tally;
use super::view::{Subject, View};
use crate::limit::algorithm::Rule;
use crate::limit::plan::LimitVariant;

/// The requests of a log that limits had a say in.
#[derive(Debug, Default)]
pub struct Kept {
    /// Each with the place behind its last [`Asked`].
    pub moments: Vec<(Moment, usize)>,
    /// What limits were asked.
    pub asked: Vec<Asked>,
}

/// A size that would do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Suggestion {
    /// No smaller one does. Other limits stay as they are.
    Smallest {
        /// Its quota.
        quota: String,
        /// Its burst, where that is another number.
        burst: Option<u64>,
        /// What it denies.
        denied: u64,
    },
    /// However large it is, it denies too many.
    None,
}

/// Counts up to this are tried one by one; larger ones have three digits.
const EXACT: u64 = 1000;

/// The number of the largest count: beyond that none can be counted exactly.
const LARGEST: u64 = EXACT + 900 * 13;

/// The count with this number: 1, 2, … 999, 1000, 1010, … 9990, 10000, 10100, …
fn count(number: u64) -> u64 {
    match number.checked_sub(EXACT) {
        None => number,
        Some(beyond) => (100 + beyond % 900) * 10_u64.pow((beyond / 900) as u32 + 1),
    }
}

/// The number of the smallest such count that is at least this one.
fn number(wanted: u64) -> u64 {
    let (mut below, mut above) = (0, LARGEST);
    while above - below > 1 {
        let middle = (below + above) / 2;
        if count(middle) >= wanted { above = middle } else { below = middle }
    }
    above
}

impl Kept {
    /// The smallest quota of a subject that denies fewer than `target` of those who asked, to three digits.
    pub(super) fn suggest(
        &self,
        view: &View,
        resolver: &Resolver<'_>,
        subject: usize,
        tally: &Tally,
        target: f64,
    ) -> Suggestion {
        let most = ((target * tally.requests as f64).ceil() as u64).saturating_sub(1);
        let does = |number| {
            let plan = Self::plan(view, subject, count(number))?;
            let denied = self.denied(view, resolver, subject, plan.clone(), most)?;
            Some((plan, denied))
        };
        let now = number(view.subjects[subject].plan.quota.count);
        let (mut below, mut above) = (0, now);
        let mut found = if tally.denied <= most { does(now) } else { None };
        let mut step = 1;
        while found.is_none() {
            if above >= LARGEST {
                return Suggestion::None;
            }
            below = above;
            above = (above + step).min(LARGEST);
            step *= 2;
            found = does(above);
        }
        while above - below > 1 {
            let middle = (below + above) / 2;
            match does(middle) {
                Some(smaller) => (found, above) = (Some(smaller), middle),
                None => below = middle,
            }
        }
        let Some((plan, denied)) = found else { return Suggestion::None };
        let burst = match &plan.rule {
            Rule::TokenBucket(bucket) => Some(bucket.burst).filter(|burst| *burst != plan.quota.count),
            _ => None,
        };
        Suggestion::Smallest { quota: plan.quota.to_string(), burst, denied }
    }

    /// The subject in another size, its burst in proportion; none if it cannot have it.
    fn plan(view: &View, subject: usize, count: u64) -> Option<Arc<LimitVariant>> {
        let Subject { limit, plan: now, .. } = &view.subjects[subject];
        let burst = match &now.rule {
            Rule::TokenBucket(bucket) => {
                let burst = u128::from(bucket.burst) * u128::from(count);
                u64::try_from(burst.div_ceil(u128::from(now.quota.count))).ok()
            }
            _ => None,
        };
        sized(&view.runtime, limit, now.quota, count, burst)
    }

    /// What a subject denies in this size; none if that is more than `most`.
    fn denied(
        &self,
        view: &View,
        resolver: &Resolver<'_>,
        subject: usize,
        plan: Arc<LimitVariant>,
        most: u64,
    ) -> Option<u64> {
        let mut simulation = Simulation::new(view);
        simulation.learn(&resolver.sizes);
        simulation.resize(subject, plan);
        let (mut denied, mut start) = (0, 0);
        for (moment, end) in &self.moments {
            let asked = &self.asked[start..*end];
            start = *end;
            let said = simulation.decide(*moment, asked, &resolver.seen);
            let of_subject = asked.iter().zip(said).filter(|(asked, _)| usize::from(asked.subject) == subject);
            denied += of_subject.filter(|(_, said)| **said == Said::Denied).count() as u64;
            if denied > most {
                return None;
            }
        }
        Some(denied)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_have_three_digits() {
        for (at, expected) in [(1, 1), (999, 999), (1000, 1000), (1001, 1010), (1899, 9990), (1900, 10_000)] {
            assert_eq!(count(at), expected);
            assert_eq!(number(expected), at, "{expected}");
        }
        assert_eq!(count(number(1234)), 1240);
        assert!((1..LARGEST).all(|number| count(number) < count(number + 1)));
        assert!(count(LARGEST) < crate::limit::quota::EXACT_INTEGER_LIMIT * 2);
    }
}
