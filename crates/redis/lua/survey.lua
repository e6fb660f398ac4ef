#!lua flags=allow-oom,allow-cross-slot-keys
-- survey: reads the beginnings of the records in a portion of the keys of one node. It writes nothing, and takes the server about
-- 4 microseconds for each record. It is a part of Oncegate and not of the contract: another version may have another text.
-- ARGV  1 cursor of SCAN
--       2 number of keys to look at
--       3 bytes of a record that are read
--       4 1 to read the whole operation, too
-- Reply
--       portion, now, next cursor, keys, beginnings: an empty one for a record that is gone, null if the key cannot be read here

--@ now

local portion = redis.call('SCAN', ARGV[1], 'MATCH', 'oncegate:{*}', 'COUNT', ARGV[2])
local keys, heads = portion[2], {}
local last, with_operation, call, byte = ARGV[3] - 1, ARGV[4] == '1', redis.pcall, string.byte
for number = 1, #keys do
  local key = keys[number]
  local head = call('GETRANGE', key, 0, last)
  if type(head) ~= 'string' then
    -- Another type, or a slot that is on its way to this node.
    head = false
  elseif with_operation and #head > last then
    -- The size of the state is in byte 6, that of the tag of the key 104 bytes after the state, and that of the operation after
    -- the tag.
    local at = 110 + byte(head, 6)
    at = at + 1 + (byte(head, at) or 0)
    local high, low = byte(head, at, at + 1)
    local last_of_operation = low and at + high * 256 + low or 0
    if last_of_operation > last then
      head = call('GETRANGE', key, 0, last_of_operation)
    end
  end
  heads[number] = head
end
return {'portion', now, portion[1], keys, heads}
