-- Adds amounts that a gateway has counted to the usage totals of a limit, an identity and a month. The drivers already
-- add the cost that they charge. If a gateway sends the same amounts again, they are added only once.
--
-- KEYS[1]  The hash. Fields are days of the month, or in another hash a day, a space and a model; values are totals. A
--          field that starts with `.` has the sequence number of the last post of one poster, `.models` the number of
--          models, and `.=` with a model is set if the model is one of them.
-- ARGV[1]  Poster: an id that no other process has.
-- ARGV[2]  Sequence number of the post, greater than those of its earlier posts; 0 = the post is sent once.
-- ARGV[3]  TTL of the hash in milliseconds, from the first amount of a field on.
-- ARGV[4]  Maximum number of models of the hash. Amounts of others are not added.
-- ARGV[5]  and the following: field and amount, negative for refunds and never 0.
-- Reply    1, or 0 if the post was added before.
local call, tonumber = redis.call, tonumber
local key, marker, sequence, ttl_ms = KEYS[1], '.' .. ARGV[1], tonumber(ARGV[2]), ARGV[3]

local function has_total(field)
  local space = string.find(field, ' ', 1, true)
  if not space then
    return true
  end
  local name = '.=' .. string.sub(field, space + 1)
  if call('HGET', key, name) then
    return true
  end
  local models = tonumber(call('HGET', key, '.models') or '0')
  if models >= tonumber(ARGV[4]) then
    return false
  end
  call('HSET', key, name, 1)
  call('HSET', key, '.models', models + 1)
  return true
end

if sequence > 0 then
  if tonumber(call('HGET', key, marker) or '0') >= sequence then
    return 0
  end
  call('HSET', key, marker, ARGV[2])
end
for i = 5, #ARGV, 2 do
  if has_total(ARGV[i]) and call('HINCRBY', key, ARGV[i], ARGV[i + 1]) == tonumber(ARGV[i + 1]) then
    call('PEXPIRE', key, ttl_ms)
  end
end
return 1
