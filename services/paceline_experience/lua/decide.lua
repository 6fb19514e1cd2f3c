-- ARGV: [[gid, verdict, detail]]: verdict `ready`, or the reason to drop the group; the detail, if
-- there is one, says what was wrong with it
for _, item in ipairs(cjson.decode(ARGV[1])) do
  local rec = record(item[1])
  if rec and item[2] == 'ready' then
    move_all(rec, 'r')
    rec.k = 1
    bump('groups:open', -1)
    bump('groups:accepted', 1)
    bump('groups:ended', 1)
  elseif rec then
    drop(rec, item[2])
    if (item[3] or '') ~= '' then set('invalid_detail', item[3]) end
  end
end
return finish(0)
