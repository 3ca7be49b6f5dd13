-- Token bucket, kind B. GCRA and the leaky bucket as a meter are the same algorithm.
-- Parameter `a` (burst): number of tokens in a full bucket.
-- Parameter `b` (refill): number of parts of a token that refill per microsecond.
-- Parameter `c` (parts): number of parts into which a token is divided. The fraction refill / parts is reduced.
-- Parameter `d`, only for the operation R: time in microseconds in which the refill repays the debt that existed before
-- the refunded charge, rounded down.
-- State: the fields `updated_at` (time of the last write), `debt` (debt at this time) and `parts`.
local floor, ceil, unpack = math.floor, math.ceil, struct.unpack
local MAX_STATE, EXACT_INTEGER_LIMIT, MIN_KEY_SLACK_US
local op, cost, a, b, c, d, now, charged_at, key_expires_at, field1, field2, field3
local status, remaining, reset_us, retry_us, free, free_reset_us, ttl_us, new_field1, new_field2, new_field3
--@body
local burst, refill, parts = a, b, c
-- A token is divided into `parts` equal parts, so that all numbers are integers. `debt` is the number of parts that are
-- missing from a full bucket. The refill repays the debt.
local debt, clock_went_back, rate_lowered = 0, false, false
if key_expires_at then
  local updated_at, stored_parts = field1, field3
  debt = field2
  if stored_parts ~= parts then
    -- The rate of the limit has changed since the last write, and with it the number of parts of a token. Convert the
    -- debt from `stored_parts` to `parts` parts per token, rounded up. If a double cannot hold the product exactly,
    -- divide first. The rounding error is then less than one part, and the code adds one part, so that the converted
    -- debt is never too small.
    local rest = debt % stored_parts
    local product = rest * parts
    local converted = product < EXACT_INTEGER_LIMIT and ceil(product / stored_parts)
      or ceil(rest / stored_parts * parts) + 1
    debt = math.min((debt - rest) / stored_parts * parts + converted, MAX_STATE)
  end
  -- `repay_time` is an upper bound. At the rate that the limit had at the last write, the bucket repays the debt in
  -- this time or up to about half a second earlier.
  local elapsed, repay_time = now - updated_at, key_expires_at - MIN_KEY_SLACK_US - updated_at
  local needed = debt / refill
  if elapsed < 0 then clock_went_back = true
  elseif needed > repay_time then
    -- The rate of the limit was lowered since the last write. The part of the debt that the old rate has repaid until
    -- the current time counts as repaid. The rest, debt * left / repay_time, is rounded up as in the conversion above.
    local left = repay_time - elapsed
    if left <= 0 then debt = 0
    else
      -- The factor 1.0 makes the product a double, because in Lua 5.4 a product of integers could overflow.
      local product = 1.0 * debt * left
      local scaled = product < EXACT_INTEGER_LIMIT and ceil(product / repay_time) or ceil(debt / repay_time * left) + 1
      debt, rate_lowered = math.min(scaled, debt - elapsed * refill), true
    end
  elseif elapsed >= needed then debt = 0
  else debt = debt - elapsed * refill end
end
local capacity = burst * parts
--@free
if op == 'P' then free = floor((capacity - debt) / parts) end
--@end free
--@generic
free, free_reset_us = floor((capacity - debt) / parts), ceil(debt / refill)
--@end generic

local charge = cost * parts
--@generic
-- A cost that is charged after the response has no upper bound.
if charge > MAX_STATE then charge = MAX_STATE end
--@end generic
local charged = debt + charge
--@generic
if op == 'R' then
  -- The tokens that refilled since the charge first repaid the debt that existed before the charge. The other refilled
  -- tokens have already repaid a part of the charge itself, and are subtracted from the refund.
  local repaid_us, credit = now - charged_at - unpack('<d', d), charge
  if repaid_us >= credit / refill then credit = 0
  elseif repaid_us > 0 then credit = credit - repaid_us * refill end
  charged = debt > credit and debt - credit or 0
end
--@end generic
if charged > capacity and (op == 'C' or op == 'P') then
  status = 1
  --@generic
  remaining, reset_us = free, free_reset_us
  if cost > burst then status, retry_us = 2, -1 else retry_us = ceil((charged - capacity) / refill) end
  --@end generic
  -- If the rate was lowered, write a state with the new rate, because retry_us was computed with this rate.
  if clock_went_back or rate_lowered then
    ttl_us, new_field1, new_field2, new_field3 = ceil(debt / refill), now, debt, parts
  end
else
  --@generic
  if charged > MAX_STATE then charged = MAX_STATE end
  --@end generic
  ttl_us = false
  if charged > 0 then
    ttl_us = ceil(charged / refill)
    new_field1 = now
    new_field2 = charged
    new_field3 = parts
  end
  --@generic
  remaining, reset_us = floor((capacity - charged) / parts), ttl_us or 0
  --@end generic
end
