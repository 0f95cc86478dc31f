"""Engines' own paged KV in device memory: the real daemon gathers and scatters, the CPU in a GPU's place and on one."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import engines
from enginekv import EngineKv, Shape
from kvtier import quant
from kvtier.client import Client
from kvtier.client.sync import Region
from kvtier.demo.daemon import Daemon
from kvtier.device.host import HostDevice, shared_memory
from kvtier.device.layout import Paged
from kvtier.identity import CacheSpec, GroupSpec, Slice
from kvtier.store import carrier, kvregions
from kvtier.store.kvregions import KvRegion
from kvtier.store.vram import DeviceMemory
from kvtier.types import KvtierError
from kvtier.wire import Exported, Plane, RegisterKv
from storekit import KINDS, gpu, maker, storing, until, until_sync
from test_processes import ctl

PAGES, TOKENS = 6, 16
SHAPE = Shape("LBNHC", 4, 20, 4, 8, (16, 16), 2)
SLOT = 16384
WHICH = {"cpu": "cpu", "gpu": "cuda:0"}


@pytest.fixture(scope="module", params=KINDS)
def shared_daemon(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Daemon]:
    """A kvtierd with a small device tier on the CPU, and the same on a GPU."""
    Engine.kind = request.param
    flags = [f"--device-which={maker(request.param) and WHICH[request.param]}", f"--device-bytes={16 * SLOT}"]
    with Daemon(tmp_path_factory.mktemp("daemon"), host="64MiB", disk="64MiB", flags=flags) as running:
        yield running
        assert running.stop() == 0, running.log.read_text()[-2000:]


@pytest.fixture
def daemon(shared_daemon: Daemon) -> Iterator[Daemon]:
    """The same for all tests, with caches of each test's own."""
    Engine.salt = os.urandom(8)
    yield shared_daemon
    assert shared_daemon.broken_invariants() == []


def plane(base: int, layer: int, paged: Paged) -> Plane:
    """One plane as the wire has it."""
    return Plane(0, layer, paged.base - base, *paged[1:])


