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
-- CALL_BYTES is the size in bytes of what precedes the groups in ARGV[1], GROUP_BYTES the size of a group without its
-- limits, and LIMIT_BYTES the size of a limit (see generic.lua for the format).
local CALL_BYTES, GROUP_BYTES, LIMIT_BYTES = 9, 25, 51
-- MAX_STATE (2^52) is the maximum value of a number in a state. Doubles represent all integers below
-- EXACT_INTEGER_LIMIT (2^53) exactly.
local MAX_STATE, EXACT_INTEGER_LIMIT = 4503599627370496, 9007199254740992
-- The header of generic.lua describes the slack of a state.
local MIN_KEY_SLACK_US, MAX_KEY_SLACK_US, KEY_SLACK_MS = 500000, 1001000, 1000

local args, keys, op, charged_at, argument_count = ARGV[1], KEYS, 'C', 0, 2
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
-- Validate all groups of arguments before the script performs the first check. If there is only one group, its values
-- stay in the variables, and the second loop does not unpack them again.
local now, layout, position = unpack('<dc1', args)
local groups, key_count = 0, 0
local requests, operation, _, limits, unread_limits, keys_per_request, flag
--@each limit
local kind_1, place_1, id_1, cost_1, a_1, b_1, c_1, d_1
--@usage
local day_1, day_start_1, day_end_1
--@end usage
--@end
while position <= #args do
  if #args - position + 1 < GROUP_BYTES then
    return redis.error_reply('RLARG wrong number of arguments')
  end
  requests, operation, _, limits, position = unpack('<dc1dd', args, position)
  if layout ~= 'i' or operation ~= 'C' or not (requests >= 1 and requests % 1 == 0 and limits >= 1 and limits % 1 == 0)
    or #args - position + 1 < LIMIT_BYTES * limits then
    return redis.error_reply('RLARG only checks with few limits each are supported')
  end
  unread_limits, keys_per_request = limits, 0
  --@usage
  if #usage_args - usage_position + 1 < USAGE_BYTES * limits then
    return redis.error_reply('RLARG wrong number of arguments')
  end
  --@end usage
  --@each limit
  kind_1 = nil
  if unread_limits > 0 then
    kind_1, flag, place_1, id_1, cost_1, a_1, b_1, c_1, d_1, position = unpack('<c1c1c1dddddc8', args, position)
    if place_1 == 'f' then keys_per_request = keys_per_request + 1 end
    --@usage
    day_1, day_start_1, day_end_1, usage_position = unpack('<ddd', usage_args, usage_position)
    if not (day_1 >= 0 and day_1 <= 31 and day_1 % 1 == 0) then
      return redis.error_reply('RLARG unknown day')
    end
    if day_1 > 0 then usage_key_count = usage_key_count + requests end
    --@end usage
    if flag ~= '-' or keys_per_request == 0 or place_1 ~= 'f' and place_1 ~= 's'
      or kind_1 ~= 'B' and kind_1 ~= 'F' and kind_1 ~= 'X' and kind_1 ~= 'W' then
      return redis.error_reply('RLARG only checks with few limits each are supported')
    end
    unread_limits = unread_limits - 1
  end
  --@end
  if unread_limits > 0 then
    return redis.error_reply('RLARG only checks with few limits each are supported')
  end
  groups, key_count = groups + 1, key_count + requests * keys_per_request
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

