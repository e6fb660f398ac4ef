#!lua
--@ notice
--
-- resolve: an operator decides the outcome of an attempt, or takes back an earlier decision of an operator.
-- KEYS  1 oncegate:{<record>}
--       2 oncegate:{audit}, the audit trail; left out on a Cluster, because it is in another slot
-- ARGV  1 complete | release | park   2 retention, ms   3 force: 1 to release even if the lease still runs, or 0
--       4 amend: 1 to replace only what an operator decided before, or 0   5 actor   6 reason
--       7 response, in the published encoding (with complete); empty or left out: there is no response to replay
-- Reply
--       resolved, now, state before, state after
--       not-resolvable, now, state (empty: there is no record)

--@ now

--@ arguments

--@ response

--@ audit

--@ record

--@ get

--@ read

local decision, retention, force, amend = ARGV[1], duration(ARGV[2], MAX_RETENTION), ARGV[3], ARGV[4]
local actor, reason, response = ARGV[5], ARGV[6], ARGV[7] or ''

if not ((decision == 'complete' or decision == 'release' or decision == 'park') and retention
  and (force == '0' or force == '1') and (amend == '0' or amend == '1')
  and actor and reason and #actor <= 1000 and #reason <= 1000
  and (response == '' or decision == 'complete' and is_response(response))) then
  return redis.error_reply('INVALID an argument is missing or out of range')
end

if not live then
  return {'not-resolvable', now, ''}
end
--@ state_before
local is_completed = state_before == 'completed' or state_before == 'tombstone'
local is_amendable = by_operator == 1
local may
if decision == 'park' then
  -- A completion by the owner is final.
  may = state_before == 'released' or is_completed and is_amendable
elseif amend == '1' then
  may = is_amendable and (is_completed or state_before == 'released' and decision == 'complete')
else
  may = state_before == 'unknown' or state_before == 'abandoned'
    or state_before == 'in-progress' and force == '1' and decision == 'release'
    -- Released after some of its steps: its outcome is still open.
    or state_before == 'released' and number_of_steps > 0 and decision == 'complete'
end
if not may then
  return {'not-resolvable', now, state_before}
end
local state_after = 'released'
if decision == 'complete' then
  state_after = response == '' and 'tombstone' or 'completed'
elseif decision == 'park' then
  state_after = 'unknown'
  -- A new token without an owner: an owner that an operator fenced stays fenced.
  token = math.max(token + 1, now)
  if token >= MAX_NUMBER then
    return redis.error_reply('CORRUPT the token of the record cannot grow')
  end
end
-- The entry comes first because it can fail.
if KEYS[2] then
  local id = string.match(key, '{(%x+)}') or key
  add_audit(KEYS[2], text(now), id, state_before, state_after, actor, reason)
end
resolution = struct.pack(RESOLUTION, now, #state_before, state_before, #state_after, state_after, #actor, actor,
  #reason, reason)
local ended_as, operator = state_after, 1

--@ end_attempt

--@ write

--@ notify

return {'resolved', now, state_before, state_after}
