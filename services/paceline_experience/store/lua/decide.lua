-- ARGV: [{group, verdict, detail, left_out, outcome}]: verdict `ready`, or the reason to drop the
-- group; the detail, if there is one, says what was wrong with it; episodes at the indices `left_out`
-- (from 0) of a group that is ready are dropped; the outcome, if there is one, is kept until the next
-- batch is fixed
for _, item in ipairs(cjson.decode(ARGV[1])) do
  local rec = record(item.group)
  if rec and item.verdict == 'ready' then
    leave_out(rec, item.left_out)
    move_all(rec, 'r')
    rec.accepted = true
    bump('groups:open', -1)
    bump('groups:accepted', 1)
    bump('groups:ended', 1)
  elseif rec then
    drop(rec, item.verdict)
    if item.detail ~= '' then set('invalid_detail', item.detail) end
  end
  if rec and item.outcome ~= '' then observed[item.group] = item.outcome end
end
return finish(0)
