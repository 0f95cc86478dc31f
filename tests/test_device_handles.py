"""Memory that one process maps of another: let go of when it is told so, never while something may use it."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from clientkit import answered
from engines import Engine
from gpukit import hanging
from kvtier import wire
from kvtier.client.arenas import Arenas
from kvtier.client.device import MappedDevice
from kvtier.client.link import Identity
from kvtier.store.kvregions import KvRegion
from kvtier.store.vram import DeviceMemory
from kvtier.types import Code, KvtierError
from storekit import KINDS, maker, storing, until
from test_device_ipc import MIB, Driver, stretch
from test_device_stuck import PAGE, Owner
from test_device_tier import SLOT, over


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """The CPU, and the same on a GPU."""
    return request.param


def noting(memory: Any, freed: list[Any], *, fails: bool = False) -> None:
    """Note when it is unmapped, or refuse to."""
    free = memory.free

    def freeing() -> None:
        if fails:
            raise KvtierError(Code.IO, "closing an IPC handle: invalid argument")
        freed.append(memory)
        free()

    memory.free = freeing


async def opened(owner: Owner) -> tuple[Engine, KvRegion]:
    """An engine that has registered its KV, and that as the daemon has it."""
    engine = await owner.open()
    (region,) = engine.process.instance.kv.values()
    return engine, region


async def test_memory_is_unmapped_when_unregister_answers(kind: str):
    """An engine may free its KV after the answer: what another process still maps must not be freed."""
    device, freed = hanging(kind, 8), list[Any]()
    async with over(lambda: device, 8) as store:
        owner = Owner(store, device)
        engine, region = await opened(owner)
        noting(region.memory[0], freed)
        await engine.call(wire.Unregister(owner.region))
        assert len(freed) == 1
        engine.leave()


async def test_an_unregister_that_leaves_memory_mapped_says_so(kind: str):
    """The driver does not let go of one stretch: io, counted; the other stretches are unmapped all the same."""
    device, freed = hanging(kind, 9), list[Any]()
    async with over(lambda: device, 8) as store:
        owner = Owner(store, device)
        engine, region = await opened(owner)
        (first,) = region.memory
        second = SimpleNamespace(free=lambda: None)
        region.memory.append(second)
        noting(first, freed, fails=True)
        noting(second, freed)
        with pytest.raises(KvtierError, match="stays mapped"):
            await engine.call(wire.Unregister(owner.region))
        assert freed == [second]
        assert store.parts.counts["kv_regions_not_unmapped"] == 1
        engine.leave()


async def test_memory_that_a_sick_shuttle_may_still_use_stays_mapped(kind: str):
    """A transfer was queued in part and given up: nobody waits for it, so nothing is unmapped under it."""
    device, freed = hanging(kind, 10), list[Any]()
    async with over(lambda: device, 8) as store:
        owner = Owner(store, device)
        engine, region = await opened(owner)
        await owner.put(b"".join(np.full(2, n, "<i4").tobytes() for n in range(4)), [0, 1, 2, 3])
        (shuttle,) = region.shuttles.values()
        noting(region.memory[0], freed)
        shuttle.sick = "interrupted"
        engine.leave(clean=False)
        await until(lambda: store.parts.counts["kv_regions_not_unmapped"])
        assert not freed


async def test_a_registration_that_is_cancelled_as_it_maps_leaves_nothing_mapped(kind: str):
    """The engine goes away while the driver opens its handle: what was mapped by then is unmapped."""
    device, freed, gate, inside = hanging(kind, 11), list[Any](), threading.Event(), threading.Event()
    async with over(lambda: device, 8) as store:
        owner = Owner(store, device)
        engine = await owner.open()
        attach = device.attach

        def slow(*args: Any) -> Any:
            inside.set()
            gate.wait(20)
            memory = attach(*args)
            noting(memory, freed)
            return memory

        device.attach = slow
        registering = asyncio.ensure_future(owner.register())
        await until(inside.is_set)
        registering.cancel()
        for _ in range(5):
            await asyncio.sleep(0)
        gate.set()
        await asyncio.wait([registering])
        assert registering.cancelled()
        await until(lambda: freed)
        engine.leave()


@pytest.mark.parametrize("mapped", [False, True])
async def test_the_tiers_memory_is_not_freed_under_who_maps_it(mapped: bool, kind: str):
    """Freeing what another process has mapped is undefined: it goes with the daemon's process; unmapped, at once."""
    memory = DeviceMemory(maker(kind), 8 * SLOT, slab_bytes=4 * SLOT)
    freed = list[Any]()
    noting(memory.carrier.shared.memory, freed)
    async with storing(None, device=memory) as store:
        engine = Engine(store)
        if mapped:
            await engine.open(PAGE)
        engine.leave()
    assert bool(freed) == (not mapped)


def test_device_memory_that_cannot_be_read_is_unmapped_again(monkeypatch: pytest.MonkeyPatch):
    """The handle opens and the token cannot be read: not mapped, for that reason, and nothing stays open."""
    driver = Driver()

    def read(*_: int) -> bytes:
        raise KvtierError(Code.IO, "cuMemcpyDtoH_v2: an illegal memory access")

    driver.read = read
    monkeypatch.setattr("kvtier.device.libcuda.LibCuda", lambda: driver)
    device = MappedDevice(Identity("engine", "", events=False))
    device.wanted = True
    joined: Any = SimpleNamespace(arenas=Arenas([], []), device=-1, mapped=None, welcome=SimpleNamespace(session=1))
    steps = device.entering(joined)
    with pytest.raises(StopIteration):
        answered(steps, next(steps), wire.DeviceMapped(1024, MIB, stretch()))
    assert "illegal memory access" in device.reason
    assert joined.device == -1
    assert driver.log == ["opened", "closed"]
