"""What is long, or much of it, holds up nobody: long reservations, much to evict, long paths with states."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines import FULL, STATE, WINDOW, Engine, content, idle, spec, tokens
from kvtier import mover, wire
from kvtier.identity import GroupSpec, Shape, Slice, chain_keys
from kvtier.index import ANY, Node, base
from kvtier.store import Store, diskroom, loads, persist, scrub, slices, space
from kvtier.store.entries import Entry
from kvtier.store.reserve import ABORTED, OPEN
from kvtier.store.runs import names_of
from kvtier.tiers import health
from kvtier.tiers.host import HostTier
from kvtier.tiers.pool import SlotPool
from kvtier.types import Kind, Tier
from storekit import MIB, Failing, drop_host, memfd, quiet, rows, storing, until

PAGES = 300
PATH = tokens(*range(PAGES))
KEYED = spec((GroupSpec(Kind.FULL, 1, 1, 64),), key_bytes=16)
SMALL, LARGE = (spec((GroupSpec(Kind.FULL, 1, 1, size),), key_bytes=16) for size in (4096, MIB // 2))
HALVES = ((Slice(0, 2, 0, 1),), (Slice(0, 2, 1, 2),))


@pytest.fixture
def frees(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many slots each call to a pool frees."""
    seen: list[int] = []
    free = SlotPool.free

    def counted(pool: SlotPool, group: int, handles: Any) -> None:
        handles = list(handles)
        seen.append(len(handles))
        free(pool, group, handles)

    monkeypatch.setattr(SlotPool, "free", counted)
    return seen


async def stored_keys(engine: Engine, count: int) -> None:
    """So many keys of a keyed cache."""
    for at in range(0, count, 500):
        numbers = range(at, min(count, at + 500))
        names = b"".join(number.to_bytes(16, "little") for number in numbers)
        reserved = await engine.call(wire.ReserveKeys(engine.opened.cache, 0, names))
        await engine.call(wire.Commit(reserved.reservation, 0, len(numbers)))


def fastest(call: Callable[[], object], tries: int = 7) -> float:
    """Seconds that a call takes at best."""
    best = float("inf")
    for _ in range(tries):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best


async def turns_beside(call: Awaitable[Any]) -> tuple[int, Any]:
    """How often others had their turn while a request was served, and its reply."""
    turns, over = 0, False

    async def others() -> None:
        nonlocal turns
        while not over:
            turns += 1
            await asyncio.sleep(0)

    beside = asyncio.ensure_future(others())
    reply = await call
    over = True
    await beside
    return turns, reply


# -- reservations ------------------------------------------------------------------------------------------------------


async def test_a_long_reservation_that_ends_gives_all_its_slots_back_at_once(frees: list[int]) -> None:
    """An engine that dies amid a prompt of many pages costs the others no more than one with few."""
    async with storing(None, host=8 * MIB) as store:
        engine = Engine(store)
        await engine.open(spec((FULL, WINDOW)))
        assert (await engine.reserve(PATH)).pages == PAGES
        frees.clear()
        engine.leave(clean=False)
        assert [n for n in frees if n] == [PAGES, PAGES]
        assert idle(store) == []


async def test_a_long_path_that_two_engines_computed_is_merged_at_once(frees: list[int]) -> None:
    """The second one's slots return together; what the first lacks is taken over, byte for byte."""
    states = wire.Want(2, np.arange(0, PAGES, 7, dtype="<i4").tobytes())
    async with storing(None, host=32 * MIB) as store:
        one, two = Engine(store, "one"), Engine(store, "two", pid=2)
        await one.open(spec((FULL, WINDOW, STATE)))
        await two.open(spec((FULL, WINDOW, STATE)))
        none = wire.Want(1, b"")
        first, second = await one.reserve(PATH, wants=(none,)), await two.reserve(PATH, wants=(states,))
        assert first.pages == second.pages == PAGES
        one.write(PATH, first)
        two.write(PATH, second)
        assert (await one.call(wire.Commit(first.reservation, 0, PAGES))).published == PAGES
        assert (await two.match(PATH)).pages == 0  # no state yet
        frees.clear()
        assert (await two.call(wire.Commit(second.reservation, 0, PAGES))).published == PAGES
        assert [n for n in frees if n] == [PAGES]
        assert not two.process.instance.reservations
        assert two.process.instance.held_bytes == 0
        assert await two.get(PATH[: 295 * 8]) == 295
        one.leave()
        two.leave()
        assert idle(store) == []


