-- No key.
local body = '{"amount":4999,"currency":"EUR","customer":"cus_A8Z5MHwQS7jUmZ","capture":true,"description":"' ..
    string.rep("x", tonumber(os.getenv("BODY") or "1024") - 180) .. '","metadata":{"order":"1234","channel":"web"}}'
local made
function init()
    made = wrk.format("POST", "/pay", { ["Content-Type"] = "application/json" }, body)
end
function request()
    return made
end
