-- Renews, moves or ends booked legs; µs, tokens, sequences; ttl and linger in ms.
-- uses: clock, booking
-- KEYS: as in booking.lua
-- ARGV: keep (ms), linger (ms that an in-flight mark outlives its prefill, until the block is published),
--       JSON list of {action, request, ttl, d = leg or null, p = leg or null} (legs as in reserve.lua)
-- Gives for each 1, or 0 when the reservation was not there
local now = now_ms()
lapse(now)

local function leg_or_nil(leg)
  return leg ~= cjson.null and leg or nil
end

local actions = {}

function actions.renew(request, record, asked)
  redis.call('ZADD', lapses, whole(now + asked.ttl), request)
  local prefilling = record.pp > 0 or record.dp > 0
  if prefilling and owns_mark(request, record) then
    redis.call('ZADD', mark_lapses, whole(now + asked.ttl), record.k)
  end
end

function actions.end_prefill(request, record)
  add_prefill(record, -1)
  record.p, record.pp, record.dp = '', 0, 0
  keep_record(request, record)
  if owns_mark(request, record) then
    redis.call('ZADD', mark_lapses, whole(now + ARGV[2]), record.k)
  end
end

actions['end'] = function(request, record)
  drop(request, record)
end

function actions.move_prefill(request, record, asked)
  local leg = leg_or_nil(asked.p)
  add_prefill(record, -1)
  -- Without a leg the prompt is read at the decode replica from now on.
  record.p, record.pp = leg and leg.m or '', leg and leg.p or 0
  record.dp = asked.d ~= cjson.null and asked.d.p or 0
  add_prefill(record, 1)
  keep_record(request, record)
  if asked.ttl > 0 then
    redis.call('ZADD', lapses, whole(now + asked.ttl), request)
  end
  if owns_mark(request, record) then
    set_mark(request, record, redis.call('ZSCORE', mark_lapses, record.k))
  end
end

function actions.clear_inflight(request, record)
  if owns_mark(request, record) then
    erase_mark(record.k)
  end
end

local function rebook(asked, record)
  if record then
    drop(asked.request, record)
  end
  local prefill = leg_or_nil(asked.p)
  book(asked.request, {d = asked.d.m, dp = asked.d.p, dt = asked.d.t, ds = asked.d.s,
    p = prefill and prefill.m or '', pp = prefill and prefill.p or 0, k = ''}, now + asked.ttl)
end

local answers = {}
for at, asked in ipairs(cjson.decode(ARGV[3])) do
  local record = find(asked.request)
  if asked.action == 'rebook' then
    rebook(asked, record)
  elseif record then
    actions[asked.action](asked.request, record, asked)
  end
  answers[at] = (record or asked.action == 'rebook') and 1 or 0
end
live_all(ARGV[1])
return answers
