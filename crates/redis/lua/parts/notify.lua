-- Notifies the watchers. The channel has the name of the key, so it is in the same slot. A user who may not publish still ends the
-- attempt.
redis.pcall('SPUBLISH', key, state .. ' ' .. text(token))
