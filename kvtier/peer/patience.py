"""Until when a connection is waited for. That moves with each message, so a timer looks only now and then."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Final, Self

LOOK_S: Final = 0.5
"""So much later than said it may be over; to set a timer for each message costs as much as the message."""


class Patience:
    """Calls `over` once `until` (the loop's time) has passed. A context manager."""

    def __init__(self, over: Callable[[], None]) -> None:
        self.until = math.inf
        self._over = over
        self._loop = asyncio.get_running_loop()

    def __enter__(self) -> Self:
        self._timer = self._loop.call_later(LOOK_S, self._look)
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        if self._loop.time() > self.until:
            self._over()
        else:
            self._timer = self._loop.call_later(LOOK_S, self._look)
