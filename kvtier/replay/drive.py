"""One engine that sends a trace's requests to a real store, one after the other."""

from __future__ import annotations

import asyncio
import inspect
import tempfile
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from kvtier import wire
from kvtier.identity import CacheSpec, GroupSpec
from kvtier.replay.trace import Requests
from kvtier.store import Store
from kvtier.store.curves import Curves
from kvtier.store.ways import Ways
from kvtier.tiers.cells import CELLS_PER_SLAB_MIN
from kvtier.tiers.disk import DiskTier
from kvtier.tiers.host import HostTier
from kvtier.types import PAGE_ALIGN, Kind, bad

ITEM_BYTES = 64
WAIT_MS = 60_000
"""Room that comes free when the disk has written something is waited for."""
TICK_S = 1e-6
"""Requests with the same time in the trace come this much after each other."""


class Outcome(NamedTuple):
    """What a replay counted, from the first request that counts on."""

    requests: int
    asked_tokens: int
    hit_tokens: Counter[int]
    """By the tier that served them."""
    moved: dict[str, int]
    """Pages stored, and copied from tier to tier."""
    page_bytes: int
    """Bytes of a page as it was replayed."""

    @property
    def ratio(self) -> float:
        """Token hit ratio: the longest prefix found, over all prompt tokens; cold starts count as misses."""
        return self.hit_tokens.total() / self.asked_tokens if self.asked_tokens else 0.0


class Clock:
    """The time of the trace: never back, never twice the same."""

    def __init__(self) -> None:
        self.now = 0.0

    def reach(self, time_s: float) -> None:
        """Go on to a time of the trace."""
        self.now = max(time_s, self.now + TICK_S)

    def read(self) -> float:
        """Seconds."""
        return self.now


class _Nobody(NamedTuple):
    """Whom the store takes the engine for."""

    uid: int = 0
    gid: int = 0
    pid: int = 1
    pidfd: int | None = None


async def replay(requests: Requests, policy: str, pages: Sequence[int], first: int = 0) -> Outcome:
    """Send every request to a fresh store with exactly so many pages in host (and disk); count from `first` on."""
    clock = Clock()
    ways = Ways(policy, clock.read, Curves(on=False))
    ways.policy = type("Replayed", (ways.policy,), {"page_tokens": requests.block_tokens})
    loop = asyncio.get_running_loop()
    room = pages[0] * PAGE_ALIGN
    with tempfile.TemporaryDirectory(prefix="kvtier-replay-") as folder:
        disk = None
        if len(pages) > 1:
            size = pages[1] * PAGE_ALIGN
            slab = _disk_slab(pages[1]) * PAGE_ALIGN
            disk = DiskTier(folder, size, slab_bytes=slab, linger_s=0.0, sync=False, post=loop.call_soon_threadsafe)
        host = HostTier(room, slab_bytes=_slab(pages[0]) * PAGE_ALIGN, hugepages="never", prefault=False)
        store = Store(host, disk, cap=1.0, ways=ways)
        store.parts.persist.room.reserve = 0
        await store.start()
        try:
            engine = _Engine(store, requests.name)
            await engine.open()
            return await _drive(engine, clock, requests, first)
        finally:
            await store.drain(0.0)


def _slab(pages: int) -> int:
    """Slots of a slab such that the last, smaller one is not too small to be used."""
    slots = max(1, min(512, pages // 8))
    while 0 < pages % slots < slots // 8 + 1:
        slots += 1
    return slots


def _disk_slab(pages: int) -> int:
    """Cells of the largest slab of which a whole number is as many pages."""
    return next((size for size in range(pages // CELLS_PER_SLAB_MIN, 1, -1) if not pages % size), 1)


async def _drive(engine: _Engine, clock: Clock, requests: Requests, first: int) -> Outcome:
    hits: Counter[int] = Counter()
    asked = 0
    for r, tokens in enumerate(requests.tokens):
        clock.reach(requests.time_s[r])
        keys = b"".join([requests.keys[segment] for segment in requests.path(r)])
        found = await engine.serve(keys)
        if engine.store.parts.ways.mistake:
            name, mistake = engine.store.parts.ways.policy_name, engine.store.parts.ways.mistake
            raise bad("policy", f"a policy without mistakes ({mistake})", name)
        if r < first:
            continue
        asked += tokens
        left = tokens
        for tier, pages in found:
            served = min(left, pages * requests.block_tokens)
            hits[tier] += served
            left -= served
    counts = engine.store.parts.counts
    moved = {
        "stored": engine.stored,
        "host_to_disk": counts["pages_written_disk"],
        "disk_to_host": counts["pages_loaded_disk"],
    }
    return Outcome(len(requests.tokens) - first, asked, hits, moved, ITEM_BYTES)


class _Engine:
    """Matches, leases, computes what is missing, and lets go: what a scheduler does for one request."""

    def __init__(self, store: Store, name: str) -> None:
        self.store = store
        hello = wire.Hello(wire.VERSION, "replay", name[:64])
        self.process, _, _ = store.join(hello, _Nobody(), lambda _: None)
        self.cache = 0
        self.stored = 0
        """Pages that were published."""

    async def ask(self, message: wire.Message) -> Any:
        """One verb."""
        reply = self.store.verbs[type(message)](self.process, message)
        return await reply if inspect.isawaitable(reply) else reply

    async def open(self) -> None:
        """A cache whose pages are one token long: the number of a block."""
        group = GroupSpec(Kind.FULL, 1, 1, ITEM_BYTES)
        spec = CacheSpec(model="replay", fingerprint=bytes(16), kv_dtype="none", page_tokens=1, groups=(group,))
        self.cache = (await self.ask(wire.Open(spec))).cache

    async def serve(self, keys: bytes) -> list[tuple[int, int]]:
        """Send one request through; returns (tier, pages) of what was found."""
        matched = await self.ask(wire.Match(self.cache, 0, keys))
        lease = None
        if matched.pages:
            lease = await self.ask(wire.Acquire(matched.handle, wait_ms=WAIT_MS))
        missing = len(keys) // 4 - matched.pages
        if missing:
            got = await self.ask(wire.Reserve(matched.handle, matched.pages, missing, wait_ms=WAIT_MS))
            if got.reservation:
                done = await self.ask(wire.Commit(got.reservation, matched.pages, got.pages))
                self.stored += done.published
        if lease is not None and lease.lease:
            await self.ask(wire.Release(lease.lease))
        await self.ask(wire.Forget(matched.handle))
        return [(segment.tier, segment.pages) for segment in matched.segments]
