-- The frame for the commonest calls: requests of operation C, or T of at least one unit, with one limit each, of kind B, F, X or W,
-- which is neither shadow nor post-paid. The contract and the replies of check.lua, without its tables and functions, which
-- cost a quarter of a check in a call of many, and more alone. What goes wrong with one request is said in its place:
-- commands are called by pcall, and no kind of these has errors of its own.
local call, floor, ceil, format, pack, unpack = redis.pcall, math.floor, math.ceil, string.format, struct.pack, struct.unpack
local keys, said, most, charged_at = KEYS, ARGV[1], 4503599627370496, 0
-- All groups are validated before the first is decided. The values of a single group are not unpacked twice.
if #ARGV ~= 1 or #said < 8 or (#said - 8) % 67 ~= 0 then
  return redis.error_reply('RLARG wrong number of arguments')
end
local now, at = unpack('<d', said)
local groups, expected = (#said - 8) / 67, 0
local size, op, _, count, kind, flags, most_units, a, b, c, d
for _ = 1, groups do
  size, op, _, count, kind, flags, most_units, a, b, c, d, at = unpack('<dc1ddc1c1ddddc8', said, at)
  if op ~= 'C' and (op ~= 'T' or not (most_units >= 1)) or count ~= 1 or flags ~= '-'
    or kind ~= 'B' and kind ~= 'F' and kind ~= 'X' and kind ~= 'W' or not (size >= 1 and size % 1 == 0) then
    return redis.error_reply('RLARG not checks of one limit each')
  end
  expected = expected + size
end
if expected == 0 or expected ~= #keys then
  return redis.error_reply('RLARG wrong number of keys')
end
if now == 0 then
  local time = call('TIME')
  now = time[1] * 1000000 + time[2]
end
local answers, failures, first = {pack('<d', now)}, nil, 0
at = 9
for group = 1, groups do
  if groups > 1 then size, op, _, _, kind, _, most_units, a, b, c, d, at = unpack('<dc1ddc1c1ddddc8', said, at) end
  for i = first + 1, first + size do
    local key, asked, cost, granted = keys[i], 'C', most_units, 1
    local status, remaining, reset, retry, free, free_reset, lasts, ends, x, y, z, failure = 0, 0, 0, 0, 0, 0
    local state = call('GET', key)
    if state then
      if #state == 32 then ends, x, y, z = unpack('<i8i8i8i8', state)
      else failure = state.err and state or redis.error_reply('WRONGTYPE this is no state of a limit') end
    end
    local u, v, w = x, y, z
    -- T asks twice: how many units are left, then for as many, or for one, to learn when it will fit.
    if op == 'T' then asked, cost = 'P', 0 end
    repeat
      local ready = asked == 'C'
      if failure then
--@kinds
      end
      if not ready then
        granted = free < most_units and free or most_units
        asked, cost, lasts, x, y, z = 'C', granted < 1 and 1 or granted, nil, u, v, w
      end
    until ready
    if lasts then
      local slack = ends and ends - now - lasts or 0
      if slack >= 500000 and slack < 1001000 then
        state = call('SETRANGE', key, '8', pack('<i8i8i8', x, y, z))
        failure = state ~= 32 and state
      else
        local ttl = ceil(lasts / 1000) + 1000
        state = call('SET', key, pack('<i8i8i8i8', now + ttl * 1000, x, y, z), 'PX', format('%d', ttl))
        failure = state.err and state
      end
    end
    if failure then
      failures = failures or {}
      failures[#failures + 1], failures[#failures + 2], answers[i + 1] = i - 1, failure, pack('<ddddd', -1, 0, 0, 0, 0)
    elseif status ~= 0 then
      answers[i + 1] = pack('<ddddd', 0, status, free < 0 and 0 or free, free_reset, retry)
    else
      answers[i + 1] = pack('<ddddd', granted, 0, remaining < 0 and 0 or remaining, reset, 0)
    end
  end
  first = first + size
end
answers = table.concat(answers)
if failures then table.insert(failures, 1, answers) end
return failures or answers
