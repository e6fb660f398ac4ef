-- The audit trail is a stream of the newest entries, numbered from 1.
local AUDIT_MAX = 100000

local function add_audit(trail, at, id, state_before, state_after, actor, reason, ...)
  local last = redis.call('XREVRANGE', trail, '+', '-', 'COUNT', 1)[1]
  local next_number = last and tonumber(string.match(last[1], '^%d+')) + 1 or 1
  redis.call('XADD', trail, 'MAXLEN', AUDIT_MAX, string.format('%.0f-0', next_number),
    'at', at, 'record', id, 'state_before', state_before, 'state_after', state_after, 'actor', actor, 'reason', reason, ...)
  return next_number
end
