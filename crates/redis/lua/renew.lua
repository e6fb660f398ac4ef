#!lua flags=allow-oom
--@ notice
--
-- renew: extends the lease. It also runs when the server is out of memory, because it makes no record larger.
-- KEYS  1 oncegate:{<record>}
-- ARGV  1 token   2 lease, ms   3 retention, ms
-- Reply
--       renewed, now, lease until
--       fenced, now

--@ now

--@ arguments

--@ record

--@ get

--@ read

local owner, lease, retention = ARGV[1], duration(ARGV[2], MAX_LEASE), duration(ARGV[3], MAX_RETENTION)
local response = ''

if not (lease and retention) then
  return redis.error_reply('INVALID an argument is missing or out of range')
end

if not live or text(token) ~= owner or state ~= 'in-progress' then
  return {'fenced', now}
end
lease_until, expires_at = now + lease, now + lease + retention

--@ write

return {'renewed', now, lease_until}
