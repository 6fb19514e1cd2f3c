-- The trainer starts again from a checkpoint; batches from there on come again as they were fixed.
-- ARGV: incarnation, step
fence(tonumber(ARGV[1]))
local step, now = tonumber(ARGV[2]), number('step')
if step > now or step < number('durable') then
  fail('STATE', 'cannot rewind to step ' .. step .. ': the ledger keeps steps '
    .. number('durable') .. ' to ' .. now)
end
for k = step, now - 1 do
  local batch = cjson.decode(redis.call('HGET', BATCHES, k))
  for _, gid in ipairs(batch.groups) do move_all(record(gid), 't') end
  batch.committed = false
  redis.call('HSET', BATCHES, k, cjson.encode(batch))
end
-- What is trained again is listed again; what is dropped instead must not be listed.
redis.call('ZREMRANGEBYSCORE', RING, step * 1048576, '+inf')
local all = redis.call('HGETALL', VERSIONS)
for n = 1, #all, 2 do
  local version = cjson.decode(all[n + 1])
  if version.age_step > step then
    version.age_step = step
    redis.call('HSET', VERSIONS, all[n], cjson.encode(version))
  end
end
set('step', step)
if number('checkpoint_step') > step then set('checkpoint_step', step) end
for _, field in ipairs({'checkpoints', 'evaluated'}) do
  local known = cjson.decode(get(field, '{}'))
  for k in pairs(known) do
    if tonumber(k) > step then known[k] = nil end
  end
  set(field, next(known) and cjson.encode(known) or '')
end
local reason = get('stop_reason', '')
if get('stop', '') == 'finished' and (reason == 'steps' or reason == 'tasks') then set('stop', '') end
return finish(0)
