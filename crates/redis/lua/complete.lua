#!lua
--@ notice
--
-- complete: ends an attempt with its outcome.
-- KEYS  1 oncegate:{<record>}
-- ARGV  1 token   2 completed | awaited | tombstone | unknown   3 retention, ms
--       4 response, in the published encoding (with completed)
-- Reply
--       completed | fenced, now

--@ now

--@ record

--@ keep

--@ end_attempt

--@ response

local TARGETS = {completed = 1, awaited = 1, tombstone = 1, unknown = 1}
local token, target, retention, response = ARGV[1], ARGV[2] or '', duration(ARGV[3], MAX_RETENTION), ARGV[4]

if not (token and TARGETS[target] and retention and (target ~= 'completed' or response and is_response(response))) then
  return redis.error_reply('INVALID an argument is missing or out of range')
end

if not live or text(live.token) ~= token then
  return {'fenced', text(now)}
end
local may = live.state == 'in-progress'
  -- The owner of an unknown outcome reports it after all.
  or live.state == 'unknown' and target ~= 'unknown'
  -- The owner's own transaction left the response out; it is added once.
  or live.state == 'awaited' and (target == 'completed' or target == 'tombstone')
if may then
  if target == 'completed' then
    end_attempt(target, retention, false, 'response', response)
  else
    end_attempt(target, retention, false)
  end
  return {'completed', text(now)}
elseif live.state == target and (target ~= 'completed' or redis.call('HGET', key, 'response') == response) then
  -- The same completion, sent again because its reply was lost.
  return {'completed', text(now)}
end
return {'fenced', text(now)}
