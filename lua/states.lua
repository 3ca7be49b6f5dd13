-- Where the drivers find and write the states of the kinds B, F, K, W and X. The composer inserts the lines after the
-- marker `body` into each driver.
--
-- All these states of an identity are in the value of one key, whose name ends with IDENTITY_SUFFIX. Three limits of
-- one identity then need one GET and one SETRANGE instead of three of each. All numbers of the value are little-endian
-- doubles. A value with N states has three parts:
--   1 number    The time at which the key expires, in microseconds.
--   2N numbers  The heads: for each state its id and its third field. Most charges do not change these numbers.
--   3N numbers  The bodies: for each state, in the same order, the time until which it is kept (`key_expires_at`), and its
--               first and second field.
-- The key expires when no state is kept any more, or up to 1 s or an eighth of its TTL later.
--
-- A state has a separate key instead if the value already has MAX_STATES states that are still kept. Otherwise, limits
-- that have the same identity, such as `global`, could make the value long, and all of their checks slow. The name of a
-- separate key ends with the name of the state instead of IDENTITY_SUFFIX. Its value has SEPARATE_BYTES: four 64-bit
-- integers, which are the time until which the state is kept, and its fields. Earlier versions read only separate keys.
-- With the layout `o`, the scripts therefore write a state that is not in the value of its identity to its separate
-- key. With the layout `i`, they move it to the value if there is room. A state is never in both places. The scripts
-- look for it in the value first.
local call, layout, now, ceil, floor, format = redis.call, 'i', 0, math.ceil, math.floor, string.format
local pack, unpack = struct.pack, struct.unpack
--@body
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
