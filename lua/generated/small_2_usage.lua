-- Composed from lua/small.lua and all algorithms that it supports, with usage. Do not edit:
-- UPDATE_GENERATED=1 cargo test --test it scripts::

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
-- USAGE_BYTES is the number of bytes in ARGV[2] for each limit. USAGE_TTL_MS (400 days) is the TTL of a hash of usage
-- totals. The first charge of each day renews the TTL.
local USAGE_BYTES, USAGE_TTL_MS = 24, '34560000000'
local usage_args, usage_position, usage_key_count = ARGV[3], 1, 0
argument_count = 3
if #ARGV ~= argument_count or #args < CALL_BYTES then
  return redis.error_reply('RLARG wrong number of arguments')
end
-- Validate all groups of arguments before the script performs the first check. If there is only one group, its values
-- stay in the variables, and the second loop does not unpack them again.
local now, layout, position = unpack('<dc1', args)
local groups, key_count = 0, 0
local requests, operation, _, limits, unread_limits, keys_per_request, flag
local kind_1, place_1, id_1, cost_1, a_1, b_1, c_1, d_1
local day_1, day_start_1, day_end_1
local kind_2, place_2, id_2, cost_2, a_2, b_2, c_2, d_2
local day_2, day_start_2, day_end_2
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
  if #usage_args - usage_position + 1 < USAGE_BYTES * limits then
    return redis.error_reply('RLARG wrong number of arguments')
  end
  kind_1 = nil
  if unread_limits > 0 then
    kind_1, flag, place_1, id_1, cost_1, a_1, b_1, c_1, d_1, position = unpack('<c1c1c1dddddc8', args, position)
    if place_1 == 'f' then keys_per_request = keys_per_request + 1 end
    day_1, day_start_1, day_end_1, usage_position = unpack('<ddd', usage_args, usage_position)
    if not (day_1 >= 0 and day_1 <= 31 and day_1 % 1 == 0) then
      return redis.error_reply('RLARG unknown day')
    end
    if day_1 > 0 then usage_key_count = usage_key_count + requests end
    if flag ~= '-' or keys_per_request == 0 or place_1 ~= 'f' and place_1 ~= 's'
      or kind_1 ~= 'B' and kind_1 ~= 'F' and kind_1 ~= 'X' and kind_1 ~= 'W' then
      return redis.error_reply('RLARG only checks with few limits each are supported')
    end
    unread_limits = unread_limits - 1
  end
  kind_2 = nil
  if unread_limits > 0 then
    kind_2, flag, place_2, id_2, cost_2, a_2, b_2, c_2, d_2, position = unpack('<c1c1c1dddddc8', args, position)
    if place_2 == 'f' then keys_per_request = keys_per_request + 1 end
    day_2, day_start_2, day_end_2, usage_position = unpack('<ddd', usage_args, usage_position)
    if not (day_2 >= 0 and day_2 <= 31 and day_2 % 1 == 0) then
      return redis.error_reply('RLARG unknown day')
    end
    if day_2 > 0 then usage_key_count = usage_key_count + requests end
    if flag ~= '-' or keys_per_request == 0 or place_2 ~= 'f' and place_2 ~= 's'
      or kind_2 ~= 'B' and kind_2 ~= 'F' and kind_2 ~= 'X' and kind_2 ~= 'W' then
      return redis.error_reply('RLARG only checks with few limits each are supported')
    end
    unread_limits = unread_limits - 1
  end
  if unread_limits > 0 then
    return redis.error_reply('RLARG only checks with few limits each are supported')
  end
  groups, key_count = groups + 1, key_count + requests * keys_per_request
end
local usage_index = key_count
key_count = key_count + usage_key_count
if usage_position ~= #usage_args + 1 then
  return redis.error_reply('RLARG wrong number of arguments')
