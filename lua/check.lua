-- The frame: reads the time once, then decides one request after the other: asks all limits of it, commits all or none.
--
-- KEYS     for each request its keys, one for each limit; in Redis Cluster all of them share a slot
-- ARGV[1]  now in microseconds, 0 = the server's TIME
-- then for each group of requests that differ in their keys only, in the order of the keys:
--          how many they are
--          operation: C check and commit | P peek | A charge unconditionally | R refund | T take up to cost (unit checks)
--          | N renew (leases of kind C only)
--          R: when the refunded charge was made, in microseconds; else 0
--          how many limits each of them has
--          and 7 for each limit: kind, flags (- | s shadow | p post-paid | sp both), cost, a, b, c, d: the kind's file says
--          what a to d mean
-- Reply    [now_us, then for each request: granted, (status, remaining, reset_us, retry_us) for each limit]
--          status 0 ok, 1 over (retry is exact), 2 never fits (retry -1), 3 busy (retry is an upper bound); a denied
--          request shows what is there uncharged
-- Errors   RLARG ...: bad arguments; of the whole call, and nothing was written. Else in the place of `granted`, for this
--          request alone: RLARG ...; RLSTALE ...: see fixed_window.lua; what Redis says of its commands
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
-- With a status other than 0, the new state mends one that lies in the future because the clock was set back.
-- All arithmetic is on integers below 2^53: the loader of the configuration sees to that, and charges that ask for no room
-- (A) stop adding where a state reaches 2^52 (most). Numbers become text by %d:
-- `..` and tostring switch to 1e+15 notation, %.0f is three times as slow and writes -0.
local call, floor, ceil, match, format = redis.call, math.floor, math.ceil, string.match, string.format
local pack, unpack = struct.pack, struct.unpack
local most = 4503599627370496
local now, groups, keys, at = tonumber(ARGV[1]), {}, 0, 1
while now and at < #ARGV do
  local size, op, charged_at, count = tonumber(ARGV[at + 1]), ARGV[at + 2], tonumber(ARGV[at + 3]), tonumber(ARGV[at + 4])
  if not size or not charged_at or not count or count < 1 or at + 4 + 7 * count > #ARGV then
    return redis.error_reply('RLARG wrong number of arguments')
  end
  if op ~= 'C' and op ~= 'P' and op ~= 'A' and op ~= 'R' and op ~= 'T' and op ~= 'N' then
    return redis.error_reply('RLARG unknown operation')
  end
  local terms = {}
  for i = 1, count do
    local o, w = 8 * i - 8, at + 7 * i - 3
    terms[o + 1], terms[o + 2], terms[o + 3], terms[o + 4] = ARGV[w + 1], ARGV[w + 2], tonumber(ARGV[w + 3]), tonumber(ARGV[w + 4])
    terms[o + 5], terms[o + 6], terms[o + 7], terms[o + 8] = tonumber(ARGV[w + 5]), tonumber(ARGV[w + 6]), ARGV[w + 7], ARGV[w + 1] ~= 'S' and ARGV[w + 1] ~= 'L' and ARGV[w + 1] ~= 'C'
    if not terms[o + 3] or not terms[o + 4] or not terms[o + 5] or not terms[o + 6] then
      return redis.error_reply('RLARG not a number')
    end
  end
  groups[#groups + 1] = {size, op, charged_at, count, terms}
  keys, at = keys + size * count, at + 4 + 7 * count
end
if keys == 0 or keys ~= #KEYS then
  return redis.error_reply('RLARG wrong number of keys')
end
if now == 0 then
  local time = call('TIME')
  now = time[1] * 1000000 + time[2]
end

local reply, kept = {now}, {}
local op, charged_at, count, terms
-- Decides the request whose keys follow the first so many; its part of the reply begins at `place`.
local function decide(first, place)
  local asked, units, granted, admitted = op, nil, nil, nil
  reply[place] = 0
  -- T asks twice: how many single units are left, then for as many in one charge.
  if op == 'T' then asked, units = 'P', 0 end
  repeat
    admitted = true
    for i = 1, count do
      local o, r, k = 8 * i - 8, place + 4 * i - 3, 4 * i - 3
      local key, kind, flags, cost = KEYS[first + i], terms[o + 1], terms[o + 2], units or terms[o + 3]
      local a, b, c, d = terms[o + 4], terms[o + 5], terms[o + 6], terms[o + 7]
      local status, remaining, reset, retry, free, free_reset, value, lasts, ttl, ends, x, y, z = 0, 0, 0, 0, 0, 0
      local state = terms[o + 8] and call('GET', key)
      if state then
        if #state ~= 32 then return redis.error_reply('WRONGTYPE this is no state of a limit') end
        ends, x, y, z = unpack('<i8i8i8i8', state)
      end
      -- Post-paid: admitted while one unit is left, charged afterwards by A.
      local postpaid = flags ~= '-' and flags ~= 's' and op == 'C'
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
        if flags ~= 's' and flags ~= 'sp' then admitted = false end
      elseif postpaid then
        remaining, reset, lasts, value = free, free_reset, nil, nil
      end
      if lasts then
        local slack = ends and ends - now - lasts or 0
        if slack >= 500000 and slack < 1001000 then
          value, ttl = pack('<i8i8i8i8', ends, x, y, z), 0
        else
          ttl = ceil(lasts / 1000) + 1000
          value = value or pack('<i8i8i8i8', now + ttl * 1000, x, y, z)
        end
      elseif lasts == false then value = false end
      reply[r], reply[r + 1], reply[r + 2], reply[r + 3] = status, remaining, reset, retry
      kept[k], kept[k + 1], kept[k + 2], kept[k + 3] = value, ttl, free, free_reset
    end
    local decided = op ~= 'T' or granted
    if not decided then
      local wanted = terms[3]
      granted = wanted
      for i = 1, count do
        local free, flags = kept[4 * i - 1], terms[8 * i - 6]
        if free < granted and flags ~= 's' and flags ~= 'sp' then granted = free end
      end
      -- With nothing left, one unit is asked for, to learn when it will fit.
      asked, units = wanted > 0 and 'C' or 'P', wanted > 0 and granted < 1 and 1 or granted
    end
  until decided

  for i = 1, count do
    local r, k = place + 4 * i - 3, 4 * i - 3
    local value, ttl = kept[k], kept[k + 1]
    if value ~= nil and asked ~= 'P' and (admitted or reply[r] ~= 0) then
      if ttl == 0 then call('SETRANGE', KEYS[first + i], '0', value)
      elseif ttl then call('SET', KEYS[first + i], value, 'PX', format('%d', ttl))
      elseif value then value()
      elseif op == 'R' then call('DEL', KEYS[first + i]) end
    end
    if asked == 'P' or not admitted then reply[r + 1], reply[r + 2] = kept[k + 2], kept[k + 3] end
  end
  if admitted then reply[place] = granted or 1 end
end

local first, place = 0, 2
for g = 1, #groups do
  local group = groups[g]
  op, charged_at, count, terms = group[2], group[3], group[4], group[5]
  for _ = 1, group[1] do
    -- What fails for one request is no reason to fail for the others.
    local _, failure = pcall(decide, first, place)
    if failure then
      -- As text: Lua's own errors, some of Redis', and before version 7 all.
      if type(failure) ~= 'table' then
        failure = redis.error_reply(match(failure, '^%u+ ') and failure or 'ERR Error running script: ' .. failure)
      end
      reply[place] = failure
      for i = 1, 4 * count do reply[place + i] = 0 end
    end
    first, place = first + count, place + 1 + 4 * count
  end
end
return reply
