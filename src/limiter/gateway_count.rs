//! The number of gateways that share the store, among which local shares divide each limit.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Maximum number of gateways that local shares consider.
pub const MAX_GATEWAYS: u64 = 10_000;

/// Time after which a gateway that has stopped without removing its entry is not counted. It is also the time for which
/// a smaller number must be read before it is used.
pub const ENTRY_TTL: Duration = Duration::from_secs(60);

/// The number of gateways. It is read during an outage of the store, and changes while the store is available.
#[derive(Debug)]
pub struct GatewayCount {
    least: u64,
    counted: AtomicU64,
}

impl GatewayCount {
    /// Create the number of gateways of which there are at least `least`.
    pub fn at_least(least: u64) -> Self {
        GatewayCount { least: least.clamp(1, MAX_GATEWAYS), counted: AtomicU64::new(0) }
    }

    /// Return the number of gateways.
    pub fn get(&self) -> u64 {
        self.counted().clamp(self.least, MAX_GATEWAYS)
    }

    /// Return the number that the gateways have counted in the store. 0: not counted yet.
    pub fn counted(&self) -> u64 {
        self.counted.load(Ordering::Relaxed)
    }

    /// Set the number that the gateways have counted in the store.
    pub fn set_counted(&self, counted: u64) {
        self.counted.store(counted, Ordering::Relaxed);
    }
}

impl Default for GatewayCount {
    fn default() -> Self {
        GatewayCount::at_least(1)
    }
}

/// Delays decreases of the number of gateways. The store may return a number that is too small: after an outage, or
/// after it has lost its data, until all gateways have added their entries again. Local shares that were too large could
/// exceed a limit. A smaller number therefore counts only if all numbers of the last [`ENTRY_TTL`] are smaller.
#[derive(Debug, Default)]
pub struct SteadyCount {
    count: u64,
    decrease: Option<Decrease>,
}

/// Numbers that are smaller than the number in use.
#[derive(Debug, Clone, Copy)]
struct Decrease {
    since: Instant,
    largest: u64,
}

impl SteadyCount {
    /// Add a number that the store has returned. Return the number to use.
    pub fn add(&mut self, count: u64, now: Instant) -> u64 {
        if count >= self.count {
            *self = SteadyCount { count, decrease: None };
            return count;
        }
        let Decrease { since, largest } = self.decrease.unwrap_or(Decrease { since: now, largest: count });
        let largest = largest.max(count);
        *self = match now.saturating_duration_since(since) >= ENTRY_TTL {
            true => SteadyCount { count: largest, decrease: None },
            false => SteadyCount { count: self.count, decrease: Some(Decrease { since, largest }) },
        };
        self.count
    }

