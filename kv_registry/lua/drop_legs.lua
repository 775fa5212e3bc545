-- Takes the booked legs of a replica that is gone off the books; no units.
-- uses: clock, booking
-- KEYS: as in booking.lua
-- ARGV: member ("incarnation/id")
-- Walks all reservations of the model: some thousands at most, and replicas go rarely.
local member = ARGV[1]
lapse(now_ms())

local all = redis.call('HGETALL', reserved)
for at = 1, #all, 2 do
  local record, touched = cmsgpack.unpack(all[at + 1]), false
  if record.p == member then
    record.p, record.pp, touched = '', 0, true
  end
  if record.d == member then
    record.dp, record.dt, record.ds, touched = 0, 0, 0, true
  end
  if touched then
    keep_record(all[at], record)
  end
end

local held = redis.call('HGETALL', marks)
for at = 1, #held, 2 do
  if cmsgpack.unpack(held[at + 1])[3] == member then
    erase_mark(held[at])
  end
end

redis.call('HDEL', loads, member .. '/p', member .. '/t', member .. '/s')
