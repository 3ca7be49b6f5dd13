//! Compiles `mirror` of a route: which requests are copied, and to which upstream.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::config;
use crate::config::error::Issue;
use crate::snapshot::route_action::GOLDEN_RATIO;
use crate::snapshot::validator::Validator;
use crate::upstream::UpstreamSettings;

/// Fraction of `server.max_buffered` that the bodies of all copies may use, in addition to `server.max_buffered`.
pub const BUFFER_DIVISOR: usize = 4;

/// `mirror` of a route.
#[derive(Debug)]
pub struct Mirror {
    /// Upstream of the copies, by index.
    pub upstream: usize,
    /// Percentage of the requests that are copied.
    pub percent: f64,
    /// Maximum size, in bytes, of a body that is copied.
    pub max_body: usize,
    /// Maximum number of copies in flight per worker.
    pub max_in_flight: usize,
    /// The percentage as a fraction of 2^64.
    share: u128,
    /// Number of requests, of all workers together.
    counter: AtomicU64,
}

impl Mirror {
    fn new(upstream: usize, percent: f64, max_body: usize, max_in_flight: usize) -> Self {
        // The product is exact, because 2^64 is a power of two, so 100 % gives exactly 2^64.
        let share = (percent / 100.0 * 2.0_f64.powi(64)) as u128;
        Mirror { upstream, percent, max_body, max_in_flight, share, counter: AtomicU64::new(0) }
    }

    /// Return whether the next request is copied. The copied requests are evenly distributed, like the requests of a
    /// weighted upstream.
    pub fn picks_next(&self) -> bool {
        u128::from(self.counter.fetch_add(1, Ordering::Relaxed).wrapping_mul(GOLDEN_RATIO)) < self.share
    }
}

/// Compile `mirror` of a route.
pub(super) fn mirror(
    route: &config::tables::Route,
    upstreams: &[UpstreamSettings],
    reader: &mut Validator<'_>,
) -> Option<Mirror> {
    let written = route.mirror.as_ref()?;
    let (span, mirror) = (written.span(), written.get_ref());
    if route.upstream.is_none() {
        let issue = Issue::new(span.clone(), "`mirror` requires an upstream");
        reader
            .push_missing(issue.with_hint(
                "only forwarded requests are mirrored: remove `mirror`, or set an `upstream` for the route",
            ));
    }
    let percent = reader.fraction(mirror.percent.as_ref(), 0..=100, 100.0);
    let max_body = reader.size_or_off(mirror.max_body.as_ref(), 64 << 10);
    let max_in_flight = reader.number(mirror.max_in_flight.as_ref(), 1..100_001, 100) as usize;
    let name = reader.required(mirror.upstream.as_ref(), &span, "upstream", "\"next\"")?;
    let index = upstreams.iter().position(|upstream| *upstream.name == **name.get_ref());
    if index.is_none() {
        let known = upstreams.iter().map(|upstream| &*upstream.name);
        reader.unknown_name(name.span(), "upstream", name.get_ref(), known);
    }
    Some(Mirror::new(index?, percent, max_body, max_in_flight))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_are_the_percentage_at_any_time() {
        for percent in [0.0, 0.01, 0.1, 1.0, 10.0, 33.3, 50.0, 99.9, 100.0] {
            let mirror = Mirror::new(0, percent, 0, 1);
            let mut copies = 0_u32;
            for requests in 1..=10_000 {
                copies += u32::from(mirror.picks_next());
                let due = f64::from(requests) * percent / 100.0;
                assert!((f64::from(copies) - due).abs() <= 4.0, "{percent} %: {copies} of {requests}, due {due:.1}");
            }
            assert!(percent > 0.0 || copies == 0, "no request of 0 %");
            assert!(percent < 100.0 || copies == 10_000, "all requests of 100 %");
        }
    }
}
