#!lua flags=allow-oom
--@ notice
--
-- forget: removes the content of a completed record, its response and its steps, and keeps its protection. It also runs when the
-- server is out of memory, because it makes the record smaller.
-- KEYS  1 oncegate:{<record>}
--       2 oncegate:{audit}, the audit trail; left out on a Cluster, because it is in another slot
-- ARGV  1 actor   2 reason
-- Reply
--       forgotten, now, state before, state after
--       not-forgotten, now, state (empty: there is no record)

--@ now

--@ audit

--@ record

--@ get

--@ read

local actor, reason, response = ARGV[1], ARGV[2], ''

if not (actor and reason and #actor <= 1000 and #reason <= 1000) then
  return redis.error_reply('INVALID an argument is missing or out of range')
end

if not live then
  return {'not-forgotten', now, ''}
end
--@ state_before
if not (state == 'completed' or state == 'awaited' or state == 'tombstone' and number_of_steps > 0) then
  return {'not-forgotten', now, state_before}
end
-- The entry comes first because it can fail.
if KEYS[2] then
  local id = string.match(key, '{(%x+)}') or key
  add_audit(KEYS[2], text(now), id, state_before, 'tombstone', actor, reason)
end
resolution = struct.pack(RESOLUTION, now, #state_before, state_before, 9, 'tombstone', #actor, actor, #reason, reason)
-- An operator's completion with steps becomes final: if it were taken back, the next attempt would repeat the steps.
if number_of_steps > 0 then
  by_operator = 0
end
state, changed_at, steps = 'tombstone', now, ''

--@ write

return {'forgotten', now, state_before, 'tombstone'}
