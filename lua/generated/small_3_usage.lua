-- Composed from lua/small.lua and all algorithms that it supports, with usage. Do not edit:
-- UPDATE_GENERATED=1 cargo test --test it scripts::

-- The driver (script without algorithms) for requests with few limits. Each request has the operation C and one to four
-- limits of the kinds B, F, X or W, without flags. The header of generic.lua describes the arguments and replies.
-- This driver creates no Lua tables or functions for its groups, so a check needs 25 % less CPU time than with
-- generic.lua.
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
-- USAGE_BYTES is the number of bytes in ARGV[2] for each limit. USAGE_TTL_MS (400 days) is the TTL of a hash of usage
-- totals. The first charge of each day renews the TTL.
local USAGE_BYTES, USAGE_TTL_MS = 24, '34560000000'
local usage_args, usage_position, usage_key_count, type = ARGV[2], 1, 0, type
argument_count = 2
if #ARGV ~= argument_count or #args < 8 then
  return redis.error_reply('RLARG wrong number of arguments')
end
-- Validate all groups of arguments before the script performs the first check. If there is only one group, its values
-- stay in the variables, and the second loop does not unpack them again.
local now, position = unpack('<d', args)
local groups, key_count = 0, 0
local requests, operation, _, limits, unread_limits
local kind_1, flag_1, cost_1, a_1, b_1, c_1, d_1
local day_1, day_start_1, day_end_1
local kind_2, flag_2, cost_2, a_2, b_2, c_2, d_2
local day_2, day_start_2, day_end_2
local kind_3, flag_3, cost_3, a_3, b_3, c_3, d_3
local day_3, day_start_3, day_end_3
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
  if #usage_args - usage_position + 1 < USAGE_BYTES * limits then
    return redis.error_reply('RLARG wrong number of arguments')
  end
  kind_1 = nil
  if unread_limits > 0 then
    kind_1, flag_1, cost_1, a_1, b_1, c_1, d_1, position = unpack('<c1c1ddddc8', args, position)
    day_1, day_start_1, day_end_1, usage_position = unpack('<ddd', usage_args, usage_position)
    if not (day_1 >= 0 and day_1 <= 31 and day_1 % 1 == 0) then
      return redis.error_reply('RLARG unknown day')
    end
    if day_1 > 0 then usage_key_count = usage_key_count + requests end
    if flag_1 ~= '-' or kind_1 ~= 'B' and kind_1 ~= 'F' and kind_1 ~= 'X' and kind_1 ~= 'W' then
      return redis.error_reply('RLARG only checks with few limits each are supported')
    end
    unread_limits = unread_limits - 1
  end
  kind_2 = nil
  if unread_limits > 0 then
    kind_2, flag_2, cost_2, a_2, b_2, c_2, d_2, position = unpack('<c1c1ddddc8', args, position)
    day_2, day_start_2, day_end_2, usage_position = unpack('<ddd', usage_args, usage_position)
    if not (day_2 >= 0 and day_2 <= 31 and day_2 % 1 == 0) then
      return redis.error_reply('RLARG unknown day')
    end
    if day_2 > 0 then usage_key_count = usage_key_count + requests end
    if flag_2 ~= '-' or kind_2 ~= 'B' and kind_2 ~= 'F' and kind_2 ~= 'X' and kind_2 ~= 'W' then
      return redis.error_reply('RLARG only checks with few limits each are supported')
    end
    unread_limits = unread_limits - 1
  end
  kind_3 = nil
  if unread_limits > 0 then
    kind_3, flag_3, cost_3, a_3, b_3, c_3, d_3, position = unpack('<c1c1ddddc8', args, position)
    day_3, day_start_3, day_end_3, usage_position = unpack('<ddd', usage_args, usage_position)
    if not (day_3 >= 0 and day_3 <= 31 and day_3 % 1 == 0) then
      return redis.error_reply('RLARG unknown day')
    end
    if day_3 > 0 then usage_key_count = usage_key_count + requests end
    if flag_3 ~= '-' or kind_3 ~= 'B' and kind_3 ~= 'F' and kind_3 ~= 'X' and kind_3 ~= 'W' then
      return redis.error_reply('RLARG only checks with few limits each are supported')
    end
    unread_limits = unread_limits - 1
  end
  if unread_limits > 0 then
    return redis.error_reply('RLARG only checks with few limits each are supported')
  end
  groups, key_count = groups + 1, key_count + requests * limits
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

