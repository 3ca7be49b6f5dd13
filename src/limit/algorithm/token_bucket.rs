//! Token bucket: GCRA and the leaky bucket as a meter are the same thing (ITU-T I.371, annex A).

use super::{Ask, Change, MOST, Outcome, State, Status, Step};
use crate::limit::quota::{EXACT, Quota, QuotaError};

/// For how long the key of a state stays in Redis when the state means nothing any more, µs.
const LEAST_SLACK: u64 = 500_000;
const MOST_SLACK: u64 = 1_001_000;

/// A bucket of `burst` tokens that refills with `refill / parts` tokens per microsecond.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenBucket {
    /// Tokens in a full bucket.
    pub burst: u64,
    /// Parts of a token that come back each µs.
    pub refill: u64,
    /// Parts of a token; `refill / parts` is reduced.
    pub parts: u64,
}

impl TokenBucket {
    /// A bucket for a quota.
    ///
    /// # Errors
    /// The burst is zero, or `burst × parts` would leave the exact integers of Redis' Lua.
    pub fn new(quota: Quota, burst: u64) -> Result<Self, QuotaError> {
        let window = quota.window_us.ok_or(QuotaError::NoWindow)?;
        if burst == 0 {
            return Err(QuotaError::Zero("burst"));
        }
        let divisor = gcd(quota.count, window);
        let bucket = TokenBucket { burst, refill: quota.count / divisor, parts: window / divisor };
        // Twice: a charge is added to the debt before it is compared.
        if u128::from(burst) * u128::from(bucket.parts) * 2 >= u128::from(EXACT) {
            return Err(QuotaError::Inexact { count: quota.count });
        }
        Ok(bucket)
    }

    /// One of `n` equal shares of the rate, with a burst of its own; none if it cannot be counted.
    pub(super) fn share(&self, n: u64, burst: u64) -> Option<Self> {
        let parts = self.parts.checked_mul(n)?;
        let divisor = gcd(self.refill, parts);
        let share = TokenBucket { burst, refill: self.refill / divisor, parts: parts / divisor };
        // As above; here, outside of Redis, 64 bits are exact.
        burst.checked_mul(share.parts)?.checked_mul(2).map(|_| share)
    }

    /// For how many µs the bucket refills to pay the debt before a charge of `cost`, if it takes `reset_us` to pay the debt after it.
    pub(super) fn debt_before_us(&self, reset_us: u64, cost: u64) -> u64 {
        // The debt after the charge is more than (reset_us - 1) * refill parts.
        let refill = u128::from(self.refill);
        let charged_us = (u128::from(cost) * u128::from(self.parts) + refill - 1).div_ceil(refill);
        u64::try_from(charged_us).map_or(0, |charged_us| reset_us.saturating_sub(charged_us))
    }

    pub(super) fn step(&self, state: Option<&State>, now: u64, ask: Ask, cost: u64) -> Step {
        let (mut debt, mut behind, mut lowered, mut kept_until) = (0, false, false, 0);
        if let Some(&State::Bucket { last, debt: owed, parts, ends }) = state {
            debt = if parts == self.parts { owed } else { convert(owed, parts, self.parts) };
            behind = last > now;
            // The rate at which the state was written repays the debt within `span`.
            let (passed, span) = (now.saturating_sub(last), ends.saturating_sub(LEAST_SLACK).saturating_sub(last));
            let left = span.saturating_sub(passed);
            let usual = debt.saturating_sub(passed.saturating_mul(self.refill));
            (debt, lowered) = match !behind && debt.div_ceil(self.refill) > span {
                // The rate was lowered: what the earlier one has repaid by now is not owed again.
                true if left == 0 => (0, false),
                true => (usual.min(scaled(debt, left, span)), true),
                false => (usual, false),
            };
            kept_until = ends;
        }
        let capacity = self.burst * self.parts;
        let left = |debt: u64| capacity.saturating_sub(debt) / self.parts;
        let reset = |debt: u64| debt.div_ceil(self.refill);
        let put = |debt: u64| {
            if debt == 0 {
                Change::Empty
            } else {
                let lasts = reset(debt);
                // The key ends as late as it does, or a second after the debt is repaid: the rule of `lua/check.lua`.
                let fits = |slack: u64| (LEAST_SLACK..MOST_SLACK).contains(&slack);
                let ends = match kept_until.checked_sub(now + lasts).is_some_and(fits) {
                    true => kept_until,
                    false => now + (lasts.div_ceil(1000) + 1000) * 1000,
                };
                Change::Put(State::Bucket { last: now, debt, parts: self.parts, ends }, lasts)
            }
        };
        let step = |outcome, change| Step { outcome, free: left(debt), free_reset_us: reset(debt), change };
        let held = |debt| Outcome { status: Status::Ok, remaining: left(debt), reset_us: reset(debt), retry_us: 0 };

        if let Ask::Refund { charged_at, debt_before_us } = ask {
            // Refill since the charge first pays the debt before it. Later refill pays the charge and is subtracted.
            let paid_us = now.saturating_sub(charged_at).saturating_sub(debt_before_us);
            let given = cost.saturating_mul(self.parts).min(MOST).saturating_sub(paid_us.saturating_mul(self.refill));
            let rest = debt.saturating_sub(given);
            return step(held(rest), put(rest));
        }
        let charged = debt.saturating_add(cost.saturating_mul(self.parts));
        if ask == Ask::Fit && charged > capacity {
            let (status, retry_us) = if cost > self.burst {
                (Status::Never, 0)
            } else {
                (Status::Over, (charged - capacity).div_ceil(self.refill))
            };
            // The retry is told for the new rate, which applies from now on.
            let mended = if behind || lowered { put(debt) } else { Change::None };
            return step(Outcome { status, remaining: left(debt), reset_us: reset(debt), retry_us }, mended);
        }
        let charged = charged.min(MOST);
        // Nothing owed and nothing charged: nothing to write.
        let change = if charged == 0 { Change::None } else { put(charged) };
        step(held(charged), change)
    }
}

/// The same debt, in parts of another size.
fn convert(debt: u64, from: u64, to: u64) -> u64 {
    (debt / from).saturating_mul(to).saturating_add(scaled(debt % from, to, from)).min(MOST)
}

/// `value * to / from`, rounded up as the script does it: exactly where doubles hold the product, else at most 2 too many. `value` or
/// `to` is less than `from`.
fn scaled(value: u64, to: u64, from: u64) -> u64 {
    let product = u128::from(value) * u128::from(to);
    let exact = product.div_ceil(u128::from(from)) as u64;
    if product < u128::from(EXACT) {
        return exact;
    }
    // The numbers of a share may leave the exact integers of doubles.
    exact.max((value as f64 / from as f64 * to as f64).ceil() as u64 + 1)
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}
