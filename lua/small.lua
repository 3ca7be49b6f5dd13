-- The driver (script without algorithms) for requests with few limits. Each request has the operation C and one to four
-- limits of the kinds B, F, X or W, without flags. The header of generic.lua describes the arguments and replies.
-- This driver creates no Lua tables or functions for its groups, so a check needs 25 % less CPU time than with
-- generic.lua.
-- The reply contains the states that the script has read. The algorithms only decide (see single.lua).
-- This driver calls Redis commands with redis.pcall. If one request fails, the other requests of the call succeed.
-- This source file contains the code for one limit. When the gateway composes the script, it repeats each block between
-- the markers `each limit` and `end` for each limit, and replaces the suffix _1 with the number of the limit. If a
-- request has fewer limits than the script, the kinds of the missing limits are nil.
local call, floor, ceil, format = redis.pcall, math.floor, math.ceil, string.format
local pack, unpack = struct.pack, struct.unpack
-- GROUP_BYTES is the size in bytes of a group without its limits, and LIMIT_BYTES the size of a limit, in ARGV[1] (see
-- generic.lua for the format). STATE_BYTES is the size of a state.
local GROUP_BYTES, LIMIT_BYTES, STATE_BYTES = 25, 42, 32
-- MAX_STATE (2^52) is the maximum value of a number in a state. Doubles represent all integers below
-- EXACT_INTEGER_LIMIT (2^53) exactly.
local MAX_STATE, EXACT_INTEGER_LIMIT = 4503599627370496, 9007199254740992
-- The slack of a key is the time between the end of its state and the expiry of the key. SET writes a TTL with a slack
-- of one second (KEY_SLACK_MS). If the current TTL already gives a slack between MIN_KEY_SLACK_US and MAX_KEY_SLACK_US,
-- SETRANGE writes only the fields and keeps this TTL.
local MIN_KEY_SLACK_US, MAX_KEY_SLACK_US, KEY_SLACK_MS = 500000, 1001000, 1000

local args, keys, op, charged_at, argument_count = ARGV[1], KEYS, 'C', 0, 1
--@usage
-- USAGE_BYTES is the number of bytes in ARGV[2] for each limit. USAGE_TTL_MS (400 days) is the TTL of a hash of usage
-- totals. The first charge of each day renews the TTL.
local USAGE_BYTES, USAGE_TTL_MS = 24, '34560000000'
local usage_args, usage_position, usage_key_count, type = ARGV[2], 1, 0, type
argument_count = 2
--@end usage
if #ARGV ~= argument_count or #args < 8 then
  return redis.error_reply('RLARG wrong number of arguments')
end
-- Validate all groups of arguments before the script performs the first check. If there is only one group, its values
-- stay in the variables, and the second loop does not unpack them again.
local now, position = unpack('<d', args)
local groups, key_count = 0, 0
local requests, operation, _, limits, unread_limits
--@each limit
local kind_1, flag_1, cost_1, a_1, b_1, c_1, d_1
--@usage
local day_1, day_start_1, day_end_1
--@end usage
--@end
while position <= #args do
  if #args - position + 1 < GROUP_BYTES then
    return redis.error_reply('RLARG wrong number of arguments')
  end
  requests, operation, _, limits, position = unpack('<dc1dd', args, position)
  if operation ~= 'C' or not (requests >= 1 and requests % 1 == 0 and limits >= 1 and limits % 1 == 0)
    or #args - position + 1 < LIMIT_BYTES * limits then
    return redis.error_reply('RLARG only checks with few limits each are supported')
  end
  unread_limits = limits
  --@usage
  if #usage_args - usage_position + 1 < USAGE_BYTES * limits then
    return redis.error_reply('RLARG wrong number of arguments')
  end
  --@end usage
  --@each limit
  kind_1 = nil
  if unread_limits > 0 then
    kind_1, flag_1, cost_1, a_1, b_1, c_1, d_1, position = unpack('<c1c1ddddc8', args, position)
    --@usage
    day_1, day_start_1, day_end_1, usage_position = unpack('<ddd', usage_args, usage_position)
    if not (day_1 >= 0 and day_1 <= 31 and day_1 % 1 == 0) then
      return redis.error_reply('RLARG unknown day')
    end
    if day_1 > 0 then usage_key_count = usage_key_count + requests end
    --@end usage
    if flag_1 ~= '-' or kind_1 ~= 'B' and kind_1 ~= 'F' and kind_1 ~= 'X' and kind_1 ~= 'W' then
      return redis.error_reply('RLARG only checks with few limits each are supported')
    end
    unread_limits = unread_limits - 1
  end
  --@end
  if unread_limits > 0 then
    return redis.error_reply('RLARG only checks with few limits each are supported')
  end
  groups, key_count = groups + 1, key_count + requests * limits
