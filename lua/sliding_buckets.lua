-- Kind S, sliding buckets: the window in c parts; the oldest, partly out of reach, counts in full, so that no window of
-- any position ever holds more than the limit. a the limit, b the window in microseconds, c the number of parts.
-- State `index:n0,n1,…`: units in the part with that number and in those before it, newest first, without zeros at the end.
elseif kind == 'S' then
  local width, counts, total, behind = floor(b / c), {[0] = 0}, 0, false
  local index = floor(now / width)
  for j = 1, c do counts[j] = 0 end
  local state = call('GET', key)
  if state then
    local newest, list = match(state, '^(%d+):(.*)$')
    local j = index - tonumber(newest)
    if j < 0 then j, behind = 0, true end
    for counted in string.gmatch(list, '%d+') do
      if j > c then break end
      local units = tonumber(counted)
      counts[j], total, j = units, total + units, j + 1
    end
  end
  -- Time until the newest units have dropped out.
  local function until_empty()
    for j = 0, c do
      if counts[j] > 0 then return (index - j + c + 1) * width - now end
    end
    return 0
  end
  local function encode()
    local parts, last = {}, c
    while counts[last] == 0 do last = last - 1 end
    for j = 0, last do parts[j + 1] = format('%d', counts[j]) end
    return format('%d:', index) .. table.concat(parts, ',')
  end
  free, free_reset = a - total, until_empty()
  if total + cost > a and (asked == 'C' or asked == 'P') then
    remaining, reset = free, free_reset
    if cost > a then status, retry = 2, -1
    else
      local excess, j = total + cost - a, c
      while excess > counts[j] do excess, j = excess - counts[j], j - 1 end
      status, retry = 1, (index - j + c + 1) * width - now
    end
    if behind and total > 0 then value, lasts = encode(), reset end
  else
    local j, change = 0, cost
    if asked == 'R' then
      j = index - floor(charged_at / width)
      change = j >= 0 and j <= c and -(counts[j] < cost and counts[j] or cost) or 0
    end
    if total + change > most then change = most - total end
    if change ~= 0 then counts[j], total = counts[j] + change, total + change end
    remaining, reset, lasts = a - total, until_empty(), false
    if total > 0 then value, lasts = encode(), reset end
  end
