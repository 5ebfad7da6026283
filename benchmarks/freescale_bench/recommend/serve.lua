-- Random histories, and with a share of events of users; each connection pauses between requests.
local threads = {}
local number = 0

function setup(thread)
  thread:set("number", number)
  number = number + 1
  table.insert(threads, thread)
end

function init(args)
  local items, events = tonumber(args[1]), tonumber(args[2])
  pause, posted, users = tonumber(args[3]), tonumber(args[4]), tonumber(args[5])
  math.randomseed(number + 1)
  bodies, statuses = {}, {}
  local function draw(count)
    local parts = {}
    for n = 1, count do
      parts[n] = "[" .. math.random(0, items - 1) .. "," .. (1700000000 + n * 3600) .. "]"
    end
    return "[" .. table.concat(parts, ",") .. "]"
  end
  for n = 1, 500 do
    bodies[n] = '{"history":' .. draw(events) .. ',"k":10,"exclude_seen":true}'
  end
  some = draw(20)
end

function request()
  if math.random() < posted then
    local body = '{"user":' .. math.random(users) .. ',"events":' .. some .. "}"
    return wrk.format("POST", "/events", nil, body)
  end
  return wrk.format("POST", "/recommend", nil, bodies[math.random(#bodies)])
end

function delay()
  return math.floor(-pause * math.log(1 - math.random()))
end

function response(status)
  statuses[status] = (statuses[status] or 0) + 1
end

-- Of all answers at most as many are later than the last percentile as 1 % of those accepted are:
-- it bounds their 99th percentile from above.
function done(summary, latency)
  local accepted, all, found = 0, 0, {}
  for _, thread in ipairs(threads) do
    for status, count in pairs(thread:get("statuses")) do
      found[status], all = (found[status] or 0) + count, all + count
      if tonumber(status) == 200 then accepted = accepted + count end
    end
  end
  local parts = {}
  for status, count in pairs(found) do
    table.insert(parts, string.format('"%d": %d', status, count))
  end
  local bound = 100 - math.max(accepted / math.max(all, 1), 0.001)
  print(string.format(
    '{"statuses": {%s}, "seconds": %f, "p50_ms": %f, "p99_ms": %f, "accepted_p99_ms": %f, "errors": %d}',
    table.concat(parts, ", "), summary.duration / 1e6, latency:percentile(50) / 1e3,
    latency:percentile(99) / 1e3, latency:percentile(bound) / 1e3,
    summary.errors.connect + summary.errors.read + summary.errors.write + summary.errors.timeout))
end
