"""Random traffic of engines over small tiers: invariants after each step, right bytes, durable means durable."""

from __future__ import annotations

import asyncio
import inspect
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engines import FULL, STATE, WINDOW, Engine, idle, spec, tokens
from kvtier import wire
from kvtier.device.host import HostDevice
from kvtier.identity import GroupSpec
from kvtier.index import radix
from kvtier.policy import DEFAULT, every
from kvtier.policy.quota import Rule
from kvtier.store import Store
from kvtier.store.vram import DeviceMemory
from kvtier.store.ways import Ways
from kvtier.tiers.disk import DiskTier
from kvtier.tiers.host import HostTier
from kvtier.types import Code, Kind, KvtierError, Tier
from storekit import Failing, drop_host, quiet

SHAPES = (spec(), spec((FULL, WINDOW, STATE), model="hybrid"), spec((GroupSpec(Kind.FULL, 1, 1, 30_000),), model="big"))
paths = st.lists(st.integers(0, 2), min_size=1, max_size=12).map(lambda pages: tokens(*pages))
who = st.integers(0, 2)
steps = st.one_of(
    st.tuples(st.just("put"), who, paths),
    st.tuples(st.just("get"), who, paths),
    st.tuples(st.just("reserve"), who, paths),
    st.tuples(st.just("commit"), who, st.tuples(st.integers(0, 11), st.integers(1, 12))),
    st.tuples(st.just("abort"), who, paths),
    st.tuples(st.just("acquire"), who, paths),
    st.tuples(st.just("release"), who, paths),
    st.tuples(st.just("die"), who, paths),
    st.tuples(st.just("vanish"), who, paths),
    st.tuples(st.just("reset"), who, paths),
    st.tuples(st.just("flush"), who, paths),
    st.tuples(st.just("evict"), who, paths),
    st.tuples(st.just("restart"), who, paths),
    st.tuples(st.just("begin"), who, paths),
    st.tuples(st.just("begin"), who, paths),
    st.tuples(st.just("cancel"), who, paths),
    st.tuples(st.just("settle"), who, paths),
    st.tuples(st.just("split"), who, paths),
    st.tuples(st.just("hint"), who, st.tuples(paths, st.sampled_from(["continues", "waiting", "dead"]))),
    st.tuples(st.just("fail"), who, paths),
    st.tuples(st.just("limit"), who, st.tuples(st.integers(-1, 12), st.integers(-1, 30))),
    st.tuples(st.just("pin"), who, st.tuples(paths, st.integers(0, 2), st.sampled_from([0.001, 60.0]))),
    st.tuples(st.just("unpin"), who, paths),
    st.tuples(st.just("warm"), who, paths),
    st.tuples(st.just("take_out"), who, st.tuples(paths, st.sampled_from(["host", "all"]))),
)
policies = st.sampled_from([found.name for found in every()])


