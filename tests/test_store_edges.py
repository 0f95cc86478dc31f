"""Edges of what engines may do: at their cap, without a host tier, storing and committing at once, asking again."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import msgspec
import numpy as np
import pytest

from conftest import open_files
from engines import FULL, STATE, WINDOW, Engine, Peer, content, idle, spec, tokens
from kvtier import wire
from kvtier.identity import GroupSpec
from kvtier.policy.quota import Rule
from kvtier.store import slices
from kvtier.tiers.region import Region
from kvtier.types import NO_COPY, Code, Kind, KvtierError, Tier
from storekit import MIB, Failing, drop_host, memfd, quiet, rows, storing, until

PAGE = spec((GroupSpec(Kind.FULL, 1, 1, 32_000),))
KEYED = spec(key_bytes=16)
KEYS = [bytes([n]) * 16 for n in range(40)]


async def put_keys(engine: Engine, keys: list[bytes], **more: int) -> wire.Reserved:
    """Store keys in group 0 and return the reservation."""
    return await engine.put_keys(b"".join(keys), **more)


async def test_a_window_that_no_arithmetic_takes_is_refused_by_name() -> None:
    """When the cache is opened, not by an error of each match."""
    async with storing(None) as store:
        with pytest.raises(KvtierError) as caught:
            await Engine(store).open(spec((GroupSpec(Kind.WINDOW, 1, 1, 4096, window=1 << 63),)))
        assert (caught.value.code, caught.value.field) == (Code.BAD_REQUEST, "spec.groups[0].window")


# -- the cap -----------------------------------------------------------------------------------------------------------


async def test_no_more_is_granted_than_one_reply_can_tell_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """A larger reply would be refused, and its lease or reservation be held by nobody: the leading pages come."""
    monkeypatch.setattr("kvtier.store.reserving.MOST_TOLD", 400)
    async with storing(None, host=4 * MIB) as store:
        engine = Engine(store)
        await engine.open(spec((FULL, WINDOW)))
        keys = tokens(*range(60))
        reserved = await engine.reserve(keys)
        assert (reserved.pages, reserved.refused) == (25, Code.OVER_CAP)
        assert sum(len(items.offsets) for items in reserved.items) <= 400
        engine.write(keys, reserved)
        await engine.call(wire.Commit(reserved.reservation, 0, 25))
        lease = await engine.call(wire.Acquire((await engine.match(keys)).handle))
        assert 0 < lease.pages < 25
        assert sum(len(items.offsets) + len(items.sums) for items in lease.items) <= 400
        for items in lease.items:
            engine.verify(keys, items)
        await engine.call(wire.Release(lease.lease))
        engine.leave()
        assert idle(store) == []


@pytest.mark.parametrize("groups", [(FULL,), (FULL, WINDOW), (FULL, WINDOW, STATE)], ids=["full", "window", "state"])
async def test_a_match_larger_than_the_cap_is_leased_as_far_as_the_cap_allows(groups: tuple[GroupSpec, ...]) -> None:
    """The engine gets a prefix that it can resume from, byte for byte right, and never more than its cap."""
    async with storing(None, host=4 * MIB) as store:
        writer, reader = Engine(store, "writer", pid=1), Engine(store, "reader", pid=2)
        await writer.open(spec(groups))
        await reader.open(spec(groups))
        keys = tokens(*range(100))
        for first in range(0, 100, 20):
            wants = (wire.Want(2, np.array([first + 9], "<i4").tobytes()),) if len(groups) > 2 else ()
            part = tokens(*range(first + 20))
            reserved = await writer.reserve(part, first, wants=wants)
            writer.write(part, reserved)
            await writer.call(wire.Commit(reserved.reservation, first, 20))
        reader.process.instance.cap_bytes = 200_000
        matched = await reader.match(keys)
        assert matched.pages == (90 if len(groups) > 2 else 100)
        lease = await reader.call(wire.Acquire(matched.handle))
        for items in lease.items:
            reader.verify(keys, items)
        assert 0 < lease.pages < matched.pages
        assert reader.process.instance.held_bytes <= 200_000
        with pytest.raises(KvtierError) as caught:
            await reader.call(wire.Acquire(matched.handle))
        assert caught.value.code == Code.OVER_CAP
        await reader.call(wire.Release(lease.lease))
        assert reader.process.instance.held_bytes == 0
        for engine in (writer, reader):
            engine.leave()
        assert idle(store) == []


async def test_keys_beyond_the_cap_are_absent_from_a_lease() -> None:
    """The leading keys are leased; an engine that can hold none of them is told so."""
    async with storing(None) as store:
        engine = Engine(store)
        number = (await engine.open(KEYED)).cache
        await put_keys(engine, KEYS)
        engine.process.instance.cap_bytes = 10 * 4096
        lease = await engine.call(wire.AcquireKeys(number, 0, b"".join(KEYS)))
        offsets = np.frombuffer(lease.items[0].offsets, "<i8")
        assert ((offsets >= 0) == (np.arange(40) < 10)).all()
        engine.verify(b"".join(KEYS), lease.items[0])
        with pytest.raises(KvtierError) as caught:
            await engine.call(wire.AcquireKeys(number, 0, KEYS[0]))
        assert caught.value.code == Code.OVER_CAP
        engine.leave()
        assert idle(store) == []


async def test_keys_on_disk_are_loaded_into_rows_whatever_the_cap_and_the_host_hold(tmp_path: Path) -> None:
    """Bytes that go from disk to rows need no slot: a worker with a small cap, or a small host, gets all its keys."""
    large = spec((GroupSpec(Kind.FULL, 1, 1, 32_000),), key_bytes=16)
    fd, memory = memfd(40, 32_768, sealed=True)
    async with storing(tmp_path, host=MIB) as store:
        engine = Engine(store)
        number = (await engine.open(large)).cache
        for first in range(0, 40, 8):
            await put_keys(engine, KEYS[first : first + 8], wait_ms=5000)
            await quiet(store)
        region = store.register(wire.Register("engine", "rows", 0, 32_768, 40), fd, engine.process.peer).region
        load = wire.Load(region, 0, rows(*range(40)), cache=number, keys=b"".join(KEYS), wait_ms=5000)
        instance = engine.process.instance
        for cap in (0, 3 * 32_768, 100 * MIB):
            instance.cap_bytes = cap
            drop_host(store)
            memory[:] = 0
            assert (await engine.call(load)).done == b"\1" * 40
            for n in range(40):
                assert np.array_equal(memory[n, :32_000], content(KEYS[n], 0, 32_000))
            assert instance.held_bytes == 0
        engine.leave()
        await quiet(store)
        assert idle(store) == []
    os.close(fd)


async def test_keys_in_host_alone_are_loaded_part_by_part_within_the_cap() -> None:
    """A cap of three keys at a time is enough for forty; one of none is refused by name."""
    fd, memory = memfd(40, 8192, sealed=True)
    async with storing(None) as store:
        engine = Engine(store)
        number = (await engine.open(KEYED)).cache
        await put_keys(engine, KEYS)
        region = store.register(wire.Register("engine", "rows", 0, 8192, 40), fd, engine.process.peer).region
        load = wire.Load(region, 0, rows(*range(40)), cache=number, keys=b"".join(KEYS))
        engine.process.instance.cap_bytes = 3 * 4096
        assert (await engine.call(load)).done == b"\1" * 40
        for n in range(40):
            assert np.array_equal(memory[n, :4000], content(KEYS[n], 0, 4000))
        engine.process.instance.cap_bytes = 4095
        with pytest.raises(KvtierError) as caught:
            await engine.call(load)
        assert caught.value.code == Code.OVER_CAP
        engine.leave()
        assert idle(store) == []
    os.close(fd)


async def test_what_a_reset_retired_meanwhile_is_not_loaded_from_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys that waited for room when the weights changed are misses, though their nodes are not all cut yet."""
    monkeypatch.setattr(slices, "SLICE_S", 0.0)  # cutting gives way after each node
    keys = [n.to_bytes(2, "little") * 8 for n in range(300)]
    fd, _ = memfd(8, 8192, sealed=True)
    async with storing(tmp_path) as store:
        engine, other = Engine(store, pid=1), Engine(store, "other", pid=2)
        number = (await engine.open(KEYED)).cache
        await put_keys(engine, keys)
        await quiet(store)
        drop_host(store)
        await other.open(KEYED)
        started, go = asyncio.Event(), asyncio.Event()

        async def held_up(*_: object) -> bool:
            started.set()
            await go.wait()
            return False

        monkeypatch.setattr(store.parts.loads, "bring", held_up)
        region = store.register(wire.Register("engine", "rows", 0, 8192, 8), fd, engine.process.peer).region
        load = wire.Load(region, 0, rows(*range(8)), cache=number, keys=b"".join(keys[:8]))
        loading = asyncio.ensure_future(engine.call(load))
        await started.wait()
        resetting = asyncio.ensure_future(other.call(wire.Reset(other.opened.cache)))
        while not store.parts.caches[number].retired:
            await asyncio.sleep(0)
        go.set()
        assert (await loading).done == bytes(8)
        assert (await resetting).epoch == 1
        for each in (engine, other):
            each.leave()
        await until(lambda: not store.parts.freeing)
        assert idle(store) == []
    os.close(fd)


