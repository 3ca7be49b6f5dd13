-- Kinds F, X and K, fixed window. a the limit, b the window in microseconds.
-- F: windows aligned to the epoch, shifted by c (phase). X: the window opens with the first request.
-- K: calendar windows; b, c and d are the starts of three that follow each other, the gateway reckons them. When the time
-- is in none of the two between them the reply is RLSTALE with the time, and nothing is written.
-- State: x, y: the window that opened at x counts y; an older one counts as empty.
elseif kind == 'F' or kind == 'X' or kind == 'K' then
  local start, finish, used, behind = now, nil, 0, false
  if kind == 'F' then start = now - (now - c) % b
  elseif kind == 'K' then
    d = unpack('<d', d)
    if not (now >= b and now < d) then
      return redis.error_reply(format('RLSTALE calendar boundaries do not cover %d', now))
    end
    if now < c then start, finish = b, c else start, finish = c, d end
  end
  if ends then
    used = y
    if x > start then behind = true
    elseif kind == 'X' and now < x + b then start = x
    elseif x < start then used = 0 end
  end
  finish = finish or start + b
  local idle = kind == 'X' and 0 or finish - now
  free, free_reset = a - used, used == 0 and idle or finish - now
  local counted = used + cost
  if asked == 'R' then
    -- A charge of another window is gone with it.
    counted = charged_at >= start and charged_at < finish and used - cost or used
    if counted < 0 then counted = 0 end
  end
  if counted > a and (asked == 'C' or asked == 'P') then
    remaining, reset = free, free_reset
    if cost > a then status, retry = 2, -1
    else status, retry = 1, finish - now end
    if behind and used > 0 then lasts, x, y, z = finish - now, start, used, 0 end
  else
    if counted > most then counted = most end
    remaining, reset, lasts = a - counted, idle, false
    if counted > 0 then
      reset = finish - now
      lasts, x, y, z = reset, start, counted, 0
    end
  end
