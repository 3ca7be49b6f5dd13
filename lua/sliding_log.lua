-- Sliding log, kind L: stores the time of each admitted token. No window contains more than `limit` tokens, whatever
-- the time at which the window begins.
-- Parameter `a` (limit): maximum number of tokens in any window.
-- Parameter `b` (window): window length in microseconds.
-- State: a LIST with one time per token, in microseconds, oldest first. If the clock was set back, a stored time may be
-- in the future. Such a time counts as the current time.
local call, floor, ceil, format = redis.call, math.floor, math.ceil, string.format
local unpack_list = table.unpack or unpack
local KEY_SLACK_MS
local key, op, cost, a, b, now, charged_at
local status, remaining, reset_us, retry_us, free, free_reset_us, commit
--@body
local limit, window = a, b
local length = call('LLEN', key)
local function time_at(index)
  local time = tonumber(call('LINDEX', key, format('%d', index)))
  if time > now then return now end
  return time
end
-- Find the first entry of the window by binary search.
local first_active, high = 0, length
while first_active < high do
  local middle = floor((first_active + high) / 2)
  if time_at(middle) <= now - window then first_active = middle + 1 else high = middle end
end
local active, newest, clock_went_back = length - first_active, nil, false
if active > 0 then
  newest = tonumber(call('LINDEX', key, '-1'))
  if newest > now then newest, clock_went_back = now, true end
end
free, free_reset_us = limit - active, newest and newest + window - now or 0
local function expire() call('PEXPIRE', key, format('%d', ceil(window / 1000) + KEY_SLACK_MS)) end
-- Append the current time `count` times. One RPUSH appends up to 1,000 values: with more values, the function `unpack`
-- of Lua 5.1 would soon run out of stack.
local function append(count)
  local times, now_text = {}, format('%d', now)
  for i = 1, count < 1000 and count or 1000 do times[i] = now_text end
  while count > 0 do
    call('RPUSH', key, unpack_list(times, 1, count < 1000 and count or 1000))
    count = count - 1000
  end
end
-- Drop the oldest `dropped` times, replace the times in the future with the current time, and append the current time
-- `count` times. Times in the future are the last ones of the list. The first write of a repair or charge is RPUSH, so
-- that Redis can reject it beyond `maxmemory`. After another write, such as LTRIM, Redis would accept RPUSH.
local function repair(dropped, count)
  local first_late, end_of_search = first_active, length
  while first_late < end_of_search do
    local middle = floor((first_late + end_of_search) / 2)
    if tonumber(call('LINDEX', key, format('%d', middle))) > now then end_of_search = middle else first_late = middle + 1 end
  end
  append(1)
  if first_late > dropped then call('LTRIM', key, format('%d', dropped), format('%d', first_late - 1))
  else call('DEL', key) end
  append(length - first_late + count)
end

remaining, reset_us = free, free_reset_us
if op == 'R' then
  -- Do not call LREM for a cost of 0: with the count 0, LREM would remove all entries with the time `charged_at`.
  if cost > 0 then
    commit = function()
      local removed = call('LREM', key, format('%d', -cost), format('%d', charged_at))
      if charged_at > now - window then active = active - removed end
      return active < limit and limit - active or 0, active > 0 and time_at(-1) + window - now or 0
    end
  end
elseif op ~= 'A' and active + cost > limit then
  if cost > limit then status, retry_us = 2, -1
  else status, retry_us = 1, time_at(first_active + active + cost - limit - 1) + window - now end
  if clock_went_back then
    commit = function()
      repair(0, 0)
      expire()
    end
  end
elseif cost > 0 then
  remaining, reset_us = free - cost, window
  commit = function()
    if clock_went_back then repair(first_active, cost)
    else
      append(cost)
      if first_active > 0 then call('LTRIM', key, format('%d', first_active), '-1') end
    end
    expire()
  end
end
