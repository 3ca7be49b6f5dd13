-- Where the drivers find and write the states of the kinds B, F, K, W and X. The composer inserts the lines after the
-- marker `body` into each driver.
--
-- All these states of an identity are in the value of one key, whose name ends with IDENTITY_SUFFIX. Three limits of
-- one identity then need one GET and one SETRANGE instead of three of each. All numbers of the value are little-endian
-- doubles:
--   1 number   The time at which the key expires, in microseconds.
--   5 numbers  For each state: its id, the time until which it is kept (`key_expires_at`), and its three fields.
-- The states are in no particular order. If a state is added to MAX_STATES states or more, those that are no longer kept
-- are dropped. The key expires when no state is kept any more, or up to 1 s or an eighth of its TTL later.
--
-- Earlier versions keep each state in a key of its own, whose name ends with the name of the state instead of
-- IDENTITY_SUFFIX. The value of such a key has OWN_STATE_BYTES: four 64-bit integers, which are the time until which the
-- state is kept, and its fields. A state is in the value of its identity or in a key of its own, never in both. The
-- scripts look for it in this order. With the layout `i`, they write it to the value of its identity, and delete its own
-- key. With the layout `o`, they write a state that is not in the value of its identity to its own key.
local call, args, now, ceil, floor, format = redis.call, ARGV[1], 0, math.ceil, math.floor, string.format
local pack, unpack = struct.pack, struct.unpack
--@body
local HEADER_BYTES, STATE_BYTES, byte_range = 8, 40, string.sub
local offset_of, read_state, ttl_of, extend, write_states
--@own_keys
local own_key_of, write_own_state
--@end own_keys
-- The block hides names, because a function of Lua 5.1 has at most 200 local variables.
do
  local MAX_STATES, OWN_STATE_BYTES, IDENTITY_SUFFIX, concat = 16, 32, 'states', table.concat
  local state_names, offsets = nil, {}

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

  -- Return the name of the own key of a state. `number` is the number of the limit, counted over all groups.
  local function name_key(key, number)
    if not state_names then
      state_names = {}
      for name in string.gmatch(ARGV[2], '[^\n]+') do state_names[#state_names + 1] = name end
    end
    return byte_range(key, 1, -1 - #IDENTITY_SUFFIX) .. state_names[number]
  end

  -- Read a state. `value` is the value of its identity, or false, and `number` the number of the limit, counted over all
  -- groups. Return the position of the state in the value, or nil, its own key if it has one, the time until which it is
  -- kept, and its fields. If the state cannot be read, return an error reply.
  function read_state(key, value, id, number)
    if value then
      if value.err then return value end
      if #value % STATE_BYTES ~= HEADER_BYTES then
        return redis.error_reply('WRONGTYPE the key does not hold the states of an identity')
      end
      for position = HEADER_BYTES + 1, #value, STATE_BYTES do
        local other, kept_until, field1, field2, field3 = unpack('<ddddd', value, position)
        if other == id then return position, nil, kept_until, field1, field2, field3 end
      end
    end
    local own_key = name_key(key, number)
    local state = call('GET', own_key)
    if not state then return end
    if #state == OWN_STATE_BYTES then return nil, own_key, unpack('<i8i8i8i8', state) end
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

  -- Write the value of an identity with changed states. `value` is the value before, or false. `changes` is a list of
  -- tables with the fields `id`, `kept_until` and `state` (the numbers of the state). A state without `kept_until` is
  -- removed. Return the reply of Redis.
  local function rewrite(key, value, changes)
    value = value or ''
    local by_id, states, kept_until = {}, {}, 0
    local is_full = #value >= HEADER_BYTES + MAX_STATES * STATE_BYTES
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
      elseif not is_full or time > now then add(byte_range(value, position, position + STATE_BYTES - 1), time) end
    end
    for i = 1, #changes do
      local change = changes[i]
      if by_id[change.id] and change.kept_until then add(change.state, change.kept_until) end
    end
    if #states == 0 then return call('DEL', key) end
    local ttl_ms = ttl_of(kept_until)
    return call('SET', key, pack('<d', now + ttl_ms * 1000) .. concat(states), 'PX', format('%d', ttl_ms))
  end

  --@own_keys
  own_key_of = name_key

  -- Write a state into its own key. `known_key` is this key if it exists. Keep its TTL if the state is kept as long as
  -- before. `fields` is false if the state is removed.
  function write_own_state(key, known_key, kept_until, fields)
    if not fields then
      if known_key then call('DEL', key) end
    else
      local state = pack('<i8i8i8i8', kept_until, fields[1], fields[2], fields[3])
      return call('SET', key, state, 'PX', format('%d', ceil((kept_until - now) / 1000)))
    end
  end
  --@end own_keys

  -- Write changed states, each of which has the additional fields `key`, `value`, `position` and `own_key` (see
  -- `read_state`). Return an error reply, or nothing.
  function write_states(changes)
    local written = {}
    for i = 1, #changes do
      local key, value = changes[i].key, changes[i].value
      if not written[key] then
        written[key] = true
        local in_place, kept_until, of_key, result = true, 0, {}, nil
        for j = i, #changes do
          local change = changes[j]
          if change.key == key then
            of_key[#of_key + 1] = change
            if not (change.position and change.kept_until) then in_place = false
            elseif change.kept_until > kept_until then kept_until = change.kept_until end
          end
        end
        if not in_place then result = rewrite(key, value, of_key) end
        for j = 1, #of_key do
          local change = of_key[j]
          if in_place then result = call('SETRANGE', key, offset_of(change.position), byte_range(change.state, 9)) end
          if type(result) == 'table' and result.err then return result end
          if change.own_key then call('DEL', change.own_key) end
        end
        if in_place and kept_until > unpack('<d', value) then
          result = extend(key, kept_until)
          if type(result) == 'table' then return result end
        end
      end
    end
  end
end
