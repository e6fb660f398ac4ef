#!lua
--@ notice
--
-- rewrite: replaces the content of a record by another form of it: its response, and the results of its steps. A record that has
-- another token or another content than expected is left alone. Nothing else of the record changes.
-- KEYS  1 oncegate:{<record>}
-- ARGV  1 token   2 the response that the record has (empty: none)   3 the new response (empty: none)   4 number of steps
--       then the results that the steps have, in their order, and then the new results
-- Reply
--       rewritten, now                also if the record has the new content already
--       not-rewritten, now, state     (empty: there is no record)

--@ now

--@ response

--@ record

--@ get

--@ read

local owner, old_response, response, digits = ARGV[1], ARGV[2], ARGV[3], ARGV[4] or ''
local count = (digits == '0' or string.find(digits, '^[1-9]%d*$')) and tonumber(digits)

if not (count and #ARGV == 4 + 2 * count and (old_response == '') == (response == '')
  and (response == '' or is_response(response))) then
  return redis.error_reply('INVALID an argument is missing or out of range')
end

if not live then
  return {'not-rewritten', now, ''}
end
--@ state_before
if text(token) ~= owner or count ~= number_of_steps then
  return {'not-rewritten', now, state_before}
end
local kept = state == 'completed' and string.sub(value, -response_size) or ''
local is_old, is_new, bytes, at = kept == old_response, kept == response, 0, 1
local name, result
local rewritten = {}
for number = 1, count do
  name, result, at = step_at(steps, at)
  local new_result = ARGV[4 + count + number]
  is_old = is_old and result == ARGV[4 + number]
  is_new = is_new and result == new_result
  bytes = bytes + #name + #new_result
  rewritten[number] = struct.pack('>I2c0I4c0', #name, name, #new_result, new_result)
end
if is_new then
  return {'rewritten', now}
elseif not is_old or bytes > 1048576 then
  return {'not-rewritten', now, state_before}
end
steps = table.concat(rewritten)

--@ write

return {'rewritten', now}
