local state_before = state
if state == 'in-progress' and now >= lease_until then
  state_before = 'abandoned'
elseif state == 'awaited' then
  state_before = 'tombstone'
end
