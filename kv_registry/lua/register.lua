-- Enters a replica if the pool's contract allows; lives in ms of the store's clock.
-- uses: clock, events
-- KEYS: meta, contract, due, stream, states, replica, blocks, void, previous blocks, previous void
-- ARGV: id, incarnation, incarnation before as the caller read it, ttl, grace, keep, new store epoch, events kept,
--       entry, peer, identity, then the contract as field, value, field, value ...
-- Gives {'ok', epoch} | {'mismatch', field, expected, got} | {'void'} | {'again'} (another incarnation came between)
local meta, contract, due, stream, states, replica, blocks, void = unpack(KEYS, 1, 8)
local id, incarnation, before, ttl, grace, keep = unpack(ARGV, 1, 6)
local now = now_ms()

if redis.call('EXISTS', void) == 1 then
  return {'void'}
end
if (redis.call('HGET', replica, 'incarnation') or '') ~= before then
  return {'again'}
end

if redis.call('HEXISTS', meta, 'epoch') == 0 then
  -- Numbers begin at the clock: those of a store that was lost never come back.
  redis.call('UNLINK', meta, stream, contract, due, states)
  redis.call('HSET', meta, 'epoch', ARGV[7], 'event', whole(now), 'events_max', ARGV[8])
end

-- The contract holds while it has another member than this id.
local others = redis.call('ZCARD', due) - (redis.call('ZSCORE', due, before .. '/' .. id) and 1 or 0)
if others == 0 then
  redis.call('UNLINK', contract)
end
for at = 12, #ARGV, 2 do
  local held = redis.call('HGET', contract, ARGV[at])
  if held and held ~= ARGV[at + 1] then
    return {'mismatch', ARGV[at], held, ARGV[at + 1]}
  end
end

local epoch = whole(math.max(now, (redis.call('HGET', meta, 'registration') or 0) + 1))
redis.call('HSET', meta, 'registration', epoch)

local function tell(kind, told_incarnation, told_epoch, ...)
  return append_event(meta, stream, keep, 'kind', kind, 'id', id, 'incarnation', told_incarnation, 'epoch', told_epoch, ...)
end

if before ~= '' and before ~= incarnation then
  local old = redis.call('HMGET', replica, 'epoch', 'peer')
  redis.call('UNLINK', KEYS[9])
  redis.call('SET', KEYS[10], 1, 'PX', keep)
  redis.call('ZREM', due, before .. '/' .. id)
  tell('gone', before, old[1], 'reason', 'replaced', 'peer', old[2])
end

redis.call('UNLINK', blocks, replica)
redis.call('HDEL', states, id)
redis.call('HSET', replica, 'store', redis.call('HGET', meta, 'epoch'), 'incarnation', incarnation, 'epoch', epoch,
  'entry', ARGV[9], 'peer', ARGV[10], 'seq', 0, 'count', 0, 'xor', string.rep('\0', 16))
redis.call('PEXPIRE', replica, ttl + grace)
redis.call('ZADD', due, whole(now + ttl), incarnation .. '/' .. id)
live_for(due, keep)
if redis.call('EXISTS', contract) == 0 then
  redis.call('HSET', contract, '@identity', ARGV[11], unpack(ARGV, 12))
end
live_for(contract, ttl + grace)
local last = tell('replica', incarnation, epoch, 'entry', ARGV[9])
if before == incarnation then
  last = tell('blocks', incarnation, epoch, 'peer', ARGV[10], 'seq', 0, 'cleared', 1, 'count', 0,
    'xor', string.rep('\0', 16))
end
redis.call('HSET', replica, 'event', last)
return {'ok', epoch}
