"""Long talks with operators over many requests: few at a time, each forgotten when it has been silent for too long."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar

from kvtier.store.parts import Parts
from kvtier.types import Code, KvtierError

MOST: Final = 8
IDLE_S: Final = 60.0
T = TypeVar("T")


class _Visit:
    """One of them."""

    def __init__(self, what: Any, drop: Callable[[Any], None], timer: asyncio.TimerHandle) -> None:
        self.what = what
        self.drop = drop
        self.timer = timer
        self.busy = False


class Visits:
    """Exports and imports under way."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._visits: dict[int, _Visit] = {}

    def add(self, what: T, drop: Callable[[T], None]) -> int:
        """Begin one; `drop` is called once, when it ends. Raises busy where too many are under way."""
        if len(self._visits) >= MOST:
            raise KvtierError(Code.BUSY, f"{MOST} exports and imports are under way")
        number = next(self._parts.numbers)
        self._visits[number] = _Visit(what, drop, self._timer(number))
        return number

    def _timer(self, number: int) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(IDLE_S, self.end, number)

    def _find(self, number: int, kind: type[Any]) -> _Visit:
        visit = self._visits.get(number)
        if visit is None or not isinstance(visit.what, kind):
            raise KvtierError(Code.UNKNOWN, f"no {kind.__name__.lower()} {number} is under way", "number")
        return visit

    def of(self, number: int, kind: type[T]) -> T:
        """What was begun under that number, to look at. Raises unknown."""
        found: T = self._find(number, kind).what
        return found

    @contextlib.contextmanager
    def using(self, number: int, kind: type[T]) -> Iterator[T]:
        """What was begun under that number, for one request at a time. Raises unknown, busy."""
        visit = self._find(number, kind)
        if visit.busy:
            raise KvtierError(Code.BUSY, "its last request is not answered yet", "number")
        visit.timer.cancel()
        visit.busy = True
        try:
            yield visit.what
        finally:
            visit.busy = False
            if self._visits.get(number) is visit:
                visit.timer = self._timer(number)
            else:
                visit.drop(visit.what)

    def end(self, number: int) -> None:
        """End one; what is in the middle of a request is dropped after it."""
        visit = self._visits.pop(number, None)
        if visit is not None:
            visit.timer.cancel()
            if not visit.busy:
                visit.drop(visit.what)

    def close(self) -> None:
        """End them all."""
        for number in list(self._visits):
            self.end(number)
