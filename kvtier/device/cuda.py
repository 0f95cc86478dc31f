"""One NVIDIA GPU through cupy: raw memory, streams and events of its runtime, kernels of cuda/ by NVRTC.

The only module that imports cupy, whichever distribution of it is here (CUDA 12 or 13); `find` decides whether to.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Final

import cupy
import numpy as np
import numpy.typing as npt

from kvtier.device.base import Event, Facts, Shared, Stream
from kvtier.device.host import raw
from kvtier.device.ipc import Mappings, Opened
from kvtier.device.kernels import Launch, Source, launch
from kvtier.device.libcuda import LibCuda
from kvtier.device.ops import Op
from kvtier.numa import memory_on, node_of
from kvtier.sources import source
from kvtier.types import Code, KvtierError, align_up
from kvtier.wire import Exported

Array = npt.NDArray[Any]
runtime: Any = cupy.cuda.runtime
NO_MEMORY: Final = 2
"""cudaErrorMemoryAllocation."""
NOT_READY: Final = 600
"""cudaErrorNotReady."""
POLL_S: Final = 1e-4
TABLE_BYTES: Final = 4 << 20
TABLE_ALIGN: Final = 256
BLOCK_BYTES: Final = 2 << 20
"""A handle shares the driver's blocks of this size whole, with whatever else was allocated in them."""
ROOM_S: Final = 10.0
"""A launch that still has its tables after this time is stuck."""
HOST_TABLES: Final = 100
"""cudaDevAttrPageableMemoryAccessUsesHostPageTables: kernels reach all host memory at the speed of the link."""
MAPPED: Final = 3
"""Portable and mapped, as cudaHostAlloc and cudaHostRegister name it: kernels reach it by its own address."""


@contextlib.contextmanager
def faults(what: str) -> Iterator[None]:
    """What driver, compiler and installation say as KvtierError: no_space where memory ran out, else io."""
    try:
        yield
    except runtime.CUDARuntimeError as exc:
        code = Code.NO_SPACE if exc.status == NO_MEMORY else Code.IO
        raise KvtierError(code, f"{what}: {exc}") from exc
    except (cupy.cuda.compiler.CompileException, RuntimeError, OSError) as exc:  # no NVRTC, no headers, no cache folder
        raise KvtierError(Code.IO, f"{what}: {exc}") from exc


def missing() -> str:
    """Why there is no GPU; empty: there is one. Never raises."""
    try:
        return "" if runtime.getDeviceCount() else "none is visible"
    except RuntimeError as exc:
        return str(exc)


class CudaEvent:
    """A place in a CUDA stream. Any thread may wait for it."""

    def __init__(self, device: CudaDevice, stream: int) -> None:
        self.device = device
        self.handle = runtime.eventCreateWithFlags(runtime.eventDisableTiming | runtime.eventBlockingSync)
        runtime.eventRecord(self.handle, stream)

    @property
    def done(self) -> bool:
        """Whether it is reached."""
        return self._status() == 0

    def _status(self) -> int:
        """What the runtime says; a thread that never said which GPU would make a context on the first one."""
        runtime.setDevice(self.device.ordinal)
        return int(runtime.eventQuery(self.handle))

    def synchronize(self, timeout_s: float | None = None) -> bool:
        """Block until it is reached, or for so long; other threads run meanwhile."""
        deadline = time.monotonic() + (timeout_s or 0.0)
        while timeout_s is not None and self._status() == NOT_READY:
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
        with self.device.current("waiting for the GPU"):
            runtime.eventSynchronize(self.handle)
        return True

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # at the end of the process the driver may be gone
            self.device.drop("cuEventDestroy_v2", self.handle)


class CudaStream:
    """A stream that does not wait for the legacy default stream."""

    def __init__(self, device: CudaDevice, handle: int, *, own: bool) -> None:
        self.device = device
        self.handle = handle
        self._own = own

    def record(self) -> Event:
        """An event after all work so far."""
        with self.device.current("recording an event"):
            return CudaEvent(self.device, self.handle)

    def wait(self, event: Event) -> None:
        """Work from here on begins after the event."""
        assert isinstance(event, CudaEvent)
        with self.device.current("waiting for an event"):
            runtime.streamWaitEvent(self.handle, event.handle)

    def synchronize(self) -> None:
        """Block until all work so far has ended."""
        with self.device.current("waiting for the GPU"):
            runtime.streamSynchronize(self.handle)

    def __del__(self) -> None:
        if self._own:
            with contextlib.suppress(Exception):
                self.device.drop("cuStreamDestroy_v2", self.handle)


