-- Renews a replica's life; ttl, grace and keep in ms.
-- uses: clock, events
-- KEYS: meta, contract, due, stream, states, replica, blocks
-- ARGV: id, incarnation, epoch, ttl, grace, keep, beat, flags (state that watchers must learn at once when it changes)
-- Gives {register again, snapshot wanted} as 0 or 1
local meta, contract, due, stream, states, replica, blocks = unpack(KEYS)
local id, incarnation, epoch, ttl, grace, keep, beat, flags = unpack(ARGV)

if not is_current(meta, replica, incarnation, epoch) then
  return {1, 0}
end
local now = now_ms()
redis.call('ZADD', due, whole(now + ttl), incarnation .. '/' .. id)
-- Others may have a longer ttl: what the members share lives as long as the longest.
for _, shared in ipairs({meta, due}) do
  live_for(shared, keep)
end
live_for(contract, ttl + grace)
redis.call('PEXPIRE', replica, ttl + grace)
redis.call('PEXPIRE', blocks, ttl + grace)
redis.call('HSET', states, id, whole(now) .. ':' .. beat)
live_for(states, keep)

local told = redis.call('HMGET', replica, 'flags', 'wanted')
if told[1] ~= flags then
  redis.call('HSET', replica, 'flags', flags)
  append_event(meta, stream, keep, 'kind', 'beat', 'id', id, 'incarnation', incarnation, 'epoch', epoch, 'beat', beat)
end
return {0, told[2] and 1 or 0}
