-- Books reservations, each on the first of its pairs that fits under its caps; µs, tokens, sequences; ttl in ms.
-- uses: clock, booking
-- KEYS: as in booking.lua
-- ARGV: keep (ms), JSON list of {request, ttl, key (hex or ''), pairs = [{d = leg, p = leg or null}]}
--       with leg = {m = member, p = µs, t = tokens, s = sequences, cp, ct, cs = caps, 0 for none}
-- Gives for each {index of the pair or -1, replica id that already computes the in-flight key or ''}
local now = now_ms()
lapse(now)

local function under(cap, member, what, amount)
  return cap == 0 or load_of(member, what) + amount <= cap
end

local function fits(decode, prefill)
  local together = prefill and prefill.m == decode.m
  local decode_us = decode.p + (together and prefill.p or 0)
  local prefill_us = prefill and (together and decode_us or prefill.p)
  return under(decode.cp, decode.m, '/p', decode_us)
    and under(decode.ct, decode.m, '/t', decode.t)
    and under(decode.cs, decode.m, '/s', decode.s)
    and (not prefill or under(prefill.cp, prefill.m, '/p', prefill_us))
end

local function first_fit(pairs_in_order)
  for at, pair in ipairs(pairs_in_order) do
    local prefill = pair.p ~= cjson.null and pair.p or nil
    if fits(pair.d, prefill) then
      return at - 1, pair.d, prefill
    end
  end
  return -1
end

local function reserve(asked)
  local earlier = find(asked.request)
  if earlier then
    drop(asked.request, earlier) -- asked again because the answer was lost
  end
  local key = from_hex(asked.key)
  local index, decode, prefill = first_fit(asked.pairs)
  local owner = owner_of(key)
  if index >= 0 then
    local record = {d = decode.m, dp = decode.p, dt = decode.t, ds = decode.s,
      p = prefill and prefill.m or '', pp = prefill and prefill.p or 0, k = key}
    book(asked.request, record, now + asked.ttl)
    if key ~= '' and not owner then
      set_mark(asked.request, record, now + asked.ttl)
    end
  end
  return {index, owner and owner[2] or ''}
end

local answers = {}
for at, asked in ipairs(cjson.decode(ARGV[2])) do
  answers[at] = reserve(asked)
end
live_all(ARGV[1])
return answers
