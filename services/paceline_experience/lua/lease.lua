-- ARGV: plan {worker, bound: {S, B}, admit: [[gid, seq, position, size, again]], lease: [[gid, [index]]], feed}
local plan = cjson.decode(ARGV[1])

if #plan.admit > 0 then
  if get('stop', '') ~= '' then fail('STATE', 'admission has stopped: ' .. get('stop', '')) end
  local held = redis.call('HMGET', COUNTS, 'groups:open', 'groups:accepted')
  local there = (tonumber(held[1]) or 0) + (tonumber(held[2]) or 0)
  local bound = (plan.bound[1] + number('step') + 1) * plan.bound[2]
  if there + #plan.admit > bound then
    fail('STATE', 'admission: ' .. there .. ' groups and ' .. #plan.admit .. ' more exceed ' .. bound)
  end
  for _, item in ipairs(plan.admit) do
    create(item[1], {q = item[2], p = item[3], n = item[4], r = item[5]})
    bump('admitted', item[4])
    bump('groups:open', 1)
  end
  set('feed', plan.feed)
end

for _, item in ipairs(plan.lease) do
  local rec = record(item[1])
  for _, index in ipairs(item[2]) do
    local i = index + 1
    move(rec, i, 'l')
    rec.a[i] = rec.a[i] + 1
    rec.w[i] = plan.worker
    bump('attempts', 1)
  end
end
return finish(0)
