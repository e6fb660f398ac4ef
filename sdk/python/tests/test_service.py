"""The service for cases of another program: opens listeners, asks the case, and closes them."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import servers

SERVICE = Path(__file__).resolve().parents[1] / "cases/service.py"


class Case(BaseHTTPRequestHandler):
    executions: list[Any] = []

    def do_POST(self) -> None:
        self.executions.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        parts = [{"status": 201, "fields": [["x-made", "1"]], "length": 4}, {"data": b"made".hex()}, {"end": True}]
        reply = b"".join(json.dumps(part).encode() + b"\n" for part in parts)
        self.send_response(200)
        self.send_header("content-length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.mark.parametrize("kind", ["memory", "postgres", "redis"])
def test_the_service(kind: str, request: pytest.FixtureRequest) -> None:
    store = "memory:" if kind == "memory" else request.getfixturevalue(kind).url
    case = ThreadingHTTPServer(("127.0.0.1", 0), Case)
    threading.Thread(target=case.serve_forever, daemon=True).start()
    Case.executions.clear()
    process = subprocess.Popen([sys.executable, SERVICE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin
    assert process.stdout

    def say(asked: Any, *, answers: bool = True) -> Any:
        process.stdin.write(json.dumps(asked) + "\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline()) if answers else None

    assert say({"settings": {"colour": "red"}, "store": "memory:"}) == {"unsupported": "colour"}
    settings = {"scope": ["single-tenant"], "wait": "250ms", "fingerprint.headers": ["x-version"], "service": kind}
    backend = f"127.0.0.1:{case.server_port}"
    address = say({"settings": settings, "store": store, "backend": backend})["address"]
    headers = {"idempotency-key": "k"}
    for replayed in (None, "true"):
        reply = servers.post(f"http://{address}/pay%20me?a=1", content=b"5", headers=headers)
        assert (reply.status_code, reply.text, reply.headers.get("idempotent-replayed")) == (201, "made", replayed)
    (execution,) = Case.executions
    assert (execution["method"], execution["target"], execution["body"]) == ("POST", "/pay%20me?a=1", b"5".hex())
    assert {"oncegate-record", "oncegate-token", "oncegate-attempt"} <= {name for name, _ in execution["fields"]}
    say({"close": address}, answers=False)
    process.stdin.close()
    assert process.wait(20) == 0
    process.stdout.close()
    case.shutdown()
    case.server_close()
