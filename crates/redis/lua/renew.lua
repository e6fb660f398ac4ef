#!lua flags=allow-oom
-- Contract of Oncegate for Redis and Valkey, version 1. This file is frozen: a change of it is another version.
-- docs/reference/store-contract-redis.md says what everything means.
--
-- renew: keeps the ownership. Runs also where memory is used up: it makes no record larger.
-- KEYS  1 oncegate:{<record>}
-- ARGV  1 token   2 lease, ms   3 retention, ms
-- Answers
--       renewed, now, lease until
--       fenced, now

-- [now]
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
-- [/now]

-- [record] The same in every script that reads a record.
local key = KEYS[1]

-- Numbers in Lua are exact below 2^53 only, and `tostring` rounds before that.
local function text(number)
  return string.format('%d', number)
end

-- A whole number below 2^53, spelled as `text` spells it.
local function number(digits)
  local value = digits and tonumber(digits)
  return value and value >= 0 and value < 9007199254740992 and text(value) == digits and value or nil
end

-- A duration in milliseconds that can be added to any time.
local function duration(digits)
  local value = number(digits)
  return value and value <= 1125899906842624 and value or nil
end

local function hex(digits, count)
  return digits and #digits == count and string.find(digits, '^[0-9a-f]+$')
end

local STATES = {['in-progress'] = 1, unknown = 1, completed = 1, awaited = 1, tombstone = 1, released = 1}

-- The record, nil where there is none, or false and why it cannot be read. Such a record is never taken for absent.
local function read()
  local f = redis.pcall('HMGET', key, 'version', 'state', 'fingerprint_version', 'fingerprint', 'token', 'attempts',
    'created_at', 'changed_at', 'expires_at', 'caller', 'operation', 'attempt', 'lease_until', 'after_abandoned',
    'key_tag', 'by_operator')
  if f[1] ~= '1' and f[1] ~= '2' then
    local kind = redis.call('TYPE', key).ok
    if kind == 'none' then
      return nil
    elseif kind ~= 'hash' then
      return false, 'the key holds a ' .. kind .. ' and not a record'
    elseif f.err then
      error(f)
    end
    return false, 'the record is of an unknown version'
  end
  local r = {
    state = f[2], fingerprint_version = number(f[3]), fingerprint = f[4], token = number(f[5]),
    attempts = number(f[6]), created_at = number(f[7]), changed_at = number(f[8]), expires_at = number(f[9]),
    attempt = f[12], lease_until = number(f[13]), after_abandoned = f[14], fields = f, version = f[1], steps = 0,
    by_operator = f[16] == '1',
  }
  local whole = r.state and STATES[r.state] and r.fingerprint_version and hex(r.fingerprint, 64) and r.token
    and r.attempts and r.created_at and r.changed_at and r.expires_at and hex(f[10], 16) and f[11]
    and (not f[15] or hex(f[15], 16)) and (not f[16] or r.by_operator)
  if whole and r.state == 'in-progress' then
    whole = hex(r.attempt, 32) and r.lease_until and (r.after_abandoned == '0' or r.after_abandoned == '1')
  elseif whole and r.state == 'completed' then
    whole = redis.call('HSTRLEN', key, 'response') >= 7
  end
  -- Version 2 is a record with steps: whoever does not know them would begin again at the first.
  if whole and r.version == '2' then
    r.steps = number(redis.call('HGET', key, 'steps'))
    whole = r.steps and r.steps > 0 and r.steps <= 256
  end
  if not whole then
    return false, 'a field of the record is missing or out of range'
  end
  return r
end

local record, damage = read()
if record == false then
  return redis.error_reply('CORRUPT ' .. damage)
end
-- A record past its retention is absent. Only its token still counts.
local live = record and now < record.expires_at and record or nil
-- [/record]

-- [keep] The same in every script that writes a record.
-- For so long after its retention Redis keeps a record for its token, should the clock be set back.
local GRACE = 600000

local function keep_until(expires_at)
  redis.call('PEXPIREAT', key, text(expires_at + GRACE))
end
-- [/keep]

local token, lease, retention = ARGV[1], duration(ARGV[2]), duration(ARGV[3])

if not (token and lease and retention) then
  return redis.error_reply('INVALID an argument is missing or out of range')
end

if live and text(live.token) == token and live.state == 'in-progress' then
  local lease_until = now + lease
  redis.call('HSET', key, 'lease_until', text(lease_until), 'expires_at', text(lease_until + retention))
  keep_until(lease_until + retention)
  return {'renewed', text(now), text(lease_until)}
end
return {'fenced', text(now)}
