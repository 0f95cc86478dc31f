"""How fast pages move between host and disk through the store, what that costs those who match, what policies cost.

    python bench/bench_mover.py [--json FILE]

Limits: O_DIRECT writes and reads of the same bytes with as many in flight, the slower of the two, for there and back;
the same loop with nothing to move, for matching; a look at each object that a leaf is kept in, for touches. It runs in
the temporary directory: set TMPDIR to the device that matters.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import random
import statistics
import sys
import tempfile
import time
from array import array
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import uvloop
from bench_disk import PAGE_TOKENS, Raw, buffer, spec_of
from measure import OURS, Bench, Samples, Target

from kvtier import wire
from kvtier.identity import CacheSpec, GroupSpec
from kvtier.index import Node, Order, RadixIndex
from kvtier.policy import Policy, every, load
from kvtier.store import Store
from kvtier.tiers.disk import DiskTier
from kvtier.tiers.host import HostTier
from kvtier.turns import short_turns
from kvtier.types import Kind, Tier

PAGE = 1 << 20
RUN = 64
IDLE_S = 1e-3
MOVE = Target("ratio", ">=", 0.85)
POLICY = Target("value", "<=", 20.0)
FLAT = Target("ratio", "<=", 1.2)
OBJECTS = "its objects"
"""What grows when leaves are more than the processor's caches hold, whatever is done with them."""
BARE = "no policy"
PAGES = (1, 1, 1, 2, 1, 1, 4, 1, 1, 1, 1, 16, 1, 1, 64)
"""Of the leaves that policies are timed with; by turns."""


class Peer(NamedTuple):
    """Whom the store takes the engine for."""

    uid: int = 0
    gid: int = 0
    pid: int = 1
    pidfd: int | None = None


