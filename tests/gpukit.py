"""A GPU for tests that were written for the CPU in its place: one that hangs when it is told to, and memory of it."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvtier.device.libcuda import LibCuda
from kvtier.types import Code, KvtierError
from kvtier.wire import HANDLE_BYTES, Exported
from lazydevice import LazyDevice
from storekit import gpu


class Gated:
    """A GPU whose streams stand still while `stuck`: each waits for a call on the host, as behind a hung kernel.

    Other processes' memory is this process's own: no driver opens a handle in the process that made it.
    """

    def __init__(self) -> None:
        self._gpu = gpu()
        self._gate = threading.Event()
        self._gate.set()
        self._streams: list[Any] = []
        self._lent: dict[bytes, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._gpu, name)

    def stream(self, *, urgent: bool = False) -> Any:
        self._streams.append(self._gpu.stream(urgent=urgent))
        return self._streams[-1]

    @property
    def stuck(self) -> bool:
        """Whether nothing that is queued from now on is done."""
        return not self._gate.is_set()

    @stuck.setter
    def stuck(self, value: bool) -> None:
        from kvtier.device.cuda import cupy

        if not value:
            self._gate.set()
            return
        self._gate.clear()
        for stream in self._streams:
            cupy.cuda.ExternalStream(stream.handle).launch_host_func(lambda _: self._gate.wait(), None)

    def lend(self, size: int) -> tuple[Exported, Any]:
        """Memory that `attach` finds by its handle."""
        memory = self._gpu.take(size)
        handle = len(self._lent).to_bytes(HANDLE_BYTES, "big", signed=True)
        self._lent[handle] = memory
        return Exported(self._gpu.facts.uuid, handle, size, 0, size), memory

    def attach(self, what: Exported, fd: int, owner: object) -> Any:
        memory = self._lent[what.handle]
        return SimpleNamespace(address=memory.address, bytes=memory.bytes, free=lambda: None)


def hanging(kind: str, seed: int) -> Any:
    """A device that can be `stuck`: lazy on the CPU, gated on a GPU."""
    return LazyDevice(seed) if kind == "cpu" else Gated()


class Broken:
    """A device whose calls fail, or do not return, once it is told so; all else is the real device's."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self.down = False
        """Every copy and launch is refused."""
        self.gate = threading.Event()
        """While it is not set no copy returns, nor moves anything."""
        self.gate.set()
        self.room = 1 << 30
        """Buffers that may still be taken."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def copies(self, *args: Any) -> None:
        self._look()
        if self.gate.is_set():
            self._device.copies(*args)
        self.gate.wait()

    def launch(self, *args: Any) -> None:
        self._look()
        self._device.launch(*args)

    def _look(self) -> None:
        if self.down:
            raise KvtierError(Code.IO, "the link is down")

    def take(self, size: int) -> Any:
        if not self.room:
            raise KvtierError(Code.NO_SPACE, f"taking {size} bytes: out of memory")
        self.room -= 1
        memory = self._device.take(size)
        free = memory.free

        def freed() -> None:
            self.room += 1
            free()

        memory.free = freed
        return memory


class Kv:
    """Bytes of an engine in the memory of such a device, as it shares them."""

    def __init__(self, device: Any, size: int) -> None:
        self._gpu = device if isinstance(device, Gated) else None
        if self._gpu is None:
            shared = LazyDevice(0).share(size)
            self.exported, self.fds, self._data = shared.exported, [shared.fd], shared.memory.data
        else:
            self.exported, self._memory = self._gpu.lend(size)
            self.fds = []

    def fill(self, data: np.ndarray) -> None:
        """Write all of them."""
        if self._gpu is None:
            self._data[:] = data
            return
        from kvtier.device.cuda import runtime

        runtime.memcpy(self._memory.address, data.ctypes.data, len(data), runtime.memcpyDefault)

    def look(self) -> np.ndarray:
        """What they are now."""
        if self._gpu is None:
            return self._data.copy()
        found = LibCuda().read(self._gpu.ordinal, self._memory.address, self._memory.bytes)
        return np.frombuffer(found, np.uint8)
