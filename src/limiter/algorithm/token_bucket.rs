//! Token bucket. GCRA and the leaky bucket as a meter are the same algorithm (ITU-T I.371, annex A).

use crate::limiter::algorithm::{Change, MAX_STATE, Outcome, State, Status, Step, StepKind};
use crate::limiter::quota::{EXACT_INTEGER_LIMIT, Quota, QuotaError};

/// Bounds of the time in µs for which a key in Redis outlives its state. See `lua/generic.lua`.
const MIN_KEY_SLACK_US: u64 = 500_000;
const MAX_KEY_SLACK_US: u64 = 1_001_000;

/// A bucket of `burst` tokens that refills `refill / parts` tokens per microsecond.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenBucket {
    /// Tokens in a full bucket.
    pub burst: u64,
    /// Parts of a token that refill per µs.
    pub refill: u64,
    /// Number of parts into which a token is divided. `refill / parts` is a reduced fraction.
    pub parts: u64,
}

impl TokenBucket {
    /// Create a bucket for a quota.
    ///
    /// # Errors
    /// The quota has no window of fixed length, the burst is zero, or twice `burst × parts` is not an exact integer in
    /// Lua 5.1.
    pub fn new(quota: Quota, burst: u64) -> Result<Self, QuotaError> {
        let window = quota.window_us.ok_or(QuotaError::NoFixedWindow)?;
        if burst == 0 {
            return Err(QuotaError::Zero("burst"));
        }
        let divisor = gcd(quota.count, window);
        let bucket = TokenBucket { burst, refill: quota.count / divisor, parts: window / divisor };
        // Twice `burst × parts` must be an exact integer, because a charge is added to the debt before the sum is
        // compared with the capacity.
        if u128::from(burst) * u128::from(bucket.parts) * 2 >= u128::from(EXACT_INTEGER_LIMIT) {
            return Err(QuotaError::Inexact { count: quota.count });
        }
        Ok(bucket)
    }

    /// Return a bucket with one `n`-th of this bucket's rate and with the burst `burst`.
    pub(super) fn share(&self, n: u64, burst: u64) -> Self {
        // Twice `burst × parts` must fit into 64 bits. The smaller bound in `new` does not apply, because the share is
        // used only in this process, not in Lua.
        let max_parts = u128::from(u64::MAX / 2 / burst.max(1));
        let divisor = gcd(self.refill, n);
        let refill = self.refill / divisor;
        let parts = u128::from(self.parts) * u128::from(n / divisor);
        // If the fraction needs more than 64 bits, round the rate down, but not to zero.
        let rounded = || ((u128::from(refill) * max_parts / parts).max(1), max_parts);
        let (refill, parts) = if parts <= max_parts { (u128::from(refill), parts) } else { rounded() };
        TokenBucket { burst, refill: refill as u64, parts: parts as u64 }
    }

    /// Return the time in µs in which the bucket repays the debt that existed before a charge of `cost`. `reset_us` is
    /// the time in which the bucket repays the whole debt after the charge.
    pub(super) fn debt_before_us(&self, reset_us: u64, cost: u64) -> u64 {
        // `reset_us` is rounded up, so the debt after the charge is more than (reset_us - 1) * refill parts.
        let refill = u128::from(self.refill);
        let charged_us = (u128::from(cost) * u128::from(self.parts) + refill - 1).div_ceil(refill);
        u64::try_from(charged_us).map_or(0, |charged_us| reset_us.saturating_sub(charged_us))
    }

    /// Return the time in µs in which the bucket refills this number of tokens, rounded down.
    pub(super) fn refill_time_us(&self, tokens: u64) -> u64 {
        let us = u128::from(tokens) * u128::from(self.parts) / u128::from(self.refill);
        u64::try_from(us).unwrap_or(u64::MAX)
    }

