-- The frame for the commonest call: one request, operation C, one limit that is neither shadow nor post-paid. The contract and
-- the replies of check.lua for that case, without its tables and loops, which cost a third of the call.
local call, floor, ceil, match, format = redis.call, math.floor, math.ceil, string.match, string.format
if #KEYS ~= 1 or #ARGV ~= 12 or ARGV[3] ~= 'C' or ARGV[7] ~= '-' then
  return redis.error_reply('RLARG not a check of one limit')
end
local op, asked, most, charged_at, r, reply = 'C', 'C', 4503599627370496, 0, 3, nil
-- A word in the place of a number is an error of Lua's own; nothing is written before the end.
local now, key, kind, cost, c_text = ARGV[1] + 0, KEYS[1], ARGV[6], ARGV[8] + 0, ARGV[11]
local a, b, c, d = ARGV[9] + 0, ARGV[10] + 0, c_text + 0, ARGV[12]
if now == 0 then
  local time = call('TIME')
  now = time[1] * 1000000 + time[2]
end
local status, remaining, reset, retry, free, free_reset, value, ttl = 0, 0, 0, 0, 0, 0, nil, nil
if not kind then
  return redis.error_reply('RLARG unknown kind')
--@kinds
else
  return redis.error_reply('RLARG unknown kind')
end
if ttl then
  call('SET', key, value, 'PX', format('%d', ceil(ttl / 1000) + 1000))
elseif value then value() end
if status ~= 0 then
  if free < 0 then free = 0 end
  return {now, 0, status, free, free_reset, retry}
end
if remaining < 0 then remaining = 0 end
return {now, 1, 0, remaining, reset, 0}
