"""A bank that knows nothing of keys: it pays whatever it is asked to, as often as it is asked.

    python3 bank.py PORT LEDGER [SECONDS_PER_PAYOUT]

Port 0 takes a free one. The first line that it writes says which.
"""

import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PORT, LEDGER = int(sys.argv[1]), sys.argv[2]
TAKES = float(sys.argv[3]) if len(sys.argv) > 3 else 0.0


class Bank(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        payout = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if payout["account"] == "closed":
            self.answer(422, {"error": "the account is closed"})
            return
        with open(LEDGER, "a") as ledger:
            ledger.write(json.dumps(payout) + "\n")
            ledger.flush()
            os.fsync(ledger.fileno())
        time.sleep(TAKES)
        self.answer(201, {"paid": payout["payout"]})

    def answer(self, status, body):
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *args):
        pass


server = ThreadingHTTPServer(("127.0.0.1", PORT), Bank)
print(f"the bank listens on http://127.0.0.1:{server.server_address[1]}", flush=True)
server.serve_forever()
