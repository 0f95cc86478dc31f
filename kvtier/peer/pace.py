"""How many bytes a second go to and come from one peer at most."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

STEP: Final = 128 << 10
"""Bytes that are moved at once where there is a limit."""


class Bucket:
    """Lets bytes through at a rate. Thread-safe."""

    def __init__(self, rate: int) -> None:
        self._rate = rate
        self._next = 0.0
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> float:
        """Count bytes in; so many seconds are to be waited before they are moved."""
        with self._lock:
            now = time.monotonic()
            begin = max(now, self._next)
            self._next = begin + nbytes / self._rate
            return begin - now


class Pace(NamedTuple):
    """Both directions of one peer; None: as fast as can be."""

    into: Bucket | None = None
    out: Bucket | None = None


def pace(rate: int) -> Pace:
    """Of bytes a second; 0: no limit."""
    return Pace(Bucket(rate), Bucket(rate)) if rate else Pace()


def pieces(views: Sequence[memoryview], size: int) -> Iterator[memoryview]:
    """The same bytes in views of at most `size` bytes."""
    for view in views:
        for at in range(0, len(view), size):
            yield view[at : at + size]
