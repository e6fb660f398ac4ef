-- One of a few keys, over and over.
local count = 0
local cookie = os.getenv("COOKIE")
if cookie == "" then cookie = nil end
local body = '{"amount":4999,"currency":"EUR","customer":"cus_A8Z5MHwQS7jUmZ","capture":true,"description":"' ..
    string.rep("x", tonumber(os.getenv("BODY") or "1024") - 180) .. '","metadata":{"order":"1234","channel":"web"}}'
local requests = {}
function init()
    for key = 1, 512 do
        requests[key] = wrk.format("POST", "/pay", {
            ["Content-Type"] = "application/json",
            ["Cookie"] = cookie,
            ["Idempotency-Key"] = string.format("8e03978e-40d5-43e8-bc93-%012d", key),
        }, body)
    end
end
function request()
    count = count + 1
    return requests[count % 512 + 1]
end
