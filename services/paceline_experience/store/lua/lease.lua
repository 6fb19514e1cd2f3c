-- ARGV: plan {worker, max_staleness, batch_groups, group_size, admit: [{group, seq, position, again, pick, seen, size, starts}],
-- lease: [{group, indices}], feed}
local plan = cjson.decode(ARGV[1])

if #plan.admit > 0 then
  if get('stop', '') ~= '' then fail('STATE', 'admission has stopped: ' .. get('stop', '')) end
  local held = redis.call('HMGET', COUNTS, 'groups:open', 'groups:accepted')
  local there = (tonumber(held[1]) or 0) + (tonumber(held[2]) or 0)
  local bound = (plan.max_staleness + number('step') + 1) * plan.batch_groups
  if there + #plan.admit > bound then
    fail('STATE', 'admission: ' .. there .. ' groups and ' .. #plan.admit .. ' more exceed ' .. bound)
  end
  for _, item in ipairs(plan.admit) do
    local size = item.size or plan.group_size
    create(item.group, size, {seq = item.seq, position = item.position, again = item.again,
      pick = item.pick, seen = item.seen, starts = item.starts})
    bump('admitted', size)
    bump('groups:open', 1)
  end
  set('feed', plan.feed)
end

for _, item in ipairs(plan.lease) do
  local rec = record(item.group)
  for _, index in ipairs(item.indices) do
    local i = index + 1
    move(rec, i, 'l')
    rec.attempts[i] = rec.attempts[i] + 1
    rec.workers[i] = plan.worker
    bump('attempts', 1)
  end
end
return finish(0)
