-- Fixes the batch of a step. ARGV: incarnation, step, batch (`BatchRecord`), its advantages, changes of
-- the memory {key: text, empty: deleted}, groups whose outcomes were observed: [group, ...], keys that
-- leave the pool of stored episodes: [key, ...]
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
redis.call('HSET', ADVANTAGES, ARGV[2], ARGV[4])
for key, text in pairs(cjson.decode(ARGV[5])) do
  if text == '' then redis.call('HDEL', MEMORY, key) else redis.call('HSET', MEMORY, key, text) end
end
for _, gid in ipairs(cjson.decode(ARGV[6])) do
  redis.call('HDEL', OUTCOMES, gid)
  local rec = record(gid)
  if rec then -- its task may come again, and is not observed twice
    rec.seen = true
    touched[gid] = true
  end
end
for _, key in ipairs(cjson.decode(ARGV[7])) do stored[key] = false end
return finish(0)
