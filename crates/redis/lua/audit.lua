#!lua
--@ notice
--
-- audit: adds an entry to the audit trail. Only a Cluster needs it, after `resolve`. Sent again, it adds nothing.
-- KEYS  1 oncegate:{audit}
-- ARGV  1 time, ms   2 record (64 hexadecimal digits)   3 state before   4 state after   5 actor   6 reason
--       7 resolution (random text that identifies this resolution; the same if the call is sent again)
-- Reply
--       added, number of the entry

--@ audit

if #ARGV < 7 or ARGV[7] == '' then
  return redis.error_reply('INVALID an argument is missing or out of range')
end
for _, entry in ipairs(redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 100)) do
  -- The resolution is the last field of an entry of this script.
  if entry[2][#entry[2] - 1] == 'resolution' and entry[2][#entry[2]] == ARGV[7] then
    return {'added', tonumber((string.match(entry[1], '^%d+')))}
  end
end
return {'added', add_audit(KEYS[1], ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6], 'resolution', ARGV[7])}
