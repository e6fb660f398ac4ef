-- Reads the record from `value`, which is false if there is none. A damaged record is never treated as absent.
if type(value) == 'table' then
  -- An error, such as that the user has no right, is no damage.
  return string.find(value.err, '^WRONGTYPE') and redis.error_reply('CORRUPT the key holds no record') or value
end
local damage
if value then
  local is_whole
  is_whole, version, response_size, state, by_operator, after_abandoned, changed_at, expires_at, lease_until, attempt, token,
    attempts, created_at, fingerprint, caller, key_tag, operation, resolution, steps_at = pcall(struct.unpack, HEAD, value)
  if string.byte(value) ~= 1 then
    damage = 'the record has an unknown version'
  elseif not (is_whole and by_operator < 2 and after_abandoned < 2 and changed_at < MAX_NUMBER and expires_at < MAX_NUMBER
    and lease_until < MAX_NUMBER and token > 0 and token < MAX_NUMBER and attempts > 0 and created_at < MAX_NUMBER
    and (#key_tag == 0 or #key_tag == 8) and #operation <= 256) then
    damage = 'a part of the record is missing or out of range'
  elseif state == 'in-progress' and (lease_until == 0 or response_size > 0)
    or state == 'completed' and (lease_until > 0 or response_size < 7)
    or state ~= 'in-progress' and state ~= 'completed' and (lease_until > 0 or response_size > 0
      or state ~= 'unknown' and state ~= 'awaited' and state ~= 'tombstone' and state ~= 'released') then
    damage = 'the state of the record is unknown or does not fit its other parts'
  else
    -- The steps are between the head and the response, which a lookup may leave out.
    local steps_end = #value - (without_response and 0 or response_size)
    if steps_at > steps_end + 1 then
      damage = 'the end of the record is missing'
    elseif steps_at <= steps_end then
      steps = string.sub(value, steps_at, steps_end)
      local at = 1
      while not damage and at <= #steps do
        local is_step, name, _, next_at = pcall(step_at, steps, at)
        number_of_steps, at = number_of_steps + 1, next_at
        if not is_step or name == '' or number_of_steps > 256 then
          damage = 'the steps of the record cannot be read'
        end
      end
    end
  end
end
if damage then
  return redis.error_reply('CORRUPT ' .. damage)
end
-- A record past its retention counts as absent; only its token still matters.
local live = value and now < expires_at
