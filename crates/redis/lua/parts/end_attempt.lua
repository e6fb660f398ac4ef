-- Ends the attempt: writes the state, with more fields and values if they are given, and notifies the watchers. The channel has
-- the name of the key, so it is in the same slot. A user who may not publish still ends the attempt.
local function end_attempt(state, retention, by_operator, ...)
  local expires_at = now + retention
  -- Finished steps keep their retention, and parking a record never shortens its retention.
  if state == 'released' and live.steps > 0 or state == 'unknown' and by_operator then
    expires_at = math.max(expires_at, live.expires_at)
  end
  redis.call('HSET', key, 'state', state, 'changed_at', text(now), 'expires_at', text(expires_at), ...)
  redis.call('HDEL', key, 'attempt', 'lease_until', 'after_abandoned')
  if by_operator then
    redis.call('HSET', key, 'by_operator', '1')
  else
    redis.call('HDEL', key, 'by_operator')
  end
  -- An operator's resolution keeps the steps: it may be taken back, and the next attempt must not repeat finished steps.
  if live.steps > 0 and state ~= 'unknown' and state ~= 'released' and not by_operator then
    local names = {}
    for at = 0, live.steps - 1 do
      table.insert(names, 'step:' .. text(at))
      table.insert(names, 'result:' .. text(at))
    end
    redis.call('HDEL', key, 'steps', 'steps_bytes', unpack(names))
  end
  keep_until(expires_at)
  redis.pcall('SPUBLISH', key, state .. ' ' .. text(live.token))
end
