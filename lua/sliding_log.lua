-- Kind L, sliding log: exactly what was admitted in the last window. a the limit, b the window in microseconds.
-- State: a LIST of the instants of admitted units, oldest first. An instant in the future (the clock was set back) counts as now.
kinds.L = function(key, op, cost, limit, window)
  local length = call('LLEN', key)
  local function at(index)
    local instant = tonumber(call('LINDEX', key, text(index)))
    if instant > now then return now end
    return instant
  end
  -- The first entry that is still inside the window.
  local low, high = 0, length
  while low < high do
    local middle = floor((low + high) / 2)
    if at(middle) <= now - window then low = middle + 1 else high = middle end
  end
  local active, newest, behind = length - low, nil, false
  if active > 0 then
    newest = tonumber(call('LINDEX', key, -1))
    if newest > now then newest, behind = now, true end
  end
  local free, reset = limit - active, newest and newest + window - now or 0
  local function mend()
    local all = call('LRANGE', key, 0, -1)
    call('DEL', key)
    for i = 1, #all do
      call('RPUSH', key, tonumber(all[i]) > now and text(now) or all[i])
    end
    call('PEXPIRE', key, pexpire(window))
  end
  if op == 'R' then
    -- LREM with a count of 0 would remove every entry. The reply shows the log before the refund.
    local function refund() if cost > 0 then call('LREM', key, text(-cost), text(charged_at)) end end
    return 0, free, reset, 0, free, reset, refund
  end
  if op ~= 'A' and active + cost > limit then
    local mended = behind and mend or nil
    if cost > limit then return 2, free, reset, -1, free, reset, mended end
    return 1, free, reset, at(low + active + cost - limit - 1) + window - now, free, reset, mended
  end
  if cost == 0 then return 0, free, reset, 0, free, reset, nil end
  local function append()
    if behind then mend() end
    if low > 0 then call('LTRIM', key, text(low), -1) end
    for _ = 1, cost do call('RPUSH', key, text(now)) end
    call('PEXPIRE', key, pexpire(window))
  end
  return 0, free - cost, window, 0, free, reset, append
end