async def test_shards_of_a_long_reservation_complete_the_pages_that_all_ranks_wrote() -> None:
    """Whatever parts of it each commits, in whatever order, and whoever dies amid it."""
    async with storing(None, host=8 * MIB) as store:
        ranks = [Engine(store, pid=n + 1) for n in range(2)]
        for n, rank in enumerate(ranks):
            await rank.open(spec(), slices=HALVES[n], rank=n, world=2)
        reserved = await ranks[0].reserve(PATH)
        for rank in ranks:
            rank.write(PATH, reserved)

        async def commit(rank: int, first: int, pages: int) -> int:
            return (await ranks[rank].call(wire.Commit(reserved.reservation, first, pages))).published

        assert await commit(0, 0, 200) == 0
        assert await commit(1, 50, 100) == 0  # 50..149 are complete, and wait for 0..49
        assert await commit(1, 0, 50) == 150
        assert await commit(1, 0, 50) == 150  # again
        res = ranks[0].process.instance.reservations[reserved.reservation]
        ranks[1].leave(clean=False)
        assert set(res.state[200:]) == {ABORTED}
        assert set(res.state[150:200]) == {ABORTED}
        assert OPEN not in res.state
        assert await ranks[0].get(PATH) == 150
        ranks[0].leave()
        assert idle(store) == []


# -- room --------------------------------------------------------------------------------------------------------------


async def test_others_have_their_turn_while_much_is_evicted_for_a_large_reservation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Room for a whole prompt is made in slices."""
    monkeypatch.setattr(space, "SLICE_S", 0.0, raising=False)
    async with storing(None, host=4 * MIB) as store:
        engine = Engine(store)
        await engine.open(spec())
        for n in range(0, 1000, 4):
            await engine.put(tokens(*range(10_000 + n, 10_004 + n)))
        engine.process.instance.cap_bytes = 4 * MIB
        handle = (await engine.match(tokens(*range(600)))).handle
        turns, reserved = await turns_beside(engine.call(wire.Reserve(handle, 0, 600)))
        assert reserved.pages == 600, reserved.refused
        assert turns > 100
        engine.leave()
        assert idle(store) == []


async def test_others_have_their_turn_while_much_goes_from_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four MiB of pages of 64 bytes are as many evictions as there are pages: they go in slices."""
    monkeypatch.setattr(diskroom, "SLICE_S", 0.0, raising=False)
    async with storing(tmp_path, host=8 * MIB) as store:
        engine = Engine(store)
        await engine.open(KEYED)
        await stored_keys(engine, 500)
        await quiet(store)
        index, room = store.parts.caches[engine.opened.cache].index, store.parts.persist.room
        room.evict_own(4 * MIB, ANY)
        assert room.gave_way
        assert 0 < 500 - index.copies[Tier.DISK] < 10
        engine.leave()


@contextlib.asynccontextmanager
async def small_on_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Store, Engine]]:
    """A disk full of pages of 4 KiB, and slices of its evictions that are over at once."""
    for module in (persist, diskroom):
        monkeypatch.setattr(module, "SLICE_S", 0.0, raising=False)
    async with storing(folder, host=12 * MIB, disk=4 * MIB) as store:
        engine = Engine(store)
        await engine.open(SMALL)
        await stored_keys(engine, 1000)
        await quiet(store)
        yield store, engine


async def test_others_have_their_turn_while_small_pages_go_from_disk_for_a_large_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page of half a MiB on a disk full of pages of 4 KiB: some of those go at each turn of the loop."""
    async with small_on_disk(tmp_path, monkeypatch) as (store, engine):
        index, left = store.parts.caches[engine.opened.cache].index, list[int]()
        left.append(index.copies[Tier.DISK])
        assert left[0] > 500
        await engine.open(LARGE)
        await stored_keys(engine, 1)
        disk = store.parts.caches[engine.opened.cache].index.copies
        while not disk[Tier.DISK]:
            left.append(index.copies[Tier.DISK])
            await asyncio.sleep(0)
        assert left[0] - left[-1] >= 50
        assert max(a - b for a, b in itertools.pairwise(left)) < 20
        engine.leave()


async def test_disk_takes_pages_again_after_a_slice_of_its_evictions_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the slices before it freed is made durable all the same; nothing is written until it is."""
    async with small_on_disk(tmp_path, monkeypatch) as (store, engine):
        room, failed, asked = store.parts.persist.room, list[object](), itertools.count()
        asyncio.get_running_loop().set_exception_handler(lambda _, context: failed.append(context["exception"]))
        share = room.order.policy.share

        def fail_once(node: Node) -> int:
            if next(asked) == 5:
                raise RuntimeError("a policy's")
            return share(node)

        monkeypatch.setattr(room.order.policy, "share", fail_once)
        await engine.open(LARGE)
        await stored_keys(engine, 1)
        disk = store.parts.caches[engine.opened.cache].index.copies
        await until(lambda: disk[Tier.DISK] == 1, 5.0)
        assert [str(each) for each in failed] == ["a policy's"]
        engine.leave()


