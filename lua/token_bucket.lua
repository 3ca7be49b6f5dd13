-- Token bucket, kind B. GCRA and the leaky bucket as a meter are the same algorithm.
-- a burst   tokens in a full bucket
-- b refill  refill / parts is the rate in tokens per microsecond, a reduced fraction
-- c parts
-- d         R: microseconds, rounded down, for which the bucket refilled to repay the debt before the refunded charge
-- State: at `updated_at` the bucket lacked `debt` parts of 1/parts token.
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
    -- The rate was changed: the same debt in parts of another size, rounded up. If doubles do not hold the product, two
    -- operations have an error of less than one part, so one part more is never too few.
    local rest = debt % stored_parts
    local product = rest * parts
    local converted = product < EXACT_INTEGER_LIMIT and ceil(product / stored_parts)
      or ceil(rest / stored_parts * parts) + 1
    debt = math.min((debt - rest) / stored_parts * parts + converted, MAX_STATE)
  end
  -- The rate at which the state was written repays the debt within `repay_time`, or up to half a second earlier.
  local elapsed, repay_time = now - updated_at, key_expires_at - MIN_KEY_SLACK_US - updated_at
  local needed = debt / refill
  if elapsed < 0 then clock_went_back = true
  elseif needed > repay_time then
    -- The rate was lowered: the debt that the old rate has repaid by now is not owed again. Rounded as above.
    local left = repay_time - elapsed
    if left <= 0 then debt = 0
    else
      -- 1.0 makes it a double also in Lua 5.4, whose integers overflow.
      local product = 1.0 * debt * left
      local scaled = product < EXACT_INTEGER_LIMIT and ceil(product / repay_time) or ceil(debt / repay_time * left) + 1
      debt, rate_lowered = math.min(scaled, debt - elapsed * refill), true
    end
  elseif elapsed >= needed then debt = 0
  else debt = debt - elapsed * refill end
end
local capacity = burst * parts
free, free_reset_us = floor((capacity - debt) / parts), ceil(debt / refill)

-- A cost that is charged after the response may be any number.
local charge = cost > MAX_STATE / parts and MAX_STATE or cost * parts
local charged = debt + charge
if op == 'R' then
  -- Refill since the charge first pays the debt before it. Later refill pays the charge and is subtracted.
  local repaid_us, credit = now - charged_at - unpack('<d', d), charge
  if repaid_us >= credit / refill then credit = 0
  elseif repaid_us > 0 then credit = credit - repaid_us * refill end
  charged = debt > credit and debt - credit or 0
end
if charged > capacity and (op == 'C' or op == 'P') then
  remaining, reset_us = free, free_reset_us
  if cost > burst then status, retry_us = 2, -1
  else status, retry_us = 1, ceil((charged - capacity) / refill) end
  -- retry_us is for the new rate, which applies from now on.
  if clock_went_back or rate_lowered then ttl_us, new_field1, new_field2, new_field3 = reset_us, now, debt, parts end
else
  if charged > MAX_STATE then charged = MAX_STATE end
  remaining, reset_us, ttl_us = floor((capacity - charged) / parts), ceil(charged / refill), false
  if charged > 0 then ttl_us, new_field1, new_field2, new_field3 = reset_us, now, charged, parts end
end
