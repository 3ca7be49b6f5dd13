-- wrk: so many API keys (the first argument) in turn, another stretch of them for each of so many processes (the second and third).
local n, last, step = 0, 0, 1
init = function(arguments)
  last, step, n = tonumber(arguments[1]), tonumber(arguments[3]), tonumber(arguments[2])
end
request = function()
  n = n + step
  if n > last then n = n - last end
  return wrk.format("GET", nil, { ["X-API-Key"] = "key-" .. n, ["Host"] = "api.example.com" })
end
