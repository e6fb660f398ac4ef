-- Writes the whole record with one command. Redis keeps it for ten minutes after its retention: if the server's clock is set
-- back, the next token is still greater.
redis.call('SET', key, struct.pack(HEAD, 1, #response, #state, state, by_operator, after_abandoned, changed_at, expires_at,
  lease_until, attempt, token, attempts, created_at, fingerprint, caller, #key_tag, key_tag, #operation, operation,
  #resolution, resolution) .. steps .. response, 'PXAT', text(expires_at + 600000))
