-- ARGV: [[gid, verdict]]: verdict `ready`, or the reason to drop the group
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
  end
end
return finish(0)