async def test_what_was_cut_of_a_cache_with_many_keys_is_freed_as_it_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not all of it at the end of the last slice, which would take as long as thousands of cuts."""
    monkeypatch.setattr(slices, "SLICE_S", 0.0)
    async with storing(None, host=8 * MIB) as store:
        engine = Engine(store)
        await engine.open(KEYED)
        await stored_keys(engine, 1000)
        index = store.parts.caches[engine.opened.cache].index
        before = sum(issubclass(type(each), Node) for each in gc.get_objects())
        await engine.call(wire.Reset(engine.opened.cache))
        await until(lambda: index.nodes < 500)
        assert index.nodes > 100
        gone = before - sum(issubclass(type(each), Node) for each in gc.get_objects())
        assert gone > 0.5 * (1000 - index.nodes)
        engine.leave()
        await until(lambda: not index.nodes)


async def test_much_is_evicted_however_slow_the_loop_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice that is over before anything went is no sign that nothing can go."""
    monkeypatch.setattr(space, "SLICE_S", -1.0, raising=False)
    async with storing(None, host=2 * MIB) as store:
        engine = Engine(store)
        await engine.open(spec())
        for n in range(0, 500, 4):
            await engine.put(tokens(*range(10_000 + n, 10_004 + n)))
        assert await engine.put(tokens(*range(200)), wait_ms=0) == 200
        engine.leave()
        assert idle(store) == []


def test_what_a_pool_has_is_known_without_a_look_at_each_slab() -> None:
    """A host of half a terabyte has thousands of slabs, and every reservation asks how full it is."""
    tier = HostTier(1 << 30, slab_bytes=64 << 10, prefault=False, hugepages="never")
    pool = tier.pool("s", Shape((4096,), (1,)))
    few = pool.alloc(0, 16)
    seconds = fastest(lambda: (pool.used(0), pool.capacity(0), pool.total_bytes))
    many = pool.alloc(0, 16 * 4096)
    assert len(pool.slabs) > 4000
    assert fastest(lambda: (pool.used(0), pool.capacity(0), pool.total_bytes)) < 50 * seconds + 1e-5
    assert (pool.used(0), pool.capacity(0)) == (len(few) + len(many), 16 * len(pool.slabs))
    assert tier.check() == []
    pool.free(0, many)
    pool.shed()
    assert (pool.used(0), pool.capacity(0), pool.total_bytes) == (16, 16, 64 << 10)
    assert tier.check() == []
    tier.close()


async def test_a_use_of_a_long_path_with_states_looks_at_its_end_alone() -> None:
    """Whether eviction takes it first is asked with each use: it costs the same for a million tokens."""
    async with storing(None, host=32 * MIB) as store:
        engine = Engine(store)
        await engine.open(spec((FULL, STATE)))
        last = wire.Want(1, (0).to_bytes(4, "little"))
        for first, pages in ((0, 10), (10_000, 1500)):
            assert await engine.put(tokens(*range(first, first + pages)), wants=(last,)) == pages
        index = store.parts.caches[engine.opened.cache].radix
        short, long = (next(n for n in index.walk() if n.pages == pages) for pages in (10, 1500))
        assert index.doomed_tail(short)
        assert index.doomed_tail(long)
        assert fastest(lambda: index.doomed_tail(long)) < 10 * fastest(lambda: index.doomed_tail(short))
        assert fastest(lambda: index.tail(long, 1)) < 30 * fastest(lambda: index.tail(short, 1))
        engine.leave()


# -- walks -------------------------------------------------------------------------------------------------------------


async def forked(store: Store) -> Engine:
    """An engine with a path of many branches."""
    engine = Engine(store)
    await engine.open(spec())
    for n in range(1, 20):
        await engine.put(tokens(*range(n), 1000 + n))
    return engine


