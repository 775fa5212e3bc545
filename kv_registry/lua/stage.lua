-- Adds one chunk to a snapshot that is being uploaded; stage ttl in ms.
-- uses: clock, events, keyset
-- KEYS: meta, replica, staged   ARGV: incarnation, epoch, keys, stage ttl
-- Gives 1, or 0 when the registration is not current
local meta, replica, staged = unpack(KEYS)
if not is_current(meta, replica, ARGV[1], ARGV[2]) then
  return 0
end
in_chunks(split(ARGV[3]), function(_, ...) redis.call('SADD', staged, ...) end)
redis.call('PEXPIRE', staged, ARGV[4])
return 1
