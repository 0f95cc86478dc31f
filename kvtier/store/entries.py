"""Pages on their way to disk, and nodes whose pages a quota kept from it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from kvtier.index import Node
from kvtier.store.cache import Cache

GONE: Final = "gone"
"""Why pages were not written that left the index meanwhile: no failure."""
MOST_FAILED: Final = 1024


class Entry:
    """Pages [begin, end) of the path to `node`: from `first` on to be written, `left` of them not settled yet."""

    __slots__ = ("begin", "cache", "done", "end", "failed", "first", "left", "node", "notify")

    def __init__(self, cache: Cache, node: Node, first: int, end: int, notify: Callable[[int], None] | None) -> None:
        self.cache = cache
        self.node = node
        self.begin = self.first = first
        self.end = end
        self.left = end - first
        self.failed = ""
        self.notify = notify
        self.done: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def covers(self, page: int) -> bool:
        """Whether a page of its path is on its way."""
        return self.begin <= page < self.end and not self.failed


class Failures:
    """Nodes whose pages failed for a reason that lasts a while, oldest first and bounded."""

    def __init__(self) -> None:
        self._until: dict[Node, float] = {}

    def note(self, node: Node, until: float) -> None:
        """Pages of the node failed; it is not tried again until then."""
        self._until.pop(node, None)
        self._until[node] = until
        if len(self._until) > MOST_FAILED:
            del self._until[next(iter(self._until))]

    def lasts(self, node: Node, now: float) -> bool:
        """Whether it is not to be tried again yet."""
        return now < self._until.get(node, 0.0)


async def settled(entries: list[Entry], deadline: float) -> bool:
    """Whether all entries were settled by the deadline."""
    if not entries:
        return True
    left = deadline - asyncio.get_running_loop().time()
    _, late = await asyncio.wait([e.done for e in entries], timeout=max(0.0, left))
    return not late
