-- A script for wrk: the requests use many API keys in turn. Arguments: the number of keys, the number after which to
-- start, and the step to the next key. If several wrk processes run, each gets a different start, and the step is the
-- number of processes.
local n, last, step = 0, 0, 1
init = function(arguments)
  last, step, n = tonumber(arguments[1]), tonumber(arguments[3]), tonumber(arguments[2])
end
request = function()
  n = n + step
  if n > last then n = n - last end
  return wrk.format("GET", nil, { ["X-API-Key"] = "key-" .. n, ["Host"] = "api.example.com" })
end
