"""A service on FastAPI. It asks the case for the response to each request."""

import http.client
import json

from fastapi import FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool

from serve import serve

app = FastAPI()

METHODS = ["DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"]


def ask(case: str, execution: dict) -> dict:
    connection = http.client.HTTPConnection(case, timeout=60)
    try:
        connection.request("POST", "/", json.dumps(execution))
        return json.load(connection.getresponse())
    finally:
        connection.close()


@app.api_route("/{path:path}", methods=METHODS)
async def execute(request: Request) -> Response:
    body = await request.body()
    query = request.scope["query_string"]
    target = request.scope["raw_path"] + (b"?" + query if query else b"")
    execution = {
        "method": request.method,
        "target": target.decode("latin-1"),
        "fields": [[name.decode("latin-1"), value.decode("latin-1")] for name, value in request.headers.raw],
        "body": body.hex(),
    }
    scripted = await run_in_threadpool(ask, request.headers["x-case"], execution)
    response = Response(bytes.fromhex(scripted["body"]), scripted["status"])
    for name, value in scripted["fields"]:
        response.raw_headers.append((name.encode("latin-1"), value.encode("latin-1")))
    return response


serve(app)
