-- Moves a job to another state. A job already in that state may get a new reason. KEYS: record
-- ARGV: job id, state, states it may come from (each followed by a comma), field set once, now, field, value, ...
local state = redis.call('HGET', KEYS[1], 'state')
if not state then fail('MISSING', "job '" .. ARGV[1] .. "' is not known") end
if state == ARGV[2] then
  if state == 'queued' or state == 'starting' or state == 'running' then redis.call('HSET', KEYS[1], unpack(ARGV, 6)) end
  return 0
end
if not string.find(',' .. ARGV[3], ',' .. state .. ',', 1, true) then
  fail('TRANSITION', 'job: ' .. state .. ' -> ' .. ARGV[2] .. ' is not allowed')
end
redis.call('HSET', KEYS[1], 'state', ARGV[2], unpack(ARGV, 6))
if ARGV[4] ~= '' then redis.call('HSETNX', KEYS[1], ARGV[4], ARGV[5]) end
return 1