end
--@usage
local usage_index = key_count
key_count = key_count + usage_key_count
if usage_position ~= #usage_args + 1 then
  return redis.error_reply('RLARG wrong number of arguments')
end
usage_position = 1
--@end usage
if key_count == 0 or key_count ~= #keys then
  return redis.error_reply('RLARG wrong number of keys')
end
if now == 0 then
  local time = call('TIME')
  now = time[1] * 1000000 + time[2]
end

local replies, reply_count, failures, key_index = {pack('<d', now)}, 1, nil, 0
local no_state = string.rep('\0', STATE_BYTES)
position = 9
for _ = 1, groups do
  if groups > 1 then
    requests, operation, _, limits, position = unpack('<dc1dd', args, position)
    unread_limits = limits
    --@each limit
    kind_1 = nil
    if unread_limits > 0 then
      kind_1, flag_1, cost_1, a_1, b_1, c_1, d_1, position = unpack('<c1c1ddddc8', args, position)
      --@usage
      day_1, day_start_1, day_end_1, usage_position = unpack('<ddd', usage_args, usage_position)
      --@end usage
      unread_limits = unread_limits - 1
    end
    --@end
  end
  for _ = 1, requests do
    local key_offset, admitted, failure = key_index, true, nil
    --@each limit
    local key_1, state_1, status_1, ttl_us_1, new_field1_1, new_field2_1, new_field3_1
    local key_expires_at_1, field1_1, field2_1, field3_1
    --@usage
    local usage_key_1
    --@end usage
    if kind_1 then
      key_index = key_index + 1
      key_1 = keys[key_index]
      --@usage
      if day_1 > 0 then
        usage_index = usage_index + 1
        usage_key_1 = keys[usage_index]
        if not (now >= day_start_1 and now < day_end_1) and not failure then
          failure = redis.error_reply(format('RLSTALE the day of the usage is not that of %d', now))
        end
      end
      --@end usage
      local reset_us, free_reset_us
      status_1, state_1 = 0, call('GET', key_1)
      if state_1 then
        if #state_1 == STATE_BYTES then key_expires_at_1, field1_1, field2_1, field3_1 = unpack('<i8i8i8i8', state_1)
        else
          failure = state_1.err and state_1 or redis.error_reply('WRONGTYPE the key does not hold the state of a limit')
        end
      end
      if failure then
        -- Do nothing: the code at the end of the loop adds the error to the reply.
      --@algorithms
      else
        failure = redis.error_reply('RLARG unknown kind')
      end
      if status_1 ~= 0 then admitted = false end
    end
    --@end
    --@usage
    -- Write the totals before the states. If Redis rejects the first write, the request has changed nothing.
    --@each limit
    if usage_key_1 and admitted and cost_1 > 0 and not failure then
      local total = call('HINCRBY', usage_key_1, format('%d', day_1), format('%d', cost_1))
      if type(total) == 'table' then failure = total
      elseif total == cost_1 then call('PEXPIRE', usage_key_1, USAGE_TTL_MS) end
    end
    --@end
    --@end usage
    --@each limit
    if ttl_us_1 and (admitted or status_1 ~= 0) and not failure then
      local slack_us = key_expires_at_1 and key_expires_at_1 - now - ttl_us_1 or 0
      if slack_us >= MIN_KEY_SLACK_US and slack_us < MAX_KEY_SLACK_US then
        local length = call('SETRANGE', key_1, '8', pack('<i8i8i8', new_field1_1, new_field2_1, new_field3_1))
        failure = length ~= STATE_BYTES and length
      else
        local ttl_ms = ceil(ttl_us_1 / 1000) + KEY_SLACK_MS
        local new_state = pack('<i8i8i8i8', now + ttl_ms * 1000, new_field1_1, new_field2_1, new_field3_1)
        local result = call('SET', key_1, new_state, 'PX', format('%d', ttl_ms))
        failure = result.err and result
      end
    end
    --@end
    if failure then
      failures = failures or {}
      failures[#failures + 1], failures[#failures + 2] = key_offset, failure
    end
    replies[reply_count + 1] = failure and 'e' or admitted and 'a' or 'd'
    reply_count = reply_count + 1
    --@each limit
    if kind_1 then
      replies[reply_count + 1] = not failure and state_1 or no_state
      reply_count = reply_count + 1
    end
    --@end
  end
end
replies = table.concat(replies)
if failures then table.insert(failures, 1, replies) end
return failures or replies
