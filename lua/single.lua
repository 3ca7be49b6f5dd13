-- The driver (script without algorithms) for the most common calls. Each request has one limit of the kind B, F, X or
-- W, without a flag. The operation is C, or T with a cost of at least 1. The header of generic.lua describes the
-- arguments and replies.
-- This driver creates no Lua tables or functions for its groups. In a large batch, a check therefore needs 25 % less
-- CPU time than with generic.lua. In a call with a single check, the difference is larger.
-- The reply contains the states that the script has read, from which the gateway computes the outcomes. The algorithms
-- therefore only decide, without the lines between the markers `outcome` and `end outcome`.
-- This driver calls Redis commands with redis.pcall. If one request fails, the other requests of the call succeed.
local call, floor, ceil, format = redis.pcall, math.floor, math.ceil, string.format
local pack, unpack = struct.pack, struct.unpack
-- GROUP_BYTES is the size in bytes of a group with its limit in ARGV[1] (see generic.lua for the format). STATE_BYTES
-- is the size of a state.
local GROUP_BYTES, STATE_BYTES = 67, 32
-- MAX_STATE (2^52) is the maximum value of a number in a state. Doubles represent all integers below
-- EXACT_INTEGER_LIMIT (2^53) exactly.
local MAX_STATE, EXACT_INTEGER_LIMIT = 4503599627370496, 9007199254740992
-- The slack of a key is the time between the end of its state and the expiry of the key. SET writes a TTL with a slack
-- of one second (KEY_SLACK_MS). If the current TTL already gives a slack between MIN_KEY_SLACK_US and MAX_KEY_SLACK_US,
-- SETRANGE writes only the fields and keeps this TTL.
local MIN_KEY_SLACK_US, MAX_KEY_SLACK_US, KEY_SLACK_MS = 500000, 1001000, 1000

local args, keys, charged_at, argument_count = ARGV[1], KEYS, 0, 1
--@usage
-- USAGE_BYTES is the number of bytes in ARGV[2] for each limit. USAGE_TTL_MS (400 days) is the TTL of a hash of usage
-- totals. The first charge of each day renews the TTL.
local USAGE_BYTES, USAGE_TTL_MS = 24, '34560000000'
local usage_args, usage_key_count, type = ARGV[2], 0, type
argument_count = 2
--@end usage
if #ARGV ~= argument_count or #args < 8 or (#args - 8) % GROUP_BYTES ~= 0 then
  return redis.error_reply('RLARG wrong number of arguments')
