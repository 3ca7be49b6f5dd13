-- Composed from lua/single.lua and all algorithms that it supports, with usage. Do not edit:
-- UPDATE_GENERATED=1 cargo test --test it scripts::

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
-- USAGE_BYTES is the number of bytes in ARGV[2] for each limit. USAGE_TTL_MS (400 days) is the TTL of a hash of usage
-- totals. The first charge of each day renews the TTL.
local USAGE_BYTES, USAGE_TTL_MS = 24, '34560000000'
local usage_args, usage_key_count = ARGV[3], 0
argument_count = 3
if #ARGV ~= argument_count or #args < CALL_BYTES or (#args - CALL_BYTES) % GROUP_BYTES ~= 0 then
  return redis.error_reply('RLARG wrong number of arguments')
end
-- Validate all groups of arguments before the script performs the first check. If there is only one group, its values
-- stay in the variables, and the second loop does not unpack them again.
local now, layout, position = unpack('<dc1', args)
local groups, key_count = (#args - CALL_BYTES) / GROUP_BYTES, 0
local requests, operation, _, limits, kind, flag, place, id, requested, a, b, c, d
local day, day_start, day_end
if #usage_args ~= USAGE_BYTES * groups then
  return redis.error_reply('RLARG wrong number of arguments')
end
for group = 1, groups do
  requests, operation, _, limits, kind, flag, place, id, requested, a, b, c, d, position =
    unpack('<dc1ddc1c1c1dddddc8', args, position)
  if layout ~= 'i' or operation ~= 'C' and (operation ~= 'T' or not (requested >= 1)) or limits ~= 1 or flag ~= '-'
    or place ~= 'f'
    or kind ~= 'B' and kind ~= 'F' and kind ~= 'X' and kind ~= 'W' or not (requests >= 1 and requests % 1 == 0) then
    return redis.error_reply('RLARG only checks with one limit each are supported')
  end
  key_count = key_count + requests
  day, day_start, day_end = unpack('<ddd', usage_args, USAGE_BYTES * (group - 1) + 1)
  if not (day >= 0 and day <= 31 and day % 1 == 0) then
    return redis.error_reply('RLARG unknown day')
  end
  if day > 0 then usage_key_count = usage_key_count + requests end
end
local usage_index = key_count
key_count = key_count + usage_key_count
if key_count == 0 or key_count ~= #keys then
  return redis.error_reply('RLARG wrong number of keys')
end
if now == 0 then
  local time = call('TIME')
  now = time[1] * 1000000 + time[2]
end

local replies, reply_count, key_offset = {pack('<dc1', now, 's')}, 1, 0
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
for group = 1, groups do
  if groups > 1 then
    requests, operation, _, _, kind, _, _, id, requested, a, b, c, d, position =
      unpack('<dc1ddc1c1c1dddddc8', args, position)
    day, day_start, day_end = unpack('<ddd', usage_args, USAGE_BYTES * (group - 1) + 1)
  end
  local is_other_day, field = day > 0 and not (now >= day_start and now < day_end), format('%d', day)
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
    if is_other_day and not failure then
      failure = redis.error_reply(format('RLSTALE the day of the usage is not that of %d', now))
    end
    -- The operation T runs the algorithm twice: the first run returns how many tokens remain, and the second run
    -- charges them.
    if operation == 'T' then op, cost = 'P', 0 end
    repeat
      local is_last_pass = op == 'C'
      if failure then
        -- Do nothing: the code at the end of the loop adds the error to the reply.
      elseif kind == 'B' then
        local burst, refill, parts = a, b, c
        -- A token is divided into `parts` equal parts, so that all numbers are integers. `debt` is the number of parts that are
        -- missing from a full bucket. The refill repays the debt.
        local debt, clock_went_back, rate_lowered = 0, false, false
        if key_expires_at then
          local updated_at, stored_parts = field1, field3
          debt = field2
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
          local elapsed, repay_time = now - updated_at, key_expires_at - MIN_KEY_SLACK_US - updated_at
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
        if op == 'P' then free = floor((capacity - debt) / parts) end

        local charge = cost * parts
        local charged = debt + charge
        if charged > capacity and (op == 'C' or op == 'P') then
          status = 1
          -- If the rate was lowered, write a state with the new rate, because retry_us was computed with this rate.
          if clock_went_back or rate_lowered then
            ttl_us, new_field1, new_field2, new_field3 = ceil(debt / refill), now, debt, parts
          end
        else
          ttl_us = false
          if charged > 0 then
            ttl_us = ceil(charged / refill)
            new_field1 = now
            new_field2 = charged
            new_field3 = parts
          end
        end
      elseif kind == 'F' or kind == 'X' then
        local limit, window = a, b
        local start, window_end, count, clock_went_back = now, nil, 0, false
        if kind == 'F' then
          local phase = c
          start = now - (now - phase) % window
        elseif kind == 'K' then
          local first, second, third = b, c, unpack('<d', d)
          if not (now >= first and now < third) then
            return redis.error_reply(format('RLSTALE calendar boundaries do not cover %d', now))
          end
          if now < second then start, window_end = first, second else start, window_end = second, third end
        end
        if key_expires_at then
          local stored_start = field1
          count = field2
          if stored_start > start then clock_went_back = true
          elseif kind == 'X' and now < stored_start + window then start = stored_start
          elseif stored_start < start then count = 0 end
        end
        window_end = window_end or start + window
        free = limit - count

        local charged = count + cost
        if charged > limit and (op == 'C' or op == 'P') then
          status = 1
          if clock_went_back and count > 0 then
            ttl_us, new_field1, new_field2, new_field3 = window_end - now, start, count, 0
          end
        else
          ttl_us = false
          if charged > 0 then
            ttl_us = window_end - now
            new_field1 = start
            new_field2 = charged
            new_field3 = 0
          end
        end
      elseif kind == 'W' then
        local limit, window, unit = a, b, c
        local start, current, previous, clock_went_back = now - now % window, 0, 0, false
        if key_expires_at then
          local stored_start = field1
          current, previous = field2, field3
          if stored_start > start then clock_went_back = true
          elseif stored_start == start - window then current, previous = 0, current
          elseif stored_start < start then current, previous = 0, 0 end
        end
        local elapsed, units = floor((now - start) / unit), window / unit
        if op == 'P' then free = limit - current + floor(-previous * (units - elapsed) / units) end
        free_reset_us = current > 0 and start + 2 * window - now or previous > 0 and start + window - now or 0

        local excess = (current + cost - limit) * units + previous * (units - elapsed)
        if excess > 0 and (op == 'C' or op == 'P') then
          status = 1
          if clock_went_back and free_reset_us > 0 then
            ttl_us, new_field1, new_field2, new_field3 = free_reset_us, start, current, previous
          end
        else
          current = current + cost
          reset_us = current > 0 and start + 2 * window - now or previous > 0 and start + window - now or 0
          ttl_us = false
          if reset_us > 0 then
            ttl_us = reset_us
            new_field1 = start
            new_field2 = current
            new_field3 = previous
          end
        end
      else
        failure = redis.error_reply('RLARG unknown kind')
      end
      if not is_last_pass then
        -- If no token remains, the second run requests one token, which the algorithm denies.
        op, cost, ttl_us = 'C', free < requested and free or requested, nil
        if cost < 1 then cost = 1 end
      end
    until is_last_pass
    if day > 0 then
      usage_index = usage_index + 1
      -- Write the total before the state. If Redis rejects this write, the request has changed nothing.
      if status == 0 and cost > 0 and not failure then
        local total = call('HINCRBY', keys[usage_index], field, format('%d', cost))
        if type(total) == 'table' then failure, ttl_us = total, nil
        elseif total == cost then call('PEXPIRE', keys[usage_index], USAGE_TTL_MS) end
      end
    end
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
