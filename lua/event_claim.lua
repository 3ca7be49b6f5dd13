-- Claims a quota event, so that only one of several gateways sends the event. If the destination is a Redis stream, the
-- same call adds the event to the stream. If XADD fails, the event is not claimed. If a gateway did not get the reply,
-- it may send the same call again: the script does not add the event to the stream a second time.
--
-- KEYS[1]  Key of the claim, a string. Its value is the id of the event that was the first to claim the key.
-- KEYS[2]  Optional: key of the stream, in the same Redis Cluster slot as the claim.
-- ARGV[1]  Id of the event.
-- ARGV[2]  TTL of the claim in milliseconds. During this time, no other event can get the claim.
-- ARGV[3]  Only with KEYS[2]: approximate number of entries that the stream keeps.
-- ARGV[4]  Only with KEYS[2]: the event as JSON.
-- Reply    1 if the event has the claim, 0 if another event has the claim, or the error reply of XADD.
local call = redis.call
if not call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then
  return call('GET', KEYS[1]) == ARGV[1] and 1 or 0
end
if KEYS[2] then
  local added = redis.pcall('XADD', KEYS[2], 'MAXLEN', '~', ARGV[3], '*', 'id', ARGV[1], 'event', ARGV[4])
  if type(added) == 'table' and added.err then
    -- Delete the claim, because Redis does not undo the writes of a script that returns an error.
    call('DEL', KEYS[1])
    return added
  end
end
return 1
