"""The daemon's device memory, mapped by another real process whose kernels compute and read there: CPU, and GPU.

With test_device_engines, which looks at the CPU's memory as an array: the same ways, with handles for descriptors.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginekv import EngineKv, Shape
from kvtier.client import Client, Lease, Reservation
from kvtier.demo.daemon import Daemon
from kvtier.device.shuttle import Shuttle
from kvtier.identity import CacheSpec
from kvtier.types import KvtierError
from storekit import KINDS, maker, until_sync

PAGES, TOKENS = 6, 16
SHAPE = Shape("LBNHC", 4, 20, 4, 8, (16, 16), 2)


@pytest.fixture(scope="module", params=KINDS)
def device(request: pytest.FixtureRequest) -> Any:
    """The CPU in a GPU's place, and a GPU."""
    return maker(request.param)()


@pytest.fixture
def daemon(tmp_path: Path, device: Any) -> Iterator[Daemon]:
    """A kvtierd with a device tier there."""
    which = "cuda:0" if device.facts.compute else "cpu"
    flags = [f"--device-which={which}", "--device-bytes=64MiB"]
    with Daemon(tmp_path, host="64MiB", disk="64MiB", flags=flags) as one:
        yield one
        assert one.broken_invariants() == []
        assert one.stop() == 0, one.log.read_text()[-2000:]


class Engine:
    """KV of random bytes in GPU memory, a client, and a mirror in pinned memory."""

    def __init__(self, daemon: Daemon, device: Any) -> None:
        self.device, self.stream = device, device.stream()
        self.client = Client(daemon.socket, instance="engine", verify="always", timeout_s=20.0)
        self.kv = EngineKv(SHAPE, self.take)
        self.plan = self.kv.plan(TOKENS)
        self.cache = self.client.open(CacheSpec("m", b"f" * 16, "bfloat16", TOKENS, (self.plan.group,)))
        self.ids = np.random.default_rng(2).permutation(SHAPE.blocks)[: PAGES * self.plan.per]
        self.fill(np.random.default_rng(0).integers(0, 256, len(self.kv.bytes), np.uint8))

    def take(self, size: int) -> tuple[int, np.ndarray]:
        self.memory, self.mirror = self.device.take(size), self.device.pin(size)
        return self.memory.address, self.mirror.data

    def fill(self, data: np.ndarray) -> None:
        self.mirror.data[:] = data
        self.device.copy(self.memory.address, self.mirror.address, self.memory.bytes, self.stream)
        self.stream.synchronize()

    def blocks(self) -> np.ndarray:
        self.device.copy(self.mirror.address, self.memory.address, self.memory.bytes, self.stream)
        self.stream.synchronize()
        return self.kv.logical()[:, self.ids].copy()


@pytest.fixture
def engine(daemon: Daemon, device: Any) -> Iterator[Engine]:
    """One engine of that daemon."""
    one = Engine(daemon, device)
    yield one
    one.client.close()


def keys() -> bytes:
    return np.arange(PAGES * TOKENS, dtype="<i4").tobytes()


def slots_of(held: Lease | Reservation) -> np.ndarray:
    """Where its pages are."""
    return np.array([held.address(0, page) for page in range(PAGES)], np.uint64)


def test_an_engine_computes_into_the_daemons_memory_and_reads_there(daemon: Daemon, device: Any, engine: Engine):
    """Map by handle, gather on the engine's stream into slots, commit after it, scatter from leased slots."""
    assert engine.client.map_device(device.facts.uuid), engine.client.device.reason
    before, shuttle = engine.blocks(), Shuttle(device, engine.plan, direct=True, stream=engine.stream)
    held = engine.cache.match(keys()).reserve(0, PAGES, wait_ms=5000, device=True)
    assert held.commit(after=shuttle.store(engine.ids, slots_of(held)).done) == PAGES
    engine.fill(np.zeros(len(engine.kv.bytes), np.uint8))
    lease = engine.cache.match(keys()).acquire(wait_ms=5000)
    lease.release(after=shuttle.load(engine.ids, slots_of(lease)).done)
    assert np.array_equal(engine.blocks(), before)
    with Client(daemon.socket, instance="cpu", verify="always", timeout_s=20.0) as other:
        read = other.open(engine.cache.spec).match(keys()).acquire(wait_ms=5000)
        assert all(read.view(0, page) is not None for page in range(PAGES))


