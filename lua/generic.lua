-- The driver (script without algorithms) for all requests: any operation, and any number and kind of limits. The driver
-- charges all limits of a request or none.
-- This header describes the arguments and replies of all drivers, and the variables of all algorithms.
--
-- KEYS     The keys of the states: for each request, one for each limit with a place other than `s`. In Redis Cluster, all
--          keys are in the same slot. The scripts also use keys that states.lua derives from these keys.
-- ARGV[1]  A binary string with values in the formats of struct.pack: `d` is a little-endian double of 8 bytes, `c1` is
--          one letter, and `c8` is 8 bytes. All times are in microseconds.
--          `d`   Current time, or 0 to use the clock of Redis.
--          `c1`  Layout: `i` or `o` (see states.lua).
--          The groups follow, in the order of their keys. A group is a list of requests that differ only in their keys.
--          For each group:
--          `d`   Number of requests.
--          `c1`  Operation, one of these letters:
--                `C`  Check and charge.
--                `P`  Peek: check without a charge.
--                `A`  Charge unconditionally.
--                `R`  Refund a charge.
--                `T`  Take up to the cost: charge as many tokens as remain, but at most the cost.
--                `N`  Renew a concurrency permit, or add it if it is missing.
--          `d`   For the operation R, the time of the refunded charge. Otherwise 0.
--          `d`   Number of limits of each request.
--          For each limit of the group:
--          `c1`  Kind of the limit: B, C, F, K, L, S, W or X (see the algorithm files).
--          `c1`  Flag, one of these characters:
--                `-`  No flag.
--                `s`  Shadow: the limit never denies a request.
--                `p`  Deferred: the cost is charged after the response.
--                `b`  Both shadow and deferred.
--          `c1`  Place of the state, one of these letters. States with three fields are in the value of an identity.
--                `f`  The key is that of an identity which no limit before has.
--                `s`  The limit has no key: its identity is that of the limit before.
--                `a`  The key is that of an identity which a limit before has, but not the one directly before.
--                `o`  The key is that of a state without three fields.
--          `d`   Id of the state in the value of its identity.
--          `d`   Cost.
--          `d`, `d`, `d`, `c8`  Parameters a, b, c and d of the kind (see the algorithm files).
-- ARGV[2]  The name of the state of each limit of each group, each followed by a line feed.
-- ARGV[3]  Only in scripts that count usage: a binary string with three values for each limit of each group.
--          `d`   Day of the month, or 0 if the usage of the limit is not counted.
--          `d`   Start of the day.
--          `d`   End of the day.
--          In KEYS, the keys of usage totals follow the keys of all states. Each request has one such key for each of
--          its limits whose usage is counted. The key is in the same slot as the state of the limit. The value of the
--          key is a hash for one month. The fields of the hash are the days of the month. The value of a field is the
--          cost charged on this day, less refunds.
--          If the current time is not between the start and the end of the day, the request fails with RLSTALE and
--          writes nothing.
-- Reply    An array. Its first element is a binary string with the current time (`d`) and a letter. Then each request has an
--          element: a binary string, or its error. The error is RLARG, RLSTALE (also in fixed_window.lua) or an error of
--          Redis.
--          With the letter `o`, the string has five values (`d`) for each limit of the request: granted, status,
--          remaining, reset_us and retry_us.
--          Granted is 0 if the request is denied, and 1 if it is admitted. For the operation T, it is the number of
--          tokens that were taken.
--          Status has one of these values:
--          `0`  The charge fits.
--          `1`  The limit is exceeded. The charge fits after exactly retry_us.
--          `2`  The cost exceeds the limit, so the charge can never fit. Retry_us is -1.
--          `3`  No permit is free. Enough permits expire after retry_us, but requests may release them earlier.
--          If the request is denied, remaining and reset_us are the values without the charge of the request.
--          The drivers of single.lua and small.lua reply with the letter `s`. The string has the states before the
--          request, from which the gateway computes the outcomes with the same algorithms in Rust. It is the value of
--          the identity if that consists of the states of the limits in their order. Otherwise, it has four numbers
--          (`d`) for each limit: the time until which the state is kept, and its fields. They are 0 if there is no
--          state. If the request is denied, the number 0 precedes its string.
-- Errors   If the arguments of the call are invalid, the reply is the error RLARG, and the script has written nothing.
-- The blocks between the markers `usage` and `end usage` are only in scripts that count usage totals. In the algorithms,
-- the blocks `generic` are only in scripts with this driver, and the blocks `free` only in scripts with single.lua.
-- If arguments and replies were text, a call would need 10 % more CPU time in Redis. The gateway would need 3,000 more
-- instructions per limit to parse the reply.
--
-- Each algorithm is a branch of one `if` statement. A function for each algorithm would be slower, because a function
-- call takes more time than the algorithm itself. Variables of an algorithm:
-- Input    `key, kind, cost, a, b, c, d, now, charged_at`  Arguments of the request.
--          `op`  C, P, A, R or N. For T, the driver runs the algorithm with P and then with C.
--          `key_expires_at, field1, field2, field3`  The state, or nil if the key does not exist.
--          `memo`  A table for parsed states by key, or nil. For T, the second run reads what the first run has stored.
-- Output   `status, remaining, reset_us, retry_us`  The result. If the status is 0, remaining and reset_us are the
--          values after the charge. Otherwise they are the values without the charge.
--          `free, free_reset_us`  Remaining and reset_us without the charge. With single.lua, free is set if op is P.
--          `ttl_us`  Time after which the new state has no effect and can be deleted. The value false means that the
--          new state is empty, and nil means that the state does not change.
--          `new_field1, new_field2, new_field3`  The new state.
--          `new_state`  The new state as text, if the algorithm reads its state itself.
--          `commit`  A function that writes the new state, if the algorithm does not set ttl_us. The function may
--          return new values of remaining and reset_us.
-- An algorithm writes to Redis only in its function `commit`. If the status is not 0, the new state repairs the stored
-- state. A repair is necessary in two cases: the clock was set back, so that a stored time is in the future, or the
-- rate of a token bucket was lowered.
--
-- The states of the kinds B, F, K, W and X have three fields (see states.lua). The states of the other kinds have
-- separate keys.
-- A state ends at the time from which it has the same effect as no state. Its slack is the time between its end and the
-- time until which it is kept. The slack is at least half a second, so that no decision depends on the moment at which
-- Redis deletes a key. A new state is kept for one second after its end (KEY_SLACK_MS). If the time until which the state
-- before is kept gives a slack between MIN_KEY_SLACK_US and MAX_KEY_SLACK_US, this time stays the same.
-- Beyond `maxmemory`, Redis rejects commands that may need memory (for example SET, SETRANGE, ZADD, RPUSH and HINCRBY),
-- unless the script has already written something. Therefore the first write of a charge is such a command. Groups that
-- may begin with a delete (R, N) are at the end of a call, because Redis would accept all writes after a delete.
-- All numbers are integers below 2^53, which doubles represent exactly. The gateway rejects a configuration whose
-- numbers could exceed 2^53. Unconditional charges (A) increase a number in a state at most to MAX_STATE.
-- The scripts format numbers with %d. `..` and tostring would write a large number as 1e+15. %.0f is three times as
-- slow, and can write -0.
local call, floor, ceil, match, format = redis.call, math.floor, math.ceil, string.match, string.format
-- The function `unpack` of Lua 5.1 is `table.unpack` in later versions.
local unpack_list = table.unpack or unpack
local pack, unpack = struct.pack, struct.unpack
-- CALL_BYTES is the size in bytes of the numbers before the groups in ARGV[1], GROUP_BYTES the size of a group without
-- its limits, and LIMIT_BYTES the size of a limit.
local CALL_BYTES, GROUP_BYTES, LIMIT_BYTES = 9, 25, 51
-- MAX_STATE (2^52) is the maximum value of a number in a state. Doubles represent all integers below
-- EXACT_INTEGER_LIMIT (2^53) exactly.
local MAX_STATE, EXACT_INTEGER_LIMIT = 4503599627370496, 9007199254740992
-- The header describes the slack of a state.
local MIN_KEY_SLACK_US, MAX_KEY_SLACK_US, KEY_SLACK_MS = 500000, 1001000, 1000

