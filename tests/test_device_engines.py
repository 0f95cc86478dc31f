"""Engines that map the daemon's device memory: a real daemon, real sockets, the CPU in a GPU's place."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from kvtier.client import AsyncClient, Client
from kvtier.client.sync import Reservation
from kvtier.demo.daemon import Daemon
from kvtier.identity import CacheSpec, GroupSpec
from kvtier.types import Code, Kind, KvtierError, Tier
from storekit import until_sync
from test_processes import Engine as Process

PAGE = 8192
SPEC = CacheSpec("m", b"f" * 16, "bf16", 4, (GroupSpec(Kind.FULL, 2, 2, PAGE // 4),))
PAGES = 6
FLAGS = ["--device-which=cpu", f"--device-bytes={64 * PAGE}"]


@pytest.fixture(scope="module")
def shared_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A kvtierd with a device tier of 64 pages on the CPU."""
    with Daemon(tmp_path_factory.mktemp("daemon"), host="64MiB", disk="64MiB", flags=FLAGS) as running:
        yield running
        assert running.stop() == 0, running.log.read_text()[-2000:]


@pytest.fixture
def daemon(shared_daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    """The same for all tests, with a cache of each test's own."""
    monkeypatch.setattr(sys.modules[__name__], "SPEC", msgspec.structs.replace(SPEC, salt=os.urandom(8)))
    yield shared_daemon
    assert shared_daemon.broken_invariants() == []


def engine(daemon: Daemon, name: str) -> Client:
    return Client(daemon.socket, instance=name, verify="always", timeout_s=10.0)


def keys(first: int = 0, pages: int = PAGES) -> bytes:
    return np.arange(first, first + 4 * pages, dtype="<i4").tobytes()


def data(page: int) -> np.ndarray:
    return np.random.default_rng(page).integers(0, 256, PAGE, np.uint8)


def put(client: Client, *, device: bool, first: int = 0) -> int:
    """Compute pages into slots; how many are served."""
    cache = client.open(SPEC)
    with cache.match(keys(first)).reserve(0, PAGES, wait_ms=5000, device=device) as held:
        for page in range(held.pages):
            held.view(0, page)[:] = data(first + page)
        return held.commit()


def read(client: Client, first: int = 0) -> list[int]:
    """Read pages in place, each verified; the arena that each lies in."""
    cache = client.open(SPEC)
    with cache.match(keys(first)).acquire(wait_ms=5000) as lease:
        arenas = []
        for page in range(lease.pages):
            assert np.array_equal(lease.view(0, page), data(first + page))
            arenas.append(int(lease._offsets(0, page)[0][0]) >> 44)
        return arenas


def test_pages_computed_on_the_device_are_read_there_and_by_others_in_host(daemon: Daemon):
    """Who maps the device reads its slots in place; who does not gets the same bytes from host; both are verified."""
    with engine(daemon, "gpu") as mine, engine(daemon, "cpu") as other:
        assert mine.map_device()
        assert not mine.device.reason
        assert put(mine, device=True) == PAGES
        assert read(mine) == [1024] * PAGES
        assert set(read(other)) == {0}
        assert mine.open(SPEC).flush()


def test_hot_pages_come_up_and_are_read_in_place(daemon: Daemon):
    """What host has is brought to the device once an engine that maps it reads it."""
    with engine(daemon, "gpu") as mine:
        assert put(mine, device=False) == PAGES
        assert mine.map_device()
        until_sync(lambda: set(read(mine)) == {1024})
        assert [s.tier for s in mine.open(SPEC).match(keys()).segments] == [Tier.DEVICE]
        assert mine.stat()["counters"]["bytes_host_to_device"] >= PAGES * PAGE


def test_two_processes_of_one_engine_fill_and_read_pages_on_the_device(tmp_path: Path):
    """TP=2: a scheduler reserves on the device, each worker writes its heads there, both read the whole pages there."""
    flags = ["--device-which=cpu", "--device-bytes=1MiB"]
    with Daemon(tmp_path, host="64MiB", disk="0", flags=flags) as daemon:
        scheduler, workers = Process(daemon, "tp2"), [Process(daemon, "tp2", rank, 2) for rank in range(2)]
        try:
            assert all(one("map") == {"mapped": True} for one in (scheduler, *workers))
            for n in range(4):
                pages = [n, *range(100, 105)]
                share = scheduler("reserve", pages)["share"]
                for worker in workers:
                    worker("adopt", share)
                    worker.send("fill", pages)
                assert max(worker.answer()["published"] for worker in workers) == 6
                lease = scheduler("acquire", pages)
                assert lease["arenas"] == [1024]
                for worker in workers:
                    worker("adopt", lease["share"])
                    worker.send("read", pages)
                assert [worker.answer() for worker in workers] == [{"pages": 6, "right": 6}] * 2
                assert scheduler("drop") == {}
        finally:
            for one in (scheduler, *workers):
                one.close()
        until_sync(lambda: daemon.broken_invariants() == [])


def test_a_daemon_without_a_device_says_so(tmp_path: Path):
    """No device tier configured: mapping it is refused by name, and everything goes on in host."""
    with Daemon(tmp_path, host="32MiB", disk="0") as running, engine(running, "gpu") as mine:
        assert not mine.map_device()
        assert "no device tier is configured" in mine.device.reason
        assert put(mine, device=True) == PAGES
        assert set(read(mine)) == {0}


def test_no_driver_is_a_state_and_the_daemon_lives(tmp_path: Path):
    """A GPU that is not there: the tier is absent, status says why, the daemon serves from host."""
    flags = ["--device-which=cuda:0", "--device-bytes=1MiB"]
    with Daemon(tmp_path, host="32MiB", disk="0", flags=flags) as running, engine(running, "gpu") as mine:
        tier = mine.stat()["tiers"]["device"]
        if tier["state"] == "ready":
            pytest.skip("there is a GPU here")
        assert tier["state"] == "absent"
        assert "cupy" in tier["sick"]
        assert not mine.map_device()
        assert "no device tier here" in mine.device.reason
        assert put(mine, device=True) == PAGES
        assert set(read(mine)) == {0}


def test_an_engine_that_maps_other_memory_is_refused(daemon: Daemon, monkeypatch: pytest.MonkeyPatch):
    """The token shows that both see the same bytes; without it nothing is named on the device, and why is said."""
    from kvtier.client import device

    right = device._map_host
    monkeypatch.setattr(device, "_map_host", lambda *args: bytes(16) if right(*args) else b"")
    with engine(daemon, "gpu") as mine:
        assert not mine.map_device()
        assert "shows other bytes" in mine.device.reason
        assert put(mine, device=True) == PAGES
        assert set(read(mine)) == {0}


def test_an_engine_whose_kernels_do_not_reach_the_memory_goes_by_host(daemon: Daemon):
    """It computes on a GPU, the tier's memory is the CPU's: no address there is named to it."""
    with engine(daemon, "gpu") as mine:
        assert not mine.map_device(b"\x01" * 16)
        assert "this engine computes on 0101" in mine.device.reason
        assert put(mine, device=True) == PAGES
        assert set(read(mine)) == {0}
        assert mine.map_device(bytes(16))
    with engine(daemon, "scheduler") as other:
        assert other.map_device()


@pytest.mark.slow
def test_after_a_restart_the_device_is_mapped_again(tmp_path: Path):
    """A daemon that was killed and started again: the next connection maps its new memory by itself."""
    with Daemon(tmp_path, host="64MiB", disk="64MiB", flags=FLAGS) as daemon, engine(daemon, "gpu") as mine:
        assert mine.map_device()
        assert put(mine, device=True) == PAGES
        assert mine.open(SPEC).flush()
        daemon.kill()
        daemon.start()
        until_sync(lambda: read(mine) == [1024] * PAGES)
        assert daemon.broken_invariants() == []


class Gate:
    """An event of a stream that is reached when the test says so."""

    def __init__(self) -> None:
        self.open = False

    def synchronize(self, timeout_s: float | None = None) -> bool:
        assert timeout_s is not None
        return self.open


def test_slots_are_given_back_only_after_the_engines_stream(daemon: Daemon):
    """A lease that is released after an event is released once the event is reached, and stays where it is not."""
    gate = Gate()
    with engine(daemon, "gpu") as mine:
        assert mine.map_device()
        assert put(mine, device=True) == PAGES
        lease = mine.open(SPEC).match(keys()).acquire(wait_ms=5000)
        with pytest.raises(KvtierError, match="stay held") as caught:
            lease.release(after=gate, timeout_s=0.01)
        assert caught.value.code is Code.IO
        assert np.array_equal(lease.view(0, 0), data(0))
        gate.open = True
        lease.release(after=gate)
        assert lease.view(0, 0) is None


def test_a_with_that_ends_while_the_stream_still_writes_gives_no_slots_back(daemon: Daemon, monkeypatch):
    """A commit whose event is not reached in time raises, and so does the abort of the `with` that ends by it."""
    monkeypatch.setattr(Reservation.abort, "__defaults__", (None, 0.01))
    gate = Gate()
    with engine(daemon, "gpu") as mine:
        assert mine.map_device()
        path = mine.open(SPEC).match(keys())
        with pytest.raises(KvtierError, match="stay held"), path.reserve(0, PAGES, wait_ms=2000, device=True) as held:
            held.commit(after=gate, timeout_s=0.01)
        assert held.view(0, 0) is not None, "it was given back while the stream writes"
        gate.open = True
        held.abort()
        assert held.view(0, 0) is None


async def test_the_async_client_gives_slots_back_only_after_the_engines_stream(daemon: Daemon):
    """Commit, abort and release after an event, as the blocking client does; the loop runs on meanwhile."""
    gate = Gate()
    async with AsyncClient(daemon.socket, instance="gpu", verify="always", timeout_s=10.0) as mine:
        assert await mine.map_device()
        cache = await mine.open(SPEC)
        path = await cache.match(keys())
        held = await path.reserve(0, PAGES, wait_ms=2000, device=True)
        for page in range(held.pages):
            held.view(0, page)[:] = data(page)
        for verb in (held.commit, held.abort):
            with pytest.raises(KvtierError, match="stay held"):
                await verb(after=gate, timeout_s=0.01)
            assert held.view(0, 0) is not None
        gate.open, slow = True, Gate()
        waiting = asyncio.ensure_future(held.commit(after=Slow(slow)))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        slow.open = True
        assert await waiting == PAGES
        await path.extend()
        gate.open = False
        lease = await path.acquire(wait_ms=5000)
        with pytest.raises(KvtierError, match="stay held"):
            await lease.release(after=gate, timeout_s=0.01)
        assert np.array_equal(lease.view(0, 0), data(0))
        gate.open = True
        await lease.release()
        assert lease.view(0, 0) is None


class Slow(Gate):
    """One that is waited for until another opens."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate

    def synchronize(self, timeout_s: float | None = None) -> bool:
        until_sync(lambda: self.gate.open)
        return True
