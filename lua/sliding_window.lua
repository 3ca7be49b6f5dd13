-- Kind W, sliding window: the window before counts by the part of it that is still within reach (two windows, weighted).
-- a the limit, b the window in microseconds, c the unit in which the elapsed part is measured; b is a multiple of c.
-- State: x, y, z: the aligned window that opened at x counts y, the one before z.
elseif kind == 'W' then
  local start, current, previous, behind = now - now % b, 0, 0, false
  if ends then
    current, previous = y, z
    if x > start then behind = true
    elseif x == start - b then previous, current = current, 0
    elseif x < start then previous, current = 0, 0 end
  end
  local elapsed, units = floor((now - start) / c), b / c
  free = a - current + floor(-previous * (units - elapsed) / units)
  free_reset = current > 0 and start + 2 * b - now or previous > 0 and start + b - now or 0
  local over = (current + cost - a) * units + previous * (units - elapsed)
  if over > 0 and (asked == 'C' or asked == 'P') then
    remaining, reset = free, free_reset
    if cost > a then status, retry = 2, -1
    elseif current + cost <= a then status, retry = 1, start + (elapsed + ceil(over / previous)) * c - now
    else status, retry = 1, start + b + ceil(units * (current + cost - a) / current) * c - now end
    if behind and reset > 0 then lasts, x, y, z = reset, start, current, previous end
  else
    if asked ~= 'R' then current = math.min(current + cost, floor(most / 2 / units))
    elseif charged_at >= start then current = current > cost and current - cost or 0
    elseif charged_at >= start - b then previous = previous > cost and previous - cost or 0 end
    remaining = a - current + floor(-previous * (units - elapsed) / units)
    reset = current > 0 and start + 2 * b - now or previous > 0 and start + b - now or 0
    lasts = false
    if reset > 0 then lasts, x, y, z = reset, start, current, previous end
  end
