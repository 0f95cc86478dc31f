"""The daemon's device memory as this process sees it: mapped once a connection, and shown to be the daemon's."""

from __future__ import annotations

import importlib
import mmap
import os
from collections.abc import Callable
from typing import Any, Final, Protocol, cast

import numpy as np

from kvtier import wire
from kvtier.client.link import Aside, Away, Call, DeviceArena, Identity, Join, Joined, Steps
from kvtier.types import Code, KvtierError

TOKEN_BYTES: Final = 16
FENCE_S: Final = 10.0
"""So long a device may take for what it reads or writes of slots that are given back."""


class Reached(Protocol):
    """An event of a stream (kvtier.device.base.Event)."""

    def synchronize(self, timeout_s: float | None = None) -> bool:
        """Block until all work before it has ended, or for so long; whether it has."""


class MappedDevice:
    """Whether this client reads device memory, and why not."""

    def __init__(self, who: Identity) -> None:
        self._who = who
        self.wanted = False
        self._uuid = b""
        self.reason = "not asked for"
        """Why addresses in device memory do not come; empty where they do."""

    def entering(self, joined: Joined) -> Steps[None]:
        """Map the memory for a new connection; without it everything is read from host."""
        if not self.wanted:
            return
        self.reason = "the daemon is away"

        def learn(told: wire.DeviceMapped, take_fds: Callable[[], list[int]]) -> None:
            joined.mapped = _map(joined, told, take_fds(), self._uuid)

        request = wire.MapDevice(self._who.instance, self._who.scope)
        try:
            yield Aside(joined, request, (), wire.DeviceMapped, lambda: joined.mapped is not None, learn)
            assert joined.mapped is not None
            yield Call(joined, wire.UseDevice(joined.mapped.token), wire.Ok)
        except (Away, KvtierError) as exc:
            self.reason = str(exc)
            if joined.mapped is not None and joined.device < 0:
                joined.arenas.forget(joined.mapped.number)
                joined.mapped = None
        else:
            self.reason, joined.device = "", joined.mapped.number

    def mapping(self, uuid: bytes) -> Steps[bool]:
        """Ask for it from now on; whether this connection has it."""
        self.wanted, self._uuid = True, uuid
        joined = cast("Joined", (yield Join()))
        if joined.device < 0:
            yield from self.entering(joined)
        return joined.device >= 0


def _map(joined: Joined, told: wire.DeviceMapped, fds: list[int], uuid: bytes) -> DeviceArena:
    """Map what the daemon told of, on that GPU if one is said. Raises io, bad_request."""
    try:
        _expect(uuid, told.exported.uuid)
        token = (_map_gpu if any(told.exported.uuid) else _map_host)(joined, told, fds)
    except KvtierError:
        joined.arenas.forget(told.arena)  # what is mapped and cannot be read
        raise
    finally:
        for fd in fds:
            os.close(fd)
    return DeviceArena(told.arena, token)


def _expect(uuid: bytes, there: bytes) -> None:
    """Raise io for memory of another GPU: kernels would fault there, and take the engine's context with them."""
    if uuid and uuid != there:
        raise KvtierError(Code.IO, f"the device tier is on GPU {there.hex()}, this engine computes on {uuid.hex()}")


def _map_host(joined: Joined, told: wire.DeviceMapped, fds: list[int]) -> bytes:
    """The CPU is in the GPU's place: the memory is behind a descriptor."""
    try:
        mapped = mmap.mmap(fds[0], told.exported.allocation)
    except (OSError, ValueError, IndexError) as exc:
        raise KvtierError(Code.IO, f"cannot map the daemon's device memory: {exc}") from None
    mapped.madvise(mmap.MADV_DONTFORK)
    row = np.frombuffer(mapped, np.uint8)[told.exported.offset :]
    joined.arenas.add(told.arena, mapped, row[: told.size])
    return row[told.size :][:TOKEN_BYTES].tobytes()


def _map_gpu(joined: Joined, told: wire.DeviceMapped, fds: list[int]) -> bytes:
    """GPU memory: this process has only its address."""
    ipc: Any = importlib.import_module("kvtier.device.ipc")
    libcuda: Any = importlib.import_module("kvtier.device.libcuda")
    driver = libcuda.LibCuda()
    mappings = ipc.Mappings(driver)
    opened = mappings.open(joined.welcome.session, told.exported, fds[0] if fds else -1)
    joined.arenas.place(told.arena, opened.address, told.size, lambda: mappings.close(opened))
    return bytes(driver.read(driver.ordinal(told.exported.uuid), opened.address + told.size, TOKEN_BYTES))
