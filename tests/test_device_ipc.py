"""Memory of another process: mapped once, unmapped with its last user, refused with words that help."""

from __future__ import annotations

import ctypes
import threading
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from clientkit import answered
from kvtier.client.arenas import Arenas
from kvtier.client.device import MappedDevice
from kvtier.client.link import Identity
from kvtier.device.ipc import Exported, Mappings
from kvtier.device.libcuda import LibCuda
from kvtier.types import Code, KvtierError
from kvtier.wire import DeviceMapped

UUID = bytes(range(16))
MIB = 1 << 20


class Driver:
    """A CUDA driver that keeps the rules of the real one: one mapping a handle, closed once."""

    def __init__(self) -> None:
        self.open: dict[int, Any] = {}
        self.log: list[str] = []
        self.refuses = ""

    def ordinal(self, uuid: bytes) -> int:
        if uuid != UUID:
            raise KvtierError(Code.IO, f"no GPU {uuid.hex()} here")
        return 0

    def open_handle(self, ordinal: int, handle: bytes) -> int:
        if self.refuses:
            raise KvtierError(Code.IO, self.refuses)
        assert handle not in self.open.values(), "a handle is opened twice"
        return self._opened(handle)

    def close_handle(self, ordinal: int, address: int) -> None:
        del self.open[address]
        self.log.append("closed")

    def open_chunk(self, ordinal: int, fd: int, size: int) -> int:
        return self._opened(size)

    def close_chunk(self, ordinal: int, address: int, size: int) -> None:
        assert self.open.pop(address) == size
        self.log.append("closed")

    def _opened(self, what: Any) -> int:
        self.log.append("opened")
        address = 1 << 40 | len(self.log) << 20
        self.open[address] = what
        return address


def stretch(handle: int = 1, offset: int = 0, **more: Any) -> Exported:
    """A stretch of an allocation of 1 MiB."""
    return Exported(UUID, bytes([handle]) * 64, MIB, offset, 4096, **more)


def test_an_allocation_is_mapped_once_and_goes_with_its_last_stretch():
    """Layers of one allocation share one mapping; closing one leaves the others alone."""
    driver = Driver()
    mappings = Mappings(driver)
    layers = [mappings.open("engine", stretch(offset=4096 * n)) for n in range(8)]
    assert [layer.address - layers[0].address for layer in layers] == [4096 * n for n in range(8)]
    assert mappings.bytes == MIB
    for layer in layers[:-1]:
        mappings.close(layer)
    assert driver.log == ["opened"]
    mappings.close(layers[-1])
    assert driver.log == ["opened", "closed"]
    assert mappings.bytes == 0


def test_handles_of_different_processes_are_different():
    """Two engines' chunks of one number, and two handles, are mappings of their own; one handle is one mapping."""
    driver = Driver()
    mappings = Mappings(driver)
    chunk = Exported(UUID, b"", MIB, 0, 4096, chunk=3)
    opened = [mappings.open("a", chunk, fd=5), mappings.open("b", chunk, fd=6), mappings.open("a", stretch(1))]
    assert len({one.address for one in opened}) == 3
    opened.append(mappings.open("b", stretch(1)))  # the same process registered it again
    assert opened[3].address == opened[2].address
    for one in opened:
        mappings.close(one)
    assert not driver.open


def test_threads_that_open_and_close_at_once_leave_nothing_behind():
    """The count of users holds under threads: never opened twice, nothing mapped at the end."""
    driver = Driver()
    mappings = Mappings(driver)

    def churn() -> None:
        for number in range(200):
            mappings.close(mappings.open("engine", stretch(offset=4096 * (number % 4))))

    threads = [threading.Thread(target=churn) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not driver.open
    assert mappings.bytes == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("uuid", b"short"),
        ("handle", b"x" * 63),
        ("allocation", 0),
        ("offset", MIB),
        ("offset", -1),
        ("size", 0),
        ("size", MIB + 1),
    ],
)
def test_stretches_that_cannot_be_are_refused_by_name(field: str, value: Any):
    """A field that would reach outside the allocation is named, and nothing is mapped."""
    driver = Driver()
    wrong = msgspec.structs.replace(stretch(), **{field: value})
    with pytest.raises(KvtierError, match=rf"exported\.{field}"):
        Mappings(driver).open("engine", wrong)
    assert not driver.log


def test_an_allocation_does_not_change_its_size():
    """A second stretch that claims another size of the same allocation is refused."""
    mappings = Mappings(Driver())
    mappings.open("engine", stretch())
    with pytest.raises(KvtierError, match=r"exported\.allocation"):
        mappings.open("engine", msgspec.structs.replace(stretch(), allocation=2 * MIB))


