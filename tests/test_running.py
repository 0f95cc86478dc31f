"""Running pages: slots that an engine computes in before their tokens are known, and reads until its request ends."""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engines import Engine, idle, tokens
from kvtier import wire
from kvtier.client import AsyncClient, Client
from kvtier.demo.daemon import Daemon
from kvtier.identity import Slice
from kvtier.tiers.slab import SlotState
from kvtier.types import Code, KvtierError
from lazydevice import LazyDevice
from storekit import KINDS, maker, quiet, storing, until
from test_device_tier import PAGE, SLOT, fails, hasten, joined, over


class Decoding:
    """One request on the device: a path that is known, and pages that it decodes into."""

    def __init__(self, engine: Engine, known: bytes = b"", start: int = -1) -> None:
        """`start`: the first of its running pages; the path's end by default."""
        self.engine = engine
        self.keys = known
        self.stride = PAGE.stride
        self.start = len(known) // self.stride if start < 0 else start

    async def begin(self, pages: int, **more: Any) -> wire.Reserved:
        """Slots for so many pages that nobody knows yet."""
        handle = (await self.engine.match(self.keys)).handle
        ask = wire.Reserve(handle, self.start, pages, device=self.engine.mapped, running=True)
        self.got = await self.engine._call(ask)
        self.named = self.got.named
        return self.got

    def item(self, page: int) -> wire.Items:
        """Where a page is."""
        (items,) = self.got.items
        at = page - self.start
        return wire.Items(0, page, 1, items.offsets[8 * at : 8 * at + 8])

    def compute(self, page: int, key: bytes) -> None:
        """The tokens of the next page come, and its KV with them."""
        self.keys += key
        self.engine.fetched.clear()
        self.engine.write_items(self.keys, self.item(page))
        self.engine.send_back()

    async def full(self, page: int, key: bytes) -> wire.Committed:
        """The next page is full: compute, name and commit it."""
        self.compute(page, key)
        return await self.commit(page)

    async def commit(self, page: int, pages: int = 1) -> wire.Committed:
        """Commit, with all keys that the daemon was not told of."""
        keys, named = self.keys[self.named * self.stride :], self.named
        message = wire.Commit(self.got.reservation, page, pages, keys=keys, named=named if keys else 0)
        reply = await self.engine.call(message)
        self.named += len(keys) // self.stride
        return reply

    def reads(self, pages: range) -> None:
        """Attention reads pages where they were computed: they hold what belongs there."""
        for page in pages:
            self.engine.verify(self.keys, self.item(page))

    async def end(self) -> None:
        """The request is over, and its kernels too."""
        await self.engine.call(wire.Abort(self.got.reservation))


@pytest.fixture(params=KINDS)
def device(request: pytest.FixtureRequest) -> Any:
    """What makes a device: the CPU, and the same tests on a GPU."""
    return maker(request.param)


async def test_pages_are_served_as_their_tokens_become_known(device: Any):
    """A prompt of one page, four pages decoded in place: each is found by others once it is full, and none before."""
    async with over(device, 32) as store:
        engine, other = await joined(store), await joined(store, "other", mapped=False, pid=2)
        assert await engine.put(tokens(9)) == 1
        run = Decoding(engine, tokens(9))
        got = await run.begin(4)
        assert (got.pages, got.named, got.refused) == (4, 1, "")
        assert (await other.match(tokens(9, 1))).pending == 0  # it has no name yet
        for page in range(1, 5):
            assert (await run.full(page, tokens(page))).published == page
            assert await other.get(run.keys) == page + 1
        run.reads(range(1, 5))
        await run.end()
        assert await engine.get(run.keys) == 5
        for each in (engine, other):
            each.leave()
        await quiet(store)
        assert idle(store) == []


async def test_what_a_request_reads_stays_until_it_ends(device: Any):
    """All its pages are served, and the device is turned over by others: its slots stay its own, then they may go."""
    async with over(device, 16) as store:
        engine, other = await joined(store), await joined(store, "other", pid=2)
        run = Decoding(engine)
        await run.begin(4)
        for page in range(4):
            await run.full(page, tokens(page))
        held = engine.process.instance.device_held
        assert held == 4 * SLOT
        for n in range(10):
            await other.put(tokens(*range(100 + 8 * n, 108 + 8 * n)), wait_ms=5000)
        run.reads(range(4))
        await run.end()
        assert engine.process.instance.device_held == 0
        assert not engine.process.instance.reservations
        for n in range(10, 20):
            assert await other.put(tokens(*range(100 + 8 * n, 108 + 8 * n)), wait_ms=5000) == 8
        for each in (engine, other):
            each.leave()
        await quiet(store)
        assert idle(store) == []


