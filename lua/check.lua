-- The frame: reads the time once, then decides one request after the other: asks all limits of it, commits all or none.
--
-- KEYS     for each request its keys, one for each limit; in Redis Cluster all of them share a slot
-- ARGV[1]  bytes, as struct.pack makes them: numbers are d, doubles of 8 bytes, lowest first
--          d   now in microseconds, 0 = the server's TIME
--          then for each group of requests that differ in their keys only, in the order of the keys:
--          d   how many they are
--          c1  operation: C check and commit | P peek | A charge unconditionally | R refund | T take up to cost (unit
--              checks) | N renew (leases of kind C only; one that is gone is added)
--          d   R: when the refunded charge was made, in microseconds; else 0. What it may give back of a bucket: token_bucket.lua
--          d   how many limits each of them has
--          and for each limit: c1 kind, c1 flags (- | s shadow | p post-paid | b both), d cost, d a, d b, d c, c8 d: the
--          kind's file says what a to d mean
-- Reply    bytes: d now_us, then for each limit of each request: d granted, d status, d remaining, d reset_us, d retry_us
--          status 0 ok, 1 over (retry is exact), 2 never fits (retry -1), 3 busy (retry is an upper bound); a denied
--          request shows what is there uncharged
--          Where some requests failed an array: the bytes, with -1 for granted where they would be, then for each of
--          them how many keys come before its own, and its error: RLARG ...; RLSTALE ...: see fixed_window.lua; what Redis says of its commands
-- Errors   RLARG ...: bad arguments; of the whole call, and nothing was written
-- As text, arguments and reply would cost Redis a tenth more, and the gateway's parser 3,000 instructions for each limit.
--
-- The kinds are branches of one `if`, put in place of the mark below; functions would cost more than what they do.
-- A branch writes nothing. It reads key, asked (C, P, A, R or N), cost, a, b, c, d and now, and sets
--   status, remaining, reset, retry   with the charge made (without it when the status is not 0)
--   free, free_reset                  what remains, and when all is back, without the charge
--   lasts                             for how many microseconds the new state means something; false = it is empty; nil = leave it
--   value                             what the new state is; or a function, without `lasts`: call it to commit
-- The state of most kinds is three numbers, x, y and z: the frame reads them (`ends` is nil if there is none), and writes them
-- where `lasts` is set and `value` is not. They are 32 bytes: when the key ends by `now`, then x, y and z; integers of 8 bytes,
-- lowest first. As text they would cost a fifth of a check.
-- The TTL is garbage collection only: a second of slack, so that no decision depends on it. Where half of that is left the key
-- is written into, which costs half of setting it.
-- Beyond `maxmemory` Redis rejects commands that may take memory (SET, SETRANGE, ZADD, RPUSH), but only until the script has
-- written. A charge therefore begins with such a command, and the gateway puts groups that may delete first (R, N) last.
-- With a status other than 0, the new state mends one that lies in the future because the clock was set back, or is that of a
-- bucket at another rate, see token_bucket.lua.
-- All arithmetic is on integers below 2^53: the loader of the configuration sees to that, and charges that ask for no room
-- (A) stop adding where a state reaches 2^52 (most). Numbers become text by %d:
-- `..` and tostring switch to 1e+15 notation, %.0f is three times as slow and writes -0.
local call, floor, ceil, match, format = redis.call, math.floor, math.ceil, string.match, string.format
local pack, unpack = struct.pack, struct.unpack
local most = 4503599627370496
local said, keys, groups, expected = ARGV[1], KEYS, {}, 0
if #ARGV ~= 1 or #said < 8 then
  return redis.error_reply('RLARG wrong number of arguments')
