-- The frame: reads the time, asks every limit, then commits all or none and replies.
--
-- KEYS[i]  the key of limit i; in Redis Cluster all of them share a slot.
-- ARGV[1]  operation: C check and commit | P peek | A charge unconditionally | R refund | T take up to cost (unit checks)
--          | N renew (leases of kind C only)
-- ARGV[2]  now in microseconds, 0 = the server's TIME
-- ARGV[3]  R: when the refunded charge was made, in microseconds; else 0
-- then 7 for each limit: kind, flags (- | s shadow | p post-paid | sp both), cost, a, b, c, d: the kind's file says what a to d mean
-- Reply    [granted, now_us, (status, remaining, reset_us, retry_us) for each limit]
--          status 0 ok, 1 over (retry is exact), 2 never fits (retry -1), 3 busy (retry is an upper bound); a denied
--          request shows what is there uncharged
-- Errors   RLARG ...: bad arguments; RLSTALE ...: see fixed_window.lua. Nothing was written
--
-- The kinds are branches of one `if`, put in place of the mark below; functions would cost more than what they do.
-- A branch writes nothing. It reads key, asked (C, P, A, R or N), cost, a, b, c, d and now, and sets
--   status, remaining, reset, retry   with the charge made (without it when the status is not 0)
--   free, free_reset                  what remains, and when all is back, without the charge
--   value, ttl                        what to SET with which TTL in microseconds; value false = the state is empty;
--                                     nil = leave it; without a ttl, a function = call it to commit
-- With a status other than 0, `value` mends a state that lies in the future because the clock was set back.
-- All arithmetic is on integers below 2^53: the loader of the configuration sees to that, and charges that ask for no room
-- (A) stop adding where a state reaches 2^52 (most). Numbers become text by %d:
-- `..` and tostring switch to 1e+15 notation, %.0f is three times as slow and writes -0.
local call, floor, ceil, match, format = redis.call, math.floor, math.ceil, string.match, string.format
local most = 4503599627370496
local op, now, charged_at, count = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), #KEYS
if count == 0 or #ARGV ~= 3 + 7 * count or not now or not charged_at then
  return redis.error_reply('RLARG wrong number of arguments')
end
if op ~= 'C' and op ~= 'P' and op ~= 'A' and op ~= 'R' and op ~= 'T' and op ~= 'N' then
  return redis.error_reply('RLARG unknown operation')
end
if now == 0 then
  local time = call('TIME')
  now = time[1] * 1000000 + time[2]
end

local reply, kept = {1, now, 0, 0, 0, 0}, {0, 0, 0, 0}
local asked, units, granted, admitted = op, nil, nil, nil
-- T asks twice: how many single units are left, then for as many in one charge.
if op == 'T' then asked, units = 'P', 0 end
repeat
  admitted = true
  for i = 1, count do
    local o, r, k = 7 * i - 4, 4 * i - 1, 4 * i - 3
    local key, kind, flags, cost = KEYS[i], ARGV[o + 1], ARGV[o + 2], units or tonumber(ARGV[o + 3])
    local a, b, c, d = tonumber(ARGV[o + 4]), tonumber(ARGV[o + 5]), tonumber(ARGV[o + 6]), ARGV[o + 7]
    local status, remaining, reset, retry, free, free_reset, value, ttl = 0, 0, 0, 0, 0, 0, nil, nil
    -- Post-paid: admitted while one unit is left, charged afterwards by A.
    local postpaid = flags ~= '-' and flags ~= 's' and op == 'C'
    if postpaid then cost = 1 end
    if not cost or not a or not b or not c then
      return redis.error_reply('RLARG not a number')
    elseif op == 'N' and kind ~= 'C' then
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
      remaining, reset, value = free, free_reset, nil
    end
    reply[r], reply[r + 1], reply[r + 2], reply[r + 3] = status, remaining, reset, retry
    kept[k], kept[k + 1], kept[k + 2], kept[k + 3] = value, ttl, free, free_reset
  end
  local decided = op ~= 'T' or granted
  if not decided then
    local wanted = tonumber(ARGV[6])
    granted = wanted
    for i = 1, count do
      local free, flags = kept[4 * i - 1], ARGV[7 * i - 2]
      if free < granted and flags ~= 's' and flags ~= 'sp' then granted = free end
    end
    -- With nothing left, one unit is asked for, to learn when it will fit.
    asked, units = wanted > 0 and 'C' or 'P', wanted > 0 and granted < 1 and 1 or granted
  end
until decided

for i = 1, count do
  local r, k = 4 * i - 1, 4 * i - 3
  local value, ttl = kept[k], kept[k + 1]
  if value ~= nil and asked ~= 'P' and (admitted or reply[r] ~= 0) then
    if ttl then
      -- The TTL is garbage collection only: a second of slack, so that no decision depends on it.
      call('SET', KEYS[i], value, 'PX', format('%d', ceil(ttl / 1000) + 1000))
    elseif value then value()
    elseif op == 'R' then call('DEL', KEYS[i]) end
  end
  if asked == 'P' or not admitted then reply[r + 1], reply[r + 2] = kept[k + 2], kept[k + 3] end
end
if not admitted then reply[1] = 0 elseif granted then reply[1] = granted end
return reply