async def test_the_scrub_begins_without_a_look_at_every_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of a million nodes is not walked in one go."""
    async with storing(None, host=8 * MIB) as store:
        engine = await forked(store)
        cache, walked = store.parts.caches[engine.opened.cache], 0
        walk = cache.index.walk

        def counted() -> Iterator[Any]:
            nonlocal walked
            for node in walk():
                walked += 1
                yield node

        monkeypatch.setattr(cache.index, "walk", counted)
        monkeypatch.setattr(scrub, "BATCH_COPIES", 1)
        batches = store.scrub.batches()
        await anext(batches)
        assert walked == 1
        assert sum([len(batch) async for batch in batches]) + 1 == sum(cache.index.copies)
        engine.leave()


async def test_an_export_has_every_page_though_paths_are_split_and_joined_while_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others are served while it looks at what there is; what they do to the tree costs the file nothing."""
    monkeypatch.setattr(slices, "SLICE_S", -1.0)
    async with storing(tmp_path, host=8 * MIB) as store:
        engine = Engine(store)
        await engine.open(spec())
        for n in range(20):
            await engine.put(tokens(n, *range(100, 120)))
        begun = asyncio.ensure_future(store.admin[wire.Export](wire.Export(wire.Prompt())))
        for n in range(20):
            await asyncio.sleep(0)
            assert n > 15 or not begun.done()
            await engine.match(tokens(19 - n, *range(100, 105)))
        export = (await begun).data
        assert store.parts.caches[engine.opened.cache].index.nodes > 20
        assert export["pages"] == 20 * 21
        raw, last = b"", False
        while not last:
            chunk = await store.admin[wire.ExportNext](wire.ExportNext(export["export"]))
            raw, last = raw + chunk.data, chunk.last
        assert raw.count(tokens(100, 101, 102)) == raw.count(tokens(105, 106, 107)) == 20
        engine.leave()
        await quiet(store)
        assert idle(store) == []


# -- many at once ------------------------------------------------------------------------------------------------------


async def test_others_have_their_turn_while_many_rows_are_found_and_many_prompts_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A Load or Store of a whole prompt's rows, and an Order of a long queue."""
    fd, memory = memfd(PAGES, 4096, sealed=True)
    async with storing(None, host=8 * MIB) as store:
        engine = Engine(store)
        await engine.open(spec())
        region = store.register(wire.Register("engine", "cpu", 0, 4096, PAGES), fd, engine.process.peer).region
        every = rows(*range(PAGES))
        reserved = await engine.reserve(PATH)
        for page in range(PAGES):
            memory[page, :4000] = content(PATH[: (page + 1) * 8], 0, 4000)
        monkeypatch.setattr(slices, "SLICE_S", -1.0)
        turns, reply = await turns_beside(engine.call(wire.Store(region, 0, every, reservation=reserved.reservation)))
        assert (turns >= PAGES, reply.done) == (True, b"\1" * PAGES)
        assert (await engine.call(wire.Commit(reserved.reservation, 0, PAGES))).published == PAGES
        assert await engine.get(PATH) == PAGES
        memory[:] = 0
        handles = [(await engine.match(PATH[: n * 8])).handle for n in range(1, PAGES)]
        lease = await engine.call(wire.Acquire(handles[-1]))
        turns, reply = await turns_beside(
            engine.call(wire.Load(region, 0, every[: 8 * lease.pages], lease=lease.lease))
        )
        assert (turns >= lease.pages, reply.done) == (True, b"\1" * lease.pages)
        assert np.array_equal(memory[7, :4000], content(PATH[:64], 0, 4000))
        turns, reply = await turns_beside(engine.call(wire.Order(tuple(handles), (0,) * len(handles))))
        assert (turns >= len(handles), set(reply.handles)) == (True, set(handles))
        engine.leave()
        assert idle(store) == []
    os.close(fd)