local replies, reply_count, failures, key_index, limit_offset, limit_count = {pack('<dc1', now, 's')}, 1, nil, 0, 0, 0
position = CALL_BYTES + 1
local no_state = string.rep('\0', 32)
--@states
for _ = 1, groups do
  if groups > 1 then
    requests, operation, _, limits, position = unpack('<dc1dd', args, position)
    unread_limits, keys_per_request = limits, 0
    --@each limit
    kind_1 = nil
    if unread_limits > 0 then
      kind_1, flag, place_1, id_1, cost_1, a_1, b_1, c_1, d_1, position = unpack('<c1c1c1dddddc8', args, position)
      if place_1 == 'f' then keys_per_request = keys_per_request + 1 end
      --@usage
      day_1, day_start_1, day_end_1, usage_position = unpack('<ddd', usage_args, usage_position)
      --@end usage
      unread_limits = unread_limits - 1
    end
    --@end
  end
  -- The code below passes the values of all limits to `pack`, which ignores the values after the end of the format.
  local value_format = limits == 1 and '<dddddd' or limits == 2 and '<ddddddddddd' or limits == 3 and '<dddddddddddddddd'
    or '<ddddddddddddddddddddd'
  local value_bytes = keys_per_request == 1 and HEADER_BYTES + STATE_BYTES * limits
  for _ = 1, requests do
    key_index = key_index + 1
    local key, admitted, failure, result = keys[key_index], true, nil, nil
    local value, value_expires_at = call('GET', key), 0
    -- `is_in_order`: the value consists of the states of these limits in their order. `kept_until`: the latest time until
    -- which a changed state is kept. `all_change`, `any_repair`: whether all states change, and whether a state changes
    -- although its limit denies. `is_in_place`: whether all states have a position. `is_new`: whether no state exists, and
    -- all have the same key.
    local is_in_order, kept_until, all_change, any_repair, is_in_place, is_new = false, 0, true, false, true, false
    --@each limit
    local key_1, value_1, value_expires_at_1, position_1, separate_key_1
    local status_1, ttl_us_1, new_field1_1, new_field2_1, new_field3_1
    local key_expires_at_1, field1_1, field2_1, field3_1, kept_until_1
    --@usage
    local usage_key_1
    --@end usage
    --@end
    if value and #value == value_bytes then
      value_expires_at
        --@each limit
        , position_1, key_expires_at_1, field1_1, field2_1, field3_1
        --@end
        = unpack(value_format, value)
      -- For now, `position_1` is the id of the state.
      is_in_order = true
        --@each limit
        and (not kind_1 or position_1 == id_1)
        --@end
    end
    if not is_in_order then
      -- `expected`: the position in the value of the next state of these limits, if the value has them in their order.
      local number, expected, other_id = limit_offset, nil, nil
      is_new = keys_per_request == 1
      --@each limit
      if kind_1 and not failure then
        number, other_id = number + 1, nil
        if place_1 == 'f' then
          if number > limit_offset + 1 then
            key_index = key_index + 1
            key = keys[key_index]
            value = call('GET', key)
          end
          expected, value_expires_at = nil, 0
          if value and (#value == HEADER_BYTES + STATE_BYTES or #value % STATE_BYTES == HEADER_BYTES and #value > HEADER_BYTES) then
            expected = HEADER_BYTES + 1
            value_expires_at, other_id, key_expires_at_1, field1_1, field2_1, field3_1 = unpack('<dddddd', value)
          end
        elseif expected and expected < #value then
          other_id, key_expires_at_1, field1_1, field2_1, field3_1 = unpack('<ddddd', value, expected)
        end
        if other_id == id_1 then position_1, expected = expected, expected + STATE_BYTES
        else
          position_1, separate_key_1, key_expires_at_1, field1_1, field2_1, field3_1 = read_state(key, value, id_1, number)
          if type(position_1) == 'table' then failure = position_1 end
        end
        key_1, value_1, value_expires_at_1 = key, value, value_expires_at
        if not position_1 then is_in_place = false end
        is_new = is_new and not value and not key_expires_at_1
      end
      --@end
    end
    --@each limit
    if kind_1 then
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
      status_1 = 0
      if failure then
        -- Do nothing: the code at the end of the loop adds the error to the reply.
      --@algorithms
      else
        failure = redis.error_reply('RLARG unknown kind')
      end
      if ttl_us_1 then
        local slack_us = key_expires_at_1 and key_expires_at_1 - now - ttl_us_1 or 0
        kept_until_1 = key_expires_at_1
        if slack_us < MIN_KEY_SLACK_US or slack_us >= MAX_KEY_SLACK_US then
          kept_until_1 = now + (ceil(ttl_us_1 / 1000) + KEY_SLACK_MS) * 1000
        end
        if kept_until_1 > kept_until then kept_until = kept_until_1 end
      else all_change = false end
      if status_1 ~= 0 then admitted, any_repair = false, any_repair or ttl_us_1 end
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
    if failure then
      -- Do nothing: the code below adds the error to the reply.
    elseif (is_in_order or is_new) and all_change and admitted then
      local is_extended, ttl_ms = kept_until > value_expires_at, nil
      if is_extended then
        ttl_ms = ttl_of(kept_until)
        value_expires_at = now + ttl_ms * 1000
      end
      local new_value = pack(value_format, value_expires_at
        --@each limit
        , id_1, kept_until_1, new_field1_1, new_field2_1, new_field3_1
        --@end
      )
      if is_extended then result = call('SET', key, new_value, 'PX', format('%d', ttl_ms))
      else result = call('SETRANGE', key, '0', new_value) end
      failure = type(result) == 'table' and result.err and result or nil
    elseif admitted and is_in_place and not is_in_order then
      local extended_key, extended_until
      --@each limit
      if kept_until_1 and not failure then
        result = call('SETRANGE', key_1, position_1 == 9 and '16' or offset_of(position_1),
          pack('<dddd', kept_until_1, new_field1_1, new_field2_1, new_field3_1))
        failure = result ~= #value_1 and result
        if kept_until_1 > value_expires_at_1 and not (extended_key == key_1 and extended_until >= kept_until_1) then
          extended_key, extended_until = key_1, extend(key_1, kept_until_1)
          failure = failure or type(extended_until) == 'table' and extended_until
        end
      end
      --@end
    elseif admitted or any_repair then
      local changes, position_in_order = {}, HEADER_BYTES + 1
      --@each limit
      if is_in_order then
        key_1, value_1, position_1 = key, value, position_in_order
        position_in_order = position_in_order + STATE_BYTES
      end
      if kept_until_1 and (admitted or status_1 ~= 0) then
        changes[#changes + 1] = {
          key = key_1, value = value_1, position = position_1, separate_key = separate_key_1, exists = key_expires_at_1,
          id = id_1, kept_until = kept_until_1,
          state = pack('<ddddd', id_1, kept_until_1, new_field1_1, new_field2_1, new_field3_1),
        }
      end
      --@end
      failure = write_states(changes)
    end
    if failure then
      failures = failures or {}
      failures[#failures + 1], failures[#failures + 2] = limit_count, failure
    end
    limit_count = limit_count + limits
    if failure then replies[reply_count + 1] = 'e'
    elseif is_in_order then
      replies[reply_count + 1], replies[reply_count + 2] = admitted and 'a' or 'd', value
      reply_count = reply_count + 1
    else
      replies[reply_count + 1] = admitted and 'm' or 'n'
      --@each limit
      if kind_1 then
        reply_count = reply_count + 1
        replies[reply_count + 1] = position_1 and byte_range(value_1, position_1 + 8, position_1 + 39)
          or key_expires_at_1 and pack('<dddd', key_expires_at_1, field1_1, field2_1, field3_1) or no_state
      end
      --@end
    end
    reply_count = reply_count + 1
  end
  limit_offset = limit_offset + limits
end
replies = table.concat(replies)
if failures then table.insert(failures, 1, replies) end
return failures or replies
