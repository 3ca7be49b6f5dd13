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
local no_state = string.rep('\0', STATE_BYTES)
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
  for _ = 1, requests do
    local key_offset, admitted, failure = key_index, true, nil
    local key_1, state_1, status_1, ttl_us_1, new_field1_1, new_field2_1, new_field3_1
    local key_expires_at_1, field1_1, field2_1, field3_1
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
      local reset_us, free_reset_us
      status_1, state_1 = 0, call('GET', key_1)
      if state_1 then
        if #state_1 == STATE_BYTES then key_expires_at_1, field1_1, field2_1, field3_1 = unpack('<i8i8i8i8', state_1)
        else
          failure = state_1.err and state_1 or redis.error_reply('WRONGTYPE the key does not hold the state of a limit')
        end
      end
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
      if status_1 ~= 0 then admitted = false end
    end
    local key_2, state_2, status_2, ttl_us_2, new_field1_2, new_field2_2, new_field3_2
    local key_expires_at_2, field1_2, field2_2, field3_2
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
      local reset_us, free_reset_us
      status_2, state_2 = 0, call('GET', key_2)
      if state_2 then
        if #state_2 == STATE_BYTES then key_expires_at_2, field1_2, field2_2, field3_2 = unpack('<i8i8i8i8', state_2)
        else
          failure = state_2.err and state_2 or redis.error_reply('WRONGTYPE the key does not hold the state of a limit')
        end
      end
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
      if status_2 ~= 0 then admitted = false end
    end
    local key_3, state_3, status_3, ttl_us_3, new_field1_3, new_field2_3, new_field3_3
    local key_expires_at_3, field1_3, field2_3, field3_3
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
      local reset_us, free_reset_us
      status_3, state_3 = 0, call('GET', key_3)
      if state_3 then
        if #state_3 == STATE_BYTES then key_expires_at_3, field1_3, field2_3, field3_3 = unpack('<i8i8i8i8', state_3)
        else
          failure = state_3.err and state_3 or redis.error_reply('WRONGTYPE the key does not hold the state of a limit')
        end
      end
      if failure then
        -- Do nothing: the code at the end of the loop adds the error to the reply.
      elseif kind_3 == 'B' then
        local burst, refill, parts = a_3, b_3, c_3
        -- A token is divided into `parts` equal parts, so that all numbers are integers. `debt` is the number of parts that are
        -- missing from a full bucket. The refill repays the debt.
        local debt, clock_went_back, rate_lowered = 0, false, false
        if key_expires_at_3 then
          local updated_at, stored_parts = field1_3, field3_3
          debt = field2_3
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
          local elapsed, repay_time = now - updated_at, key_expires_at_3 - MIN_KEY_SLACK_US - updated_at
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
        local charge = cost_3 > MAX_STATE / parts and MAX_STATE or cost_3 * parts
        local charged = debt + charge
        if op == 'R' then
          -- The tokens that refilled since the charge first repaid the debt that existed before the charge. The other refilled
          -- tokens have already repaid a part of the charge itself, and are subtracted from the refund.
          local repaid_us, credit = now - charged_at - unpack('<d_3', d_3), charge
          if repaid_us >= credit / refill then credit = 0
          elseif repaid_us > 0 then credit = credit - repaid_us * refill end
          charged = debt > credit and debt - credit or 0
        end
        if charged > capacity and (op == 'C' or op == 'P') then
          status_3 = 1
          -- If the rate was lowered, write a state with the new rate, because retry_us was computed with this rate.
          if clock_went_back or rate_lowered then
            ttl_us_3, new_field1_3, new_field2_3, new_field3_3 = ceil(debt / refill), now, debt, parts
          end
        else
          if charged > MAX_STATE then charged = MAX_STATE end
          ttl_us_3 = false
          if charged > 0 then ttl_us_3, new_field1_3, new_field2_3, new_field3_3 = ceil(charged / refill), now, charged, parts end
        end
      elseif kind_3 == 'F' or kind_3 == 'X' then
        local limit, window = a_3, b_3
        local start, window_end, count, clock_went_back = now, nil, 0, false
        if kind_3 == 'F' then
          local phase = c_3
          start = now - (now - phase) % window
        elseif kind_3 == 'K' then
          local first, second, third = b_3, c_3, unpack('<d_3', d_3)
          if not (now >= first and now < third) then
            return redis.error_reply(format('RLSTALE calendar boundaries do not cover %d_3', now))
          end
          if now < second then start, window_end = first, second else start, window_end = second, third end
        end
        if key_expires_at_3 then
          local stored_start = field1_3
          count = field2_3
          if stored_start > start then clock_went_back = true
          elseif kind_3 == 'X' and now < stored_start + window then start = stored_start
          elseif stored_start < start then count = 0 end
        end
        window_end = window_end or start + window

        local charged = count + cost_3
        if op == 'R' then
          -- Refund the charge only if it was made in the current window. The count contains no charges of other windows.
          charged = charged_at >= start and charged_at < window_end and count - cost_3 or count
          if charged < 0 then charged = 0 end
        end
        if charged > limit and (op == 'C' or op == 'P') then
          status_3 = 1
          if clock_went_back and count > 0 then
            ttl_us_3, new_field1_3, new_field2_3, new_field3_3 = window_end - now, start, count, 0
          end
        else
          if charged > MAX_STATE then charged = MAX_STATE end
          ttl_us_3 = false
          if charged > 0 then ttl_us_3, new_field1_3, new_field2_3, new_field3_3 = window_end - now, start, charged, 0 end
        end
      elseif kind_3 == 'W' then
        local limit, window, unit = a_3, b_3, c_3
        local start, current, previous, clock_went_back = now - now % window, 0, 0, false
        if key_expires_at_3 then
          local stored_start = field1_3
          current, previous = field2_3, field3_3
          if stored_start > start then clock_went_back = true
          elseif stored_start == start - window then current, previous = 0, current
          elseif stored_start < start then current, previous = 0, 0 end
        end
        local elapsed, units = floor((now - start) / unit), window / unit
        free_reset_us = current > 0 and start + 2 * window - now or previous > 0 and start + window - now or 0

        local excess = (current + cost_3 - limit) * units + previous * (units - elapsed)
        if excess > 0 and (op == 'C' or op == 'P') then
          status_3 = 1
          if clock_went_back and free_reset_us > 0 then
            ttl_us_3, new_field1_3, new_field2_3, new_field3_3 = free_reset_us, start, current, previous
          end
        else
          if op ~= 'R' then current = math.min(current + cost_3, floor(MAX_STATE / 2 / units))
          elseif charged_at >= start then current = current > cost_3 and current - cost_3 or 0
          elseif charged_at >= start - window then previous = previous > cost_3 and previous - cost_3 or 0 end
          reset_us = current > 0 and start + 2 * window - now or previous > 0 and start + window - now or 0
          ttl_us_3 = false
          if reset_us > 0 then ttl_us_3, new_field1_3, new_field2_3, new_field3_3 = reset_us, start, current, previous end
        end
      else
        failure = redis.error_reply('RLARG unknown kind')
      end
      if status_3 ~= 0 then admitted = false end
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
    if ttl_us_1 and (admitted or status_1 ~= 0) and not failure then
      local slack_us = key_expires_at_1 and key_expires_at_1 - now - ttl_us_1 or 0
      if slack_us >= MIN_KEY_SLACK_US and slack_us < MAX_KEY_SLACK_US then
        local length = call('SETRANGE', key_1, '8', pack('<i8i8i8', new_field1_1, new_field2_1, new_field3_1))
        failure = length ~= STATE_BYTES and length
      else
        local ttl_ms = ceil(ttl_us_1 / 1000) + KEY_SLACK_MS
        local new_state = pack('<i8i8i8i8', now + ttl_ms * 1000, new_field1_1, new_field2_1, new_field3_1)
        local result = call('SET', key_1, new_state, 'PX', format('%d', ttl_ms))
        failure = result.err and result
      end
    end
    if ttl_us_2 and (admitted or status_2 ~= 0) and not failure then
      local slack_us = key_expires_at_2 and key_expires_at_2 - now - ttl_us_2 or 0
      if slack_us >= MIN_KEY_SLACK_US and slack_us < MAX_KEY_SLACK_US then
        local length = call('SETRANGE', key_2, '8', pack('<i8i8i8', new_field1_2, new_field2_2, new_field3_2))
        failure = length ~= STATE_BYTES and length
      else
        local ttl_ms = ceil(ttl_us_2 / 1000) + KEY_SLACK_MS
        local new_state = pack('<i8i8i8i8', now + ttl_ms * 1000, new_field1_2, new_field2_2, new_field3_2)
        local result = call('SET', key_2, new_state, 'PX', format('%d', ttl_ms))
        failure = result.err and result
      end
    end
    if ttl_us_3 and (admitted or status_3 ~= 0) and not failure then
      local slack_us = key_expires_at_3 and key_expires_at_3 - now - ttl_us_3 or 0
      if slack_us >= MIN_KEY_SLACK_US and slack_us < MAX_KEY_SLACK_US then
        local length = call('SETRANGE', key_3, '8', pack('<i8i8i8', new_field1_3, new_field2_3, new_field3_3))
        failure = length ~= STATE_BYTES and length
      else
        local ttl_ms = ceil(ttl_us_3 / 1000) + KEY_SLACK_MS
        local new_state = pack('<i8i8i8i8', now + ttl_ms * 1000, new_field1_3, new_field2_3, new_field3_3)
        local result = call('SET', key_3, new_state, 'PX', format('%d', ttl_ms))
        failure = result.err and result
      end
    end
    if failure then
      failures = failures or {}
      failures[#failures + 1], failures[#failures + 2] = key_offset, failure
    end
    replies[reply_count + 1] = failure and 'e' or admitted and 'a' or 'd'
    reply_count = reply_count + 1
    if kind_1 then
      replies[reply_count + 1] = not failure and state_1 or no_state
      reply_count = reply_count + 1
    end
    if kind_2 then
      replies[reply_count + 1] = not failure and state_2 or no_state
      reply_count = reply_count + 1
    end
    if kind_3 then
      replies[reply_count + 1] = not failure and state_3 or no_state
      reply_count = reply_count + 1
    end
  end
end
replies = table.concat(replies)
if failures then table.insert(failures, 1, replies) end
return failures or replies
