-- Writes a job's record if there is none. KEYS: record. ARGV: field, value, ...
if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
redis.call('HSET', KEYS[1], unpack(ARGV))
return 1
