"""The CPU in a GPU's place: the same operations in numpy on raw addresses, done at once and in order."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from kvtier import quant
from kvtier.device.base import Event, Facts, Shared, Stream
from kvtier.device.layout import Sheet
from kvtier.device.ops import Move, Op, Sum
from kvtier.types import Code, KvtierError, bad
from kvtier.wire import Exported

Array = npt.NDArray[Any]
Work = Callable[[], None]
FACTS: Final = Facts("cpu", bytes(16), 1, 0, reaches=True)


def raw(address: int, size: int) -> Array:
    """Bytes at a raw address."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))


def view(address: int, shape: Sequence[int], strides: Sequence[int]) -> Array:
    """Bytes at a raw address as an array of uint8."""
    span = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    return np.ndarray(tuple(shape), np.uint8, raw(address, span), strides=tuple(strides))


def engine_rows(sheet: Sheet, base: int, block: int) -> Array:
    """One engine block of a plane: uint8 [heads, tokens, row]."""
    shape = (sheet.heads, sheet.tokens, sheet.row)
    return view(base + block * sheet.block_stride, shape, (sheet.head_stride, sheet.token_stride, 1))


def slot_rows(sheet: Sheet, address: int, tokens: int, row: int) -> Array:
    """Rows of a plane in a slot: uint8 [heads, tokens, row]."""
    return view(address, (sheet.heads, tokens, row), (sheet.head_pitch, row, 1))


def _pages(op: Move) -> Iterator[tuple[int, list[int], int]]:
    """(slot address, the page's engine blocks, plane) of all that is to move."""
    for number, slot in enumerate(op.slots.tolist()):
        blocks = op.ids[number * op.per : (number + 1) * op.per].tolist()
        for plane in range(op.first, op.first + op.planes):
            yield slot, blocks, plane


def move(op: Move) -> None:
    """Bytes as they are."""
    sheet = op.sheet
    for slot, blocks, plane in _pages(op):
        ours = slot_rows(sheet, slot + sheet.ats[plane], op.per * sheet.tokens, sheet.row)
        for number, block in enumerate(blocks):
            mine = ours[:, number * sheet.tokens : (number + 1) * sheet.tokens]
            theirs = engine_rows(sheet, sheet.bases[plane], block)
            np.copyto(*((mine, theirs) if op.to_slots else (theirs, mine)))


def quantize(op: Move) -> None:
    """Bytes through the codec."""
    sheet, tokens = op.sheet, op.per * op.sheet.tokens
    dim = sheet.row // 2
    row, words = dim // (2 if op.kind == "int4" else 1), quant.scales(sheet.axis, tokens, dim)
    for slot, blocks, plane in _pages(op):
        codes = slot_rows(sheet, slot + sheet.ats[plane], tokens, row)
        scales = view(slot + sheet.metas[plane], (sheet.heads, 4 * words), (sheet.head_pitch, 1))
        theirs = [engine_rows(sheet, sheet.bases[plane], block) for block in blocks]
        if op.to_slots:
            raw = np.concatenate(theirs, axis=1).view(np.uint16)
            codes[...], packed = quant.pack(raw, op.kind, sheet.axis, op.element)
            scales[...] = np.ascontiguousarray(packed).view(np.uint8)
            continue
        raw = quant.unpack(codes, np.ascontiguousarray(scales).view(np.uint32), op.kind, sheet.axis, op.element)
        for number, rows in enumerate(theirs):
            rows[...] = np.ascontiguousarray(raw[:, number * sheet.tokens : (number + 1) * sheet.tokens]).view(np.uint8)


def add_up(op: Sum) -> None:
    """Checksums of slots."""
    sums = [xxhash.xxh3_64_intdigest(raw(slot, op.size).data) for slot in op.slots.tolist()]
    raw(op.out, 8 * len(sums)).view(np.uint64)[:] = sums


def do(op: Op) -> None:
    """Any operation."""
    if isinstance(op, Sum):
        add_up(op)
    else:
        (quantize if op.kind else move)(op)


class HostBuffer:
    """Host memory, pinned or not: here it is all the same."""

    def __init__(self, size: int) -> None:
        held = np.zeros(size + 4096, np.uint8)
        shift = -held.ctypes.data % 4096
        self.data: Array = held[shift : shift + size]
        self.address = int(self.data.ctypes.data)
        self.bytes = size

    def free(self) -> None:
        """Let go of it."""
        self.data = np.empty(0, np.uint8)


