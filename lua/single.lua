-- The driver (script without algorithms) for the most common calls. Each request has one limit of the kind B, F, X or
-- W, without a flag. The operation is C, or T with a cost of at least 1. The header of generic.lua describes the
-- arguments and replies.
-- This driver creates no Lua tables or functions for its groups. In a large batch, a check therefore needs 25 % less
-- CPU time than with generic.lua. In a call with a single check, the difference is larger.
-- The reply contains the states that the script has read, from which the gateway computes the outcomes. The algorithms
-- therefore only decide, without the lines between the markers `generic` and `end generic`.
-- This driver calls Redis commands with redis.pcall. If one request fails, the other requests of the call succeed.
local call, floor, ceil, format = redis.pcall, math.floor, math.ceil, string.format
local pack, unpack = struct.pack, struct.unpack
-- CALL_BYTES is the size in bytes of the numbers before the groups in ARGV[1], and GROUP_BYTES the size of a group with
-- its limit (see generic.lua for the format).
local CALL_BYTES, GROUP_BYTES = 9, 76
-- MAX_STATE (2^52) is the maximum value of a number in a state. Doubles represent all integers below
-- EXACT_INTEGER_LIMIT (2^53) exactly.
local MAX_STATE, EXACT_INTEGER_LIMIT = 4503599627370496, 9007199254740992
-- The header of generic.lua describes the slack of a state.
local MIN_KEY_SLACK_US, MAX_KEY_SLACK_US, KEY_SLACK_MS = 500000, 1001000, 1000

local args, keys, charged_at, argument_count = ARGV[1], KEYS, 0, 2
--@usage
-- USAGE_BYTES is the number of bytes in ARGV[2] for each limit. USAGE_TTL_MS (400 days) is the TTL of a hash of usage
-- totals. The first charge of each day renews the TTL.
local USAGE_BYTES, USAGE_TTL_MS = 24, '34560000000'
local usage_args, usage_key_count = ARGV[3], 0
argument_count = 3
--@end usage
if #ARGV ~= argument_count or #args < CALL_BYTES or (#args - CALL_BYTES) % GROUP_BYTES ~= 0 then
  return redis.error_reply('RLARG wrong number of arguments')
end
-- Validate all groups of arguments before the script performs the first check. If there is only one group, its values
-- stay in the variables, and the second loop does not unpack them again.
local now, layout, position = unpack('<dc1', args)
local groups, key_count = (#args - CALL_BYTES) / GROUP_BYTES, 0
local requests, operation, _, limits, kind, flag, place, id, requested, a, b, c, d
--@usage
local day, day_start, day_end
if #usage_args ~= USAGE_BYTES * groups then
  return redis.error_reply('RLARG wrong number of arguments')
end
--@end usage
for group = 1, groups do
  requests, operation, _, limits, kind, flag, place, id, requested, a, b, c, d, position =
    unpack('<dc1ddc1c1c1dddddc8', args, position)
  if layout ~= 'i' or operation ~= 'C' and (operation ~= 'T' or not (requested >= 1)) or limits ~= 1 or flag ~= '-'
    or place ~= 'f'
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

local replies, reply_count, key_offset = {pack('<dc1', now, 's')}, 1, 0
position = CALL_BYTES + 1
--@states
for group = 1, groups do
  if groups > 1 then
    requests, operation, _, _, kind, _, _, id, requested, a, b, c, d, position =
      unpack('<dc1ddc1c1c1dddddc8', args, position)
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
    local key_expires_at, field1, field2, field3, failure, index, separate_key
    local value, value_expires_at, first_id, result = call('GET', key), 0, nil, nil
    -- Most values have one state.
    if value and #value == HEADER_BYTES + STATE_BYTES then
      value_expires_at, first_id, field3, key_expires_at, field1, field2 = unpack('<dddddd', value)
    end
    if first_id ~= id then
      index, separate_key, key_expires_at, field1, field2, field3 = read_state(key, value, id, group, 1)
      if type(index) == 'table' then failure = index
      elseif value then value_expires_at = unpack('<d', value) end
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
      local kept_until = key_expires_at
      if slack_us < MIN_KEY_SLACK_US or slack_us >= MAX_KEY_SLACK_US then
        kept_until = now + (ceil(ttl_us / 1000) + KEY_SLACK_MS) * 1000
      end
      if first_id == id and kept_until <= value_expires_at and new_field3 == field3 then
        local length = call('SETRANGE', key, '24', pack('<ddd', kept_until, new_field1, new_field2))
        failure = length ~= #value and length
      elseif first_id == id or not value and not key_expires_at then
        local ttl_ms = ttl_of(kept_until)
        local new_value = pack('<dddddd', now + ttl_ms * 1000, id, new_field3, kept_until, new_field1, new_field2)
        result = call('SET', key, new_value, 'PX', format('%d', ttl_ms))
        failure = result.err and result
      elseif index then
        failure = overwrite(key, value, index, kept_until, new_field1, new_field2, new_field3)
        if kept_until > value_expires_at and not failure then
          result = extend(key, kept_until)
          failure = type(result) == 'table' and result
        end
      else
        failure = write_states({{
          key = key, value = value, separate_key = separate_key, exists = key_expires_at,
          id = id, kept_until = kept_until, field1 = new_field1, field2 = new_field2, field3 = new_field3,
        }})
      end
    end
    if failure then result = failure
    elseif first_id == id then result = value
    else result = pack('<dddd', key_expires_at or 0, field1 or 0, field2 or 0, field3 or 0) end
    if status ~= 0 and not failure then
      reply_count = reply_count + 1
      replies[reply_count] = 0
    end
    reply_count = reply_count + 1
    replies[reply_count] = result
  end
  key_offset = key_offset + requests
end
return replies
