-- Registers a job id, at most once. KEYS: tenants, requests, index, live, sequence.
-- ARGV: job id, tenant, request id, most live jobs of the tenant (-1: any number)
-- Returns the id of the job for this request (new, or from an earlier call); empty: the id is taken;
-- a number: the live jobs of the tenant, which has reached its limit.
if ARGV[3] ~= '' then
  local holder = redis.call('HGET', KEYS[2], ARGV[2] .. '/' .. ARGV[3])
  if holder == '' then fail('DELETED', "the job of request_id '" .. ARGV[3] .. "' was deleted; use another one") end
  if holder then return holder end
end
local most = tonumber(ARGV[4])
if most >= 0 then
  local used = 0
  for _, id in ipairs(redis.call('ZRANGE', KEYS[4], 0, -1)) do
    if redis.call('HGET', KEYS[1], id) == ARGV[2] then used = used + 1 end
  end
  if used >= most then return used end
end
if redis.call('HSETNX', KEYS[1], ARGV[1], ARGV[2]) == 0 then return '' end
if ARGV[3] ~= '' then redis.call('HSET', KEYS[2], ARGV[2] .. '/' .. ARGV[3], ARGV[1]) end
local number = redis.call('INCR', KEYS[5])
redis.call('ZADD', KEYS[3], number, ARGV[1])
redis.call('ZADD', KEYS[4], number, ARGV[1])
return ARGV[1]
