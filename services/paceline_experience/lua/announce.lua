-- Numbers a publication; the same announcement again gets the same number.
-- ARGV: incarnation, step, parent, num_bytes, digest (empty: not known yet)
fence(tonumber(ARGV[1]))
local incarnation, step, parent = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
if step ~= number('step') and step > number('step') then
  fail('STATE', 'announced step ' .. step .. ', but the ledger is at step ' .. number('step'))
end
local last = tonumber(get('version', '-1'))
local text = last >= 0 and redis.call('HGET', VERSIONS, last)
if text then
  local known = cjson.decode(text)
  if known.incarnation == incarnation and known.step == step and known.parent == parent then
    if ARGV[5] ~= '' and not known.digest then
      known.digest = ARGV[5]
      redis.call('HSET', VERSIONS, last, cjson.encode(known))
    end
    return finish(known)
  end
end
local made = {version = last + 1, step = step, age_step = step, parent = parent,
  incarnation = incarnation, num_bytes = tonumber(ARGV[4])}
redis.call('HSET', VERSIONS, last + 1, cjson.encode(made))
set('version', last + 1)
return finish(made)
