-- Sliding buckets, kind S: the window is divided into buckets. The oldest bucket is only partly in the window, but all
-- its tokens count. Therefore no window contains more than `limit` tokens, whatever the time at which it begins.
-- Parameter `a` (limit): maximum number of tokens in any window.
-- Parameter `b` (window): window length in microseconds.
-- Parameter `c` (buckets): number of buckets. The window length is a multiple of this number.
-- State: the text `index:n0,n1,...`. `index` is the number of the newest bucket, counted from the Unix epoch. n0 is the
-- number of tokens in this bucket, n1 the number in the bucket before it, and so on. The last number belongs to
-- the oldest bucket that has tokens.
local call, floor, match, format = redis.call, math.floor, string.match, string.format
local MAX_STATE
local memo
local key, op, cost, a, b, c, now, charged_at
local status, remaining, reset_us, retry_us, free, free_reset_us, ttl_us, new_state
--@body
local limit, window, buckets = a, b, c
local width = floor(window / buckets)
local index = floor(now / width)
-- The number of tokens in each bucket by age, as text. The newest bucket has age 0. A script that converts these texts
-- to numbers and back would need twice as much time.
local counts, total, clock_went_back = {}, 0, false
local parsed = memo and memo[key]
if parsed then counts, total, clock_went_back = parsed.counts, parsed.total, parsed.clock_went_back
else
  local age, state = 0, call('GET', key)
  if state then
    local stored_index, stored_counts = match(state, '^(%d+):(.*)$')
    local elapsed = index - tonumber(stored_index)
    if elapsed < 0 then elapsed, clock_went_back = 0, true end
    while age < elapsed and age <= buckets do counts[age], age = '0', age + 1 end
    for count in string.gmatch(stored_counts, '%d+') do
      if age > buckets then break end
      counts[age], total, age = count, total + count, age + 1
    end
  end
  while age <= buckets do counts[age], age = '0', age + 1 end
  if memo then memo[key] = { counts = counts, total = total, clock_went_back = clock_went_back } end
end
-- Return the time in microseconds until a bucket is completely outside the window.
local function dropped_after_us(age) return (index - age + buckets + 1) * width - now end
local function until_empty()
  for age = 0, buckets do
    if counts[age] ~= '0' then return dropped_after_us(age) end
  end
  return 0
end
local function encode()
  local last = buckets
  while counts[last] == '0' do last = last - 1 end
  return format('%d:', index) .. table.concat(counts, ',', 0, last)
end
free, free_reset_us = limit - total, until_empty()

if total + cost > limit and (op == 'C' or op == 'P') then
  remaining, reset_us = free, free_reset_us
  if cost > limit then status, retry_us = 2, -1
  else
    -- Find the newest bucket that must leave the window so that the cost fits. The loop ends, because the cost alone
    -- does not exceed the limit.
    local excess, age = total + cost - limit, buckets
    while excess > tonumber(counts[age]) do excess, age = excess - counts[age], age - 1 end
    status, retry_us = 1, dropped_after_us(age)
  end
  if clock_went_back and total > 0 then new_state, ttl_us = encode(), reset_us end
else
  local age, change = 0, cost
  if op == 'R' then
    age = index - floor(charged_at / width)
    local count = age >= 0 and age <= buckets and tonumber(counts[age]) or 0
    change = -(count < cost and count or cost)
  end
  if total + change > MAX_STATE then change = MAX_STATE - total end
  if change ~= 0 then counts[age], total = format('%d', counts[age] + change), total + change end
  remaining, reset_us, ttl_us = limit - total, until_empty(), false
  if total > 0 and op ~= 'P' then new_state, ttl_us = encode(), reset_us end
end
