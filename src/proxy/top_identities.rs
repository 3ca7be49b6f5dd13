//! The identities with the most denials or the highest cost of a limit in the last minutes, in bounded memory.
//!
//! Each minute has its own frequent-items sketch, a weighted Misra-Gries summary as in Apache DataSketches (Anderson,
//! Bevin, Lang, Liberty, Rhodes and Thaler, "A High-Performance Algorithm for Identifying Frequent Items in Data
//! Streams", 2017). A sketch keeps at most 96 identities. The error of a sum is bounded: it is never too high, and too
//! low by at most 3.5 / 128 = 2.7 % of the sum of all identities in that minute. The sketches of all workers and
//! minutes are merged when the list is read.

use std::hash::{Hash, Hasher};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use datasketches::frequencies::{ErrorType, FrequentItemsSketch};

use crate::identity::display::IdentityDisplay;
use crate::limiter::clock::monotonic;
use crate::limiter::key::Identity;

/// Capacity of a sketch, of which three quarters are used.
const SKETCH_CAPACITY: usize = 128;

/// Number of minutes kept, including the current one.
const WINDOW_MINUTES: usize = 5;
const MINUTE: Duration = Duration::from_secs(60);

/// Time that the list covers: the current minute and the minutes kept before it.
pub const WINDOW: Duration = Duration::from_secs(60 * WINDOW_MINUTES as u64);

/// An identity. Equality and hash use only the field `identity`.
#[derive(Debug, Clone)]
struct SketchKey {
    identity: Identity,
    name: IdentityDisplay,
}

impl PartialEq for SketchKey {
    fn eq(&self, other: &Self) -> bool {
        self.identity == other.identity
    }
}

impl Eq for SketchKey {}

impl Hash for SketchKey {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.identity.hash(state);
    }
}

type Sketch = FrequentItemsSketch<SketchKey>;

/// The denials or costs of one limit on one worker.
#[derive(Debug)]
pub struct TopIdentities {
    started_at: Instant,
    /// The sketches of the last minutes. The worker and readers of the list lock them.
    sketches: Mutex<[Option<(u64, Sketch)>; WINDOW_MINUTES]>,
}

/// An identity with a large sum.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeavyHitter {
    /// Hash of the identity.
    pub identity: Identity,
    /// Display name of the identity.
    pub name: IdentityDisplay,
    /// Lower bound of the identity's sum.
    pub lower_bound: u64,
    /// Upper bound of the identity's sum.
    pub upper_bound: u64,
}

impl Default for TopIdentities {
    fn default() -> Self {
        TopIdentities { started_at: monotonic(), sketches: Mutex::default() }
    }
}

impl TopIdentities {
    /// Add an amount to the sum of an identity: 1 for a denial, or a cost. `name` is called only if the sketch does not
    /// contain the identity.
    pub fn record(&self, identity: Identity, now: Instant, amount: u64, name: impl FnOnce() -> IdentityDisplay) {
        let minute = self.minute_index(now);
        let mut sketches = self.sketches.lock().unwrap_or_else(PoisonError::into_inner);
        let slot = &mut sketches[minute as usize % WINDOW_MINUTES];
        if slot.as_ref().is_none_or(|(sketch_minute, _)| *sketch_minute != minute) {
            *slot = new_sketch().map(|sketch| (minute, sketch));
        }
        let Some((_, sketch)) = slot else { return };
        let mut key = SketchKey { identity, name: IdentityDisplay::default() };
        if sketch.lower_bound(&key) == 0 {
            key.name = name();
        }
        sketch.update_with_count(key, amount);
    }

    /// Return the sum of a limit on all workers in the last minutes, and the `count` identities with the largest sums.
    pub fn top(workers: &[Arc<TopIdentities>], now: Instant, count: usize) -> (u64, Vec<HeavyHitter>) {
        let Some(mut sum) = new_sketch() else { return (0, Vec::new()) };
        for worker in workers {
            let minute = worker.minute_index(now);
            let sketches = worker.sketches.lock().unwrap_or_else(PoisonError::into_inner);
            let recent =
                sketches.iter().flatten().filter(|(sketch_minute, _)| sketch_minute + (WINDOW_MINUTES as u64) > minute);
            recent.for_each(|(_, sketch)| sum.merge(sketch));
        }
        let rows = sum.frequent_items(ErrorType::NoFalseNegatives).into_iter().take(count);
        let hitters = rows.map(|row| {
            let SketchKey { identity, name } = row.item().clone();
            HeavyHitter { identity, name, lower_bound: row.lower_bound(), upper_bound: row.upper_bound() }
        });
        (sum.total_weight(), hitters.collect())
    }

