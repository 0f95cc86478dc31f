"""Pages between an engine's blocks and the daemon's arena by device transfers: the client's own way, on the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from enginekv import EngineKv, Shape
from kvtier import quant
from kvtier.client import Client, Reservation
from kvtier.demo.daemon import Daemon
from kvtier.device.host import HostBuffer
from kvtier.device.layout import Plan, plan
from kvtier.device.shuttle import Shuttle
from kvtier.identity import CacheSpec, GroupSpec, Slice
from kvtier.types import KvtierError
from lazydevice import LazyDevice

PAGES, TOKENS = 6, 16
SHAPE = Shape("LBNHC", 4, 20, 4, 8, (16, 16), 2)


class Engine:
    """An engine process: KV in blocks, a client, a shuttle."""

    def __init__(
        self, client: Client, shape: Shape = SHAPE, part: Slice | None = None, name: str = "none", **way
    ) -> None:
        self.buffers: list[HostBuffer] = []
        self.kv = EngineKv(shape, self.take)
        self.plan: Plan = self.kv.plan(TOKENS, name)
        if part:
            whole = self.plan.group
            group = GroupSpec(whole.kind, SHAPE.layers, SHAPE.heads, whole.cell_bytes)
            self.plan = plan(self.kv.layers, TOKENS, group, part)
        spec = CacheSpec("m", b"f" * 16, "bfloat16", TOKENS, (self.plan.group,), codec=name)
        more = {"rank": int(part.h0 > 0), "world": 2, "slices": [part]} if part else {}
        self.cache = client.open(spec, **more)
        self.device = LazyDevice(1)
        self.shuttle = Shuttle(self.device, self.plan, **way)
        self.ids = np.random.default_rng(2).permutation(shape.blocks)[: PAGES * self.plan.per]

    def take(self, size: int) -> tuple[int, np.ndarray]:
        self.buffers.append(HostBuffer(size))
        return self.buffers[0].address, self.buffers[0].data

    def compute(self, seed: int) -> None:
        """Random KV in all blocks."""
        self.kv.bytes[:] = quant.narrow(
            np.random.default_rng(seed).standard_normal(len(self.kv.bytes) // 2).astype(np.float32), "bf16"
        ).view(np.uint8)

    def blocks(self) -> np.ndarray:
        """What the pages' blocks hold, page after page."""
        return self.kv.logical()[:, self.ids].copy()


def keys(first: int = 0) -> bytes:
    """Keys of a path of pages."""
    return np.arange(first, first + PAGES * TOKENS, dtype="<i4").tobytes()


def addresses(views: list[np.ndarray]) -> np.ndarray:
    """Where slots lie."""
    return np.array([view.ctypes.data for view in views], np.uint64)


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Client]:
    with Client(daemon.socket, instance="engine", verify="always", timeout_s=10.0) as one:
        yield one


@pytest.mark.parametrize("name", ["none", "int4-kivi"])
@pytest.mark.parametrize("sums", [False, True])
def test_blocks_go_into_reserved_slots_and_come_back_from_leased_ones(client: Client, name: str, sums: bool):
    """Reserve, gather into the slots, commit (with the device's sums or the daemon's), acquire, verify, scatter."""
    engine = Engine(client, name=name, sums=sums, stage_bytes=8192)
    engine.compute(0)
    before = engine.blocks()
    with engine.cache.match(keys()).reserve(0, PAGES, wait_ms=5000) as held:
        slots = addresses([held.view(0, page) for page in range(PAGES)])
        transfer = engine.shuttle.store(engine.ids, slots)
        transfer.wait()
        if sums:
            held.summed(0, 0, transfer.sums.tolist())
        assert held.commit() == PAGES
    engine.kv.bytes[:] = 0
    with engine.cache.match(keys()).acquire() as lease:
        assert lease.pages == PAGES
        slots = addresses([lease.view(0, page) for page in range(PAGES)])
        engine.shuttle.load(engine.ids, slots).wait()
    if name == "none":
        assert np.array_equal(engine.blocks(), before)
    else:
        moved = quant.widen(engine.blocks().view(np.uint16), "bf16") - quant.widen(before.view(np.uint16), "bf16")
        assert 0 < np.abs(moved).max() < 0.5
    engine.shuttle.close()


