"""GPU memory of another process, by raw handles: who exports it, who has it mapped, and what to do where that fails.

A handle names a whole allocation; what is shared is a stretch of it. Handles travel as plain fields in frames of our
own, never pickled, and GPUs are named by uuid, since ordinals differ between processes. Memory from cudaMalloc is
shared by CUDA IPC handles; memory made of VMM chunks (sleep mode, expandable segments) by a descriptor over the socket.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, Protocol

import numpy as np

from kvtier.types import Code, KvtierError
from kvtier.wire import HANDLE_BYTES, Exported

ADVICE: Final = (
    "engine and daemon must see the same GPU, run as the same user, and in containers share IPC and PID namespaces "
    "(--ipc=host --pid=host) with differing pids"
)

BATCH: Final = ("cuMemcpyBatchAsync_v2", "cuMemcpyBatchAsync")
"""A batch of copies, as CUDA 13 has it, and as CUDA 12.8 does, which also tells which copy failed."""


class Driver(Protocol):
    """What of the CUDA driver is needed. Each call raises KvtierError(io) with the driver's words."""

    def ordinal(self, uuid: bytes) -> int:
        """The GPU of that uuid in this process."""

    def open_handle(self, ordinal: int, handle: bytes) -> int:
        """Map an allocation of another process; its address here."""

    def close_handle(self, ordinal: int, address: int) -> None:
        """Unmap it."""

    def open_chunk(self, ordinal: int, fd: int, size: int) -> int:
        """Map a VMM chunk by its descriptor; its address here."""

    def close_chunk(self, ordinal: int, address: int, size: int) -> None:
        """Unmap it."""


class Mapping:
    """One allocation of another process, mapped here."""

    def __init__(self, ordinal: int, address: int, size: int, *, chunk: bool) -> None:
        self.ordinal = ordinal
        self.address = address
        self.bytes = size
        self.chunk = chunk
        self.users = 0


class Opened(NamedTuple):
    """A stretch that may be used until it is closed."""

    key: tuple[Any, ...]
    address: int
    bytes: int


class Mappings:
    """Every allocation is mapped once, however many stretches of it are open, and unmapped with the last of them.

    A second mapping of one handle by one process fails or hands out the same address, and closing that once would take
    it from all. Work on a stretch must have ended before it is closed: drain the streams first.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._mapped: dict[tuple[Any, ...], Mapping] = {}
        self._lock = threading.Lock()

    def open(self, owner: object, what: Exported, fd: int = -1) -> Opened:
        """Map a stretch. Raises bad_request, or io with advice.

        `owner` tells exporting processes apart, whose chunks may have the same number; handles are of one process.

        `fd` is not kept.
        """
        what.check()
        if bool(what.handle) == (fd >= 0):
            raise KvtierError(Code.BAD_REQUEST, "either a handle or a descriptor", "exported.handle")
        key = (what.uuid, what.handle) if what.handle else (what.uuid, owner, what.chunk)
        with self._lock:
            mapping = self._mapped.get(key)
            if mapping is None:
                mapping = self._mapped[key] = self._map(what, fd)
            elif mapping.bytes != what.allocation:
                raise KvtierError(Code.BAD_REQUEST, f"it was {mapping.bytes} before", "exported.allocation")
            mapping.users += 1
            return Opened(key, mapping.address + what.offset, what.size)

    def close(self, opened: Opened) -> None:
        """Let go of a stretch. Raises KvtierError(io)."""
        with self._lock:
            mapping = self._mapped[opened.key]
            mapping.users -= 1
            if mapping.users:
                return
            del self._mapped[opened.key]
            if mapping.chunk:
                self._driver.close_chunk(mapping.ordinal, mapping.address, mapping.bytes)
            else:
                self._driver.close_handle(mapping.ordinal, mapping.address)

    @property
    def bytes(self) -> int:
        """Bytes of other processes' GPU memory that are mapped here."""
        with self._lock:
            return sum(mapping.bytes for mapping in self._mapped.values())

    def _map(self, what: Exported, fd: int) -> Mapping:
        """Map an allocation."""
        ordinal = self._driver.ordinal(what.uuid)
        try:
            if what.handle:
                return Mapping(ordinal, self._driver.open_handle(ordinal, what.handle), what.allocation, chunk=False)
            return Mapping(ordinal, self._driver.open_chunk(ordinal, fd, what.allocation), what.allocation, chunk=True)
        except KvtierError as exc:
            raise KvtierError(
                exc.code, f"the engine's GPU memory cannot be mapped here: {exc.message}; {ADVICE}"
            ) from exc


def probe(mappings: Mappings, owner: object, what: Exported, read: Callable[[int, int], bytes], token: bytes) -> None:
    """Whether memory that the engine shares is really the engine's: it wrote `token` there, and it is read here.

    `read(address, size)` copies bytes from the GPU. Raises io, with advice, where it says anything else.
    """
    opened = mappings.open(owner, what)
    try:
        if len(token) > opened.bytes or read(opened.address, len(token)) != token:
            raise KvtierError(Code.IO, f"the engine's GPU memory is mapped here but shows other bytes; {ADVICE}")
    finally:
        mappings.close(opened)


