local key = KEYS[1]

-- Lua numbers are exact below 2^53 only, and `tostring` rounds earlier.
local function text(number)
  return string.format('%d', number)
end

-- A whole number below 2^53, in the spelling of `text`.
local function number(digits)
  local value = digits and tonumber(digits)
  return value and value >= 0 and value < 9007199254740992 and text(value) == digits and value or nil
end

local MAX_LEASE, MAX_RETENTION = 3600000, 34560000000

-- A duration in milliseconds, from 1 to this many.
local function duration(digits, most)
  local value = number(digits)
  return value and value >= 1 and value <= most and value or nil
end

local function hex(digits, count)
  return digits and #digits == count and string.find(digits, '^[0-9a-f]+$')
end

local STATES = {['in-progress'] = 1, unknown = 1, completed = 1, awaited = 1, tombstone = 1, released = 1}

-- Returns the record, nil if there is none, or false and the reason why it cannot be read. A damaged record is never treated
-- as absent.
local function read()
  local f = redis.pcall('HMGET', key, 'version', 'state', 'fingerprint_version', 'fingerprint', 'token', 'attempts',
    'created_at', 'changed_at', 'expires_at', 'caller', 'operation', 'attempt', 'lease_until', 'after_abandoned',
    'key_tag', 'by_operator', 'steps')
  if f[1] ~= '1' then
    local kind = redis.call('TYPE', key).ok
    if kind == 'none' then
      return nil
    elseif kind ~= 'hash' then
      return false, 'the key holds a ' .. kind .. ' and not a record'
    elseif f.err then
      error(f)
    end
    return false, 'the record has an unknown version'
  end
  local r = {
    state = f[2], fingerprint_version = number(f[3]), fingerprint = f[4], token = number(f[5]),
    attempts = number(f[6]), created_at = number(f[7]), changed_at = number(f[8]), expires_at = number(f[9]),
    attempt = f[12], lease_until = number(f[13]), after_abandoned = f[14], fields = f,
    by_operator = f[16] == '1', steps = f[17] and number(f[17]) or 0,
  }
  local is_complete = r.state and STATES[r.state] and r.fingerprint_version and hex(r.fingerprint, 64) and r.token
    and r.attempts and r.created_at and r.changed_at and r.expires_at and hex(f[10], 16) and f[11]
    and (not f[15] or hex(f[15], 16)) and (not f[16] or r.by_operator)
    and (not f[17] or r.steps > 0 and r.steps <= 256)
  if is_complete and r.state == 'in-progress' then
    is_complete = hex(r.attempt, 32) and r.lease_until and (r.after_abandoned == '0' or r.after_abandoned == '1')
  elseif is_complete and r.state == 'completed' then
    is_complete = redis.call('HSTRLEN', key, 'response') >= 7
  end
  if not is_complete then
    return false, 'a field of the record is missing or out of range'
  end
  return r
end

local record, damage = read()
if record == false then
  return redis.error_reply('CORRUPT ' .. damage)
end
-- A record past its retention counts as absent; only its token still matters.
local live = record and now < record.expires_at and record or nil