class Engine:
    """An engine process with KV of its own in shared device memory; `kv` has its bytes, on a GPU a mirror of them."""

    salt = b""
    kind = "cpu"

    def __init__(
        self, daemon: Daemon, name: str, shape: Shape = SHAPE, part: Slice | None = None, codec: str = "none"
    ) -> None:
        self.client = Client(daemon.socket, instance=name, verify="always", timeout_s=10.0)
        self.device = maker(self.kind)()
        self.kv = EngineKv(shape, self.take)
        self.plan = self.kv.plan(TOKENS, codec)
        group = GroupSpec(self.plan.group.kind, SHAPE.layers, SHAPE.heads, self.plan.group.cell_bytes)
        spec = CacheSpec("m", b"f" * 16, "bfloat16", TOKENS, (group,), codec=codec, salt=self.salt)
        more = {"rank": int(part.h0 > 0), "world": 2, "slices": [part]} if part else {}
        self.cache = self.client.open(spec, **more)
        numbers = np.random.default_rng(len(name)).standard_normal(len(self.kv.bytes) // 2).astype(np.float32)
        self.fill(quant.narrow(numbers, "bf16").view(np.uint8))
        self.planes = [plane(self.kv.address, n, one) for n, layer in enumerate(self.kv.layers) for one in layer]
        self.ids = np.random.default_rng(2).permutation(shape.blocks)[: PAGES * self.plan.per]

    def take(self, size: int) -> tuple[int, np.ndarray]:
        self.shared = self.device.share(size)
        if self.kind == "cpu":
            return self.shared.memory.address, self.shared.memory.data
        self.mirror = self.device.pin(size)
        return self.shared.memory.address, self.mirror.data

    def fill(self, data: np.ndarray | int) -> None:
        """The engine computes."""
        self.kv.bytes[:] = data
        self.move(self.shared.memory.address, self.kv.bytes.ctypes.data)

    def move(self, target: int, source: int) -> None:
        """Between a GPU's memory and its mirror."""
        if self.kind == "gpu":
            stream = self.device.stream()
            self.device.copy(target, source, len(self.kv.bytes), stream)
            stream.synchronize()

    def register(self, **change: object) -> Region:
        what = change.get("what", self.shared.exported)
        token = change.get("token", self.kv.bytes[:16].tobytes())
        return self.client.register_kv("kv", [(what, self.shared.fd)], change.get("planes", self.planes), [token])

    def blocks(self) -> np.ndarray:
        self.move(self.kv.bytes.ctypes.data, self.shared.memory.address)
        return self.kv.logical()[:, self.ids].copy()

    def close(self) -> None:
        self.client.close()
        if self.shared.fd >= 0:
            os.close(self.shared.fd)


@pytest.fixture
def engine(daemon: Daemon) -> Iterator[Engine]:
    one = Engine(daemon, "engine")
    yield one
    one.close()


def keys(first: int = 0) -> bytes:
    return np.arange(first, first + PAGES * TOKENS, dtype="<i4").tobytes()


@pytest.mark.parametrize("where", ["host", "device"])
def test_the_daemon_gathers_and_scatters_an_engines_blocks(engine: Engine, where: str):
    """Store blocks into reserved slots, commit, lose the blocks, load the lease: the same bytes, in either tier."""
    assert where == "host" or engine.client.map_device()
    region, before = engine.register(), engine.blocks()
    with engine.cache.match(keys()).reserve(0, PAGES, wait_ms=5000, device=where == "device") as held:
        assert region.store(held, engine.ids) == b"\1" * len(engine.ids)
        assert held.commit() == PAGES
    engine.fill(0)
    with engine.cache.match(keys()).acquire(wait_ms=5000) as lease:
        assert (int(lease._offsets(0, 0)[0][0]) >> 44 == 1024) == (where == "device")
        assert region.load(lease, engine.ids) == b"\1" * len(engine.ids)
        if where == "host" or engine.kind == "cpu":
            assert np.array_equal(lease.view(0, 1), shadow(before, engine, 1))
    assert np.array_equal(engine.blocks(), before)
    assert region.unregister()


def shadow(before: np.ndarray, engine: Engine, page: int) -> np.ndarray:
    """The canonical page of the blocks as they were."""
    kept = engine.kv.bytes.copy()
    engine.kv.logical()[:, engine.ids] = before
    per = engine.plan.per
    found = engine.kv.page(engine.ids[page * per : (page + 1) * per])
    engine.kv.bytes[:] = kept
    return found


def test_client_and_daemon_launches_make_the_same_pages(daemon: Daemon, engine: Engine):
    """What the daemon gathered the client's shuttle scatters, by addresses of the same slots."""
    from kvtier.device.shuttle import Shuttle

    region, before = engine.register(), engine.blocks()
    assert engine.client.map_device()
    with engine.cache.match(keys()).reserve(0, PAGES, wait_ms=5000, device=True) as held:
        region.store(held, engine.ids)
        held.commit()
    engine.fill(0)
    shuttle = Shuttle(engine.device, engine.plan, direct=True)
    lease = engine.cache.match(keys()).acquire(wait_ms=5000)
    slots = np.array([lease.address(0, page) for page in range(PAGES)], np.uint64)
    moved = shuttle.load(engine.ids, slots)
    lease.release(after=moved.done)
    assert np.array_equal(engine.blocks(), before)


@pytest.mark.parametrize("where", ["host", "device"])
def test_two_ranks_fill_one_page_by_the_daemon(daemon: Daemon, where: str):
    """TP=2: the daemon gathers each rank's heads into shared slots; who has all heads reads what both stored."""
    if where == "host" and Engine.kind == "gpu" and not gpu().facts.reaches:
        pytest.skip("kernels do not reach the daemon's host memory here")
    parts = [Slice(0, 4, 0, 2), Slice(0, 4, 2, 4)]
    ranks = [Engine(daemon, "pair", SHAPE._replace(heads=2), part) for part in parts]
    for seed, rank in enumerate(ranks):
        rank.fill(np.random.default_rng(seed).integers(0, 256, len(rank.kv.bytes), np.uint8))
        assert where == "host" or rank.client.map_device(), rank.client.device.reason
    held = ranks[0].cache.match(keys()).reserve(0, PAGES, wait_ms=5000, device=where == "device")
    for number, rank in enumerate(ranks):
        mine = held if number == 0 else rank.cache.adopt(held.share())
        region = rank.client.register_kv(
            f"rank {number}", [(rank.shared.exported, rank.shared.fd)], rank.planes, [rank.kv.bytes[:16].tobytes()]
        )
        assert region.store(mine, rank.ids) == b"\1" * len(rank.ids)
        mine.commit()
    whole = Engine(daemon, "single")
    with whole.cache.match(keys()).acquire(wait_ms=5000) as lease:
        assert lease.pages == PAGES
        assert whole.register().load(lease, whole.ids) == b"\1" * len(whole.ids)
    assert np.array_equal(whole.blocks(), np.concatenate([rank.blocks() for rank in ranks], axis=2))
    for each in (*ranks, whole):
        each.close()


def test_quantized_pages_come_back_within_their_bounds(daemon: Daemon):
    """A cache that asked for a codec: the daemon quantizes on the way out and back."""
    engine = Engine(daemon, "engine", codec="int8")
    region, before = engine.register(), engine.blocks()
    with engine.cache.match(keys()).reserve(0, PAGES, wait_ms=5000) as held:
        assert region.store(held, engine.ids) == b"\1" * len(engine.ids)
        assert held.commit() == PAGES
    engine.fill(0)
    with engine.cache.match(keys()).acquire(wait_ms=5000) as lease:
        assert region.load(lease, engine.ids) == b"\1" * len(engine.ids)
    moved = quant.widen(engine.blocks().view(np.uint16), "bf16") - quant.widen(before.view(np.uint16), "bf16")
    assert 0 < np.abs(moved).max() < 0.05
    engine.close()


@pytest.mark.parametrize("change", ["token", "outside", "unsealed", "strides", "planes"])
def test_memory_that_is_not_what_was_said_is_refused_by_name(engine: Engine, change: str):
    """Another token, planes beyond the memory, memory that can shrink: named, and the daemon touches nothing of it."""
    if change == "unsealed" and engine.kind == "gpu":
        pytest.skip("only a memfd can shrink")
    what = {
        "token": {"token": b"something else!!"},
        "outside": {"planes": [*engine.planes[:-1], changed(engine.planes[-1], offset=len(engine.kv.bytes) - 8)]},
        "strides": {"planes": [changed(one, block_stride=1 << 40) for one in engine.planes]},
        "planes": {"planes": []},
        "unsealed": {},
    }[change]
    if change == "unsealed":
        fd = os.memfd_create("kv", os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, len(engine.kv.bytes))
        os.dup2(fd, engine.shared.fd)
        os.close(fd)
    expect = {"token": "shows other bytes", "unsealed": "sealed"}.get(change, "planes")
    try:
        engine.register(**what)
    except KvtierError as exc:
        assert expect in str(exc)
    else:
        assert expect in str(engine.client.last_error)
    assert engine.client.ping()


@pytest.mark.parametrize("wrong", [None, 0, 1, 2])
def test_every_stretch_is_read_back(daemon: Daemon, wrong: int | None):
    """KV in three allocations: one that shows other bytes here than to the engine refuses all of it, and says which."""
    with Client(daemon.socket, instance="engine", verify="always", timeout_s=10.0) as client:
        if Engine.kind == "gpu":
            pytest.skip("memory of three memfds")
        shared = [HostDevice().share(4096) for _ in range(3)]
        for number, one in enumerate(shared):
            one.memory.data[:] = number + 1
        tokens = [bytes([number + 1 + (number == wrong)]) * 16 for number in range(3)]
        planes = [Plane(number, number, 0, 4, 1, 4, 16, 64, 64, 16) for number in range(3)]
        region = client.register_kv("kv", [(one.exported, one.fd) for one in shared], planes, tokens)
        if wrong is None:
            assert region.unregister()
        else:
            assert f"stretch {wrong} of the engine's GPU memory" in str(client.last_error)
        with pytest.raises(KvtierError, match="one for each stretch"):
            client.register_kv("few", [(one.exported, one.fd) for one in shared], planes, tokens[:1])
        for one in shared:
            os.close(one.fd)
    until_sync(lambda: maps(daemon) == 0)


def changed(one: Plane, **fields: int) -> Plane:
    """A plane with other numbers."""
    return Plane(**{name: getattr(one, name) for name in Plane.__struct_fields__} | fields)


def test_blocks_that_are_not_there_are_refused_and_cost_nothing(engine: Engine):
    """A block number out of range, a block twice on the way back, half a page: bad_request, and the next one works."""
    region = engine.register()
    with engine.cache.match(keys()).reserve(0, PAGES, wait_ms=5000) as held:
        for rows in ([99] * len(engine.ids), engine.ids[:-1]):
            with pytest.raises(KvtierError, match=r"ids|rows"):
                region.store(held, rows)
        assert region.store(held, engine.ids) == b"\1" * len(engine.ids)
        assert held.commit() == PAGES
    with engine.cache.match(keys()).acquire(wait_ms=5000) as lease:
        with pytest.raises(KvtierError, match="each block once"):
            region.load(lease, [0] * len(engine.ids))
        assert region.load(lease, engine.ids) == b"\1" * len(engine.ids)


def test_an_engine_that_is_killed_leaves_nothing_mapped(daemon: Daemon):
    """Kill -9 of a process that registered its KV and holds slots on the device: all of it goes."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[2]); import test_device_kv as t, types, pathlib, signal\n"
        "t.Engine.kind = sys.argv[3]; d = types.SimpleNamespace(socket=pathlib.Path(sys.argv[1]))\n"
        "e = t.Engine(d, 'victim'); assert e.client.map_device(); e.register()\n"
        "held = e.cache.match(t.keys()).reserve(0, 3, wait_ms=5000, device=True)\n"
        "assert held.pages == 3; print('ready', flush=True); signal.pause()\n"
    )
    command = [sys.executable, "-c", code, str(daemon.socket), str(Path(__file__).parent), Engine.kind]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "ready\n"
    assert maps(daemon) == 1 or Engine.kind == "gpu"
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    until_sync(lambda: maps(daemon) == 0)
    until_sync(lambda: "reserved" not in ctl(daemon, "status")["device_slots"])


def maps(daemon: Daemon) -> int:
    """Engines' KV that the daemon has mapped: the tier's own memory is of the same kind."""
    lines = Path(f"/proc/{daemon.pid}/maps").read_text().splitlines()
    return sum("kvtier-device" in line for line in lines) - 1 if Engine.kind == "cpu" else 0


def test_memory_of_engines_is_never_touched_outside_what_they_shared():
    """Bounds are checked in whole numbers, so that no product of counts and strides wraps around."""
    from kvtier.store.kvregions import _check
    from kvtier.wire import RegisterKv

    fd = shared_memory(4096)
    os.close(fd)
    what = Exported(bytes(16), b"", 4096, 0, 4096)
    good = Plane(0, 0, 0, 4, 2, 4, 16, 1024, 256, 16)
    _check(RegisterKv("e", "kv", (what,), (good,), (b"t",)), 1)
    for field, value in {
        "blocks": 5,
        "offset": 3500,
        "row": 1 << 40,
        "memory": 1,
        "token_stride": -1,
        "heads": 0,
    }.items():
        with pytest.raises(KvtierError, match="planes"):
            _check(RegisterKv("e", "kv", (what,), (changed(good, **{field: value}),), (b"t",)), 1)


async def test_memory_of_a_dead_engine_is_unmapped_though_the_device_has_much_to_do(monkeypatch: pytest.MonkeyPatch):
    """A full queue puts it off and no more: else a GPU's memory would stay taken until the daemon ends."""
    closed: list[KvRegion] = []
    real = KvRegion.close
    monkeypatch.setattr(KvRegion, "close", lambda self, device: (closed.append(self), real(self, device))[1])
    monkeypatch.setattr(kvregions, "AGAIN_S", 0.001)
    shared: list[Any] = []

    def take(size: int) -> tuple[int, np.ndarray]:
        shared.append(HostDevice().share(size))
        return shared[0].memory.address, shared[0].memory.data

    kv = EngineKv(SHAPE, take)
    planes = tuple(plane(kv.address, n, one) for n, layer in enumerate(kv.layers) for one in layer)
    async with storing(None, device=DeviceMemory(HostDevice, 16 * SLOT, slab_bytes=64 << 10)) as store:
        stays, dies = engines.Engine(store, pid=1), engines.Engine(store, pid=2)
        message = RegisterKv("engine", "kv", (shared[0].exported,), planes, (kv.bytes[:16].tobytes(),))
        number = (await store.register_kv(message, [shared[0].fd], dies.process.peer)).region
        region = stays.process.instance.kv[number]
        monkeypatch.setattr(carrier, "WAITING", 0)
        dies.leave(clean=False)
        await asyncio.sleep(0.02)
        assert closed == []
        monkeypatch.undo()
        monkeypatch.setattr(KvRegion, "close", lambda self, device: (closed.append(self), real(self, device))[1])
        await until(lambda: closed == [region])
        assert not store.parts.counts["kv_regions_not_unmapped"]
        stays.leave()
    os.close(shared[0].fd)
