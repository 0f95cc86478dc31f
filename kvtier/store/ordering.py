"""The verb `order`: which of an engine's waiting requests are best served first."""

from __future__ import annotations

from collections.abc import Awaitable

from kvtier import wire
from kvtier.mover import Mover
from kvtier.route import order
from kvtier.store.instance import Process
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
        index = paths[0].cache.radix
        cached = [index.deepest(path.keys)[1] for path in paths]
        keys = [path.keys for path in paths]
        return self._order(msg, keys, index.stride, cached)

    async def _order(self, msg: wire.Order, keys: list[bytes], stride: int, cached: list[int]) -> wire.Ordered:
        """Compare the prompts in a worker thread: some megabytes of keys take milliseconds."""
        waited = [float(ms) for ms in msg.waited_ms]
        turns = await self._mover.run(order, keys, stride, cached, waited, float(msg.bound_ms))
        return wire.Ordered(tuple(msg.handles[n] for n in turns))
