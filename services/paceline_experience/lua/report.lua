-- What became of leased episodes.
-- ARGV: {most: max_attempts, items: [[gid, index, attempt, verdict, facts or detail]]}
-- verdicts: ok, again (infrastructure failed or lease expired), drain (the worker goes away and
-- hands over: not counted among the attempts), invalid, oversized, gone
local input = cjson.decode(ARGV[1])

local function spared(rec, i)
  rec.d = rec.d or {}
  for j = #rec.d + 1, #rec.s do rec.d[j] = 0 end
  rec.d[i] = rec.d[i] + 1
end

local function requeue(rec, i)
  if rec.a[i] - (rec.d and rec.d[i] or 0) >= input.most then
    drop(rec, 'group_failed', i, 'exhausted_attempts')
    return 'dropped'
  end
  move(rec, i, 'q')
  return 'requeued'
end

local function accept(rec, i, facts)
  if string.sub(rec.s, i, i) == 'q' then move(rec, i, 'l') end  -- it came after its lease expired
  move(rec, i, rec.e and 'm' or 'f')
  rec.f[i] = facts
  local tokens = string.match(facts, '^%d+,[^,]*,%d,(%d+)')
  bump(rec.e and 'eval:tokens' or 'tokens', tonumber(tokens))
  return 'accepted'
end

local function failed(rec, i, verdict, detail)
  if UNUSABLE[verdict] then
    set('invalid_detail', detail)
    drop(rec, verdict)
    return 'dropped'
  elseif verdict == 'gone' and rec.e then
    drop(rec, 'stale')
    return 'dropped'
  end
  if verdict == 'drain' then spared(rec, i) end
  return requeue(rec, i)
end

local function outcome(item)
  local rec = record(item[1])
  if not rec then return 'dropped' end
  local i, attempt, verdict = item[2] + 1, item[3], item[4]
  local state = string.sub(rec.s, i, i)
  if state == '' or attempt < 1 or attempt > rec.a[i] then return 'dropped' end
  if state ~= 'q' and state ~= 'l' then
    local by = tonumber(string.match(rec.f[i], '^%d+'))
    return by == attempt and 'duplicate' or 'superseded'
  end
  if verdict == 'ok' then return accept(rec, i, item[5]) end
  if UNUSABLE[verdict] then return failed(rec, i, verdict, item[5]) end
  if state ~= 'l' or attempt ~= rec.a[i] then return 'superseded' end
  return failed(rec, i, verdict, item[5])
end

local outcomes = {}
for n, item in ipairs(input.items) do outcomes[n] = outcome(item) end
return finish(outcomes)
