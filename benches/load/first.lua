-- A new key with every request.
local thread_number = 0
function setup(thread)
    thread:set("id", thread_number)
    thread_number = thread_number + 1
end
local count = 0
local cookies = {}
-- Those of several sessions, where the server needs them; an index that is no number finds none.
for cookie in string.gmatch(os.getenv("COOKIES") or "", "[^;]+") do cookies[#cookies + 1] = cookie end
local body = '{"amount":4999,"currency":"EUR","customer":"cus_A8Z5MHwQS7jUmZ","capture":true,"description":"' ..
    string.rep("x", tonumber(os.getenv("BODY") or "1024") - 180) .. '","metadata":{"order":"1234","channel":"web"}}'
function request()
    count = count + 1
    return wrk.format("POST", "/pay", {
        ["Content-Type"] = "application/json",
        ["Cookie"] = cookies[count % #cookies + 1],
        ["Idempotency-Key"] = string.format("%s-%d-%d-a57f9324", os.getenv("RUN") or "run", id, count),
    }, body)
end
