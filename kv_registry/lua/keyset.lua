-- Library: packed block keys of 16 bytes, and the XOR over a set of them. Pure but for `members_among`.

local KEY_BYTES = 16
local CHUNK = 1000 -- arguments of one command; Lua cannot unpack many more than that

local function split(packed)
  local keys = {}
  for at = 1, #packed, KEY_BYTES do
    keys[#keys + 1] = string.sub(packed, at, at + KEY_BYTES - 1)
  end
  return keys
end

local function in_chunks(keys, visit)
  for from = 1, #keys, CHUNK do
    local to = math.min(from + CHUNK - 1, #keys)
    visit(from, unpack(keys, from, to))
  end
end

-- The keys that are (wanted = 1) or are not (wanted = 0) in the set.
local function members_among(set, keys, wanted)
  local found = {}
  in_chunks(keys, function(from, ...)
    for i, held in ipairs(redis.call('SMISMEMBER', set, ...)) do
      if held == wanted then
        found[#found + 1] = keys[from + i - 1]
      end
    end
  end)
  return found
end

local function xor(total, keys)
  local a, b, c, d = struct.unpack('<i4i4i4i4', total)
  for _, key in ipairs(keys) do
    local e, f, g, h = struct.unpack('<i4i4i4i4', key)
    a, b, c, d = bit.bxor(a, e), bit.bxor(b, f), bit.bxor(c, g), bit.bxor(d, h)
  end
  return struct.pack('<i4i4i4i4', a, b, c, d)
end
