-- Adds a post to the usage totals of a limit, an identity and a month. A post is a list of amounts that a gateway has
-- counted itself: cost that it charged while Redis was unavailable, cost by model, and tokens by kind. The drivers
-- (generic.lua, single.lua and small.lua) already add the cost that they charge. If a gateway sends the same post again,
-- the script does not add it a second time.
--
-- KEYS[1]  The hash of totals. In a hash of days, a field name is a day of the month (`23`). In a hash of models, it is
--          a day, a space and a model (`23 MODEL`). A hash of kinds of tokens has the names of kinds instead of models,
--          here and below. The value of the field is the total.
--          The names of other fields start with `.`:
--          `.POSTER`  Sequence number of the last post of this poster.
--          `.models`  Number of models in the hash.
--          `.=MODEL`  Exists for each model in the hash.
-- ARGV[1]  Poster: the id of the process that sends the post. No other process has this id.
-- ARGV[2]  Sequence number of the post, greater than the numbers of all earlier posts of this poster. With 0, the
--          script does not detect a repeated post. The poster must then not send the post again if Redis may have
--          executed it.
-- ARGV[3]  TTL of the hash in milliseconds. The first amount of each field renews the TTL.
-- ARGV[4]  Maximum number of models in the hash. Amounts of additional models are not added.
-- ARGV[5]  Pairs of a field name and the amount to add start here. Amounts of refunds are negative. No amount is 0.
-- Reply    1, or 0 if an earlier call has already added the post.
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
