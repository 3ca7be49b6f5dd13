-- The frame: reads the time, asks every limit, then commits all or none and replies.
--
-- KEYS[i]  the key of limit i; in Redis Cluster all of them share a slot.
-- ARGV[1]  operation: C check and commit | P peek | A charge unconditionally | R refund | T take up to cost (unit checks)
-- ARGV[2]  now in microseconds, 0 = the server's TIME
-- ARGV[3]  R: when the refunded charge was made, in microseconds; else 0
-- then 7 for each limit: kind, flags (- | s shadow | p post-paid), cost, a, b, c, d: the kind's file says what a to d mean
-- Reply    [granted, now_us, (status, remaining, reset_us, retry_us) for each limit]
--          status 0 ok, 1 over (retry is exact), 2 never fits (retry -1); a denied request shows what is there uncharged
-- Errors   RLARG ...: bad arguments, nothing was written
--
-- A kind is a function kinds.X(key, op, cost, a, b, c, d) that writes nothing. It returns
--   status, remaining, reset, retry   with the charge made (without it when the status is not 0)
--   remaining, reset                  without the charge
--   value, ttl                        what to SET with which TTL in microseconds; false = the state is empty; nil = leave it;
--                                     a function = call it to commit
-- With a status other than 0, `value` mends a state that lies in the future because the clock was set back.
-- All arithmetic is on integers below 2^53; the loader of the configuration sees to that.
local call, floor, ceil = redis.call, math.floor, math.ceil
local match, format = string.match, string.format
local op, now, charged_at = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local count = #KEYS
if count == 0 or #ARGV ~= 3 + 7 * count or not now or not charged_at then
  return redis.error_reply('RLARG wrong number of arguments')
end
if now == 0 then
  local time = call('TIME')
  now = time[1] * 1000000 + time[2]
end

-- Plain digits: `..` and tostring switch to 1e+15 notation.
local function text(number) return format('%.0f', number) end
-- TTL is garbage collection only: a second of slack, so that no decision depends on it.
local function pexpire(us) return text(ceil(us / 1000) + 1000) end

local kinds = {}
--@kinds

local reply, changes, free
local function ask(op, units)
  local admitted = true
  reply, changes, free = {1, now}, {}, {}
  for i = 1, count do
    local o = 3 + 7 * (i - 1)
    local kind, flags, cost = kinds[ARGV[o + 1]], ARGV[o + 2], units or tonumber(ARGV[o + 3])
    if not kind or not cost then return nil end
    -- Post-paid: admitted while one unit is left, charged afterwards by A.
    local postpaid = flags == 'p' and op == 'C'
    if postpaid then cost = 1 end
    local status, remaining, reset, retry, free_remaining, free_reset, value, ttl =
      kind(KEYS[i], op, cost, tonumber(ARGV[o + 4]), tonumber(ARGV[o + 5]), tonumber(ARGV[o + 6]), ARGV[o + 7])
    if free_remaining < 0 then free_remaining = 0 end
    if remaining < 0 then remaining = 0 end
    if status == 0 and postpaid then remaining, reset, value = free_remaining, free_reset, nil end
    if status ~= 0 and flags ~= 's' then admitted = false end
    changes[i], free[i] = {status, value, ttl}, {free_remaining, free_reset}
    local r = 4 * i
    reply[r - 1], reply[r], reply[r + 1], reply[r + 2] = status, remaining, reset, retry
  end
  return admitted
end

local granted, admitted
if op == 'T' then
  -- As many single units as every limit still has, in one charge.
  if ask('P', 0) == nil then return redis.error_reply('RLARG unknown kind or bad cost') end
  granted = tonumber(ARGV[6])
  for i = 1, count do
    if free[i][1] < granted and ARGV[3 + 7 * (i - 1) + 2] ~= 's' then granted = free[i][1] end
  end
  op = 'C'
  admitted = ask(op, granted > 0 and granted or 1)
elseif op == 'C' or op == 'P' or op == 'A' or op == 'R' then
  admitted = ask(op)
else
  return redis.error_reply('RLARG unknown operation')
end
if admitted == nil then return redis.error_reply('RLARG unknown kind or bad cost') end

for i = 1, count do
  local status, value, ttl = changes[i][1], changes[i][2], changes[i][3]
  if op ~= 'P' and value ~= nil and (admitted or status ~= 0) then
    if value == false then
      if op == 'R' then call('DEL', KEYS[i]) end
    elseif type(value) == 'function' then value()
    else call('SET', KEYS[i], value, 'PX', pexpire(ttl)) end
  end
  if op == 'P' or not admitted then
    local r = 4 * i
    reply[r], reply[r + 1] = free[i][1], free[i][2]
  end
end
reply[1] = admitted and (granted or 1) or 0
return reply
