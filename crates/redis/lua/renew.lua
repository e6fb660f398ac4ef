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

--@ record

--@ keep

local token, lease, retention = ARGV[1], duration(ARGV[2], MAX_LEASE), duration(ARGV[3], MAX_RETENTION)

if not (token and lease and retention) then
  return redis.error_reply('INVALID an argument is missing or out of range')
end

if live and text(live.token) == token and live.state == 'in-progress' then
  local lease_until = now + lease
  redis.call('HSET', key, 'lease_until', text(lease_until), 'expires_at', text(lease_until + retention))
  keep_until(lease_until + retention)
  return {'renewed', text(now), text(lease_until)}
end
return {'fenced', text(now)}