end
local now, at = unpack('<d', said)
while at <= #said do
  if #said - at < 24 then
    return redis.error_reply('RLARG wrong number of arguments')
  end
  local size, op, charged_at, count, terms
  size, op, charged_at, count, at = unpack('<dc1dd', said, at)
  if not (size >= 1 and size % 1 == 0 and count >= 1 and count % 1 == 0 and at + 42 * count - 1 <= #said) then
    return redis.error_reply('RLARG wrong number of arguments')
  end
  if op ~= 'C' and op ~= 'P' and op ~= 'A' and op ~= 'R' and op ~= 'T' and op ~= 'N' then
    return redis.error_reply('RLARG unknown operation')
  end
  terms = {}
  for i = 1, count do
    local o = 8 * i - 8
    terms[o + 1], terms[o + 2], terms[o + 3], terms[o + 4], terms[o + 5], terms[o + 6], terms[o + 7], at = unpack('<c1c1ddddc8', said, at)
    terms[o + 8] = terms[o + 1] ~= 'S' and terms[o + 1] ~= 'L' and terms[o + 1] ~= 'C'
  end
  groups[#groups + 1] = {size, op, charged_at, count, terms}
  expected = expected + size * count
end
if expected == 0 or expected ~= #keys then
  return redis.error_reply('RLARG wrong number of keys')
end
if now == 0 then
  local time = call('TIME')
  now = time[1] * 1000000 + time[2]
end

local answers, failures, reply, kept = {pack('<d', now)}, nil, {}, {}
local op, charged_at, count, terms
-- Decides the request whose keys follow the first so many.
local function decide(first)
  local asked, units, granted, admitted = op, nil, nil, nil
  -- T asks twice: how many single units are left, then for as many in one charge.
  if op == 'T' then asked, units = 'P', 0 end
  repeat
    admitted = true
    for i = 1, count do
      local o, r = 8 * i - 8, 4 * i - 3
      local key, kind, flags, cost = keys[first + i], terms[o + 1], terms[o + 2], units or terms[o + 3]
      local a, b, c, d = terms[o + 4], terms[o + 5], terms[o + 6], terms[o + 7]
      local status, remaining, reset, retry, free, free_reset, value, lasts, ttl, ends, x, y, z = 0, 0, 0, 0, 0, 0
      local state = terms[o + 8] and call('GET', key)
      if state then
        if #state ~= 32 then return redis.error_reply('WRONGTYPE this is no state of a limit') end
        ends, x, y, z = unpack('<i8i8i8i8', state)
      end
      -- Post-paid: admitted while one unit is left, charged afterwards by A.
      local postpaid = (flags == 'p' or flags == 'b') and op == 'C'
      if postpaid then cost = 1 end
      if op == 'N' and kind ~= 'C' then
        return redis.error_reply('RLARG only leases are renewed')
--@kinds
      else
        return redis.error_reply('RLARG unknown kind')
      end
      if free < 0 then free = 0 end
      if remaining < 0 then remaining = 0 end
      if status ~= 0 then
        if flags ~= 's' and flags ~= 'b' then admitted = false end
      elseif postpaid then
        remaining, reset, lasts, value = free, free_reset, nil, nil
      end
      if lasts then
        local slack = ends and ends - now - lasts or 0
        if slack >= 500000 and slack < 1001000 then
          value, ttl = pack('<i8i8i8', x, y, z), 0
        else
          ttl = ceil(lasts / 1000) + 1000
          value = value or pack('<i8i8i8i8', now + ttl * 1000, x, y, z)
        end
      elseif lasts == false then value = false end
      reply[r], reply[r + 1], reply[r + 2], reply[r + 3] = status, remaining, reset, retry
      kept[r], kept[r + 1], kept[r + 2], kept[r + 3] = value, ttl, free, free_reset
    end
    local decided = op ~= 'T' or granted
    if not decided then
      local wanted = terms[3]
      granted = wanted
      for i = 1, count do
        local free, flags = kept[4 * i - 1], terms[8 * i - 6]
        if free < granted and flags ~= 's' and flags ~= 'b' then granted = free end
      end
      -- With nothing left, one unit is asked for, to learn when it will fit.
      asked, units = wanted > 0 and 'C' or 'P', wanted > 0 and granted < 1 and 1 or granted
    end
  until decided

  granted = admitted and (granted or 1) or 0
  for i = 1, count do
    local r = 4 * i - 3
    local value, ttl = kept[r], kept[r + 1]
    if value ~= nil and asked ~= 'P' and (admitted or reply[r] ~= 0) then
      if ttl == 0 then call('SETRANGE', keys[first + i], '8', value)
      elseif ttl then call('SET', keys[first + i], value, 'PX', format('%d', ttl))
      elseif value then value()
      elseif op == 'R' then call('DEL', keys[first + i]) end
    end
    if asked == 'P' or not admitted then reply[r + 1], reply[r + 2] = kept[r + 2], kept[r + 3] end
    answers[first + i + 1] = pack('<ddddd', granted, reply[r], reply[r + 1], reply[r + 2], reply[r + 3])
  end
end

local first = 0
for g = 1, #groups do
  local group = groups[g]
  op, charged_at, count, terms = group[2], group[3], group[4], group[5]
  for _ = 1, group[1] do
    -- What fails for one request is no reason to fail for the others.
    local _, failure = pcall(decide, first)
    if failure then
      -- As text: Lua's own errors, some of Redis', and before version 7 all.
      if type(failure) ~= 'table' then
        failure = redis.error_reply(match(failure, '^%u+ ') and failure or 'ERR Error running script: ' .. failure)
      end
      failures = failures or {}
      failures[#failures + 1], failures[#failures + 2] = first, failure
      for i = 1, count do answers[first + i + 1] = pack('<ddddd', -1, 0, 0, 0, 0) end
    end
    first = first + count
  end
end
answers = table.concat(answers)
if failures then table.insert(failures, 1, answers) end
return failures or answers
