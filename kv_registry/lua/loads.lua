-- Lapses what is due and reads the booked load; prefill in µs, tokens, sequences.
-- uses: clock, booking
-- KEYS: as in booking.lua
-- Gives {"member/p" | "member/t" | "member/s", amount ...}
lapse(now_ms())
return redis.call('HGETALL', loads)
