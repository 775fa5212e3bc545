-- Changes a replica's block set by one batch, all of it or nothing; keep in ms.
-- uses: clock, events, keyset
-- KEYS: meta, stream, replica, blocks
-- ARGV: id, incarnation, epoch, keep, seq, added keys, removed keys, cleared (0 or 1), count after, xor after
-- Gives 'ok' | 'snapshot' (the batch does not fit what is held) | 'again' (register first)
local meta, stream, replica, blocks = unpack(KEYS)
local id, incarnation, epoch, keep, seq, added, removed, cleared, count, sum = unpack(ARGV)

if not is_current(meta, replica, incarnation, epoch) then
  return 'again'
end
local held = redis.call('HMGET', replica, 'seq', 'count', 'xor', 'peer')
if seq == held[1] and count == held[2] and sum == held[3] then
  return 'ok' -- sent again because its answer was lost
end

local came, went, before, total = split(added), {}, 0, string.rep('\0', 16)
if cleared == '0' then
  went = members_among(blocks, split(removed), 1)
  came = members_among(blocks, came, 0)
  before, total = held[2], xor(held[3], went)
end
local fits = tonumber(seq) == held[1] + 1 and before - #went + #came == tonumber(count) and xor(total, came) == sum
if not fits then
  redis.call('HSET', replica, 'wanted', 1)
  return 'snapshot'
end

if cleared == '1' then
  redis.call('UNLINK', blocks)
end
in_chunks(went, function(_, ...) redis.call('SREM', blocks, ...) end)
in_chunks(came, function(_, ...) redis.call('SADD', blocks, ...) end)
redis.call('PEXPIRE', blocks, redis.call('PTTL', replica))
local number = append_event(meta, stream, keep, 'kind', 'blocks', 'id', id, 'incarnation', incarnation, 'epoch', epoch,
  'peer', held[4], 'seq', seq, 'added', table.concat(came), 'removed', table.concat(went), 'cleared', cleared,
  'count', count, 'xor', sum)
redis.call('HSET', replica, 'seq', seq, 'count', count, 'xor', sum, 'event', number)
redis.call('HDEL', replica, 'wanted')
return 'ok'
