-- Keeps what operators decided about single identities in one hash for all gateways: writes a field or takes it away.
--
-- KEYS[1]  the hash
-- ARGV[1]  the field
-- ARGV[2]  how long it is to be kept, in microseconds; 0 = take it away
-- ARGV[3]  what it says
-- ARGV[4]  how many fields there may be that begin with the same word
-- Reply    1; 0 = there was none to take away; -1 = there are too many
--
-- A value is the instant until which it holds, in microseconds, a space, and what it says. Those that are over are swept
-- out with every write; the hash itself lives as long as the last of them.
local call, floor, tonumber, match, format = redis.call, math.floor, tonumber, string.match, string.format
local key, field, lasts, says, most = KEYS[1], ARGV[1], tonumber(ARGV[2]), ARGV[3], tonumber(ARGV[4])
local time = call('TIME')
local now = time[1] * 1000000 + time[2]
local all, count, last, known = call('HGETALL', key), 0, 0, 0
for i = 1, #all, 2 do
  local holds = tonumber(match(all[i + 1], '^(%d+) ')) or 0
  if all[i] == field then
    known = 1
  elseif holds <= now then
    call('HDEL', key, all[i])
  else
    if match(all[i], '^%a+') == match(field, '^%a+') then count = count + 1 end
    if holds > last then last = holds end
  end
end
local result = 1
if lasts == 0 then
  if known == 1 then call('HDEL', key, field) end
  result = known
elseif count >= most then
  result = -1
else
  local holds = now + lasts
  if holds > last then last = holds end
  call('HSET', key, field, format('%d', holds) .. ' ' .. says)
end
-- A hash without fields is gone by itself.
if last > now then call('PEXPIRE', key, format('%d', floor((last - now) / 1000) + 1000)) end
return result
