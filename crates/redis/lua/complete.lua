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

--@ arguments

--@ response

--@ record

--@ get

--@ read

local owner, ended_as, retention, response = ARGV[1], ARGV[2], duration(ARGV[3], MAX_RETENTION), ''
local operator = 0

if ended_as == 'completed' then
  response = ARGV[4] or ''
end
if not (retention and (ended_as == 'completed' and is_response(response)
  or ended_as == 'awaited' or ended_as == 'tombstone' or ended_as == 'unknown')) then
  return redis.error_reply('INVALID an argument is missing or out of range')
end

if not live or text(token) ~= owner then
  return {'fenced', now}
elseif not (state == 'in-progress'
  -- The owner of an unknown outcome reports it after all.
  or state == 'unknown' and ended_as ~= 'unknown'
  -- The owner's own transaction left the response out; it is added once.
  or state == 'awaited' and (ended_as == 'completed' or ended_as == 'tombstone')) then
  -- The same completion may have been sent again because its reply was lost.
  local is_same = state == ended_as and (state ~= 'completed' or string.sub(value, -response_size) == response)
  return {is_same and 'completed' or 'fenced', now}
end

--@ end_attempt

--@ write

--@ notify

return {'completed', now}
