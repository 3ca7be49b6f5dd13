-- Composed from lua/generic.lua and all algorithms that it supports. Do not edit:
-- UPDATE_GENERATED=1 cargo test --test it scripts::

-- The driver (script without algorithms) for all requests: any operation, and any number and kind of limits. The driver
-- charges all limits of a request or none.
-- This header describes the arguments and replies of all drivers, and the variables of all algorithms.
--
-- KEYS     The keys of the states: for each request, one for each limit with a place other than `s`. In Redis Cluster, all
--          keys are in the same slot. The scripts also use keys that states.lua derives from these keys.
-- ARGV[1]  A binary string with values in the formats of struct.pack: `d` is a little-endian double of 8 bytes, `c1` is
--          one letter, and `c8` is 8 bytes. All times are in microseconds.
--          `d`   Current time, or 0 to use the clock of Redis.
--          `c1`  Layout: `i` or `o` (see states.lua).
--          The groups follow, in the order of their keys. A group is a list of requests that differ only in their keys.
--          For each group:
--          `d`   Number of requests.
--          `c1`  Operation, one of these letters:
--                `C`  Check and charge.
--                `P`  Peek: check without a charge.
--                `A`  Charge unconditionally.
--                `R`  Refund a charge.
--                `T`  Take up to the cost: charge as many tokens as remain, but at most the cost.
--                `N`  Renew a concurrency permit, or add it if it is missing.
--          `d`   For the operation R, the time of the refunded charge. Otherwise 0.
--          `d`   Number of limits of each request.
--          For each limit of the group:
--          `c1`  Kind of the limit: B, C, F, K, L, S, W or X (see the algorithm files).
--          `c1`  Flag, one of these characters:
--                `-`  No flag.
--                `s`  Shadow: the limit never denies a request.
--                `p`  Deferred: the cost is charged after the response.
--                `b`  Both shadow and deferred.
--          `c1`  Place of the state, one of these letters. States with three fields are in the value of an identity.
--                `f`  The key is that of an identity which no limit before has.
--                `s`  The limit has no key: its identity is that of the limit before.
--                `a`  The key is that of an identity which a limit before has, but not the one directly before.
--                `o`  The key is that of a state without three fields.
--          `d`   Id of the state in the value of its identity.
--          `d`   Cost.
--          `d`, `d`, `d`, `c8`  Parameters a, b, c and d of the kind (see the algorithm files).
-- ARGV[2]  The name of the state of each limit of each group, each followed by a line feed.
-- ARGV[3]  Only in scripts that count usage: a binary string with three values for each limit of each group.
--          `d`   Day of the month, or 0 if the usage of the limit is not counted.
--          `d`   Start of the day.
--          `d`   End of the day.
--          In KEYS, the keys of usage totals follow the keys of all states. Each request has one such key for each of
--          its limits whose usage is counted. The key is in the same slot as the state of the limit. The value of the
--          key is a hash for one month. The fields of the hash are the days of the month. The value of a field is the
--          cost charged on this day, less refunds.
--          If the current time is not between the start and the end of the day, the request fails with RLSTALE and
--          writes nothing.
-- Reply    An array. Its first element is a binary string with the current time (`d`) and a letter. Then each request has an
--          element: a binary string, or its error. The error is RLARG, RLSTALE (also in fixed_window.lua) or an error of
--          Redis.
--          With the letter `o`, the string has five values (`d`) for each limit of the request: granted, status,
--          remaining, reset_us and retry_us.
--          Granted is 0 if the request is denied, and 1 if it is admitted. For the operation T, it is the number of
--          tokens that were taken.
--          Status has one of these values:
--          `0`  The charge fits.
--          `1`  The limit is exceeded. The charge fits after exactly retry_us.
--          `2`  The cost exceeds the limit, so the charge can never fit. Retry_us is -1.
--          `3`  No permit is free. Enough permits expire after retry_us, but requests may release them earlier.
--          If the request is denied, remaining and reset_us are the values without the charge of the request.
--          The drivers of single.lua and small.lua reply with the letter `s`. The string has the states before the
--          request, from which the gateway computes the outcomes with the same algorithms in Rust. It is the value of
--          the identity if that consists of the states of the limits in their order. Otherwise, it has four numbers
--          (`d`) for each limit: the time until which the state is kept, and its fields. They are 0 if there is no
--          state. If the request is denied, the number 0 precedes its string.
-- Errors   If the arguments of the call are invalid, the reply is the error RLARG, and the script has written nothing.
-- The blocks between the markers `usage` and `end usage` are only in scripts that count usage totals. In the algorithms,
-- the blocks `generic` are only in scripts with this driver, and the blocks `free` only in scripts with single.lua.
-- If arguments and replies were text, a call would need 10 % more CPU time in Redis. The gateway would need 3,000 more
-- instructions per limit to parse the reply.
--
-- Each algorithm is a branch of one `if` statement. A function for each algorithm would be slower, because a function
-- call takes more time than the algorithm itself. Variables of an algorithm:
-- Input    `key, kind, cost, a, b, c, d, now, charged_at`  Arguments of the request.
--          `op`  C, P, A, R or N. For T, the driver runs the algorithm with P and then with C.
--          `key_expires_at, field1, field2, field3`  The state, or nil if the key does not exist.
--          `memo`  A table for parsed states by key, or nil. For T, the second run reads what the first run has stored.
-- Output   `status, remaining, reset_us, retry_us`  The result. If the status is 0, remaining and reset_us are the
--          values after the charge. Otherwise they are the values without the charge.
--          `free, free_reset_us`  Remaining and reset_us without the charge. With single.lua, free is set if op is P.
--          `ttl_us`  Time after which the new state has no effect and can be deleted. The value false means that the
--          new state is empty, and nil means that the state does not change.
--          `new_field1, new_field2, new_field3`  The new state.
--          `new_state`  The new state as text, if the algorithm reads its state itself.
--          `commit`  A function that writes the new state, if the algorithm does not set ttl_us. The function may
--          return new values of remaining and reset_us.
-- An algorithm writes to Redis only in its function `commit`. If the status is not 0, the new state repairs the stored
-- state. A repair is necessary in two cases: the clock was set back, so that a stored time is in the future, or the
-- rate of a token bucket was lowered.
--
-- The states of the kinds B, F, K, W and X have three fields (see states.lua). The states of the other kinds have
-- separate keys.
-- A state ends at the time from which it has the same effect as no state. Its slack is the time between its end and the
-- time until which it is kept. The slack is at least half a second, so that no decision depends on the moment at which
-- Redis deletes a key. A new state is kept for one second after its end (KEY_SLACK_MS). If the time until which the state
-- before is kept gives a slack between MIN_KEY_SLACK_US and MAX_KEY_SLACK_US, this time stays the same.
-- Beyond `maxmemory`, Redis rejects commands that may need memory (for example SET, SETRANGE, ZADD, RPUSH and HINCRBY),
-- unless the script has already written something. Therefore the first write of a charge is such a command. Groups that
-- may begin with a delete (R, N) are at the end of a call, because Redis would accept all writes after a delete.
-- All numbers are integers below 2^53, which doubles represent exactly. The gateway rejects a configuration whose
-- numbers could exceed 2^53. Unconditional charges (A) increase a number in a state at most to MAX_STATE.
-- The scripts format numbers with %d. `..` and tostring would write a large number as 1e+15. %.0f is three times as
-- slow, and can write -0.
local call, floor, ceil, match, format = redis.call, math.floor, math.ceil, string.match, string.format
-- The function `unpack` of Lua 5.1 is `table.unpack` in later versions.
local unpack_list = table.unpack or unpack
local pack, unpack = struct.pack, struct.unpack
-- CALL_BYTES is the size in bytes of the numbers before the groups in ARGV[1], GROUP_BYTES the size of a group without
-- its limits, and LIMIT_BYTES the size of a limit.
local CALL_BYTES, GROUP_BYTES, LIMIT_BYTES = 9, 25, 51
-- MAX_STATE (2^52) is the maximum value of a number in a state. Doubles represent all integers below
-- EXACT_INTEGER_LIMIT (2^53) exactly.
local MAX_STATE, EXACT_INTEGER_LIMIT = 4503599627370496, 9007199254740992
-- The header describes the slack of a state.
local MIN_KEY_SLACK_US, MAX_KEY_SLACK_US, KEY_SLACK_MS = 500000, 1001000, 1000

