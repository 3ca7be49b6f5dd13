-- Claims a quota event, so that only one of several gateways sends the event. If the destination is a Redis stream, the
-- same call adds the event to the stream. If a call is sent again, its reply is the same and it adds nothing. If the
-- event cannot be added, it is not claimed.
--
-- KEYS[1]  The claim: the id of the event, for the period in which there is one event.
-- KEYS[2]  Optional: the stream, in the slot of the claim.
-- ARGV[1]  Id of the event.
-- ARGV[2]  TTL of the claim in milliseconds.
-- ARGV[3]  With a stream: number of entries to keep, approximately.
-- ARGV[4]  With a stream: the event as JSON.
-- Reply    1, or 0 if another event has the claim, or the error of XADD.
local call = redis.call
if not call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then
  return call('GET', KEYS[1]) == ARGV[1] and 1 or 0
end
if KEYS[2] then
  local added = redis.pcall('XADD', KEYS[2], 'MAXLEN', '~', ARGV[3], '*', 'id', ARGV[1], 'event', ARGV[4])
  if type(added) == 'table' and added.err then
    -- Redis does not undo the writes of a script that fails.
    call('DEL', KEYS[1])
    return added
  end
end
return 1
