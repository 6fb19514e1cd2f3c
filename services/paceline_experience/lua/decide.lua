-- ARGV: [[gid, verdict, order]]: verdict `ready`, or the reason to drop the group; order among ready ones;
--       then the next such order, or nothing
for _, item in ipairs(cjson.decode(ARGV[1])) do
  local rec = record(item[1])
  if rec and item[2] == 'ready' then
    move_all(rec, 'r')
    rec.k, rec.o = 1, item[3]
    bump('groups:open', -1)
    bump('groups:accepted', 1)
    bump('groups:ended', 1)
  elseif rec then
    drop(rec, item[2])
  end
end
if ARGV[2] ~= '' then set('ready_order', ARGV[2]) end
return finish(0)
