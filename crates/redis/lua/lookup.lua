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

if not live then
  return {'absent', text(now)}
end
local names = {'version', 'state', 'fingerprint_version', 'fingerprint', 'token', 'attempts', 'created_at',
  'changed_at', 'expires_at', 'caller', 'operation', 'attempt', 'lease_until', 'after_abandoned',
  'key_tag', 'by_operator', 'steps'}
local reply = {'found', text(now)}
for at, name in ipairs(names) do
  if live.fields[at] then
    table.insert(reply, name)
    table.insert(reply, live.fields[at])
  end
end
for at = 0, live.steps - 1 do
  for _, name in ipairs({'step:' .. text(at), 'result:' .. text(at)}) do
    table.insert(reply, name)
    table.insert(reply, redis.call('HGET', key, name))
  end
end
if live.state == 'completed' and ARGV[1] ~= 'head' then
  table.insert(reply, 'response')
  table.insert(reply, redis.call('HGET', key, 'response'))
end
return reply
