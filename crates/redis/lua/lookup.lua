#!lua flags=allow-oom
--@ notice
--
-- lookup: reads a record. It writes nothing, but it never runs on a replica, which may be behind.
-- KEYS  1 oncegate:{<record>}
-- ARGV  1 head, to leave out the response (optional)
-- Reply
--       absent, now
--       found, now, name of a field, its value, …

--@ now

--@ record

if ARGV[1] == 'head' then
  -- The size of the response, which is at the end, is in the first five bytes.
  local start = redis.pcall('GETRANGE', key, 0, 4)
  if #start == 5 then
    without_response = true
    value = redis.pcall('GETRANGE', key, 0, -1 - struct.unpack('>I4', start, 2))
  end
end
if not without_response then
--@ get
end

--@ read

if not live then
  return {'absent', now}
end
local reply = {'found', now, 'version', version, 'state', state, 'fingerprint', fingerprint, 'token', token,
  'attempts', attempts, 'created_at', created_at, 'changed_at', changed_at, 'expires_at', expires_at, 'caller', caller,
  'operation', operation, 'by_operator', by_operator}

local function add(name, field)
  table.insert(reply, name)
  table.insert(reply, field)
end

if key_tag ~= '' then
  add('key_tag', key_tag)
end
if state == 'in-progress' then
  add('attempt', attempt)
  add('lease_until', lease_until)
  add('after_abandoned', after_abandoned)
end
if resolution ~= '' then
  local is_resolution, at, from, to, actor, reason = pcall(struct.unpack, RESOLUTION, resolution)
  if not is_resolution then
    return redis.error_reply('CORRUPT the resolution of the record cannot be read')
  end
  add('resolved_at', at)
  add('resolved_from', from)
  add('resolved_to', to)
  add('resolved_by', actor)
  add('resolved_reason', reason)
end
if number_of_steps > 0 then
  add('steps', number_of_steps)
  local at, name, result = 1
  for number = 0, number_of_steps - 1 do
    name, result, at = step_at(steps, at)
    add('step:' .. number, name)
    add('result:' .. number, result)
  end
end
if state == 'completed' and not without_response then
  add('response', string.sub(value, -response_size))
end
return reply
