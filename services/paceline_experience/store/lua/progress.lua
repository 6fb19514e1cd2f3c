-- Keeps what leased episodes have so far. ARGV: [{group, index, attempt}], then one blob for each
for n, item in ipairs(cjson.decode(ARGV[1])) do
  local rec = record(item.group)
  local i = item.index + 1
  if rec and state_of(rec, i) == 'l' and rec.attempts[i] == item.attempt then
    redis.call('HSET', PROGRESS, item.group .. '/' .. item.index, ARGV[n + 1])
    if not rec.has_progress then
      rec.has_progress = true
      touched[item.group] = true
    end
  end
end
return finish(0)
