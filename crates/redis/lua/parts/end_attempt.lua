-- Ends the attempt in this state.
if ended_as then
  local expired_at = expires_at
  state, changed_at, expires_at, by_operator = ended_as, now, now + retention, operator
  attempt, lease_until, after_abandoned = '\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0', 0, 0
  if number_of_steps > 0 or operator == 1 then
    -- Finished steps keep their retention, and parking a record never shortens its retention.
    if state == 'released' and number_of_steps > 0 or state == 'unknown' and operator == 1 then
      expires_at = math.max(expires_at, expired_at)
    end
    -- An operator's resolution keeps the steps: it may be taken back, and the next attempt must not repeat finished steps.
    if state ~= 'unknown' and state ~= 'released' and operator == 0 then
      steps = ''
    end
  end
end