class CudaBuffer:
    """Device memory of our own."""

    def __init__(self, device: CudaDevice, size: int) -> None:
        self.device = device
        self.bytes = size
        with device.current(f"taking {size} bytes of GPU memory"):
            self.address = int(runtime.malloc(size))

    def free(self) -> None:
        """Give it back; once."""
        address, self.address = self.address, 0
        if address:
            with self.device.current("giving GPU memory back"):
                runtime.free(address)


class CudaPinned:
    """Pinned host memory that kernels reach too."""

    def __init__(self, device: CudaDevice, size: int) -> None:
        self.device = device
        self.bytes = size
        with device.current(f"pinning {size} bytes"), memory_on(device.node):
            self.address = int(runtime.hostAlloc(size, MAPPED))
        self.data: Array = raw(self.address, size)

    def free(self) -> None:
        """Give it back; once. No view of `data` may be used afterwards."""
        address, self.address = self.address, 0
        self.data = np.empty(0, np.uint8)
        if address:
            with self.device.current("giving pinned memory back"):
                runtime.freeHost(address)


class CudaAttached:
    """A stretch of another process's memory."""

    def __init__(self, mappings: Mappings, opened: Opened) -> None:
        self._mappings, self._opened = mappings, opened
        self.address, self.bytes = opened.address, opened.bytes

    def free(self) -> None:
        """Unmap it."""
        self._mappings.close(self._opened)


class Tables:
    """Launch tables on their way to the GPU: a ring in pinned memory and one in device memory."""

    def __init__(self, device: CudaDevice, size: int = TABLE_BYTES) -> None:
        self.host, self.there = CudaPinned(device, size), CudaBuffer(device, size)
        self._at = 0
        self._used: deque[tuple[int, int, Event | None]] = deque()

    def put(self, arrays: Sequence[Array], stream: CudaStream) -> list[int]:
        """Device addresses of arrays, there before what the stream does next.

        Blocks while the ring is full. Raises KvtierError(io) where it stays full.
        """
        sizes = [align_up(array.nbytes, TABLE_ALIGN) for array in arrays]
        at, addresses = self._room(sum(sizes)), []
        first = at
        for array, size in zip(arrays, sizes, strict=True):
            self.host.data[at : at + array.nbytes] = array.reshape(-1).view(np.uint8)
            addresses.append(self.there.address + at)
            at += size
        with faults("sending tables"):
            runtime.memcpyAsync(
                self.there.address + first, self.host.address + first, at - first, runtime.memcpyDefault, stream.handle
            )
        return addresses

    def sent(self, event: Event) -> None:
        """The launch that uses the tables put last ends with this event."""
        first, last, _ = self._used.pop()
        self._used.append((first, last, event))

    def _room(self, size: int) -> int:
        """A free stretch of the ring."""
        if size > self.host.bytes:
            raise KvtierError(Code.BAD_REQUEST, f"tables of {size} bytes; at most {self.host.bytes}")
        first = self._at if self._at + size <= self.host.bytes else 0
        while self._used and any(lo < first + size and first < hi for lo, hi, _ in self._used):
            event = self._used.popleft()[2]
            if event is not None and not event.synchronize(ROOM_S):
                raise KvtierError(Code.IO, f"the GPU did not end a launch within {ROOM_S:.0f} s")
        self._at = first + size
        self._used.append((first, self._at, None))
        return first