class Traffic:
    """Three engines, each with a cache of its own shape, and what they hold."""

    def __init__(self, path: Path, disk_bytes: int, device_bytes: int = 0, policy: str = DEFAULT) -> None:
        self.path = path
        self.policy = policy
        self.device_bytes = device_bytes
        self.disk_bytes = disk_bytes
        self.calls = Failing()
        self.durable: set[tuple[int, bytes]] = set()
        self.bounded = False
        """Whether a quota may have taken from disk what was durable."""

    async def start(self) -> None:
        tier = None
        if self.disk_bytes:
            post = asyncio.get_running_loop().call_soon_threadsafe
            tier = DiskTier(self.path, self.disk_bytes, post=post, calls=self.calls)
        device = DeviceMemory(HostDevice, self.device_bytes, slab_bytes=64 << 10) if self.device_bytes else None
        host = HostTier(1 << 20, slab_bytes=128 << 10, prefault=False)
        self.store = Store(host, tier, device=device, ways=Ways(self.policy))
        await self.store.start()
        self.engines = [await self.attach(n) for n in range(3)]
        self.held: list[list] = [[], [], []]
        self.leases: list[list] = [[], [], []]
        self.begun: list[list] = [[], [], []]

    async def attach(self, number: int) -> Engine:
        engine = Engine(self.store, f"engine{number}", pid=number + 1)
        await engine.open(SHAPES[number])
        engine.patient = False
        return engine

    async def stop(self) -> None:
        self.calls.broken = False
        for n, engine in enumerate(self.engines):
            await self.cancel(n, b"")
            await self.let_go(n)
            engine.leave()
        self.store.pins.unpin(wire.Unpin(0))
        await quiet(self.store)
        while moving := set(self.store.parts.loads.moving.values()):  # they outlive whoever stopped waiting for them
            await asyncio.wait(moving)
        assert idle(self.store) == []
        await self.store.drain(10)

    async def let_go(self, n: int) -> None:
        for keys, lease in self.leases[n]:
            for items in lease.items:
                self.engines[n].verify(keys, items)
        self.leases[n].clear()
        self.held[n].clear()

    def wants(self, n: int, keys: bytes) -> tuple[wire.Want, ...]:
        last = len(keys) // SHAPES[n].stride - 1
        return (wire.Want(2, last.to_bytes(4, "little")),) if n == 1 else ()

    async def put(self, n: int, keys: bytes) -> None:
        await self.engines[n].put(keys, wants=self.wants(n, keys), wait_ms=100)

    async def get(self, n: int, keys: bytes) -> None:
        try:
            served = await self.engines[n].get(keys)
        except KvtierError as exc:
            assert exc.code == Code.OVER_CAP
            return
        stride = SHAPES[n].stride
        if self.disk_bytes >= 64 << 20 and not self.store.parts.disk.sick:
            most = max((len(k) for m, k in self.durable if m == n and keys.startswith(k)), default=0) // stride
            full = self.bounded or self.leases[n] or self.held[n] or self.store.pins.pins
            assert served >= most or full, "a durable page was lost"

    async def reserve(self, n: int, keys: bytes) -> None:
        reserved = await self.engines[n].reserve(keys, wants=self.wants(n, keys), wait_ms=50)
        if reserved.reservation:
            self.engines[n].write(keys, reserved)
            self.held[n].append(reserved)

    async def commit(self, n: int, part: tuple[int, int]) -> None:
        if self.held[n]:
            reserved = self.held[n][part[0] % len(self.held[n])]
            first = part[0] % reserved.pages
            count = min(part[1], reserved.pages - first)
            await self.engines[n].call(wire.Commit(reserved.reservation, first, count))

    async def abort(self, n: int, _: bytes) -> None:
        if self.held[n]:
            await self.engines[n].call(wire.Abort(self.held[n].pop().reservation))

    async def acquire(self, n: int, keys: bytes) -> None:
        try:
            lease = await self.engines[n].call(wire.Acquire((await self.engines[n].match(keys)).handle))
        except KvtierError as exc:
            assert exc.code == Code.OVER_CAP
            return
        if lease.lease:
            self.leases[n].append((keys, lease))

    async def release(self, n: int, _: bytes) -> None:
        if self.leases[n]:
            keys, lease = self.leases[n].pop()
            for items in lease.items:
                self.engines[n].verify(keys, items)
            await self.engines[n].call(wire.Release(lease.lease))

    async def die(self, n: int, _: bytes) -> None:
        await self.cancel(n, b"")  # as a server does whose client went away
        await self.let_go(n)
        self.engines[n].leave(clean=False)
        self.engines[n] = await self.attach(n)

    async def vanish(self, n: int, _: bytes) -> None:
        """Its connection is lost, it says hello again, and then that it has unmapped what the old one held."""
        await self.cancel(n, b"")
        await self.let_go(n)
        old = self.engines[n].process
        self.store.leave(old, clean=False)
        self.engines[n] = await self.attach(n)
        self.store.gone(old)

    async def reset(self, n: int, _: bytes) -> None:
        engine = self.engines[n]
        engine.opened = await engine.call(wire.Reset(engine.opened.cache))
        self.durable = {(m, k) for m, k in self.durable if m != n}

    async def flush(self, n: int, _: bytes) -> None:
        try:
            await self.engines[n].call(wire.Flush())
        except KvtierError as exc:
            assert exc.code in {Code.NO_SPACE, Code.OVER_CAP, Code.IO}
            return
        cache = self.store.parts.caches[self.engines[n].opened.cache]
        for node in cache.index.walk():
            if node.live and (n != 1 or (node.at[3 * 3 + 2] and node.at[3 * 3 + 2][node.live - 1] >= 0)):
                names = b"".join(each.edge for each in cache.index.path(node))
                self.durable.add((n, names[: (node.depth + node.live) * cache.index.stride]))

    async def evict(self, _n: int, _: bytes) -> None:
        drop_host(self.store)

    async def begin(self, n: int, keys: bytes) -> None:
        """Ask for a lease, and go on before it is there: loads run while other things happen."""

        async def ask() -> None:
            lease = await self.engines[n].call(wire.Acquire(matched.handle))
            if lease.lease:
                self.leases[n].append((keys, lease))

        matched = await self.engines[n].match(keys)
        self.begun[n].append(asyncio.get_running_loop().create_task(ask()))
        await asyncio.sleep(0)

    async def cancel(self, n: int, _: bytes) -> None:
        """Stop waiting, at whatever point it is."""
        for task in self.begun[n]:
            task.cancel()
        await self.settle(n, b"")

    async def settle(self, n: int, _: bytes) -> None:
        done = await asyncio.gather(*self.begun[n], return_exceptions=True)
        self.begun[n].clear()
        for each in done:
            refused = isinstance(each, KvtierError) and each.code in {Code.OVER_CAP, Code.UNKNOWN}
            assert each is None or refused or isinstance(each, asyncio.CancelledError), each

    async def split(self, n: int, keys: bytes) -> None:
        """A shorter prompt ends within nodes that others may be moving."""
        stride = SHAPES[n].stride
        for pages in range(1, len(keys) // stride + 1):
            await self.engines[n].match(keys[: pages * stride])

    async def hint(self, n: int, what: tuple[bytes, str]) -> None:
        matched = await self.engines[n].match(what[0])
        await self.engines[n].call(wire.Hint(matched.handle, what[1], 0.0, len(what[0]) // SHAPES[n].stride // 2))

    async def limit(self, _n: int, pages: tuple[int, int]) -> None:
        """Everybody together may have so many large pages in host and on disk; -1: no rule."""
        limits = {tier: 30_000 * most for tier, most in zip((Tier.HOST, Tier.DISK), pages, strict=True) if most >= 0}
        self.store.limit([Rule("scope", "uid:0", limits)] if limits else [])
        if Tier.DISK in limits:
            self.durable.clear()
            self.bounded = True

    async def ask(self, message: wire.Message) -> None:
        """What an operator asks; who asks for what is not there, or too much, is told."""
        try:
            reply = self.store.admin[type(message)](message)
            if inspect.isawaitable(reply):
                await reply
        except KvtierError as exc:
            assert exc.code in {Code.UNKNOWN, Code.OVER_CAP, Code.NO_SPACE, Code.IO}, exc

    def named(self, n: int, keys: bytes) -> wire.Prompt:
        """As an operator names it."""
        return wire.Prompt(self.engines[n].opened.cache_id.hex(), tokens=keys)

    async def pin(self, n: int, what: tuple[bytes, int, float]) -> None:
        await self.ask(wire.Pin(self.named(n, what[0]), what[2], what[1]))

    async def unpin(self, _n: int, _: bytes) -> None:
        await self.ask(wire.Unpin(0))

    async def warm(self, n: int, keys: bytes) -> None:
        await self.ask(wire.Warm(self.named(n, keys), 50))

    async def take_out(self, n: int, what: tuple[bytes, str]) -> None:
        if what[1] == "all":
            self.durable.clear()
        await self.ask(wire.Evict(self.named(n, what[0]), what[1], 50))

    async def fail(self, _n: int, _: bytes) -> None:
        """The device fails for a while."""
        self.calls.broken = True
        await self.put(0, tokens(2, 1, 0, 2))
        await asyncio.sleep(0.002)
        self.calls.broken = False

    async def restart(self, _n: int, _: bytes) -> None:
        await self.stop()
        await self.start()


async def run(ops: list, disk_bytes: int, device_bytes: int = 0, policy: str = DEFAULT) -> None:
    with tempfile.TemporaryDirectory() as folder:
        traffic = Traffic(Path(folder), disk_bytes, device_bytes, policy)
        await traffic.start()
        for what, n, detail in ops:
            await getattr(traffic, what)(n, detail)
            assert traffic.store.parts.check() == [], what
        await traffic.stop()


@pytest.fixture(autouse=True)
def few_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths of two nodes are long enough to be joined."""
    monkeypatch.setattr(radix, "CROWD", 2)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(steps, max_size=60), st.sampled_from([0, 1 << 20, 64 << 20]), policies)
def test_random_traffic_keeps_every_invariant(ops: list, disk_bytes: int, policy: str) -> None:
    """No disk, a full disk, an ample disk, any policy: bytes are right, counts agree, nothing is left behind."""
    asyncio.run(run(ops, disk_bytes, policy=policy))


@pytest.mark.slow
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(steps, max_size=60), st.sampled_from([0, 1 << 20, 64 << 20]), st.sampled_from([96 << 10, 512 << 10]))
def test_random_traffic_over_a_device_keeps_every_invariant(ops: list, disk_bytes: int, device_bytes: int) -> None:
    """The same with a device tier that engines compute on and read: a few slots, or more than the traffic needs."""
    asyncio.run(run(ops, disk_bytes, device_bytes))