# -- no host tier ------------------------------------------------------------------------------------------------------


async def test_without_host_memory_what_disk_has_is_read_into_regions_and_elsewhere_a_miss(tmp_path: Path) -> None:
    """A daemon restarted without host memory: loads by key go straight to the engine's rows, leases are empty."""
    fd, memory = memfd(8, 8192, sealed=True)
    async with storing(tmp_path) as store:
        engine = Engine(store)
        await engine.open(KEYED)
        await put_keys(engine, KEYS[:4])
        await engine.open(spec())
        await engine.put(tokens(1, 2, 3))
        await quiet(store)
    async with storing(tmp_path, host=0) as store:
        engine = Engine(store)
        await engine.open(spec())
        matched = await engine.match(tokens(1, 2, 3))
        assert matched.pages == 3
        assert (await engine.call(wire.Acquire(matched.handle))).pages == 0
        assert (await engine.reserve(tokens(4))).refused == Code.NO_SPACE
        number = (await engine.open(KEYED)).cache
        got = await engine.call(wire.AcquireKeys(number, 0, KEYS[0] + KEYS[1]))
        assert (got.lease, got.items[0].offsets) == (0, b"\xff" * 16)
        region = store.register(wire.Register("engine", "rows", 0, 8192, 8), fd, engine.process.peer).region
        load = wire.Load(region, 0, rows(7, 6, -1, 4, 3), cache=number, keys=b"".join(KEYS[:5]))
        assert (await engine.call(load)).done == bytes([1, 1, 0, 1, 0])
        for n, row in ((0, 7), (1, 6), (3, 4)):
            assert np.array_equal(memory[row, :4000], content(KEYS[n], 0, 4000))
        engine.leave()
        assert idle(store) == []
    os.close(fd)


