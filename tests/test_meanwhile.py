"""What engines do in the middle of something long, and what came in another order than usual."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from engines import Engine, content, idle, spec, tokens
from kvtier import wire
from kvtier.identity import Slice
from kvtier.store import slices
from kvtier.types import KvtierError
from storekit import MIB, Failing, full_for, quiet, storing, until

LONG = tokens(*range(1, 41))
OTHERS = [tokens(1000 + n) for n in range(30)]
HALVES = [(Slice(0, 2, 0, 1),), (Slice(0, 2, 1, 2),)]


@pytest.mark.parametrize("how", ["split", "joined"])
async def test_a_purge_takes_what_matches_have_split_and_joined_meanwhile(
    monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Nothing that was there when it began is served when it has ended, whatever became of its nodes in between."""
    monkeypatch.setattr(slices, "SLICE_S", 0.0)
    async with storing(None, host=16 * MIB) as store:
        engine = Engine(store)
        await engine.open(spec())
        for keys in [*OTHERS[:15], LONG, *OTHERS[15:]]:
            await engine.put(keys)
        (cache,) = store.parts.caches.values()
        for page in range(1, 40) if how == "joined" else ():
            cache.radix.ending_at(*cache.radix.deepest(LONG[: 8 * page]))
        nodes = cache.index.nodes
        purging = asyncio.ensure_future(store.admin[wire.Purge](wire.Purge(scope=cache.scope)))
        for _ in range(3):
            await asyncio.sleep(0)
        assert (await engine.match(LONG if how == "joined" else LONG[:160])).pages
        assert (cache.index.nodes < nodes - 8) == (how == "joined")
        assert not purging.done()
        assert (await purging).data["pages"] == 40 + len(OTHERS)
        assert [(await engine.match(keys)).pages for keys in [LONG[:8], LONG, *OTHERS]] == [0] * (2 + len(OTHERS))
        engine.leave()
        assert idle(store) == []


async def test_shards_mean_the_same_in_an_epoch_that_others_have_opened_in_another_order() -> None:
    """A worker that resets what is reset already writes its own half of each page there, and nobody waits in vain."""
    async with storing(None) as store:
        workers = [Engine(store, pid=1 + rank) for rank in range(2)]
        for rank, each in enumerate(workers):
            await each.open(spec(), slices=HALVES[rank], rank=rank, world=2)
        other = Engine(store, "other", pid=9)
        await other.open(spec())
        await other.call(wire.Reset(other.opened.cache))
        first, second = workers
        await second.open(spec(), slices=HALVES[1], rank=1, world=2)
        first.opened = await first.call(wire.Reset(first.opened.cache))
        assert [each.opened.writes_above >= 0 for each in workers] == [True, True]
        reserved = await first.reserve(tokens(1))
        for each in workers:
            each.write(tokens(1), reserved)
            await each.call(wire.Commit(reserved.reservation, 0, 1))
        assert await other.open(spec())
        assert await other.get(tokens(1)) == 1
        second.leave()
        third = Engine(store, pid=3)
        await third.open(spec(), slices=HALVES[0], rank=0, world=2)
        reserved = await first.reserve(tokens(2))
        for each in (first, third):
            await each.call(wire.Commit(reserved.reservation, 0, 1))
        assert (await first.match(tokens(2))).pages == 0, "the other half is nobody's"
        for each in (first, third, other):
            each.leave()
        assert idle(store) == []


@pytest.mark.parametrize("written", [True, False], ids=["being written", "waiting"])
async def test_what_was_reported_durable_keeps_its_beginning_though_another_end_of_that_is_evicted(
    tmp_path: Path, written: bool
) -> None:
    """The pages before a branch were on their way to disk together with one of its ends, which goes meanwhile."""
    calls = Failing()
    one, two = tokens(1, 2, 3, 10, 11, 12), tokens(1, 2, 3, 20, 21, 22)
    async with storing(tmp_path / "disk", calls=calls) as store:
        engine, persist = Engine(store), store.parts.persist
        await engine.open(spec())
        calls.gate.clear()
        persist.room.order.late = not written
        assert await engine.put(one) == 6
        assert await engine.put(two, start=3) == 3
        await until(lambda: persist._writing == 2 or not written)
        evict = wire.Evict(wire.Prompt(tokens=one), "all", 1000)
        assert (await store.admin[wire.Evict](evict)).data["held"] == 3
        persist.room.order.late = False
        persist.pump()
        calls.gate.set()
        await until(lambda: not persist.pending)
        assert [event.pages for event in engine.events] == [3]
        shutil.copytree(tmp_path / "disk", tmp_path / "crashed")
        engine.leave()
        assert idle(store) == []
    async with storing(tmp_path / "crashed") as store:
        engine = Engine(store)
        await engine.open(spec())
        assert await engine.get(two) == 6
        assert (await engine.match(one)).pages == 3
        engine.leave()


async def test_a_purge_is_not_done_while_somebody_holds_what_was_evicted_before_it(tmp_path: Path) -> None:
    """Its bytes are on disk until it is let go of: the purge says so, and the next one takes them."""
    keys = tokens(1, 2, 3)
    async with storing(tmp_path) as store:
        engine = Engine(store)
        await engine.open(spec(salt=b"tenant"))
        await engine.put(keys)
        await quiet(store)
        lease = (await engine.call(wire.Acquire((await engine.match(keys)).handle))).lease
        await store.admin[wire.Evict](wire.Evict(wire.Prompt(tokens=keys), "all", 1000))
        purge = wire.DiskPurge(salt=b"tenant")
        said = (await store.admin[wire.DiskPurge](purge)).data
        assert (said["held"], said["healthy"]) == (3, False)
        await engine.call(wire.Release(lease))
        assert (await store.admin[wire.DiskPurge](purge)).data["healthy"]
        page = bytes(content(keys[:8], 0, 4000))
        assert page not in (tmp_path / "extents").read_bytes()
        engine.leave()


async def test_what_was_emptied_does_not_come_back_after_a_crash(tmp_path: Path) -> None:
    """An operator's word waits until it is durable, and says so where that cannot be."""
    keys, folder = tokens(1, 2, 3), tmp_path / "disk"
    async with storing(folder) as store:
        engine = Engine(store)
        await engine.open(spec(salt=b"tenant"))
        await engine.put(keys)
        await quiet(store)
        assert (await store.admin[wire.Purge](wire.Purge(salt=b"tenant"))).data["pages"] == 3
        shutil.copytree(folder, tmp_path / "crashed")
        await engine.put(keys)
        await quiet(store)
        with full_for(folder / "catalogue" / "data.mdb"), pytest.raises(KvtierError, match="a crash could bring it"):
            await store.admin[wire.Purge](wire.Purge(salt=b"tenant"))
        assert (await store.admin[wire.Purge](wire.Purge(salt=b"tenant"))).data["pages"] == 0
        engine.leave()
    async with storing(tmp_path / "crashed") as store:
        engine = Engine(store)
        await engine.open(spec(salt=b"tenant"))
        assert (await engine.match(keys)).pages == 0
        engine.leave()
