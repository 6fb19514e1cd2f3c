-- What no checkpoint needs any more goes: steps below the oldest one that is kept.
-- ARGV: incarnation, step, path, step of the oldest checkpoint that is kept, digests by step (JSON)
fence(tonumber(ARGV[1]))
local step, oldest = tonumber(ARGV[2]), tonumber(ARGV[4])
if step > number('step') then
  fail('STATE', 'checkpoint of step ' .. step .. ', but the ledger is at step ' .. number('step'))
end
for k = number('durable'), math.min(oldest, step) - 1 do
  local text = redis.call('HGET', BATCHES, k)
  if text then
    local batch = cjson.decode(text)
    bump('replayed:durable', batch.stats.replayed or 0)
    for _, gid in ipairs(batch.groups) do
      local rec = record(gid)
      move_all(rec, 'd')
      bump('groups:durable', 1)
      forget(rec)
    end
    redis.call('HDEL', BATCHES, k)
    redis.call('HDEL', ADVANTAGES, k)
  end
end
if oldest > number('durable') then set('durable', math.min(oldest, step)) end
set('checkpoint', ARGV[3])
set('checkpoint_step', step)
set('checkpoints', ARGV[5])
return finish(0)
