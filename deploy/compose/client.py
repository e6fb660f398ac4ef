"""A client on a bad network: it loses one response in three, and sends the same payment with the same key again.

Ends with the exit code 1 if a payment was charged twice or not at all.
"""

import collections
import json
import os
import random
import socket
import sys
import time
import urllib.parse
import urllib.request
import uuid

TARGET = urllib.parse.urlsplit(os.environ.get("TARGET", "http://127.0.0.1:8080"))
LEDGER = os.environ.get("LEDGER", "http://127.0.0.1:3000")
ORDERS = int(os.environ.get("ORDERS", "100"))
random.seed(7)


def send(order, key):
    """Sends one request. Returns its status, or None if the response was lost."""
    body = json.dumps({"order": order, "amount": 50}).encode()
    head = (
        f"POST /payments HTTP/1.1\r\nHost: {TARGET.netloc}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nIdempotency-Key: {key}\r\nConnection: close\r\n\r\n"
    )
    try:
        with socket.create_connection((TARGET.hostname, TARGET.port), timeout=10) as wire:
            wire.sendall(head.encode() + body)
            if random.random() < 1 / 3:
                time.sleep(random.random() * 0.05)
                return None  # the cable was pulled
            line = wire.makefile("rb").readline().split()
            return int(line[1]) if len(line) > 1 else None
    except OSError:
        return None


def main():
    ledger = json.load(urllib.request.urlopen(LEDGER + "/charges"))["charges"]
    run = uuid.uuid4().hex[:8]
    retries = 0
    for number in range(ORDERS):
        order, key = f"{run}-{number}", str(uuid.uuid4())
        while send(order, key) != 201:
            retries += 1
            time.sleep(0.1)
    charges = collections.Counter(json.load(urllib.request.urlopen(LEDGER + "/charges"))["charges"][len(ledger):])
    twice = sum(count > 1 for count in charges.values())
    missing = ORDERS - len(charges)
    print(f"{ORDERS} payments, {retries} retries over {TARGET.netloc}: {twice} charged more than once, {missing} not at all")
    sys.exit(1 if twice or missing else 0)


main()
