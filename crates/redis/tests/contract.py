"""The contract as a service in another language uses it: with the Lua scripts and redis-py, without a package of Oncegate.

Usage: contract.py redis://host:port/db DIRECTORY, with a file NAME.lua for each script (oncegate schema print redis NAME)
"""

import hashlib
import os
import pathlib
import secrets
import struct
import sys
import threading
import time

import redis

MINUTE = 60_000
CALLER = bytes(8)


class Contract:
    def __init__(self, client, lua):
        self.client = client
        self.code = {path.stem: path.read_bytes() for path in pathlib.Path(lua).glob("*.lua")}
        self.sha1 = {name: hashlib.sha1(code).hexdigest() for name, code in self.code.items()}

    def call(self, name, keys, *arguments):
        try:
            return self.client.evalsha(self.sha1[name], len(keys), *keys, *arguments)
        except redis.exceptions.NoScriptError:
            return self.client.eval(self.code[name], len(keys), *keys, *arguments)

    def claim(self, key, attempt, body, on_abandoned="park", lease=MINUTE):
        fingerprint = b"\x01" + hashlib.sha256(body).digest()
        return self.call("claim", [key], attempt, fingerprint, lease, MINUTE, on_abandoned, CALLER, "POST /orders")

    def fields(self, key, *head):
        found = self.call("lookup", [key], *head)
        assert found[0] == b"found"
        return dict(zip(found[2::2], found[3::2]))

    def complete(self, key, token, response):
        return self.call("complete", [key], token, "completed", MINUTE, response)


def response(status, headers, body):
    encoded = struct.pack(">BHHH", 1, status, len(headers), 0)
    for name, value in headers:
        encoded += struct.pack(">HI", len(name), len(value)) + name + value
    return encoded + body


def new_key():
    return "oncegate:{%s}" % secrets.token_hex(32)


