local MAX_LEASE, MAX_RETENTION = 3600000, 34560000000

-- A duration in milliseconds, from 1 to `most`: decimal digits without leading zeros.
local function duration(digits, most)
  local value = digits and string.find(digits, '^[1-9]%d*$') and tonumber(digits)
  return value and value <= most and value or nil
end
