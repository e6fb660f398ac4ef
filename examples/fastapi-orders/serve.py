"""Starts an app as this example's services are started: PORT (0 = any free port), HOST."""

import os

import uvicorn
from fastapi import FastAPI


class Server(uvicorn.Server):
    """Says where it listens, as soon as it does."""

    async def startup(self, sockets: list | None = None) -> None:
        await super().startup(sockets)
        port = self.servers[0].sockets[0].getsockname()[1]
        print(f"listening on http://{self.config.host}:{port}", flush=True)


def serve(app: FastAPI) -> None:
    Server(
        uvicorn.Config(
            app,
            host=os.environ.get("HOST", "127.0.0.1"),
            port=int(os.environ.get("PORT", "3000")),
            log_level="warning",
            timeout_graceful_shutdown=10,
        )
    ).run()
