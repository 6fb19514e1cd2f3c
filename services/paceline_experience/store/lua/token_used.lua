-- Notes when a token was last used; one that is gone stays gone. KEYS: token. ARGV: now
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
redis.call('HSET', KEYS[1], 'used', ARGV[1])
return 1
