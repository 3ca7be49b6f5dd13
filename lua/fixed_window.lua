-- Fixed window: at most `limit` tokens per window. Times are in microseconds.
-- Kind F: windows are aligned to the Unix epoch. The parameters are the limit (a), the window length (b), and the
-- offset of the windows from the epoch (c).
-- Kind X: the first request after the end of a window opens the next window. The parameters are the limit (a) and the
-- window length (b).
-- Kind K: windows follow the calendar. The parameters are the limit (a) and the starts of three consecutive windows (b,
-- c and d), which the gateway computes. If the current time is in neither the first nor the second window, the script
-- writes nothing and returns the error RLSTALE. The error text ends with the current time.
-- State: `count` tokens were charged in the window that opened at `start`. The fields of the state are `start`, `count`
-- and 0.
local format, unpack = string.format, struct.unpack
local MAX_STATE
local kind, op, cost, a, b, c, d, now, charged_at, key_expires_at, field1, field2
local status, remaining, reset_us, retry_us, free, free_reset_us, ttl_us, new_field1, new_field2, new_field3
--@body
local limit, window = a, b
local start, window_end, count, clock_went_back = now, nil, 0, false
if kind == 'F' then
  local phase = c
  start = now - (now - phase) % window
elseif kind == 'K' then
  local first, second, third = b, c, unpack('<d', d)
  if not (now >= first and now < third) then
    return redis.error_reply(format('RLSTALE calendar boundaries do not cover %d', now))
  end
  if now < second then start, window_end = first, second else start, window_end = second, third end
end
if key_expires_at then
  local stored_start = field1
  count = field2
  if stored_start > start then clock_went_back = true
  elseif kind == 'X' and now < stored_start + window then start = stored_start
  elseif stored_start < start then count = 0 end
end
window_end = window_end or start + window
--@free
free = limit - count
--@end free
--@generic
local idle_reset_us = kind == 'X' and 0 or window_end - now
free, free_reset_us = limit - count, count == 0 and idle_reset_us or window_end - now
--@end generic

local charged = count + cost
--@generic
if op == 'R' then
  -- Refund the charge only if it was made in the current window. The count contains no charges of other windows.
  charged = charged_at >= start and charged_at < window_end and count - cost or count
  if charged < 0 then charged = 0 end
end
--@end generic
if charged > limit and (op == 'C' or op == 'P') then
  status = 1
  --@generic
  remaining, reset_us = free, free_reset_us
  if cost > limit then status, retry_us = 2, -1 else retry_us = window_end - now end
  --@end generic
  if clock_went_back and count > 0 then
    ttl_us, new_field1, new_field2, new_field3 = window_end - now, start, count, 0
  end
else
  --@generic
  if charged > MAX_STATE then charged = MAX_STATE end
  --@end generic
  ttl_us = false
  if charged > 0 then
    ttl_us = window_end - now
    new_field1 = start
    new_field2 = charged
    new_field3 = 0
  end
  --@generic
  remaining, reset_us = limit - charged, ttl_us or idle_reset_us
  --@end generic
end