async def test_a_load_goes_past_a_host_that_others_hold(tmp_path: Path) -> None:
    """Where host has no room, rows are filled from disk all the same; damage there is a miss."""
    fd, memory = memfd(8, 8192, sealed=False)
    async with storing(tmp_path, host=MIB, cap=2.0) as store:
        engine, other = Engine(store, pid=1), Engine(store, "other", pid=2)
        number = (await engine.open(KEYED)).cache
        await put_keys(engine, KEYS[:8])
        await quiet(store)
        drop_host(store)
        await other.open(spec())
        assert (await other.reserve(tokens(*range(1000)), wait_ms=500)).refused == Code.NO_SPACE
        region = store.register(wire.Register("engine", "rows", 0, 8192, 8), fd, engine.process.peer).region
        load = wire.Load(region, 0, rows(*range(8)), cache=number, keys=b"".join(KEYS[:8]), wait_ms=200)
        assert (await engine.call(load)).done == b"\1" * 8
        for n in range(8):
            assert np.array_equal(memory[n, :4000], content(KEYS[n], 0, 4000))
        extents = next(tmp_path.glob("*extents*"))
        extents.write_bytes(bytes(extents.stat().st_size))
        assert (await engine.call(load)).done == bytes(8)
        exists = await engine.call(wire.Exists(number, 0, b"".join(KEYS[:8])))
        assert exists.states == bytes(8)
        for each in (engine, other):
            each.leave()
        await quiet(store)
        assert idle(store) == []
    os.close(fd)


