-- Puts a complete staged snapshot in the place of the block set; keep in ms.
-- uses: clock, events
-- KEYS: meta, stream, replica, blocks, staged   ARGV: id, incarnation, epoch, keep, seq, count, xor
-- Gives 1, or 0 when chunks are missing or the registration is not current
-- The event tells only that there is a new set: readers fetch it, so that the stream stays small.
local meta, stream, replica, blocks, staged = unpack(KEYS)
local id, incarnation, epoch, keep, seq, count, sum = unpack(ARGV)

if not is_current(meta, replica, incarnation, epoch) or redis.call('SCARD', staged) ~= tonumber(count) then
  redis.call('UNLINK', staged)
  return 0
end
if count == '0' then
  redis.call('UNLINK', blocks)
else
  redis.call('RENAME', staged, blocks)
  redis.call('PEXPIRE', blocks, redis.call('PTTL', replica))
end
local number = append_event(meta, stream, keep, 'kind', 'snapshot', 'id', id, 'incarnation', incarnation,
  'epoch', epoch)
redis.call('HSET', replica, 'seq', seq, 'count', count, 'xor', sum, 'event', number)
redis.call('HDEL', replica, 'wanted')
return 1
