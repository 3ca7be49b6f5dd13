-- The frame for calls in which requests of operation C have up to @n limits each, of kind B, F, X or W, none of them shadow or
-- post-paid. The contract and the replies of check.lua, without its tables and functions, which cost a quarter of a check. What
-- goes wrong with one request is said in its place: commands are called by pcall, and no kind of these has errors of its own.
-- The gateway puts in the most limits of a request, 2 to 4, for the at sign with n, and writes each block in square brackets with at
-- signs so often, with the number of the limit for the sign.
local call, floor, ceil, format, pack, unpack = redis.pcall, math.floor, math.ceil, string.format, struct.pack, struct.unpack
local keys, said, most, charged_at, asked = KEYS, ARGV[1], 4503599627370496, 0, 'C'
if #ARGV ~= 1 or #said < 8 then
  return redis.error_reply('RLARG wrong number of arguments')
end
local now, at = unpack('<d', said)
-- All groups are validated before the first is decided. The values of a single group are not unpacked twice.
local groups, expected = 0, 0
local size, op, _, count@[, kind@, flags@, cost@, a@, b@, c@, d@]@
while at <= #said do
  if #said - at < 24 then
    return redis.error_reply('RLARG wrong number of arguments')
  end
  size, op, _, count, at = unpack('<dc1dd', said, at)
  if op ~= 'C' or not (size >= 1 and size % 1 == 0 and count >= 1 and count <= @n and count % 1 == 0)
    or #said - at < 42 * count - 1 then
    return redis.error_reply('RLARG not checks of a few limits each')
  end
@[  if count >= @ then
    kind@, flags@, cost@, a@, b@, c@, d@, at = unpack('<c1c1ddddc8', said, at)
    if flags@ ~= '-' or kind@ ~= 'B' and kind@ ~= 'F' and kind@ ~= 'X' and kind@ ~= 'W' then
      return redis.error_reply('RLARG not checks of a few limits each')
    end
  end
]@  groups, expected = groups + 1, expected + size * count
end
if expected == 0 or expected ~= #keys then
  return redis.error_reply('RLARG wrong number of keys')
end
if now == 0 then
  local time = call('TIME')
  now = time[1] * 1000000 + time[2]
end
local answers, answered, failures, first = {pack('<d', now)}, 1, nil, 0
at = 9
for group = 1, groups do
  if groups > 1 then
    size, op, _, count, at = unpack('<dc1dd', said, at)
@[    if count >= @ then kind@, _, cost@, a@, b@, c@, d@, at = unpack('<c1c1ddddc8', said, at) end
]@  end
  for _ = 1, size do
    local admitted, failure = true, nil
@[    local status@, remaining@, reset@, retry@, free@, free_reset@, value@, ttl@
    if count >= @ then
      local kind, cost, a, b, c, d, state = kind@, cost@, a@, b@, c@, d@, call('GET', keys[first + @])
      local status, remaining, reset, retry, free, free_reset, lasts, ends, x, y, z = 0, 0, 0, 0, 0, 0
      if state then
        if #state == 32 then ends, x, y, z = unpack('<i8i8i8i8', state)
        else failure = state.err and state or redis.error_reply('WRONGTYPE this is no state of a limit') end
      end
      if failure then
--@kinds
      end
      if status ~= 0 then admitted = false end
      status@, remaining@, reset@, retry@, free@, free_reset@ = status, remaining, reset, retry, free, free_reset
      if lasts then
        local slack = ends and ends - now - lasts or 0
        if slack >= 500000 and slack < 1001000 then
          value@ = pack('<i8i8i8', x, y, z)
        else
          ttl@ = ceil(lasts / 1000) + 1000
          value@ = pack('<i8i8i8i8', now + ttl@ * 1000, x, y, z)
        end
      end
    end
]@@[    if value@ and not failure and (admitted or status@ ~= 0) then
      if ttl@ then
        local done = call('SET', keys[first + @], value@, 'PX', format('%d', ttl@))
        failure = done.err and done
      else
        local done = call('SETRANGE', keys[first + @], '8', value@)
        failure = done ~= 32 and done
      end
    end
]@    if failure then
      failures = failures or {}
      failures[#failures + 1], failures[#failures + 2] = first, failure
    end
    local granted = failure and -1 or admitted and 1 or 0
@[    if not admitted then remaining@, reset@ = free@, free_reset@ end
    if remaining@ and remaining@ < 0 then remaining@ = 0 end
]@    if count == @n then
      answers[answered + 1] = pack('<@[ddddd]@'@[, granted, status@, remaining@, reset@, retry@]@)
      answered = answered + 1
    else
@[      if count >= @ then answers[answered + @] = pack('<ddddd', granted, status@, remaining@, reset@, retry@) end
]@      answered = answered + count
    end
    first = first + count
  end
end
answers = table.concat(answers)
if failures then table.insert(failures, 1, answers) end
return failures or answers
