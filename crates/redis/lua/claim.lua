#!lua
-- Contract of Oncegate for Redis and Valkey, version 1. This file is frozen: a change of it is another version.
-- docs/reference/store-contract-redis.md says what everything means.
--
-- claim: asks to execute.
-- KEYS  1 oncegate:{<record>}
-- ARGV  1 attempt (32 hexadecimal digits, random)   2 fingerprint version   3 fingerprint (64 hexadecimal digits)
--       4 lease, ms   5 retention, ms   6 park | reexecute | reconcile
--       7 caller (16 hexadecimal digits)   8 operation (256 octets at most)
--       9 tag of the key (16 hexadecimal digits; empty or left out where it is not to be found by)
-- Answers
--       execute, now, token, attempts, lease until, after abandoned (0 | 1)
--       replay, now, response
--       in-progress, now, what is left of the lease in ms
--       mismatch | unknown | unreplayable, now

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

-- [ended] The same in every script that may end an attempt.
-- The channel is the key itself, in the same slot. Who may not publish still ends the attempt.
local function ended(state, retention, by_operator, ...)
  local expires_at = now + retention
  -- Finished steps are remembered for as long as they were to be, and what is parked executes no sooner than before.
  if state == 'released' and live.steps > 0 or state == 'unknown' and by_operator then
    expires_at = math.max(expires_at, live.expires_at)
  end
  redis.call('HSET', key, 'state', state, 'changed_at', text(now), 'expires_at', text(expires_at), ...)
  redis.call('HDEL', key, 'attempt', 'lease_until', 'after_abandoned')
  if by_operator then
    redis.call('HSET', key, 'by_operator', '1')
  else
    redis.call('HDEL', key, 'by_operator')
  end
  -- The answer of an operator may be taken back, and the next attempt must not begin again at the first step.
  if live.steps > 0 and state ~= 'unknown' and state ~= 'released' and not by_operator then
    local names = {}
    for at = 0, live.steps - 1 do
      table.insert(names, 'step:' .. text(at))
      table.insert(names, 'result:' .. text(at))
    end
    redis.call('HDEL', key, 'steps', 'steps_octets', unpack(names))
    redis.call('HSET', key, 'version', '1')
  end
  keep_until(expires_at)
  redis.pcall('SPUBLISH', key, state .. ' ' .. text(live.token))
end
-- [/ended]

local attempt, version, fingerprint = ARGV[1], number(ARGV[2]), ARGV[3]
local lease, retention, on_abandoned = duration(ARGV[4]), duration(ARGV[5]), ARGV[6]
local key_tag = ARGV[9] or ''

if not (hex(attempt, 32) and version and version < 256 and hex(fingerprint, 64) and lease and retention
  and (on_abandoned == 'park' or on_abandoned == 'reexecute' or on_abandoned == 'reconcile')
  and hex(ARGV[7], 16) and ARGV[8] and #ARGV[8] <= 256 and (key_tag == '' or hex(key_tag, 16))) then
  return redis.error_reply('INVALID an argument is missing or out of range')
end

-- Gives ownership under a token greater than every one before.
local function execute(after_abandoned)
  local token = now
  if record and record.token >= now then
    token = record.token + 1
  end
  if token >= 9007199254740992 then
    return redis.error_reply('CORRUPT the token of the record cannot grow')
  end
  local attempts = math.min((live and live.attempts or 0) + 1, 4294967295)
  local created_at = live and live.created_at or now
  local lease_until = now + lease
  if live then
    redis.call('HDEL', key, 'response', 'key_tag', 'by_operator')
  elseif record then
    redis.call('DEL', key)
  end
  redis.call('HSET', key, 'version', live and live.version or '1', 'state', 'in-progress', 'fingerprint_version', text(version),
    'fingerprint', fingerprint, 'token', text(token), 'attempts', text(attempts), 'attempt', attempt,
    'lease_until', text(lease_until), 'after_abandoned', after_abandoned, 'caller', ARGV[7], 'operation', ARGV[8],
    'created_at', text(created_at), 'changed_at', text(now), 'expires_at', text(lease_until + retention))
  if key_tag ~= '' then
    redis.call('HSET', key, 'key_tag', key_tag)
  end
  keep_until(lease_until + retention)
  return {'execute', text(now), text(token), text(attempts), text(lease_until), after_abandoned}
end

if not live or live.state == 'released' and live.steps == 0 then
  return execute('0')
end
if live.fingerprint_version ~= version then
  return redis.error_reply('CORRUPT the fingerprint of the record is of another version and cannot be compared')
end
if live.fingerprint ~= fingerprint then
  return {'mismatch', text(now)}
end
if live.state == 'released' then
  return execute('0')
elseif live.state == 'in-progress' then
  if live.attempt == attempt then
    -- The same claim, sent again because its answer was lost.
    local lease_until = now + lease
    redis.call('HSET', key, 'lease_until', text(lease_until), 'expires_at', text(lease_until + retention))
    keep_until(lease_until + retention)
    return {'execute', text(now), text(live.token), text(live.attempts), text(lease_until), live.after_abandoned}
  elseif now < live.lease_until then
    local left, bound = live.lease_until - now, math.max(live.lease_until - live.changed_at, lease)
    if left > 3600000 and left > bound then
      -- The lease was given before the clock was set back: its owner keeps the record for as long as it can have been, from
      -- now on.
      local expires_at = live.expires_at - left + bound
      redis.call('HSET', key, 'lease_until', text(now + bound), 'changed_at', text(now), 'expires_at', text(expires_at))
      keep_until(expires_at)
      left = bound
    end
    return {'in-progress', text(now), text(left)}
  elseif on_abandoned == 'park' then
    ended('unknown', retention, false)
    return {'unknown', text(now)}
  end
  return execute('1')
elseif live.state == 'unknown' then
  return {'unknown', text(now)}
elseif live.state == 'completed' then
  return {'replay', text(now), redis.call('HGET', key, 'response')}
end
return {'unreplayable', text(now)}
