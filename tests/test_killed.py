"""Engines that end while bytes of theirs move: the bytes go where they were meant to or nowhere, and all returns."""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines import FULL, STATE, WINDOW, Engine, content, idle, spec, tokens
from kvtier import wire
from kvtier.client import Client
from kvtier.tiers.region import Region
from storekit import drop_host, memfd, quiet, rows, storing, until
from test_processes import LONG_S, ctl, engineproc, engines, settled

__all__ = ["engines"]

KEYED = spec(key_bytes=16)
KEYS = [bytes([n]) * 16 for n in range(8)]


@pytest.mark.parametrize("kind", ["load", "store"])
async def test_a_delayed_copier_outlives_its_engine_and_harms_nobody(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Its engine is gone, host is full of others' pages: it still reads or writes only what it was given."""
    fd, memory = memfd(8, 8192, sealed=True)
    started, go = threading.Event(), threading.Event()
    real = getattr(Region, "write" if kind == "load" else "read")

    def delayed(self: Region, row: int, views: list[np.ndarray]) -> None:
        started.set()
        go.wait()
        real(self, row, views)

    async with storing(None, host=1 << 20) as store:
        dying, other = Engine(store, "dying", pid=1), Engine(store, "other", pid=2)
        number = (await dying.open(KEYED)).cache
        await other.open(spec())
        region = store.register(wire.Register("dying", "rows", 0, 8192, 8), fd, dying.process.peer).region
        for n, key in enumerate(KEYS):
            memory[n, :4000] = content(key, 0, 4000)
        names = b"".join(KEYS)
        if kind == "load":
            await dying.call(wire.Store(region, 0, rows(*range(8)), cache=number, keys=names))
            memory[:] = 0
        monkeypatch.setattr(Region, "write" if kind == "load" else "read", delayed)
        verb = wire.Load if kind == "load" else wire.Store
        moving = asyncio.ensure_future(dying.call(verb(region, 0, rows(*range(8)), cache=number, keys=names)))
        try:
            await until(started.is_set)
            moving.cancel()
            store.leave(dying.process, clean=False)
            store.gone(dying.process)
            paths = [tokens(n, *range(100, 110)) for n in range(40)]
            for path in paths:
                await other.put(path, wait_ms=200)
            memory[:] = 0xEE if kind == "store" else 0
        finally:
            go.set()
        await asyncio.wait([moving])
        for path in paths:
            await other.get(path)
        if kind == "load":
            for n, key in enumerate(KEYS):
                assert not memory[n].any() or np.array_equal(memory[n, :4000], content(key, 0, 4000))
        assert (await other.match(paths[-1])).pages == 11
        other.leave()
        store.parts.prune()
        assert idle(store) == []
    os.close(fd)


async def test_every_group_kind_comes_back_bit_exact_through_regions(tmp_path: Path) -> None:
    """Rows to pages, windows and state points, to disk, back to host, into other rows."""
    fd, memory = memfd(12, 32768, sealed=False)
    path = tokens(1, 2, 3, 4, 5)
    async with storing(tmp_path) as store:
        engine = Engine(store)
        await engine.open(spec((FULL, WINDOW, STATE)))
        region = store.register(wire.Register("engine", "rows", 0, 32768, 12), fd, engine.process.peer).region
        reserved = await engine.reserve(path, wants=(wire.Want(2, b"\4\0\0\0"),))
        sizes = [group.item_bytes for group in engine.opened.groups]
        for group, size in enumerate(sizes):
            for n in range(5):
                memory[n, :size] = content(path[: (n + 1) * 8], group, size)
            at = rows(-1, -1, -1, -1, 4) if group == 2 else rows(*range(5))
            store_rows = wire.Store(region, group, at, reservation=reserved.reservation)
            assert (await engine.call(store_rows)).done[-1] == 1
        assert (await engine.call(wire.Commit(reserved.reservation, 0, 5))).published == 5
        await quiet(store)
        drop_host(store)
        lease = await engine.call(wire.Acquire((await engine.match(path)).handle))
        assert {items.group: (items.first, items.count) for items in lease.items} == {0: (0, 5), 1: (2, 3), 2: (4, 1)}
        for items in lease.items:
            memory[:] = 0
            at = rows(*range(6, 6 + items.count))
            load = wire.Load(region, items.group, at, lease=lease.lease, first=items.first)
            assert (await engine.call(load)).done == b"\1" * items.count
            for n in range(items.count):
                size = sizes[items.group]
                want = content(path[: (items.first + n + 1) * 8], items.group, size)
                assert np.array_equal(memory[6 + n, :size], want)
        engine.leave()
        await quiet(store)
        assert idle(store) == []
    os.close(fd)


def test_engines_killed_while_their_memory_is_copied_leave_nothing(daemon: Any, engines: Any) -> None:
    """Kill -9 amid loads and stores of regions: what was stored is right, nothing is held, others never notice."""
    rng = random.Random(7)
    survivor = engines("survivor")
    base = list(range(40))
    assert survivor("put", base) == {"published": 40}
    for n in range(8):
        victim = engines(f"victim{n}")
        assert victim("stream", [n, n + 1, 100, n]) == {"running": 8}
        victim("acquire", base)
        victim("reserve", [n, n, n])
        time.sleep(rng.random() * 0.03)
        victim.kill()
        assert survivor("get", base) == {"pages": 40, "right": 40}
    settled(daemon, {"survivor": 0})
    assert ctl(daemon, "check")["broken"] == []
    with Client(daemon.socket, instance="reader", timeout_s=LONG_S, verify="always") as client:
        cache = client.open(engineproc.KEYED)
        found = 0
        for number in (*range(9), 100):
            keys = [engineproc.key_of(number, n) for n in range(32)]
            with cache.acquire_keys(0, b"".join(keys)) as lease:
                for n, key in enumerate(keys):
                    out = np.empty(engineproc.LAYERS * engineproc.HEADS * engineproc.CELL, np.uint8)
                    if lease.read(0, n, out):
                        assert np.array_equal(out, engineproc.content(key).reshape(-1)), "wrong KV"
                        found += 1
        assert found > 0
