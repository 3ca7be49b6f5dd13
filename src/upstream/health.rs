//! Health state of an endpoint. The functions do not read the clock: the current time is an argument.

use std::time::{Duration, Instant};

/// Time for which an endpoint receives no requests after a failed connection attempt, if other endpoints are reachable.
const CONNECT_BACKOFF: Duration = Duration::from_secs(1);

/// Maximum duration of an ejection, in multiples of `base_ejection_time`.
const MAX_EJECTION_MULTIPLIER: u32 = 10;

/// Number of steps into which slow start divides the full weight of an endpoint. A recovered endpoint starts with
/// `SLOW_START_FIRST_STEP` steps, which is a tenth of its full weight.
pub(super) const SLOW_START_STEPS: u32 = 20;
const SLOW_START_FIRST_STEP: u32 = 2;

/// Health of an endpoint for load balancing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Health {
    /// The endpoint is healthy.
    Healthy,
    /// The endpoint is ejected after failed requests.
    Ejected,
    /// The endpoint is unhealthy because of failed health checks.
    Unhealthy,
}

/// The result of the last attempt to connect to an endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Contact {
    /// The gateway has not connected to the endpoint yet.
    #[default]
    None,
    /// The endpoint has accepted the last connection.
    Reached,
    /// The last attempt failed.
    Failed,
}

/// Health state of one endpoint.
#[derive(Debug, Default)]
pub(super) struct HealthState {
    /// The last attempt to connect. It has no effect on load balancing.
    pub(super) contact: Contact,
    is_unhealthy: bool,
    /// Number of consecutive checks whose result contradicts `is_unhealthy`.
    contrary_checks: u32,
    /// End of the current ejection.
    ejected_until: Option<Instant>,
    /// Number of recent ejections. The number decreases by one for each base ejection time that passes without an
    /// ejection.
    consecutive_ejections: u32,
    /// End of the last ejection.
    ejection_ended_at: Option<Instant>,
    connect_backoff_until: Option<Instant>,
    /// Start of slow start: the time at which the endpoint was added or recovered.
    recovered_at: Option<Instant>,
}

impl HealthState {
    /// Create the state of an endpoint that is added at `now` and starts slowly.
    pub(super) fn joined_at(now: Instant) -> Self {
        HealthState { recovered_at: Some(now), ..HealthState::default() }
    }

    /// Forget the results of health checks. An endpoint that is unhealthy because of failed checks becomes healthy.
    pub(super) fn reset_checks(&mut self) {
        (self.is_unhealthy, self.contrary_checks) = (false, 0);
    }

    /// Forget all ejections. An endpoint that is ejected becomes healthy.
    pub(super) fn reset_ejections(&mut self) {
        (self.ejected_until, self.consecutive_ejections, self.ejection_ended_at) = (None, 0, None);
    }

    /// Record the result of a health check. If the health changes, return the new health: `true` for healthy.
    pub(super) fn record_check(
        &mut self,
        passed: bool,
        now: Instant,
        unhealthy_after: u32,
        healthy_after: u32,
    ) -> Option<bool> {
        if passed != self.is_unhealthy {
            self.contrary_checks = 0;
            return None;
        }
        self.contrary_checks += 1;
        if self.contrary_checks < if self.is_unhealthy { healthy_after } else { unhealthy_after } {
            return None;
        }
        self.contrary_checks = 0;
        self.is_unhealthy = !self.is_unhealthy;
        if !self.is_unhealthy {
            self.recovered_at = Some(now);
        }
        Some(!self.is_unhealthy)
    }

    /// Eject the endpoint for a multiple of `time`, the base ejection time. Return the duration of the ejection, or
    /// `None` if the endpoint is already ejected.
    pub(super) fn eject(&mut self, now: Instant, time: Duration) -> Option<Duration> {
        if self.ejected_until.is_some_and(|until| until > now) {
            return None;
        }
        self.end_ejection_if_due(now);
        // Reduce `consecutive_ejections` by one for each base ejection time that has passed since the last ejection
        // ended.
        let time_since_ejection =
            self.ejection_ended_at.map_or(Duration::ZERO, |since| now.saturating_duration_since(since));
        let forgotten =
            (time_since_ejection.as_millis() / time.as_millis().max(1)).min(u128::from(MAX_EJECTION_MULTIPLIER)) as u32;
        self.consecutive_ejections =
            (self.consecutive_ejections.saturating_sub(forgotten) + 1).min(MAX_EJECTION_MULTIPLIER);
        let time = time * self.consecutive_ejections;
        self.ejected_until = Some(now + time);
        Some(time)
    }

    /// End an ejection that has expired. Return whether an ejection ended.
    pub(super) fn end_ejection_if_due(&mut self, now: Instant) -> bool {
        let due = self.ejected_until.filter(|until| *until <= now);
        if due.is_some() {
            (self.ejected_until, self.ejection_ended_at, self.recovered_at) = (None, due, due);
        }
        due.is_some()
    }

