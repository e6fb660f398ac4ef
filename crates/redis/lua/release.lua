#!lua flags=allow-oom
--@ notice
--
-- release: ends an attempt without an outcome and frees the key. It also runs when the server is out of memory.
-- KEYS  1 oncegate:{<record>}
-- ARGV  1 token   2 retention, ms
-- Reply
--       released | fenced, now

--@ now

--@ record

--@ keep

--@ end_attempt

local token, retention = ARGV[1], duration(ARGV[2], MAX_RETENTION)

if not (token and retention) then
  return redis.error_reply('INVALID an argument is missing or out of range')
end

if live and text(live.token) == token then
  if live.state == 'in-progress' or live.state == 'unknown' then
    end_attempt('released', retention, false)
    return {'released', text(now)}
  elseif live.state == 'released' then
    return {'released', text(now)}
  end
end
return {'fenced', text(now)}
