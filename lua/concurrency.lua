-- Concurrency limit, kind C: a permit for each request in flight.
-- a limit      maximum number of permits
-- b ttl        permit TTL in microseconds
-- d permit_id  8 bytes
-- A charge takes one permit if its cost is at least 1, and none if its cost is 0. R releases the permit. N renews the
-- permit, which then expires one TTL after the current time. If the permit is missing, N adds the permit.
-- State: a ZSET of permit ids. The score of a permit is the time at which it expires. If a permit expires later than a
-- new permit would, the clock was set back: the permit gets the expiry of a new permit.
-- The script cannot know when requests will release their permits. A denial therefore has status 3, and retry_us is the
-- time until enough permits expire.
local call, ceil, format = redis.call, math.ceil, string.format
local KEY_SLACK_MS
local key, operation, op, cost, a, b, d, now
local status, remaining, reset_us, retry_us, free, free_reset_us, commit
--@body
local limit, ttl, permit_id = a, b, d
if operation == 'T' then return redis.error_reply('RLARG operation T does not support concurrency limits') end
local now_text, expires_at = format('%d', now), format('%d', now + ttl)
local live = call('ZCOUNT', key, '(' .. now_text, '+inf')
local clock_went_back = call('ZCOUNT', key, '(' .. expires_at, '+inf') > 0
local function remove_expired() call('ZREMRANGEBYSCORE', key, '-inf', now_text) end
local function repair_and_expire()
  local late = call('ZRANGEBYSCORE', key, '(' .. expires_at, '+inf')
  for i = 1, #late do call('ZADD', key, expires_at, late[i]) end
  call('PEXPIRE', key, format('%d', ceil(ttl / 1000) + KEY_SLACK_MS))
end
if cost > 1 then cost = 1 end
free, free_reset_us = limit - live, live > 0 and ttl or 0

remaining, reset_us = free, free_reset_us
if op == 'R' then
  commit = function() call('ZREM', key, permit_id) end
elseif op == 'N' then
  -- If a script begins with a command that deletes, Redis accepts its ZADD even beyond `maxmemory`. If Redis rejected
  -- ZADD, the permit would expire before its request ends. A permit that Redis has lost is added again even if the
  -- number of permits then exceeds the limit, because the request of the permit is in flight.
  reset_us = ttl
  commit = function()
    remove_expired()
    call('ZADD', key, expires_at, permit_id)
    repair_and_expire()
  end
elseif op ~= 'A' and live + cost > limit then
  local skip = format('%d', live + cost - limit - 1)
  local blocking = call('ZRANGEBYSCORE', key, '(' .. now_text, '+inf', 'WITHSCORES', 'LIMIT', skip, '1')
  status, retry_us = 3, tonumber(blocking[2]) - now
  if retry_us > ttl then retry_us = ttl end
  if clock_went_back then commit = repair_and_expire end
elseif cost > 0 then
  remaining, reset_us = free - 1, ttl
  -- ZADD is the first command, so that Redis can reject ZADD beyond `maxmemory`. After a command that deletes, Redis
  -- would accept ZADD.
  commit = function()
    call('ZADD', key, expires_at, permit_id)
    remove_expired()
    repair_and_expire()
  end
end