    /// Start the connect backoff, or extend it if it has already started. Return whether the connect backoff has
    /// started with this call.
    pub(super) fn start_connect_backoff(&mut self, now: Instant) -> bool {
        self.contact = Contact::Failed;
        let is_new = !self.is_in_connect_backoff(now);
        self.connect_backoff_until = Some(now + CONNECT_BACKOFF);
        is_new
    }

    pub(super) fn is_in_connect_backoff(&self, now: Instant) -> bool {
        self.connect_backoff_until.is_some_and(|until| until > now)
    }

    pub(super) fn health(&self, now: Instant) -> Health {
        match self.ejected_until {
            _ if self.is_unhealthy => Health::Unhealthy,
            Some(until) if until > now => Health::Ejected,
            _ => Health::Healthy,
        }
    }

    /// Return the current weight in steps. [`SLOW_START_STEPS`] is the full weight.
    pub(super) fn weight_steps(&self, now: Instant, slow_start: Duration) -> u32 {
        let Some(back) = self.recovered_at.filter(|_| !slow_start.is_zero()) else { return SLOW_START_STEPS };
        let part = now.saturating_duration_since(back).as_secs_f64() / slow_start.as_secs_f64();
        SLOW_START_FIRST_STEP + (part.min(1.0) * f64::from(SLOW_START_STEPS - SLOW_START_FIRST_STEP)) as u32
    }

    /// Return the time at which the health or the weight of the endpoint changes next, unless an event changes it
    /// earlier.
    pub(super) fn next_change(&self, now: Instant, slow_start: Duration) -> Option<Instant> {
        let steps = self.weight_steps(now, slow_start);
        let step = self.recovered_at.filter(|_| steps < SLOW_START_STEPS).map(|back| {
            // Add one millisecond, because rounding could otherwise make `weight_steps` return the previous step at
            // this time.
            back + slow_start * (steps - SLOW_START_FIRST_STEP + 1) / (SLOW_START_STEPS - SLOW_START_FIRST_STEP)
                + Duration::from_millis(1)
        });
        let passed_over = self.connect_backoff_until.filter(|until| *until > now);
        [self.ejected_until, passed_over, step].into_iter().flatten().min()
    }
}

#[cfg(test)]
mod health_state_tests {
    use super::*;
    use crate::clock::monotonic;

    const S: Duration = Duration::from_secs(1);

    #[test]
    fn health_changes_after_consecutive_checks() {
        let mut health_state = HealthState::default();
        let now = monotonic();
        let mut check = |passed| health_state.record_check(passed, now, 3, 2);
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
    fn ejection_time_grows_to_ten_times_and_decays() {
        let mut health_state = HealthState::default();
        let mut now = monotonic();
        for times in [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 10] {
            let time = health_state.eject(now, 10 * S).unwrap();
            assert_eq!(time, 10 * S * times);
            assert_eq!(health_state.eject(now + time - S, 10 * S), None, "already ejected");
            assert_eq!(health_state.health(now + time - S), Health::Ejected);
            assert_eq!(health_state.health(now + time), Health::Healthy);
            now += time;
        }
        assert!(health_state.end_ejection_if_due(now) && !health_state.end_ejection_if_due(now));
        // After 35 s, the count of 10 decreases by three, and the new ejection adds one: 8 times 10 s.
        assert_eq!(health_state.eject(now + 35 * S, 10 * S), Some(80 * S));
        assert_eq!(health_state.eject(now + 10_000 * S, 10 * S), Some(10 * S), "the count has decreased to 0");
    }

    #[test]
    fn slow_start_increases_weight_linearly() {
        let now = monotonic();
        let health_state = HealthState::joined_at(now);
        let steps = |after: Duration| health_state.weight_steps(now + after, 18 * S);
        assert_eq!((steps(Duration::ZERO), steps(9 * S), steps(18 * S), steps(100 * S)), (2, 11, 20, 20));
        assert_eq!(health_state.weight_steps(now, Duration::ZERO), SLOW_START_STEPS, "full weight without slow start");
        let mut changes = Vec::new();
        let mut at = now;
        while let Some(next) = health_state.next_change(at, 18 * S) {
            assert_eq!(health_state.weight_steps(next, 18 * S), health_state.weight_steps(at, 18 * S) + 1);
            changes.push(next);
            at = next;
        }
        assert_eq!(changes.len(), 18);
    }

    #[test]
    fn failed_connect_starts_backoff_of_one_second() {
        let mut health_state = HealthState::default();
        let now = monotonic();
        assert!(health_state.start_connect_backoff(now) && !health_state.start_connect_backoff(now + S / 2));
        assert!(health_state.is_in_connect_backoff(now + S) && !health_state.is_in_connect_backoff(now + 2 * S));
        assert_eq!(health_state.next_change(now, Duration::ZERO), Some(now + S + S / 2));
        assert_eq!(health_state.next_change(now + 2 * S, Duration::ZERO), None);
    }
}
