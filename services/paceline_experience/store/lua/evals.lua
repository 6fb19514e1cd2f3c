-- Opens, continues or closes the eval run. Its tasks come in by windows; what is measured leaves with them.
-- ARGV: `open` | `next`, run (`EvalRun`), places of its tasks, prefix of groups, [group measured]
-- | `close`, {field: text}, [group], row of the history (JSON; empty: none)
local function leave(gids, missing)
  for _, gid in ipairs(gids) do
    local rec = record(gid)
    if rec and rec.states == 'm' then forget(rec) elseif rec and missing then drop(rec, 'stale') end
  end
end

if ARGV[1] == 'close' then
  leave(cjson.decode(ARGV[3]), true)
  set('eval', '')
  for field, value in pairs(cjson.decode(ARGV[2])) do set(field, value) end
  if ARGV[4] ~= '' then redis.call('RPUSH', METRICS, ARGV[4]) end
else
  local is_open = get('eval', '') ~= ''
  if is_open and ARGV[1] == 'open' then fail('STATE', 'an eval run is open') end
  if not is_open and ARGV[1] == 'next' then fail('STATE', 'no eval run is open') end
  local run = cjson.decode(ARGV[2])
  leave(cjson.decode(ARGV[5]), false)
  for _, place in ipairs(cjson.decode(ARGV[3])) do
    create(ARGV[4] .. place, 1, {seq = place, position = place, version = run.version})
  end
  set('eval', ARGV[2])
  if ARGV[1] == 'open' then set('eval_due', '') end
end
return finish(0)
