-- Generic driver: decides requests with any operation and any limits. It charges all limits of a request or none.
-- This header describes the arguments and replies of all drivers, and the variables of all algorithms.
--
-- KEYS     The keys of the states: one for each limit of each request. In Redis Cluster they share a slot.
-- ARGV[1]  A binary string, in the formats of struct.pack: d is a little-endian double of 8 bytes, c1 is a letter.
--          d   current time in microseconds; 0 = use the clock of Redis
--          Then the requests, in the order of their keys. Requests that differ only in their keys are a group. For each
--          group:
--          d   number of requests
--          c1  operation: C check and charge | P peek: check without a charge | A charge unconditionally | R refund
--              | T take up to the cost: charge as many tokens as remain, but at most the cost
--              | N renew a concurrency permit, or add it if it is missing
--          d   R: time of the refunded charge in microseconds; other operations: 0
--          d   number of limits of each request
--          And for each limit:
--          c1  kind: see the algorithm files
--          c1  flag: - none | s shadow: never denies | p deferred: charged after the response | b both
--          d   cost
--          d a, d b, d c, c8 d: parameters of the kind
-- ARGV[2]  Only of scripts that count usage: for each limit of each group, d day of the month, 0 = no usage is counted;
--          d start and d end of that day in microseconds.
--          The keys of the totals follow those of the states: for each limit of each request whose usage is counted, a
--          hash for the month, in the slot of the state. Its fields are days, its values the cost charged on that day
--          less refunds. If now is not on the day of a charge, the error is RLSTALE, and nothing is written.
-- Reply    A binary string: d the current time, then for each limit of each request: d granted, d status, d remaining,
--          d reset_us, d retry_us.
--          Status: 0 ok | 1 exceeded, retry_us is exact | 2 the cost exceeds the limit, retry_us is -1
--          | 3 no permit is free, retry_us is an upper bound
--          If the request is denied, remaining and reset_us are the values without its charge.
--          If requests fail, the reply is an array. It begins with the binary string, in which granted is -1 for the
--          failed requests. Two elements follow for each failed request: the number of keys before the keys of this
--          request, and the error. The error is RLARG, RLSTALE (see fixed_window.lua) or an error of Redis.
-- Errors   RLARG: the arguments of the call are invalid. Nothing was written.
-- The blocks marked `usage` are only in the scripts for calls with limits that count usage totals. Arguments as text
-- instead of bytes would cost Redis a tenth more CPU, and the parser of the gateway 3,000 instructions per limit.
--
-- Each algorithm is a branch of one `if` statement. A function for each algorithm would be slower, because the call of
-- a function costs more than the algorithm itself.
-- Input    key, kind, cost, a, b, c, d, now, charged_at
--          op: C, P, A, R or N. For T, the driver runs the algorithm with P and then with C.
--          key_expires_at, field1, field2, field3: the state, or nil if there is none
-- Output   status, remaining, reset_us, retry_us: the values after the charge; without it if the status is not 0
--          free, free_reset_us: the values of remaining and reset_us without the charge
--          ttl_us: time after which the new state has no effect and can be deleted; false = the new state is empty;
--          nil = the state does not change
--          new_field1, new_field2, new_field3: the new state
--          new_state: the new state as text, from algorithms that read their state themselves
--          commit: a function that writes the new state, instead of ttl_us. It may return remaining and reset_us.
-- Only the function `commit` of an algorithm may write to Redis. If the status is not 0, the new state repairs the
-- stored state. A repair is needed if the time of the stored state was in the future because the clock was set back, or
-- if the rate of a token bucket was lowered.
--
-- Most states have three fields. The value of the key of such a state has 32 bytes: four little-endian 64-bit integers,
-- which are the time at which the key expires and the three fields. If this value were text, a check would cost a fifth
-- more CPU.
-- A key expires at least half a second after its state has no effect any more, so that no decision depends on when
-- Redis expires the key. SETRANGE writes the fields and keeps the TTL of the key. This is enough if the key expires
-- later than the new state by MIN_KEY_SLACK_US to MAX_KEY_SLACK_US. Otherwise SET writes a new TTL. SETRANGE costs half
-- as much CPU as SET.
-- Beyond `maxmemory` Redis rejects commands that may need memory (SET, SETRANGE, ZADD, RPUSH), unless the script has
-- already written something. Therefore the first command of a charge may need memory, and the gateway puts groups that
-- may delete (R, N) at the end of a call.
-- All numbers are integers below 2^53, which doubles represent exactly. The gateway rejects a configuration whose
-- numbers could exceed 2^53. Unconditional charges (A) increase a state at most to MAX_STATE. Numbers are formatted
-- with %d. `..` and tostring would write large numbers like 1e+15. %.0f is three times as slow and writes -0.
local call, floor, ceil, match, format = redis.call, math.floor, math.ceil, string.match, string.format
local pack, unpack = struct.pack, struct.unpack
-- Size in bytes of a group without its limits, of a limit (format: ARGV[1]), and of a state with three fields.
local GROUP_BYTES, LIMIT_BYTES, STATE_BYTES = 25, 42, 32
-- MAX_STATE is the maximum value of a number in a state: 2^52. Doubles represent all integers below EXACT_INTEGER_LIMIT
-- (2^53) exactly.
local MAX_STATE, EXACT_INTEGER_LIMIT = 4503599627370496, 9007199254740992
-- Time between the end of a state and the expiry of its key. SET sets a TTL that is one second (KEY_SLACK_MS) longer
-- than the state needs. SETRANGE keeps the TTL if the key expires later than the new state by MIN_KEY_SLACK_US to
-- MAX_KEY_SLACK_US.
local MIN_KEY_SLACK_US, MAX_KEY_SLACK_US, KEY_SLACK_MS = 500000, 1001000, 1000