class MappedBuffer:
    """A mapped descriptor."""

    def __init__(self, fd: int, allocation: int, offset: int = 0, size: int = -1) -> None:
        """Keeps no descriptor. Children of fork do not have it."""
        mapping = mmap.mmap(fd, allocation)
        mapping.madvise(mmap.MADV_DONTFORK)
        self.data: Array = np.frombuffer(mapping, np.uint8)[offset:][: size if size >= 0 else None]
        self.address = int(self.data.ctypes.data)
        self.bytes = len(self.data)

    def free(self) -> None:
        """Let go of it."""
        self.data = np.empty(0, np.uint8)


def shared_memory(size: int) -> int:
    """A memfd that nobody can resize. Raises KvtierError(no_space)."""
    fd = os.memfd_create("kvtier-device", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except OSError as exc:
        os.close(fd)
        raise KvtierError(Code.NO_SPACE, f"no {size} bytes of shared memory: {exc}") from exc
    return fd


class Done:
    """An event whose work has ended."""

    done = True

    def synchronize(self, timeout_s: float | None = None) -> bool:  # noqa: ARG002 - nothing to wait for
        """It has ended."""
        return True


class InOrder:
    """A stream that does all work at once."""

    def record(self) -> Event:
        """All work so far has ended."""
        return Done()

    def wait(self, event: Event) -> None:
        """It has ended."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def add(self, work: Work) -> None:
        """Do it."""
        work()


class HostDevice:
    """The CPU as a device."""

    facts = FACTS

    def stream(self, *, urgent: bool = False) -> Stream:  # noqa: ARG002 - all work is done at once
        """A stream."""
        return InOrder()

    def adopt(self, handle: int) -> Stream:  # noqa: ARG002 - there are no others
        """A stream."""
        return InOrder()

    def take(self, size: int) -> HostBuffer:
        """Memory."""
        return HostBuffer(size)

    def share(self, size: int) -> Shared:
        """Memory behind a descriptor."""
        fd = shared_memory(size)
        try:
            memory = MappedBuffer(fd, size)
        except (OSError, ValueError) as exc:
            os.close(fd)
            raise KvtierError(Code.NO_SPACE, f"no {size} bytes of shared memory: {exc}") from exc
        return Shared(memory, Exported(self.facts.uuid, b"", size, 0, size), fd)

    def attach(self, what: Exported, fd: int, owner: object) -> MappedBuffer:  # noqa: ARG002 - each has its own mapping
        """Map a descriptor that nobody can make shorter: touching what is gone would kill this process."""
        what.check()
        if what.uuid != self.facts.uuid or what.handle or fd < 0:
            raise bad("exported", "memory of the CPU, by a descriptor")
        try:
            sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
            if not sealed or os.fstat(fd).st_size < what.allocation:
                raise bad("fds", f"a memfd of {what.allocation} bytes, sealed against shrinking")
            return MappedBuffer(fd, what.allocation, what.offset, what.size)
        except (OSError, ValueError) as exc:
            raise KvtierError(Code.IO, f"the engine's memory cannot be mapped here: {exc}") from exc

    def pin(self, size: int) -> HostBuffer:
        """Memory."""
        return HostBuffer(size)

    def register(self, data: Array) -> None:
        """The CPU reaches all of it."""

    def unregister(self, data: Array) -> None:
        """Nothing to undo."""

    def copy(self, target: int, source: int, size: int, stream: Any) -> None:
        """Copy bytes."""
        stream.add(lambda: ctypes.memmove(target, source, size) and None)

    def copies(
        self, targets: Sequence[int], sources: Sequence[int], sizes: Sequence[int], stream: Any, batched: bool = False
    ) -> None:
        """Many copies."""
        del batched  # there is no driver
        for target, source, size in zip(targets, sources, sizes, strict=True):
            self.copy(target, source, size, stream)

    def launch(self, op: Op, stream: Any, blocks: int = 0) -> None:  # noqa: ARG002 - one core does it
        """Do an operation."""
        stream.add(lambda: do(op))

    def compile(self, ops: Sequence[Op]) -> None:
        """Nothing to compile."""
