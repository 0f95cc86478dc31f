"""Memory goes between pools of other shapes to whoever uses it, and room is made at a fair price."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engines import Engine, idle, spec, tokens
from kvtier import wire
from kvtier.identity import GroupSpec
from kvtier.index import Order
from kvtier.store import slabs, space
from kvtier.store.ways import Ways
from kvtier.types import Kind, Tier
from storekit import MIB, quiet, storing, until

SMALL = spec((GroupSpec(Kind.FULL, 1, 1, 16 << 10),), model="small")
LARGE = spec((GroupSpec(Kind.FULL, 1, 1, 32 << 10),), model="large")


class Clock:
    """Seconds as the order uses them."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def prompt(n: int, pages: int = 8) -> bytes:
    """One of many prompts."""
    return tokens(*range(100 * n, 100 * n + pages))


async def test_a_rest_of_host_that_makes_no_slab_keeps_no_room_from_being_made_ahead(tmp_path: Path) -> None:
    """Few budgets are so many whole slabs."""
    async with storing(tmp_path, host=4 * MIB + (8 << 10), ways=Ways("lru", high_water=0.9)) as store:
        engine = Engine(store)
        await engine.open(SMALL)
        for n in range(60):
            await engine.put(prompt(n), wait_ms=5000)
            await quiet(store)
        assert store.parts.host.free_bytes > 0
        pool = store.parts.host.pools[0]
        await until(lambda: pool.used(0) <= 0.9 * pool.capacity(0))
        engine.leave()


@pytest.mark.parametrize("high_water", [0.9, 1.0])
async def test_a_pool_that_nobody_uses_any_more_does_not_keep_its_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, high_water: float
) -> None:
    """A model of another shape takes its place: what it works with fits host, and is served from host."""
    monkeypatch.setattr(slabs, "BARREN_S", 0.0)
    clock = Clock()
    async with storing(tmp_path, host=4 * MIB + (8 << 10), ways=Ways("lru", clock, high_water=high_water)) as store:
        old, new = Engine(store, "old", pid=1), Engine(store, "new", pid=2)
        await old.open(SMALL)
        await new.open(LARGE)
        for n in range(40):
            await old.put(prompt(n), wait_ms=5000)
        await quiet(store)
        sizes: dict[int, int] = {}

        async def work() -> int:
            """Use 3 MiB of 4; how many pages of it were in host."""
            found = 0
            for n in range(12):
                clock.now += 0.01
                found += sum(s.pages for s in (await new.match(prompt(n))).segments if s.tier == Tier.HOST)
                if await new.get(prompt(n), wait_ms=5000) < 8:
                    await new.put(prompt(n), wait_ms=5000)
                await quiet(store)
            sizes.update({pool.shape.slot_bytes[0]: pool.total_bytes for pool in store.parts.host.pools})
            return found

        for _ in range(3):
            await work()
        assert sizes[16 << 10] >= 2 * MIB - (256 << 10)  # it was used just now
        clock.now += 100
        for _ in range(20):
            found = await work()
        assert found == 12 * 8
        assert sizes[32 << 10] >= 3 * MIB
        assert store.parts.check() == []
        for n in range(2):  # the other comes back
            assert await old.get(prompt(n), wait_ms=5000) == 8
        old.leave()
        new.leave()
        await quiet(store)
        assert idle(store) == []


async def test_a_pool_of_which_all_is_held_grows_beyond_the_richest(tmp_path: Path) -> None:
    """What others can give up goes for it, however little they have."""
    async with storing(tmp_path, host=4 * MIB) as store:
        engines = [Engine(store, f"e{n}", pid=n) for n in range(4)]
        for n, engine in enumerate(engines):
            await engine.open(spec((GroupSpec(Kind.FULL, 1, 1, (16 + 4 * n) << 10),), model=f"m{n}"))
            for number in range(15):
                await engine.put(prompt(number), wait_ms=5000)
        await quiet(store)
        one, two = (Engine(store, name, pid=9) for name in ("one", "two"))
        for engine in (one, two):
            await engine.open(LARGE)
        first = await one.reserve(tokens(*range(40)), wait_ms=5000)  # as good as all that one may hold
        second = await two.reserve(tokens(*range(100, 140)), wait_ms=5000)
        assert (first.pages, second.pages) == (40, 40)
        for engine in (*engines, one, two):
            engine.leave()
        await quiet(store)
        assert idle(store) == []


@pytest.mark.parametrize("others", ["cached", "gone"])
async def test_pins_that_lie_all_over_host_leave_the_rest_of_it_to_others(tmp_path: Path, others: str) -> None:
    """An eighth of host is pinned, some pages of each slab: another shape gets all but that, and the pins stay."""
    async with storing(tmp_path, host=4 * MIB, cap=1.0) as store:
        engine, other = Engine(store, "one", pid=1), Engine(store, "other", pid=2)
        await engine.open(SMALL)
        await other.open(LARGE)
        for page in range(8):
            for n in range(32):  # each slab has a page of every prompt
                assert await engine.put(prompt(n, page + 1), page) == 1
        await quiet(store)
        small = engine.opened.cache_id.hex()
        for n in range(32):
            if n % 8 == 3:
                await store.admin[wire.Pin](wire.Pin(wire.Prompt(small, prompt(n))))
            elif others == "gone":
                await store.admin[wire.Evict](wire.Evict(wire.Prompt(small, prompt(n))))
        got = await other.reserve(prompt(500, 112), wait_ms=5000)
        assert (got.pages, got.refused) == (112, "")
        assert store.parts.check() == []
        for n in range(3, 32, 8):
            assert (await engine.match(prompt(n))).segments == (wire.Segment(Tier.HOST, 8),)
            assert await engine.get(prompt(n)) == 8
        store.admin[wire.Unpin](wire.Unpin())
        for each in (engine, other):
            each.leave()
        await quiet(store)
        assert idle(store) == []


async def test_pages_that_disk_refuses_are_not_looked_at_again_for_each_that_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However short a slice is beside the search for pages that disk has: a few looks for each page that goes."""
    async with storing(tmp_path, host=4 * MIB) as store:
        engine = Engine(store)
        await engine.open(SMALL)
        monkeypatch.setattr(store.parts.persist, "offer", lambda *_, **__: False)
        for n in range(200):
            await engine.put(tokens(n))
        clock, pop, popped = Clock(), Order.pop, []

        def counted(order: Order, *args: Any) -> Any:
            clock.now += 5e-5
            popped.append(order)
            return pop(order, *args)

        monkeypatch.setattr(space, "time", SimpleNamespace(perf_counter=clock, time=clock))
        monkeypatch.setattr(Order, "pop", counted)
        pool = store.parts.host.pools[0]
        before = store.parts.counts["pages_evicted_host"]
        for _ in range(8):
            assert store.parts.space.evict(pool, [1000], slice_s=1e-3)
        evicted = store.parts.counts["pages_evicted_host"] - before
        assert len(popped) <= 8 * evicted
