"""The daemon's GPU memory, mapped by another real process. Run with -m gpu where there is a GPU.

The twin of test_device_engines: the same ways, with handles in place of descriptors.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginekv import EngineKv, Shape
from kvtier.client import Client
from kvtier.demo.daemon import Daemon
from kvtier.device.shuttle import Shuttle
from kvtier.identity import CacheSpec
from storekit import gpu

pytestmark = pytest.mark.gpu
PAGES, TOKENS = 6, 16
SHAPE = Shape("LBNHC", 4, 20, 4, 8, (16, 16), 2)


@pytest.fixture(scope="module")
def device() -> Any:
    """The GPU, or a skip that says why there is none."""
    return gpu()


@pytest.fixture
def daemon(tmp_path: Path, device: Any) -> Iterator[Daemon]:
    """A kvtierd with a device tier on the GPU."""
    assert device
    with Daemon(tmp_path, host="64MiB", disk="64MiB", flags=["--device-which=cuda:0", "--device-bytes=64MiB"]) as one:
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


def keys() -> bytes:
    return np.arange(PAGES * TOKENS, dtype="<i4").tobytes()


def test_an_engine_computes_into_the_daemons_memory_and_reads_there(daemon: Daemon, device: Any):
    """Map by handle, gather on the engine's stream into slots, commit after it, scatter from leased slots."""
    engine = Engine(daemon, device)
    assert engine.client.map_device(), engine.client.device.reason
    before, shuttle = engine.blocks(), Shuttle(device, engine.plan, direct=True, stream=engine.stream)
    held = engine.cache.match(keys()).reserve(0, PAGES, wait_ms=5000, device=True)
    slots = np.array([held.address(0, page) for page in range(PAGES)], np.uint64)
    assert held.commit(after=shuttle.store(engine.ids, slots).done) == PAGES
    engine.fill(np.zeros(len(engine.kv.bytes), np.uint8))
    lease = engine.cache.match(keys()).acquire(wait_ms=5000)
    slots = np.array([lease.address(0, page) for page in range(PAGES)], np.uint64)
    lease.release(after=shuttle.load(engine.ids, slots).done)
    assert np.array_equal(engine.blocks(), before)
    with Client(daemon.socket, instance="cpu", verify="always", timeout_s=20.0) as other:
        read = other.open(engine.cache.spec).match(keys()).acquire(wait_ms=5000)
        assert all(read.view(0, page) is not None for page in range(PAGES))
