"""Time that has passed, by both clocks of the machine, whichever shows more.

The monotonic clock stands still while the machine is suspended, and the wall clock may be set back.
"""

from __future__ import annotations

import time
from typing import NamedTuple

__all__ = ["Moment"]


class Moment(NamedTuple):
    """A moment by both clocks, in seconds."""

    monotonic: float
    wall: float

    @classmethod
    def now(cls) -> Moment:
        return cls(time.monotonic(), time.time())

    def age(self, now: Moment | None = None) -> float:
        """The seconds since this moment."""
        monotonic, wall = (time.monotonic(), time.time()) if now is None else now
        return max(monotonic - self.monotonic, wall - self.wall)
