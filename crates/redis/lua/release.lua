#!lua flags=allow-oom
--@ notice
--
-- release: ends an attempt without an outcome and frees the key. It also runs when the server is out of memory.
-- KEYS  1 oncegate:{<record>}
-- ARGV  1 token   2 retention, ms
-- Reply
--       released | fenced, now

--@ now

--@ arguments

--@ record

--@ get

--@ read

local owner, retention = ARGV[1], duration(ARGV[2], MAX_RETENTION)
local ended_as, operator, response = 'released', 0, ''

if not retention then
  return redis.error_reply('INVALID an argument is missing or out of range')
end

if not live or text(token) ~= owner then
  return {'fenced', now}
elseif state ~= 'in-progress' and state ~= 'unknown' then
  return {state == 'released' and 'released' or 'fenced', now}
end

--@ end_attempt

--@ write

--@ notify

return {'released', now}
