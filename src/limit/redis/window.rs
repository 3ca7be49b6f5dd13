//! How much one worker may have in flight to one server: an additive increase, multiplicative decrease window, as TCP Vegas keeps one
//! by the delay that its own load adds.

use tokio::time::Duration;

/// A call without keys weighs as much as so many keys: what it costs Redis to run the smallest script.
const CALL_WEIGHT: usize = 8;

/// The smallest window, and the first one, holds one full batch.
const MIN_WINDOW: usize = 128 + CALL_WEIGHT;

/// The largest holds sixteen: with a round trip of 40 ms they carry 50,000 checks a second.
const MAX_WINDOW: usize = 16 * MIN_WINDOW;

/// Replies after which the shortest round trip is forgotten: a server may have moved.
const ROUND_TRIP_RESET_REPLIES: u32 = 10_000;

/// The window.
#[derive(Debug)]
pub(super) struct InFlightWindow {
    size: usize,
    /// Whether no reply was slow yet: until then the window grows by all that is answered (slow start).
    slow_start: bool,
    /// The shortest of the last round trips.
    min_round_trip: Duration,
    replies: u32,
}

impl Default for InFlightWindow {
    fn default() -> Self {
        InFlightWindow { size: MIN_WINDOW, slow_start: true, min_round_trip: Duration::MAX, replies: 0 }
    }
}

impl InFlightWindow {
    /// What a call with so many keys weighs.
    pub(super) fn weight(keys: usize) -> usize {
        keys + CALL_WEIGHT
    }

    /// Whether a call with so many keys fits beside what is in flight.
    pub(super) fn has_room(&self, in_flight: usize, keys: usize) -> bool {
        in_flight + InFlightWindow::weight(keys) <= self.size
    }

    /// Learns from a reply to a call of this weight after this time: a delay of more than a quarter of what the timeout leaves over
    /// the shortest round trip halves the window. A smaller one lets it grow, where it was the window that `limited` what is in flight.
    pub(super) fn record_reply(&mut self, weight: usize, round_trip: Duration, timeout: Duration, is_limited: bool) {
        self.replies += 1;
        if self.replies == ROUND_TRIP_RESET_REPLIES {
            (self.replies, self.min_round_trip) = (0, Duration::MAX);
        }
        self.min_round_trip = self.min_round_trip.min(round_trip);
        if round_trip - self.min_round_trip > timeout.saturating_sub(self.min_round_trip) / 4 {
            (self.size, self.slow_start) = ((self.size / 2).max(MIN_WINDOW), false);
        } else if is_limited {
            self.size = (self.size + if self.slow_start { weight } else { CALL_WEIGHT }).min(MAX_WINDOW);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMEOUT: Duration = Duration::from_millis(50);

    fn size_after(window: &mut InFlightWindow, round_trips_ms: &[u64]) -> usize {
        round_trips_ms.iter().for_each(|ms| window.record_reply(MIN_WINDOW, Duration::from_millis(*ms), TIMEOUT, true));
        window.size
    }

    #[test]
    fn window_grows_on_prompt_replies_and_halves_on_slow_ones() {
        let mut window = InFlightWindow::default();
        assert!(window.has_room(0, 128) && !window.has_room(1, 128), "a full batch always fits");
        assert_eq!(size_after(&mut window, &[1; 3]), 4 * MIN_WINDOW, "slow start");
        assert_eq!(size_after(&mut window, &[13]), 5 * MIN_WINDOW, "12 ms more than the shortest of 1 ms");
        assert_eq!(size_after(&mut window, &[14]), 5 * MIN_WINDOW / 2);
        assert_eq!(size_after(&mut window, &[1; 2]), 5 * MIN_WINDOW / 2 + 2 * CALL_WEIGHT, "additive from then on");
        assert_eq!(size_after(&mut window, &[1; 1000]), MAX_WINDOW);
        assert_eq!(size_after(&mut window, &[20; 10]), MIN_WINDOW);
    }

    #[test]
    fn window_does_not_grow_while_it_has_room() {
        let mut window = InFlightWindow::default();
        for _ in 0..1000 {
            window.record_reply(CALL_WEIGHT, Duration::from_millis(1), TIMEOUT, false);
        }
        assert_eq!(window.size, MIN_WINDOW);
    }

    #[test]
    fn distant_server_is_not_slow() {
        let mut window = InFlightWindow::default();
        assert_eq!(size_after(&mut window, &[40; 1000]), MAX_WINDOW);
        assert_eq!(size_after(&mut window, &[43]), MAX_WINDOW / 2, "of 10 ms that are left");
    }

    #[test]
    fn min_round_trip_is_forgotten() {
        let mut window = InFlightWindow::default();
        size_after(&mut window, &[1; 10]);
        let replies = vec![30; 2 * ROUND_TRIP_RESET_REPLIES as usize];
        assert_eq!(size_after(&mut window, &replies), MAX_WINDOW);
    }
}
