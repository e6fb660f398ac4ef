#!lua
--@ notice
--
-- step: records a finished step of an attempt, with its result.
-- KEYS  1 oncegate:{<record>}
-- ARGV  1 token   2 number of the step, from 0   3 name (1 to 255 bytes)   4 result (bytes)
-- Reply
--       recorded | differs | full | fenced, now

--@ now

--@ record

local token, at, name, result = ARGV[1], number(ARGV[2]), ARGV[3], ARGV[4]

if not (token and at and name and #name >= 1 and #name <= 255 and result) then
  return redis.error_reply('INVALID an argument is missing or out of range')
end

if not live or text(live.token) ~= token or live.state ~= 'in-progress' then
  return {'fenced', text(now)}
elseif at < live.steps then
  local same = redis.call('HGET', key, 'step:' .. text(at)) == name
    and redis.call('HGET', key, 'result:' .. text(at)) == result
  return {same and 'recorded' or 'differs', text(now)}
elseif at > live.steps then
  return {'differs', text(now)}
end
local bytes = #name + #result
if live.steps > 0 then
  bytes = bytes + (number(redis.call('HGET', key, 'steps_bytes')) or 1048576)
end
if live.steps >= 256 or bytes > 1048576 then
  return {'full', text(now)}
end
redis.call('HSET', key, 'steps', text(live.steps + 1), 'steps_bytes', text(bytes),
  'step:' .. text(at), name, 'result:' .. text(at), result)
return {'recorded', text(now)}