local args, keys, groups, key_count, argument_count = ARGV[1], KEYS, {}, 0, 2
if #ARGV ~= argument_count or #args < CALL_BYTES then
  return redis.error_reply('RLARG wrong number of arguments')
end
-- Validate all groups of arguments before the script performs the first request.
local now, layout, position = unpack('<dc1', args)
local limit_count = 0
if layout ~= 'i' and layout ~= 'o' then
  return redis.error_reply('RLARG unknown layout')
end
while position <= #args do
  if #args - position + 1 < GROUP_BYTES then
    return redis.error_reply('RLARG wrong number of arguments')
  end
  local requests, operation, charged_at, limits
  requests, operation, charged_at, limits, position = unpack('<dc1dd', args, position)
  if not (requests >= 1 and requests % 1 == 0 and limits >= 1 and limits % 1 == 0
    and #args - position + 1 >= LIMIT_BYTES * limits) then
    return redis.error_reply('RLARG wrong number of arguments')
  end
  if operation ~= 'C' and operation ~= 'P' and operation ~= 'A' and operation ~= 'R' and operation ~= 'T'
    and operation ~= 'N' then
    return redis.error_reply('RLARG unknown operation')
  end
  local checks, keys_per_request = {}, 0
  for i = 1, limits do
    local kind, flag, place, id, cost, a, b, c, d
    kind, flag, place, id, cost, a, b, c, d, position = unpack('<c1c1c1dddddc8', args, position)
    if place ~= 's' then keys_per_request = keys_per_request + 1
    elseif keys_per_request == 0 then return redis.error_reply('RLARG no key precedes a limit without a key') end
    limit_count = limit_count + 1
    checks[i] = {
      kind = kind, cost = cost, a = a, b = b, c = c, d = d, id = id, number = limit_count, has_key = place ~= 's',
      is_shadow = flag == 's' or flag == 'b',
      is_deferred = operation == 'C' and (flag == 'p' or flag == 'b'),
      -- The following fields are results of the current request.
      status = 0, remaining = 0, reset_us = 0, retry_us = 0, free = 0, free_reset_us = 0, change = false, ttl_ms = 0,
    }
  end
  groups[#groups + 1] = {
    requests = requests, operation = operation, charged_at = charged_at, checks = checks, keys = keys_per_request,
  }
  key_count = key_count + requests * keys_per_request
end
if key_count == 0 or key_count ~= #keys then
  return redis.error_reply('RLARG wrong number of keys')
end
if now == 0 then
  local time = call('TIME')
  now = time[1] * 1000000 + time[2]
end

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
local replies = {pack('<dc1', now, 'o')}
local operation, charged_at, checks
-- Perform the request whose first key has the index `key_offset` + 1. Return its outcomes, or an error reply.
local function decide(key_offset)
  local op, requested, granted, admitted = operation, nil, nil, nil
  -- The operation T runs the algorithms twice: the first run returns how many tokens remain, and the second run charges
  -- them. `memo` keeps the states that the first run has parsed.
  local memo
  -- The values of the identities by their keys.
  local values = {}
  if operation == 'T' then op, requested, memo = 'P', 0, {} end
  repeat
    admitted = true
    local key_index = key_offset
    for i = 1, #checks do
      local check = checks[i]
      if check.has_key then key_index = key_index + 1 end
      local key = keys[key_index]
      local kind, cost, a, b, c, d = check.kind, requested or check.cost, check.a, check.b, check.c, check.d
      local status, remaining, reset_us, retry_us, free, free_reset_us = 0, 0, 0, 0, 0, 0
      local ttl_us, new_field1, new_field2, new_field3, new_state, commit
      local key_expires_at, field1, field2, field3
      check.key = key
      if kind ~= 'S' and kind ~= 'L' and kind ~= 'C' then
        if values[key] == nil then values[key] = call('GET', key) end
        check.value = values[key]
        check.index, check.separate_key, key_expires_at, field1, field2, field3 =
          read_state(key, check.value, check.id, check.number, i)
        check.exists, check.stored_field3 = key_expires_at, field3
        if type(check.index) == 'table' then return check.index end
      end
      -- A deferred cost (flag p or b) is charged after the response. The check before the request only tests whether
      -- one token remains.
      if check.is_deferred then cost = 1 end
      if operation == 'N' and kind ~= 'C' then
        return redis.error_reply('RLARG only concurrency permits can be renewed')
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
        free, free_reset_us = floor((capacity - debt) / parts), ceil(debt / refill)

        local charge = cost * parts
        -- A cost that is charged after the response has no upper bound.
        if charge > MAX_STATE then charge = MAX_STATE end
        local charged = debt + charge
        if op == 'R' then
          -- The tokens that refilled since the charge first repaid the debt that existed before the charge. The other refilled
          -- tokens have already repaid a part of the charge itself, and are subtracted from the refund.
          local repaid_us, credit = now - charged_at - unpack('<d', d), charge
          if repaid_us >= credit / refill then credit = 0
          elseif repaid_us > 0 then credit = credit - repaid_us * refill end
          charged = debt > credit and debt - credit or 0
        end
        if charged > capacity and (op == 'C' or op == 'P') then
          status = 1
          remaining, reset_us = free, free_reset_us
          if cost > burst then status, retry_us = 2, -1 else retry_us = ceil((charged - capacity) / refill) end
          -- If the rate was lowered, write a state with the new rate, because retry_us was computed with this rate.
          if clock_went_back or rate_lowered then
            ttl_us, new_field1, new_field2, new_field3 = ceil(debt / refill), now, debt, parts
          end
        else
          if charged > MAX_STATE then charged = MAX_STATE end
          ttl_us = false
          if charged > 0 then
            ttl_us = ceil(charged / refill)
            new_field1 = now
            new_field2 = charged
            new_field3 = parts
          end
          remaining, reset_us = floor((capacity - charged) / parts), ttl_us or 0
        end
      elseif kind == 'F' or kind == 'X' or kind == 'K' then
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
        local idle_reset_us = kind == 'X' and 0 or window_end - now
        free, free_reset_us = limit - count, count == 0 and idle_reset_us or window_end - now

        local charged = count + cost
        if op == 'R' then
          -- Refund the charge only if it was made in the current window. The count contains no charges of other windows.
          charged = charged_at >= start and charged_at < window_end and count - cost or count
          if charged < 0 then charged = 0 end
        end
        if charged > limit and (op == 'C' or op == 'P') then
          status = 1
          remaining, reset_us = free, free_reset_us
          if cost > limit then status, retry_us = 2, -1 else retry_us = window_end - now end
          if clock_went_back and count > 0 then
            ttl_us, new_field1, new_field2, new_field3 = window_end - now, start, count, 0
          end
        else
          if charged > MAX_STATE then charged = MAX_STATE end
          ttl_us = false
          if charged > 0 then
            ttl_us = window_end - now
            new_field1 = start
            new_field2 = charged
            new_field3 = 0
          end
          remaining, reset_us = limit - charged, ttl_us or idle_reset_us
        end
      elseif kind == 'L' then
        local limit, window = a, b
        local length = call('LLEN', key)
        local function time_at(index)
          local time = tonumber(call('LINDEX', key, format('%d', index)))
          if time > now then return now end
          return time
        end
        -- Find the first entry of the window by binary search.
        local first_active, high = 0, length
        while first_active < high do
          local middle = floor((first_active + high) / 2)
          if time_at(middle) <= now - window then first_active = middle + 1 else high = middle end
        end
        local active, newest, clock_went_back = length - first_active, nil, false
        if active > 0 then
          newest = tonumber(call('LINDEX', key, '-1'))
          if newest > now then newest, clock_went_back = now, true end
        end
        free, free_reset_us = limit - active, newest and newest + window - now or 0
        local function expire() call('PEXPIRE', key, format('%d', ceil(window / 1000) + KEY_SLACK_MS)) end
        -- Append the current time `count` times. One RPUSH appends up to 1,000 values: with more values, the function `unpack`
        -- of Lua 5.1 would soon run out of stack.
        local function append(count)
          local times, now_text = {}, format('%d', now)
          for i = 1, count < 1000 and count or 1000 do times[i] = now_text end
          while count > 0 do
            call('RPUSH', key, unpack_list(times, 1, count < 1000 and count or 1000))
            count = count - 1000
          end
        end
        -- Drop the oldest `dropped` times, replace the times in the future with the current time, and append the current time
        -- `count` times. Times in the future are the last ones of the list. The first write of a repair or charge is RPUSH, so
        -- that Redis can reject it beyond `maxmemory`. After another write, such as LTRIM, Redis would accept RPUSH.
        local function repair(dropped, count)
          local first_late, end_of_search = first_active, length
          while first_late < end_of_search do
            local middle = floor((first_late + end_of_search) / 2)
            if tonumber(call('LINDEX', key, format('%d', middle))) > now then end_of_search = middle else first_late = middle + 1 end
          end
          append(1)
          if first_late > dropped then call('LTRIM', key, format('%d', dropped), format('%d', first_late - 1))
          else call('DEL', key) end
          append(length - first_late + count)
        end

        remaining, reset_us = free, free_reset_us
        if op == 'R' then
          -- Do not call LREM for a cost of 0: with the count 0, LREM would remove all entries with the time `charged_at`.
          if cost > 0 then
            commit = function()
              local removed = call('LREM', key, format('%d', -cost), format('%d', charged_at))
              if charged_at > now - window then active = active - removed end
              return active < limit and limit - active or 0, active > 0 and time_at(-1) + window - now or 0
            end
          end
        elseif op ~= 'A' and active + cost > limit then
          if cost > limit then status, retry_us = 2, -1
          else status, retry_us = 1, time_at(first_active + active + cost - limit - 1) + window - now end
          if clock_went_back then
            commit = function()
              repair(0, 0)
              expire()
            end
          end
        elseif cost > 0 then
          remaining, reset_us = free - cost, window
          commit = function()
            if clock_went_back then repair(first_active, cost)
            else
              append(cost)
              if first_active > 0 then call('LTRIM', key, format('%d', first_active), '-1') end
            end
            expire()
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
        free = limit - current + floor(-previous * (units - elapsed) / units)
        free_reset_us = current > 0 and start + 2 * window - now or previous > 0 and start + window - now or 0

        local excess = (current + cost - limit) * units + previous * (units - elapsed)
        if excess > 0 and (op == 'C' or op == 'P') then
          status = 1
          remaining, reset_us = free, free_reset_us
          if cost > limit then status, retry_us = 2, -1
          elseif current + cost <= limit then retry_us = start + (elapsed + ceil(excess / previous)) * unit - now
          else retry_us = start + window + ceil(units * (current + cost - limit) / current) * unit - now end
          if clock_went_back and free_reset_us > 0 then
            ttl_us, new_field1, new_field2, new_field3 = free_reset_us, start, current, previous
          end
        else
          if op == 'R' then
            if charged_at >= start then current = current > cost and current - cost or 0
            elseif charged_at >= start - window then previous = previous > cost and previous - cost or 0 end
            cost = 0
          end
          current = current + cost
          current = math.min(current, floor(MAX_STATE / 2 / units))
          remaining = limit - current + floor(-previous * (units - elapsed) / units)
          reset_us = current > 0 and start + 2 * window - now or previous > 0 and start + window - now or 0
          ttl_us = false
          if reset_us > 0 then
            ttl_us = reset_us
            new_field1 = start
            new_field2 = current
            new_field3 = previous
          end
        end
      elseif kind == 'S' then
        local limit, window, buckets = a, b, c
        local width = floor(window / buckets)
        local index = floor(now / width)
        -- The number of tokens in each bucket by age, as text. The newest bucket has age 0. A script that converts these texts
        -- to numbers and back would need twice as much time.
        local counts, total, clock_went_back = {}, 0, false
        local parsed = memo and memo[key]
        if parsed then counts, total, clock_went_back = parsed.counts, parsed.total, parsed.clock_went_back
        else
          local age, state = 0, call('GET', key)
          if state then
            local stored_index, stored_counts = match(state, '^(%d+):(.*)$')
            local elapsed = index - tonumber(stored_index)
            if elapsed < 0 then elapsed, clock_went_back = 0, true end
            while age < elapsed and age <= buckets do counts[age], age = '0', age + 1 end
            for count in string.gmatch(stored_counts, '%d+') do
              if age > buckets then break end
              counts[age], total, age = count, total + count, age + 1
            end
          end
          while age <= buckets do counts[age], age = '0', age + 1 end
          if memo then memo[key] = { counts = counts, total = total, clock_went_back = clock_went_back } end
        end
        -- Return the time in microseconds until a bucket is completely outside the window.
        local function dropped_after_us(age) return (index - age + buckets + 1) * width - now end
        local function until_empty()
          for age = 0, buckets do
            if counts[age] ~= '0' then return dropped_after_us(age) end
          end
          return 0
        end
        local function encode()
          local last = buckets
          while counts[last] == '0' do last = last - 1 end
          return format('%d:', index) .. table.concat(counts, ',', 0, last)
        end
        free, free_reset_us = limit - total, until_empty()

        if total + cost > limit and (op == 'C' or op == 'P') then
          remaining, reset_us = free, free_reset_us
          if cost > limit then status, retry_us = 2, -1
          else
            -- Find the newest bucket that must leave the window so that the cost fits. The loop ends, because the cost alone
            -- does not exceed the limit.
            local excess, age = total + cost - limit, buckets
            while excess > tonumber(counts[age]) do excess, age = excess - counts[age], age - 1 end
            status, retry_us = 1, dropped_after_us(age)
          end
          if clock_went_back and total > 0 then new_state, ttl_us = encode(), reset_us end
        else
          local age, change = 0, cost
          if op == 'R' then
            age = index - floor(charged_at / width)
            local count = age >= 0 and age <= buckets and tonumber(counts[age]) or 0
            change = -(count < cost and count or cost)
          end
          if total + change > MAX_STATE then change = MAX_STATE - total end
          if change ~= 0 then counts[age], total = format('%d', counts[age] + change), total + change end
          remaining, reset_us, ttl_us = limit - total, until_empty(), false
          if total > 0 and op ~= 'P' then new_state, ttl_us = encode(), reset_us end
        end
      elseif kind == 'C' then
        local limit, ttl, permit_id = a, b, d
        if operation == 'T' then return redis.error_reply('RLARG operation T does not support concurrency limits') end
        local now_text, expires_at = format('%d', now), format('%d', now + ttl)
        local live = call('ZCOUNT', key, '(' .. now_text, '+inf')
        local clock_went_back = call('ZCOUNT', key, '(' .. expires_at, '+inf') > 0
        local function remove_expired()
          local expired = call('ZRANGEBYSCORE', key, '-inf', now_text, 'LIMIT', '0', '100')
          if #expired > 0 then call('ZREM', key, unpack_list(expired)) end
        end
        local function repair_and_expire()
          local late = call('ZRANGEBYSCORE', key, '(' .. expires_at, '+inf', 'LIMIT', '0', '100')
          for i = 1, #late do call('ZADD', key, expires_at, late[i]) end
          call('PEXPIRE', key, format('%d', ceil(ttl / 1000) + KEY_SLACK_MS))
        end
        if cost > 1 then cost = 1 end
        free, free_reset_us = limit - live, live > 0 and ttl or 0

        remaining, reset_us = free, free_reset_us
        if op == 'R' then
          commit = function() call('ZREM', key, permit_id) end
        elseif op == 'N' then
          -- Remove expired permits first: after the first write command of a script, Redis accepts ZADD even beyond
          -- `maxmemory`. If Redis rejected ZADD, the permit would expire while its request is still in flight. ZADD also adds a
          -- permit that Redis has lost, even beyond the limit, because the request of this permit is in flight.
          reset_us = ttl
          commit = function()
            remove_expired()
            call('ZADD', key, expires_at, permit_id)
            repair_and_expire()
          end
        elseif op ~= 'A' and live + cost > limit then
          local skip = format('%d', live + cost - limit - 1)
          local blocking = call('ZRANGEBYSCORE', key, '(' .. now_text, '+inf', 'WITHSCORES', 'LIMIT', skip, '1')
          status, retry_us = 3, tonumber(blocking[2]) - now
          if retry_us > ttl then retry_us = ttl end
          if clock_went_back then commit = repair_and_expire end
        elseif cost > 0 then
          remaining, reset_us = free - 1, ttl
          -- ZADD is the first write, so that Redis rejects ZADD beyond `maxmemory`. After another write, Redis would accept
          -- ZADD.
          commit = function()
            call('ZADD', key, expires_at, permit_id)
            remove_expired()
            repair_and_expire()
          end
        end
      else
        return redis.error_reply('RLARG unknown kind')
      end
      if free < 0 then free = 0 end
      if remaining < 0 then remaining = 0 end
      if status ~= 0 then
        if not check.is_shadow then admitted = false end
      elseif check.is_deferred then
        remaining, reset_us, ttl_us, new_state, commit = free, free_reset_us, nil, nil, nil
      end
      -- `change` is a function that writes the new state, the new state as text, or true if the new state has fields. The
      -- value false means that the new state is empty, and nil means that the state does not change. `kept_until` is the
      -- time until which the new state is kept.
      -- If the new state has no fields, `ttl_ms` is the TTL of its key.
      local change, ttl_ms, kept_until = commit, nil, nil
      if new_state then change, ttl_ms = new_state, ceil(ttl_us / 1000) + KEY_SLACK_MS
      elseif ttl_us then
        local slack_us = key_expires_at and key_expires_at - now - ttl_us or 0
        kept_until = slack_us >= MIN_KEY_SLACK_US and slack_us < MAX_KEY_SLACK_US and key_expires_at
          or now + (ceil(ttl_us / 1000) + KEY_SLACK_MS) * 1000
        change, check.field1, check.field2, check.field3 = true, new_field1, new_field2, new_field3
      elseif ttl_us == false then change = false end
      check.status, check.remaining, check.reset_us, check.retry_us = status, remaining, reset_us, retry_us
      check.free, check.free_reset_us = free, free_reset_us
      check.change, check.ttl_ms, check.kept_until = change, ttl_ms, kept_until
    end
    local is_last_pass = operation ~= 'T' or granted
    if not is_last_pass then
      local wanted = checks[1].cost
      granted = wanted
      for i = 1, #checks do
        local check = checks[i]
        if check.free < granted and not check.is_shadow then granted = check.free end
      end
      -- If no token remains, the second run requests one token. The algorithm denies this token and returns retry_us.
      op, requested = wanted > 0 and 'C' or 'P', wanted > 0 and granted < 1 and 1 or granted
    end
  until is_last_pass

  granted = admitted and (granted or 1) or 0
  local changes = {}
  for i = 1, #checks do
    local check = checks[i]
    local change = check.change
    -- Remove a state only for refunds. If another operation results in an empty state, the stored state already had no
    -- effect.
    if change ~= nil and op ~= 'P' and (admitted or check.status ~= 0) and (change or operation == 'R') then
      if type(change) == 'function' then
        local remaining, reset_us = change()
        if remaining then check.remaining, check.reset_us = remaining, reset_us end
      elseif check.ttl_ms then call('SET', check.key, change, 'PX', format('%d', check.ttl_ms))
      elseif check.kind == 'S' then call('DEL', check.key)
      else changes[#changes + 1] = check end
    end
  end
  local failure = write_states(changes)
  if failure then return failure end
  local outcomes = {}
  for i = 1, #checks do
    local check = checks[i]
    if op == 'P' or not admitted then check.remaining, check.reset_us = check.free, check.free_reset_us end
    outcomes[i] = pack('<ddddd', granted, check.status, check.remaining, check.reset_us, check.retry_us)
  end
  return table.concat(outcomes)
end

local key_offset = 0
for g = 1, #groups do
  local group = groups[g]
  operation, charged_at, checks = group.operation, group.charged_at, group.checks
  for _ = 1, group.requests do
    -- With pcall, the other requests of the call still succeed if one request fails.
    local is_complete, reply = pcall(decide, key_offset)
    -- Lua errors are strings. In Redis versions below 7, errors of Redis commands are strings too.
    if not is_complete and type(reply) ~= 'table' then
      reply = redis.error_reply(match(reply, '^%u+ ') and reply or 'ERR Error running script: ' .. reply)
    end
    replies[#replies + 1] = reply
    key_offset = key_offset + group.keys
  end
end
return replies
