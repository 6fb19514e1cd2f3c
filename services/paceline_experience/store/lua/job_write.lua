-- Writes a job's record if there is none. KEYS: record, spec. ARGV: spec, field, value, ...
if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
redis.call('SET', KEYS[2], ARGV[1])
redis.call('HSET', KEYS[1], unpack(ARGV, 2))
return 1