async def test_rot_in_host_costs_a_load_nothing_where_disk_has_the_bytes(tmp_path: Path) -> None:
    """The row comes from disk and the copy in host is dropped; where nothing else has them the key is a miss."""
    fd, memory = memfd(2, 8192, sealed=True)
    async with storing(tmp_path) as store:
        engine = Engine(store)
        number = (await engine.open(KEYED)).cache
        await put_keys(engine, KEYS[:1])
        await quiet(store)
        cache = store.parts.caches[number]
        node = cache.keyed.find(cache.keyed.name(0, KEYS[0]))
        region = store.register(wire.Register("engine", "rows", 0, 8192, 2), fd, engine.process.peer).region
        load = wire.Load(region, 0, rows(0), cache=number, keys=KEYS[0])
        for left in (1, 0):
            (view,) = cache.views(0, cache.index.get(node, 0, Tier.HOST, 0))
            view[100] ^= 1
            if not left:
                cache.release(cache.index.drop(node, 0, 1, Tier.DISK), store.parts.disk)
            assert (await engine.call(load)).done == bytes([left])
            assert store.parts.counts["host_checksum"] == 2 - left
            await quiet(store)
            if left:
                assert np.array_equal(memory[0, :4000], content(KEYS[0], 0, 4000))
                assert cache.index.get(node, 0, Tier.HOST, 0) == NO_COPY
                await engine.call(wire.Release((await engine.call(wire.AcquireKeys(number, 0, KEYS[0]))).lease))
        assert (await engine.call(wire.Exists(number, 0, KEYS[0]))).states == b"\0"
        engine.leave()
        assert idle(store) == []
    os.close(fd)


# -- storing and committing at once -------------------------------------------------------------------------


async def test_pages_cannot_be_committed_while_a_store_still_writes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The commit is refused by name and the pages stay open; after the Store's word they are served whole."""
    path = tokens(1, 2)
    fd, memory = memfd(2, 8192, sealed=True)
    started, go = threading.Event(), threading.Event()
    real = Region.read

    def delayed(self: Region, row: int, views: list[np.ndarray]) -> None:
        started.set()
        go.wait()
        real(self, row, views)

    monkeypatch.setattr(Region, "read", delayed)
    async with storing(None) as store:
        engine = Engine(store)
        await engine.open(spec())
        region = store.register(wire.Register("engine", "rows", 0, 8192, 2), fd, engine.process.peer).region
        reserved = await engine.reserve(path)
        for n in range(2):
            memory[n, :4000] = content(path[: (n + 1) * 8], 0, 4000)
        storing_rows = asyncio.ensure_future(
            engine.call(wire.Store(region, 0, rows(0, 1), reservation=reserved.reservation))
        )
        try:
            await until(started.is_set)
            with pytest.raises(KvtierError) as caught:
                await engine.call(wire.Commit(reserved.reservation, 0, 2))
            assert caught.value.code == Code.BUSY
            assert (await engine.match(path)).pages == 0
        finally:
            go.set()
        assert (await storing_rows).done == b"\1\1"
        assert (await engine.call(wire.Commit(reserved.reservation, 0, 2))).published == 2
        assert await engine.get(path) == 2
        engine.leave()
        assert idle(store) == []
    os.close(fd)


