-- Token bucket, kind B. GCRA and the leaky bucket as a meter are the same algorithm.
-- a burst   tokens in a full bucket
-- b refill  parts of a token that refill per microsecond
-- c parts   number of parts of a token. The fraction refill / parts is reduced.
-- d         R: time for which the bucket refills to repay the debt from before the refunded charge, in microseconds,
--           rounded down
-- State: at the time `updated_at`, the bucket lacked `debt` parts. A part is 1/parts of a token.
local floor, ceil, unpack = math.floor, math.ceil, struct.unpack
local MAX_STATE, EXACT_INTEGER_LIMIT, MIN_KEY_SLACK_US
local op, cost, a, b, c, d, now, charged_at, key_expires_at, field1, field2, field3
local status, remaining, reset_us, retry_us, free, free_reset_us, ttl_us, new_field1, new_field2, new_field3
--@body
local burst, refill, parts = a, b, c
local debt, clock_went_back, rate_lowered = 0, false, false
if key_expires_at then
  local updated_at, stored_parts = field1, field3
  debt = field2
  if stored_parts ~= parts then
    -- The rate of the bucket has changed since the state was written. Convert the debt to parts of the new size,
    -- rounded up. If a product is too large for an exact double, division and multiplication have an error of less than
    -- one part. One part is added, so that the converted debt is never too small.
    local rest = debt % stored_parts
    local product = rest * parts
    local converted = product < EXACT_INTEGER_LIMIT and ceil(product / stored_parts)
      or ceil(rest / stored_parts * parts) + 1
    debt = math.min((debt - rest) / stored_parts * parts + converted, MAX_STATE)
  end
  -- At the rate of the time when the state was written, the debt is repaid within `repay_time`, or up to half a second
  -- earlier.
  local elapsed, repay_time = now - updated_at, key_expires_at - MIN_KEY_SLACK_US - updated_at
  local needed = debt / refill
  if elapsed < 0 then clock_went_back = true
  elseif needed > repay_time then
    -- The rate of the bucket was lowered since the state was written. The debt that the old rate has repaid until now
    -- stays repaid. Only the rest of the debt is repaid at the new rate. The rest of the debt is rounded up, as in the
    -- conversion above.
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
free, free_reset_us = floor((capacity - debt) / parts), ceil(debt / refill)

-- A cost that is charged after the response has no upper bound, so cost * parts could exceed MAX_STATE.
local charge = cost > MAX_STATE / parts and MAX_STATE or cost * parts
local charged = debt + charge
if op == 'R' then
  -- The tokens that refilled after the charge first repaid the debt from before the charge. The other refilled tokens
  -- have already repaid a part of the charge, so the refund is smaller by these tokens.
  local repaid_us, credit = now - charged_at - unpack('<d', d), charge
  if repaid_us >= credit / refill then credit = 0
  elseif repaid_us > 0 then credit = credit - repaid_us * refill end
  charged = debt > credit and debt - credit or 0
end
if charged > capacity and (op == 'C' or op == 'P') then
  remaining, reset_us = free, free_reset_us
  if cost > burst then status, retry_us = 2, -1
  else status, retry_us = 1, ceil((charged - capacity) / refill) end
  -- If the rate was lowered, retry_us is computed with the new rate. The new state applies the new rate from now on.
  if clock_went_back or rate_lowered then ttl_us, new_field1, new_field2, new_field3 = reset_us, now, debt, parts end
else
  if charged > MAX_STATE then charged = MAX_STATE end
  remaining, reset_us, ttl_us = floor((capacity - charged) / parts), ceil(charged / refill), false
  if charged > 0 then ttl_us, new_field1, new_field2, new_field3 = reset_us, now, charged, parts end
end
