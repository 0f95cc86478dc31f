"""Room and time under pressure: nothing waits for what cannot happen, nothing is lost to a request that ended early."""

from __future__ import annotations

import asyncio
import inspect
from pathlib import Path
from typing import Any

import pytest

from engines import Engine, idle, spec, tokens
from kvtier import wire
from kvtier.identity import GroupSpec
from kvtier.tiers import health
from kvtier.types import Kind, Tier
from storekit import MIB, drop_host, full_for, memfd, quiet, rows, storing, until

PAGE = spec((GroupSpec(Kind.FULL, 1, 1, 32_000),))


async def cancelled_at_once(engine: Engine, message: wire.Message) -> bool:
    """Send a request whose Cancel comes in the same piece of the stream; whether it had to wait at all."""
    reply: Any = engine.store.verbs[type(message)](engine.process, message)
    if not inspect.isawaitable(reply):
        return False
    task = asyncio.ensure_future(reply)
    task.cancel()
    await asyncio.wait([task])
    return True


@pytest.mark.parametrize("what", ["acquire", "acquire keys", "load", "reserve", "store"])
async def test_a_request_cancelled_as_it_arrives_holds_nothing(tmp_path: Path, what: str) -> None:
    """Its coroutine never runs; what the verb took before it is given back all the same."""
    path, key = tokens(1, 2, 3), b"k" * 16
    fd, _ = memfd(4, 32768, sealed=True)
    async with storing(tmp_path, cap=2.0) as store:
        engine = Engine(store)
        await engine.open(spec(PAGE.groups, key_bytes=16))
        await engine.put_keys(key)
        keyed = engine.opened.cache
        await engine.open(PAGE)
        await engine.put(path)
        await quiet(store)
        drop_host(store)
        handle = (await engine.match(path)).handle
        region = store.register(wire.Register("engine", "rows", 0, 32768, 4), fd, engine.process.peer).region
        message = {
            "acquire": wire.Acquire(handle),
            "acquire keys": wire.AcquireKeys(keyed, 0, key),
            "load": wire.Load(region, 0, rows(0), cache=keyed, keys=key),
            "store": wire.Store(region, 0, rows(0), cache=keyed, keys=b"n" * 16),
            "reserve": wire.Reserve((await engine.match(tokens(*range(300)))).handle, 0, 300),
        }[what]
        assert await cancelled_at_once(engine, message)
        assert engine.process.instance.held_bytes == 0
        engine.leave()
        await quiet(store)
        assert idle(store) == []


async def test_a_commit_cancelled_as_it_arrives_is_served_all_the_same() -> None:
    """Pages that are complete do not wait for ever for a checksum that nobody takes."""
    path = tokens(*range(20))
    async with storing(None) as store:
        engine = Engine(store)
        await engine.open(PAGE)
        reserved = await engine.reserve(path)
        engine.write(path, reserved)
        assert await cancelled_at_once(engine, wire.Commit(reserved.reservation, 0, 20))
        pool = store.parts.host.pools[0]
        await until(lambda: pool.counts()[0][1] == 0)
        assert await engine.get(path) == 20
        engine.leave()
        assert idle(store) == []


async def test_a_full_disk_that_can_give_nothing_up_does_not_keep_host_from_making_room(tmp_path: Path) -> None:
    """Pages that disk cannot take are lost when room is needed, within the deadline of whoever needs it."""
    kept = tokens(*range(28))
    async with storing(tmp_path, host=2 * MIB, disk=MIB) as store:
        holder, other = Engine(store, "holder", pid=1), Engine(store, "other", pid=2)
        await holder.open(PAGE)
        await other.open(PAGE)
        assert await holder.put(kept) == 28
        await quiet(store)
        lease = await holder.call(wire.Acquire((await holder.match(kept)).handle))
        assert lease.pages == 28
        for n in range(1000, 1100):
            assert await other.put(tokens(n), wait_ms=3000) == 1, "a page was refused"
            assert await other.get(tokens(n)) == 1
        assert store.parts.counts["pages_lost_unsaved"] > 0
        for engine in (holder, other):
            engine.leave()
        await quiet(store)
        assert idle(store) == []


async def test_a_full_disk_gives_up_no_more_while_nothing_becomes_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What goes is not room before its record is written: while that fails, more of it would not help what comes."""
    async with storing(tmp_path, disk=2 * MIB) as store:
        engine = Engine(store)
        await engine.open(PAGE)
        for n in range(80):
            assert await engine.put(tokens(n)) == 1
        await quiet(store)
        disk, index = store.parts.disk, store.parts.caches[engine.opened.cache].index
        assert disk is not None
        assert store.parts.counts["pages_evicted_disk"]
        before = index.copies[Tier.DISK]
        with full_for(tmp_path / "catalogue" / "data.mdb"):
            for n in range(100, 130):
                assert await engine.put(tokens(n)) == 1
            await until(lambda: disk.failure and not store.parts.persist.pending)
            assert index.copies[Tier.DISK] > before - 10
        monkeypatch.setattr(health, "RETRY_S", 0.0)
        await until(lambda: not disk.freeing_bytes)
        written = store.parts.counts["pages_written_disk"]
        for n in range(200, 240):
            assert await engine.put(tokens(n)) == 1
        await until(lambda: store.parts.counts["pages_written_disk"] >= written + 40)
        engine.leave()
        assert idle(store) == []


async def test_two_who_need_room_at_once_empty_no_slab_twice() -> None:
    """The second leaves a slab alone that the first is emptying, or that has gone back to the budget meanwhile."""
    async with storing(None, host=2 * MIB) as store:
        engine = Engine(store)
        await engine.open(PAGE)
        assert await engine.put(tokens(*range(30))) == 30
        pool = store.parts.host.pools[0]
        slab = pool.slabs[0]
        empty = store.parts.space.slabs.empty
        assert await asyncio.gather(empty(pool, slab), empty(pool, slab)) == [True, False]
        assert slab not in pool.slabs
        assert not await empty(pool, slab)
        assert store.parts.counts["pages_relocated"] > 0
        assert await engine.get(tokens(*range(30))) > 0
        engine.leave()
        assert idle(store) == []
