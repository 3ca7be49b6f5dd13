//! Who is being limited now: the identities that a limit has denied most in the last minutes, in bounded memory.
//!
//! One frequent-items sketch for each minute (Anderson, Bevin, Lang, Liberty, Rhodes and Thaler, "A High-Performance Algorithm
//! for Identifying Frequent Items in Data Streams", 2017; a weighted Misra-Gries summary, as Apache DataSketches has it). It
//! keeps at most 96 identities; what it says of one is short by at most 3.5 / 128 = 2.7 % of all denials of that minute, and
//! never too much. Sketches of workers and of minutes are added up when somebody asks.

use std::hash::{Hash, Hasher};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use datasketches::frequencies::{ErrorType, FrequentItemsSketch};

use crate::identity::name::Name;
use crate::limit::clock::monotonic;
use crate::limit::key::Identity;

/// Places of a sketch; three quarters of them are used.
const PLACES: usize = 128;

/// A minute that is over is still now for so many more.
const MINUTES: usize = 5;
const MINUTE: Duration = Duration::from_secs(60);

/// What is looked at: the current minute and those before.
pub const WINDOW: Duration = Duration::from_secs(60 * MINUTES as u64);

/// Somebody who was denied. Who he is goes by the hash alone.
#[derive(Debug, Clone)]
struct Somebody {
    identity: Identity,
    name: Name,
}

impl PartialEq for Somebody {
    fn eq(&self, other: &Self) -> bool {
        self.identity == other.identity
    }
}

impl Eq for Somebody {}

impl Hash for Somebody {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.identity.hash(state);
    }
}

type Sketch = FrequentItemsSketch<Somebody>;

/// The denials of one limit on one worker.
#[derive(Debug)]
pub struct Denied {
    began: Instant,
    /// By the worker alone, and whoever looks at it.
    minutes: Mutex<[Option<(u64, Sketch)>; MINUTES]>,
}

/// An identity that was denied often.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Often {
    /// Its hash.
    pub identity: Identity,
    /// What may be shown of it.
    pub name: Name,
    /// So often at least.
    pub at_least: u64,
    /// And at most.
    pub at_most: u64,
}

impl Default for Denied {
    fn default() -> Self {
        Denied { began: monotonic(), minutes: Mutex::default() }
    }
}

impl Denied {
    /// Somebody was denied now; his name is asked for when he is new.
    pub fn note(&self, identity: Identity, now: Instant, name: impl FnOnce() -> Name) {
        let minute = self.minute(now);
        let mut minutes = self.minutes.lock().unwrap_or_else(PoisonError::into_inner);
        let place = &mut minutes[minute as usize % MINUTES];
        if place.as_ref().is_none_or(|(of, _)| *of != minute) {
            *place = empty().map(|sketch| (minute, sketch));
        }
        let Some((_, sketch)) = place else { return };
        let mut somebody = Somebody { identity, name: Name::default() };
        if sketch.lower_bound(&somebody) == 0 {
            somebody.name = name();
        }
        sketch.update(somebody);
    }

    /// The denials of a limit on all workers in the last minutes: how many there were, and of whom most.
    pub fn most(workers: &[Arc<Denied>], now: Instant, count: usize) -> (u64, Vec<Often>) {
        let Some(mut sum) = empty() else { return (0, Vec::new()) };
        for worker in workers {
            let minute = worker.minute(now);
            let minutes = worker.minutes.lock().unwrap_or_else(PoisonError::into_inner);
            let recent = minutes.iter().flatten().filter(|(of, _)| of + (MINUTES as u64) > minute);
            recent.for_each(|(_, sketch)| sum.merge(sketch));
        }
        let rows = sum.frequent_items(ErrorType::NoFalseNegatives).into_iter().take(count);
        let often = rows.map(|row| {
            let Somebody { identity, name } = row.item().clone();
            Often { identity, name, at_least: row.lower_bound(), at_most: row.upper_bound() }
        });
        (sum.total_weight(), often.collect())
    }

    fn minute(&self, now: Instant) -> u64 {
        now.saturating_duration_since(self.began).as_secs() / MINUTE.as_secs()
    }
}

fn empty() -> Option<Sketch> {
    // The number of places is one that there can be.
    FrequentItemsSketch::new(PLACES).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::identity::name::Shown;

    fn name(text: &str) -> Name {
        Name([Shown { word: "ip".into(), value: Some(text.into()) }].into())
    }

    fn most(denied: &[Arc<Denied>], now: Instant) -> Vec<(u128, u64, u64)> {
        let (_, often) = Denied::most(denied, now, 3);
        often.iter().map(|often| (often.identity.0, often.at_least, often.at_most)).collect()
    }

    #[test]
    fn who_was_denied_most_comes_first_of_all_workers_with_his_name() {
        let workers = [Arc::<Denied>::default(), Arc::default()];
        let now = monotonic();
        for (worker, identity, times) in [(0, 1, 3), (0, 2, 5), (1, 1, 4), (1, 3, 1)] {
            for _ in 0..times {
                workers[worker].note(Identity(identity), now, || name(&identity.to_string()));
            }
        }
        assert_eq!(most(&workers, now), [(1, 7, 7), (2, 5, 5), (3, 1, 1)]);
        let (all, often) = Denied::most(&workers, now, 1);
        assert_eq!((all, often[0].name.clone(), often.len()), (13, name("1"), 1));
    }

    #[test]
    fn now_is_the_last_minutes() {
        let denied = [Arc::<Denied>::default()];
        let at = |minutes: u32| denied[0].began + MINUTE * minutes;
        denied[0].note(Identity(1), at(0), || name("1"));
        denied[0].note(Identity(2), at(4), || name("2"));
        assert_eq!(most(&denied, at(4)).len(), 2);
        assert_eq!(most(&denied, at(5)), [(2, 1, 1)], "the first minute is long ago");
        denied[0].note(Identity(3), at(5), || name("3"));
        assert_eq!(most(&denied, at(8)).len(), 2, "its place was taken");
        assert_eq!(most(&denied, at(20)), []);
    }

    #[test]
    fn a_flood_of_strangers_takes_bounded_memory_and_hides_nobody() {
        let denied = [Arc::<Denied>::default()];
        let (now, mut names) = (denied[0].began, 0);
        // Of 1.1 million denials one identity in the flood has 100,000: far more than what may be missed.
        for stranger in 0..1_000_000_u128 {
            denied[0].note(Identity(1 << 64 | stranger), now, || name("stranger"));
            if stranger % 10 == 0 {
                denied[0].note(Identity(7), now, || {
                    names += 1;
                    name("the one")
                });
            }
        }
        let kept = denied[0]
            .minutes
            .lock()
            .unwrap()
            .iter()
            .flatten()
            .map(|(_, sketch)| sketch.num_active_items())
            .sum::<usize>();
        assert!(kept <= PLACES * 3 / 4, "{kept} are kept");
        let (all, often) = Denied::most(&denied, now, 3);
        assert_eq!((all, often[0].identity, &often[0].name), (1_100_000, Identity(7), &name("the one")));
        let (at_least, at_most) = (often[0].at_least, often[0].at_most);
        assert!(at_least <= 100_000 && at_most >= 100_000 && at_most - at_least <= 1_100_000 * 35 / 1280, "{often:?}");
        assert!(names < 100, "the name of somebody who is known is not asked for: {names}");
    }
}
