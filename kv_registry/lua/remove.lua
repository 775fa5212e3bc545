-- Takes one incarnation of a replica out, with its blocks; keep in ms.
-- uses: clock, events
-- KEYS: meta, contract, due, stream, states, replica, blocks
-- ARGV: id, incarnation, reason, keep ("expired" spares a replica whose life was renewed meanwhile)
-- Gives 1 when it was a member, else 0
local meta, contract, due, stream, states, replica, blocks = unpack(KEYS)
local id, incarnation, reason, keep = unpack(ARGV)
local member = incarnation .. '/' .. id
local now = now_ms()

local deadline = redis.call('ZSCORE', due, member)
if not deadline or (reason == 'expired' and tonumber(deadline) > now) then
  return 0
end
local old = redis.call('HMGET', replica, 'incarnation', 'epoch', 'peer')
if old[1] == incarnation then
  redis.call('UNLINK', replica)
  redis.call('HDEL', states, id)
else
  old = {incarnation, whole(now), ''}
end
redis.call('UNLINK', blocks)
redis.call('ZREM', due, member)
append_event(meta, stream, keep, 'kind', 'gone', 'id', id, 'incarnation', incarnation, 'epoch', old[2],
  'reason', reason, 'peer', old[3])
if redis.call('ZCARD', due) == 0 then
  redis.call('UNLINK', contract)
end
return 1