    /// Note that the store has not answered. Other gateways may not reach it either, so their entries may expire.
    pub fn interrupt(&mut self) {
        self.decrease = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::monotonic;
    use proptest::prelude::*;
    use std::collections::HashMap;
    use std::sync::OnceLock;

    #[test]
    fn configured_number_is_the_minimum() {
        let count = GatewayCount::at_least(3);
        let used = [0, 1, 3, 4, 20_000].map(|counted| {
            count.set_counted(counted);
            count.get()
        });
        assert_eq!(used, [3, 3, 3, 4, MAX_GATEWAYS]);
    }

    #[test]
    fn increase_counts_at_once_and_decrease_after_the_ttl_of_an_entry() {
        let start = monotonic();
        let mut steady = SteadyCount::default();
        let mut add = |count, second| steady.add(count, start + Duration::from_secs(second));
        assert_eq!([add(1, 0), add(50, 1), add(3, 2), add(2, 30), add(2, 61)], [1, 50, 50, 50, 50]);
        assert_eq!(add(2, 62), 3, "the largest number of the last 60 s");
        assert_eq!([add(2, 63), add(4, 64), add(2, 100), add(2, 160)], [3, 4, 4, 2]);
    }

    /// The key in the store: the time at which the entry of each gateway expires, in seconds. `lua/gateways.lua` does
    /// the same.
    #[derive(Default)]
    struct Entries(HashMap<usize, i64>);

    impl Entries {
        fn count(&mut self, id: usize, now: i64) -> u64 {
            let expires_at = now + ENTRY_TTL.as_secs() as i64;
            self.0.retain(|_, expiry| (now + 1..=expires_at).contains(expiry));
            self.0.insert(id, expires_at);
            self.0.len() as u64
        }
    }

    struct Gateway {
        id: usize,
        steady: SteadyCount,
        number: u64,
        /// Seconds for which this gateway has not reached the store, although others may have.
        isolated_s: u64,
    }

    #[derive(Debug, Clone)]
    enum Event {
        Start(usize),
        Stop(usize),
        Kill(usize),
        Isolate(usize),
        Outage(u64),
        LoseData,
        SetClock(i64),
        Wait(u64),
    }

    fn events() -> impl Strategy<Value = Vec<Event>> {
        let event = prop_oneof![
            (1..50usize).prop_map(Event::Start),
            (1..50usize).prop_map(Event::Stop),
            (0..50usize).prop_map(Event::Kill),
            (0..50usize).prop_map(Event::Isolate),
            (1..200u64).prop_map(Event::Outage),
            Just(Event::LoseData),
            prop_oneof![-4000..4000i64, -70..70i64].prop_map(Event::SetClock),
            (1..150u64).prop_map(Event::Wait),
        ];
        prop::collection::vec(event, 1..20)
    }

    /// Let one second pass, in which all gateways but the isolated one reach the store.
    fn pass_second(gateways: &mut [Gateway], entries: &mut Entries, isolated: Option<usize>, second: u64, clock: i64) {
        let now = monotonic_start() + Duration::from_secs(second);
        for gateway in gateways.iter_mut() {
            if isolated == Some(gateway.id) {
                gateway.steady.interrupt();
                gateway.isolated_s += 1;
            } else {
                gateway.number = gateway.steady.add(entries.count(gateway.id, clock), now);
                gateway.isolated_s = 0;
            }
        }
    }

    /// Redis has lost the entries, and isolated gateways cannot add theirs again.
    fn forget_isolated(gateways: &mut [Gateway]) {
        for gateway in gateways.iter_mut().filter(|gateway| gateway.isolated_s > 0) {
            gateway.isolated_s = ENTRY_TTL.as_secs();
        }
    }

    fn monotonic_start() -> Instant {
        static START: OnceLock<Instant> = OnceLock::new();
        *START.get_or_init(monotonic)
    }

    /// The shares of the gateways that reach the store are together at most the limit, one second after the last of them
    /// has started.
    fn assert_shares(gateways: &[Gateway]) -> Result<(), TestCaseError> {
        let is_counted = |gateway: &&Gateway| gateway.isolated_s < ENTRY_TTL.as_secs();
        let running = gateways.iter().filter(is_counted).count() as u64;
        for gateway in gateways.iter().filter(|gateway| gateway.isolated_s == 0) {
            prop_assert!(gateway.number >= running, "{} of {running}", gateway.number);
        }
        Ok(())
    }

    proptest! {
        #[test]
        fn shares_of_the_counted_gateways_are_at_most_the_limit(events in events()) {
            let mut entries = Entries::default();
            let mut gateways: Vec<Gateway> = Vec::new();
            let mut isolated = None;
            let mut last_id = 0;
            let mut second = 0;
            let mut clock_offset = 1_000_000;
            for event in events {
                let mut seconds = 2;
                // In the second in which a gateway starts or is no longer isolated, the others may not count it yet.
                let checked_from = u64::from(matches!(event, Event::Start(_) | Event::Isolate(_)));
                match event {
                    Event::Start(count) => gateways.extend((0..count).map(|_| {
                        last_id += 1;
                        Gateway { id: last_id, steady: SteadyCount::default(), number: 0, isolated_s: 0 }
                    })),
                    Event::Stop(count) => {
                        for gateway in gateways.drain(..count.min(gateways.len())) {
                            entries.0.remove(&gateway.id);
                        }
                    }
                    Event::Kill(index) => drop(gateways.get(index).map(|gateway| gateway.id).map(|id| {
                        gateways.retain(|gateway| gateway.id != id);
                    })),
                    Event::Isolate(index) => isolated = gateways.get(index).map(|gateway| gateway.id),
                    Event::Outage(length) => {
                        for gateway in &mut gateways {
                            gateway.steady.interrupt();
                            // The other gateways add their entries again as soon as the outage ends.
                            gateway.isolated_s += if isolated == Some(gateway.id) { length } else { 0 };
                        }
                        second += length;
                    }
                    Event::LoseData => {
                        entries.0.clear();
                        forget_isolated(&mut gateways);
                    }
                    Event::SetClock(difference) => {
                        clock_offset += difference;
                        forget_isolated(&mut gateways);
                    }
                    Event::Wait(length) => seconds = length + 1,
                }
                for passed in 0..seconds {
                    second += 1;
                    pass_second(&mut gateways, &mut entries, isolated, second, clock_offset + second as i64);
                    if passed >= checked_from {
                        assert_shares(&gateways)?;
                    }
                }
            }
        }
    }

    #[test]
    fn numbers_before_an_outage_do_not_shorten_the_delay() {
        let start = monotonic();
        let mut steady = SteadyCount::default();
        let at = |second| start + Duration::from_secs(second);
        steady.add(5, at(0));
        steady.add(4, at(1));
        steady.interrupt();
        // The outage was longer than the TTL, so this gateway is the first to add its entry again.
        assert_eq!([steady.add(1, at(600)), steady.add(5, at(601))], [5, 5]);
    }
}
