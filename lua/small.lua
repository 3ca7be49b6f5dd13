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

-- Variables of the algorithms. The driver does not read them.
local reset_us, free_reset_us
local replies, reply_count, key_offset, limit_offset = {pack('<dc1', now, 's')}, 1, 0, 0
position = CALL_BYTES + 1
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
  -- The size of a value that consists of the states of these limits, and the formats of its parts. The limits of several
  -- identities have no such value. The code below unpacks and packs the values of all limits of the script. It ignores
  -- the values after the end of a format.
  local value_bytes, head_format, body_format, body_offset = nil, '', '', '0'
  local body_position = HEADER_BYTES + HEAD_BYTES * limits + 1
  if keys_per_request == 1 then
    value_bytes = HEADER_BYTES + STATE_BYTES * limits
    if limits == 1 then head_format, body_format, body_offset = '<ddd', '<ddd', '24'
    elseif limits == 2 then head_format, body_format, body_offset = '<ddddd', '<dddddd', '40'
    elseif limits == 3 then head_format, body_format, body_offset = '<ddddddd', '<ddddddddd', '56'
    else head_format, body_format, body_offset = '<ddddddddd', '<dddddddddddd', '72' end
  end
  for _ = 1, requests do
    local key, admitted, failure, result = keys[key_offset + 1], true, nil, nil
    local value = call('GET', key)
    -- `kept_until`: the latest time until which a changed state is kept. `any_repair`: whether a state changes although its
    -- limit denies. `is_in_place`: whether all states are in values. `is_new`: whether no state exists, and all have the
    -- same key.
    local kept_until, any_repair, is_in_place, is_new = 0, false, true, false
    -- Whether the value consists of the states of these limits in their order. If it has another size, unpack any string,
    -- and do not use the numbers.
    local is_in_order = value and #value == value_bytes
    local states = is_in_order and value or args
    local value_expires_at
      --@each limit
      , stored_id_1, field3_1
      --@end
      = unpack(head_format, states)
    local
      --@each limit
      key_expires_at_1, field1_1, field2_1,
      --@end
      _ = unpack(body_format, states, body_position)
    --@each limit
    local key_1, value_1, index_1, separate_key_1
    local status_1, ttl_us_1, new_field1_1, new_field2_1, new_field3_1, kept_until_1
    --@usage
    local usage_key_1
    --@end usage
    --@end
    is_in_order = is_in_order
      --@each limit
      and (not kind_1 or stored_id_1 == id_1)
      --@end
    if not is_in_order then
      local number, key_index = limit_offset, key_offset
      is_new = keys_per_request == 1
      --@each limit
      if kind_1 and not failure then
        number = number + 1
        if place_1 == 'f' then
          key_index = key_index + 1
          if key_index > key_offset + 1 then
            key = keys[key_index]
            value = call('GET', key)
          end
        end
        key_1, value_1, stored_id_1 = key, value, nil
        -- Most of the other values have one state.
        if value and #value == HEADER_BYTES + STATE_BYTES then
          stored_id_1, field3_1, key_expires_at_1, field1_1, field2_1 = unpack('<ddddd', value, HEADER_BYTES + 1)
        end
        if stored_id_1 == id_1 then index_1 = 1
        else
          index_1, separate_key_1, key_expires_at_1, field1_1, field2_1, field3_1 = read_state(key, value, id_1, number, number - limit_offset)
          if not index_1 then is_in_place = false
          elseif type(index_1) == 'table' then failure = index_1 end
        end
        is_new = is_new and not value and not key_expires_at_1
      end
      --@end
    end
    --@usage
    --@each limit
    if kind_1 and day_1 > 0 then
      usage_index = usage_index + 1
      usage_key_1 = keys[usage_index]
      if not (now >= day_start_1 and now < day_end_1) and not failure then
        failure = redis.error_reply(format('RLSTALE the day of the usage is not that of %d', now))
      end
    end
    --@end
    --@end usage
    if not failure then
      --@each limit
      status_1 = 0
      if not kind_1 then
        -- The request has no such limit.
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
      end
      if status_1 ~= 0 then admitted, any_repair = false, any_repair or ttl_us_1 end
      --@end
    end
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
    elseif admitted and (is_in_order or is_new)
      --@each limit
      and (ttl_us_1 or not kind_1)
      --@end
      then
      if is_in_order and kept_until <= value_expires_at
        --@each limit
        and (new_field3_1 == field3_1 or not kind_1)
        --@end
        then
        result = call('SETRANGE', key, body_offset, pack(body_format
          --@each limit
          , kept_until_1, new_field1_1, new_field2_1
          --@end
        ))
        failure = result ~= value_bytes and result
      else
        local ttl_ms = ttl_of(kept_until)
        local heads = pack(head_format, now + ttl_ms * 1000
          --@each limit
          , id_1, new_field3_1
          --@end
        )
        local bodies = pack(body_format
          --@each limit
          , kept_until_1, new_field1_1, new_field2_1
          --@end
        )
        result = call('SET', key, heads .. bodies, 'PX', format('%d', ttl_ms))
        failure = result.err and result
      end
    elseif admitted and is_in_place and not is_in_order then
      local extended_key, extended_until
      --@each limit
      if kept_until_1 and not failure then
        if #value_1 == HEADER_BYTES + STATE_BYTES and new_field3_1 == field3_1 then
          result = call('SETRANGE', key_1, '24', pack('<ddd', kept_until_1, new_field1_1, new_field2_1))
          failure = result ~= #value_1 and result
        else failure = overwrite(key_1, value_1, index_1, kept_until_1, new_field1_1, new_field2_1, new_field3_1) end
        if kept_until_1 ~= key_expires_at_1 and kept_until_1 > unpack('<d', value_1)
          and not (extended_key == key_1 and extended_until >= kept_until_1) then
          extended_key, extended_until = key_1, extend(key_1, kept_until_1)
          failure = failure or type(extended_until) == 'table' and extended_until
        end
      end
      --@end
    elseif admitted or any_repair then
      local changes, index_in_order = {}, 0
      --@each limit
      if is_in_order then
        index_in_order = index_in_order + 1
        key_1, value_1, index_1 = key, value, index_in_order
      end
      if kept_until_1 and (admitted or status_1 ~= 0) then
        changes[#changes + 1] = {
          key = key_1, value = value_1, index = index_1, separate_key = separate_key_1, exists = key_expires_at_1,
          id = id_1, kept_until = kept_until_1, field1 = new_field1_1, field2 = new_field2_1, field3 = new_field3_1,
          stored_field3 = field3_1,
        }
      end
      --@end
      failure = write_states(changes)
    end
    if failure then result = failure
    elseif is_in_order then result = value
    else
      local states_format = limits == 1 and '<dddd' or limits == 2 and '<dddddddd' or limits == 3 and '<dddddddddddd'
        or '<dddddddddddddddd'
      result = pack(states_format
        --@each limit
        , key_expires_at_1 or 0, field1_1 or 0, field2_1 or 0, field3_1 or 0
        --@end
      )
    end
    if not (admitted or failure) then
      reply_count = reply_count + 1
      replies[reply_count] = 0
    end
    reply_count = reply_count + 1
    replies[reply_count] = result
    key_offset = key_offset + keys_per_request
  end
  limit_offset = limit_offset + limits
end
return replies
