#!lua
-- Contract of Oncegate for Redis and Valkey, version 1. This file is frozen: a change of it is another version.
-- docs/reference/store-contract-redis.md says what everything means.
--
-- audit: adds an entry to the audit trail, on a Cluster only, after `resolve`. An entry that is there is not added again.
-- KEYS  1 oncegate:{audit}
-- ARGV  1 when, ms   2 record (64 hexadecimal digits)   3 the state before   4 the state after   5 actor   6 reason
--       7 what tells this act from every other one: random, the same where it is sent again
-- Answers
--       added, its number

-- [audit] The same in both scripts that write the audit trail. A stream; its entries are numbered from 1.
local AUDIT_MAX = 100000

local function add_audit(trail, at, id, from, to, actor, reason, ...)
  local last = redis.call('XREVRANGE', trail, '+', '-', 'COUNT', 1)[1]
  local next_number = last and tonumber(string.match(last[1], '^%d+')) + 1 or 1
  redis.call('XADD', trail, 'MAXLEN', AUDIT_MAX, string.format('%.0f-0', next_number),
    'at', at, 'record', id, 'from', from, 'to', to, 'actor', actor, 'reason', reason, ...)
  return string.format('%.0f', next_number)
end
-- [/audit]

if #ARGV < 7 or ARGV[7] == '' then
  return redis.error_reply('INVALID an argument is missing or out of range')
end
for _, entry in ipairs(redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 100)) do
  -- The last of its fields, where it was added by this script.
  if entry[2][#entry[2] - 1] == 'act' and entry[2][#entry[2]] == ARGV[7] then
    return {'added', string.match(entry[1], '^%d+')}
  end
end
return {'added', add_audit(KEYS[1], ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6], 'act', ARGV[7])}