# -- durable, key by key -------------------------------------------------------------------------------------------


async def test_durable_is_told_of_keys_as_of_pages(tmp_path: Path) -> None:
    """How many leading keys are on disk, in steps that only grow, up to all of them; also of what another stored."""
    calls = Failing()
    async with storing(tmp_path, calls=calls) as store:
        engine, other = Engine(store, pid=1), Engine(store, "other", pid=2)
        await engine.open(KEYED)
        await other.open(KEYED)
        calls.gate.clear()
        try:
            await put_keys(other, KEYS[3:5])
            reserved = await put_keys(engine, KEYS[:10])
            await asyncio.sleep(0.02)
            assert engine.events == []
        finally:
            calls.gate.set()
        await until(lambda: engine.events and engine.events[-1].pages == 10)
        told = [event.pages for event in engine.events]
        assert told == sorted(set(told))
        assert {event.reservation for event in engine.events} == {reserved.reservation}
        engine.events.clear()
        again = await put_keys(engine, KEYS[5:12])
        await until(lambda: engine.events and engine.events[-1].pages == 7)
        assert {event.reservation for event in engine.events} == {again.reservation}
        for each in (engine, other):
            each.leave()
        await quiet(store)
        assert idle(store) == []


async def test_durable_is_not_told_of_keys_that_disk_refused(tmp_path: Path) -> None:
    """What was told before a failure stays true; nothing is told of the rest."""
    calls = Failing()
    async with storing(tmp_path, calls=calls) as store:
        engine = Engine(store)
        await engine.open(KEYED)
        await put_keys(engine, KEYS[:3])
        await until(lambda: engine.events and engine.events[-1].pages == 3)
        engine.events.clear()
        calls.broken = True
        await put_keys(engine, KEYS[3:6])
        await until(lambda: not store.parts.persist.pending)
        await asyncio.sleep(0.02)
        assert engine.events == []
        calls.broken = False
        engine.leave()


async def test_an_engine_that_polls_for_keys_is_counted_once_a_request() -> None:
    """The same question again is no new request, until its keys were read or stored, or more keys are asked for."""
    async with storing(None) as store:
        engine = Engine(store)
        number = (await engine.open(KEYED)).cache
        counts = store.parts.caches[number].counts
        await put_keys(engine, KEYS[:3])

        async def ask(*keys: bytes) -> tuple[int, int]:
            await engine.call(wire.Exists(number, 0, b"".join(keys)))
            return counts["keys_asked"], counts["keys_hit"]

        assert [await ask(*KEYS[:4]) for _ in range(5)] == [(4, 3)] * 5
        assert await ask(*KEYS[:2]) == (6, 5)
        await put_keys(engine, KEYS[3:4])
        assert [await ask(*KEYS[:4]) for _ in range(3)] == [(10, 9)] * 3
        lease = await engine.call(wire.AcquireKeys(number, 0, b"".join(KEYS[:4])))
        await engine.call(wire.Release(lease.lease))
        assert await ask(*KEYS[:4]) == (14, 13)
        engine.leave()
        assert idle(store) == []


