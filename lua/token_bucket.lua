-- Kind B, token bucket (GCRA and the leaky bucket as a meter are the same thing).
-- a burst in tokens, b/c the refill rate in tokens per microsecond, reduced. d, of R: for how many microseconds the bucket refilled to
-- pay the debt that it had before the refunded charge, rounded down.
-- State: x, y, z: at x the bucket lacked y parts of 1/z token.
elseif kind == 'B' then
  local debt, behind, lowered, capacity = 0, false, false, a * c
  if ends then
    debt = y
    if z ~= c then
      -- The rate was changed: the same debt, in parts of the new size, rounded up. Beyond 2^53 the product is not exact: then the
      -- error of two operations is below one part, and one part more is never too few.
      local rest = debt % z
      local product = rest * c
      local converted = product < 9007199254740992 and ceil(product / z) or ceil(rest / z * c) + 1
      debt = math.min((debt - rest) / z * c + converted, most)
    end
    -- The rate at which the state was written repays the debt within `span`: the key lasts half a second longer, or up to 1.001 s.
    local passed, needed, span = now - x, debt / b, ends - 500000 - x
    if passed < 0 then behind = true
    elseif needed > span then
      -- The rate was lowered: what the earlier one has repaid by now is not owed again. Rounded as above.
      local left = span - passed
      if left <= 0 then debt = 0
      else
        -- 1.0: a double also in Lua 5.4, whose integers overflow.
        local product = 1.0 * debt * left
        local owed = product < 9007199254740992 and ceil(product / span) or ceil(debt / span * left) + 1
        debt, lowered = math.min(owed, debt - passed * b), true
      end
    elseif passed >= needed then debt = 0
    else debt = debt - passed * b end
  end
  free, free_reset = floor((capacity - debt) / c), ceil(debt / b)
  -- A cost that is paid for later may be any.
  local parts = cost > most / c and most or cost * c
  local owed = debt + parts
  if asked == 'R' then
    -- Refill since the charge first pays the debt before it, for d microseconds. Later refill pays the charge and is subtracted.
    local passed = now - charged_at - unpack('<d', d)
    if passed >= parts / b then parts = 0
    elseif passed > 0 then parts = parts - passed * b end
    owed = debt > parts and debt - parts or 0
  end
  if owed > capacity and (asked == 'C' or asked == 'P') then
    remaining, reset = free, free_reset
    if cost > a then status, retry = 2, -1
    else status, retry = 1, ceil((owed - capacity) / b) end
    -- The retry is told for the new rate, which applies from now on.
    if behind or lowered then lasts, x, y, z = reset, now, debt, c end
  else
    if owed > most then owed = most end
    remaining, reset, lasts = floor((capacity - owed) / c), ceil(owed / b), false
    if owed > 0 then lasts, x, y, z = reset, now, owed, c end
  end
