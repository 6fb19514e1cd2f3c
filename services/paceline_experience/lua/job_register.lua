-- Gives a job id away once. KEYS: tenants, requests, index, live, sequence. ARGV: job id, tenant, request id
-- Answers the id that holds the request (the new one, or that of an earlier call); empty: the id is taken.
if ARGV[3] ~= '' then
  local holder = redis.call('HGET', KEYS[2], ARGV[2] .. '/' .. ARGV[3])
  if holder then return holder end
end
if redis.call('HSETNX', KEYS[1], ARGV[1], ARGV[2]) == 0 then return '' end
if ARGV[3] ~= '' then redis.call('HSET', KEYS[2], ARGV[2] .. '/' .. ARGV[3], ARGV[1]) end
local number = redis.call('INCR', KEYS[5])
redis.call('ZADD', KEYS[3], number, ARGV[1])
redis.call('ZADD', KEYS[4], number, ARGV[1])
return ARGV[1]
