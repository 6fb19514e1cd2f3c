-- Prepended to every script, after STEPS and NAMES, which are made from the nouns' state table.
-- A script loads records, moves episodes, and calls finish(); nothing is written before that,
-- so that a refused transition leaves no trace.
local COUNTS, META, GROUPS, BATCHES, VERSIONS, RESULTS, PROGRESS, RING, METRICS,
  ADVANTAGES, MEMORY, OUTCOMES, REPLAY, EPOCH = unpack(KEYS)
local records, touched, removed, delta, meta, unfixed, fresh = {}, {}, {}, {}, {}, {}, {}
local observed = {} -- outcome by group; false: there is none any more
local trimmed = {} -- groups that have lost episodes, but are kept
local stored = {} -- text by key of the pool; false: it is evicted

-- Reasons that lie with the task or the episode: another attempt would end the same way.
local UNUSABLE = {invalid = true, oversized = true}

local function fail(word, text)
  error({err = word .. ' ' .. text})
end

-- Ledger scripts end with the revision that their caller knows and the epoch of its ownership. A
-- replica that was cut off and has lost the job to another one writes nothing any more, and nothing
-- is written on another state than the one that the caller has planned from: a store that lost its
-- last second is at an older one.
local revision
if EPOCH then
  local epoch = redis.call('GET', EPOCH) or '0'
  if epoch ~= ARGV[#ARGV] then
    fail('LOST', 'another replica owns this job since epoch ' .. epoch .. '; ask again')
  end
  revision = redis.call('HGET', META, 'revision') or '0'
  if revision ~= ARGV[#ARGV - 1] then
    fail('OUTDATED', 'the ledger is at revision ' .. revision .. ' in the store, not at '
      .. ARGV[#ARGV - 1] .. '; ask again')
  end
end

local function bump(name, by)
  delta[name] = (delta[name] or 0) + by
end

local function get(field, default)
  local value = meta[field] or redis.call('HGET', META, field)
  if not value or value == '' then return default end
  return value
end

local function number(field)
  return tonumber(get(field, '0'))
end

local function set(field, value)
  meta[field] = tostring(value)
end

local function fence(incarnation)
  local now = number('incarnation')
  if incarnation < now then
    fail('FENCED', 'incarnation ' .. incarnation .. ' has been replaced by ' .. now)
  elseif incarnation > now then
    fail('FENCED', 'incarnation ' .. incarnation .. ' was never granted, the newest is ' .. now)
  end
end

local function record(gid)
  if removed[gid] then return nil end
  local found = records[gid]
  if not found then
    local text = redis.call('HGET', GROUPS, gid)
    if not text then return nil end
    found = cjson.decode(text)
    found.id = gid
    records[gid] = found
  end
  return found
end

-- What a group's record says is read by `parse_group` of the ledger. Its fields: seq, position, again,
-- pick, seen, starts, waves, closed, repairs, guests (JSON text), states (a letter for each episode), attempts, workers, version (pinned, of an eval group), accepted, batch
-- (step), drains (by episode), has_progress.
local function create(gid, size, fields)
  fields.id = gid
  fields.states, fields.attempts, fields.workers = string.rep('q', size), {}, {}
  for i = 1, size do
    fields.attempts[i], fields.workers[i] = 0, ''
  end
  records[gid] = fields
  touched[gid] = true
  bump(fields.version and 'eval:queued' or 'queued', size)
end

local function state_of(rec, i)
  return string.sub(rec.states, i, i)
end

local function move(rec, i, to)
  local from = state_of(rec, i)
  if not string.find(STEPS[from], to, 1, true) then
    fail('TRANSITION', 'episode ' .. rec.id .. '/' .. (i - 1) .. ': ' .. NAMES[from]
      .. ' -> ' .. NAMES[to] .. ' is not allowed')
  end
  rec.states = string.sub(rec.states, 1, i - 1) .. to .. string.sub(rec.states, i + 1)
  local kind = rec.version and 'eval:' or ''
  bump(kind .. NAMES[from], -1)
  bump(kind .. NAMES[to], 1)
  touched[rec.id] = true
end

-- All episodes but those that were dropped from a group that is kept.
local function move_all(rec, to)
  for i = 1, #rec.states do
    if state_of(rec, i) ~= 'x' then move(rec, i, to) end
  end
end

-- A group whose task could be run ends the run of those that could not.
local function end_invalid_run()
  local name = 'groups:invalid_run'
  bump(name, -(tonumber(redis.call('HGET', COUNTS, name) or '0') + (delta[name] or 0)))
end

local function drop_episode(rec, i, reason)
  move(rec, i, 'x')
  bump((rec.version and 'eval:drop:' or 'drop:') .. reason, 1)
end

local function forget(rec)
  removed[rec.id] = true
end

-- The batch of a step is not trained: its episodes leave the histogram of what was.
local function unfix(step)
  if unfixed[step] then return end
  unfixed[step] = true
  local text = redis.call('HGET', BATCHES, step)
  local batch = text and cjson.decode(text) or {}
  if not batch.counted then return end
  for age, episodes in pairs(batch.stats.staleness) do bump('stale:' .. age, -episodes) end
  bump('replayed', -(batch.stats.replayed or 0))
end

-- Drops the whole group; episode `only`, if given, for a reason of its own.
local function drop(rec, reason, only, only_reason)
  for i = 1, #rec.states do
    if state_of(rec, i) ~= 'x' then drop_episode(rec, i, i == only and only_reason or reason) end
  end
  if not rec.version then
    if rec.accepted then
      bump('groups:accepted', -1)
    else
      bump('groups:open', -1)
      bump('groups:ended', 1)
    end
    if UNUSABLE[reason] then
      bump('groups:invalid', 1)
      bump('groups:invalid_run', 1)
    end
    if rec.batch then unfix(rec.batch) end
    -- Its task may come again, and would be observed twice.
    observed[rec.id] = false
  end
  forget(rec)
end

-- A group is closed early: what has not finished is not needed, nor are episodes at the indices `late`.
local function close_early(rec, late)
  rec.closed = true
  touched[rec.id] = true
  for _, index in ipairs(late) do
    drop_episode(rec, index + 1, 'surplus')
    trimmed[rec.id] = true
  end
  for i = 1, #rec.states do
    local state = state_of(rec, i)
    if state == 'q' or state == 'l' then drop_episode(rec, i, 'surplus') end
  end
end

-- Another wave of a group that is still open, or other episodes in place of `repaired` ones.
local function extend(rec, count, starts, repaired)
  for _, index in ipairs(repaired or {}) do
    drop_episode(rec, index + 1, 'repaired')
    trimmed[rec.id] = true
  end
  if repaired then rec.repairs = (rec.repairs or 0) + 1 else rec.waves = (rec.waves or 1) + 1 end
  rec.states = rec.states .. string.rep('q', count)
  for i = #rec.attempts + 1, #rec.states do
    rec.attempts[i], rec.workers[i] = 0, ''
  end
  if starts ~= '' then rec.starts = starts end
  touched[rec.id] = true
  bump('queued', count)
  bump('admitted', count)
end

-- Stored episodes join a group, some of them in place of its own.
local function join(rec, guests, replaced)
  rec.guests = guests
  for _, index in ipairs(replaced) do
    drop_episode(rec, index + 1, 'replaced')
    trimmed[rec.id] = true
  end
end

-- Filters keep only a part of a group: episodes at these indices (from 0) are dropped.
local function leave_out(rec, indices)
  for _, index in ipairs(indices) do
    drop_episode(rec, index + 1, 'filtered')
    trimmed[rec.id] = true
  end
end

-- What a finished episode came to, as text that is passed on as it is.
local function result_of(rec, i)
  local name = rec.id .. '/' .. (i - 1)
  return fresh[name] or redis.call('HGET', RESULTS, name)
end

-- Results of all episodes, or of those in the state `only`.
local function forget_results(gid, rec, only)
  local names = {}
  for i = 1, #rec.states do
    if not only or state_of(rec, i) == only then names[#names + 1] = gid .. '/' .. (i - 1) end
  end
  for from = 1, #names, 1000 do  -- Lua unpacks some thousands at most
    redis.call('HDEL', RESULTS, unpack(names, from, math.min(from + 999, #names)))
  end
end

-- Progress is kept for open episodes only.
local function clear_progress(gid, rec)
  for i = 1, #rec.states do
    local state = state_of(rec, i)
    if removed[gid] or (state ~= 'q' and state ~= 'l') then
      redis.call('HDEL', PROGRESS, gid .. '/' .. (i - 1))
    end
  end
end

local function finish(answer)
  local changed, results = {}, {}
  for name, text in pairs(fresh) do
    redis.call('HSET', RESULTS, name, text)
    results[#results + 1] = name
    results[#results + 1] = text
  end
  for gid, rec in pairs(records) do
    if removed[gid] or touched[gid] then
      if rec.has_progress then clear_progress(gid, rec) end
      rec.id = nil
      local text = ''
      if removed[gid] then
        redis.call('HDEL', GROUPS, gid)
        forget_results(gid, rec)
      else
        if trimmed[gid] then forget_results(gid, rec, 'x') end
        text = cjson.encode(rec)
        redis.call('HSET', GROUPS, gid, text)
      end
      changed[#changed + 1] = gid
      changed[#changed + 1] = text
    end
  end
  for step in pairs(unfixed) do
    redis.call('HDEL', BATCHES, step)
    redis.call('HDEL', ADVANTAGES, step)
  end
  for gid, text in pairs(observed) do
    if text then redis.call('HSET', OUTCOMES, gid, text) else redis.call('HDEL', OUTCOMES, gid) end
  end
  for key, text in pairs(stored) do
    if text then redis.call('HSET', REPLAY, key, text) else redis.call('HDEL', REPLAY, key) end
  end
  for name, by in pairs(delta) do
    if by ~= 0 then redis.call('HINCRBY', COUNTS, name, by) end
  end
  if revision then set('revision', string.format('%d', tonumber(revision) + 1)) end
  for field, value in pairs(meta) do redis.call('HSET', META, field, value) end
  return {cjson.encode({answer = answer, counts = delta, meta = meta}), changed, results}
end
