"""What tests of the store share: a started store, room made by hand, an engine's own memory, failing disks."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import mmap
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier.device.find import open_device
from kvtier.device.host import HostDevice
from kvtier.store import Store
from kvtier.store.flush import flush
from kvtier.store.vram import DeviceMemory
from kvtier.tiers.disk import DiskTier
from kvtier.tiers.extentfile import Calls
from kvtier.tiers.host import HostTier

MIB = 1 << 20
DEVICE: list[Any] = []
"""Bytes of the device tier that stores are made with, and what makes the device; empty: none."""


@contextlib.asynccontextmanager
async def storing(
    path: Path | None, host: int = 4 * MIB, disk: int = 64 * MIB, calls: Calls | None = None, **more: Any
) -> AsyncIterator[Store]:
    """A started store on a directory (None: no disk tier), drained at the end."""
    loop = asyncio.get_running_loop()
    tier = None if path is None else DiskTier(path, disk, post=loop.call_soon_threadsafe, calls=calls)
    if DEVICE and "device" not in more:
        size, make = DEVICE
        more["device"] = DeviceMemory(make, size, slab_bytes=64 << 10)
    store = Store(HostTier(host, slab_bytes=256 << 10, prefault=False), tier, **more)
    await store.start()
    try:
        yield store
    finally:
        await store.drain(10.0)


def drop_host(store: Store) -> None:
    """Evict everything that can be evicted from host, and from the device."""
    if store.parts.vram is not None:
        for pool in store.parts.vram.tier.pools:
            store.parts.vram.space.evict(pool, [1 << 30] * len(pool.shape.slot_bytes))
    for pool in store.parts.host.pools:
        store.parts.space.evict(pool, [1 << 30] * len(pool.shape.slot_bytes))


def used(store: Store) -> int:
    """Slots of the first group in use, in host and on the device."""
    vram = store.parts.vram
    return sum(pool.used(0) for pool in [*store.parts.host.pools, *(vram.tier.pools if vram else [])])


async def quiet(store: Store) -> None:
    """Wait until nothing is on its way."""
    if store.parts.vram is not None:
        await store.parts.vram.promote.settled()
        await store.parts.vram.demote.settled()
    await flush(store.parts.persist, list(store.parts.caches.values()), asyncio.get_running_loop().time() + 20)


async def until(holds: object, timeout_s: float = 20.0) -> None:
    """Let the loop run until it holds."""
    assert callable(holds)
    deadline = asyncio.get_running_loop().time() + timeout_s
    while not holds():
        assert asyncio.get_running_loop().time() < deadline, "still waiting"
        await asyncio.sleep(0.002)


def until_sync(holds: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Ask again until it holds."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, "still waiting"
        time.sleep(0.005)


def gpu() -> Any:
    """The GPU that is here, or a skip that says why there is none."""
    device, reason = open_device()
    if reason:
        pytest.skip(reason)
    return device


KINDS = [pytest.param("cpu"), pytest.param("gpu", marks=pytest.mark.gpu)]
"""What a device tier is tested on."""


def maker(kind: str) -> Callable[[], Any]:
    """What makes the device of a kind; skips where there is none."""
    if kind == "cpu":
        return HostDevice
    gpu()
    return lambda: open_device().device


def memfd(rows: int, stride: int, *, sealed: bool) -> tuple[int, np.ndarray]:
    """An engine's own shared memory, with its mapping."""
    fd = os.memfd_create("engine", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, rows * stride)
    if sealed:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return fd, np.frombuffer(mmap.mmap(fd, rows * stride), np.uint8).reshape(rows, stride)


def rows(*at: int) -> bytes:
    """Row numbers as the wire has them."""
    return np.array(at, "<i8").tobytes()


class Failing(Calls):
    """System calls that fail, or wait, while told to."""

    def __init__(self) -> None:
        self.broken = False
        self.gate = threading.Event()
        """While it is not set, no write ends."""
        self.gate.set()

    def pwritev(self, *args: object) -> int:
        """Write, or fail as a device does."""
        self.gate.wait()
        if self.broken:
            raise OSError(errno.EIO, "injected")
        return os.pwritev(*args)

    def fdatasync(self, fd: int) -> None:
        """Sync, or fail as a device does."""
        if self.broken:
            raise OSError(errno.EIO, "injected")
        os.fdatasync(fd)


@contextlib.contextmanager
def full_for(path: Path, flags: int = 0) -> Iterator[None]:
    """Whoever of this process has a file open (with these flags) finds no room to write to it."""
    fds = [int(fd.name) for fd in Path("/proc/self/fd").iterdir() if os.path.realpath(fd) == str(path)]
    fds = [fd for fd in fds if fcntl.fcntl(fd, fcntl.F_GETFL) & flags == flags]
    assert fds, f"nobody has {path} open"
    saved = [os.dup(fd) for fd in fds]
    full = os.open("/dev/full", os.O_WRONLY)
    for fd in fds:
        os.dup2(full, fd, inheritable=False)
    os.close(full)
    try:
        yield
    finally:
        for fd, real in zip(fds, saved, strict=True):
            os.dup2(real, fd, inheritable=False)
            os.close(real)
