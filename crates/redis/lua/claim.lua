#!lua
--@ notice
--
-- claim: requests permission to execute.
-- KEYS  1 oncegate:{<record>}
-- ARGV  1 attempt (32 hexadecimal digits, random)   2 fingerprint version   3 fingerprint (64 hexadecimal digits)
--       4 lease, ms   5 retention, ms   6 park | reexecute | reconcile
--       7 caller (16 hexadecimal digits)   8 operation (at most 256 bytes)
--       9 tag of the key (16 hexadecimal digits; empty or left out: operators cannot find the record by its key)
-- Reply
--       execute, now, token, attempts, lease until, after abandoned (0 | 1)
--       replay, now, response
--       in-progress, now, rest of the lease in ms
--       mismatch | unknown | unreplayable, now

--@ now

--@ record

--@ keep

--@ end_attempt

local attempt, version, fingerprint = ARGV[1], number(ARGV[2]), ARGV[3]
local lease, retention, on_abandoned = duration(ARGV[4], MAX_LEASE), duration(ARGV[5], MAX_RETENTION), ARGV[6]
local key_tag = ARGV[9] or ''

if not (hex(attempt, 32) and version and version < 256 and hex(fingerprint, 64) and lease and retention
  and (on_abandoned == 'park' or on_abandoned == 'reexecute' or on_abandoned == 'reconcile')
  and hex(ARGV[7], 16) and ARGV[8] and #ARGV[8] <= 256 and (key_tag == '' or hex(key_tag, 16))) then
  return redis.error_reply('INVALID an argument is missing or out of range')
end

-- Grants ownership under a token that is greater than all earlier ones.
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
  redis.call('HSET', key, 'version', '1', 'state', 'in-progress', 'fingerprint_version', text(version),
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
  return redis.error_reply('CORRUPT the fingerprint of the record has another version and cannot be compared')
end
if live.fingerprint ~= fingerprint then
  return {'mismatch', text(now)}
end
if live.state == 'released' then
  return execute('0')
elseif live.state == 'in-progress' then
  if live.attempt == attempt then
    -- The same claim, sent again because its reply was lost.
    local lease_until = now + lease
    redis.call('HSET', key, 'lease_until', text(lease_until), 'expires_at', text(lease_until + retention))
    keep_until(lease_until + retention)
    return {'execute', text(now), text(live.token), text(live.attempts), text(lease_until), live.after_abandoned}
  elseif now < live.lease_until then
    local left, bound = live.lease_until - now, math.max(live.lease_until - live.changed_at, lease)
    if left > 3600000 and left > bound then
      -- The lease was granted before the server's clock was set back, so it would last far too long. The owner keeps the record
      -- for the longest time that its lease can have had, counted from now.
      local expires_at = live.expires_at - left + bound
      redis.call('HSET', key, 'lease_until', text(now + bound), 'changed_at', text(now), 'expires_at', text(expires_at))
      keep_until(expires_at)
      left = bound
    end
    return {'in-progress', text(now), text(left)}
  elseif on_abandoned == 'park' then
    end_attempt('unknown', retention, false)
    return {'unknown', text(now)}
  end
  return execute('1')
elseif live.state == 'unknown' then
  return {'unknown', text(now)}
elseif live.state == 'completed' then
  return {'replay', text(now), redis.call('HGET', key, 'response')}
end
return {'unreplayable', text(now)}