local args, keys, groups, key_count, argument_count = ARGV[1], KEYS, {}, 0, 1
--@usage
-- Number of bytes of the usage arguments of a limit. Time for which the totals of a month are kept after the first
-- charge of its last day: 400 days.
local USAGE_BYTES, USAGE_TTL_MS = 24, '34560000000'
local usage_args, usage_position, usage_key_count = ARGV[2], 1, 0
argument_count = 2
--@end usage
if #ARGV ~= argument_count or #args < 8 then
  return redis.error_reply('RLARG wrong number of arguments')
end
-- Check that all groups are well-formed before the first request is decided.
local now, position = unpack('<d', args)
while position <= #args do
  if #args - position + 1 < GROUP_BYTES then
    return redis.error_reply('RLARG wrong number of arguments')
  end
  local requests, operation, charged_at, limits
  requests, operation, charged_at, limits, position = unpack('<dc1dd', args, position)
  if not (requests >= 1 and requests % 1 == 0 and limits >= 1 and limits % 1 == 0
    and #args - position + 1 >= LIMIT_BYTES * limits) then
    return redis.error_reply('RLARG wrong number of arguments')
  end
  if operation ~= 'C' and operation ~= 'P' and operation ~= 'A' and operation ~= 'R' and operation ~= 'T'
    and operation ~= 'N' then
    return redis.error_reply('RLARG unknown operation')
  end
  local checks = {}
  --@usage
  local usages, usages_per_request = {}, 0
  if #usage_args - usage_position + 1 < USAGE_BYTES * limits then
    return redis.error_reply('RLARG wrong number of arguments')
  end
  for i = 1, limits do
    local day, day_start, day_end
    day, day_start, day_end, usage_position = unpack('<ddd', usage_args, usage_position)
    if not (day >= 0 and day <= 31 and day % 1 == 0) then
      return redis.error_reply('RLARG unknown day')
    end
    if day > 0 then usages_per_request = usages_per_request + 1 end
    usages[i] = { day = day, day_start = day_start, day_end = day_end }
  end
  usage_key_count = usage_key_count + requests * usages_per_request
  --@end usage
  for i = 1, limits do
    local kind, flag, cost, a, b, c, d
    kind, flag, cost, a, b, c, d, position = unpack('<c1c1ddddc8', args, position)
    checks[i] = {
      kind = kind, cost = cost, a = a, b = b, c = c, d = d,
      is_shadow = flag == 's' or flag == 'b',
      is_deferred = operation == 'C' and (flag == 'p' or flag == 'b'),
      -- Results of the current request. Table sizes in Lua are powers of two, so a 17th field would double the memory
      -- of this table.
      status = 0, remaining = 0, reset_us = 0, retry_us = 0, free = 0, free_reset_us = 0, change = false, ttl_ms = 0,
    }
  end
  groups[#groups + 1] = { requests = requests, operation = operation, charged_at = charged_at, checks = checks }
  --@usage
  groups[#groups].usages, groups[#groups].usages_per_request = usages, usages_per_request
  --@end usage
  key_count = key_count + requests * limits
end
--@usage
-- The number of keys before those of the totals of the current request.
local usage_offset = key_count
key_count = key_count + usage_key_count
if usage_position ~= #usage_args + 1 then
  return redis.error_reply('RLARG wrong number of arguments')
end
--@end usage
if key_count == 0 or key_count ~= #keys then
  return redis.error_reply('RLARG wrong number of keys')
end
if now == 0 then
  local time = call('TIME')
  now = time[1] * 1000000 + time[2]
end

local replies, failures = {pack('<d', now)}, nil
local operation, charged_at, checks
--@usage
local usages
--@end usage
-- Decide the request whose first key has the index `key_offset` + 1. Return an error, or nothing.
local function decide(key_offset)
  local op, requested, granted, admitted = operation, nil, nil, nil
  --@usage
  for i = 1, #usages do
    local usage = usages[i]
    if usage.day > 0 and not (now >= usage.day_start and now < usage.day_end) then
      return redis.error_reply(format('RLSTALE the day of the usage is not that of %d', now))
    end
  end
  --@end usage
  -- The operation T runs the algorithm twice: the first run reads how many tokens remain, and the second run charges
  -- them.
  if operation == 'T' then op, requested = 'P', 0 end
  repeat
    admitted = true
    for i = 1, #checks do
      local check, key = checks[i], keys[key_offset + i]
      local kind, cost, a, b, c, d = check.kind, requested or check.cost, check.a, check.b, check.c, check.d
      local status, remaining, reset_us, retry_us, free, free_reset_us = 0, 0, 0, 0, 0, 0
      local ttl_us, new_field1, new_field2, new_field3, new_state, commit
      local key_expires_at, field1, field2, field3
      local state = kind ~= 'S' and kind ~= 'L' and kind ~= 'C' and call('GET', key)
      if state then
        if #state ~= STATE_BYTES then return redis.error_reply('WRONGTYPE the key does not hold the state of a limit') end
        key_expires_at, field1, field2, field3 = unpack('<i8i8i8i8', state)
      end
      -- A cost with the flag p is charged after the response. The check before the request only needs one remaining
      -- token.
      if check.is_deferred then cost = 1 end
      if operation == 'N' and kind ~= 'C' then
        return redis.error_reply('RLARG only concurrency permits can be renewed')
      --@algorithms
      else
        return redis.error_reply('RLARG unknown kind')
      end
      if free < 0 then free = 0 end
      if remaining < 0 then remaining = 0 end
      if status ~= 0 then
        if not check.is_shadow then admitted = false end
      elseif check.is_deferred then
        remaining, reset_us, ttl_us, new_state, commit = free, free_reset_us, nil, nil, nil
      end
      -- `change` is the new state, a function that writes it, false = delete the state, or nil = no change. With a new
      -- state, `ttl_ms` is the TTL of the key; 0 = keep the TTL.
      local change, ttl_ms = commit, nil
      if ttl_us then
        local slack_us = key_expires_at and key_expires_at - now - ttl_us or 0
        if slack_us >= MIN_KEY_SLACK_US and slack_us < MAX_KEY_SLACK_US then
          change, ttl_ms = pack('<i8i8i8', new_field1, new_field2, new_field3), 0
        else
          ttl_ms = ceil(ttl_us / 1000) + KEY_SLACK_MS
          change = new_state or pack('<i8i8i8i8', now + ttl_ms * 1000, new_field1, new_field2, new_field3)
        end
      elseif ttl_us == false then change = false end
      check.status, check.remaining, check.reset_us, check.retry_us = status, remaining, reset_us, retry_us
      check.free, check.free_reset_us = free, free_reset_us
      check.change, check.ttl_ms = change, ttl_ms
    end
    local is_last_pass = operation ~= 'T' or granted
    if not is_last_pass then
      local wanted = checks[1].cost
      granted = wanted
      for i = 1, #checks do
        local check = checks[i]
        if check.free < granted and not check.is_shadow then granted = check.free end
      end
      -- If no token remains, the second run requests one token, so that the algorithm returns retry_us.
      op, requested = wanted > 0 and 'C' or 'P', wanted > 0 and granted < 1 and 1 or granted
    end
  until is_last_pass

  granted = admitted and (granted or 1) or 0
  --@usage
  -- The totals are written before the states. If Redis rejects the write of the totals, nothing has changed.
  local usage_index = usage_offset
  for i = 1, admitted and op ~= 'P' and #usages or 0 do
    local check, day = checks[i], usages[i].day
    if day > 0 then
      usage_index = usage_index + 1
      local amount = operation == 'T' and granted or check.cost
      if amount > MAX_STATE then amount = MAX_STATE end
      if operation == 'R' then amount = -amount end
      if amount ~= 0 and check.status == 0 and not check.is_deferred
        and call('HINCRBY', keys[usage_index], format('%d', day), format('%d', amount)) == amount then
        call('PEXPIRE', keys[usage_index], USAGE_TTL_MS)
      end
    end
  end
  --@end usage
  for i = 1, #checks do
    local check, key = checks[i], keys[key_offset + i]
    local change, ttl_ms = check.change, check.ttl_ms
    if change ~= nil and op ~= 'P' and (admitted or check.status ~= 0) then
      if ttl_ms == 0 then call('SETRANGE', key, '8', change)
      elseif ttl_ms then call('SET', key, change, 'PX', format('%d', ttl_ms))
      elseif change then
        local remaining, reset_us = change()
        if remaining then check.remaining, check.reset_us = remaining, reset_us end
      -- Delete only for refunds. If an operation other than a refund results in an empty state, the stored state had no
      -- effect either.
      elseif operation == 'R' then call('DEL', key) end
    end
    if op == 'P' or not admitted then check.remaining, check.reset_us = check.free, check.free_reset_us end
    replies[key_offset + i + 1] = pack('<ddddd', granted, check.status, check.remaining, check.reset_us, check.retry_us)
  end
end

local key_offset = 0
for g = 1, #groups do
  local group = groups[g]
  operation, charged_at, checks = group.operation, group.charged_at, group.checks
  --@usage
  usages = group.usages
  --@end usage
  for _ = 1, group.requests do
    -- With pcall, the other requests succeed even if one request has an error.
    local _, failure = pcall(decide, key_offset)
    if failure then
      -- Errors of Lua are strings. Before Redis 7, errors of Redis are strings too.
      if type(failure) ~= 'table' then
        failure = redis.error_reply(match(failure, '^%u+ ') and failure or 'ERR Error running script: ' .. failure)
      end
      failures = failures or {}
      failures[#failures + 1], failures[#failures + 2] = key_offset, failure
      for i = 1, #checks do replies[key_offset + i + 1] = pack('<ddddd', -1, 0, 0, 0, 0) end
    end
    key_offset = key_offset + #checks
    --@usage
    usage_offset = usage_offset + group.usages_per_request
    --@end usage
  end
end
replies = table.concat(replies)
if failures then table.insert(failures, 1, replies) end
return failures or replies
