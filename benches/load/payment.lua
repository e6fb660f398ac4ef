-- Payments. LOAD says what keys they have:
--   first   a new key with every request
--   member  the same in a member of the body
--   query   the same in the query
--   replay  one of a few keys, over and over
--   none    no key
local load = os.getenv("LOAD")
local thread_number = 0
function setup(thread)
    thread:set("id", thread_number)
    thread_number = thread_number + 1
end
local cookies = {}
-- Those of several sessions, where the server needs them; an index that is no number finds none.
for cookie in string.gmatch(os.getenv("COOKIES") or "", "[^;]+") do cookies[#cookies + 1] = cookie end
local run = os.getenv("RUN") or "run"
-- What a body has besides its description. A key in it is not always as long, so bodies differ by some bytes.
local without_description = load == "member" and 215 or 180
local before = '{"amount":4999,"currency":"EUR","customer":"cus_A8Z5MHwQS7jUmZ","capture":true,"description":"' ..
    string.rep("x", tonumber(os.getenv("BODY") or "1024") - without_description) ..
    '","metadata":{"order":"1234","channel":"web"}'
local body = before .. '}'
local function payment(key, number)
    return wrk.format("POST", "/pay", {
        ["Content-Type"] = "application/json",
        ["Cookie"] = cookies[number % #cookies + 1],
        ["Idempotency-Key"] = key,
    }, body)
end
local count = 0
local function new_key()
    count = count + 1
    return string.format("%s-%d-%d-a57f9324", run, id, count)
end
local made = {}
function init()
    if load == "none" then made[1] = payment(nil, 0) end
    if load == "replay" then
        for number = 1, 512 do
            made[number] = payment(string.format("8e03978e-40d5-43e8-bc93-%012d", number), number)
        end
    end
end
local requests = {
    first = function() return payment(new_key(), count) end,
    member = function()
        return wrk.format("POST", "/pay", { ["Content-Type"] = "application/json" },
            before .. ',"key":"' .. new_key() .. '"}')
    end,
    query = function()
        return wrk.format("POST", "/pay?Key=" .. new_key(), { ["Content-Type"] = "application/json" }, body)
    end,
    replay = function()
        count = count + 1
        return made[count % 512 + 1]
    end,
    none = function() return made[1] end,
}
request = requests[load] or error("LOAD is none of the loads")
