-- Names members whose life is over by the store's clock (ms), and counts all members.
-- uses: clock
-- KEYS: due   ARGV: most to name
-- Gives {members, "incarnation/id" of those due ...}
local members = redis.call('ZCARD', KEYS[1])
local over = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', whole(now_ms()), 'LIMIT', 0, ARGV[1])
return {members, unpack(over)}
