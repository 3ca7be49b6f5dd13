//! How much one worker may have in flight to one server: an additive increase, multiplicative decrease window, as TCP Vegas keeps one
//! by the delay that its own load adds.

use tokio::time::Duration;

/// A call without keys weighs as much as so many keys: what it costs Redis to run the smallest script.
const CALL: usize = 8;

/// The smallest window, and the first one, holds one full batch.
const SMALLEST: usize = 128 + CALL;

/// The largest holds sixteen: with a round trip of 40 ms they carry 50,000 checks a second.
const LARGEST: usize = 16 * SMALLEST;

/// Replies after which the shortest round trip is forgotten: a server may have moved.
const FORGOTTEN: u32 = 10_000;

/// The window.
#[derive(Debug)]
pub(super) struct Window {
    size: usize,
    /// Whether no reply was slow yet: until then the window grows by all that is answered (slow start).
    starting: bool,
    /// The shortest of the last round trips.
    shortest: Duration,
    replies: u32,
}

impl Default for Window {
    fn default() -> Self {
        Window { size: SMALLEST, starting: true, shortest: Duration::MAX, replies: 0 }
    }
}

impl Window {
    /// What a call with so many keys weighs.
    pub(super) fn weight(keys: usize) -> usize {
        keys + CALL
    }

    /// Whether a call with so many keys fits beside what is in flight.
    pub(super) fn has_room(&self, in_flight: usize, keys: usize) -> bool {
        in_flight + Window::weight(keys) <= self.size
    }

    /// Learns from a reply to a call of this weight after this time: a delay of more than a quarter of what the timeout leaves over
    /// the shortest round trip halves the window. A smaller one lets it grow, where it was the window that `limited` what is in flight.
    pub(super) fn answered(&mut self, weight: usize, after: Duration, timeout: Duration, limited: bool) {
        self.replies += 1;
        if self.replies == FORGOTTEN {
            (self.replies, self.shortest) = (0, Duration::MAX);
        }
        self.shortest = self.shortest.min(after);
        if after - self.shortest > timeout.saturating_sub(self.shortest) / 4 {
            (self.size, self.starting) = ((self.size / 2).max(SMALLEST), false);
        } else if limited {
            self.size = (self.size + if self.starting { weight } else { CALL }).min(LARGEST);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMEOUT: Duration = Duration::from_millis(50);

    fn answered(window: &mut Window, ms: &[u64]) -> usize {
        ms.iter().for_each(|ms| window.answered(SMALLEST, Duration::from_millis(*ms), TIMEOUT, true));
        window.size
    }

    #[test]
    fn grows_while_replies_are_prompt_and_halves_when_they_slow_down() {
        let mut window = Window::default();
        assert!(window.has_room(0, 128) && !window.has_room(1, 128), "a full batch always fits");
        assert_eq!(answered(&mut window, &[1; 3]), 4 * SMALLEST, "slow start");
        assert_eq!(answered(&mut window, &[13]), 5 * SMALLEST, "12 ms more than the shortest of 1 ms");
        assert_eq!(answered(&mut window, &[14]), 5 * SMALLEST / 2);
        assert_eq!(answered(&mut window, &[1; 2]), 5 * SMALLEST / 2 + 2 * CALL, "additive from then on");
        assert_eq!(answered(&mut window, &[1; 1000]), LARGEST);
        assert_eq!(answered(&mut window, &[20; 10]), SMALLEST);
    }

    #[test]
    fn does_not_grow_while_there_is_room_in_it() {
        let mut window = Window::default();
        for _ in 0..1000 {
            window.answered(CALL, Duration::from_millis(1), TIMEOUT, false);
        }
        assert_eq!(window.size, SMALLEST);
    }

    #[test]
    fn a_distant_server_is_not_a_slow_one() {
        let mut window = Window::default();
        assert_eq!(answered(&mut window, &[40; 1000]), LARGEST);
        assert_eq!(answered(&mut window, &[43]), LARGEST / 2, "of 10 ms that are left");
    }

    #[test]
    fn a_server_that_moved_away_is_distant_in_the_end() {
        let mut window = Window::default();
        answered(&mut window, &[1; 10]);
        let replies = vec![30; 2 * FORGOTTEN as usize];
        assert_eq!(answered(&mut window, &replies), LARGEST);
    }
}
