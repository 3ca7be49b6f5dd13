-- Kind C, concurrency: a lease for each request in flight. a the limit, b the length of a lease in microseconds, d its id, 8 bytes.
-- Whatever its cost, a charge is one lease; with a cost of 0, none. Operation R releases it, N lets it end b from now, and adds it if it is gone.
-- State: a ZSET of ids by the instants at which their leases end. What would end later than a new lease (the clock was set
-- back) ends with it. When a lease comes free is not known: status 3, and the retry is when enough of them end by themselves.
elseif kind == 'C' then
  if op == 'T' then return redis.error_reply('RLARG leases are not taken by number') end
  local now_text, till = format('%d', now), format('%d', now + b)
  local live = call('ZCOUNT', key, '(' .. now_text, '+inf')
  local behind = call('ZCOUNT', key, '(' .. till, '+inf') > 0
  local function mend()
    local far = call('ZRANGEBYSCORE', key, '(' .. till, '+inf')
    for j = 1, #far do call('ZADD', key, till, far[j]) end
    call('PEXPIRE', key, format('%d', ceil(b / 1000) + 1000))
  end
  local function sweep() call('ZREMRANGEBYSCORE', key, '-inf', now_text) end
  if cost > 1 then cost = 1 end
  free, free_reset = a - live, live > 0 and b or 0
  remaining, reset = free, free_reset
  if asked == 'R' then
    value = function() call('ZREM', key, d) end
  elseif asked == 'N' then
    -- First the sweep: it makes Redis accept the ZADD beyond `maxmemory`, where a permit that is not renewed would expire before its
    -- request ends. One that the store has lost is registered again, over the limit if need be: its request is running.
    reset = b
    value = function()
      sweep()
      call('ZADD', key, till, d)
      mend()
    end
  elseif asked ~= 'A' and live + cost > a then
    local blocking = call('ZRANGEBYSCORE', key, '(' .. now_text, '+inf', 'WITHSCORES', 'LIMIT', format('%d', live + cost - a - 1), '1')
    status, retry = 3, tonumber(blocking[2]) - now
    if retry > b then retry = b end
    if behind then value = mend end
  elseif cost > 0 then
    remaining, reset = free - 1, b
    -- First the ZADD, which Redis rejects beyond `maxmemory`.
    value = function()
      call('ZADD', key, till, d)
      sweep()
      mend()
    end
  end
