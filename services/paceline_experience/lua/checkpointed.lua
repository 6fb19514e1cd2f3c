-- Steps below a durable checkpoint need nothing any more. ARGV: incarnation, step, path
fence(tonumber(ARGV[1]))
local step = tonumber(ARGV[2])
if step > number('step') then
  fail('STATE', 'checkpoint of step ' .. step .. ', but the ledger is at step ' .. number('step'))
end
for k = number('durable'), step - 1 do
  local text = redis.call('HGET', BATCHES, k)
  if text then
    for _, gid in ipairs(cjson.decode(text).groups) do
      local rec = record(gid)
      move_all(rec, 'd')
      bump('groups:durable', 1)
      forget(rec)
    end
    redis.call('HDEL', BATCHES, k)
    redis.call('HDEL', SAMPLERS, k)
  end
end
if step > number('durable') then set('durable', step) end
set('checkpoint', ARGV[3])
return finish(0)
