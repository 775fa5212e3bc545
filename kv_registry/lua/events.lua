-- Library: numbered events of a model; lives in ms. Numbers have no gaps, so a reader sees what was trimmed or lost.
-- Needs clock.lua. `meta` holds epoch (of this store), event (last number), registration (last one).

-- Gives the event's number. What an event tells of a replica is noted with it in the entry's field `event`, so that a
-- reader of the entry knows which events it has seen the effect of.
local function append_event(meta, stream, keep_ms, ...)
  local number = redis.call('HINCRBY', meta, 'event', 1)
  redis.call('XADD', stream, 'MAXLEN', '~', redis.call('HGET', meta, 'events_max') or 1, whole(number) .. '-1', ...)
  live_for(stream, keep_ms)
  live_for(meta, keep_ms)
  return whole(number)
end

-- True when the replica's entry is of this store, this incarnation and this registration.
local function is_current(meta, replica, incarnation, epoch)
  local store = redis.call('HGET', meta, 'epoch')
  local entry = redis.call('HMGET', replica, 'store', 'incarnation', 'epoch')
  return store and entry[1] == store and entry[2] == incarnation and entry[3] == epoch
end