async def test_whoever_comes_second_goes_on_in_its_own_slots(device: Any):
    """Two requests decode the same tokens: one wins, the other's slots are read by it until it ends, and return."""
    async with over(device, 24) as store:
        engines = [await joined(store, f"e{n}", pid=n + 1) for n in range(3)]
        runs = [Decoding(engine) for engine in engines[:2]]
        for run in runs:
            await run.begin(3)
        for page in range(3):
            for run in runs:
                assert (await run.full(page, tokens(page))).published == page + 1
        (pool,) = store.parts.vram.tier.pools
        assert pool.counts()[0][SlotState.RESERVED] == 3
        for n in range(6):
            await engines[2].put(tokens(*range(50 + 8 * n, 58 + 8 * n)), wait_ms=5000)
        for run in runs:
            run.reads(range(3))
            await run.end()
        assert pool.counts()[0][SlotState.RESERVED] == 0
        for engine in engines:
            engine.leave()
        await quiet(store)
        assert idle(store) == []


async def test_a_request_goes_on_beyond_pages_that_have_no_names_yet(device: Any):
    """More room is reserved while the last page is still filling; the later part waits for the first, in any order."""
    async with over(device, 16) as store:
        engine, other = await joined(store), await joined(store, "other", mapped=False, pid=2)
        first, then = Decoding(engine), Decoding(engine, start=2)
        await first.begin(2)
        assert (await then.begin(2)).named == 0
        for page in range(4):
            first.keys += tokens(page) if page < 2 else b""
            then.keys += tokens(page)
            run = first if page < 2 else then
            run.engine.fetched.clear()
            run.engine.write_items(run.keys, run.item(page))
            run.engine.send_back()
        assert await then.commit(2, 2) == wire.Committed(0, 2)
        assert (await other.match(then.keys)).pages == 0
        assert (await first.commit(0, 2)).published == 2
        assert await other.get(then.keys) == 4
        await first.end()
        then.reads(range(2, 4))
        await then.end()
        for each in (engine, other):
            each.leave()
        await quiet(store)
        assert idle(store) == []


async def test_running_pages_may_be_in_host(tmp_path: Path):
    """The same verbs without a device: named, served, durable, and read in place until the end."""
    async with storing(tmp_path) as store:
        engine, other = Engine(store), Engine(store, "other", pid=2)
        for each in (engine, other):
            await each.open(PAGE)
        run = Decoding(engine)
        await run.begin(3)
        for page in range(3):
            await run.full(page, tokens(page))
        assert await other.get(run.keys) == 3
        await engine.call(wire.Flush())
        run.reads(range(3))
        await run.end()
        for each in (engine, other):
            each.leave()
        await quiet(store)
        assert idle(store) == []


async def test_ranks_decode_into_one_page_and_each_lets_go(device: Any):
    """TP=2: the scheduler says what pages hold, each rank commits its heads; slots return when both have let go."""
    async with over(device, 16) as store:
        head = await joined(store)
        parts = [(Slice(0, 2, 0, 1),), (Slice(0, 2, 1, 2),)]
        ranks = []
        for number, part in enumerate(parts):
            rank = Engine(store, pid=number + 2)
            await rank.open(PAGE, part, rank=number, world=2)
            ranks.append(rank)
        run = Decoding(head)
        assert not (await run.begin(2)).writes
        for page in range(2):
            run.keys += tokens(page)
            for rank in ranks:
                rank.fetched.clear()
                rank.write_items(run.keys, run.item(page))
                rank.send_back()
            for rank in ranks[:1]:
                with pytest.raises(KvtierError, match="whose keys are known"):
                    await rank.call(wire.Commit(run.got.reservation, page, 1))
            assert (await run.commit(page)).published == page
            published = [(await rank.call(wire.Commit(run.got.reservation, page, 1))).published for rank in ranks]
            assert published == [page, page + 1]
        await run.end()
        await ranks[0].call(wire.Abort(run.got.reservation))
        assert head.process.instance.reservations, "a rank still reads"
        run.reads(range(2))
        await ranks[1].call(wire.Abort(run.got.reservation))
        assert not head.process.instance.reservations
        for each in (head, *ranks):
            each.leave()
        await quiet(store)
        assert idle(store) == []


