//! The condition of a server, as health checks and requests find it. Time comes in as a value.

use std::time::{Duration, Instant};

/// A server that does not take connections is passed over for this time, while others are there.
const PASS_OVER: Duration = Duration::from_secs(1);

/// An ejection lasts at most so many times its first time.
const MOST_EJECTIONS: u32 = 10;

/// Steps of a slow start: of these, a server that is back takes two at first.
pub(super) const STEPS: u32 = 20;
const FIRST_STEP: u32 = 2;

/// `outlier_detection`
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EjectSettings {
    /// So many errors in a row put a server out.
    pub errors: u32,
    /// For this long the first time, twice the second, ten times at most.
    pub time: Duration,
}

/// Whether requests should go to a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Standing {
    /// They should.
    In,
    /// Requests have failed.
    Ejected,
    /// Health checks fail.
    Down,
}

/// What is known of a server.
#[derive(Debug, Default)]
pub(super) struct Condition {
    down: bool,
    /// Checks in a row that say otherwise.
    otherwise: u32,
    /// Until when it is out.
    ejected: Option<Instant>,
    /// In a row; those before are forgotten with time.
    ejections: u32,
    /// The end of the last one.
    forgiven: Option<Instant>,
    passed_over: Option<Instant>,
    /// Since when it takes requests again.
    back: Option<Instant>,
}

impl Condition {
    /// Of an address that is new at this instant, among others.
    pub(super) fn joining(now: Instant) -> Self {
        Condition { back: Some(now), ..Condition::default() }
    }

    /// Forgets what health checks have said.
    pub(super) fn uncheck(&mut self) {
        (self.down, self.otherwise) = (false, 0);
    }

    /// Counts a health check; whether the server is healthy from now on, if that has changed.
    pub(super) fn checked(
        &mut self,
        passed: bool,
        now: Instant,
        unhealthy_after: u32,
        healthy_after: u32,
    ) -> Option<bool> {
        if passed != self.down {
            self.otherwise = 0;
            return None;
        }
        self.otherwise += 1;
        if self.otherwise < if self.down { healthy_after } else { unhealthy_after } {
            return None;
        }
        self.otherwise = 0;
        self.down = !self.down;
        if !self.down {
            self.back = Some(now);
        }
        Some(!self.down)
    }

    /// Puts the server out, and says for how long; not if it is out already.
    pub(super) fn eject(&mut self, now: Instant, time: Duration) -> Option<Duration> {
        if self.ejected.is_some_and(|until| until > now) {
            return None;
        }
        self.return_if_due(now);
        // One is forgotten for each such time without another.
        let quiet = self.forgiven.map_or(Duration::ZERO, |since| now.saturating_duration_since(since));
        let forgotten = (quiet.as_millis() / time.as_millis().max(1)).min(u128::from(MOST_EJECTIONS)) as u32;
        self.ejections = (self.ejections.saturating_sub(forgotten) + 1).min(MOST_EJECTIONS);
        let time = time * self.ejections;
        self.ejected = Some(now + time);
        Some(time)
    }

    /// Ends an ejection whose time is over; whether there was one.
    pub(super) fn return_if_due(&mut self, now: Instant) -> bool {
        let due = self.ejected.filter(|until| *until <= now);
        if due.is_some() {
            (self.ejected, self.forgiven, self.back) = (None, due, due);
        }
        due.is_some()
    }

    /// It did not take a connection; whether that is news.
    pub(super) fn pass_over(&mut self, now: Instant) -> bool {
        let news = !self.is_passed_over(now);
        self.passed_over = Some(now + PASS_OVER);
        news
    }

    pub(super) fn is_passed_over(&self, now: Instant) -> bool {
        self.passed_over.is_some_and(|until| until > now)
    }

    pub(super) fn standing(&self, now: Instant) -> Standing {
        match self.ejected {
            _ if self.down => Standing::Down,
            Some(until) if until > now => Standing::Ejected,
            _ => Standing::In,
        }
    }

