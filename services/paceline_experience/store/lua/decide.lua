-- ARGV: [{group, verdict, detail, left_out, outcome, surplus, count, starts, repaired, filtered_for}].
-- Verdicts: `ready` (episodes at the indices `left_out`, from 0, are dropped), `close` (filters decide
-- later), `more` (`count` further episodes begin, in place of those at the indices `repaired`, if there
-- are any; `starts` is then that of all), or the reason to drop the group. With `surplus` the group is
-- closed first: what is still open of it is dropped, and finished episodes at these indices. The detail,
-- if there is one, says what was wrong with the group, `filtered_for` is the reason of a filter; the
-- outcome, if there is one, is kept until the next batch is fixed. Of a job with a replay: `guests`, the
-- stored episodes that join the group (JSON text), those of its own that they replace, and what enters
-- (`stored`, text by key) and leaves (`evicted`) the pool; an item without a group has nothing else.
for _, item in ipairs(cjson.decode(ARGV[1])) do
  local rec = item.group and record(item.group)
  if rec and item.surplus then close_early(rec, item.surplus) end
  if item.verdict == 'close' then -- filters decide later
  elseif rec and item.verdict == 'more' then
    extend(rec, item.count, item.starts, item.repaired)
  elseif rec and item.verdict == 'ready' then
    leave_out(rec, item.left_out)
    if item.guests then join(rec, item.guests, item.replaced) end
    move_all(rec, 'r')
    rec.accepted = true
    bump('groups:open', -1)
    bump('groups:accepted', 1)
    end_invalid_run()
    bump('groups:ended', 1)
  elseif rec then
    drop(rec, item.verdict)
    if not UNUSABLE[item.verdict] then end_invalid_run() end
    if item.filtered_for then bump('filter:' .. item.filtered_for, 1) end
    if item.detail ~= '' then set('invalid_detail', item.detail) end
  end
  for _, key in ipairs(item.evicted or {}) do stored[key] = false end
  for key, text in pairs(item.stored or {}) do stored[key] = text end
  if rec and item.outcome ~= '' then observed[item.group] = item.outcome end
end
return finish(0)
