-- Fixed window: at most `limit` tokens per window. Times are in microseconds.
-- Kind F: windows are aligned to the Unix epoch. a limit, b window (length), c phase (offset from the epoch).
-- Kind X: the first request opens the window. a limit, b window.
-- Kind K: calendar windows. a limit; b, c, d: the starts of three consecutive windows, computed by the gateway. If the
-- current time is in neither the first nor the second window, nothing is written. The error is then RLSTALE, and the
-- current time is at its end.
-- State: `count` tokens were charged in the window that opened at `start`.
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
local idle_reset_us = kind == 'X' and 0 or window_end - now
free, free_reset_us = limit - count, count == 0 and idle_reset_us or window_end - now

local charged = count + cost
if op == 'R' then
  -- Refund a charge only if it was made in the current window, because the count contains no charges of other windows.
  charged = charged_at >= start and charged_at < window_end and count - cost or count
  if charged < 0 then charged = 0 end
end
if charged > limit and (op == 'C' or op == 'P') then
  remaining, reset_us = free, free_reset_us
  if cost > limit then status, retry_us = 2, -1
  else status, retry_us = 1, window_end - now end
  if clock_went_back and count > 0 then
    ttl_us, new_field1, new_field2, new_field3 = window_end - now, start, count, 0
  end
else
  if charged > MAX_STATE then charged = MAX_STATE end
  remaining, reset_us, ttl_us = limit - charged, idle_reset_us, false
  if charged > 0 then
    reset_us = window_end - now
    ttl_us, new_field1, new_field2, new_field3 = reset_us, start, charged, 0
  end
end
