-- Returns true if a store can read the bytes as a response in the published encoding: a final status, and complete fields with
-- names in ASCII.
local function is_response(bytes)
  if #bytes < 7 or #bytes > 67108864 then
    return false
  end
  local version, s1, s2, h1, h2, t1, t2 = string.byte(bytes, 1, 7)
  local status, fields = s1 * 256 + s2, (h1 + t1) * 256 + h2 + t2
  if version ~= 1 or status < 200 or status > 999 or fields > 256 then
    return false
  end
  -- The start of the next field.
  local at = 8
  for _ = 1, fields do
    local n1, n2, v1, v2, v3, v4 = string.byte(bytes, at, at + 5)
    if not v4 then
      return false
    end
    local name_at = at + 6
    local value_at = name_at + n1 * 256 + n2
    at = value_at + ((v1 * 256 + v2) * 256 + v3) * 256 + v4
    if at > #bytes + 1 or string.find(string.sub(bytes, name_at, value_at - 1), '[\128-\255]') then
      return false
    end
  end
  return true
end
