local key = KEYS[1]

-- Lua numbers are exact below 2^53 only, and `tostring` rounds earlier.
local MAX_NUMBER = 9007199254740992

local function text(number)
  return string.format('%d', number)
end

-- The parts of the record: the head, the steps, and the response to the end. The reference has the table. A script changes these
-- variables and writes the whole record with one command. They are not in a table, and no function uses them: either would take
-- the server some microseconds more at each call.
local HEAD = '>BI4Bc0BBI8I8I8c16I8I4I8c33c8Bc0I2c0I2c0'
local RESOLUTION = '>I8Bc0Bc0I2c0I2c0'
local version, response_size, state, by_operator, after_abandoned, changed_at, expires_at, lease_until, attempt, token,
  attempts, created_at, fingerprint, caller, key_tag, operation, resolution, steps_at
local steps, number_of_steps = '', 0
local value, without_response

-- Returns the name and the result of the step at this position, and the position of the next one.
local function step_at(bytes, at)
  return struct.unpack('>I2c0I4c0', bytes, at)
end
