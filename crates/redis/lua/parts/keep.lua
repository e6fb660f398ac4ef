-- Redis keeps a record this long after its retention. If the server's clock is set back, the next token is still greater.
local GRACE = 600000

local function keep_until(expires_at)
  redis.call('PEXPIREAT', key, text(expires_at + GRACE))
end
