"""The driver's own calls, on a GPU's driver or on tests/vmm_driver.c: which GPU, in which context, whose memory."""

from __future__ import annotations

import ctypes
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import pytest

import driverkit
from clientkit import answered
from kvtier.client.arenas import Arenas
from kvtier.client.device import TOKEN_BYTES, MappedDevice
from kvtier.client.link import Identity
from kvtier.device.libcuda import LibCuda
from kvtier.types import Code, KvtierError
from kvtier.wire import DeviceMapped, Exported

SIZE = 1 << 20
TOKEN = bytes(range(TOKEN_BYTES))
OWNER = """
import ctypes, os, socket, sys, msgspec
from kvtier.device.libcuda import LibCuda
library, at = LibCuda(), ctypes.c_uint64()
size, token, ordinal = int(sys.argv[2]), bytes.fromhex(sys.argv[3]), int(sys.argv[4])
with library.current(ordinal):
    library.call("cuMemAlloc_v2", ctypes.byref(at), ctypes.c_size_t(size + 4096))
    library.call("cuMemcpyHtoD_v2", ctypes.c_uint64(at.value + size), token, ctypes.c_size_t(len(token)))
told, _ = library.export(library.uuid(ordinal), at.value, size + 4096)
with socket.socket(fileno=int(sys.argv[1])) as sock:
    sock.sendall(msgspec.msgpack.encode(told))
    sock.recv(1)
"""


class Daemon(NamedTuple):
    """A process that shares memory of the second GPU."""

    told: Exported
    process: subprocess.Popen[bytes]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> LibCuda:
    """The driver of this process; two GPUs, whose uuids have zeros within."""
    driverkit.use(monkeypatch)
    return LibCuda()


@pytest.fixture
def owner(library: LibCuda) -> Iterator[Daemon]:
    """Another process with memory on the second GPU."""
    mine, theirs = socket.socketpair()
    command = [sys.executable, "-c", OWNER, str(theirs.fileno()), str(SIZE), TOKEN.hex(), "1"]
    paths = {"LD_LIBRARY_PATH": str(driverkit.built()), "PYTHONPATH": str(Path(__file__).parents[1])}
    with mine, subprocess.Popen(command, pass_fds=[theirs.fileno()], env=paths) as process:
        theirs.close()
        yield Daemon(msgspec.msgpack.decode(mine.recv(4096), type=Exported), process)
        mine.close()


def mapped(owner: Daemon, uuid: bytes = b"") -> tuple[MappedDevice, Any]:
    """An engine's device memory and connection, after the daemon told of its memory."""
    device = MappedDevice(Identity("engine", "", events=False))
    asking = device.mapping(uuid)
    next(asking)
    joined: Any = SimpleNamespace(arenas=Arenas([], []), device=-1, mapped=None, welcome=SimpleNamespace(session=1))
    try:
        shown = answered(asking, asking.send(joined), DeviceMapped(1024, SIZE, owner.told))
        assert shown.message.token == TOKEN
        asking.send(None)
    except StopIteration:
        pass
    return device, joined


def test_a_gpu_is_named_by_all_bytes_of_its_uuid(library: LibCuda):
    """Zeros within, as one GPU in sixteen has: 16 bytes, and found again by them."""
    uuids = [library.uuid(0), library.uuid(1)]
    assert [len(uuid) for uuid in uuids] == [16, 16]
    assert all(0 in uuid for uuid in uuids)
    assert [library.ordinal(uuid) for uuid in uuids] == [0, 1]
    with pytest.raises(KvtierError, match="no GPU ff") as caught:
        library.ordinal(b"\xff" * 16)
    assert caught.value.code is Code.IO


def test_memory_by_handle_is_mapped_in_the_context_of_its_gpu(library: LibCuda, owner: Daemon):
    """The token is read there, the address is the memory's; forgotten, nothing stays open."""
    device, joined = mapped(owner)
    assert (device.reason, joined.device) == ("", 1024)
    address = joined.arenas.address(1024 << 44, 16)
    assert library.read(1, address + SIZE, TOKEN_BYTES) == TOKEN
    joined.arenas.forget(1024)
    assert library._cuda.vmm_left() == 0


@pytest.mark.parametrize("own", [None, 0, 1])
def test_a_thread_that_maps_has_the_gpu_that_it_had(library: LibCuda, owner: Daemon, own: int | None):
    """The daemon's GPU is the second: an engine that computes on the first, or on none yet, goes on there."""
    seen: list[tuple[int, int, int]] = []

    def work() -> None:
        before = 0 if own is None else driverkit.context(library, own)
        _, joined = mapped(owner)
        between = driverkit.current(library)
        joined.arenas.forget(1024)
        seen.append((before, between, driverkit.current(library)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    before, between, after = seen[0]
    assert before == between == after
    assert bool(before) == (own is not None)


def test_an_engine_on_another_gpu_does_not_map(library: LibCuda, owner: Daemon):
    """Its kernels would fault at those addresses: not mapped, for that reason; one on the same GPU maps."""
    device, joined = mapped(owner, library.uuid(0))
    assert joined.device == -1
    assert f"on GPU {owner.told.uuid.hex()}" in device.reason
    assert library._cuda.vmm_left() == 0
    device, joined = mapped(owner, library.uuid(1))
    assert (device.reason, joined.device) == ("", 1024)
    joined.arenas.forget(1024)


def test_a_process_does_not_open_its_own_handle(library: LibCuda):
    """The driver refuses, and that is said with the call's name; nothing is left of it."""
    at = ctypes.c_uint64()
    with library.current(0):
        library.call("cuMemAlloc_v2", ctypes.byref(at), ctypes.c_size_t(SIZE))
    told, fd = library.export(library.uuid(0), at.value + 4096, 4096)
    assert (fd, told.offset, told.allocation) == (-1, 4096, SIZE)
    with pytest.raises(KvtierError, match="cuIpcOpenMemHandle_v2: invalid device context"):
        library.open_handle(0, told.handle)
    with library.current(0):
        library.call("cuMemFree_v2", at)
    assert library._cuda.vmm_left() == 0
