-- Deletes states of one identity: those in the value of its key (see states.lua), and those with separate keys.
--
-- KEYS[1]  Key of the identity.
-- KEYS[2…] Separate keys of the states.
-- ARGV[1]  Ids of the states in the value: little-endian doubles.
-- Reply    1 if a state was deleted, otherwise 0.
local call, keys, ids, pack, unpack, sub = redis.call, KEYS, ARGV[1], struct.pack, struct.unpack, string.sub
local HEADER_BYTES, HEAD_BYTES, BODY_BYTES, STATE_BYTES = 8, 16, 24, 40
local deleted = 0
for i = 2, #keys do
  if call('DEL', keys[i]) == 1 then deleted = 1 end
end
local value = call('GET', keys[1])
if not value then return deleted end
if #value % STATE_BYTES ~= HEADER_BYTES then
  return redis.error_reply('WRONGTYPE the key does not hold the states of an identity')
end
local expires_at = unpack('<d', value)
local states, heads, bodies = (#value - HEADER_BYTES) / STATE_BYTES, {}, {}
for index = 1, states do
  local head = HEADER_BYTES + HEAD_BYTES * (index - 1) + 1
  local body = HEADER_BYTES + HEAD_BYTES * states + BODY_BYTES * (index - 1) + 1
  local is_kept = true
  for at = 1, #ids, 8 do
    if sub(ids, at, at + 7) == sub(value, head, head + 7) then is_kept = false end
  end
  if is_kept then
    heads[#heads + 1] = sub(value, head, head + HEAD_BYTES - 1)
    bodies[#bodies + 1] = sub(value, body, body + BODY_BYTES - 1)
  end
end
local new_value = pack('<d', expires_at) .. table.concat(heads) .. table.concat(bodies)
if #new_value == #value then return deleted end
if #heads == 0 then call('DEL', keys[1])
else
  local time = call('TIME')
  local ttl_ms = math.ceil((expires_at - time[1] * 1000000 - time[2]) / 1000)
  -- The TTL stays the same. Only if the clock of Redis was set forward, the time of the expiry is in the past.
  call('SET', keys[1], new_value, 'PX', string.format('%d', ttl_ms > 1000 and ttl_ms or 1000))
end
return 1
