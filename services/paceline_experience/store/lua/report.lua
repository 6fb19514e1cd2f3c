-- What became of leased episodes.
-- ARGV: {max_attempts, observe, items: [{group, index, attempt, verdict, detail}]}
-- verdicts: ok (with `result`, a JSON text, and policy_tokens), again (infrastructure failed or lease expired), drain (the worker goes
-- away and hands over: not counted among the attempts), invalid, oversized, gone
local input = cjson.decode(ARGV[1])

local function spared(rec, i)
  rec.drains = rec.drains or {}
  for j = #rec.drains + 1, #rec.states do rec.drains[j] = 0 end
  rec.drains[i] = rec.drains[i] + 1
end

-- What plug-ins with a memory are told of a group that is given up and does not come again: one that
-- infrastructure failed on comes once more.
local function observe_failed(rec, reason)
  if not input.observe or rec.version or rec.seen then return end
  if not UNUSABLE[reason] and (rec.again or 0) == 0 then return end
  observed[rec.id] = cjson.encode({seq = rec.seq, task = rec.position, failed = reason, pick = rec.pick})
end

local function requeue(rec, i)
  if rec.attempts[i] - (rec.drains and rec.drains[i] or 0) >= input.max_attempts then
    drop(rec, 'group_failed', i, 'exhausted_attempts')
    observe_failed(rec, 'group_failed')
    return 'dropped'
  end
  move(rec, i, 'q')
  return 'requeued'
end

local function accept(rec, i, item)
  if state_of(rec, i) == 'q' then move(rec, i, 'l') end  -- it came after its lease expired
  move(rec, i, rec.version and 'm' or 'f')
  fresh[item.group .. '/' .. item.index] = item.result
  bump(rec.version and 'eval:tokens' or 'tokens', item.policy_tokens)
  return 'accepted'
end

local function failed(rec, i, item)
  if UNUSABLE[item.verdict] then
    set('invalid_detail', item.detail)
    drop(rec, item.verdict)
    observe_failed(rec, item.verdict)
    return 'dropped'
  elseif item.verdict == 'gone' and rec.version then
    drop(rec, 'stale')
    return 'dropped'
  end
  if item.verdict == 'drain' then spared(rec, i) end
  return requeue(rec, i)
end

local function outcome(item)
  local rec = record(item.group)
  if not rec then return 'dropped' end
  local i = item.index + 1
  local state = state_of(rec, i)
  if state == '' or item.attempt < 1 or item.attempt > rec.attempts[i] then return 'dropped' end
  if state == 'x' then return 'dropped' end  -- a filter has left it out
  if state ~= 'q' and state ~= 'l' then
    return cjson.decode(result_of(rec, i)).attempt == item.attempt and 'duplicate' or 'superseded'
  end
  if item.verdict == 'ok' then return accept(rec, i, item) end
  if UNUSABLE[item.verdict] then return failed(rec, i, item) end
  if state ~= 'l' or item.attempt ~= rec.attempts[i] then return 'superseded' end
  return failed(rec, i, item)
end

local outcomes = {}
for n, item in ipairs(input.items) do outcomes[n] = outcome(item) end
return finish(outcomes)