async def test_a_killed_engine_gives_its_running_pages_back(device: Any):
    """Named and served, named, unnamed: all slots that are nobody's pages return when its process is gone."""
    async with over(device, 8) as store:
        engine, other = await joined(store), await joined(store, "other", mapped=False, pid=2)
        run = Decoding(engine)
        await run.begin(6)
        for page in range(2):
            await run.full(page, tokens(page))
        store.leave(engine.process, clean=False)
        (pool,) = store.parts.vram.tier.pools
        assert pool.counts()[0][SlotState.RESERVED] == 4  # it may still write
        store.gone(engine.process)
        assert pool.counts()[0][SlotState.RESERVED] == 0
        assert await other.get(run.keys) == 2
        other.leave()
        await quiet(store)
        assert idle(store) == []


async def test_an_aborted_request_leaves_what_it_committed():
    """Pages that it never named go back, those that are served stay cached."""
    async with over(maker("cpu"), 8) as store:
        engine = await joined(store)
        run = Decoding(engine)
        await run.begin(6)
        await run.full(0, tokens(0))
        run.compute(1, tokens(1))  # full, and cancelled before its commit
        await run.end()
        assert await engine.get(run.keys) == 1
        assert (await engine.match(run.keys)).pending == 0
        engine.leave()
        await quiet(store)
        assert idle(store) == []


async def test_a_reset_under_a_request_serves_nothing_and_takes_nothing_away():
    """The weights changed: what is committed afterwards is nobody's, and its slots stay the request's until it ends."""
    async with over(maker("cpu"), 8) as store:
        engine = await joined(store)
        run = Decoding(engine)
        await run.begin(3)
        await run.full(0, tokens(0))
        await engine.call(wire.Reset(engine.opened.cache))
        assert (await run.full(1, tokens(1))).published == 1
        run.reads(range(2))
        (pool,) = store.parts.vram.tier.pools
        assert pool.used(0) == 3
        await run.end()
        engine.leave()
        await quiet(store)
        assert idle(store) == []


async def test_a_long_request_does_not_cut_its_path_into_a_node_a_page(tmp_path: Path):
    """A hundred pages decoded one by one are a few nodes, so that the last page costs what the first did."""
    async with storing(tmp_path) as store:
        engine = Engine(store)
        await engine.open(PAGE)
        run = Decoding(engine)
        await run.begin(100)
        for page in range(100):
            assert (await run.full(page, tokens(page))).published == page + 1
            if page % 8 == 0:
                await quiet(store)  # what is written to disk meanwhile holds its path
        index = next(iter(store.parts.caches.values())).radix
        assert index.nodes < 50
        run.reads(range(100))
        await run.end()
        assert await engine.get(run.keys) == 100
        with pytest.raises(KvtierError, match="at most 65536 running pages"):
            await Decoding(engine).begin(1 << 20)
        engine.leave()
        await quiet(store)
        assert idle(store) == []


@pytest.mark.parametrize("how", ["told", "stuck"])
async def test_a_device_that_fails_under_a_request_serves_none_of_it(how: str):
    """Sick by name: nothing more is served, no slot there is given to anybody, the end of the request is accepted."""
    device = LazyDevice(1)
    async with over(lambda: device, 8) as store:
        engine = await joined(store)
        run = Decoding(engine)
        await run.begin(4)
        await run.full(0, tokens(0))
        vram = store.parts.vram
        run.compute(1, tokens(1))
        if how == "told":
            fails(store)
            vram._fall()
            assert (await run.commit(1)).published == 1
        else:
            device.stuck = True
            hasten(store)
            with pytest.raises(KvtierError, match="did not move"):
                await run.commit(1)
        await until(lambda: vram.state == "sick")
        await vram.close()
        assert (await engine.match(run.keys)).pages <= 1  # what came down to host
        await run.end()
        assert not engine.process.instance.reservations
        assert not vram.tier.pools[0].alloc(0, 1)
        engine.leave()
        await quiet(store)
        assert store.parts.check() == []
    device.stuck = False