    /// The part of its weight that it has, in [`STEPS`].
    pub(super) fn steps(&self, now: Instant, slow_start: Duration) -> u32 {
        let Some(back) = self.back.filter(|_| !slow_start.is_zero()) else { return STEPS };
        let part = now.saturating_duration_since(back).as_secs_f64() / slow_start.as_secs_f64();
        FIRST_STEP + (part.min(1.0) * f64::from(STEPS - FIRST_STEP)) as u32
    }

    /// When any of this will be different, if nothing happens before.
    pub(super) fn next_change(&self, now: Instant, slow_start: Duration) -> Option<Instant> {
        let steps = self.steps(now, slow_start);
        let step = self.back.filter(|_| steps < STEPS).map(|back| {
            // A little later, so that the step is certainly over.
            back + slow_start * (steps - FIRST_STEP + 1) / (STEPS - FIRST_STEP) + Duration::from_millis(1)
        });
        let passed_over = self.passed_over.filter(|until| *until > now);
        [self.ejected, passed_over, step].into_iter().flatten().min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limit::clock::monotonic;

    const S: Duration = Duration::from_secs(1);

    #[test]
    fn checks_count_in_a_row() {
        let (mut condition, now) = (Condition::default(), monotonic());
        let mut check = |passed| condition.checked(passed, now, 3, 2);
        for (passed, change) in [
            (false, None),
            (false, None),
            (true, None),
            (false, None),
            (false, None),
            (false, Some(false)),
            (false, None),
            (true, None),
            (false, None),
            (true, None),
            (true, Some(true)),
            (true, None),
        ] {
            assert_eq!(check(passed), change);
        }
    }

    #[test]
    fn ejections_grow_to_ten_times_and_are_forgotten() {
        let (mut condition, mut now) = (Condition::default(), monotonic());
        for times in [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 10] {
            let time = condition.eject(now, 10 * S).unwrap();
            assert_eq!(time, 10 * S * times);
            assert_eq!(condition.eject(now + time - S, 10 * S), None, "it is out already");
            assert_eq!(condition.standing(now + time - S), Standing::Ejected);
            assert_eq!(condition.standing(now + time), Standing::In);
            now += time;
        }
        assert!(condition.return_if_due(now) && !condition.return_if_due(now));
        // Three of ten are forgotten, then this one counts.
        assert_eq!(condition.eject(now + 35 * S, 10 * S), Some(80 * S));
        assert_eq!(condition.eject(now + 10_000 * S, 10 * S), Some(10 * S), "all are forgotten");
    }

    #[test]
    fn a_slow_start_is_linear() {
        let now = monotonic();
        let condition = Condition::joining(now);
        let steps = |after: Duration| condition.steps(now + after, 18 * S);
        assert_eq!((steps(Duration::ZERO), steps(9 * S), steps(18 * S), steps(100 * S)), (2, 11, 20, 20));
        assert_eq!(condition.steps(now, Duration::ZERO), STEPS, "without one it has all of its weight");
        let mut changes = Vec::new();
        let mut at = now;
        while let Some(next) = condition.next_change(at, 18 * S) {
            assert_eq!(condition.steps(next, 18 * S), condition.steps(at, 18 * S) + 1);
            changes.push(next);
            at = next;
        }
        assert_eq!(changes.len(), 18);
    }

    #[test]
    fn a_server_without_connections_is_passed_over_for_a_second() {
        let (mut condition, now) = (Condition::default(), monotonic());
        assert!(condition.pass_over(now) && !condition.pass_over(now + S / 2));
        assert!(condition.is_passed_over(now + S) && !condition.is_passed_over(now + 2 * S));
        assert_eq!(condition.next_change(now, Duration::ZERO), Some(now + S + S / 2));
        assert_eq!(condition.next_change(now + 2 * S, Duration::ZERO), None);
    }
}
