//! Whether the store takes writes: said when it stops to, and when it does again.

use std::sync::atomic::{AtomicU64, Ordering};

use tokio::time::Duration;
use tracing::{info, warn};

use crate::limit::store::{Charge, ChargeMode, Operation, StoreError, Verdict};

/// Without a refusal for this long: a store at the edge of its memory takes one write and refuses the next.
const WRITE_RECOVERY_TIME: Duration = Duration::from_secs(1);

/// When a write was refused last, µs since the Unix epoch; 0 while writes are taken.
#[derive(Debug, Default)]
pub(super) struct WriteHealth(AtomicU64);

impl WriteHealth {
    /// Learns from a call. `now_us` is asked for the time only when it matters.
    pub(super) fn record(
        &self,
        operation: Operation,
        charges: &[Charge<'_>],
        result: &Result<Verdict, StoreError>,
        now_us: impl FnOnce() -> u64,
    ) {
        match result {
            Ok(verdict) => {
                let rejected_at_us = self.0.load(Ordering::Relaxed);
                if rejected_at_us != 0 && has_written(operation, charges, verdict) {
                    let is_settled = u128::from(now_us().abs_diff(rejected_at_us)) >= WRITE_RECOVERY_TIME.as_micros();
                    let reset = || self.0.compare_exchange(rejected_at_us, 0, Ordering::Relaxed, Ordering::Relaxed);
                    if is_settled && reset().is_ok() {
                        info!("the store takes writes again");
                    }
                }
            }
            Err(error @ StoreError::WritesRejected(_)) => {
                if self.0.swap(now_us(), Ordering::Relaxed) == 0 {
                    warn!(%error, "the store takes no writes: what it would charge follows on_store_error until it does");
                }
            }
            Err(_) => {}
        }
    }
}

/// Whether a call wrote for certain: it charged something at once.
fn has_written(operation: Operation, charges: &[Charge<'_>], verdict: &Verdict) -> bool {
    matches!(operation, Operation::Check | Operation::TakeUpTo | Operation::Charge)
        && verdict.granted > 0
        && charges.iter().any(|charge| charge.mode == ChargeMode::Enforced && charge.cost > 0)
}
