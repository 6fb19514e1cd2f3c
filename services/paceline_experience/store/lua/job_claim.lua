-- Takes or renews the ownership of a job. KEYS: owner, epoch.
-- ARGV: owner, lease in ms, epoch (0: take), the epoch that begins when it is taken
-- Answers the epoch; 0: another owner's lease runs, or the epoch is over.
local owner = redis.call('GET', KEYS[1])
if owner and owner ~= ARGV[1] then return 0 end
local epoch = ARGV[3]
if epoch == '0' then
  epoch = ARGV[4]
  redis.call('SET', KEYS[2], epoch)
elseif epoch ~= redis.call('GET', KEYS[2]) then
  return 0
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return tonumber(epoch)