REFUSED = {
    "no keys": ({}, "whose keys are known"),
    "half a key": ({"keys": tokens(0)[:-1]}, "page keys"),
    "beyond its pages": ({"keys": tokens(0, 1, 2, 3)}, "page keys"),
    "a gap": ({"keys": tokens(1), "named": 1}, "page keys"),
    "before the path": ({"keys": tokens(0), "named": -1}, "page keys"),
    "another page": ({"keys": tokens(0), "first": 1}, "whose keys are known"),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_names_that_cannot_be_are_refused_and_change_nothing(name: str):
    """Pages without keys, keys of a gap or beyond the slots: bad_request, and the right commit works afterwards."""
    async with over(maker("cpu"), 8) as store:
        engine = await joined(store)
        run = Decoding(engine)
        await run.begin(3)
        fields, why = REFUSED[name]
        with pytest.raises(KvtierError, match=why) as caught:
            await engine.call(wire.Commit(run.got.reservation, **({"first": 0, "pages": 1} | fields)))
        assert caught.value.code is Code.BAD_REQUEST
        assert (await run.full(0, tokens(0))).published == 1
        again = wire.Commit(run.got.reservation, 0, 1, keys=run.keys, named=0)
        assert (await engine.call(again)).published == 1  # what was said twice is no error
        with pytest.raises(KvtierError, match="within the 0 pages"):
            await engine.call(wire.Reserve((await engine.match(b"")).handle, 0, 1))
        plain = await engine.reserve(tokens(7))
        with pytest.raises(KvtierError, match="page keys"):
            await engine.call(wire.Commit(plain.reservation, 0, 1, keys=tokens(8), named=1))
        await engine.call(wire.Abort(plain.reservation))
        await run.end()
        engine.leave()
        await quiet(store)
        assert idle(store) == []


async def test_running_requests_on_devices_that_work_late_read_what_they_computed(tmp_path: Path):
    """Requests decode, end and are evicted, in random legal orders of the device: nobody reads another's bytes."""
    for seed in range(4):
        pick = random.Random(seed)
        async with over(lambda seed=seed: LazyDevice(seed), 16, tmp_path / str(seed), host=24 * SLOT) as store:
            engines = [await joined(store, f"e{n}", pid=n + 1) for n in range(2)]
            for engine in engines:
                engine.patient = False
            for _ in range(8):
                runs = [Decoding(engine) for engine in engines]
                story = [pick.randrange(3) for _ in range(4)]
                granted = [(await run.begin(3)).pages for run in runs]
                for page in range(max(granted)):
                    for run, pages in zip(runs, granted, strict=True):
                        if page < pages:
                            await run.full(page, tokens(*story[page : page + 1]))
                for run, pages in zip(runs, granted, strict=True):
                    if pages:
                        run.reads(range(pages))
                        await run.end()
                    assert await run.engine.get(tokens(*story)) <= 4
            for engine in engines:
                engine.leave()
            await quiet(store)
            assert idle(store) == []


def key(page: int) -> bytes:
    return tokens(page)


def test_the_client_names_pages_with_their_commit(shared: Daemon):
    """Names wait for the next commit, are not lost with one that is refused, and the slots are read until `abort`."""
    with Client(shared.socket, instance="run", verify="always", timeout_s=10.0) as client:
        cache = client.open(msgspec.structs.replace(PAGE, salt=os.urandom(8)))
        with cache.match(key(0)).reserve(0, 3, wait_ms=2000, running=True) as held:
            assert (held.pages, held.named, held.running) == (3, 1, True)
            for page in range(3):
                held.view(0, page)[:] = page
            with pytest.raises(KvtierError, match="whose keys are known"):
                held.commit(1, 1)
            held.name(key(1))
            with pytest.raises(KvtierError, match="whose keys are known"):
                held.commit(2, 1)
            assert held.commit() == 2
            with pytest.raises(KvtierError, match="up to page 3"):
                held.name(key(2) + key(3))
            held.name(key(2))
            assert held.commit(2) == 3
            assert cache.match(key(0) + key(1) + key(2)).pages == 3
            assert held.address(0, 0) is not None
        assert held.address(0, 0) is None
        with cache.match(key(0)).reserve(0, 1) as plain, pytest.raises(KvtierError, match="keys"):
            plain.name(key(0))
    assert shared.broken_invariants() == []


async def test_the_async_client_names_pages_with_their_commit(shared: Daemon):
    """The same verbs; two commits at once bring their names once."""
    async with AsyncClient(shared.socket, instance="run", verify="always", timeout_s=10.0) as client:
        cache = await client.open(msgspec.structs.replace(PAGE, salt=os.urandom(8)))
        path = await cache.match(b"")
        async with await path.reserve(0, 2, wait_ms=2000, running=True) as held:
            for page in range(2):
                held.view(0, page)[:] = page
            held.name(key(0))
            first = asyncio.ensure_future(held.commit(0, 1))
            await asyncio.sleep(0)
            held.name(key(1))
            assert sorted(await asyncio.gather(first, held.commit(1, 1))) == [1, 2]
        assert (await cache.match(key(0) + key(1))).pages == 2
    assert shared.broken_invariants() == []
