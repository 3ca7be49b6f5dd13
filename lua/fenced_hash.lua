-- A hash that only the owner of its lock can change. Each lock has a fencing token, which is greater than the tokens of
-- all earlier locks.
--
-- KEYS[1]  The hash. Field names that start with `.` are reserved for this script.
-- ARGV[1]  Operation: read, lock, unlock or write.
-- ARGV[2]  `read`  Version of the hash that the caller has, or 0 if the caller has none.
--          `lock`  Name of the owner.
--          `unlock`, `write`  Fencing token.
-- ARGV[3]  `lock`  TTL of the lock in microseconds.
--          `write`  Name of the first field. ARGV[4] is its value. Names and values of other fields may follow. An
--          empty value removes the field.
-- Reply    `read`  The version. If the caller has a different version, all fields and values follow.
--          `lock`  The fencing token, or 0 if another owner holds the lock. If the caller already holds the lock, the
--          script renews the TTL and returns the same token.
--          `unlock`, `write`  1, or 0 if the token is not that of the last lock. With 0, the hash is unchanged.
local call, format, sub, tonumber = redis.call, string.format, string.sub, tonumber
local key, operation, argument = KEYS[1], ARGV[1], ARGV[2]
local stored, hash = call('HGETALL', key), {}
for i = 1, #stored, 2 do
  hash[stored[i]] = stored[i + 1]
end

if operation == 'read' then
  local reply = { hash['.version'] or '0' }
  if reply[1] ~= argument then
    for field, value in pairs(hash) do
      if sub(field, 1, 1) ~= '.' then
        reply[#reply + 1] = field
        reply[#reply + 1] = value
      end
    end
  end
  return reply
end

local time = call('TIME')
local now = time[1] * 1000000 + time[2]
if operation == 'lock' then
  local token, is_held = tonumber(hash['.token'] or '0'), tonumber(hash['.until'] or '0') > now
  if is_held and hash['.owner'] ~= argument then
    return 0
  end
  -- Tokens and versions are at least the current time, so that they increase even if Redis loses the hash.
  if not is_held then
    token = now > token and now or token + 1
  end
  call('HSET', key, '.token', format('%.0f', token), '.owner', argument, '.until', format('%.0f', now + tonumber(ARGV[3])))
  return token
end

if hash['.token'] ~= argument then
  return 0
end
if operation == 'unlock' then
  call('HDEL', key, '.owner', '.until')
  return 1
end
for i = 3, #ARGV, 2 do
  if ARGV[i + 1] == '' then
    call('HDEL', key, ARGV[i])
  else
    call('HSET', key, ARGV[i], ARGV[i + 1])
  end
end
local version = tonumber(hash['.version'] or '0')
call('HSET', key, '.version', format('%.0f', now > version and now or version + 1))
return 1
