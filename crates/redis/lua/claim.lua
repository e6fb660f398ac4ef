#!lua
--@ notice
--
-- claim: requests permission to execute.
-- KEYS  1 oncegate:{<record>}
-- ARGV  1 attempt (16 random bytes)   2 fingerprint (33 bytes: its version and the digest)   3 lease, ms   4 retention, ms
--       5 park | reexecute | reconcile   6 caller (8 bytes)   7 operation (at most 256 bytes)
--       8 tag of the key (8 bytes; empty or left out: operators cannot find the record by its key)
-- Reply
--       execute, now, token, attempts, lease until, after abandoned (0 | 1)
--       replay, now, response
--       in-progress, now, rest of the lease in ms
--       mismatch | unknown | unreplayable, now

--@ now

--@ arguments

--@ record

--@ get

--@ read

local claimed_attempt, claimed_fingerprint, on_abandoned = ARGV[1], ARGV[2], ARGV[5]
local lease, retention = duration(ARGV[3], MAX_LEASE), duration(ARGV[4], MAX_RETENTION)
local claimed_caller, claimed_operation, claimed_tag = ARGV[6], ARGV[7], ARGV[8] or ''

if not (lease and retention and #claimed_attempt == 16 and #claimed_fingerprint == 33
  and (on_abandoned == 'park' or on_abandoned == 'reexecute' or on_abandoned == 'reconcile')
  and claimed_operation and #claimed_caller == 8 and #claimed_operation <= 256
  and (claimed_tag == '' or #claimed_tag == 8)) then
  return redis.error_reply('INVALID an argument is missing or out of range')
end

-- 0 if the claim is granted, 1 if it is granted after an abandoned attempt.
local grant
local ended_as, operator, response, reply = nil, 0, '', nil
if not live or state == 'released' and number_of_steps == 0 then
  grant = 0
elseif fingerprint ~= claimed_fingerprint then
  if string.byte(fingerprint) ~= string.byte(claimed_fingerprint) then
    return redis.error_reply('CORRUPT the fingerprint of the record has another version and cannot be compared')
  end
  return {'mismatch', now}
elseif state == 'released' then
  grant = 0
elseif state == 'in-progress' then
  if attempt == claimed_attempt then
    -- The same claim, sent again because its reply was lost.
    lease_until, expires_at = now + lease, now + lease + retention
    reply = {'execute', now, token, attempts, lease_until, after_abandoned}
  elseif now < lease_until then
    local left, bound = lease_until - now, math.max(lease_until - changed_at, lease)
    if left <= MAX_LEASE or left <= bound then
      return {'in-progress', now, left}
    end
    -- The lease was granted before the server's clock was set back, so it would last far too long. The owner keeps the record
    -- for the longest time that its lease can have had, counted from now.
    lease_until, changed_at, expires_at = now + bound, now, expires_at - left + bound
    reply = {'in-progress', now, bound}
  elseif on_abandoned == 'park' then
    ended_as, reply = 'unknown', {'unknown', now}
  else
    grant = 1
  end
elseif state == 'unknown' then
  return {'unknown', now}
elseif state == 'completed' then
  return {'replay', now, string.sub(value, -response_size)}
else
  return {'unreplayable', now}
end

if grant then
  -- The token is greater than all earlier ones.
  token = value and token >= now and token + 1 or now
  if token >= MAX_NUMBER then
    return redis.error_reply('CORRUPT the token of the record cannot grow')
  end
  if live then
    attempts = math.min(attempts + 1, 4294967295)
  else
    attempts, created_at, resolution, steps = 1, now, '', ''
  end
  state, by_operator, after_abandoned, changed_at = 'in-progress', 0, grant, now
  attempt, lease_until, expires_at = claimed_attempt, now + lease, now + lease + retention
  fingerprint, caller, operation, key_tag = claimed_fingerprint, claimed_caller, claimed_operation, claimed_tag
  reply = {'execute', now, token, attempts, lease_until, after_abandoned}
end

--@ end_attempt

--@ write

if ended_as then
--@ notify
end
return reply
