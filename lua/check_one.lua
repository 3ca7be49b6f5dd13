-- The frame for the commonest calls: requests of operation C with one limit each, of kind B, F, X or W, which is neither shadow nor
-- post-paid. The contract and the replies of check.lua, without its tables and functions, which cost a quarter of a check in a
-- call of many, and more alone. What goes wrong with one request is said in its place: commands are called by pcall, and
-- no kind of these has errors of its own.
local call, floor, ceil, format, pack, unpack = redis.pcall, math.floor, math.ceil, string.format, struct.pack, struct.unpack
local op, asked, most, charged_at = 'C', 'C', 4503599627370496, 0
-- A word in the place of a number is an error of Lua's own, before anything of its request is written.
local now, first, at = tonumber(ARGV[1]), 0, 1
if now == 0 then
  local time = call('TIME')
  now = time[1] * 1000000 + time[2]
end
local reply = {now}
while now and at < #ARGV do
  local size, kind, cost = ARGV[at + 1] + 0, ARGV[at + 5], ARGV[at + 7] + 0
  local a, b, c, d = ARGV[at + 8] + 0, ARGV[at + 9] + 0, ARGV[at + 10] + 0, ARGV[at + 11]
  if ARGV[at + 2] ~= 'C' or ARGV[at + 4] ~= '1' or ARGV[at + 6] ~= '-'
    or kind ~= 'B' and kind ~= 'F' and kind ~= 'X' and kind ~= 'W' or first + size > #KEYS then
    return redis.error_reply('RLARG not checks of one limit each')
  end
  for i = first + 1, first + size do
    local key, place = KEYS[i], 5 * i - 3
    local status, remaining, reset, retry, free, free_reset, lasts, ends, x, y, z, failure = 0, 0, 0, 0, 0, 0
    local state = call('GET', key)
    if state then
      if #state == 32 then ends, x, y, z = unpack('<i8i8i8i8', state)
      else failure = state.err and state or redis.error_reply('WRONGTYPE this is no state of a limit') end
    end
    if failure then
--@kinds
    end
    if lasts then
      local slack = ends and ends - now - lasts or 0
      if slack >= 500000 and slack < 1001000 then
        state = call('SETRANGE', key, '0', pack('<i8i8i8i8', ends, x, y, z))
      else
        local ttl = ceil(lasts / 1000) + 1000
        state = call('SET', key, pack('<i8i8i8i8', now + ttl * 1000, x, y, z), 'PX', format('%d', ttl))
      end
      failure = type(state) == 'table' and state.err and state
    end
    if failure then
      reply[place], reply[place + 1], reply[place + 2], reply[place + 3], reply[place + 4] = failure, 0, 0, 0, 0
    elseif status ~= 0 then
      reply[place], reply[place + 1], reply[place + 2], reply[place + 3], reply[place + 4] = 0, status, free < 0 and 0 or free, free_reset, retry
    else
      reply[place], reply[place + 1], reply[place + 2], reply[place + 3], reply[place + 4] = 1, 0, remaining < 0 and 0 or remaining, reset, 0
    end
  end
  first, at = first + size, at + 11
end
if first == 0 or first ~= #KEYS then
  return redis.error_reply('RLARG wrong number of keys')
end
return reply
