-- Opens or closes the eval run. ARGV: `open`, run JSON, [[gid, seq, position]] | `close`, result {field: value}, [gid]
if ARGV[1] == 'open' then
  if get('eval', '') ~= '' then fail('STATE', 'an eval run is open') end
  local run = cjson.decode(ARGV[2])
  for _, item in ipairs(cjson.decode(ARGV[3])) do
    create(item[1], {q = item[2], p = item[3], n = 1, e = run.version})
  end
  set('eval', ARGV[2])
  set('eval_due', '')
else
  for _, gid in ipairs(cjson.decode(ARGV[3])) do
    local rec = record(gid)
    if rec and rec.s == 'm' then forget(rec) elseif rec then drop(rec, 'stale') end
  end
  set('eval', '')
  for field, value in pairs(cjson.decode(ARGV[2])) do set(field, value) end
end
return finish(0)
