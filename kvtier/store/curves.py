"""The hit curve of the traffic just seen, one for each pool of slots, in at most 1 % of the loop's time."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import Iterator
from operator import mul
from typing import Any, Final

from kvtier.index.distances import Distances, Namer, geometric
from kvtier.store.cache import Cache
from kvtier.types import bad
from kvtier.wire import Curve, Info

SHARE: Final = 0.01
"""Of the loop's time."""
MOST_MORE: Final = 1 << 60
"""Bytes of room more that somebody may ask about."""
SAVED_S: Final = 0.05
"""So much unused time may be saved up."""
PAGE_S: Final = 2e-6
"""What looking at a page is taken to cost before it was measured."""
MEASURED: Final = 64
"""Pages of a request that tells what one costs."""
LATER_S: Final = 0.02
"""A request is looked at so long after it came, when its answer is out."""
TURN_S: Final = 2e-4
"""So long requests are looked at before others have the loop, and ..."""
REST_S: Final = 1e-3
"""... so long they have it."""
QUEUED: Final = 256
POOLS: Final = 16
"""The least used is forgotten for one more."""
WINDOW: Final = 1 << 17
"""After so many requests, what was seen counts half."""
POINTS: Final = 40


class Pool:
    """What is known of one pool's traffic."""

    def __init__(self, cache: Cache) -> None:
        self.distances = Distances()
        self.cache = cache
        """The one that was asked last; its slots may be given back, and made again."""
        self.skipped = 0
        """Requests that there was no time for."""

    def page_bytes(self) -> int:
        """What a page takes in host now: its anchors, and its share of what is kept of windows and states.

        Of a key, whichever group it is of, the average.
        """
        cache, host, slots = self.cache, self.cache.pool, self.cache.shape.slots_per_item
        costs = [cache.slot_cost(group) for group in range(cache.index.groups)]
        if cache.spec.keyed:
            return sum(costs) // len(costs)
        items = [host.used(group) // slots[group] for group in range(cache.index.groups)]
        pages, held = items[cache.index.anchors[0]], sum(map(mul, items, costs))
        return max(sum(costs[group] for group in cache.index.anchors), held // pages if pages else 0)


class Curves:
    """Requests on their way into stack distances."""

    def __init__(self, on: bool = True) -> None:
        self.on = on
        self.pools: dict[tuple[str, Any, bool], Pool] = {}
        """By scope and shape of slots; token caches and keyed ones (True) count in different units."""
        self.spent_s = 0.0
        self._namer = Namer(secrets.randbits(64))
        self._queue: deque[tuple[Pool, Cache, bytes | list[bytes]]] = deque()
        self._waiting = False
        self._saved_s = SAVED_S
        self._page_s = PAGE_S
        self._asked = time.perf_counter()
        self._steps: Iterator[None] | None = None
        """The request that is being looked at, so many pages of it, and so many seconds for it so far."""
        self._pages, self._took_s = 0, 0.0

    def note(self, cache: Cache, keys: bytes | list[bytes]) -> None:
        """One logical request: page keys along a path, or the names of opaque keys."""
        if not self.on or not keys:
            return
        place = cache.scope, cache.shape, cache.spec.keyed
        pool = self.pools.get(place)
        if pool is None:
            if len(self.pools) >= POOLS:
                del self.pools[min(self.pools, key=lambda each: self.pools[each].distances.requests)]
            pool = self.pools[place] = Pool(cache)
        pool.cache = cache
        if len(self._queue) >= QUEUED:
            pool.skipped += 1
            return
        self._queue.append((pool, cache, keys))
        if not self._waiting:
            self._waiting = True
            asyncio.get_running_loop().call_later(LATER_S, self._work)

    def _work(self) -> None:
        """Look at what waits, as far as the time saved up allows; what does not fit is skipped, and counted.

        Nor is what would take longer than all that may be saved up. It goes in turns, for engines wait meanwhile.
        """
        start = time.perf_counter()
        self._saved_s = min(SAVED_S, self._saved_s + SHARE * (start - self._asked))
        self._asked = now = start
        while now - start < TURN_S and (self._steps is not None or self._next()):
            assert self._steps is not None
            if next(self._steps, self) is self:
                self._steps = None
            before, now = now, time.perf_counter()
            self._spend(now - before)
        self._waiting = self._steps is not None or bool(self._queue)
        if self._waiting:
            asyncio.get_running_loop().call_later(REST_S, self._work)

    def _spend(self, seconds: float) -> None:
        """So much time went into the request, which is done where no step is left; what a page costs follows."""
        self.spent_s += seconds
        self._saved_s -= seconds
        self._took_s += seconds
        if self._steps is None and self._pages >= MEASURED:
            self._page_s += (min(10 * PAGE_S, self._took_s / self._pages) - self._page_s) / 8

    def _next(self) -> bool:
        """Begin with the next request that there is time for; False where none is."""
        while self._queue:
            pool, cache, keys = self._queue.popleft()
            pages = len(keys) // cache.index.stride if isinstance(keys, bytes) else len(keys)
            if self._saved_s < pages * self._page_s:
                pool.skipped += 1
                continue
            self._steps, self._pages, self._took_s = self._see(pool, cache, keys), pages, 0.0
            return True
        return False

    def _see(self, pool: Pool, cache: Cache, keys: bytes | list[bytes]) -> Iterator[None]:
        root = int.from_bytes(cache.id[:8], "little")
        if isinstance(keys, bytes):
            yield from pool.distances.see(self._namer.names(keys, cache.index.stride, root))
        else:
            pool.distances.ask(self._namer.flat(keys, root))
        if pool.distances.requests >= 2 * WINDOW:
            pool.distances.halve()

    def info(self, disk_bytes: int, at: tuple[int, ...]) -> list[dict[str, Any]]:
        """Per pool: hits at capacities in bytes, those of now and `at` more bytes among them."""
        out = []
        for (_, _, keyed), pool in self.pools.items():
            seen, host = pool.distances, pool.cache.pool.total_bytes
            unit = pool.page_bytes()
            most = min(seen.most, max(64, 2 * (host + disk_bytes) // unit, *(2 * extra // unit for extra in at)))
            sizes = [unit * pages for pages in geometric(1, most, POINTS)]
            rows = {
                "points": sizes,
                "now": [host],
                "with_disk": [host + disk_bytes],
                "added": [host + extra for extra in at],
            }
            asked = max(1, seen.pages)
            data: dict[str, Any] = {
                name: [
                    {"bytes": size, "pages": size // unit, "hit_ratio": found / asked}
                    for size, found in zip(chosen, seen.curve([size // unit for size in chosen]), strict=True)
                ]
                for name, chosen in rows.items()
            }
            data |= {
                "scope": pool.cache.scope,
                "model": pool.cache.spec.model,
                "keyed": keyed,
                "page_bytes": unit,
                "requests": seen.requests,
                "requests_skipped": pool.skipped,
                "pages_asked": seen.pages,
                "exact_to_bytes": seen.exact.most * unit,
            }
            out.append(data)
        return out


def answer(curves: Curves, disk_bytes: int, msg: Curve) -> Info:
    """Reply to Curve. Raises bad_request."""
    for more in msg.add:
        if not 0 <= more <= MOST_MORE:
            raise bad("add", f"0..{MOST_MORE} bytes", more)
    return Info({"pools": curves.info(disk_bytes, msg.add), "seconds_spent": round(curves.spent_s, 6)})
