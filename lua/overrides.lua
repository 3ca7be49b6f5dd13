-- Store the quota overrides and resets of administrators in one hash, which all gateways read.
--
-- KEYS[1]  The hash.
-- ARGV[1]  Operation: `set`, `remove` or `restore`. With `set` and `remove`, an administrator changes one record. With
--          `restore`, a gateway writes back records that Redis has lost.
-- ARGV[2]  Maximum number of records of each kind. The three kinds are: overrides in force, resets in force, and
--          records that are removed or have expired.
-- ARGV[3]  The first of five arguments for each record:
--          `FIELD`  Name of the field. The name starts with `size` for an override, and with `reset` for a reset.
--          `NUMBER`  With `set`, the TTL in microseconds. With `restore`, the time at which the record expires. With
--          `remove`, 1 if the override is in force in the gateway that sends the call, otherwise 0.
--          `KEEP_UNTIL`  With `restore`, KEEP_UNTIL of the record. With `set` and `remove`, KEEP_UNTIL of the newest
--          record that the gateway knows, or 0 if the gateway knows no record.
--          `REVISION`  With `restore`, the revision of the record. With `set` and `remove`, the revision of the newest
--          record that the gateway knows, or 0 if the gateway knows no record.
--          `TEXT`  With `set` and `restore`, the text of the record. With `remove`, it is not used.
-- Reply    With `restore`, a status for each record. With `set` and `remove`, the status, the current time, and
--          EXPIRES_AT, REVISION and KEEP_UNTIL of the written record.
--          The status has one of these values:
--          `1`  The record was written.
--          `0`  No record was written: there was no record to remove, the stored record is not older than the record to
--          restore, or KEEP_UNTIL of the record to restore has passed.
--          `-1`  The hash has too many records of this kind.
--
-- The value of a field is `EXPIRES_AT REVISION KEEP_UNTIL TEXT`. All times are in microseconds since the Unix epoch. A
-- value of the form `EXPIRES_AT TEXT` has revision 0.
-- The revision of a record is the time of its write, but always greater than the revision of the record that it
-- replaces. Redis keeps a record until the record itself and all records that it replaced have expired (KEEP_UNTIL),
-- even if an administrator removes it. Otherwise a gateway that missed the change could restore a replaced record. So
-- if the hash lacks a field that a gateway knows, Redis has lost the field.
local call, floor, max, tonumber = redis.call, math.floor, math.max, tonumber
local match, format = string.match, string.format
local key, operation, max_records = KEYS[1], ARGV[1], tonumber(ARGV[2])
local time = call('TIME')
local now = time[1] * 1000000 + time[2]

-- Return the kind of a field (`size` for an override, or `reset`), or `removed` if its record is removed or expired.
local function kind_of(field, expires_at)
  return expires_at > now and match(field, '^%a+') or 'removed'
end

local records, counts, outdated_fields = {}, {}, {}
local function add_to_count(field, record, number)
  local kind = kind_of(field, record.expires_at)
  counts[kind] = (counts[kind] or 0) + number
end

local stored = call('HGETALL', key)
for i = 1, #stored, 2 do
  local field, value = stored[i], stored[i + 1]
  local expires_at, revision, keep_until = match(value, '^(%d+) (%d+) (%d+) ')
  expires_at = tonumber(expires_at or match(value, '^(%d+) ')) or 0
  local record = {
    expires_at = expires_at, revision = tonumber(revision) or 0, keep_until = tonumber(keep_until) or expires_at,
  }
  if record.keep_until <= now then
    outdated_fields[#outdated_fields + 1] = field
  else
    records[field] = record
    add_to_count(field, record, 1)
  end
end

-- Return whether other fields of the same kind already have `max_records` records.
local function is_full(field)
  local kind, old = match(field, '^%a+'), records[field]
  local replaced = old and kind_of(field, old.expires_at) == kind and 1 or 0
  return (counts[kind] or 0) - replaced >= max_records
end

local function write(field, expires_at, revision, keep_until, text)
  local record = { expires_at = expires_at, revision = revision, keep_until = keep_until }
  if records[field] then add_to_count(field, records[field], -1) end
  records[field] = record
  add_to_count(field, record, 1)
  call('HSET', key, field, format('%d %d %d ', expires_at, revision, keep_until) .. text)
  return record
end

local replies = {}
for i = 3, #ARGV, 5 do
  local field, number, keep_until = ARGV[i], tonumber(ARGV[i + 1]), tonumber(ARGV[i + 2])
  local known_revision, text = tonumber(ARGV[i + 3]), ARGV[i + 4]
  local old = records[field]
  if operation == 'restore' then
    local status, expires_at = 1, number
    if keep_until <= now or (old and old.revision >= known_revision) then
      status = 0
    elseif expires_at > now and is_full(field) then
      status = -1
    else
      write(field, expires_at, known_revision, keep_until, text)
    end
    replies[#replies + 1] = status
  else
    local revision = max(now, known_revision + 1, old and old.revision + 1 or 0)
    keep_until = max(keep_until, old and old.keep_until or 0)
    local status, written = 0, nil
    if operation == 'remove' then
      -- If the override is in force in the gateway, but Redis has lost it, also write a removed record. Otherwise
      -- another gateway could restore the override.
      local is_lost = number > 0 and (not old or old.revision < known_revision)
      if is_lost or (old and old.expires_at > now) then written = write(field, 0, revision, keep_until, '') end
    elseif is_full(field) then
      status = -1
    else
      local expires_at = now + number
      written = write(field, expires_at, revision, max(keep_until, expires_at), text)
    end
    if written then
      replies = { 1, now, written.expires_at, written.revision, written.keep_until }
    else
      replies = { status, now, 0, 0, 0 }
    end
  end
end

-- Delete records only after all HSET commands, so that Redis can reject HSET beyond `maxmemory`. After HDEL, Redis
-- would accept all writes of the script.
for i = 1, #outdated_fields do
  -- Keep the field if the loop above has written a new record to it.
  if not records[outdated_fields[i]] then call('HDEL', key, outdated_fields[i]) end
end
-- Keep at most `max_records` records that are removed or expired. If there are more, delete those with the lowest
-- revisions.
if (counts.removed or 0) > max_records then
  local removed = {}
  for field, record in pairs(records) do
    if record.expires_at <= now then removed[#removed + 1] = { field = field, revision = record.revision } end
  end
  table.sort(removed, function(one, other) return one.revision < other.revision end)
  for i = 1, #removed - max_records do
    call('HDEL', key, removed[i].field)
    records[removed[i].field] = nil
  end
end

-- Set the TTL of the hash to about one second more than the time for which its last record is kept.
local last = 0
for _, record in pairs(records) do last = max(last, record.keep_until) end
if last > now then call('PEXPIRE', key, format('%d', floor((last - now) / 1000) + 1000)) end
return replies
