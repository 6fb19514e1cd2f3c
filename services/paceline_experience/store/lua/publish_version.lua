-- Numbers a publication; the same announcement again gets the same number.
-- ARGV: incarnation, step, parent, num_bytes, digest (empty: not known yet), highest number that was
-- ever handed out, number that this publication was given before (-1: none), 1 if nobody trains:
-- every incarnation then publishes the same weights, and takes over the publication of the one before
fence(tonumber(ARGV[1]))
local incarnation, step, parent = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local last, floor, given = tonumber(get('version', '-1')), tonumber(ARGV[6]), tonumber(ARGV[7])

local function again(number)
  local text = number >= 0 and redis.call('HGET', VERSIONS, number)
  if not text then return nil end
  local known = cjson.decode(text)
  local own = known.incarnation == incarnation
  if known.step ~= step or known.parent ~= parent or not (own or ARGV[8] == '1') then return nil end
  if ARGV[8] == '1' and ARGV[5] ~= '' and known.digest and known.digest ~= ARGV[5] then
    fail('STATE', 'version ' .. number .. ' has other weights: its digest is ' .. known.digest
      .. ', that of incarnation ' .. incarnation .. ' is ' .. ARGV[5])
  end
  if not own or (ARGV[5] ~= '' and not known.digest) then
    known.incarnation = incarnation
    if ARGV[5] ~= '' then known.digest = ARGV[5] end
    redis.call('HSET', VERSIONS, number, cjson.encode(known))
  end
  return known
end

local known = again(given >= 0 and given or last)
if known then return finish(known) end
if step > number('step') then
  fail('STATE', 'announced step ' .. step .. ', but the ledger is at step ' .. number('step'))
end
if given >= 0 and given <= last then
  fail('STATE', 'version ' .. given .. ' is another publication')
end
local made = {version = given >= 0 and given or math.max(last, floor) + 1, step = step, age_step = step,
  parent = parent, incarnation = incarnation, num_bytes = tonumber(ARGV[4])}
if ARGV[5] ~= '' then made.digest = ARGV[5] end
redis.call('HSET', VERSIONS, made.version, cjson.encode(made))
set('version', made.version)
return finish(made)
