#!lua flags=allow-oom
--@ notice
--
-- purge: removes a record whose retention is over. It is optional: Redis removes the record ten minutes later.
-- KEYS  1 oncegate:{<record>}
-- Reply
--       purged | kept, now

--@ now

--@ record

if record and not live then
  redis.call('DEL', key)
  return {'purged', text(now)}
end
return {'kept', text(now)}