end
-- Validate all groups of arguments before the script performs the first check. If there is only one group, its values
-- stay in the variables, and the second loop does not unpack them again.
local now, position = unpack('<d', args)
local groups, key_count = (#args - 8) / GROUP_BYTES, 0
local requests, operation, _, limits, kind, flag, requested, a, b, c, d
--@usage
local day, day_start, day_end
if #usage_args ~= USAGE_BYTES * groups then
  return redis.error_reply('RLARG wrong number of arguments')
end
--@end usage
for group = 1, groups do
  requests, operation, _, limits, kind, flag, requested, a, b, c, d, position = unpack('<dc1ddc1c1ddddc8', args, position)
  if operation ~= 'C' and (operation ~= 'T' or not (requested >= 1)) or limits ~= 1 or flag ~= '-'
    or kind ~= 'B' and kind ~= 'F' and kind ~= 'X' and kind ~= 'W' or not (requests >= 1 and requests % 1 == 0) then
    return redis.error_reply('RLARG only checks with one limit each are supported')
  end
  key_count = key_count + requests
  --@usage
  day, day_start, day_end = unpack('<ddd', usage_args, USAGE_BYTES * (group - 1) + 1)
  if not (day >= 0 and day <= 31 and day % 1 == 0) then
    return redis.error_reply('RLARG unknown day')
  end
  if day > 0 then usage_key_count = usage_key_count + requests end
  --@end usage
end
--@usage
local usage_index = key_count
key_count = key_count + usage_key_count
--@end usage
if key_count == 0 or key_count ~= #keys then
  return redis.error_reply('RLARG wrong number of keys')
end
if now == 0 then
  local time = call('TIME')
  now = time[1] * 1000000 + time[2]
end

local replies, reply_count, failures, key_offset = {pack('<d', now)}, 1, nil, 0
local no_state = string.rep('\0', STATE_BYTES)
position = 9
for group = 1, groups do
  if groups > 1 then
    requests, operation, _, _, kind, _, requested, a, b, c, d, position = unpack('<dc1ddc1c1ddddc8', args, position)
    --@usage
    day, day_start, day_end = unpack('<ddd', usage_args, USAGE_BYTES * (group - 1) + 1)
    --@end usage
  end
  --@usage
  local is_other_day, field = day > 0 and not (now >= day_start and now < day_end), format('%d', day)
  --@end usage
  for i = key_offset + 1, key_offset + requests do
    local key, op, cost, status = keys[i], 'C', requested, 0
    local free, free_reset_us, reset_us = 0, nil, nil
    local ttl_us, new_field1, new_field2, new_field3
    local key_expires_at, field1, field2, field3, failure
    local state = call('GET', key)
    if state then
      if #state == STATE_BYTES then key_expires_at, field1, field2, field3 = unpack('<i8i8i8i8', state)
      else failure = state.err and state or redis.error_reply('WRONGTYPE the key does not hold the state of a limit') end
    end
    --@usage
    if is_other_day and not failure then
      failure = redis.error_reply(format('RLSTALE the day of the usage is not that of %d', now))
    end
    --@end usage
    -- The operation T runs the algorithm twice: the first run returns how many tokens remain, and the second run
    -- charges them.
    if operation == 'T' then op, cost = 'P', 0 end
    repeat
      local is_last_pass = op == 'C'
      if failure then
        -- Do nothing: the code at the end of the loop adds the error to the reply.
      --@algorithms
      else
        failure = redis.error_reply('RLARG unknown kind')
      end
      if not is_last_pass then
        -- If no token remains, the second run requests one token, which the algorithm denies.
        op, cost, ttl_us = 'C', free < requested and free or requested, nil
        if cost < 1 then cost = 1 end
      end
    until is_last_pass
    --@usage
    if day > 0 then
      usage_index = usage_index + 1
      -- Write the total before the state. If Redis rejects this write, the request has changed nothing.
      if status == 0 and cost > 0 and not failure then
        local total = call('HINCRBY', keys[usage_index], field, format('%d', cost))
        if type(total) == 'table' then failure, ttl_us = total, nil
        elseif total == cost then call('PEXPIRE', keys[usage_index], USAGE_TTL_MS) end
      end
    end
    --@end usage
    if ttl_us then
      local slack_us = key_expires_at and key_expires_at - now - ttl_us or 0
      if slack_us >= MIN_KEY_SLACK_US and slack_us < MAX_KEY_SLACK_US then
        local length = call('SETRANGE', key, '8', pack('<i8i8i8', new_field1, new_field2, new_field3))
        failure = length ~= STATE_BYTES and length
      else
        local ttl_ms = ceil(ttl_us / 1000) + KEY_SLACK_MS
        local new_state = pack('<i8i8i8i8', now + ttl_ms * 1000, new_field1, new_field2, new_field3)
        local result = call('SET', key, new_state, 'PX', format('%d', ttl_ms))
        failure = result.err and result
      end
    end
    if failure then
      failures = failures or {}
      failures[#failures + 1], failures[#failures + 2] = i - 1, failure
    end
    replies[reply_count + 1] = failure and 'e' or status == 0 and 'a' or 'd'
    replies[reply_count + 2] = not failure and state or no_state
    reply_count = reply_count + 2
  end
  key_offset = key_offset + requests
end
replies = table.concat(replies)
if failures then table.insert(failures, 1, replies) end
return failures or replies
