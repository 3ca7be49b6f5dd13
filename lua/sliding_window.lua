-- Sliding window, kind W: counts tokens in two consecutive windows, which are aligned to the Unix epoch. The count of
-- the previous window is multiplied by the fraction of that window that the sliding window still covers.
-- Parameter `a` (limit): maximum number of tokens per window.
-- Parameter `b` (window): window length in microseconds.
-- Parameter `c` (unit): unit in microseconds in which the elapsed time of the current window is measured. The window
-- length is a multiple of this unit.
-- State: `current` tokens were charged in the aligned window that opened at `start`, and `previous` tokens in the
-- window before it.
local floor, ceil = math.floor, math.ceil
local MAX_STATE
local op, cost, a, b, c, now, charged_at, key_expires_at, field1, field2, field3
local status, remaining, reset_us, retry_us, free, free_reset_us, ttl_us, new_field1, new_field2, new_field3
--@body
local limit, window, unit = a, b, c
local start, current, previous, clock_went_back = now - now % window, 0, 0, false
if key_expires_at then
  local stored_start = field1
  current, previous = field2, field3
  if stored_start > start then clock_went_back = true
  elseif stored_start == start - window then current, previous = 0, current
  elseif stored_start < start then current, previous = 0, 0 end
end
local elapsed, units = floor((now - start) / unit), window / unit
--@free
if op == 'P' then free = limit - current + floor(-previous * (units - elapsed) / units) end
--@end free
--@generic
free = limit - current + floor(-previous * (units - elapsed) / units)
--@end generic
free_reset_us = current > 0 and start + 2 * window - now or previous > 0 and start + window - now or 0

local excess = (current + cost - limit) * units + previous * (units - elapsed)
if excess > 0 and (op == 'C' or op == 'P') then
  status = 1
  --@generic
  remaining, reset_us = free, free_reset_us
  if cost > limit then status, retry_us = 2, -1
  elseif current + cost <= limit then retry_us = start + (elapsed + ceil(excess / previous)) * unit - now
  else retry_us = start + window + ceil(units * (current + cost - limit) / current) * unit - now end
  --@end generic
  if clock_went_back and free_reset_us > 0 then
    ttl_us, new_field1, new_field2, new_field3 = free_reset_us, start, current, previous
  end
else
  --@generic
  if op == 'R' then
    if charged_at >= start then current = current > cost and current - cost or 0
    elseif charged_at >= start - window then previous = previous > cost and previous - cost or 0 end
    cost = 0
  end
  --@end generic
  current = current + cost
  --@generic
  current = math.min(current, floor(MAX_STATE / 2 / units))
  --@end generic
  --@generic
  remaining = limit - current + floor(-previous * (units - elapsed) / units)
  --@end generic
  reset_us = current > 0 and start + 2 * window - now or previous > 0 and start + window - now or 0
  ttl_us = false
  if reset_us > 0 then
    ttl_us = reset_us
    new_field1 = start
    new_field2 = current
    new_field3 = previous
  end
end
