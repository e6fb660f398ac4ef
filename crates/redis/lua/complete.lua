#!lua
-- Contract of Oncegate for Redis and Valkey, version 1. This file is frozen: a change of it is another version.
-- docs/reference/store-contract-redis.md says what everything means.
--
-- complete: ends an attempt with what came of it.
-- KEYS  1 oncegate:{<record>}
-- ARGV  1 token   2 replayable | awaited | tombstone | unknown   3 retention, ms
--       4 response, in the published encoding (with replayable)
-- Answers
--       completed | fenced, now

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

-- [response] The same in both scripts that take a response: whether a store can read it back as one in the published
-- encoding, with a final status, and whole fields whose names are ASCII.
local function is_response(octets)
  if #octets < 7 or #octets > 67108864 then
    return false
  end
  local version, s1, s2, h1, h2, t1, t2 = string.byte(octets, 1, 7)
  local status, fields = s1 * 256 + s2, (h1 + t1) * 256 + h2 + t2
  if version ~= 1 or status < 200 or status > 999 or fields > 256 then
    return false
  end
  -- Where the next field begins.
  local at = 8
  for _ = 1, fields do
    local n1, n2, v1, v2, v3, v4 = string.byte(octets, at, at + 5)
    if not v4 then
      return false
    end
    local name_at = at + 6
    local value_at = name_at + n1 * 256 + n2
    at = value_at + ((v1 * 256 + v2) * 256 + v3) * 256 + v4
    if at > #octets + 1 or string.find(string.sub(octets, name_at, value_at - 1), '[\128-\255]') then
      return false
    end
  end
  return true
end
-- [/response]

local TARGETS = {replayable = 'completed', awaited = 'awaited', tombstone = 'tombstone', unknown = 'unknown'}
local token, target, retention, response = ARGV[1], TARGETS[ARGV[2] or ''], duration(ARGV[3]), ARGV[4]

if not (token and target and retention and (target ~= 'completed' or response and is_response(response))) then
  return redis.error_reply('INVALID an argument is missing or out of range')
end

if not live or text(live.token) ~= token then
  return {'fenced', text(now)}
end
local may = live.state == 'in-progress'
  -- Unknown became known after all: its owner says what happened.
  or live.state == 'unknown' and target ~= 'unknown'
  -- The answer that the owner's own transaction left out, added once.
  or live.state == 'awaited' and (target == 'completed' or target == 'tombstone')
if may then
  if target == 'completed' then
    ended(target, retention, false, 'response', response)
  else
    ended(target, retention, false)
  end
  return {'completed', text(now)}
elseif live.state == target and (target ~= 'completed' or redis.call('HGET', key, 'response') == response) then
  -- The same completion, sent again because its answer was lost.
  return {'completed', text(now)}
end
return {'fenced', text(now)}