class Bed:
    """A store with one engine, and prompts of RUN pages that fill its host tier."""

    def __init__(self, folder: Path, total: int) -> None:
        loop = asyncio.get_running_loop()
        disk = DiskTier(folder, 2 * total + (256 << 20), post=loop.call_soon_threadsafe)
        self.store = Store(HostTier(total + (128 << 20)), disk, cap=1.0)
        self.prompts = [
            np.random.default_rng(n).integers(0, 1 << 30, RUN * PAGE_TOKENS, "<i4").tobytes()
            for n in range(total // PAGE // RUN)
        ]
        self.total = len(self.prompts) * RUN * PAGE

    async def start(self) -> None:
        """Open a cache."""
        await self.store.start()
        hello = wire.Hello(wire.VERSION, "bench")
        self.process, _, _ = self.store.join(hello, Peer(), lambda _: None)
        self.cache = (await self.call(wire.Open(spec_of(PAGE)))).cache

    async def call(self, message: wire.Message) -> Any:
        """One verb."""
        reply: Any = self.store.verbs[type(message)](self.process, message)
        return await reply if inspect.isawaitable(reply) else reply

    async def fill(self) -> None:
        """Publish every prompt; what is in the slots does not matter."""
        for keys in self.prompts:
            matched = await self.call(wire.Match(self.cache, 0, keys))
            got = await self.call(wire.Reserve(matched.handle, 0, RUN, wait_ms=60_000))
            await self.call(wire.Commit(got.reservation, 0, RUN))
            await self.call(wire.Forget(matched.handle))

    async def demote(self) -> None:
        """All to disk, and out of host."""
        await self.call(wire.Flush(self.cache, 60_000))
        for pool in self.store.parts.host.pools:
            self.store.parts.space.evict(pool, [1 << 30])

    async def promote(self) -> None:
        """All back to host, prompt by prompt, four at a time."""
        limit = asyncio.Semaphore(4)

        async def one(keys: bytes) -> None:
            async with limit:
                matched = await self.call(wire.Match(self.cache, 0, keys))
                lease = await self.call(wire.Acquire(matched.handle, wait_ms=60_000))
                assert lease.pages == RUN
                await self.call(wire.Release(lease.lease))
                await self.call(wire.Forget(matched.handle))

        await asyncio.gather(*map(one, self.prompts))

    async def there_and_back(self) -> tuple[float, float]:
        """GB/s to disk and from disk of a fresh epoch."""
        self.cache = (await self.call(wire.Reset(self.cache))).cache
        filled = asyncio.get_running_loop().create_task(self.fill())
        start = time.perf_counter()
        await filled
        await self.demote()
        gone = time.perf_counter()
        await self.promote()
        return self.total / (gone - start) / 1e9, self.total / (time.perf_counter() - gone) / 1e9


async def matching(bed: Bed, busy: Awaitable[Any] | None, seconds: float) -> float:
    """p99 of a match in us, the loop's lateness included, while something else goes on."""
    task = asyncio.ensure_future(busy) if busy is not None else None
    keys, late = bed.prompts[0], []
    end = time.perf_counter() + seconds
    while (time.perf_counter() < end) if task is None else not task.done():
        due = time.perf_counter() + IDLE_S
        await asyncio.sleep(IDLE_S)
        matched = await bed.call(wire.Match(bed.cache, 0, keys))
        late.append(time.perf_counter() - due)
        await bed.call(wire.Forget(matched.handle))
    if task is not None:
        await task
    return float(np.percentile(late, 99)) * 1e6


async def moving(bench: Bench, folder: Path, total: int) -> None:
    """Bytes there and back against the device, matches meanwhile against an idle loop."""
    source = buffer(min(total, 256 << 20))
    source[:] = np.random.default_rng(bench.seed).integers(0, 256, source.size, np.uint8)
    raw = Raw(folder / "raw", source, total)
    bed = Bed(folder / "tier", total)
    await bed.start()
    short_turns()  # as the daemon has them
    both: Samples = {OURS: [], "O_DIRECT": []}
    late: Samples = {OURS: [], "idle loop": []}
    gc.collect()
    gc.disable()
    for _ in range(bench.rounds(5)):
        wrote, read = raw.write(), raw.read()
        both["O_DIRECT"].append(min(wrote, read))
        down, up = await bed.there_and_back()
        both[OURS].append(min(down, up))
        late["idle loop"].append(await matching(bed, None, 0.5))
        await bed.demote()
        late[OURS].append(await matching(bed, bed.promote(), 0.0))
    gc.enable()
    bench.add(
        "demote and promote, 1 MiB pages, the slower",
        "GB/s",
        both,
        limit="O_DIRECT",
        target=Target("ratio", ">=", 0.85),
    )
    bench.add("match p99 while pages come back", "us", late, limit="idle loop", target=Target("ratio", "<=", 3.0))
    await bed.store.drain(1.0)


class Forest:
    """Leaves of every kind in a tier under a policy, with new ones coming for the pages that are evicted."""

    def __init__(self, policy: str, leaves: int, seed: int) -> None:
        """No name: what all policies share, which takes the least recently used."""
        self.order = Order(Tier.HOST, load(policy)(Tier.HOST) if policy else Policy(Tier.HOST))
        spec = CacheSpec("bench", bytes(16), "bfloat16", 2, (GroupSpec(Kind.FULL, 1, 1, 4096),))
        self.index = RadixIndex(spec, bytes(16), {Tier.HOST: self.order})
        self.random = random.Random(seed)
        self.now = 0.0
        self.next = 0
        self.leaves = leaves
        self.latest: list[Node] = []
        for _ in range(leaves):
            self.insert()
        self.pages = self.order.policy.size

    def insert(self) -> None:
        """A new leaf, of one page or more, by itself or one of two after a prefix; another one is used again."""
        self.next += 1
        self.now += 1e-3
        number = self.next.to_bytes(8, "little")
        prefix = (-(self.next // 4)).to_bytes(8, "little", signed=True) if self.next % 4 < 2 else b""
        if prefix:
            self._store(prefix, 1)
        pages = PAGES[self.next % len(PAGES)]
        node = self._store(prefix + number * pages, pages)
        if self.next <= self.leaves:
            self.latest.append(node)
        else:
            self.latest[self.next % self.leaves] = node
        again = self.random.choice(self.latest)
        if again.tier_leaf(Tier.HOST):
            self.index.use(again, self.now)

    def _store(self, keys: bytes, pages: int) -> Node:
        """The node that ends there, with copies of its pages."""
        node = self.index.extend(keys, self.now)
        if not node.live:
            self.index.put(node, 0, Tier.HOST, 0, array("q", bytes(8 * pages)), array("Q", bytes(8 * pages)))
            self.index.publish(node, node.end)
            self.index.fresh(node, self.now)
        return node

    def touches(self, count: int) -> tuple[float, float]:
        """Microseconds of a use of some leaf, and of a look at each of the objects that it is kept in."""
        there = [node for node in self.latest if node.tier_leaf(Tier.HOST)]
        nodes, others = self.random.choices(there, k=count), self.random.choices(there, k=count)
        start = time.thread_time()
        for node in nodes:
            self.index.use(node, self.now)
        used = time.thread_time()
        for node in others:
            looked(node)
        return (used - start) / count * 1e6, (time.thread_time() - used) / count * 1e6

    def evictions(self, count: int) -> float:
        """Microseconds of choosing and dropping a page; what new leaves cost that come for them is not counted."""
        taken = 0.0
        for _ in range(count):
            start = time.thread_time()
            found = self.order.pop(self.now)
            assert found is not None
            _, node = found
            lo, hi = self.index.tail(node, Tier.HOST, min(1, self.order.policy.share(node)))
            self.index.evict(node, lo, hi, Tier.HOST)
            self.index.settle(node)
            taken += time.thread_time() - start
            while self.order.policy.size < self.pages:
                self.insert()
        return taken / count * 1e6


def looked(node: Node) -> None:
    """Change what a use cannot leave alone, the times of a node and of its note, and read what it asks: no more."""
    node.time += 0.0
    if node.below[Tier.HOST] or not node.count[Tier.HOST] or node.queued < 0:
        return
    note = node.notes and node.notes[Tier.HOST]
    if note:
        note.mark += 0.0


def costs(bench: Bench, sizes: Sequence[int]) -> None:
    """A touch under every policy, and what it adds to an eviction, its memory of evicted pages included.

    The cyclic collector is off, as in the daemon.
    """
    calls = 500 if bench.tiny else 5000
    gc.disable()
    touches: dict[str, list[Samples]] = {}
    evictions: dict[str, list[Samples]] = {}
    for leaves in sizes:
        bare = Forest("", leaves, bench.seed)
        for found in every():
            gc.collect()
            forest = Forest(found.name, leaves, bench.seed)
            pairs = [forest.touches(calls) for _ in range(bench.rounds(5))]
            touch: Samples = {OURS: [ours for ours, _ in pairs], OBJECTS: [objects for _, objects in pairs]}
            pairs = [(forest.evictions(calls), bare.evictions(calls)) for _ in range(bench.rounds(5))]
            evict: Samples = {OURS: [ours for ours, _ in pairs], BARE: [without for _, without in pairs]}
            added: Samples = {OURS: [max(0.01, ours - without) for ours, without in pairs]}
            bench.add(f"{found.name}: touch among {leaves:,} leaves", "us", touch, limit=OBJECTS, target=POLICY)
            bench.add(f"{found.name}: added to an eviction among {leaves:,} leaves", "us", added, target=POLICY)
            touches.setdefault(found.name, []).append(touch)
            evictions.setdefault(found.name, []).append(evict)
    gc.enable()
    for what, limit, samples in (("touch", OBJECTS, touches), ("eviction", BARE, evictions)):
        for name, (few, *more) in samples.items():
            for many in more:
                growth = {each: [statistics.median(many[each]) / statistics.median(few[each])] for each in few}
                bench.add(f"{name}: {what}, times that among {sizes[0]:,}", "x", growth, limit=limit, target=FLAT)


def main() -> None:
    """Run all cases."""
    bench = Bench("mover", __doc__ or "")
    sys.setswitchinterval(1e-4)  # as the daemon does
    total = (128 << 20) if bench.tiny else (1 << 30)
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-") as folder:
        uvloop.run(moving(bench, Path(folder), total))
    costs(bench, (1000,) if bench.tiny else (1000, 500_000))
    bench.finish()


if __name__ == "__main__":
    main()