def test_an_engine_decodes_in_the_daemons_memory(daemon: Daemon, device: Any, engine: Engine):
    """A prompt of two pages and four that come token by token: each is named and committed when it is full.

    All of them are read where they were computed until the request ends, and are a hit of others from then on.
    """
    assert engine.client.map_device(device.facts.uuid), engine.client.device.reason
    before, shuttle = engine.blocks(), Shuttle(device, engine.plan, direct=True, stream=engine.stream)
    per, stride = engine.plan.per, engine.cache.spec.stride
    path = engine.cache.match(keys()[: 2 * stride])
    with path.reserve(0, PAGES, wait_ms=5000, device=True, running=True) as held:
        assert (held.pages, held.named) == (PAGES, 2)
        for page in range(PAGES):
            if page >= held.named:
                held.name(keys()[page * stride : (page + 1) * stride])
            slot = np.array([held.address(0, page)], np.uint64)
            stored = shuttle.store(engine.ids[page * per : (page + 1) * per], slot, holder=held)
            assert held.commit(page, 1, after=stored.done) == page + 1
        engine.fill(np.zeros(len(engine.kv.bytes), np.uint8))
        shuttle.load(engine.ids, slots_of(held), holder=held)
    assert np.array_equal(engine.blocks(), before)
    assert held.address(0, 0) is None
    with Client(daemon.socket, instance="cpu", verify="always", timeout_s=20.0) as other:
        read = other.open(engine.cache.spec).match(keys()).acquire(wait_ms=5000)
        assert all(read.view(0, page) is not None for page in range(PAGES))


def test_blocks_go_into_slots_in_host_with_the_sums_of_the_device(device: Any, engine: Engine):
    """The twin of test_device_daemon: gather, sum, copy into reserved slots in host; verify what is leased, scatter."""
    before, shuttle = engine.blocks(), Shuttle(device, engine.plan, sums=True, stage_bytes=8192)
    with engine.cache.match(keys()).reserve(0, PAGES, wait_ms=5000) as held:
        stored = shuttle.store(engine.ids, slots_of(held), holder=held)
        stored.wait()
        held.summed(0, 0, stored.sums.tolist())
        assert held.commit() == PAGES
    engine.fill(np.zeros(len(engine.kv.bytes), np.uint8))
    with engine.cache.match(keys()).acquire(wait_ms=5000) as lease:
        assert all(lease.view(0, page) is not None for page in range(PAGES))
        shuttle.load(engine.ids, slots_of(lease), holder=lease).wait()
    assert np.array_equal(engine.blocks(), before)
    shuttle.close()


class Gate:
    """An event of a stream that is reached when the test says so."""

    open = False

    def synchronize(self, timeout_s: float | None = None) -> bool:
        return self.open


def test_slots_are_given_back_only_after_the_engines_stream(device: Any, engine: Engine):
    """The twin of test_device_engines: what a stream may still write or read stays held, and goes once it is done."""
    assert engine.client.map_device(device.facts.uuid), engine.client.device.reason
    shuttle, gate = Shuttle(device, engine.plan, direct=True, stream=engine.stream), Gate()
    held = engine.cache.match(keys()).reserve(0, PAGES, wait_ms=5000, device=True)
    shuttle.store(engine.ids, slots_of(held), holder=held)
    for verb in (held.commit, held.abort):
        with pytest.raises(KvtierError, match="stay held"):
            verb(after=gate, timeout_s=0.01)
        assert held.address(0, 0) is not None
    gate.open = True
    assert held.commit(after=engine.stream.record()) == PAGES
    gate.open = False
    lease = engine.cache.match(keys()).acquire(wait_ms=5000)
    with pytest.raises(KvtierError, match="stay held"):
        lease.release(after=gate, timeout_s=0.01)
    assert lease.address(0, 0) is not None
    gate.open = True
    lease.release(after=gate)
    assert lease.address(0, 0) is None


def test_hot_pages_come_up_and_are_read_there(daemon: Daemon, device: Any, engine: Engine):
    """What host has is brought to the device once an engine that maps it reads it, and its kernels find it there."""
    before, shuttle = engine.blocks(), Shuttle(device, engine.plan, direct=True, stream=engine.stream)
    staged = Shuttle(device, engine.plan)
    pinned = device.pin(PAGES * engine.plan.group.item_bytes)
    slots = np.uint64(pinned.address) + np.arange(PAGES, dtype=np.uint64) * np.uint64(engine.plan.group.item_bytes)
    staged.store(engine.ids, slots).wait()
    with engine.cache.match(keys()).reserve(0, PAGES, wait_ms=5000) as held:
        assert held.write_pages(0, 0, pinned.data.reshape(PAGES, -1))
        assert held.commit() == PAGES
    assert engine.client.map_device(device.facts.uuid), engine.client.device.reason
    engine.fill(np.zeros(len(engine.kv.bytes), np.uint8))

    def up() -> bool:
        with engine.cache.match(keys()).acquire(wait_ms=5000) as lease:
            there = all(lease.on_device(0, page) for page in range(PAGES))
            if there:
                shuttle.load(engine.ids, slots_of(lease), holder=lease)
            return there

    until_sync(up)
    assert np.array_equal(engine.blocks(), before)
