-- Stores the overrides and resets of operators in one hash for all gateways.
--
-- KEYS[1]  the hash
-- ARGV[1]  set, remove or restore
-- ARGV[2]  maximum number of overrides, of resets, and of removed or expired overrides
-- ARGV[3]  and on, five for each record:
--            field
--            set: TTL in microseconds; restore: instant at which it expires; remove: unused
--            instant until which the record is kept, as far as the gateway knows it; 0 = unknown
--            revision that the gateway knows, 0 = none; restore: revision of the record
--            text
-- Reply    restore: a status for each record; set and remove: status, now, expiry, revision, kept
--          status 1 = written; 0 = nothing to remove, or the hash has this revision or a newer one; -1 = too many records
--
-- A value is `EXPIRY REVISION KEPT TEXT`, instants in microseconds; `EXPIRY TEXT` is read as revision 0. A revision is the
-- time of the write, and greater than the revision that it replaces. A removed override, and one that expires before the
-- record that it replaced, is kept as long as any record that it replaced: a gateway that missed the change cannot restore
-- the replaced record. A field that a gateway knows is therefore missing only if Redis lost it.
local call, floor, max, tonumber, match, format = redis.call, math.floor, math.max, tonumber, string.match, string.format
local key, operation, most = KEYS[1], ARGV[1], tonumber(ARGV[2])
local time = call('TIME')
local now = time[1] * 1000000 + time[2]

-- What a record counts as.
local function kind(field, expiry)
  return expiry > now and match(field, '^%a+') or 'removed'
end

local records, counts, ended = {}, {}, {}
local function count(field, record, by)
  local of = kind(field, record.expiry)
  counts[of] = (counts[of] or 0) + by
end

local all = call('HGETALL', key)
for i = 1, #all, 2 do
  local field, value = all[i], all[i + 1]
  local expiry, revision, kept = match(value, '^(%d+) (%d+) (%d+) ')
  expiry = tonumber(expiry or match(value, '^(%d+) ')) or 0
  local record = { expiry = expiry, revision = tonumber(revision) or 0, kept = tonumber(kept) or expiry }
  if record.kept <= now then
    ended[#ended + 1] = field
  else
    records[field] = record
    count(field, record, 1)
  end
end

local function is_full(field)
  local of, old = match(field, '^%a+'), records[field]
  local own = old and kind(field, old.expiry) == of and 1 or 0
  return (counts[of] or 0) - own >= most
end

local function write(field, expiry, revision, kept, text)
  local record = { expiry = expiry, revision = revision, kept = kept }
  if records[field] then count(field, records[field], -1) end
  records[field] = record
  count(field, record, 1)
  call('HSET', key, field, format('%d %d %d ', expiry, revision, kept) .. text)
  return record
end

local replies = {}
for i = 3, #ARGV, 5 do
  local field, lasts, kept, known, text = ARGV[i], tonumber(ARGV[i + 1]), tonumber(ARGV[i + 2]), tonumber(ARGV[i + 3]), ARGV[i + 4]
  local old = records[field]
  if operation == 'restore' then
    local status = 1
    if kept <= now or (old and old.revision >= known) then
      status = 0
    elseif lasts > now and is_full(field) then
      status = -1
    else
      write(field, lasts, known, kept, text)
    end
    replies[#replies + 1] = status
  else
    local revision = max(now, known + 1, old and old.revision + 1 or 0)
    kept = max(kept, old and old.kept or 0)
    local status, written = 0, nil
    if operation == 'remove' then
      -- Redis may have lost what the gateway still has in force.
      local lost = lasts > 0 and (not old or old.revision < known)
      if lost or (old and old.expiry > now) then written = write(field, 0, revision, kept, '') end
    elseif is_full(field) then
      status = -1
    else
      written = write(field, now + lasts, revision, max(kept, now + lasts), text)
    end
    if written then
      replies = { 1, now, written.expiry, written.revision, written.kept }
    else
      replies = { status, now, 0, 0, 0 }
    end
  end
end

-- After the writes: once something is deleted, Redis accepts a write beyond `maxmemory`. A write may have replaced the record.
for i = 1, #ended do
  if not records[ended[i]] then call('HDEL', key, ended[i]) end
end
-- The oldest removals are forgotten first.
if (counts.removed or 0) > most then
  local removed = {}
  for field, record in pairs(records) do
    if record.expiry <= now then removed[#removed + 1] = { field = field, revision = record.revision } end
  end
  table.sort(removed, function(one, other) return one.revision < other.revision end)
  for i = 1, #removed - most do
    call('HDEL', key, removed[i].field)
    records[removed[i].field] = nil
  end
end

-- The hash expires with its last record.
local last = 0
for _, record in pairs(records) do last = max(last, record.kept) end
if last > now then call('PEXPIRE', key, format('%d', floor((last - now) / 1000) + 1000)) end
return replies
