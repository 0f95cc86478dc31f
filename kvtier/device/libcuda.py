"""The few calls of the CUDA driver that cupy does not have, or not as a process with an engine in it needs them.

They let go of the GIL, since a driver may take its time, and leave a thread the GPU that it had: the engine's own
tensors go where that says. cupy's `uuid` of a GPU ends at its first zero byte, which one in sixteen has.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np

from kvtier.types import Code, KvtierError
from kvtier.wire import HANDLE_BYTES, UUID_BYTES, Exported

BATCH: Final = ("cuMemcpyBatchAsync_v2", "cuMemcpyBatchAsync")
"""A batch of copies, as CUDA 13 has it, and as CUDA 12.8 does, which also tells which copy failed."""
LAZY_PEERS: Final = 1
"""CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, which the driver demands."""


class Handle(ctypes.Structure):
    """A CUDA IPC handle, which the driver takes by value."""

    _fields_ = (("bytes", ctypes.c_ubyte * HANDLE_BYTES),)


class LibCuda:
    """The driver, by ctypes (kvtier.device.ipc.Driver). Raises KvtierError(io), also where there is none."""

    def __init__(self) -> None:
        self._contexts: dict[int, ctypes.c_void_p] = {}
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

    # -- GPUs --------------------------------------------------------------------------------------------------------

    def uuid(self, ordinal: int) -> bytes:
        """16 bytes that are the same in every process; those of an instance where the GPU is split into some (MIG)."""
        found, device = (ctypes.c_ubyte * UUID_BYTES)(), ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(device), ordinal)
        self.call("cuDeviceGetUuid_v2", found, device)
        return bytes(found)

    def ordinal(self, uuid: bytes) -> int:
        """The GPU of that uuid in this process."""
        count = ctypes.c_int()
        self.call("cuDeviceGetCount", ctypes.byref(count))
        for number in range(count.value):
            if self.uuid(number) == uuid:
                return number
        raise KvtierError(Code.IO, f"no GPU {uuid.hex()} here")

    @contextlib.contextmanager
    def current(self, ordinal: int) -> Iterator[None]:
        """What this thread calls within is for a GPU; afterwards it has the one that it had, or none, as before."""
        if ordinal not in self._contexts:  # kept until the process ends: what is mapped lies in it
            made = ctypes.c_void_p()
            self.call("cuDevicePrimaryCtxRetain", ctypes.byref(made), ordinal)
            self._contexts[ordinal] = made
        self.call("cuCtxPushCurrent_v2", self._contexts[ordinal])
        try:
            yield
        finally:
            self.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def read(self, ordinal: int, address: int, size: int) -> bytes:
        """Bytes of its memory, now; blocks."""
        out = ctypes.create_string_buffer(size)
        with self.current(ordinal):
            self.call("cuMemcpyDtoH_v2", out, ctypes.c_uint64(address), ctypes.c_size_t(size))
        return out.raw

    def drop(self, call: str, ordinal: int, handle: int) -> None:
        """Destroy an event or a stream of a GPU, in whichever thread the last who had it let it go."""
        with self.current(ordinal):
            self.call(call, ctypes.c_void_p(handle))

    # -- copies ------------------------------------------------------------------------------------------------------

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

    # -- memory that other processes map -----------------------------------------------------------------------------

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
        with self.current(self.ordinal(uuid)):
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

    # -- memory of other processes -----------------------------------------------------------------------------------

    def open_handle(self, ordinal: int, handle: bytes) -> int:
        """Map an allocation of another process; its address here."""
        address = ctypes.c_uint64()
        with self.current(ordinal):
            named = Handle.from_buffer_copy(handle)
            self.call("cuIpcOpenMemHandle_v2", ctypes.byref(address), named, ctypes.c_uint(LAZY_PEERS))
        return address.value

    def close_handle(self, ordinal: int, address: int) -> None:
        """Unmap it."""
        with self.current(ordinal):
            self.call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def open_chunk(self, ordinal: int, fd: int, size: int) -> int:
        """Map a VMM chunk of another process by its descriptor; its address here."""
        with self.current(ordinal):
            return self._map_chunk(ordinal, fd, size)

    def close_chunk(self, ordinal: int, address: int, size: int) -> None:
        """Unmap it."""
        with self.current(ordinal):
            self._unmap_chunk(address, size)

    def _map_chunk(self, ordinal: int, fd: int, size: int) -> int:
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
            self._unmap_chunk(address.value, size)
            raise
        return address.value

    def _unmap_chunk(self, address: int, size: int) -> None:
        """Undo `_map_chunk`."""
        self.call("cuMemUnmap", ctypes.c_uint64(address), ctypes.c_size_t(size))
        self.call("cuMemAddressFree", ctypes.c_uint64(address), ctypes.c_size_t(size))