local replies, reply_count, failures, key_index = {pack('<d', now)}, 1, nil, 0
position = 9
for _ = 1, groups do
  if groups > 1 then
    requests, operation, _, limits, position = unpack('<dc1dd', args, position)
    unread_limits = limits
    kind_1 = nil
    if unread_limits > 0 then
      kind_1, flag_1, cost_1, a_1, b_1, c_1, d_1, position = unpack('<c1c1ddddc8', args, position)
      day_1, day_start_1, day_end_1, usage_position = unpack('<ddd', usage_args, usage_position)
      unread_limits = unread_limits - 1
    end
    kind_2 = nil
    if unread_limits > 0 then
      kind_2, flag_2, cost_2, a_2, b_2, c_2, d_2, position = unpack('<c1c1ddddc8', args, position)
      day_2, day_start_2, day_end_2, usage_position = unpack('<ddd', usage_args, usage_position)
      unread_limits = unread_limits - 1
    end
    kind_3 = nil
    if unread_limits > 0 then
      kind_3, flag_3, cost_3, a_3, b_3, c_3, d_3, position = unpack('<c1c1ddddc8', args, position)
      day_3, day_start_3, day_end_3, usage_position = unpack('<ddd', usage_args, usage_position)
      unread_limits = unread_limits - 1
    end
  end
  -- The code below passes the values of all limits to `pack`, which ignores the values after the end of the format.
  local reply_format = limits == 1 and '<ddddd' or limits == 2 and '<dddddddddd' or limits == 3 and '<ddddddddddddddd'
    or '<dddddddddddddddddddd'
  for _ = 1, requests do
    local key_offset, admitted, failure = key_index, true, nil
    local key_1, status_1, remaining_1, reset_us_1, retry_us_1, free_1, free_reset_us_1, new_state_1, ttl_ms_1
    local usage_key_1
    if kind_1 then
      key_index = key_index + 1
      key_1 = keys[key_index]
      if day_1 > 0 then
        usage_index = usage_index + 1
        usage_key_1 = keys[usage_index]
        if not (now >= day_start_1 and now < day_end_1) and not failure then
          failure = redis.error_reply(format('RLSTALE the day of the usage is not that of %d', now))
        end
      end
      local kind, cost, a, b, c, d = kind_1, cost_1, a_1, b_1, c_1, d_1
      local status, remaining, reset_us, retry_us, free, free_reset_us = 0, 0, 0, 0, 0, 0
      local ttl_us, new_field1, new_field2, new_field3
      local key_expires_at, field1, field2, field3
      local state = call('GET', key_1)
      if state then
        if #state == STATE_BYTES then key_expires_at, field1, field2, field3 = unpack('<i8i8i8i8', state)
        else failure = state.err and state or redis.error_reply('WRONGTYPE the key does not hold the state of a limit') end
      end
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
        free, free_reset_us = floor((capacity - debt) / parts), ceil(debt / refill)

        -- Limit the charge to MAX_STATE: a cost that is charged after the response has no upper bound.
        local charge = cost > MAX_STATE / parts and MAX_STATE or cost * parts
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
          remaining, reset_us = free, free_reset_us
          if cost > burst then status, retry_us = 2, -1
          else status, retry_us = 1, ceil((charged - capacity) / refill) end
          -- If the rate was lowered, write a state with the new rate, because retry_us was computed with this rate.
          if clock_went_back or rate_lowered then ttl_us, new_field1, new_field2, new_field3 = reset_us, now, debt, parts end
        else
          if charged > MAX_STATE then charged = MAX_STATE end
          remaining, reset_us, ttl_us = floor((capacity - charged) / parts), ceil(charged / refill), false
          if charged > 0 then ttl_us, new_field1, new_field2, new_field3 = reset_us, now, charged, parts end
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
        local idle_reset_us = kind == 'X' and 0 or window_end - now
        free, free_reset_us = limit - count, count == 0 and idle_reset_us or window_end - now

        local charged = count + cost
        if op == 'R' then
          -- Refund the charge only if it was made in the current window. The count contains no charges of other windows.
          charged = charged_at >= start and charged_at < window_end and count - cost or count
          if charged < 0 then charged = 0 end
        end
        if charged > limit and (op == 'C' or op == 'P') then
          remaining, reset_us = free, free_reset_us
          if cost > limit then status, retry_us = 2, -1
          else status, retry_us = 1, window_end - now end
          if clock_went_back and count > 0 then
            ttl_us, new_field1, new_field2, new_field3 = window_end - now, start, count, 0
          end
        else
          if charged > MAX_STATE then charged = MAX_STATE end
          remaining, reset_us, ttl_us = limit - charged, idle_reset_us, false
          if charged > 0 then
            reset_us = window_end - now
            ttl_us, new_field1, new_field2, new_field3 = reset_us, start, charged, 0
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
          remaining, reset_us = free, free_reset_us
          if cost > limit then status, retry_us = 2, -1
          elseif current + cost <= limit then status, retry_us = 1, start + (elapsed + ceil(excess / previous)) * unit - now
          else status, retry_us = 1, start + window + ceil(units * (current + cost - limit) / current) * unit - now end
          if clock_went_back and reset_us > 0 then
            ttl_us, new_field1, new_field2, new_field3 = reset_us, start, current, previous
          end
        else
          if op ~= 'R' then current = math.min(current + cost, floor(MAX_STATE / 2 / units))
          elseif charged_at >= start then current = current > cost and current - cost or 0
          elseif charged_at >= start - window then previous = previous > cost and previous - cost or 0 end
          remaining = limit - current + floor(-previous * (units - elapsed) / units)
          reset_us = current > 0 and start + 2 * window - now or previous > 0 and start + window - now or 0
          ttl_us = false
          if reset_us > 0 then ttl_us, new_field1, new_field2, new_field3 = reset_us, start, current, previous end
        end
      else
        failure = redis.error_reply('RLARG unknown kind')
      end
      if status ~= 0 then admitted = false end
      if ttl_us then
        local slack_us = key_expires_at and key_expires_at - now - ttl_us or 0
        if slack_us >= MIN_KEY_SLACK_US and slack_us < MAX_KEY_SLACK_US then
          new_state_1 = pack('<i8i8i8', new_field1, new_field2, new_field3)
        else
          ttl_ms_1 = ceil(ttl_us / 1000) + KEY_SLACK_MS
          new_state_1 = pack('<i8i8i8i8', now + ttl_ms_1 * 1000, new_field1, new_field2, new_field3)
        end
      end
      status_1, remaining_1, reset_us_1, retry_us_1 = status, remaining, reset_us, retry_us
      free_1, free_reset_us_1 = free, free_reset_us
    end
    local key_2, status_2, remaining_2, reset_us_2, retry_us_2, free_2, free_reset_us_2, new_state_2, ttl_ms_2
    local usage_key_2
    if kind_2 then
      key_index = key_index + 1
      key_2 = keys[key_index]
      if day_2 > 0 then
        usage_index = usage_index + 1
        usage_key_2 = keys[usage_index]
        if not (now >= day_start_2 and now < day_end_2) and not failure then
          failure = redis.error_reply(format('RLSTALE the day of the usage is not that of %d', now))
        end
      end
      local kind, cost, a, b, c, d = kind_2, cost_2, a_2, b_2, c_2, d_2
      local status, remaining, reset_us, retry_us, free, free_reset_us = 0, 0, 0, 0, 0, 0
      local ttl_us, new_field1, new_field2, new_field3
      local key_expires_at, field1, field2, field3
      local state = call('GET', key_2)
      if state then
        if #state == STATE_BYTES then key_expires_at, field1, field2, field3 = unpack('<i8i8i8i8', state)
        else failure = state.err and state or redis.error_reply('WRONGTYPE the key does not hold the state of a limit') end
      end
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
        free, free_reset_us = floor((capacity - debt) / parts), ceil(debt / refill)

        -- Limit the charge to MAX_STATE: a cost that is charged after the response has no upper bound.
        local charge = cost > MAX_STATE / parts and MAX_STATE or cost * parts
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
          remaining, reset_us = free, free_reset_us
          if cost > burst then status, retry_us = 2, -1
          else status, retry_us = 1, ceil((charged - capacity) / refill) end
          -- If the rate was lowered, write a state with the new rate, because retry_us was computed with this rate.
          if clock_went_back or rate_lowered then ttl_us, new_field1, new_field2, new_field3 = reset_us, now, debt, parts end
        else
          if charged > MAX_STATE then charged = MAX_STATE end
          remaining, reset_us, ttl_us = floor((capacity - charged) / parts), ceil(charged / refill), false
          if charged > 0 then ttl_us, new_field1, new_field2, new_field3 = reset_us, now, charged, parts end
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
        local idle_reset_us = kind == 'X' and 0 or window_end - now
        free, free_reset_us = limit - count, count == 0 and idle_reset_us or window_end - now

        local charged = count + cost
        if op == 'R' then
          -- Refund the charge only if it was made in the current window. The count contains no charges of other windows.
          charged = charged_at >= start and charged_at < window_end and count - cost or count
          if charged < 0 then charged = 0 end
        end
        if charged > limit and (op == 'C' or op == 'P') then
          remaining, reset_us = free, free_reset_us
          if cost > limit then status, retry_us = 2, -1
          else status, retry_us = 1, window_end - now end
          if clock_went_back and count > 0 then
            ttl_us, new_field1, new_field2, new_field3 = window_end - now, start, count, 0
          end
        else
          if charged > MAX_STATE then charged = MAX_STATE end
          remaining, reset_us, ttl_us = limit - charged, idle_reset_us, false
          if charged > 0 then
            reset_us = window_end - now
            ttl_us, new_field1, new_field2, new_field3 = reset_us, start, charged, 0
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
          remaining, reset_us = free, free_reset_us
          if cost > limit then status, retry_us = 2, -1
          elseif current + cost <= limit then status, retry_us = 1, start + (elapsed + ceil(excess / previous)) * unit - now
          else status, retry_us = 1, start + window + ceil(units * (current + cost - limit) / current) * unit - now end
          if clock_went_back and reset_us > 0 then
            ttl_us, new_field1, new_field2, new_field3 = reset_us, start, current, previous
          end
        else
          if op ~= 'R' then current = math.min(current + cost, floor(MAX_STATE / 2 / units))
          elseif charged_at >= start then current = current > cost and current - cost or 0
          elseif charged_at >= start - window then previous = previous > cost and previous - cost or 0 end
          remaining = limit - current + floor(-previous * (units - elapsed) / units)
          reset_us = current > 0 and start + 2 * window - now or previous > 0 and start + window - now or 0
          ttl_us = false
          if reset_us > 0 then ttl_us, new_field1, new_field2, new_field3 = reset_us, start, current, previous end
        end
      else
        failure = redis.error_reply('RLARG unknown kind')
      end
      if status ~= 0 then admitted = false end
      if ttl_us then
        local slack_us = key_expires_at and key_expires_at - now - ttl_us or 0
        if slack_us >= MIN_KEY_SLACK_US and slack_us < MAX_KEY_SLACK_US then
          new_state_2 = pack('<i8i8i8', new_field1, new_field2, new_field3)
        else
          ttl_ms_2 = ceil(ttl_us / 1000) + KEY_SLACK_MS
          new_state_2 = pack('<i8i8i8i8', now + ttl_ms_2 * 1000, new_field1, new_field2, new_field3)
        end
      end
      status_2, remaining_2, reset_us_2, retry_us_2 = status, remaining, reset_us, retry_us
      free_2, free_reset_us_2 = free, free_reset_us
    end
    local key_3, status_3, remaining_3, reset_us_3, retry_us_3, free_3, free_reset_us_3, new_state_3, ttl_ms_3
    local usage_key_3
    if kind_3 then
      key_index = key_index + 1
      key_3 = keys[key_index]
      if day_3 > 0 then
        usage_index = usage_index + 1
        usage_key_3 = keys[usage_index]
        if not (now >= day_start_3 and now < day_end_3) and not failure then
          failure = redis.error_reply(format('RLSTALE the day of the usage is not that of %d', now))
        end
      end
      local kind, cost, a, b, c, d = kind_3, cost_3, a_3, b_3, c_3, d_3
      local status, remaining, reset_us, retry_us, free, free_reset_us = 0, 0, 0, 0, 0, 0
      local ttl_us, new_field1, new_field2, new_field3
      local key_expires_at, field1, field2, field3
      local state = call('GET', key_3)
      if state then
        if #state == STATE_BYTES then key_expires_at, field1, field2, field3 = unpack('<i8i8i8i8', state)
        else failure = state.err and state or redis.error_reply('WRONGTYPE the key does not hold the state of a limit') end
      end
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
        free, free_reset_us = floor((capacity - debt) / parts), ceil(debt / refill)

        -- Limit the charge to MAX_STATE: a cost that is charged after the response has no upper bound.
        local charge = cost > MAX_STATE / parts and MAX_STATE or cost * parts
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
          remaining, reset_us = free, free_reset_us
          if cost > burst then status, retry_us = 2, -1
          else status, retry_us = 1, ceil((charged - capacity) / refill) end
          -- If the rate was lowered, write a state with the new rate, because retry_us was computed with this rate.
          if clock_went_back or rate_lowered then ttl_us, new_field1, new_field2, new_field3 = reset_us, now, debt, parts end
        else
          if charged > MAX_STATE then charged = MAX_STATE end
          remaining, reset_us, ttl_us = floor((capacity - charged) / parts), ceil(charged / refill), false
          if charged > 0 then ttl_us, new_field1, new_field2, new_field3 = reset_us, now, charged, parts end
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
        local idle_reset_us = kind == 'X' and 0 or window_end - now
        free, free_reset_us = limit - count, count == 0 and idle_reset_us or window_end - now

        local charged = count + cost
        if op == 'R' then
          -- Refund the charge only if it was made in the current window. The count contains no charges of other windows.
          charged = charged_at >= start and charged_at < window_end and count - cost or count
          if charged < 0 then charged = 0 end
        end
        if charged > limit and (op == 'C' or op == 'P') then
          remaining, reset_us = free, free_reset_us
          if cost > limit then status, retry_us = 2, -1
          else status, retry_us = 1, window_end - now end
          if clock_went_back and count > 0 then
            ttl_us, new_field1, new_field2, new_field3 = window_end - now, start, count, 0
          end
        else
          if charged > MAX_STATE then charged = MAX_STATE end
          remaining, reset_us, ttl_us = limit - charged, idle_reset_us, false
          if charged > 0 then
            reset_us = window_end - now
            ttl_us, new_field1, new_field2, new_field3 = reset_us, start, charged, 0
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
          remaining, reset_us = free, free_reset_us
          if cost > limit then status, retry_us = 2, -1
          elseif current + cost <= limit then status, retry_us = 1, start + (elapsed + ceil(excess / previous)) * unit - now
          else status, retry_us = 1, start + window + ceil(units * (current + cost - limit) / current) * unit - now end
          if clock_went_back and reset_us > 0 then
            ttl_us, new_field1, new_field2, new_field3 = reset_us, start, current, previous
          end
        else
          if op ~= 'R' then current = math.min(current + cost, floor(MAX_STATE / 2 / units))
          elseif charged_at >= start then current = current > cost and current - cost or 0
          elseif charged_at >= start - window then previous = previous > cost and previous - cost or 0 end
          remaining = limit - current + floor(-previous * (units - elapsed) / units)
          reset_us = current > 0 and start + 2 * window - now or previous > 0 and start + window - now or 0
          ttl_us = false
          if reset_us > 0 then ttl_us, new_field1, new_field2, new_field3 = reset_us, start, current, previous end
        end
      else
        failure = redis.error_reply('RLARG unknown kind')
      end
      if status ~= 0 then admitted = false end
      if ttl_us then
        local slack_us = key_expires_at and key_expires_at - now - ttl_us or 0
        if slack_us >= MIN_KEY_SLACK_US and slack_us < MAX_KEY_SLACK_US then
          new_state_3 = pack('<i8i8i8', new_field1, new_field2, new_field3)
        else
          ttl_ms_3 = ceil(ttl_us / 1000) + KEY_SLACK_MS
          new_state_3 = pack('<i8i8i8i8', now + ttl_ms_3 * 1000, new_field1, new_field2, new_field3)
        end
      end
      status_3, remaining_3, reset_us_3, retry_us_3 = status, remaining, reset_us, retry_us
      free_3, free_reset_us_3 = free, free_reset_us
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
    if usage_key_3 and admitted and cost_3 > 0 and not failure then
      local total = call('HINCRBY', usage_key_3, format('%d', day_3), format('%d', cost_3))
      if type(total) == 'table' then failure = total
      elseif total == cost_3 then call('PEXPIRE', usage_key_3, USAGE_TTL_MS) end
    end
    if new_state_1 and not failure and (admitted or status_1 ~= 0) then
      if ttl_ms_1 then
        local result = call('SET', key_1, new_state_1, 'PX', format('%d', ttl_ms_1))
        failure = result.err and result
      else
        local length = call('SETRANGE', key_1, '8', new_state_1)
        failure = length ~= STATE_BYTES and length
      end
    end
    if new_state_2 and not failure and (admitted or status_2 ~= 0) then
      if ttl_ms_2 then
        local result = call('SET', key_2, new_state_2, 'PX', format('%d', ttl_ms_2))
        failure = result.err and result
      else
        local length = call('SETRANGE', key_2, '8', new_state_2)
        failure = length ~= STATE_BYTES and length
      end
    end
    if new_state_3 and not failure and (admitted or status_3 ~= 0) then
      if ttl_ms_3 then
        local result = call('SET', key_3, new_state_3, 'PX', format('%d', ttl_ms_3))
        failure = result.err and result
      else
        local length = call('SETRANGE', key_3, '8', new_state_3)
        failure = length ~= STATE_BYTES and length
      end
    end
    if failure then
      failures = failures or {}
      failures[#failures + 1], failures[#failures + 2] = key_offset, failure
    end
    local granted = failure and -1 or admitted and 1 or 0
    if not admitted then remaining_1, reset_us_1 = free_1, free_reset_us_1 end
    if remaining_1 and remaining_1 < 0 then remaining_1 = 0 end
    if not admitted then remaining_2, reset_us_2 = free_2, free_reset_us_2 end
    if remaining_2 and remaining_2 < 0 then remaining_2 = 0 end
    if not admitted then remaining_3, reset_us_3 = free_3, free_reset_us_3 end
    if remaining_3 and remaining_3 < 0 then remaining_3 = 0 end
    reply_count = reply_count + 1
    replies[reply_count] = pack(reply_format
      , granted, status_1, remaining_1, reset_us_1, retry_us_1
      , granted, status_2, remaining_2, reset_us_2, retry_us_2
      , granted, status_3, remaining_3, reset_us_3, retry_us_3
    )
  end
end
replies = table.concat(replies)
if failures then table.insert(failures, 1, replies) end
return failures or replies
