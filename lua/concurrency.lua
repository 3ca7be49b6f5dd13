-- Concurrency limit, kind C: each request in flight holds a permit.
-- Parameter `a` (limit): maximum number of permits.
-- Parameter `b` (ttl): permit TTL in microseconds.
-- Parameter `d` (permit_id): id of the request's permit, 8 bytes.
-- A charge takes one permit if its cost is at least 1, and none if its cost is 0. Operation R releases the permit.
-- Operation N renews the permit, or adds it if it is missing. The permit then expires one TTL after the current time.
-- State: a ZSET of permit ids. The score of a permit is the time at which it expires, in microseconds. If a stored
-- permit expires later than a new permit would, the clock was set back. The next charge, renewal or denial then reduces
-- its expiry to that of a new permit.
-- So that a script run stays short, it removes at most 100 expired permits, and reduces the expiry of at most 100
-- permits. Expired permits do not count, and later runs remove the others.
-- The script cannot know when requests will release their permits. A denial therefore has status 3, and retry_us is the
-- time until enough permits expire.
local call, ceil, format = redis.call, math.ceil, string.format
local unpack_list = table.unpack or unpack
local KEY_SLACK_MS
local key, operation, op, cost, a, b, d, now
local status, remaining, reset_us, retry_us, free, free_reset_us, commit
--@body
local limit, ttl, permit_id = a, b, d
if operation == 'T' then return redis.error_reply('RLARG operation T does not support concurrency limits') end
local now_text, expires_at = format('%d', now), format('%d', now + ttl)
local live = call('ZCOUNT', key, '(' .. now_text, '+inf')
local clock_went_back = call('ZCOUNT', key, '(' .. expires_at, '+inf') > 0
local function remove_expired()
  local expired = call('ZRANGEBYSCORE', key, '-inf', now_text, 'LIMIT', '0', '100')
  if #expired > 0 then call('ZREM', key, unpack_list(expired)) end
end
local function repair_and_expire()
  local late = call('ZRANGEBYSCORE', key, '(' .. expires_at, '+inf', 'LIMIT', '0', '100')
  for i = 1, #late do call('ZADD', key, expires_at, late[i]) end
  call('PEXPIRE', key, format('%d', ceil(ttl / 1000) + KEY_SLACK_MS))
end
if cost > 1 then cost = 1 end
free, free_reset_us = limit - live, live > 0 and ttl or 0

remaining, reset_us = free, free_reset_us
if op == 'R' then
  commit = function() call('ZREM', key, permit_id) end
elseif op == 'N' then
  -- Remove expired permits first: after the first write command of a script, Redis accepts ZADD even beyond
  -- `maxmemory`. If Redis rejected ZADD, the permit would expire while its request is still in flight. ZADD also adds a
  -- permit that Redis has lost, even beyond the limit, because the request of this permit is in flight.
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
  -- ZADD is the first write, so that Redis rejects ZADD beyond `maxmemory`. After another write, Redis would accept
  -- ZADD.
  commit = function()
    call('ZADD', key, expires_at, permit_id)
    remove_expired()
    repair_and_expire()
  end
end
