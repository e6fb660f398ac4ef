"""Dependencies for FastAPI, next to :class:`oncegate.IdempotencyMiddleware`."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, HTTPException, Request

from .asgi import attempt_of
from .engine import Attempt

__all__ = ["CurrentAttempt", "RequiredAttempt", "current", "required"]


def current(request: Request) -> Attempt | None:
    """The attempt of the request, or None if it has no key."""
    return attempt_of(request.scope)


def required(attempt: Annotated[Attempt | None, Depends(current)]) -> Attempt:
    """The attempt of the request. A request without a key is refused with 400, whatever the settings of the middleware."""
    if attempt is None:
        raise HTTPException(
            400, "This operation requires a key: send the header field Idempotency-Key with every retry."
        )
    return attempt


CurrentAttempt = Annotated[Attempt | None, Depends(current)]
RequiredAttempt = Annotated[Attempt, Depends(required)]
