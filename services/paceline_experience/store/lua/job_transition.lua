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
-- The time that it is paused is not part of its age.
if ARGV[2] == 'paused' then redis.call('HSET', KEYS[1], 'paused', ARGV[5]) end
if state == 'paused' then
  local since = redis.call('HGET', KEYS[1], 'paused')
  if since then
    local passed = math.max(0, tonumber(ARGV[5]) - tonumber(since))
    redis.call('HINCRBYFLOAT', KEYS[1], 'paused_s', passed)
    if redis.call('HEXISTS', KEYS[1], 'running') == 1 then
      redis.call('HINCRBYFLOAT', KEYS[1], 'paused_run_s', passed)
    end
  end
  redis.call('HDEL', KEYS[1], 'paused')
end
if ARGV[4] ~= '' then redis.call('HSETNX', KEYS[1], ARGV[4], ARGV[5]) end
return 1