class CudaDevice:
    """One GPU. All calls come from one thread."""

    def __init__(self, ordinal: int = 0) -> None:
        """Raises KvtierError(io) where the driver does not serve it."""
        with faults("opening the GPU"):
            about = runtime.getDeviceProperties(ordinal)
            driver = int(runtime.driverGetVersion())
            reaches = bool(runtime.deviceGetAttribute(HOST_TABLES, ordinal))
            pci = str(runtime.deviceGetPCIBusId(ordinal))
        name = about["name"].decode() if isinstance(about["name"], bytes) else str(about["name"])
        compute = about["major"] * 10 + about["minor"]
        self.ordinal = ordinal
        self._library = LibCuda()
        uuid, processors, batches = (
            self._library.uuid(ordinal),
            int(about["multiProcessorCount"]),
            bool(self._library.batch),
        )
        self.facts = Facts(name, uuid, processors, int(compute), driver, batches, reaches, pci)
        self.node = node_of(pci)
        self._modules: dict[Source, Any] = {}
        self._kernels: dict[tuple[Source, str], Any] = {}
        self._tables = Tables(self)
        self._mappings: Mappings | None = None

    @contextlib.contextmanager
    def current(self, what: str) -> Iterator[None]:
        """Calls go to this GPU; their errors say what was being done."""
        with faults(what):
            runtime.setDevice(self.ordinal)
            yield

    def drop(self, call: str, handle: int) -> None:
        """Destroy an event or a stream. In a thread new to it the runtime would make a context on the first GPU."""
        self._library.drop(call, self.ordinal, handle)

    def stream(self, *, urgent: bool = False) -> CudaStream:
        """A new stream."""
        with self.current("making a stream"):
            handle = runtime.streamCreateWithPriority(runtime.streamNonBlocking, -1 if urgent else 0)
        return CudaStream(self, int(handle), own=True)

    def adopt(self, handle: int) -> CudaStream:
        """The engine's own stream."""
        return CudaStream(self, handle, own=False)

    def take(self, size: int) -> CudaBuffer:
        """Device memory."""
        return CudaBuffer(self, size)

    def share(self, size: int) -> Shared:
        """Device memory whose handle other processes open."""
        memory = self.take(align_up(size, BLOCK_BYTES))
        try:
            exported, fd = self._library.export(self.facts.uuid, memory.address, size)
        except KvtierError:
            memory.free()
            raise
        return Shared(memory, exported, fd)

    def attach(self, what: Exported, fd: int, owner: object) -> CudaAttached:
        """Map another process's memory."""
        if what.uuid != self.facts.uuid:
            raise KvtierError(Code.BAD_REQUEST, f"memory of another GPU than {self.facts.uuid.hex()}", "exported.uuid")
        self._mappings = self._mappings or Mappings(self._library)
        return CudaAttached(self._mappings, self._mappings.open(owner, what, fd))

    def pin(self, size: int) -> CudaPinned:
        """Pinned host memory."""
        return CudaPinned(self, size)

    def register(self, data: Array) -> None:
        """Pin memory that is there already."""
        with self.current(f"pinning {data.nbytes} bytes that are there"):
            runtime.hostRegister(data.ctypes.data, data.nbytes, MAPPED)

    def unregister(self, data: Array) -> None:
        """Undo `register`."""
        with self.current("unpinning memory"):
            runtime.hostUnregister(data.ctypes.data)

    def copy(self, target: int, source: int, size: int, stream: Stream) -> None:
        """Copy bytes by the copy engine."""
        self.copies([target], [source], [size], stream)

    def copies(
        self,
        targets: Sequence[int],
        sources: Sequence[int],
        sizes: Sequence[int],
        stream: Stream,
        batched: bool = False,
    ) -> None:
        """Many copies, one call of the runtime each, or one of the driver for all."""
        assert isinstance(stream, CudaStream)
        call, kind, handle = runtime.memcpyAsync, runtime.memcpyDefault, stream.handle
        with self.current("copying"):
            if batched and self.facts.batches and len(targets) > 1:
                self._library.copies(targets, sources, sizes, handle)
                return
            for target, source, size in zip(targets, sources, sizes, strict=True):
                call(target, source, size, kind, handle)

    def launch(self, op: Op, stream: Stream, blocks: int = 0) -> None:
        """Do an operation by a kernel."""
        assert isinstance(stream, CudaStream)
        made = launch(op, self.facts.processors, blocks)
        with self.current(made.name):
            kernel = self._kernel(made)
            tables = [arg for arg in made.args if isinstance(arg, np.ndarray)]
            there = iter(self._tables.put(tables, stream))
            args = tuple(next(there) if isinstance(arg, np.ndarray) else arg for arg in made.args)
            words = (ctypes.c_uint64 * len(args))(*args)  # every parameter of every kernel is 8 bytes wide
            places = (ctypes.c_void_p * len(args))(*(ctypes.addressof(words) + 8 * n for n in range(len(args))))
            cupy.cuda.driver.launchKernel(
                kernel, *made.grid, 1, *made.block, 1, 0, stream.handle, ctypes.addressof(places), 0
            )
            self._tables.sent(CudaEvent(self, stream.handle))

    def compile(self, ops: Sequence[Op]) -> None:
        """Compile ahead what these operations need."""
        for op in ops:
            made = launch(op, self.facts.processors)
            with self.current(f"compiling {made.source.file}"):
                self._kernel(made)

    def _kernel(self, made: Launch) -> int:
        """The handle of a launch's kernel; compiled once, and kept on disk by cupy."""
        if made.source not in self._modules:
            options = ("-std=c++17", *(f"-D{define}" for define in made.source.defines))
            code = source("cuda", made.source.file).read_text()
            self._modules[made.source] = cupy.RawModule(code=code, options=options)
        key = made.source, made.name
        if key not in self._kernels:  # cupy would ask the driver at each launch
            self._kernels[key] = self._modules[made.source].get_function(made.name).kernel
        return int(self._kernels[key].ptr)