    fn minute_index(&self, now: Instant) -> u64 {
        now.saturating_duration_since(self.started_at).as_secs() / MINUTE.as_secs()
    }
}

fn new_sketch() -> Option<Sketch> {
    // Creating the sketch cannot fail, because the constant capacity is valid.
    FrequentItemsSketch::new(SKETCH_CAPACITY).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::identity::display::DisplayPart;

    fn name(text: &str) -> IdentityDisplay {
        IdentityDisplay([DisplayPart { label: "ip".into(), value: Some(text.into()) }].into())
    }

    fn top(denied: &[Arc<TopIdentities>], now: Instant) -> Vec<(u128, u64, u64)> {
        let (_, often) = TopIdentities::top(denied, now, 3);
        often.iter().map(|often| (often.identity.0, often.lower_bound, often.upper_bound)).collect()
    }

    #[test]
    fn top_denied_merges_workers_and_sorts_by_count() {
        let workers = [Arc::<TopIdentities>::default(), Arc::default()];
        let now = monotonic();
        for (worker, identity, times) in [(0, 1, 3), (0, 2, 5), (1, 1, 4), (1, 3, 1)] {
            for _ in 0..times {
                workers[worker].record(Identity(identity), now, 1, || name(&identity.to_string()));
            }
        }
        assert_eq!(top(&workers, now), [(1, 7, 7), (2, 5, 5), (3, 1, 1)]);
        let (all, often) = TopIdentities::top(&workers, now, 1);
        assert_eq!((all, often[0].name.clone(), often.len()), (13, name("1"), 1));
    }

    #[test]
    fn amounts_are_added_up() {
        let workers = [Arc::<TopIdentities>::default()];
        let now = monotonic();
        for (identity, amount) in [(1, 900), (2, 5), (1, 100), (3, 0)] {
            workers[0].record(Identity(identity), now, amount, || name("a"));
        }
        assert_eq!(top(&workers, now), [(1, 1000, 1000), (2, 5, 5)]);
    }

    #[test]
    fn top_denied_covers_only_the_window() {
        let denied = [Arc::<TopIdentities>::default()];
        let at = |minutes: u32| denied[0].started_at + MINUTE * minutes;
        denied[0].record(Identity(1), at(0), 1, || name("1"));
        denied[0].record(Identity(2), at(4), 1, || name("2"));
        assert_eq!(top(&denied, at(4)).len(), 2);
        assert_eq!(top(&denied, at(5)), [(2, 1, 1)], "the first minute is long ago");
        denied[0].record(Identity(3), at(5), 1, || name("3"));
        assert_eq!(top(&denied, at(8)).len(), 2, "its place was taken");
        assert_eq!(top(&denied, at(20)), []);
    }

    #[test]
    fn flood_of_identities_is_bounded_and_keeps_heavy_hitters() {
        let denied = [Arc::<TopIdentities>::default()];
        let (now, mut names) = (denied[0].started_at, 0);
        // One identity has 100,000 of 1.1 million denials, which is far more than the maximum error, so the list must
        // contain it.
        for stranger in 0..1_000_000_u128 {
            denied[0].record(Identity(1 << 64 | stranger), now, 1, || name("stranger"));
            if stranger % 10 == 0 {
                denied[0].record(Identity(7), now, 1, || {
                    names += 1;
                    name("the one")
                });
            }
        }
        let kept = denied[0]
            .sketches
            .lock()
            .unwrap()
            .iter()
            .flatten()
            .map(|(_, sketch)| sketch.num_active_items())
            .sum::<usize>();
        assert!(kept <= SKETCH_CAPACITY * 3 / 4, "{kept} are kept");
        let (all, often) = TopIdentities::top(&denied, now, 3);
        assert_eq!((all, often[0].identity, &often[0].name), (1_100_000, Identity(7), &name("the one")));
        let (at_least, at_most) = (often[0].lower_bound, often[0].upper_bound);
        assert!(at_least <= 100_000 && at_most >= 100_000 && at_most - at_least <= 1_100_000 * 35 / 1280, "{often:?}");
        assert!(names < 100, "the name of a known identity is not resolved again: {names}");
    }
}
