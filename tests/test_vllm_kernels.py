"""The connector's copies by kernels beside vLLM's stream: the same pages as by torch, in any legal order of work."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from enginekv import EngineKv, Shape
from kvtier.client import Client
from kvtier.demo.daemon import Daemon
from kvtier.device.shuttle import Way
from kvtier.identity import CacheSpec, GroupSpec, Slice
from kvtier.types import Kind, KvtierError
from lazydevice import LazyDevice, Site
from storekit import KINDS, maker
from vllmstub import Request, adapters, config, paged, step
from weightkit import safetensors

torch = pytest.importorskip("torch")

BLOCKS, RATIO, TOKENS = 12, 2, 8
"""Blocks of vLLM's manager, kernel blocks of each, and tokens of those."""
PAGES = 5


@pytest.fixture
def vllm() -> Iterator[Any]:
    """The adapters' modules."""
    with adapters("scheduler", "messages", "worker", "kernels", "ways") as modules:
        yield modules


class Layer:
    """One layer's KV as vLLM shows it to connectors, in memory of whatever device."""

    ndim = 4

    def __init__(self, kv: EngineKv, number: int) -> None:
        sizes = dict(zip("BHNC", (*kv.shape[2:5], sum(kv.shape.dims)), strict=True))
        self.shape = tuple(sizes[axis] for axis in "BHNC")
        self._strides = tuple(kv.strides[axis] // kv.shape.item for axis in "BHNC")
        self._address, self._item = kv.address + number * kv.strides["L"], kv.shape.item

    def stride(self) -> tuple[int, ...]:
        return self._strides

    def data_ptr(self) -> int:
        return self._address

    def element_size(self) -> int:
        return self._item


class Engine:
    """A rank's KV on a device, a client, and the copies."""

    def __init__(self, vllm: Any, device: Any, daemon: Daemon, order: str, part: Slice | None = None) -> None:
        heads = 4 if part is None else part.h1 - part.h0
        self.device, self.stream = device, device.stream()
        self.kv = EngineKv(Shape(order, 3, BLOCKS * RATIO, heads, TOKENS, (16, 16), 2), self.take)
        self.group = GroupSpec(Kind.FULL, 3, 4, RATIO * TOKENS * 32 * 2)
        self.client = Client(daemon.socket, instance="pair" if part else "one", verify="always", timeout_s=20.0)
        spec = CacheSpec("m", b"f" * 16, "bfloat16", RATIO * TOKENS, (self.group,))
        more = {"rank": int(part.h0 > 0), "world": 2, "slices": [part]} if part else {}
        self.cache = self.client.open(spec, **more)
        self.copier = ThreadPoolExecutor(1)
        layers = [Layer(self.kv, number) for number in range(3)]
        self.copies = vllm.kernels.KernelCopies(
            device, lambda: self.stream, [layers], BLOCKS, (self.group,), (part,), self.copier
        )

    def take(self, size: int) -> tuple[int, np.ndarray]:
        self.memory, self.mirror = self.device.take(size), self.device.pin(size)
        return self.memory.address, self.mirror.data

    def send(self, data: np.ndarray) -> None:
        """Bytes into the KV."""
        self.mirror.data[:] = data
        self.device.copy(self.memory.address, self.mirror.address, self.memory.bytes, self.stream)
        self.stream.synchronize()

    def pages(self, blocks: list[int]) -> np.ndarray:
        """What blocks hold: [pages, layers, heads, all tokens of a block x content]."""
        self.device.copy(self.mirror.address, self.memory.address, self.memory.bytes, self.stream)
        self.stream.synchronize()
        logical = self.kv.logical()
        rows = logical.reshape(3, BLOCKS, RATIO, *logical.shape[2:])[:, blocks]
        return rows.transpose(1, 0, 3, 2, 4, 5).reshape(len(blocks), 3, logical.shape[2], -1).copy()

    def save(self, held: Any, blocks: list[int]) -> int | None:
        """Pages out of blocks, and committed."""
        pages = self.copier.submit(self.copies.save(held, 0, (blocks,))).result(30)
        held.commit()
        return pages

    def close(self) -> None:
        self.copier.shutdown()
        self.copies.close()
        self.client.close()


def keys() -> bytes:
    return np.arange(PAGES * RATIO * TOKENS, dtype="<i4").tobytes()


@pytest.fixture(params=KINDS)
def device(request: pytest.FixtureRequest) -> Any:
    """The CPU, and the same on a GPU."""
    return maker(request.param)()


@pytest.mark.parametrize("order", ["LBNHC", "LBHNC", "BLHNC", "LHBNC"])
def test_pages_are_the_same_by_kernels_and_by_the_cpu(vllm: Any, daemon: Daemon, device: Any, order: str):
    """What kernels gather any client reads in place as the page; what is leased they scatter into other blocks."""
    engine = Engine(vllm, device, daemon, order)
    engine.send(np.random.default_rng(0).integers(0, 256, len(engine.kv.bytes), np.uint8))
    blocks, others = [3, 4, 1, 9, 6], [2, 7, 8, 5, 11]
    before = engine.pages(blocks)
    held = engine.cache.match(keys()).reserve(0, PAGES, wait_ms=5000)
    assert engine.save(held, blocks) == PAGES
    with engine.cache.match(keys()).acquire(wait_ms=5000) as lease:
        assert all(np.array_equal(lease.view(0, page), before[page].reshape(-1)) for page in range(PAGES))
        rest = engine.pages([0, 10])
        load = engine.copies.load(lease, 0, (others,), later=False)
        assert (load.good, load.pages) == (True, PAGES)
        engine.stream.synchronize()
        assert load.here()
    assert np.array_equal(engine.pages(others), before)
    assert np.array_equal(engine.pages([0, 10]), rest)
    engine.close()


def test_ranks_bring_their_heads_of_each_page(vllm: Any, daemon: Daemon, device: Any):
    """TP=2: each rank's kernels fill its part of shared slots and take it back from whole pages."""
    parts = [Slice(0, 3, 0, 2), Slice(0, 3, 2, 4)]
    ranks = [Engine(vllm, device, daemon, "LBNHC", part) for part in parts]
    blocks = [3, 4, 1, 9, 6]
    for seed, rank in enumerate(ranks):
        rank.send(np.random.default_rng(seed).integers(0, 256, len(rank.kv.bytes), np.uint8))
    before = [rank.pages(blocks) for rank in ranks]
    held = ranks[0].cache.match(keys()).reserve(0, PAGES, wait_ms=5000)
    for rank in ranks:
        assert rank.save(held if rank is ranks[0] else rank.cache.adopt(held.share()), blocks) == PAGES
    lease = ranks[0].cache.match(keys()).acquire(wait_ms=5000)
    whole = np.concatenate(before, axis=2)
    assert all(np.array_equal(lease.view(0, page), whole[page].reshape(-1)) for page in range(PAGES))
    for rank, want in zip(ranks, before, strict=True):
        rank.send(np.zeros(len(rank.kv.bytes), np.uint8))
        mine = lease if rank is ranks[0] else rank.cache.adopt(lease.share())
        assert rank.copies.load(mine, 0, (blocks,), later=False).good
        rank.stream.synchronize()
        assert np.array_equal(rank.pages(blocks), want)
    for rank in ranks:
        rank.close()


def test_a_page_that_rotted_is_not_loaded(vllm: Any, daemon: Daemon, device: Any):
    """The CPU verifies what goes up: the load says that it is not good, and where it stopped."""
    engine = Engine(vllm, device, daemon, "LBNHC")
    held = engine.cache.match(keys()).reserve(0, PAGES, wait_ms=5000)
    engine.save(held, [1, 2, 3, 4, 5])
    with engine.cache.match(keys()).acquire(wait_ms=5000) as lease:
        lease._item(0, 3)[0].pieces[0][7] ^= 1
        load = engine.copies.load(lease, 0, ([6, 7, 8, 9, 10],), later=True)
        assert (load.good, load.pages, load.here()) == (False, 3, True)
    engine.close()


def test_many_pages_go_by_few_chunks(vllm: Any, daemon: Daemon, device: Any, monkeypatch: pytest.MonkeyPatch):
    """More pages than the pinned memory holds: chunks are used again once they are empty."""
    monkeypatch.setattr(vllm.kernels, "CHUNK_BYTES", 1)  # a page each
    monkeypatch.setattr(vllm.kernels, "CHUNKS", 2)
    engine = Engine(vllm, device, daemon, "BLHNC")
    engine.send(np.random.default_rng(0).integers(0, 256, len(engine.kv.bytes), np.uint8))
    before = engine.pages([1, 2, 3, 4, 5])
    assert engine.save(engine.cache.match(keys()).reserve(0, PAGES, wait_ms=5000), [1, 2, 3, 4, 5]) == PAGES
    with engine.cache.match(keys()).acquire(wait_ms=5000) as lease:
        assert engine.copies.load(lease, 0, ([6, 7, 8, 9, 10],), later=False).good
    assert np.array_equal(engine.pages([6, 7, 8, 9, 10]), before)
    engine.close()


# -- the device tier ---------------------------------------------------------------------------------------------------


def test_a_worker_maps_only_the_memory_that_its_kernels_reach(vllm: Any):
    """It says on which GPU it computes: ranks on others, to which the daemon's memory would be a fault, go by host."""
    asked = []

    def map_device(uuid: bytes) -> bool:
        asked.append(uuid)
        return uuid == b"g" * 16

    worker = vllm.worker.Worker.__new__(vllm.worker.Worker)
    worker._client = SimpleNamespace(map_device=map_device, device=SimpleNamespace(reason="another GPU"))
    worker._cache = SimpleNamespace(groups=[SimpleNamespace(slots_per_item=1)])
    for uuid in (b"g" * 16, b"h" * 16):
        worker._copies = SimpleNamespace(uuid=uuid)
        assert worker._maps() == (uuid == b"g" * 16)
    assert asked == [b"g" * 16, b"h" * 16]


def test_slots_on_the_device_are_read_and_written_straight(vllm: Any, tmp_path: Path, device: Any):
    """An engine that maps the daemon's device tier: kernels move between blocks and slots there, nothing crosses."""
    which = "cuda:0" if device.facts.compute else "cpu"
    flags = [f"--device-which={which}", "--device-bytes=16MiB"]
    with Daemon(tmp_path, host="64MiB", disk="0", flags=flags) as daemon:
        engine = Engine(vllm, device, daemon, "LBNHC")
        assert engine.client.map_device(engine.copies.uuid), engine.client.device.reason
        engine.send(np.random.default_rng(0).integers(0, 256, len(engine.kv.bytes), np.uint8))
        blocks, others = [3, 4, 1, 9, 6], [2, 7, 8, 5, 11]
        before = engine.pages(blocks)
        held = engine.cache.match(keys()).reserve(0, PAGES, wait_ms=5000, device=True)
        assert held.on_device(0, 0)
        assert engine.save(held, blocks) == PAGES
        lease = engine.cache.match(keys()).acquire(wait_ms=5000)
        assert all(lease.on_device(0, page) for page in range(PAGES))
        load = engine.copies.load(lease, 0, (others,), later=False)
        engine.stream.synchronize()
        assert (load.good, load.pages, load.here()) == (True, PAGES, True)
        assert np.array_equal(engine.pages(others), before)
        with Client(daemon.socket, instance="cpu", verify="always", timeout_s=20.0) as other:
            read = other.open(engine.cache.spec).match(keys()).acquire(wait_ms=5000)
            assert all(np.array_equal(read.view(0, page), before[page].reshape(-1)) for page in range(PAGES))
        engine.close()
        assert daemon.broken_invariants() == []


# -- who waits for whom ------------------------------------------------------------------------------------------------


class Later:
    """An executor whose work is done when the test lets it: a lazy device has one thread."""

    def __init__(self, pick: random.Random) -> None:
        self._pick = pick
        self._todo: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, call: Any, *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._todo.append((future, lambda: call(*args)))
        return future

    def some(self) -> None:
        """Do a few things."""
        for _ in range(self._pick.randrange(4)):
            self.next()

    def next(self) -> None:
        """Do one thing."""
        if self._todo:
            future, work = self._todo.pop(0)
            future.set_result(work())

    def shutdown(self) -> None:
        """Do all."""
        while self._todo:
            self.next()


TOKEN_IDS = list(range(1, 42))
"""Ten whole pages of four tokens and one token to compute."""


class Story:
    """vLLM's steps on a lazy device: compute, save, reuse of the blocks, load before a step and between steps."""

    copy = "kernels"

    def __init__(self, vllm: Any, daemon: Daemon, folder: Path, seed: int, without: Site | None = None) -> None:
        self.device = self.make(seed, without)
        self.compute = self.device.stream()
        self.pick = random.Random(seed)
        self.blocks = torch.zeros(64, 2, 4, 16)
        self.wrong: list[str] = []
        settings = config(folder)
        settings.model_config.revision = f"{seed} {without}"  # a cache of its own
        self.reach(vllm)
        clients = [Client(daemon.socket, instance="vllm", timeout_s=20.0) for _ in range(2)]
        self.worker = vllm.worker.Worker(clients[0], settings, paged(2, 4 * 16 * 4, 64, 4), self.copy)
        self.worker._copier.shutdown()
        self.worker._copier = self.later = Later(self.pick)
        self.worker.register({"layer": self.blocks})
        self.head = vllm.scheduler.Scheduler(clients[1], 1)
        self.head.agree([self.worker.formats()])

    def make(self, seed: int, without: Site | None) -> LazyDevice:
        """The device."""
        return LazyDevice(seed, without)

    def reach(self, vllm: Any) -> None:
        """Have the adapter find it."""
        vllm.ways.engine_device = lambda _: (self.device, lambda: self.compute, Way.STAGED)

    def write(self, first: int, count: int, value: float) -> None:
        """A step computes blocks: block n holds value + n - first."""

        def work() -> None:
            for n in range(count):
                self.blocks[first + n] = value + n

        self.compute.add(work)

    def read(self, what: str, first: int, count: int, value: float) -> None:
        """A step attends to blocks."""

        def work() -> None:
            if not all(bool((self.blocks[first + n] == value + n).all()) for n in range(count)):
                self.wrong.append(what)

        self.compute.add(work)

    def step(self, **scheduled: int) -> Any:
        """What the scheduler plans, and the worker does before the model runs."""
        plan = self.head.plan(step(**scheduled))
        if plan.fence:
            self.worker.fence()
        self.worker.load(plan)
        return plan

    def after(self, plan: Any) -> None:
        """What the worker does after it."""
        self.worker.save(plan)
        self.later.some()
        for _ in range(self.pick.randrange(3)):  # a device works without being waited for, too
            self.device.step()
        self.worker.between()
        done = self.worker.take_done()
        if done:
            self.head.heard(done)

    def until(self, true: Callable[[], Any]) -> None:
        """Steps of other requests."""
        for _ in range(4000):
            if true():
                return
            self.after(self.step())
        self.wrong.append("it never came")

    def tell(self) -> list[str]:
        """What came out wrong."""
        request = Request("a", TOKEN_IDS)
        self.head.begin(request)
        self.until(lambda: self.head.matched(request, 0)[0] is not None)

        def saving() -> bool:
            plan = self.step(a=40)
            if plan.saves:
                self.write(1, 10, 100.0)
            self.after(plan)
            return bool(plan.saves)

        self.until(saving)
        self.head.finished("a")
        self.worker.fence()  # its blocks are given to something else
        self.write(1, 10, -1.0)
        self.until(lambda: not self.head._held._reservations)
        for name, first, later in (("b", 20, False), ("c", 40, True)):
            self.load(name, first, later=later)
        self.later.shutdown()
        self.compute.synchronize()
        return self.wrong

    def load(self, name: str, first: int, *, later: bool) -> None:
        """A request with the same prompt, whose blocks another one's step still writes."""
        self.head._later = lambda _: later
        self.write(first, 10, -2.0)
        request = Request(name, TOKEN_IDS)
        self.head.begin(request)
        self.until(lambda: (self.head.matched(request, 0)[0] or 0) == 40)
        self.head.allocated(request, (list(range(first, first + 10)),), 40)
        plan = self.step()
        if later:
            self.after(plan)
            received: set[str] = set()
            self.until(lambda: received.update(self.worker.take_received()[0]) or received)
        self.read(name, first, 10, 100.0)
        self.after(plan) if not later else None
        self.head.finished(name)

    def close(self) -> None:
        self.device.without = None
        self.worker.close()
        self.head.close()


def tell(
    vllm: Any, daemon: Daemon, folder: Path, seed: int, without: Site | None = None
) -> tuple[list[str], set[Site]]:
    """One story: what came out wrong, and who waited."""
    told = Story(vllm, daemon, folder, seed, without)
    try:
        return told.tell(), told.device.sites
    except (AssertionError, KvtierError) as exc:
        return [str(exc)], told.device.sites
    finally:
        told.close()


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A model's folder."""
    return safetensors(tmp_path / "m.safetensors", {"a": np.ones((4, 8), "<f4")}).parent


def test_any_legal_order_of_work_gives_the_same_kv(vllm: Any, daemon: Daemon, weights: Path):
    """Saves are of what was computed, blocks are reused after they were read, loads are there when a step reads."""
    assert not {seed: wrong for seed in range(20) if (wrong := tell(vllm, daemon, weights, seed)[0])}


@pytest.mark.slow
def test_every_wait_of_the_connector_is_needed(vllm: Any, daemon: Daemon, weights: Path):
    """Without the wait of vLLM's stream for a load or for a save's reads, or theirs for it, some order goes wrong."""
    lines = (Path(__file__).parent.parent / "kvtier/device/shuttle.py").read_text().splitlines()
    sites = {where for seed in range(3) for where in tell(vllm, daemon, weights, seed)[1]}
    mine = [(name, n) for name, n in sites if name == "kernels.py"]
    theirs = [(name, n) for name, n in sites if name == "shuttle.py" and "wait(after)" in lines[n - 1]]
    assert (len(mine), len(theirs)) == (2, 2)
    needless = [
        where for where in mine + theirs if not any(tell(vllm, daemon, weights, seed, where)[0] for seed in range(50))
    ]
    assert not needless


def test_a_worker_that_never_had_kv_closes(vllm: Any, daemon: Daemon, weights: Path):
    """An engine whose start failed before its KV was there ends without another error."""
    vllm.worker.Worker(Client(daemon.socket), config(weights), paged(2, 256, 64, 4)).close()