class LibCuda:
    """The few calls of the driver that cupy does not have, by ctypes. Raises KvtierError(io), also without a driver."""

    def __init__(self) -> None:
        try:
            self._cuda = ctypes.CDLL("libcuda.so.1")
        except OSError as exc:
            raise KvtierError(Code.IO, f"no CUDA driver: {exc}") from exc
        self.call("cuInit", 0)

    def call(self, name: str, *args: Any) -> None:
        """One call that must succeed."""
        status = getattr(self._cuda, name)(*args)
        if status:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorString(status, ctypes.byref(text))
            raise KvtierError(Code.IO, f"{name}: {(text.value or b'unknown error').decode()} ({status})")

    @property
    def batch(self) -> str:
        """The call that does many copies at once; empty where the driver is older."""
        return next((name for name in BATCH if hasattr(self._cuda, name)), "")

    def copies(self, targets: Sequence[int], sources: Sequence[int], sizes: Sequence[int], stream: int) -> None:
        """Many copies on a stream (not the default one) by one call, in any order among themselves."""
        words = [np.array(column, np.uint64) for column in (targets, sources, sizes)]
        how = (ctypes.c_uint32 * 6)(1)  # sources are read in the order of the stream; no hints where memory lies
        first, failed = (ctypes.c_size_t * 1)(), ctypes.c_size_t()
        more = [ctypes.byref(failed)] if self.batch == BATCH[1] else []
        places = [ctypes.c_void_p(column.ctypes.data) for column in words]
        count = ctypes.c_size_t(len(targets))
        self.call(self.batch, *places, count, how, first, ctypes.c_size_t(1), *more, ctypes.c_void_p(stream))

    def allocation(self, address: int) -> tuple[int, int]:
        """Base address and size of the allocation that an address lies in."""
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        self.call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
        return base.value, size.value

    def has_handle(self, address: int) -> bool:
        """Whether CUDA IPC handles can name the memory; VMM memory is shared by descriptors instead."""
        capable = ctypes.c_int()
        legacy = 10  # CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
        self.call("cuPointerGetAttribute", ctypes.byref(capable), legacy, ctypes.c_uint64(address))
        return bool(capable.value)

    def chunk(self, address: int) -> tuple[int, int, int]:
        """(descriptor, base, size) of the VMM chunk that an address lies in; the caller closes the descriptor."""
        handle, fd = ctypes.c_uint64(), ctypes.c_int(-1)
        base, size = self.allocation(address)
        self.call("cuMemRetainAllocationHandle", ctypes.byref(handle), ctypes.c_void_p(address))
        try:
            posix = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
            self.call("cuMemExportToShareableHandle", ctypes.byref(fd), handle, posix, ctypes.c_uint64(0))
        finally:
            self.call("cuMemRelease", handle)
        os.set_inheritable(fd.value, False)
        return fd.value, base, size

    def export(self, uuid: bytes, address: int, size: int) -> tuple[Exported, int]:
        """What to tell another process of memory of this one, and the descriptor that goes with it (-1: none).

        The caller closes the descriptor. A stretch over several chunks is refused: export each chunk by itself.
        """
        if self.has_handle(address):
            base, allocation = self.allocation(address)
            handle = (ctypes.c_ubyte * HANDLE_BYTES)()
            self.call("cuIpcGetMemHandle", handle, ctypes.c_uint64(base))
            made, fd = Exported(uuid, bytes(handle), allocation, address - base, size), -1
        else:
            fd, base, allocation = self.chunk(address)
            made = Exported(uuid, b"", allocation, address - base, size, base)
        try:
            made.check()
        except KvtierError:
            if fd >= 0:
                os.close(fd)
            raise
        return made, fd

    def map_chunk(self, ordinal: int, fd: int, size: int) -> int:
        """Map another process's VMM chunk for reading and writing by one GPU."""
        handle, address = ctypes.c_uint64(), ctypes.c_uint64()
        self.call("cuMemImportFromShareableHandle", ctypes.byref(handle), ctypes.c_void_p(fd), 1)
        try:
            self.call("cuMemAddressReserve", ctypes.byref(address), ctypes.c_size_t(size), ctypes.c_size_t(0),
                      ctypes.c_uint64(0), ctypes.c_uint64(0))  # fmt: skip
            try:
                self.call("cuMemMap", address, ctypes.c_size_t(size), ctypes.c_size_t(0), handle, ctypes.c_uint64(0))
            except KvtierError:
                self.call("cuMemAddressFree", address, ctypes.c_size_t(size))
                raise
        finally:
            self.call("cuMemRelease", handle)  # the mapping holds the memory
        access = (ctypes.c_int * 3)(1, ordinal, 3)  # a device, which one, read and write
        try:
            self.call("cuMemSetAccess", address, ctypes.c_size_t(size), access, ctypes.c_size_t(1))
        except KvtierError:
            self.unmap_chunk(address.value, size)
            raise
        return address.value

    def unmap_chunk(self, address: int, size: int) -> None:
        """Undo `map_chunk`."""
        self.call("cuMemUnmap", ctypes.c_uint64(address), ctypes.c_size_t(size))
        self.call("cuMemAddressFree", ctypes.c_uint64(address), ctypes.c_size_t(size))
