-- Adds amounts to the usage totals of a limit, an identity and a month: what a gateway has counted by itself. The
-- drivers add the cost that they charge themselves. A post that is sent again is added once.
--
-- KEYS[1]  The hash. Fields are days of the month, values are totals. A field that starts with `.` has the sequence
--          number of the last post of one poster.
-- ARGV[1]  Poster: an id that no other process has.
-- ARGV[2]  Sequence number of the post, greater than those of its earlier posts; 0 = the post is sent once.
-- ARGV[3]  TTL of the hash in milliseconds, from the first amount of a day on.
-- ARGV[4]  and the following: day and amount, negative for refunds and never 0.
-- Reply    1, or 0 if the post was added before.
local call, tonumber = redis.call, tonumber
local key, field, sequence, ttl_ms = KEYS[1], '.' .. ARGV[1], tonumber(ARGV[2]), ARGV[3]
if sequence > 0 then
  if tonumber(call('HGET', key, field) or '0') >= sequence then
    return 0
  end
  call('HSET', key, field, ARGV[2])
end
for i = 4, #ARGV, 2 do
  if call('HINCRBY', key, ARGV[i], ARGV[i + 1]) == tonumber(ARGV[i + 1]) then
    call('PEXPIRE', key, ttl_ms)
  end
end
return 1
