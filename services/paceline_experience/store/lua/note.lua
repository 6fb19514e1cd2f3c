-- Sets fields of the job's state. ARGV: {field: text}
for field, value in pairs(cjson.decode(ARGV[1])) do set(field, value) end
return finish(0)
