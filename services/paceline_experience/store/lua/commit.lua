-- ARGV: incarnation, step, batch id, ring entries to write: [name, name, ...], tallies {name: by},
-- row of the history (JSON)
fence(tonumber(ARGV[1]))
local step, now = tonumber(ARGV[2]), number('step')
local text = redis.call('HGET', BATCHES, ARGV[2])
if not text then fail('STATE', 'no batch of step ' .. step .. ' was taken; the ledger is at step ' .. now) end
local batch = cjson.decode(text)
if batch.batch_id ~= ARGV[3] then
  fail('STATE', 'the batch of step ' .. step .. ' is ' .. batch.batch_id .. ', not ' .. ARGV[3])
end
if batch.committed then return finish({again = true}) end
if step ~= now then
  fail('STATE', 'CommitStep of step ' .. step .. ', but the ledger is at step ' .. now)
end
for _, gid in ipairs(batch.groups) do move_all(record(gid), 'n') end
set('step', step + 1)
if not batch.counted then
  for name, by in pairs(cjson.decode(ARGV[5])) do bump(name, by) end
end
for place, name in ipairs(cjson.decode(ARGV[4])) do
  redis.call('ZADD', RING, step * 1048576 + place, name)
end
redis.call('RPUSH', METRICS, ARGV[6])
batch.committed, batch.counted = true, true
redis.call('HSET', BATCHES, ARGV[2], cjson.encode(batch))
return finish({again = false})
