-- One of a few keys, over and over.
local count = 0
local cookies = {}
-- Those of several sessions, where the server needs them; an index that is no number finds none.
for cookie in string.gmatch(os.getenv("COOKIES") or "", "[^;]+") do cookies[#cookies + 1] = cookie end
local body = '{"amount":4999,"currency":"EUR","customer":"cus_A8Z5MHwQS7jUmZ","capture":true,"description":"' ..
    string.rep("x", tonumber(os.getenv("BODY") or "1024") - 180) .. '","metadata":{"order":"1234","channel":"web"}}'
local requests = {}
function init()
    for key = 1, 512 do
        requests[key] = wrk.format("POST", "/pay", {
            ["Content-Type"] = "application/json",
            ["Cookie"] = cookies[key % #cookies + 1],
            ["Idempotency-Key"] = string.format("8e03978e-40d5-43e8-bc93-%012d", key),
        }, body)
    end
end
function request()
    count = count + 1
    return requests[count % 512 + 1]
end
