-- Kinds F and X, fixed window. a the limit, b the window in microseconds.
-- F: windows aligned to the epoch, shifted by c (phase). X: the window opens with the first request.
-- State `start:count` of the window that opened at `start`; an older one counts as empty.
local function fixed_window(op, cost, limit, start, finish, count, behind, idle_reset)
  local free, reset = limit - count, finish - now
  local free_reset = count == 0 and idle_reset or reset
  if op == 'R' then
    local rest = count
    if charged_at >= start and charged_at < finish then rest = count - cost end
    if rest <= 0 then return 0, limit, idle_reset, 0, free, free_reset, false end
    return 0, limit - rest, reset, 0, free, free_reset, text(start) .. ':' .. text(rest), reset
  end
  local charged = count + cost
  if op ~= 'A' and charged > limit then
    local mended = behind and count > 0 and text(start) .. ':' .. text(count) or nil
    if cost > limit then return 2, free, free_reset, -1, free, free_reset, mended, reset end
    return 1, free, free_reset, reset, free, free_reset, mended, reset
  end
  if charged == 0 then return 0, limit, idle_reset, 0, free, free_reset, false end
  return 0, limit - charged, reset, 0, free, free_reset, text(start) .. ':' .. text(charged), reset
end

local function window_state(key)
  local state = call('GET', key)
  if not state then return nil, 0 end
  local start, count = match(state, '^(%d+):(%d+)$')
  return tonumber(start), tonumber(count)
end

kinds.F = function(key, op, cost, limit, window, phase)
  local start = now - (now - phase) % window
  local opened, count = window_state(key)
  if opened and opened < start then count = 0 end
  local finish = start + window
  return fixed_window(op, cost, limit, start, finish, count, opened and opened > start, finish - now)
end

kinds.X = function(key, op, cost, limit, window)
  local opened, count = window_state(key)
  local start, behind = now, false
  if opened and opened > now then behind = true
  elseif opened and now < opened + window then start = opened
  else count = 0 end
  return fixed_window(op, cost, limit, start, start + window, count, behind, 0)
end