def test_a_wrong_sum_is_found_by_whoever_reads(client: Client):
    """A device that sums what it did not write is caught: the page is a miss, not wrong KV."""
    engine = Engine(client, sums=True)
    engine.compute(1)
    with engine.cache.match(keys()).reserve(0, PAGES, wait_ms=5000) as held:
        views = [held.view(0, page) for page in range(PAGES)]
        transfer = engine.shuttle.store(engine.ids, addresses(views))
        transfer.wait()
        views[2][100] ^= 1  # a bit that flipped on the link
        held.summed(0, 0, transfer.sums.tolist())
        held.commit()
    with engine.cache.match(keys()).acquire() as lease:
        assert lease.view(0, 1) is not None
        assert lease.view(0, 2) is None


def store_and_interrupt(engine: Engine, holds: list[Reservation]) -> None:
    """Ctrl-C before the transfer was waited for."""
    with engine.cache.match(keys()).reserve(0, PAGES, wait_ms=5000) as held:
        holds.append(held)
        engine.shuttle.store(engine.ids, addresses([held.view(0, page) for page in range(PAGES)]), holder=held)
        raise KeyboardInterrupt


@pytest.mark.parametrize("where", ["after the store", "while it is queued"])
def test_an_interrupt_gives_no_slot_back_that_a_queued_copy_may_still_write(
    client: Client, monkeypatch: pytest.MonkeyPatch, where: str
):
    """Ctrl-C between `store` and its `wait`, or within `store`: the `with` ends when the device writes no more."""
    engine = Engine(client, stage_bytes=8192)
    engine.compute(3)
    engine.device.eager = 0.0  # works only when somebody waits
    if where == "while it is queued":
        copies, calls = engine.device.copies, []

        def interrupted(*args: object, **more: object) -> None:
            copies(*args, **more)
            calls.append(args)
            if len(calls) == 2:
                raise KeyboardInterrupt

        monkeypatch.setattr(engine.device, "copies", interrupted)
    given = []
    abort = Reservation._aborting

    def aborting(self: Reservation) -> object:
        given.append([kind for stream in engine.device.streams for kind, _ in stream.queue])
        return abort(self)

    monkeypatch.setattr(Reservation, "_aborting", aborting)
    with pytest.raises(KeyboardInterrupt):
        store_and_interrupt(engine, [])
    (left,) = given
    assert "work" not in left, "its slots were given back while copies into them were queued"
    assert client.ping()


def test_an_interrupt_on_a_stuck_device_keeps_the_slots(client: Client, monkeypatch: pytest.MonkeyPatch):
    """The device does not end what was queued: the `with` raises, and the slots stay this process's."""
    monkeypatch.setattr(Reservation.abort, "__defaults__", (None, 0.01))
    engine, holds = Engine(client), []
    engine.device.stuck = True
    with pytest.raises(KvtierError, match="stay held"):
        store_and_interrupt(engine, holds)
    (held,) = holds
    assert held.view(0, 0) is not None
    engine.device.stuck = False
    held.abort()
    assert held.view(0, 0) is None


def test_sums_of_what_is_not_reserved_are_refused(client: Client):
    """Sums for pages outside the reservation name the field."""
    engine = Engine(client)
    with engine.cache.match(keys()).reserve(0, PAGES, wait_ms=5000) as held, pytest.raises(KvtierError, match="sums"):
        held.summed(0, 1, [1] * PAGES)


def test_two_ranks_gather_their_heads_into_one_page(daemon: Daemon):
    """TP=2: each rank's device fills its heads of the shared slots; one rank with all heads reads the same pages."""
    parts = [Slice(0, 4, 0, 2), Slice(0, 4, 2, 4)]
    clients = [Client(daemon.socket, instance="pair", verify="always", timeout_s=10.0) for _ in parts]
    ranks = [Engine(client, SHAPE._replace(heads=2), part) for client, part in zip(clients, parts, strict=True)]
    for seed, rank in enumerate(ranks):
        rank.compute(seed)
    held = ranks[0].cache.match(keys()).reserve(0, PAGES, wait_ms=5000)
    for rank in ranks:
        mine = held if rank is ranks[0] else rank.cache.adopt(held.share())
        rank.shuttle.store(rank.ids, addresses([mine.view(0, page) for page in range(PAGES)])).wait()
        mine.commit()
    with Client(daemon.socket, instance="single", verify="always", timeout_s=10.0) as alone:
        whole = Engine(alone)
        with whole.cache.match(keys()).acquire() as lease:
            assert lease.pages == PAGES
            whole.shuttle.load(whole.ids, addresses([lease.view(0, page) for page in range(PAGES)])).wait()
        halves = [rank.blocks() for rank in ranks]
        assert np.array_equal(whole.blocks(), np.concatenate(halves, axis=2))
    for client in clients:
        client.close()
