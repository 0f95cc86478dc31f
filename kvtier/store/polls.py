"""Tells a request that asks again from a new one, where the protocol has no request to name."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

POLL_S: Final = 10.0
"""Who asks again after longer than this is another request."""
MOST: Final = 4096


class Polls:
    """What keys an instance asked for lately and has not used since, by the last key of each question."""

    def __init__(self) -> None:
        self._asked: OrderedDict[tuple[int, bytes], tuple[int, float]] = OrderedDict()

    def first(self, cache: int, names: list[bytes], now: float) -> bool:
        """Note a question; False where it was asked before."""
        key = cache, names[-1]
        count, when = self._asked.pop(key, (0, now))
        self._asked[key] = len(names), now
        if len(self._asked) > MOST:
            self._asked.popitem(last=False)
        return count != len(names) or now - when > POLL_S

    def used(self, cache: int, names: Iterable[bytes]) -> None:
        """The keys are read or stored: what is asked about them from now on is about another request."""
        for name in names:
            self._asked.pop((cache, name), None)
