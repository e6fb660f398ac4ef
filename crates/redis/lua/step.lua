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

--@ get

--@ read

local owner, digits, name, result = ARGV[1], ARGV[2] or '', ARGV[3] or '', ARGV[4]
local number = (digits == '0' or string.find(digits, '^[1-9]%d*$')) and tonumber(digits)

if not (number and #name >= 1 and #name <= 255 and result) then
  return redis.error_reply('INVALID an argument is missing or out of range')
end

if not live or text(token) ~= owner or state ~= 'in-progress' then
  return {'fenced', now}
elseif number > number_of_steps then
  return {'differs', now}
end
local bytes, at, step_name, step_result = #name + #result, 1
for before = 0, number_of_steps - 1 do
  step_name, step_result, at = step_at(steps, at)
  if before == number then
    return {step_name == name and step_result == result and 'recorded' or 'differs', now}
  end
  bytes = bytes + #step_name + #step_result
end
if number_of_steps >= 256 or bytes > 1048576 then
  return {'full', now}
end
-- A record in progress has no response, so its steps are at its end.
redis.call('APPEND', key, struct.pack('>I2c0I4c0', #name, name, #result, result))
return {'recorded', now}
