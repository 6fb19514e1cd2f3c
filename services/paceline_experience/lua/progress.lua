-- Keeps what leased episodes have so far. ARGV: [[gid, index, attempt]], then one blob for each
for n, item in ipairs(cjson.decode(ARGV[1])) do
  local rec = record(item[1])
  local i = item[2] + 1
  if rec and string.sub(rec.s, i, i) == 'l' and rec.a[i] == item[3] then
    redis.call('HSET', PROGRESS, item[1] .. '/' .. item[2], ARGV[n + 1])
    if not rec.h then
      rec.h = 1
      touched[item[1]] = true
    end
  end
end
return finish(0)