def test_what_the_driver_refuses_comes_with_advice():
    """The driver's words, and what engine and daemon must share, are in the error; nothing stays counted."""
    driver = Driver()
    driver.refuses = "cuIpcOpenMemHandle: invalid device context (201)"
    mappings = Mappings(driver)
    with pytest.raises(KvtierError, match=r"invalid device context.*--pid=host"):
        mappings.open("engine", stretch())
    driver.refuses = ""
    mappings.close(mappings.open("engine", stretch()))
    with pytest.raises(KvtierError, match="no GPU"):
        mappings.open("engine", msgspec.structs.replace(stretch(), uuid=bytes(16)))


def test_exported_memory_travels_as_plain_fields():
    """A stretch goes through MessagePack unchanged; unknown fields are refused."""
    raw = msgspec.msgpack.encode(stretch(offset=512))
    assert msgspec.msgpack.decode(raw, type=Exported) == stretch(offset=512)
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode([UUID, "text", 1, 2, 3]), type=Exported)


def test_no_driver_is_said_so():
    """Without libcuda the error says that there is no CUDA driver."""
    try:
        LibCuda()
    except KvtierError as exc:
        assert exc.code is Code.IO
        assert "CUDA" in exc.message or "cuInit" in exc.message


def test_an_engine_without_a_driver_is_told_so():
    """The daemon has a GPU tier, this process no driver: not mapped, for that reason; it raises nothing."""
    device = MappedDevice(Identity("engine", "", events=False))
    device.wanted = True
    joined: Any = SimpleNamespace(arenas=Arenas([], []), device=-1, mapped=None, welcome=SimpleNamespace(session=1))
    steps = device.entering(joined)
    with pytest.raises(StopIteration):
        answered(steps, next(steps), DeviceMapped(1024, MIB, stretch()))
    assert joined.device == -1
    assert "no CUDA driver" in device.reason or "no GPU" in device.reason


def test_a_driver_that_does_not_unmap_costs_the_engine_nothing():
    """A lost connection's device memory cannot be unmapped: all else of it is, and nobody's call fails by that."""
    left = []

    def fails() -> None:
        raise KvtierError(Code.IO, "cuIpcCloseMemHandle: an illegal memory access (700)")

    arenas = Arenas([], [])
    arenas.place(1024, 1 << 40, MIB, fails)
    arenas.place(1025, 1 << 41, MIB, lambda: left.append(1025))
    assert arenas.unmap()
    assert left == [1025]


class Batches:
    """The part of a CUDA driver that copies many stretches by one call, as one of two ages has it."""

    def __init__(self, name: str) -> None:
        self.calls: list[int] = []
        setattr(self, name, self._new if name.endswith("_v2") else self._old)

    def _new(
        self, targets: Any, sources: Any, sizes: Any, count: Any, how: Any, first: Any, hows: Any, stream: Any
    ) -> int:
        assert (list(how), list(first), hows.value) == ([1, 0, 0, 0, 0, 0], [0], 1)
        columns = [(ctypes.c_uint64 * count.value).from_address(each.value) for each in (targets, sources, sizes)]
        for target, source, size in zip(*columns, strict=True):
            ctypes.memmove(target, source, size)
        self.calls.append(stream.value)
        return 0

    def _old(self, *args: Any) -> int:
        ctypes.cast(args[7], ctypes.POINTER(ctypes.c_size_t))[0] = 0  # where it would say which copy failed
        return self._new(*args[:7], args[8])


@pytest.mark.parametrize("name", ["cuMemcpyBatchAsync_v2", "cuMemcpyBatchAsync", "cuSomethingElse"])
def test_a_batch_of_copies_is_one_call_of_the_driver(name: str):
    """Of CUDA 13 or 12.8, each with its own arguments; an older driver has none, which is found by asking."""
    library = LibCuda.__new__(LibCuda)
    library._cuda = Batches(name)
    assert library.batch == ("" if name == "cuSomethingElse" else name)
    if library.batch:
        source, target = np.arange(4096, dtype=np.uint8), np.zeros(4096, np.uint8)
        at = [(0, 300, 7), (1000, 0, 100), (50, 2000, 1)]
        targets, sources = ([array.ctypes.data + one[n] for one in at] for n, array in enumerate((target, source)))
        library.copies(targets, sources, [size for _, _, size in at], 77)
        want = np.zeros(4096, np.uint8)
        for to, origin, size in at:
            want[to : to + size] = source[origin : origin + size]
        assert np.array_equal(target, want)
        assert library._cuda.calls == [77]
