"""What engines do in the middle of something long, and what came in another order than usual."""

from __future__ import annotations

import asyncio

import pytest

from engines import Engine, idle, spec, tokens
from kvtier import wire
from kvtier.identity import Slice
from kvtier.store import slices
from storekit import MIB, storing

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
