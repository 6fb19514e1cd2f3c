-- Takes or renews the ownership of a job. KEYS: owner, epoch. ARGV: owner, lease in ms, epoch (0: take)
-- Answers the epoch; 0: another owner's lease runs, or the epoch is over.
local owner = redis.call('GET', KEYS[1])
local epoch = tonumber(redis.call('GET', KEYS[2]) or '0')
if owner and owner ~= ARGV[1] then return 0 end
if tonumber(ARGV[3]) == 0 then
  epoch = redis.call('INCR', KEYS[2])
elseif tonumber(ARGV[3]) ~= epoch then
  return 0
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return epoch