    pub(super) fn step(&self, state: Option<&State>, now: u64, kind: StepKind, cost: u64) -> Step {
        let mut debt = 0;
        let mut clock_went_back = false;
        let mut rate_lowered = false;
        let mut key_expires_at = 0;
        if let Some(&State::Bucket { updated_at, debt: stored_debt, parts, key_expires_at: stored_expiry }) = state {
            debt = if parts == self.parts { stored_debt } else { convert_parts(stored_debt, parts, self.parts) };
            clock_went_back = updated_at > now;
            // `repay_time` is an upper bound of the time in µs, from the last write, in which the bucket repays the
            // stored debt at the rate that it had at the last write.
            let elapsed = now.saturating_sub(updated_at);
            let repay_time = stored_expiry.saturating_sub(MIN_KEY_SLACK_US).saturating_sub(updated_at);
            let left = repay_time.saturating_sub(elapsed);
            let refilled_debt = debt.saturating_sub(elapsed.saturating_mul(self.refill));
            (debt, rate_lowered) = match !clock_went_back && debt.div_ceil(self.refill) > repay_time {
                // If the debt takes longer than `repay_time` at the current rate, the rate was lowered. The debt that
                // the old rate has repaid until now counts as repaid.
                true if left == 0 => (0, false),
                true => (refilled_debt.min(scale_rounding_up(debt, left, repay_time)), true),
                false => (refilled_debt, false),
            };
            key_expires_at = stored_expiry;
        }
        let capacity = self.burst * self.parts;
        let left = |debt: u64| capacity.saturating_sub(debt) / self.parts;
        let reset = |debt: u64| debt.div_ceil(self.refill);
        let put = |debt: u64| {
            if debt == 0 {
                Change::Delete
            } else {
                let ttl_us = reset(debt);
                // As in `lua/generic.lua`, the key keeps its expiry time if this time is 0.5 s to 1.001 s after the
                // debt is repaid. Otherwise, set the expiry time to 1 s after the debt is repaid.
                let is_within_slack = |slack: u64| (MIN_KEY_SLACK_US..MAX_KEY_SLACK_US).contains(&slack);
                let ends = match key_expires_at.checked_sub(now + ttl_us).is_some_and(is_within_slack) {
                    true => key_expires_at,
                    false => now + (ttl_us.div_ceil(1000) + 1000) * 1000,
                };
                Change::Put(State::Bucket { updated_at: now, debt, parts: self.parts, key_expires_at: ends }, ttl_us)
            }
        };
        let step = |outcome, change| Step { outcome, free: left(debt), free_reset_us: reset(debt), change };
        let charged_outcome =
            |debt| Outcome { status: Status::Ok, remaining: left(debt), reset_us: reset(debt), retry_us: 0 };

        if let StepKind::Refund { charged_at, debt_before_us } = kind {
            // The refill since the charge first repaid the debt that existed before the charge. The other refilled
            // tokens have repaid a part of the charge, and are subtracted from the refund.
            let repaid_us = now.saturating_sub(charged_at).saturating_sub(debt_before_us);
            let credit =
                cost.saturating_mul(self.parts).min(MAX_STATE).saturating_sub(repaid_us.saturating_mul(self.refill));
            let debt_after_refund = debt.saturating_sub(credit);
            return step(charged_outcome(debt_after_refund), put(debt_after_refund));
        }
        let charged = debt.saturating_add(cost.saturating_mul(self.parts));
        if kind == StepKind::Check && charged > capacity {
            let (status, retry_us) = if cost > self.burst {
                (Status::CostTooLarge, 0)
            } else {
                (Status::Exceeded, (charged - capacity).div_ceil(self.refill))
            };
            // Write the state with the current rate, because `retry_us` was computed with this rate.
            let repair = if clock_went_back || rate_lowered { put(debt) } else { Change::None };
            return step(Outcome { status, remaining: left(debt), reset_us: reset(debt), retry_us }, repair);
        }
        let charged = charged.min(MAX_STATE);
        // A debt of 0 means that nothing was charged, so the state does not change.
        let change = if charged == 0 { Change::None } else { put(charged) };
        step(charged_outcome(charged), change)
    }
}

/// Convert a debt in parts of `1/from` token to parts of `1/to` token.
fn convert_parts(debt: u64, from: u64, to: u64) -> u64 {
    (debt / from).saturating_mul(to).saturating_add(scale_rounding_up(debt % from, to, from)).min(MAX_STATE)
}

/// Return `value * to / from`, rounded up as in the Lua script. The result is exact if doubles can hold the product,
/// and otherwise at most 2 too large. Either `value` or `to` is less than `from`.
fn scale_rounding_up(value: u64, to: u64, from: u64) -> u64 {
    let product = u128::from(value) * u128::from(to);
    let exact = product.div_ceil(u128::from(from)) as u64;
    if product < u128::from(EXACT_INTEGER_LIMIT) {
        return exact;
    }
    // Use the larger of the two results. `exact` can be larger than the result with doubles, because a local share may
    // use integers that doubles cannot represent exactly.
    exact.max((value as f64 / from as f64 * to as f64).ceil() as u64 + 1)
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}
