-- Kind B, token bucket (GCRA and the leaky bucket as a meter are the same thing).
-- a burst in tokens, b/c the refill rate in tokens per microsecond, reduced.
-- State `last:debt:c`: at `last` the bucket lacked `debt` parts of 1/c token.
kinds.B = function(key, op, cost, burst, n, p)
  local last, debt, behind = now, 0, false
  local state = call('GET', key)
  if state then
    local written, owed, parts = match(state, '^(%d+):(%d+):(%d+)$')
    last, debt, parts = tonumber(written), tonumber(owed), tonumber(parts)
    -- The rate was changed: the same debt, in parts of the new size.
    if parts ~= p then debt = ceil(debt / parts * p) end
    if last > now then last, behind = now, true end
    local refilled = (now - last) * n
    if refilled >= debt then debt = 0 else debt = debt - refilled end
  end
  local capacity = burst * p
  local free, reset = floor((capacity - debt) / p), ceil(debt / n)
  if op == 'R' then
    local rest = debt - cost * p
    if rest <= 0 then return 0, burst, 0, 0, free, reset, false end
    local refund_reset = ceil(rest / n)
    return 0, floor((capacity - rest) / p), refund_reset, 0, free, reset, text(now) .. ':' .. text(rest) .. ':' .. text(p), refund_reset
  end
  local charged = debt + cost * p
  if op ~= 'A' and charged > capacity then
    local mended = behind and text(now) .. ':' .. text(debt) .. ':' .. text(p) or nil
    if cost > burst then return 2, free, reset, -1, free, reset, mended, reset end
    return 1, free, reset, ceil((charged - capacity) / n), free, reset, mended, reset
  end
  if charged == 0 then return 0, burst, 0, 0, free, reset, false end
  local charged_reset = ceil(charged / n)
  return 0, floor((capacity - charged) / p), charged_reset, 0, free, reset, text(now) .. ':' .. text(charged) .. ':' .. text(p), charged_reset
end