async def test_others_have_their_turn_while_a_long_path_comes_from_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What of it is to be loaded is found some at a time, and every byte is right."""
    monkeypatch.setattr(loads, "AT_ONCE", 2, raising=False)
    async with storing(tmp_path, host=8 * MIB) as store:
        engine = Engine(store)
        await engine.open(spec((FULL, WINDOW)))
        assert await engine.put(PATH) == PAGES
        await engine.call(wire.Flush())
        drop_host(store)
        turns, _ = await turns_beside(engine.call(wire.Prefetch((await engine.match(PATH)).handle)))
        assert turns >= PAGES
        await until(lambda: not store.parts.loads.moving)
        assert store.parts.caches[engine.opened.cache].index.copies[Tier.HOST] == PAGES + 3
        assert await engine.get(PATH) == PAGES
        engine.leave()
        await quiet(store)
        assert idle(store) == []


async def test_others_have_their_turn_between_the_batches_of_a_path_that_comes_from_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All are begun by one request: no two take their slots, and have them filled, in one turn of the loop."""
    monkeypatch.setattr(mover, "BATCH_BYTES", FULL.item_bytes)
    turn, begun = 0, []
    take = space.Space.take_first

    def counted(self: space.Space, *args: Any) -> Any:
        begun.append(turn)
        return take(self, *args)

    monkeypatch.setattr(space.Space, "take_first", counted)
    async with storing(tmp_path, host=8 * MIB) as store:
        engine = Engine(store)
        await engine.open(spec((FULL,)))
        assert await engine.put(PATH) == PAGES
        await engine.call(wire.Flush())
        drop_host(store)
        begun.clear()
        got = asyncio.ensure_future(engine.get(PATH))
        while not got.done():
            turn += 1
            await asyncio.sleep(0)
        assert await got == PAGES
        assert len(begun) == len(set(begun)) == PAGES


async def test_a_reset_while_it_is_looked_for_what_to_load_leaves_nothing_to_be_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asked before gets nothing of the old weights after it."""
    monkeypatch.setattr(loads, "AT_ONCE", 2, raising=False)
    async with storing(tmp_path, host=8 * MIB) as store:
        engine, other = Engine(store), Engine(store, "other", pid=2)
        await engine.open(spec())
        await other.open(spec())
        assert await engine.put(PATH) == PAGES
        await engine.call(wire.Flush())
        drop_host(store)
        matched = await engine.match(PATH)
        acquire = asyncio.ensure_future(engine.call(wire.Acquire(matched.handle)))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not acquire.done()
        await other.call(wire.Reset(other.opened.cache))
        assert (await acquire).pages == 0
        engine.leave()
        other.leave()
        await quiet(store)
        await until(lambda: not store.parts.loads.moving)
        assert idle(store) == []


async def test_a_flush_looks_at_no_page_again_for_each_that_it_adds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What disk did not take for a time is much; for each page the others on their way are no business of it."""
    monkeypatch.setattr(health, "RETRY_S", 0.0)
    calls, seen = Failing(), 0
    covers = Entry.covers

    def counted(entry: Entry, page: int) -> bool:
        nonlocal seen
        seen += 1
        return covers(entry, page)

    async with storing(tmp_path, host=8 * MIB, calls=calls) as store:
        engine = Engine(store)
        await engine.open(KEYED)
        calls.broken = True
        await stored_keys(engine, 200)
        await until(lambda: not store.parts.persist.pending)
        calls.broken = False
        monkeypatch.setattr(Entry, "covers", counted)
        await engine.call(wire.Flush())
        assert store.parts.counts["pages_written_disk"] == 200
        assert seen < 5 * 200
        engine.leave()
        assert idle(store) == []


# -- names -------------------------------------------------------------------------------------------------------------


async def test_chain_keys_of_a_long_path_are_made_as_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run on its way to disk needs those of its own pages; whatever is split off or joined, they are the same."""
    async with storing(None, host=8 * MIB) as store:
        engine = Engine(store)
        await engine.open(spec())
        await engine.put(PATH)
        cache = store.parts.caches[engine.opened.cache]
        index = cache.radix
        right = chain_keys(cache.id[:16], PATH, index.stride)
        hashed: list[int] = []

        def counted(parent: bytes, keys: bytes, stride: int) -> bytes:
            hashed.append(len(keys) // stride)
            return chain_keys(parent, keys, stride)

        monkeypatch.setattr(base, "chain_keys", counted)
        (node,) = index.walk()
        assert names_of(cache, node, 64, 128) == (PATH[512:1024], right[1024:2048], right[1008:1024])
        assert names_of(cache, node, 128, 192)[1] == right[2048:3072]
        assert sum(hashed) == 192
        for at in (250, 192, 100):  # behind what is known, at its end, within it
            upper = index.ending_at(node, at)
            assert index.chain_of(upper) == right[upper.depth * 16 : at * 16]
        assert index.chain_of(node) == right[250 * 16 :]
        assert index.join(node) == 3
        assert index.chain_of(node) == right
        assert sum(hashed) == PAGES
        assert store.parts.check() == []
        engine.leave()
