-- Notes that a model has members, so that sweepers find it; keep in ms.
-- uses: clock
-- KEYS: models   ARGV: model, keep
local now = now_ms()
redis.call('ZADD', KEYS[1], whole(now), ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', whole(now - ARGV[2]))
live_for(KEYS[1], ARGV[2])