def main(url, lua):
    client = redis.Redis.from_url(url)
    client.script_flush()
    contract = Contract(client, lua)
    assert sorted(contract.code) == sorted(
        ["claim", "renew", "step", "complete", "release", "resolve", "rewrite", "forget", "lookup", "audit"]
    )

    # Claim, conflict, mismatch, complete, replay.
    key, attempt = new_key(), secrets.token_bytes(16)
    heard = []
    listening = threading.Event()

    def listen():
        pubsub = redis.Redis.from_url(url).pubsub()
        pubsub.execute_command("SSUBSCRIBE", key)
        pubsub.parse_response()
        listening.set()
        heard.append(pubsub.parse_response())

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    assert listening.wait(10)
    word, now, token, attempts, lease_until, after_abandoned = contract.claim(key, attempt, b"pay 5")
    assert (word, attempts, after_abandoned) == (b"execute", 1, 0)
    assert abs(now - time.time() * 1000) < 60_000 and token == now
    assert lease_until == now + MINUTE
    # The reply was lost. The repeated claim is the same claim.
    assert contract.claim(key, attempt, b"pay 5")[2] == token
    assert contract.claim(key, secrets.token_bytes(16), b"pay 5")[0] == b"in-progress"
    assert contract.claim(key, secrets.token_bytes(16), b"pay 9")[0] == b"mismatch"
    assert contract.call("renew", [key], token, MINUTE, MINUTE)[0] == b"renewed"
    assert contract.fields(key)[b"state"] == b"in-progress"
    receipt = response(201, [(b"content-type", b"application/octet-stream")], bytes(range(256)) * 100)
    assert contract.complete(key, token + 1, receipt)[0] == b"fenced"
    assert contract.complete(key, token, receipt)[0] == b"completed"
    assert contract.complete(key, token, receipt)[0] == b"completed"
    assert contract.complete(key, token, receipt + b"x")[0] == b"fenced"
    again = contract.claim(key, secrets.token_bytes(16), b"pay 5")
    assert (again[0], again[2]) == (b"replay", receipt)
    listener.join(10)
    assert heard and heard[0][-1] == b"completed %d" % token, heard
    fields = contract.fields(key)
    assert fields[b"version"] == 1 and fields[b"token"] == token and fields[b"response"] == receipt
    assert fields[b"fingerprint"] == b"\x01" + hashlib.sha256(b"pay 5").digest()
    assert b"attempt" not in fields and b"lease_until" not in fields

    # Released: the key is free, and tokens keep growing.
    key = new_key()
    first = contract.claim(key, secrets.token_bytes(16), b"a")[2]
    assert contract.call("release", [key], first, MINUTE)[0] == b"released"
    second = contract.claim(key, secrets.token_bytes(16), b"b")
    assert second[0] == b"execute" and second[2] > first and second[3] == 2
    assert contract.complete(key, first, receipt)[0] == b"fenced"

    # Steps outlive their attempt. With steps, a released key is not free for another request.
    token = second[2]
    encoded = bytes(range(256))
    step = lambda token, number, name, result: contract.call("step", [key], token, number, name, result)[0]
    assert step(token, 0, "charge", encoded) == step(token, 0, "charge", encoded) == b"recorded"
    assert step(token, 0, "charge", b"") == step(token, 2, "ship", b"") == b"differs"
    assert step(first, 1, "ship", b"") == b"fenced"
    assert step(token, 1, "ship", bytes(1_048_576 - 4 - 6 - 256 + 1)) == b"full"
    rewrite = lambda old, new: contract.call("rewrite", [key], token, b"", b"", 1, old, new)
    assert rewrite(b"other", b"sealed")[0] == b"not-rewritten"
    assert rewrite(encoded, b"sealed")[0] == rewrite(encoded, b"sealed")[0] == b"rewritten"
    assert rewrite(b"sealed", encoded)[0] == b"rewritten"
    assert contract.call("forget", [key], "ann", "why")[::2] == [b"not-forgotten", b"in-progress"]
    assert contract.call("release", [key], token, MINUTE)[0] == b"released"
    assert contract.claim(key, secrets.token_bytes(16), b"c")[0] == b"mismatch"
    third = contract.claim(key, secrets.token_bytes(16), b"b")
    assert third[0] == b"execute"
    fields = contract.fields(key)
    assert fields[b"steps"] == 1
    assert (fields[b"step:0"], fields[b"result:0"]) == (b"charge", encoded)
    assert contract.complete(key, third[2], receipt)[0] == b"completed"
    assert b"steps" not in contract.fields(key) and b"step:0" not in contract.fields(key)

    # Abandoned: parked, resolved by an operator, recorded in the audit trail.
    key = new_key()
    contract.claim(key, secrets.token_bytes(16), b"a", lease=1)
    time.sleep(0.01)
    assert contract.claim(key, secrets.token_bytes(16), b"a")[0] == b"unknown"
    resolved = contract.call(
        "resolve", [key, "oncegate:{audit}"], "complete", MINUTE, 0, 0, "ann", "found in the ledger", receipt
    )
    assert resolved[0] == b"resolved" and resolved[2:] == [b"unknown", b"completed"], resolved
    number, entry = client.xrevrange("oncegate:{audit}", count=1)[0]
    assert entry[b"record"].decode() in key and entry[b"actor"] == b"ann" and number.endswith(b"-0")
    assert contract.claim(key, secrets.token_bytes(16), b"a")[2] == receipt
    fields = contract.fields(key)
    assert fields[b"by_operator"] == 1 and fields[b"resolved_at"] == resolved[1]
    assert (fields[b"resolved_from"], fields[b"resolved_to"]) == (b"unknown", b"completed")
    assert (fields[b"resolved_by"], fields[b"resolved_reason"]) == (b"ann", b"found in the ledger")

    # Abandoned: executed again with a greater token, and the grant reports the abandoned attempt.
    key = new_key()
    first = contract.claim(key, secrets.token_bytes(16), b"a", lease=1)[2]
    time.sleep(0.01)
    second = contract.claim(key, secrets.token_bytes(16), b"a", on_abandoned="reexecute")
    assert second[0] == b"execute" and second[2] > first and second[5] == 1

    # Lookups, and refused calls.
    fields = contract.fields(key, "head")
    assert fields[b"state"] == b"in-progress" and fields[b"token"] == second[2]
    assert contract.call("lookup", [new_key()])[0] == b"absent"
    client.set(key, "something else")
    for wrong, code in [
        (lambda: contract.claim(key, secrets.token_bytes(16), b"a"), "CORRUPT"),
        (lambda: contract.claim(new_key(), "no attempt", b"a"), "INVALID"),
        (lambda: contract.call("complete", [new_key()], "1", "completed", MINUTE), "INVALID"),
        (lambda: contract.call("renew", [new_key()], "1", "1e3", MINUTE), "INVALID"),
        (lambda: contract.call("step", [new_key()], "1", "0", "", "x"), "INVALID"),
    ]:
        try:
            wrong()
        except redis.exceptions.ResponseError as error:
            assert str(error).startswith(code), error
        else:
            raise AssertionError(code)
    if os.environ.get("LEAVE_FOR_RUST"):
        # A record for the Rust store to replay.
        key = "oncegate:{%s}" % ("ab" * 32)
        token = contract.claim(key, secrets.token_bytes(16), b"a")[2]
        contract.complete(key, token, receipt)
    print("contract: all as it is written down")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
