"""A payments service that knows nothing of keys: each POST /payments charges the customer. GET /charges shows the charges."""

import json
import os
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

charges = []
lock = threading.Lock()


class Payments(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        payment = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        time.sleep(0.02)  # the card network
        with lock:
            charges.append(payment["order"])
            number = len(charges)
        self.reply(201, {"charge": number, "order": payment["order"]})

    def do_GET(self):
        with lock:
            self.reply(200, {"charges": charges})

    def reply(self, status, body):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        try:
            self.end_headers()
            self.wfile.write(data)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True  # the client is gone, and the charge stays

    def log_message(self, *args):
        pass


if __name__ == "__main__":
    port = int(os.environ.get("PORT", "3000"))
    server = ThreadingHTTPServer((os.environ.get("HOST", "0.0.0.0"), port), Payments)
    server.daemon_threads = True
    server.serve_forever()
