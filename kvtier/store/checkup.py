"""The invariants of the running daemon, checked beside the engines: on an operator's word, and now and then."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple

from kvtier.store.cache import Cache
from kvtier.store.parts import Parts
from kvtier.store.pins import Pins
from kvtier.store.slices import sliced
from kvtier.types import Changed

EVERY_S: Final = 300.0
"""Between two rounds of the daemon's own."""
REST_S: Final = 0.02
"""After each slice of such a round: it takes a twentieth of the loop's time."""
SETTLE_S: Final = 1.0
"""Leases that nobody holds are looked at again after this time: what moved may just have ended."""
MOST_LINES: Final = 100

Steps = Iterator[list[str]]
_log = logging.getLogger("kvtier.checkup")


class Checked(NamedTuple):
    """What one round found."""

    at: float
    """When it ended, in seconds since the epoch."""
    seconds: float
    broken: list[str]
    """At most MOST_LINES."""
    changed: list[str]
    """Parts that engines changed meanwhile: what is in them was right, their totals were not compared."""

    def data(self) -> dict[str, Any]:
        """As a plain tree, with how many are broken instead of the lines."""
        return {**self._asdict(), "broken": len(self.broken)}


class Checkup:
    """Checks everything in slices, and remembers what the latest round found."""

    def __init__(self, parts: Parts, pins: Pins) -> None:
        self.parts = parts
        self.pins = pins
        self.rounds = 0
        self.last: Checked | None = None

    async def run(self) -> None:
        """Check now and then, for ever; what is broken is logged."""
        while True:
            await asyncio.sleep(EVERY_S)
            try:
                found = await self.round(REST_S)
            except Exception:  # noqa: BLE001 - a bug of the check, which must not be the last one
                _log.exception("the check failed")
                continue
            for line in found.broken:
                _log.error("broken invariant: %s", line)

    async def round(self, rest_s: float = 0.0) -> Checked:
        """Check everything once, with a rest after each slice."""
        began = time.monotonic()
        broken: list[str] = []
        changed: list[str] = []
        async for lines in sliced(self._steps(changed), rest_s):
            broken += lines
        broken += await self._forgotten()
        self.rounds += 1
        self.last = Checked(time.time(), round(time.monotonic() - began, 3), broken[:MOST_LINES], changed)
        return self.last

    def _steps(self, changed: list[str]) -> Steps:
        """Everything that is broken, step by step; parts that changed meanwhile are added to `changed`."""
        for name, steps in self._all():
            try:
                for lines in steps():
                    yield [f"{name}: {line}" for line in lines]
            except Changed:
                changed.append(name)

    def _all(self) -> Iterable[tuple[str, Callable[[], Steps]]]:
        """What there is to check."""
        parts = self.parts
        yield "host", parts.host.checking
        if parts.vram is not None:
            yield "device", parts.vram.tier.checking
        if parts.disk is not None:
            yield "disk", parts.disk.checking if not parts.loading else _loading
        for cache in list(parts.caches.values()):
            yield f"cache {cache.id.hex()[:12]}", cache.index.checking

    async def _forgotten(self) -> list[str]:
        """Leases that last while no engine is attached and nothing moves."""
        held = self._held()
        if held:
            await asyncio.sleep(SETTLE_S)
            again = self._held()
            held = {cache: count for cache, count in held.items() if again.get(cache) == count}
        return [f"cache {cache.id.hex()[:12]}: {count} leases that nobody holds" for cache, count in held.items()]

    def _held(self) -> dict[Cache, int]:
        """Leases beyond those of pins and of the daemon's own jobs, by cache; none while anybody may hold some."""
        parts = self.parts
        moving = parts.loads.moving or parts.persist.pending or parts.mover.running or any(parts.mover.waiting.values())
        if parts.instances or moving or parts.loading:
            return {}
        pinned = self.pins.held()
        still = [cache for cache in parts.caches.values() if not cache.reservations]
        over = {cache: cache.index.root.refs - cache.own - pinned[cache] for cache in still}
        return {cache: count for cache, count in over.items() if count}


def _loading() -> Steps:
    """Nothing is compared while the catalogue loads."""
    yield []
    raise Changed
