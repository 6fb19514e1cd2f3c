-- ARGV: [{group, verdict, detail, outcome}]: verdict `ready`, or the reason to drop the group; the
-- detail, if there is one, says what was wrong with it; the outcome, if there is one, is kept until
-- the next batch is fixed
for _, item in ipairs(cjson.decode(ARGV[1])) do
  local rec = record(item.group)
  if rec and item.verdict == 'ready' then
    move_all(rec, 'r')
    rec.accepted = true
    bump('groups:open', -1)
    bump('groups:accepted', 1)
    bump('groups:ended', 1)
  elseif rec then
    drop(rec, item.verdict)
    if (item.detail or '') ~= '' then set('invalid_detail', item.detail) end
  end
  if rec and (item.outcome or '') ~= '' then observed[item.group] = item.outcome end
end
return finish(0)