async def test_a_region_registered_again_takes_the_place_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same process only; a transfer that runs on the first ends well, and its memory is let go of then."""
    fd, memory = memfd(2, 8192, sealed=True)
    again, fresh = memfd(2, 8192, sealed=True)
    started, go = threading.Event(), threading.Event()
    real = Region.write

    def delayed(self: Region, row: int, views: list[np.ndarray]) -> None:
        started.set()
        go.wait()
        real(self, row, views)

    monkeypatch.setattr(Region, "write", delayed)
    async with storing(None) as store:
        engine, sibling = Engine(store, pid=1), Engine(store, pid=2)
        number = (await engine.open(KEYED)).cache
        await put_keys(engine, KEYS[:2])
        message = wire.Register("engine", "rows", 0, 8192, 2)
        first = store.register(message, fd, engine.process.peer).region
        other = store.register(message, fd, sibling.process.peer).region
        regions = engine.process.instance.regions
        old = regions[first]
        load = wire.Load(first, 0, rows(0, 1), cache=number, keys=KEYS[0] + KEYS[1])
        loading = asyncio.ensure_future(engine.call(load))
        try:
            await until(started.is_set)
            second = store.register(message, again, engine.process.peer).region
            assert set(regions) == {other, second}
        finally:
            go.set()
        assert (await loading).done == b"\1\1"
        assert np.array_equal(memory[1, :4000], content(KEYS[1], 0, 4000))
        assert old._data is None, "still mapped"
        with pytest.raises(KvtierError) as caught:
            await engine.call(load)
        assert caught.value.code == Code.UNKNOWN
        assert (await engine.call(msgspec.structs.replace(load, region=second))).done == b"\1\1"
        assert np.array_equal(fresh[1, :4000], content(KEYS[1], 0, 4000))
        for _ in range(100):
            second = store.register(message, again, engine.process.peer).region
        for each in (engine, sibling):
            each.leave()
        assert idle(store) == []
    os.close(fd)
    os.close(again)


async def test_regions_of_a_process_that_died_are_let_go_beside_its_siblings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker may be killed and started again any number of times; what a sibling still moves there ends well."""
    fd, memory = memfd(2, 8192, sealed=True)
    started, go = threading.Event(), threading.Event()
    real = Region.write

    def delayed(self: Region, row: int, views: list[np.ndarray]) -> None:
        started.set()
        go.wait()
        real(self, row, views)

    async with storing(None) as store:
        scheduler = Engine(store, pid=1)
        number = (await scheduler.open(KEYED)).cache
        await put_keys(scheduler, KEYS[:2])
        instance = scheduler.process.instance
        mine = store.register(wire.Register("engine", "mine", 0, 8192, 2), fd, scheduler.process.peer).region
        for n in range(70):
            worker = Engine(store, pid=100 + n)
            register = wire.Register("engine", f"rows {n}", 0, 8192, 2)
            theirs = store.register(register, fd, worker.process.peer).region
            if n < 69:
                worker.leave(clean=n % 2 == 0)
                assert set(instance.regions) == {mine}
        with pytest.raises(KvtierError) as caught:
            store.register(register, fd, Peer(pid=100))
        assert caught.value.code == Code.UNKNOWN, "nobody's end would free it"
        monkeypatch.setattr(Region, "write", delayed)
        region = instance.regions[theirs]
        load = wire.Load(theirs, 0, rows(0, 1), cache=number, keys=KEYS[0] + KEYS[1])
        loading = asyncio.ensure_future(scheduler.call(load))
        try:
            await until(started.is_set)
            worker.leave(clean=False)
            assert region._data is not None, "unmapped under a copy"
        finally:
            go.set()
        assert (await loading).done == b"\1\1"
        assert np.array_equal(memory[1, :4000], content(KEYS[1], 0, 4000))
        assert region._data is None, "still mapped"
        assert not store.regions.running
        with pytest.raises(KvtierError) as caught:
            await scheduler.call(load)
        assert caught.value.code == Code.UNKNOWN
        scheduler.leave()
        assert idle(store) == []
    os.close(fd)


# -- scopes that come and go ----------------------------------------------------------------------------------


