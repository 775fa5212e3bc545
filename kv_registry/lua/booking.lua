-- Library: booked load of a model: prefill in µs, KV tokens, sequences; deadlines in ms. Needs clock.lua.
-- Each script that uses it has KEYS: reserved, lapses, loads, marks, mark_lapses
--   reserved     request -> record {d = member, dp, dt, ds, p = member or '', pp, k = in-flight key or ''}
--   lapses       request by deadline
--   loads        "member/p", "/t", "/s" -> sum over the records' legs; no field stands at 0
--   marks        in-flight key -> {request, replica id, member}
--   mark_lapses  in-flight key by deadline
local reserved, lapses, loads, marks, mark_lapses = unpack(KEYS)

local function load_of(member, what)
  return tonumber(redis.call('HGET', loads, member .. what) or 0)
end

local function add_load(member, what, amount)
  if amount ~= 0 then
    local field = member .. what
    if redis.call('HINCRBY', loads, field, whole(amount)) <= 0 then
      redis.call('HDEL', loads, field)
    end
  end
end

local function add_prefill(record, sign)
  add_load(record.d, '/p', sign * record.dp)
  add_load(record.p, '/p', sign * record.pp)
end

local function add_decode(record, sign)
  add_load(record.d, '/t', sign * record.dt)
  add_load(record.d, '/s', sign * record.ds)
end

local function find(request)
  local packed = redis.call('HGET', reserved, request)
  return packed and cmsgpack.unpack(packed)
end

local function keep_record(request, record)
  redis.call('HSET', reserved, request, cmsgpack.pack(record))
end

local function from_hex(text)
  return (string.gsub(text, '%x%x', function(byte) return string.char(tonumber(byte, 16)) end))
end

local function owner_of(key)
  local packed = key ~= '' and redis.call('HGET', marks, key)
  return packed and cmsgpack.unpack(packed)
end

local function erase_mark(key)
  redis.call('HDEL', marks, key)
  redis.call('ZREM', mark_lapses, key)
end

local function owns_mark(request, record)
  local owner = owner_of(record.k)
  return owner and owner[1] == request
end

local function set_mark(request, record, deadline)
  local member = record.p ~= '' and record.p or record.d
  local id = string.sub(member, string.find(member, '/', 1, true) + 1)
  redis.call('HSET', marks, record.k, cmsgpack.pack({request, id, member}))
  redis.call('ZADD', mark_lapses, whole(deadline), record.k)
end

local function book(request, record, deadline)
  add_prefill(record, 1)
  add_decode(record, 1)
  keep_record(request, record)
  redis.call('ZADD', lapses, whole(deadline), request)
end

local function drop(request, record)
  add_prefill(record, -1)
  add_decode(record, -1)
  if owns_mark(request, record) then
    erase_mark(record.k)
  end
  redis.call('HDEL', reserved, request)
  redis.call('ZREM', lapses, request)
end

-- What has lapsed never counts: first thing in every script.
local function lapse(now)
  for _, request in ipairs(redis.call('ZRANGEBYSCORE', lapses, '-inf', whole(now))) do
    drop(request, find(request))
  end
  for _, key in ipairs(redis.call('ZRANGEBYSCORE', mark_lapses, '-inf', whole(now))) do
    erase_mark(key)
  end
end

local function live_all(keep_ms)
  for _, key in ipairs(KEYS) do
    live_for(key, keep_ms)
  end
end
