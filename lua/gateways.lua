-- Counts the gateways that share the store. Each gateway repeats the call before its entry expires.
--
-- KEYS[1]  A ZSET of the ids of the gateways. The score of an id is the time at which it expires, in microseconds.
-- ARGV[1]  Id of the gateway. The ids of gateways that read the states of an identity from one key end with "/2".
-- ARGV[2]  TTL of the entry in microseconds. 0 removes the entry.
-- Reply    The number of gateways, and the number of those that read only separate keys.
--
-- The time is that of Redis, so the clocks of the gateways do not matter. An entry that expires later than a new one was
-- written before the clock of Redis was set back. The script removes it, and its gateway adds it again.
-- ZREMRANGEBYSCORE is the first command, because Redis accepts ZADD beyond `maxmemory` only after another write.
local call, ceil, format, tonumber = redis.call, math.ceil, string.format, tonumber
local key, id, ttl = KEYS[1], ARGV[1], tonumber(ARGV[2])
local time = call('TIME')
local now = time[1] * 1000000 + time[2]
call('ZREMRANGEBYSCORE', key, '-inf', format('%.0f', now))
if ttl == 0 then
  call('ZREM', key, id)
else
  local expires_at = format('%.0f', now + ttl)
  call('ZREMRANGEBYSCORE', key, '(' .. expires_at, '+inf')
  call('ZADD', key, expires_at, id)
  call('PEXPIRE', key, format('%d', ceil(ttl / 1000)))
end
local ids, older = call('ZRANGEBYSCORE', key, '-inf', '+inf'), 0
for i = 1, #ids do
  if string.sub(ids[i], -2) ~= '/2' then older = older + 1 end
end
return {#ids, older}
