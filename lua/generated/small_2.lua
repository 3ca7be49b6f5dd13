-- Composed from lua/small.lua and all algorithms that it supports. Do not edit:
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
if #ARGV ~= argument_count or #args < CALL_BYTES then
  return redis.error_reply('RLARG wrong number of arguments')
end
-- Validate all groups of arguments before the script performs the first check. If there is only one group, its values
-- stay in the variables, and the second loop does not unpack them again.
local now, layout, position = unpack('<dc1', args)
local groups, key_count = 0, 0
local requests, operation, _, limits, unread_limits, keys_per_request, flag
local kind_1, place_1, id_1, cost_1, a_1, b_1, c_1, d_1
local kind_2, place_2, id_2, cost_2, a_2, b_2, c_2, d_2
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
  kind_1 = nil
  if unread_limits > 0 then
    kind_1, flag, place_1, id_1, cost_1, a_1, b_1, c_1, d_1, position = unpack('<c1c1c1dddddc8', args, position)
    if place_1 == 'f' then keys_per_request = keys_per_request + 1 end
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
local HEADER_BYTES, STATE_BYTES, byte_range = 8, 40, string.sub
local offset_of, read_state, ttl_of, extend, write_states
-- The block hides names, because a function of Lua 5.1 has at most 200 local variables.
do
  local MAX_STATES, SEPARATE_BYTES, IDENTITY_SUFFIX, concat, find = 16, 32, 'states', table.concat, string.find
  local state_names, offsets, full_bytes = nil, {}, HEADER_BYTES + MAX_STATES * STATE_BYTES

  -- Return the offset of the numbers of a state after its id, for SETRANGE. Formatting a number takes as long as forty
  -- assignments, so the texts are kept.
  function offset_of(position)
    local offset = offsets[position]
    if not offset then
      offset = format('%d', position + 7)
      offsets[position] = offset
    end
    return offset
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
  -- groups. Return the position of the state in the value, or nil, its separate key if it is not in the value, the time
  -- until which it is kept if it exists, and its fields. If the state cannot be read, return an error reply.
  function read_state(key, value, id, number)
    if value then
      if value.err then return value end
      if #value % STATE_BYTES ~= HEADER_BYTES then
        return redis.error_reply('WRONGTYPE the key does not hold the states of an identity')
      end
      local packed_id, at = pack('<d', id), HEADER_BYTES
      repeat at = find(value, packed_id, at + 1, true) until not at or at % STATE_BYTES == HEADER_BYTES + 1
      if at then return at, nil, unpack('<dddd', value, at + 8) end
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

  -- Return whether a state can be added to a value. The value then has few states, or states that are no longer kept. Do
  -- not look for those if the state has a separate key already.
  local function has_room(value, has_separate_key)
    if not value or #value < full_bytes then return true end
    if has_separate_key then return false end
    for position = HEADER_BYTES + 1, #value, STATE_BYTES do
      local _, kept_until = unpack('<dd', value, position)
      if kept_until <= now then return true end
    end
    return false
  end

  -- Write the value of an identity with changed states (see `write_states`). If the value is full, drop states that are no
  -- longer kept. Return the reply of Redis.
  local function rewrite(key, value, changes)
    value = value or ''
    local by_id, states, kept_until = {}, {}, 0
    for i = 1, #changes do by_id[changes[i].id] = changes[i] end
    local function add(state, time)
      states[#states + 1] = state
      if time > kept_until then kept_until = time end
    end
    for position = HEADER_BYTES + 1, #value, STATE_BYTES do
      local id, time = unpack('<dd', value, position)
      local change = by_id[id]
      if change then
        by_id[id] = nil
        if change.kept_until then add(change.state, change.kept_until) end
      elseif #value < full_bytes or time > now then
        add(byte_range(value, position, position + STATE_BYTES - 1), time)
      end
    end
    for i = 1, #changes do
      local change = changes[i]
      if by_id[change.id] and change.kept_until then add(change.state, change.kept_until) end
    end
    if #states == 0 then return call('DEL', key) end
    local ttl_ms = ttl_of(kept_until)
    return call('SET', key, pack('<d', now + ttl_ms * 1000) .. concat(states), 'PX', format('%d', ttl_ms))
  end

  -- Write a changed state to its separate key, or delete the key. Return the reply of Redis.
  local function write_separately(change)
    if not change.kept_until then return call('DEL', change.separate_key) end
    local _, kept_until, field1, field2, field3 = unpack('<ddddd', change.state)
    local ttl_ms = ceil((kept_until - now) / 1000)
    return call('SET', change.separate_key, pack('<i8i8i8i8', kept_until, field1, field2, field3), 'PX',
      format('%d', ttl_ms))
  end

  -- Write changed states. `changes` is a list of tables with the fields `key`, `value` (the value of the key, or false),
  -- `position` (the position of the state in the value, or nil), `separate_key` (if the state is not in the value),
  -- `exists` (whether the separate key exists), `id`, `kept_until` and `state` (the numbers of the state). A state without
  -- `kept_until` is removed. Return an error reply, or nothing.
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
            if not change.position
              and not (change.kept_until and layout == 'i' and has_room(value, change.exists)) then
              result = write_separately(change)
              if type(result) == 'table' and result.err then return result end
            else
              of_value[#of_value + 1] = change
              if not (change.position and change.kept_until) then in_place = false
              elseif change.kept_until > kept_until then kept_until = change.kept_until end
            end
          end
        end
        if not in_place then result = rewrite(key, value, of_value) end
        for j = 1, #of_value do
          local change = of_value[j]
          if in_place then result = call('SETRANGE', key, offset_of(change.position), byte_range(change.state, 9)) end
          if type(result) == 'table' and result.err then return result end
          if change.separate_key and change.exists then call('DEL', change.separate_key) end
        end
        if in_place and value and kept_until > unpack('<d', value) then
          result = extend(key, kept_until)
          if type(result) == 'table' then return result end
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
      unread_limits = unread_limits - 1
    end
    kind_2 = nil
    if unread_limits > 0 then
      kind_2, flag, place_2, id_2, cost_2, a_2, b_2, c_2, d_2, position = unpack('<c1c1c1dddddc8', args, position)
      if place_2 == 'f' then keys_per_request = keys_per_request + 1 end
      unread_limits = unread_limits - 1
    end
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
    local key_1, value_1, value_expires_at_1, position_1, separate_key_1
    local status_1, ttl_us_1, new_field1_1, new_field2_1, new_field3_1
    local key_expires_at_1, field1_1, field2_1, field3_1, kept_until_1
    local key_2, value_2, value_expires_at_2, position_2, separate_key_2
    local status_2, ttl_us_2, new_field1_2, new_field2_2, new_field3_2
    local key_expires_at_2, field1_2, field2_2, field3_2, kept_until_2
    if value and #value == value_bytes then
      value_expires_at
        , position_1, key_expires_at_1, field1_1, field2_1, field3_1
        , position_2, key_expires_at_2, field1_2, field2_2, field3_2
        = unpack(value_format, value)
      -- For now, `position_1` is the id of the state.
      is_in_order = true
        and (not kind_1 or position_1 == id_1)
        and (not kind_2 or position_2 == id_2)
    end
    if not is_in_order then
      -- `expected`: the position in the value of the next state of these limits, if the value has them in their order.
      local number, expected, other_id = limit_offset, nil, nil
      is_new = keys_per_request == 1
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
      if kind_2 and not failure then
        number, other_id = number + 1, nil
        if place_2 == 'f' then
          if number > limit_offset + 1 then
            key_index = key_index + 1
            key = keys[key_index]
            value = call('GET', key)
          end
          expected, value_expires_at = nil, 0
          if value and (#value == HEADER_BYTES + STATE_BYTES or #value % STATE_BYTES == HEADER_BYTES and #value > HEADER_BYTES) then
            expected = HEADER_BYTES + 1
            value_expires_at, other_id, key_expires_at_2, field1_2, field2_2, field3_2 = unpack('<dddddd', value)
          end
        elseif expected and expected < #value then
          other_id, key_expires_at_2, field1_2, field2_2, field3_2 = unpack('<ddddd', value, expected)
        end
        if other_id == id_2 then position_2, expected = expected, expected + STATE_BYTES
        else
          position_2, separate_key_2, key_expires_at_2, field1_2, field2_2, field3_2 = read_state(key, value, id_2, number)
          if type(position_2) == 'table' then failure = position_2 end
        end
        key_2, value_2, value_expires_at_2 = key, value, value_expires_at
        if not position_2 then is_in_place = false end
        is_new = is_new and not value and not key_expires_at_2
      end
    end
    if kind_1 then
      local reset_us, free_reset_us
      status_1 = 0
      if failure then
        -- Do nothing: the code at the end of the loop adds the error to the reply.
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

        -- Limit the charge to MAX_STATE: a cost that is charged after the response has no upper bound.
        local charge = cost_1 > MAX_STATE / parts and MAX_STATE or cost_1 * parts
        local charged = debt + charge
        if op == 'R' then
          -- The tokens that refilled since the charge first repaid the debt that existed before the charge. The other refilled
          -- tokens have already repaid a part of the charge itself, and are subtracted from the refund.
          local repaid_us, credit = now - charged_at - unpack('<d_1', d_1), charge
          if repaid_us >= credit / refill then credit = 0
          elseif repaid_us > 0 then credit = credit - repaid_us * refill end
          charged = debt > credit and debt - credit or 0
        end
        if charged > capacity and (op == 'C' or op == 'P') then
          status_1 = 1
          -- If the rate was lowered, write a state with the new rate, because retry_us was computed with this rate.
          if clock_went_back or rate_lowered then
            ttl_us_1, new_field1_1, new_field2_1, new_field3_1 = ceil(debt / refill), now, debt, parts
          end
        else
          if charged > MAX_STATE then charged = MAX_STATE end
          ttl_us_1 = false
          if charged > 0 then ttl_us_1, new_field1_1, new_field2_1, new_field3_1 = ceil(charged / refill), now, charged, parts end
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
        if op == 'R' then
          -- Refund the charge only if it was made in the current window. The count contains no charges of other windows.
          charged = charged_at >= start and charged_at < window_end and count - cost_1 or count
          if charged < 0 then charged = 0 end
        end
        if charged > limit and (op == 'C' or op == 'P') then
          status_1 = 1
          if clock_went_back and count > 0 then
            ttl_us_1, new_field1_1, new_field2_1, new_field3_1 = window_end - now, start, count, 0
          end
        else
          if charged > MAX_STATE then charged = MAX_STATE end
          ttl_us_1 = false
          if charged > 0 then ttl_us_1, new_field1_1, new_field2_1, new_field3_1 = window_end - now, start, charged, 0 end
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
          if op ~= 'R' then current = math.min(current + cost_1, floor(MAX_STATE / 2 / units))
          elseif charged_at >= start then current = current > cost_1 and current - cost_1 or 0
          elseif charged_at >= start - window then previous = previous > cost_1 and previous - cost_1 or 0 end
          reset_us = current > 0 and start + 2 * window - now or previous > 0 and start + window - now or 0
          ttl_us_1 = false
          if reset_us > 0 then ttl_us_1, new_field1_1, new_field2_1, new_field3_1 = reset_us, start, current, previous end
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
      else all_change = false end
      if status_1 ~= 0 then admitted, any_repair = false, any_repair or ttl_us_1 end
    end
    if kind_2 then
      local reset_us, free_reset_us
      status_2 = 0
      if failure then
        -- Do nothing: the code at the end of the loop adds the error to the reply.
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

        -- Limit the charge to MAX_STATE: a cost that is charged after the response has no upper bound.
        local charge = cost_2 > MAX_STATE / parts and MAX_STATE or cost_2 * parts
        local charged = debt + charge
        if op == 'R' then
          -- The tokens that refilled since the charge first repaid the debt that existed before the charge. The other refilled
          -- tokens have already repaid a part of the charge itself, and are subtracted from the refund.
          local repaid_us, credit = now - charged_at - unpack('<d_2', d_2), charge
          if repaid_us >= credit / refill then credit = 0
          elseif repaid_us > 0 then credit = credit - repaid_us * refill end
          charged = debt > credit and debt - credit or 0
        end
        if charged > capacity and (op == 'C' or op == 'P') then
          status_2 = 1
          -- If the rate was lowered, write a state with the new rate, because retry_us was computed with this rate.
          if clock_went_back or rate_lowered then
            ttl_us_2, new_field1_2, new_field2_2, new_field3_2 = ceil(debt / refill), now, debt, parts
          end
        else
          if charged > MAX_STATE then charged = MAX_STATE end
          ttl_us_2 = false
          if charged > 0 then ttl_us_2, new_field1_2, new_field2_2, new_field3_2 = ceil(charged / refill), now, charged, parts end
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
        if op == 'R' then
          -- Refund the charge only if it was made in the current window. The count contains no charges of other windows.
          charged = charged_at >= start and charged_at < window_end and count - cost_2 or count
          if charged < 0 then charged = 0 end
        end
        if charged > limit and (op == 'C' or op == 'P') then
          status_2 = 1
          if clock_went_back and count > 0 then
            ttl_us_2, new_field1_2, new_field2_2, new_field3_2 = window_end - now, start, count, 0
          end
        else
          if charged > MAX_STATE then charged = MAX_STATE end
          ttl_us_2 = false
          if charged > 0 then ttl_us_2, new_field1_2, new_field2_2, new_field3_2 = window_end - now, start, charged, 0 end
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
          if op ~= 'R' then current = math.min(current + cost_2, floor(MAX_STATE / 2 / units))
          elseif charged_at >= start then current = current > cost_2 and current - cost_2 or 0
          elseif charged_at >= start - window then previous = previous > cost_2 and previous - cost_2 or 0 end
          reset_us = current > 0 and start + 2 * window - now or previous > 0 and start + window - now or 0
          ttl_us_2 = false
          if reset_us > 0 then ttl_us_2, new_field1_2, new_field2_2, new_field3_2 = reset_us, start, current, previous end
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
      else all_change = false end
      if status_2 ~= 0 then admitted, any_repair = false, any_repair or ttl_us_2 end
    end
    if failure then
      -- Do nothing: the code below adds the error to the reply.
    elseif (is_in_order or is_new) and all_change and admitted then
      local is_extended, ttl_ms = kept_until > value_expires_at, nil
      if is_extended then
        ttl_ms = ttl_of(kept_until)
        value_expires_at = now + ttl_ms * 1000
      end
      local new_value = pack(value_format, value_expires_at
        , id_1, kept_until_1, new_field1_1, new_field2_1, new_field3_1
        , id_2, kept_until_2, new_field1_2, new_field2_2, new_field3_2
      )
      if is_extended then result = call('SET', key, new_value, 'PX', format('%d', ttl_ms))
      else result = call('SETRANGE', key, '0', new_value) end
      failure = type(result) == 'table' and result.err and result or nil
    elseif admitted and is_in_place and not is_in_order then
      local extended_key, extended_until
      if kept_until_1 and not failure then
        result = call('SETRANGE', key_1, position_1 == 9 and '16' or offset_of(position_1),
          pack('<dddd', kept_until_1, new_field1_1, new_field2_1, new_field3_1))
        failure = result ~= #value_1 and result
        if kept_until_1 > value_expires_at_1 and not (extended_key == key_1 and extended_until >= kept_until_1) then
          extended_key, extended_until = key_1, extend(key_1, kept_until_1)
          failure = failure or type(extended_until) == 'table' and extended_until
        end
      end
      if kept_until_2 and not failure then
        result = call('SETRANGE', key_2, position_2 == 9 and '16' or offset_of(position_2),
          pack('<dddd', kept_until_2, new_field1_2, new_field2_2, new_field3_2))
        failure = result ~= #value_2 and result
        if kept_until_2 > value_expires_at_2 and not (extended_key == key_2 and extended_until >= kept_until_2) then
          extended_key, extended_until = key_2, extend(key_2, kept_until_2)
          failure = failure or type(extended_until) == 'table' and extended_until
        end
      end
    elseif admitted or any_repair then
      local changes, position_in_order = {}, HEADER_BYTES + 1
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
      if is_in_order then
        key_2, value_2, position_2 = key, value, position_in_order
        position_in_order = position_in_order + STATE_BYTES
      end
      if kept_until_2 and (admitted or status_2 ~= 0) then
        changes[#changes + 1] = {
          key = key_2, value = value_2, position = position_2, separate_key = separate_key_2, exists = key_expires_at_2,
          id = id_2, kept_until = kept_until_2,
          state = pack('<ddddd', id_2, kept_until_2, new_field1_2, new_field2_2, new_field3_2),
        }
      end
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
      if kind_1 then
        reply_count = reply_count + 1
        replies[reply_count + 1] = position_1 and byte_range(value_1, position_1 + 8, position_1 + 39)
          or key_expires_at_1 and pack('<dddd', key_expires_at_1, field1_1, field2_1, field3_1) or no_state
      end
      if kind_2 then
        reply_count = reply_count + 1
        replies[reply_count + 1] = position_2 and byte_range(value_2, position_2 + 8, position_2 + 39)
          or key_expires_at_2 and pack('<dddd', key_expires_at_2, field1_2, field2_2, field3_2) or no_state
      end
    end
    reply_count = reply_count + 1
  end
  limit_offset = limit_offset + limits
end
replies = table.concat(replies)
if failures then table.insert(failures, 1, replies) end
return failures or replies
