"""VMM memory of another process, by descriptor: the driver's own calls, two processes, on a GPU and without one.

Without a GPU the driver is tests/vmm_driver.c, which does with memfds what CUDA documents of these calls: kvtier's
calls, the descriptors, the socket and the mappings are real, the driver is not.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from driverkit import built, use
from kvtier.device.ipc import Exported, Mappings
from kvtier.device.libcuda import LibCuda
from kvtier.types import Code, KvtierError
from storekit import KINDS, gpu
from vmmproc import CHUNK, OFFSET, SIZE, write

HERE = Path(__file__).parent
FAILING = ["cuMemImportFromShareableHandle", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def library(kind: str, monkeypatch: pytest.MonkeyPatch) -> LibCuda:
    """The driver of this process."""
    if kind == "gpu":
        gpu()
    else:
        use(monkeypatch)
    return LibCuda()


class Owner:
    """An engine process with a chunk."""

    def __init__(self, uuid: bytes, environment: dict[str, str]) -> None:
        self.uuid = uuid
        self.sock, theirs = socket.socketpair()
        command = [sys.executable, str(HERE / "vmmproc.py"), str(theirs.fileno())]
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=os.environ | environment)
        theirs.close()

    def send(self, *words: Any) -> None:
        self.sock.sendall(json.dumps(words).encode() + b"\n")

    def share(self, byte: str) -> tuple[Exported, int]:
        """Its chunk as it tells another process of it, filled with a byte."""
        self.send("share", byte)
        told, fds, _, _ = socket.recv_fds(self.sock, 4096, 1)
        allocation, offset, size, chunk = json.loads(told)
        return Exported(self.uuid, b"", allocation, offset, size, chunk), fds[0]

    def ask(self, *words: Any) -> Any:
        self.send(*words)
        return json.loads(self.sock.recv(4096))

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.sock.close()


@pytest.fixture
def owner(kind: str, library: LibCuda) -> Iterator[Owner]:
    one = Owner(library.uuid(0), {"LD_LIBRARY_PATH": str(built())} if kind == "cpu" else {})
    yield one
    one.close()


def left(library: LibCuda, kind: str) -> int:
    """What the driver still has of handles and addresses; a GPU's does not say."""
    return library._cuda.vmm_left() if kind == "cpu" else 0


def test_a_chunk_of_another_process_is_mapped_read_and_written(owner: Owner, library: LibCuda, kind: str):
    """One chunk, one descriptor: the same memory in both processes, mapped once for two stretches, then let go of."""
    mappings = Mappings(library)
    told, fd = owner.share("5a")
    assert (told.allocation, told.offset, told.size) == (CHUNK, OFFSET, SIZE)
    first = mappings.open("engine", told, fd)
    os.close(fd)  # the mapping needs it no more
    again, fd = owner.share("5b")
    second = mappings.open("engine", again, fd)
    os.close(fd)
    assert first.address == second.address
    assert library.read(0, first.address, SIZE) == b"\x5b" * SIZE
    write(library, first.address, b"kvtr")
    assert owner.ask("look") == b"kvtr".hex()
    mappings.close(first)
    assert library.read(0, second.address, 4) == b"kvtr"
    mappings.close(second)
    assert left(library, kind) == 0


def test_memory_of_a_dead_process_stays_until_it_is_unmapped(owner: Owner, library: LibCuda, kind: str):
    """Killed in the middle of what is copied: the bytes are there until the last stretch is closed, and then gone."""
    mappings = Mappings(library)
    told, fd = owner.share("77")
    opened = mappings.open("engine", told, fd)
    os.close(fd)
    owner.close()
    assert library.read(0, opened.address, SIZE) == b"\x77" * SIZE
    mappings.close(opened)
    assert mappings.bytes == 0
    assert left(library, kind) == 0


def test_a_stretch_over_several_chunks_is_refused_and_keeps_no_descriptor(owner: Owner):
    """Each chunk is shared by itself; the refusal closes what was exported for it."""
    files = set()
    for _ in range(3):
        message, count = owner.ask("several")
        assert "not a stretch of GPU memory" in message
        files.add(count)
    assert len(files) == 1


@pytest.mark.parametrize("kind", ["cpu"], indirect=True)
@pytest.mark.parametrize("name", FAILING)
def test_a_driver_that_fails_midway_leaves_nothing_mapped(name: str, owner: Owner, library: LibCuda):
    """Whichever call fails: io by its name and with advice, all before it is undone, and the next try works."""
    mappings = Mappings(library)
    told, fd = owner.share("11")
    library._cuda.vmm_fail(name.encode())
    with pytest.raises(KvtierError, match=f"{name}: injected.*--ipc=host") as caught:
        mappings.open("engine", told, fd)
    assert caught.value.code is Code.IO
    assert left(library, "cpu") == 0
    opened = mappings.open("engine", told, fd)
    os.close(fd)
    assert library.read(0, opened.address, 2) == b"\x11\x11"
    mappings.close(opened)
    assert left(library, "cpu") == 0