end
usage_position = 1
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
local HEADER_BYTES, HEAD_BYTES, STATE_BYTES = 8, 16, 40
local read_state, ttl_of, extend, overwrite, write_states
-- The block hides names, because a function of Lua 5.1 has at most 200 local variables.
do
  local BODY_BYTES, MAX_STATES, SEPARATE_BYTES, IDENTITY_SUFFIX = 24, 16, 32, 'states'
  local concat, find, byte_range = table.concat, string.find, string.sub
  local state_names, offsets, full_bytes = nil, {}, HEADER_BYTES + MAX_STATES * STATE_BYTES

  -- Return an offset as text, for SETRANGE. Formatting a number takes as long as forty assignments, so the texts are
  -- kept.
  local function offset_text(offset)
    local text = offsets[offset]
    if not text then
      text = format('%d', offset)
      offsets[offset] = text
    end
    return text
  end

  -- Return the offsets of the head and of the body of the state with this index in a value.
  local function offsets_of(value, index)
    local states = (#value - HEADER_BYTES) / STATE_BYTES
    return HEADER_BYTES + HEAD_BYTES * (index - 1), HEADER_BYTES + HEAD_BYTES * states + BODY_BYTES * (index - 1)
  end

  -- Return the separate key of a state. `number` is the number of the limit, counted over all groups.
  local function separate_key_of(key, number)
    if not state_names then
      state_names = {}
      for name in string.gmatch(ARGV[2], '[^\n]+') do state_names[#state_names + 1] = name end
    end
    return byte_range(key, 1, -1 - #IDENTITY_SUFFIX) .. state_names[number]
  end

  -- Read a state. `value` is the value of its identity, or false, and `number` the number of the limit, counted over all
  -- groups. The state is probably the one with the index `guess`. Return the index of the state in the value, or nil, its separate key if it is not in the value, the time
  -- until which it is kept if it exists, and its fields. If the state cannot be read, return an error reply.
  function read_state(key, value, id, number, guess)
    if value then
      if value.err then return value end
      if #value % STATE_BYTES ~= HEADER_BYTES then
        return redis.error_reply('WRONGTYPE the key does not hold the states of an identity')
      end
      local bodies_offset = HEADER_BYTES + HEAD_BYTES * (#value - HEADER_BYTES) / STATE_BYTES
      local at = HEADER_BYTES + HEAD_BYTES * (guess - 1) + 1
      if at > bodies_offset or unpack('<d', value, at) ~= id then
        local packed_id = pack('<d', id)
        at = HEADER_BYTES
        repeat at = find(value, packed_id, at + 1, true) until not at or at % HEAD_BYTES == HEADER_BYTES + 1
      end
      if at and at <= bodies_offset then
        local index = (at - 1 - HEADER_BYTES) / HEAD_BYTES + 1
        local kept_until, field1, field2 = unpack('<ddd', value, bodies_offset + BODY_BYTES * (index - 1) + 1)
        return index, nil, kept_until, field1, field2, (unpack('<d', value, at + 8))
      end
    end
    local separate_key = separate_key_of(key, number)
    local state = call('GET', separate_key)
    if not state then return nil, separate_key end
    if #state == SEPARATE_BYTES then return nil, separate_key, unpack('<i8i8i8i8', state) end
    return state.err and state or redis.error_reply('WRONGTYPE the key does not hold the state of a limit')
  end

  -- Return the TTL of a key whose states are kept until this time. It is longer than necessary, so that most charges
  -- need no new TTL.
  function ttl_of(kept_until)
    local ttl_ms = ceil((kept_until - now) / 1000)
    return ttl_ms < 8000 and (ttl_ms < 0 and 2000 or ttl_ms + 1000) or ttl_ms + floor(ttl_ms / 8)
  end

  -- Extend the TTL of the key of an identity, so that a state is kept until this time. Return the time at which the key
  -- expires, or an error reply.
  function extend(key, kept_until)
    local ttl_ms = ttl_of(kept_until)
    local expires_at = now + ttl_ms * 1000
    local result = call('PEXPIRE', key, format('%d', ttl_ms))
    if result == 1 then result = call('SETRANGE', key, '0', pack('<d', expires_at)) end
    return type(result) == 'table' and result or expires_at
  end

  -- Overwrite the state with this index in a value. Return an error reply, or nothing.
  function overwrite(key, value, index, kept_until, field1, field2, field3)
    local head_offset, body_offset = offsets_of(value, index)
    local result = call('SETRANGE', key, offset_text(body_offset), pack('<ddd', kept_until, field1, field2))
    if result == #value and unpack('<d', value, head_offset + 9) ~= field3 then
      result = call('SETRANGE', key, offset_text(head_offset + 8), pack('<d', field3))
    end
    if result ~= #value then return result end
  end

  -- Overwrite several states of a value with one command, or two if third fields change as well. Return an error reply, or
  -- nothing.
  local function overwrite_all(key, value, changes)
    local first, last, bodies = changes[1].index, changes[1].index, {}
    for i = 2, #changes do
      local index = changes[i].index
      if index < first then first = index elseif index > last then last = index end
    end
    for i = 1, #changes do
      local change = changes[i]
      bodies[change.index - first + 1] = pack('<ddd', change.kept_until, change.field1, change.field2)
    end
    local _, offset = offsets_of(value, first)
    for i = 1, last - first + 1 do
      local from = offset + BODY_BYTES * (i - 1)
      bodies[i] = bodies[i] or byte_range(value, from + 1, from + BODY_BYTES)
    end
    local result = call('SETRANGE', key, offset_text(offset), concat(bodies))
    for i = 1, #changes do
      local change = changes[i]
      if result == #value and change.field3 ~= change.stored_field3 then
        result = call('SETRANGE', key, offset_text(HEADER_BYTES + HEAD_BYTES * (change.index - 1) + 8),
          pack('<d', change.field3))
      end
    end
    if result ~= #value then return result end
  end

  -- Return whether a state can be added to a value. The value then has few states, or states that are no longer kept. Do
  -- not look for those if the state has a separate key already.
  local function has_room(value, has_separate_key)
    if not value or #value < full_bytes then return true end
    if has_separate_key then return false end
    for index = 1, (#value - HEADER_BYTES) / STATE_BYTES do
      local _, body_offset = offsets_of(value, index)
      if unpack('<d', value, body_offset + 1) <= now then return true end
    end
    return false
  end

  -- Write the value of an identity with changed states (see `write_states`). If the value is full, drop states that are no
  -- longer kept. Return the reply of Redis.
  local function rewrite(key, value, changes)
    value = value or string.rep('\0', HEADER_BYTES)
    local by_id, heads, bodies, kept_until = {}, {}, {}, 0
    for i = 1, #changes do by_id[changes[i].id] = changes[i] end
    local function add(head, body, time)
      heads[#heads + 1], bodies[#bodies + 1] = head, body
      if time > kept_until then kept_until = time end
    end
    local function add_change(change)
      if change.kept_until then
        add(pack('<dd', change.id, change.field3), pack('<ddd', change.kept_until, change.field1, change.field2),
          change.kept_until)
      end
    end
    for index = 1, (#value - HEADER_BYTES) / STATE_BYTES do
      local head_offset, body_offset = offsets_of(value, index)
      local id, time = unpack('<d', value, head_offset + 1), unpack('<d', value, body_offset + 1)
      local change = by_id[id]
      if change then
        by_id[id] = nil
        add_change(change)
      elseif #value < full_bytes or time > now then
        add(byte_range(value, head_offset + 1, head_offset + HEAD_BYTES),
          byte_range(value, body_offset + 1, body_offset + BODY_BYTES), time)
      end
    end
    for i = 1, #changes do
      if by_id[changes[i].id] then add_change(changes[i]) end
    end
    if #heads == 0 then return call('DEL', key) end
    local ttl_ms = ttl_of(kept_until)
    return call('SET', key, pack('<d', now + ttl_ms * 1000) .. concat(heads) .. concat(bodies), 'PX',
      format('%d', ttl_ms))
  end

  -- Write a changed state to its separate key, or delete the key. Return the reply of Redis.
  local function write_separately(change)
    if not change.kept_until then return call('DEL', change.separate_key) end
    local ttl_ms = ceil((change.kept_until - now) / 1000)
    local state = pack('<i8i8i8i8', change.kept_until, change.field1, change.field2, change.field3)
    return call('SET', change.separate_key, state, 'PX', format('%d', ttl_ms))
  end

  -- Write changed states. `changes` is a list of tables with the fields `key`, `value` (the value of the key, or false),
  -- `index` (the index of the state in the value, or nil), `separate_key` (if the state is not in the value), `exists`
  -- (whether the separate key exists), `id`, `kept_until`, `field1`, `field2`, `field3`, and `stored_field3` (the third
  -- field before the change). A state without `kept_until` is removed. Return an error reply, or nothing.
  function write_states(changes)
    local written = {}
    for i = 1, #changes do
      local key, value = changes[i].key, changes[i].value
      if not written[key] then
        written[key] = true
        local in_place, kept_until, of_value, result = true, 0, {}, nil
        for j = i, #changes do
          local change = changes[j]
          if change.key == key then
            if not change.index
              and not (change.kept_until and layout == 'i' and has_room(value, change.exists)) then
              result = write_separately(change)
              if type(result) == 'table' and result.err then return result end
            else
              of_value[#of_value + 1] = change
              if not (change.index and change.kept_until) then in_place = false
              elseif change.kept_until > kept_until then kept_until = change.kept_until end
            end
          end
        end
        if not in_place then
          result = rewrite(key, value, of_value)
          if type(result) == 'table' and result.err then return result end
          for j = 1, #of_value do
            local change = of_value[j]
            if change.separate_key and change.exists then call('DEL', change.separate_key) end
          end
        elseif #of_value > 0 then
          result = overwrite_all(key, value, of_value)
          if result then return result end
          if kept_until > unpack('<d', value) then
            result = extend(key, kept_until)
            if type(result) == 'table' then return result end
          end
        end
      end
    end
  end
end
for _ = 1, groups do
  if groups > 1 then
    requests, operation, _, limits, position = unpack('<dc1dd', args, position)
    unread_limits, keys_per_request = limits, 0
    kind_1 = nil
    if unread_limits > 0 then
      kind_1, flag, place_1, id_1, cost_1, a_1, b_1, c_1, d_1, position = unpack('<c1c1c1dddddc8', args, position)
      if place_1 == 'f' then keys_per_request = keys_per_request + 1 end
      day_1, day_start_1, day_end_1, usage_position = unpack('<ddd', usage_args, usage_position)
      unread_limits = unread_limits - 1
    end
    kind_2 = nil
    if unread_limits > 0 then
      kind_2, flag, place_2, id_2, cost_2, a_2, b_2, c_2, d_2, position = unpack('<c1c1c1dddddc8', args, position)
      if place_2 == 'f' then keys_per_request = keys_per_request + 1 end
      day_2, day_start_2, day_end_2, usage_position = unpack('<ddd', usage_args, usage_position)
      unread_limits = unread_limits - 1
    end
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
      , stored_id_1, field3_1
      , stored_id_2, field3_2
      = unpack(head_format, states)
    local
      key_expires_at_1, field1_1, field2_1,
      key_expires_at_2, field1_2, field2_2,
      _ = unpack(body_format, states, body_position)
    local key_1, value_1, index_1, separate_key_1
    local status_1, ttl_us_1, new_field1_1, new_field2_1, new_field3_1, kept_until_1
    local usage_key_1
    local key_2, value_2, index_2, separate_key_2
    local status_2, ttl_us_2, new_field1_2, new_field2_2, new_field3_2, kept_until_2
    local usage_key_2
    is_in_order = is_in_order
      and (not kind_1 or stored_id_1 == id_1)
      and (not kind_2 or stored_id_2 == id_2)
    if not is_in_order then
      local number, key_index = limit_offset, key_offset
      is_new = keys_per_request == 1
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
      if kind_2 and not failure then
        number = number + 1
        if place_2 == 'f' then
          key_index = key_index + 1
          if key_index > key_offset + 1 then
            key = keys[key_index]
            value = call('GET', key)
          end
        end
        key_2, value_2, stored_id_2 = key, value, nil
        -- Most of the other values have one state.
        if value and #value == HEADER_BYTES + STATE_BYTES then
          stored_id_2, field3_2, key_expires_at_2, field1_2, field2_2 = unpack('<ddddd', value, HEADER_BYTES + 1)
        end
        if stored_id_2 == id_2 then index_2 = 1
        else
          index_2, separate_key_2, key_expires_at_2, field1_2, field2_2, field3_2 = read_state(key, value, id_2, number, number - limit_offset)
          if not index_2 then is_in_place = false
          elseif type(index_2) == 'table' then failure = index_2 end
        end
        is_new = is_new and not value and not key_expires_at_2
      end
    end
    if kind_1 and day_1 > 0 then
      usage_index = usage_index + 1
      usage_key_1 = keys[usage_index]
      if not (now >= day_start_1 and now < day_end_1) and not failure then
        failure = redis.error_reply(format('RLSTALE the day of the usage is not that of %d', now))
      end
    end
    if kind_2 and day_2 > 0 then
      usage_index = usage_index + 1
      usage_key_2 = keys[usage_index]
      if not (now >= day_start_2 and now < day_end_2) and not failure then
        failure = redis.error_reply(format('RLSTALE the day of the usage is not that of %d', now))
      end
    end
    if not failure then
      status_1 = 0
      if not kind_1 then
        -- The request has no such limit.
      elseif kind_1 == 'B' then
        local burst, refill, parts = a_1, b_1, c_1
        -- A token is divided into `parts` equal parts, so that all numbers are integers. `debt` is the number of parts that are
        -- missing from a full bucket. The refill repays the debt.
        local debt, clock_went_back, rate_lowered = 0, false, false
        if key_expires_at_1 then
          local updated_at, stored_parts = field1_1, field3_1
          debt = field2_1
          if stored_parts ~= parts then
            -- The rate of the limit has changed since the last write, and with it the number of parts of a token. Convert the
            -- debt from `stored_parts` to `parts` parts per token, rounded up. If a double cannot hold the product exactly,
            -- divide first. The rounding error is then less than one part, and the code adds one part, so that the converted
            -- debt is never too small.
            local rest = debt % stored_parts
            local product = rest * parts
            local converted = product < EXACT_INTEGER_LIMIT and ceil(product / stored_parts)
              or ceil(rest / stored_parts * parts) + 1
            debt = math.min((debt - rest) / stored_parts * parts + converted, MAX_STATE)
          end
          -- `repay_time` is an upper bound. At the rate that the limit had at the last write, the bucket repays the debt in
          -- this time or up to about half a second earlier.
          local elapsed, repay_time = now - updated_at, key_expires_at_1 - MIN_KEY_SLACK_US - updated_at
          local needed = debt / refill
          if elapsed < 0 then clock_went_back = true
          elseif needed > repay_time then
            -- The rate of the limit was lowered since the last write. The part of the debt that the old rate has repaid until
            -- the current time counts as repaid. The rest, debt * left / repay_time, is rounded up as in the conversion above.
            local left = repay_time - elapsed
            if left <= 0 then debt = 0
            else
              -- The factor 1.0 makes the product a double, because in Lua 5.4 a product of integers could overflow.
              local product = 1.0 * debt * left
              local scaled = product < EXACT_INTEGER_LIMIT and ceil(product / repay_time) or ceil(debt / repay_time * left) + 1
              debt, rate_lowered = math.min(scaled, debt - elapsed * refill), true
            end
          elseif elapsed >= needed then debt = 0
          else debt = debt - elapsed * refill end
        end
        local capacity = burst * parts

        local charge = cost_1 * parts
        local charged = debt + charge
        if charged > capacity and (op == 'C' or op == 'P') then
          status_1 = 1
          -- If the rate was lowered, write a state with the new rate, because retry_us was computed with this rate.
          if clock_went_back or rate_lowered then
            ttl_us_1, new_field1_1, new_field2_1, new_field3_1 = ceil(debt / refill), now, debt, parts
          end
        else
          ttl_us_1 = false
          if charged > 0 then
            ttl_us_1 = ceil(charged / refill)
            new_field1_1 = now
            new_field2_1 = charged
            new_field3_1 = parts
          end
        end
      elseif kind_1 == 'F' or kind_1 == 'X' then
        local limit, window = a_1, b_1
        local start, window_end, count, clock_went_back = now, nil, 0, false
        if kind_1 == 'F' then
          local phase = c_1
          start = now - (now - phase) % window
        elseif kind_1 == 'K' then
          local first, second, third = b_1, c_1, unpack('<d_1', d_1)
          if not (now >= first and now < third) then
            return redis.error_reply(format('RLSTALE calendar boundaries do not cover %d_1', now))
          end
          if now < second then start, window_end = first, second else start, window_end = second, third end
        end
        if key_expires_at_1 then
          local stored_start = field1_1
          count = field2_1
          if stored_start > start then clock_went_back = true
          elseif kind_1 == 'X' and now < stored_start + window then start = stored_start
          elseif stored_start < start then count = 0 end
        end
        window_end = window_end or start + window

        local charged = count + cost_1
        if charged > limit and (op == 'C' or op == 'P') then
          status_1 = 1
          if clock_went_back and count > 0 then
            ttl_us_1, new_field1_1, new_field2_1, new_field3_1 = window_end - now, start, count, 0
          end
        else
          ttl_us_1 = false
          if charged > 0 then
            ttl_us_1 = window_end - now
            new_field1_1 = start
            new_field2_1 = charged
            new_field3_1 = 0
          end
        end
      elseif kind_1 == 'W' then
        local limit, window, unit = a_1, b_1, c_1
        local start, current, previous, clock_went_back = now - now % window, 0, 0, false
        if key_expires_at_1 then
          local stored_start = field1_1
          current, previous = field2_1, field3_1
          if stored_start > start then clock_went_back = true
          elseif stored_start == start - window then current, previous = 0, current
          elseif stored_start < start then current, previous = 0, 0 end
        end
        local elapsed, units = floor((now - start) / unit), window / unit
        free_reset_us = current > 0 and start + 2 * window - now or previous > 0 and start + window - now or 0

        local excess = (current + cost_1 - limit) * units + previous * (units - elapsed)
        if excess > 0 and (op == 'C' or op == 'P') then
          status_1 = 1
          if clock_went_back and free_reset_us > 0 then
            ttl_us_1, new_field1_1, new_field2_1, new_field3_1 = free_reset_us, start, current, previous
          end
        else
          current = current + cost_1
          reset_us = current > 0 and start + 2 * window - now or previous > 0 and start + window - now or 0
          ttl_us_1 = false
          if reset_us > 0 then
            ttl_us_1 = reset_us
            new_field1_1 = start
            new_field2_1 = current
            new_field3_1 = previous
          end
        end
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
      status_2 = 0
      if not kind_2 then
        -- The request has no such limit.
      elseif kind_2 == 'B' then
        local burst, refill, parts = a_2, b_2, c_2
        -- A token is divided into `parts` equal parts, so that all numbers are integers. `debt` is the number of parts that are
        -- missing from a full bucket. The refill repays the debt.
        local debt, clock_went_back, rate_lowered = 0, false, false
        if key_expires_at_2 then
          local updated_at, stored_parts = field1_2, field3_2
          debt = field2_2
          if stored_parts ~= parts then
            -- The rate of the limit has changed since the last write, and with it the number of parts of a token. Convert the
            -- debt from `stored_parts` to `parts` parts per token, rounded up. If a double cannot hold the product exactly,
            -- divide first. The rounding error is then less than one part, and the code adds one part, so that the converted
            -- debt is never too small.
            local rest = debt % stored_parts
            local product = rest * parts
            local converted = product < EXACT_INTEGER_LIMIT and ceil(product / stored_parts)
              or ceil(rest / stored_parts * parts) + 1
            debt = math.min((debt - rest) / stored_parts * parts + converted, MAX_STATE)
          end
          -- `repay_time` is an upper bound. At the rate that the limit had at the last write, the bucket repays the debt in
          -- this time or up to about half a second earlier.
          local elapsed, repay_time = now - updated_at, key_expires_at_2 - MIN_KEY_SLACK_US - updated_at
          local needed = debt / refill
          if elapsed < 0 then clock_went_back = true
          elseif needed > repay_time then
            -- The rate of the limit was lowered since the last write. The part of the debt that the old rate has repaid until
            -- the current time counts as repaid. The rest, debt * left / repay_time, is rounded up as in the conversion above.
            local left = repay_time - elapsed
            if left <= 0 then debt = 0
            else
              -- The factor 1.0 makes the product a double, because in Lua 5.4 a product of integers could overflow.
              local product = 1.0 * debt * left
              local scaled = product < EXACT_INTEGER_LIMIT and ceil(product / repay_time) or ceil(debt / repay_time * left) + 1
              debt, rate_lowered = math.min(scaled, debt - elapsed * refill), true
            end
          elseif elapsed >= needed then debt = 0
          else debt = debt - elapsed * refill end
        end
        local capacity = burst * parts

        local charge = cost_2 * parts
        local charged = debt + charge
        if charged > capacity and (op == 'C' or op == 'P') then
          status_2 = 1
          -- If the rate was lowered, write a state with the new rate, because retry_us was computed with this rate.
          if clock_went_back or rate_lowered then
            ttl_us_2, new_field1_2, new_field2_2, new_field3_2 = ceil(debt / refill), now, debt, parts
          end
        else
          ttl_us_2 = false
          if charged > 0 then
            ttl_us_2 = ceil(charged / refill)
            new_field1_2 = now
            new_field2_2 = charged
            new_field3_2 = parts
          end
        end
      elseif kind_2 == 'F' or kind_2 == 'X' then
        local limit, window = a_2, b_2
        local start, window_end, count, clock_went_back = now, nil, 0, false
        if kind_2 == 'F' then
          local phase = c_2
          start = now - (now - phase) % window
        elseif kind_2 == 'K' then
          local first, second, third = b_2, c_2, unpack('<d_2', d_2)
          if not (now >= first and now < third) then
            return redis.error_reply(format('RLSTALE calendar boundaries do not cover %d_2', now))
          end
          if now < second then start, window_end = first, second else start, window_end = second, third end
        end
        if key_expires_at_2 then
          local stored_start = field1_2
          count = field2_2
          if stored_start > start then clock_went_back = true
          elseif kind_2 == 'X' and now < stored_start + window then start = stored_start
          elseif stored_start < start then count = 0 end
        end
        window_end = window_end or start + window

        local charged = count + cost_2
        if charged > limit and (op == 'C' or op == 'P') then
          status_2 = 1
          if clock_went_back and count > 0 then
            ttl_us_2, new_field1_2, new_field2_2, new_field3_2 = window_end - now, start, count, 0
          end
        else
          ttl_us_2 = false
          if charged > 0 then
            ttl_us_2 = window_end - now
            new_field1_2 = start
            new_field2_2 = charged
            new_field3_2 = 0
          end
        end
      elseif kind_2 == 'W' then
        local limit, window, unit = a_2, b_2, c_2
        local start, current, previous, clock_went_back = now - now % window, 0, 0, false
        if key_expires_at_2 then
          local stored_start = field1_2
          current, previous = field2_2, field3_2
          if stored_start > start then clock_went_back = true
          elseif stored_start == start - window then current, previous = 0, current
          elseif stored_start < start then current, previous = 0, 0 end
        end
        local elapsed, units = floor((now - start) / unit), window / unit
        free_reset_us = current > 0 and start + 2 * window - now or previous > 0 and start + window - now or 0

        local excess = (current + cost_2 - limit) * units + previous * (units - elapsed)
        if excess > 0 and (op == 'C' or op == 'P') then
          status_2 = 1
          if clock_went_back and free_reset_us > 0 then
            ttl_us_2, new_field1_2, new_field2_2, new_field3_2 = free_reset_us, start, current, previous
          end
        else
          current = current + cost_2
          reset_us = current > 0 and start + 2 * window - now or previous > 0 and start + window - now or 0
          ttl_us_2 = false
          if reset_us > 0 then
            ttl_us_2 = reset_us
            new_field1_2 = start
            new_field2_2 = current
            new_field3_2 = previous
          end
        end
      else
        failure = redis.error_reply('RLARG unknown kind')
      end
      if ttl_us_2 then
        local slack_us = key_expires_at_2 and key_expires_at_2 - now - ttl_us_2 or 0
        kept_until_2 = key_expires_at_2
        if slack_us < MIN_KEY_SLACK_US or slack_us >= MAX_KEY_SLACK_US then
          kept_until_2 = now + (ceil(ttl_us_2 / 1000) + KEY_SLACK_MS) * 1000
        end
        if kept_until_2 > kept_until then kept_until = kept_until_2 end
      end
      if status_2 ~= 0 then admitted, any_repair = false, any_repair or ttl_us_2 end
    end
    -- Write the totals before the states. If Redis rejects the first write, the request has changed nothing.
    if usage_key_1 and admitted and cost_1 > 0 and not failure then
      local total = call('HINCRBY', usage_key_1, format('%d', day_1), format('%d', cost_1))
      if type(total) == 'table' then failure = total
      elseif total == cost_1 then call('PEXPIRE', usage_key_1, USAGE_TTL_MS) end
    end
    if usage_key_2 and admitted and cost_2 > 0 and not failure then
      local total = call('HINCRBY', usage_key_2, format('%d', day_2), format('%d', cost_2))
      if type(total) == 'table' then failure = total
      elseif total == cost_2 then call('PEXPIRE', usage_key_2, USAGE_TTL_MS) end
    end
    if failure then
      -- Do nothing: the code below adds the error to the reply.
    elseif admitted and (is_in_order or is_new)
      and (ttl_us_1 or not kind_1)
      and (ttl_us_2 or not kind_2)
      then
      if is_in_order and kept_until <= value_expires_at
        and (new_field3_1 == field3_1 or not kind_1)
        and (new_field3_2 == field3_2 or not kind_2)
        then
        result = call('SETRANGE', key, body_offset, pack(body_format
          , kept_until_1, new_field1_1, new_field2_1
          , kept_until_2, new_field1_2, new_field2_2
        ))
        failure = result ~= value_bytes and result
      else
        local ttl_ms = ttl_of(kept_until)
        local heads = pack(head_format, now + ttl_ms * 1000
          , id_1, new_field3_1
          , id_2, new_field3_2
        )
        local bodies = pack(body_format
          , kept_until_1, new_field1_1, new_field2_1
          , kept_until_2, new_field1_2, new_field2_2
        )
        result = call('SET', key, heads .. bodies, 'PX', format('%d', ttl_ms))
        failure = result.err and result
      end
    elseif admitted and is_in_place and not is_in_order then
      local extended_key, extended_until
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
      if kept_until_2 and not failure then
        if #value_2 == HEADER_BYTES + STATE_BYTES and new_field3_2 == field3_2 then
          result = call('SETRANGE', key_2, '24', pack('<ddd', kept_until_2, new_field1_2, new_field2_2))
          failure = result ~= #value_2 and result
        else failure = overwrite(key_2, value_2, index_2, kept_until_2, new_field1_2, new_field2_2, new_field3_2) end
        if kept_until_2 ~= key_expires_at_2 and kept_until_2 > unpack('<d', value_2)
          and not (extended_key == key_2 and extended_until >= kept_until_2) then
          extended_key, extended_until = key_2, extend(key_2, kept_until_2)
          failure = failure or type(extended_until) == 'table' and extended_until
        end
      end
    elseif admitted or any_repair then
      local changes, index_in_order = {}, 0
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
      if is_in_order then
        index_in_order = index_in_order + 1
        key_2, value_2, index_2 = key, value, index_in_order
      end
      if kept_until_2 and (admitted or status_2 ~= 0) then
        changes[#changes + 1] = {
          key = key_2, value = value_2, index = index_2, separate_key = separate_key_2, exists = key_expires_at_2,
          id = id_2, kept_until = kept_until_2, field1 = new_field1_2, field2 = new_field2_2, field3 = new_field3_2,
          stored_field3 = field3_2,
        }
      end
      failure = write_states(changes)
    end
    if failure then result = failure
    elseif is_in_order then result = value
    else
      local states_format = limits == 1 and '<dddd' or limits == 2 and '<dddddddd' or limits == 3 and '<dddddddddddd'
        or '<dddddddddddddddd'
      result = pack(states_format
        , key_expires_at_1 or 0, field1_1 or 0, field2_1 or 0, field3_1 or 0
        , key_expires_at_2 or 0, field1_2 or 0, field2_2 or 0, field3_2 or 0
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
