-- Opens, continues or closes the eval run. Its tasks come in by windows; what is measured leaves with them.
-- ARGV: `open` | `next`, run (`EvalRun`), places of its tasks, prefix of groups, samples of a task,
-- for `next` [group measured]
-- | `close`, {field: text}, [group], row of the history (JSON; empty: none), and as for `open` a run that is next
local function leave(gids, missing)
  for _, gid in ipairs(gids) do
    local rec = record(gid)
    if rec and not string.find(rec.states, '[^m]') then forget(rec) elseif rec and missing then drop(rec, 'stale') end
  end
end

local function admit(run, places, prefix, samples)
  local version = cjson.decode(run).version
  for _, place in ipairs(cjson.decode(places)) do
    create(prefix .. place, tonumber(samples), {seq = place, position = place, version = version})
  end
  set('eval', run)
end

if ARGV[1] == 'close' then
  leave(cjson.decode(ARGV[3]), true)
  set('eval', '')
  for field, value in pairs(cjson.decode(ARGV[2])) do set(field, value) end
  if ARGV[4] ~= '' then redis.call('RPUSH', METRICS, ARGV[4]) end
  -- The revision and the epoch come last.
  if #ARGV > 6 then admit(ARGV[5], ARGV[6], ARGV[7], ARGV[8]) end
else
  local is_open = get('eval', '') ~= ''
  if is_open and ARGV[1] == 'open' then fail('STATE', 'an eval run is open') end
  if not is_open and ARGV[1] == 'next' then fail('STATE', 'no eval run is open') end
  if ARGV[1] == 'next' then leave(cjson.decode(ARGV[6]), false) end
  admit(ARGV[2], ARGV[3], ARGV[4], ARGV[5])
  if ARGV[1] == 'open' then set('eval_due', '') end
end
return finish(0)