local args, keys, groups, key_count, argument_count = ARGV[1], KEYS, {}, 0, 2
--@usage
-- USAGE_BYTES is the number of bytes in ARGV[2] for each limit. USAGE_TTL_MS (400 days) is the TTL of a hash of usage
-- totals. The first charge of each day renews the TTL.
local USAGE_BYTES, USAGE_TTL_MS = 24, '34560000000'
local usage_args, usage_position, usage_key_count = ARGV[3], 1, 0
argument_count = 3
--@end usage
if #ARGV ~= argument_count or #args < CALL_BYTES then
  return redis.error_reply('RLARG wrong number of arguments')
end
-- Validate all groups of arguments before the script performs the first request.
local now, layout, position = unpack('<dc1', args)
local limit_count = 0
if layout ~= 'i' and layout ~= 'o' then
  return redis.error_reply('RLARG unknown layout')
end
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
  local checks, keys_per_request = {}, 0
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
    local kind, flag, place, id, cost, a, b, c, d
    kind, flag, place, id, cost, a, b, c, d, position = unpack('<c1c1c1dddddc8', args, position)
    if place ~= 's' then keys_per_request = keys_per_request + 1
    elseif keys_per_request == 0 then return redis.error_reply('RLARG no key precedes a limit without a key') end
    limit_count = limit_count + 1
    checks[i] = {
      kind = kind, cost = cost, a = a, b = b, c = c, d = d, id = id, number = limit_count, has_key = place ~= 's',
      is_shadow = flag == 's' or flag == 'b',
      is_deferred = operation == 'C' and (flag == 'p' or flag == 'b'),
      -- The following fields are results of the current request.
      status = 0, remaining = 0, reset_us = 0, retry_us = 0, free = 0, free_reset_us = 0, change = false, ttl_ms = 0,
    }
  end
  groups[#groups + 1] = {
    requests = requests, operation = operation, charged_at = charged_at, checks = checks, keys = keys_per_request,
  }
  --@usage
  groups[#groups].usages, groups[#groups].usages_per_request = usages, usages_per_request
  --@end usage
  key_count = key_count + requests * keys_per_request
end
--@usage
-- KEYS contains all state keys, then the usage keys. The usage keys of the current request start after this index.
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

--@states
local replies = {pack('<dc1', now, 'o')}
local operation, charged_at, checks
--@usage
local usages
--@end usage
-- Perform the request whose first key has the index `key_offset` + 1. Return its outcomes, or an error reply.
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
  -- The operation T runs the algorithms twice: the first run returns how many tokens remain, and the second run charges
  -- them. `memo` keeps the states that the first run has parsed.
  local memo
  -- The values of the identities by their keys.
  local values = {}
  if operation == 'T' then op, requested, memo = 'P', 0, {} end
  repeat
    admitted = true
    local key_index = key_offset
    for i = 1, #checks do
      local check = checks[i]
      if check.has_key then key_index = key_index + 1 end
      local key = keys[key_index]
      local kind, cost, a, b, c, d = check.kind, requested or check.cost, check.a, check.b, check.c, check.d
      local status, remaining, reset_us, retry_us, free, free_reset_us = 0, 0, 0, 0, 0, 0
      local ttl_us, new_field1, new_field2, new_field3, new_state, commit
      local key_expires_at, field1, field2, field3
      check.key = key
      if kind ~= 'S' and kind ~= 'L' and kind ~= 'C' then
        if values[key] == nil then values[key] = call('GET', key) end
        check.value = values[key]
        check.index, check.separate_key, key_expires_at, field1, field2, field3 =
          read_state(key, check.value, check.id, check.number, i)
        check.exists, check.stored_field3 = key_expires_at, field3
        if type(check.index) == 'table' then return check.index end
      end
      -- A deferred cost (flag p or b) is charged after the response. The check before the request only tests whether
      -- one token remains.
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
      -- `change` is a function that writes the new state, the new state as text, or true if the new state has fields. The
      -- value false means that the new state is empty, and nil means that the state does not change. `kept_until` is the
      -- time until which the new state is kept.
      -- If the new state has no fields, `ttl_ms` is the TTL of its key.
      local change, ttl_ms, kept_until = commit, nil, nil
      if new_state then change, ttl_ms = new_state, ceil(ttl_us / 1000) + KEY_SLACK_MS
      elseif ttl_us then
        local slack_us = key_expires_at and key_expires_at - now - ttl_us or 0
        kept_until = slack_us >= MIN_KEY_SLACK_US and slack_us < MAX_KEY_SLACK_US and key_expires_at
          or now + (ceil(ttl_us / 1000) + KEY_SLACK_MS) * 1000
        change, check.field1, check.field2, check.field3 = true, new_field1, new_field2, new_field3
      elseif ttl_us == false then change = false end
      check.status, check.remaining, check.reset_us, check.retry_us = status, remaining, reset_us, retry_us
      check.free, check.free_reset_us = free, free_reset_us
      check.change, check.ttl_ms, check.kept_until = change, ttl_ms, kept_until
    end
    local is_last_pass = operation ~= 'T' or granted
    if not is_last_pass then
      local wanted = checks[1].cost
      granted = wanted
      for i = 1, #checks do
        local check = checks[i]
        if check.free < granted and not check.is_shadow then granted = check.free end
      end
      -- If no token remains, the second run requests one token. The algorithm denies this token and returns retry_us.
      op, requested = wanted > 0 and 'C' or 'P', wanted > 0 and granted < 1 and 1 or granted
    end
  until is_last_pass

  granted = admitted and (granted or 1) or 0
  --@usage
  -- Write the totals before the states. If Redis rejects the first write, the request has changed nothing.
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
  local changes = {}
  for i = 1, #checks do
    local check = checks[i]
    local change = check.change
    -- Remove a state only for refunds. If another operation results in an empty state, the stored state already had no
    -- effect.
    if change ~= nil and op ~= 'P' and (admitted or check.status ~= 0) and (change or operation == 'R') then
      if type(change) == 'function' then
        local remaining, reset_us = change()
        if remaining then check.remaining, check.reset_us = remaining, reset_us end
      elseif check.ttl_ms then call('SET', check.key, change, 'PX', format('%d', check.ttl_ms))
      elseif check.kind == 'S' then call('DEL', check.key)
      else changes[#changes + 1] = check end
    end
  end
  local failure = write_states(changes)
  if failure then return failure end
  local outcomes = {}
  for i = 1, #checks do
    local check = checks[i]
    if op == 'P' or not admitted then check.remaining, check.reset_us = check.free, check.free_reset_us end
    outcomes[i] = pack('<ddddd', granted, check.status, check.remaining, check.reset_us, check.retry_us)
  end
  return table.concat(outcomes)
end

local key_offset = 0
for g = 1, #groups do
  local group = groups[g]
  operation, charged_at, checks = group.operation, group.charged_at, group.checks
  --@usage
  usages = group.usages
  --@end usage
  for _ = 1, group.requests do
    -- With pcall, the other requests of the call still succeed if one request fails.
    local is_complete, reply = pcall(decide, key_offset)
    -- Lua errors are strings. In Redis versions below 7, errors of Redis commands are strings too.
    if not is_complete and type(reply) ~= 'table' then
      reply = redis.error_reply(match(reply, '^%u+ ') and reply or 'ERR Error running script: ' .. reply)
    end
    replies[#replies + 1] = reply
    key_offset = key_offset + group.keys
    --@usage
    usage_offset = usage_offset + group.usages_per_request
    --@end usage
  end
end
return replies
