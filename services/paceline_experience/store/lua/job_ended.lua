-- A job is over: it is no live job any more, and what its end asks for is noted with that, once.
-- KEYS: live, expiries, notices. ARGV: job id, when to delete it (empty: never), notice (empty: none)
if redis.call('ZREM', KEYS[1], ARGV[1]) == 0 then return 0 end
if ARGV[2] ~= '' then redis.call('ZADD', KEYS[2], ARGV[2], ARGV[1]) end
if ARGV[3] ~= '' then redis.call('HSET', KEYS[3], ARGV[1], ARGV[3]) end
return 1
