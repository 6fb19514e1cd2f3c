-- Fixes the batch of a step. ARGV: incarnation, step, batch (`BatchRecord`)
fence(tonumber(ARGV[1]))
local step = tonumber(ARGV[2])
if step ~= number('step') then
  fail('STATE', 'TakeBatch of step ' .. step .. ', but the ledger is at step ' .. number('step'))
end
if redis.call('HEXISTS', BATCHES, ARGV[2]) == 1 then
  fail('STATE', 'the batch of step ' .. step .. ' is fixed already')
end
local batch = cjson.decode(ARGV[3])
for _, gid in ipairs(batch.groups) do
  local rec = record(gid)
  if not rec then fail('STATE', 'group ' .. gid .. ' is gone') end
  move_all(rec, 't')
  rec.batch = step
end
redis.call('HSET', BATCHES, ARGV[2], ARGV[3])
return finish(0)