async def test_scopes_and_shapes_that_nobody_uses_give_their_arenas_back(tmp_path: Path, no_leaks: None) -> None:
    """However many come and go, no descriptor, mapping or table is left of them; what disk has of them is served."""
    async with storing(tmp_path) as store:
        stay = Engine(store, "stay", pid=1)
        await stay.open(spec())
        await stay.put(tokens(1, 2))
        files = len(open_files())
        for n in range(70):
            engine = Engine(store, scope=f"s{n}", pid=2)
            await engine.open(spec((GroupSpec(Kind.FULL, 1, 1, 4096 * (n % 5 + 1)),)))
            assert await engine.put(tokens(n)) == 1
            await quiet(store)
            drop_host(store)
            engine.leave()
        assert store.parts.host.scopes == ["uid:0"]
        assert {pool.total_bytes > 0 for pool in store.parts.host.pools if pool.scope != "uid:0"} == {False}
        store.parts.host.settle()
        assert len(open_files()) <= files
        assert len(Path("/proc/self/maps").read_text().split("memfd:kvtier")) <= 2
        back = Engine(store, scope="s7", pid=2)
        await back.open(spec((GroupSpec(Kind.FULL, 1, 1, 4096 * (7 % 5 + 1)),)))
        assert await back.get(tokens(7)) == 1
        assert await stay.get(tokens(1, 2)) == 2
        for each in (back, stay):
            each.leave()
        await quiet(store)
        assert idle(store) == []


async def test_pools_of_shapes_that_nobody_uses_are_forgotten() -> None:
    """With their last cache they give every slab back and are swept from no table any more."""
    async with storing(None) as store:
        for n in range(50):
            engine = Engine(store)
            await engine.open(spec((GroupSpec(Kind.FULL, 1, 1, 4096 * (n + 1)),)))
            await engine.put(tokens(n))
            await engine.call(wire.Reset(engine.opened.cache))
            engine.leave()
        assert store.parts.host.pools == []
        assert store.parts.host.used_bytes == 0
        assert not store.parts.space.orders
        assert store.parts.check() == []


async def test_rows_are_loaded_from_disk_by_who_holds_more_than_its_cap_was_lowered_to(tmp_path: Path) -> None:
    """They take no slot: what is held beyond another cap stays, and costs what it cost before."""
    fd, memory = memfd(4, 4096, sealed=True)
    async with storing(tmp_path) as store:
        engine = Engine(store)
        number = (await engine.open(KEYED)).cache
        await put_keys(engine, KEYS[:8])
        await quiet(store)
        drop_host(store)
        lease = await engine.call(wire.AcquireKeys(number, 0, b"".join(KEYS[:4]), 1000))
        region = store.register(wire.Register("engine", "rows", 0, 4096, 4), fd, engine.process.peer).region
        store.cap(2 * 4096 / (4 * MIB))
        load = wire.Load(region, 0, rows(*range(4)), cache=number, keys=b"".join(KEYS[4:8]))
        assert (await engine.call(load)).done == b"\1" * 4
        for row, key in zip(memory, KEYS[4:8], strict=True):
            assert np.array_equal(row[:4000], content(key, 0, 4000))
        await engine.call(wire.Release(lease.lease))
        engine.leave()
        assert idle(store) == []
    os.close(fd)


# -- room for what goes on ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("quota", "others"), [(0, 5), (24, 4)], ids=["tier", "quota"])
async def test_room_for_the_next_pages_of_a_prompt_is_not_made_of_its_first_ones(quota: int, others: int) -> None:
    """A prompt that comes in two parts is whole, though nothing here was used as long ago as its first part."""
    async with storing(None, host=MIB) as store:
        store.limit([Rule("scope", "uid:0", {Tier.HOST: quota * 32_768})] if quota else [])
        engine = Engine(store)
        await engine.open(PAGE)
        first, whole = tokens(*range(4)), tokens(*range(16))
        assert await engine.put(first) == 4
        handle = (await engine.match(whole)).handle
        for n in range(1, others + 1):
            assert await engine.put(tokens(*range(100 * n, 100 * n + 5))) == 5
        reserved = await engine.call(wire.Reserve(handle, 4, 12, wait_ms=1000))
        assert (reserved.pages, reserved.refused) == (12, "")
        engine.write(whole, reserved)
        await engine.call(wire.Commit(reserved.reservation, 4, 12))
        assert await engine.get(whole) == 16
        engine.leave()
        assert idle(store) == []
