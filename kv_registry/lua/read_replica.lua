-- Reads a replica and its block set as of one moment; no units.
-- KEYS: replica, blocks, states   ARGV: id, incarnation
-- Gives {entry, epoch, seq, xor, event, beat or '', keys}, or {} when that incarnation is not there
local entry = redis.call('HMGET', KEYS[1], 'incarnation', 'entry', 'epoch', 'seq', 'xor', 'event')
if entry[1] ~= ARGV[2] then
  return {}
end
local keys = redis.call('SMEMBERS', KEYS[2])
local beat = redis.call('HGET', KEYS[3], ARGV[1]) or ''
return {entry[2], entry[3], entry[4], entry[5], entry[6], beat, keys}
