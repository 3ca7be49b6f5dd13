-- Kind L, sliding log: exactly what was admitted in the last window. a the limit, b the window in microseconds.
-- State: a LIST of the instants of admitted units, oldest first. An instant in the future (the clock was set back) counts as now.
elseif kind == 'L' then
  local length = call('LLEN', key)
  local function at(index)
    local instant = tonumber(call('LINDEX', key, format('%d', index)))
    if instant > now then return now end
    return instant
  end
  -- The first entry that is still inside the window.
  local low, high = 0, length
  while low < high do
    local middle = floor((low + high) / 2)
    if at(middle) <= now - b then low = middle + 1 else high = middle end
  end
  local active, newest, behind = length - low, nil, false
  if active > 0 then
    newest = tonumber(call('LINDEX', key, '-1'))
    if newest > now then newest, behind = now, true end
  end
  free, free_reset = a - active, newest and newest + b - now or 0
  local function expire() call('PEXPIRE', key, format('%d', ceil(b / 1000) + 1000)) end
  -- In all changes RPUSH comes first: Redis rejects it beyond `maxmemory`, but not after a command that deletes.
  local function mend()
    local all = call('LRANGE', key, '0', '-1')
    for j = 1, #all do
      call('RPUSH', key, tonumber(all[j]) > now and format('%d', now) or all[j])
    end
    call('LTRIM', key, format('%d', #all), '-1')
    expire()
  end
  remaining, reset = free, free_reset
  if asked == 'R' then
    -- LREM with a count of 0 would remove every entry.
    if cost > 0 then
      value = function()
        local removed = call('LREM', key, format('%d', -cost), format('%d', charged_at))
        if charged_at > now - b then active = active - removed end
        reply[r + 1], reply[r + 2] = active < a and a - active or 0, active > 0 and at(-1) + b - now or 0
      end
    end
  elseif asked ~= 'A' and active + cost > a then
    if cost > a then status, retry = 2, -1
    else status, retry = 1, at(low + active + cost - a - 1) + b - now end
    if behind then value = mend end
  elseif cost > 0 then
    remaining, reset = free - cost, b
    value = function()
      if behind then mend() end
      for _ = 1, cost do call('RPUSH', key, format('%d', now)) end
      if low > 0 then call('LTRIM', key, format('%d', low), '-1') end
      expire()
    end
  end
