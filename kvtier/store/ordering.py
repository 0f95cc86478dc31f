"""The verb `order`: which of an engine's waiting requests are best served first."""

from __future__ import annotations

from collections.abc import Awaitable

from kvtier import wire
from kvtier.mover import Mover
from kvtier.route import order
from kvtier.store.instance import Path, Process
from kvtier.store.slices import sliced
from kvtier.types import bad


class Ordering:
    """Compares prompts in worker threads."""

    def __init__(self, mover: Mover) -> None:
        self._mover = mover

    def order(self, process: Process, msg: wire.Order) -> Awaitable[wire.Ordered]:
        """In which order requests are best served; raises bad_request, unknown."""
        if not 1 <= len(msg.handles) <= wire.MAX_ORDERED or len(msg.handles) != len(msg.waited_ms):
            raise bad("handles", f"1..{wire.MAX_ORDERED} requests, and how long each has waited", len(msg.handles))
        paths = [process.instance.path(handle) for handle in msg.handles]
        if len({path.cache for path in paths}) > 1 or paths[0].cache.spec.keyed:
            raise bad("handles", "requests of one token cache")
        return self._order(msg, paths)

    async def _order(self, msg: wire.Order, paths: list[Path]) -> wire.Ordered:
        """Look for the prompts in slices and compare them in a worker thread: megabytes of keys take milliseconds."""
        index = paths[0].cache.radix
        keys = [path.keys for path in paths]
        cached = [index.deepest(each)[1] async for each in sliced(keys)]
        waited = [float(ms) for ms in msg.waited_ms]
        turns = await self._mover.run(order, keys, index.stride, cached, waited, float(msg.bound_ms))
        return wire.Ordered(tuple(msg.handles[n] for n in turns))
