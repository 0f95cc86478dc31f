"""The process that has Mooncake's engine inside: `python -m kvtier.peer.mooncake_child SOCKET MEMORY`.

Its calls may hang for half a minute or take the process with them, so kvtierd keeps them out of its own. It reads and
writes only memory that it shares with kvtierd for that purpose, never slots; when it is killed nothing writes there
any more. One frame each way a call: a length (u32) and a MessagePack body.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import socket
import struct
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NoReturn

import msgspec

THREADS: Final = 16
LENGTH: Final = struct.Struct("<I")
MAX_FRAME: Final = 16 << 20
PR_SET_PDEATHSIG: Final = 1


class Setup(msgspec.Struct, array_like=True):
    """The first frame: how to join. Answered by one value, 0 where it is done."""

    master: str
    metadata: str
    protocol: str
    devices: str
    replicas: int


class Ask(msgspec.Struct, array_like=True):
    """A call about values: `has`, `read`, `write`, `replace` or `drop`."""

    number: int
    verb: str
    names: list[str]
    at: list[int] = []
    """Where each value is in the shared memory."""
    sizes: list[int] = []


class Told(msgspec.Struct, array_like=True):
    """What the engine returned for each name."""

    number: int
    values: list[int]


def frame(message: msgspec.Struct) -> bytes:
    """A message as it travels."""
    body = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)) + body


class Engine:
    """Mooncake's client and the memory that it may touch."""

    def __init__(self, setup: Setup, memory: mmap.mmap) -> None:
        """Raises OSError where the engine does not come up."""
        from mooncake.store import MooncakeDistributedStore, ReplicateConfig  # noqa: PLC0415 - an extra

        self._base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._config = ReplicateConfig()
        self._config.replica_num = setup.replicas
        self._store = MooncakeDistributedStore()
        where = _own_address(setup.master)
        rc = self._store.setup(where, setup.metadata, 0, 16 << 20, setup.protocol, setup.devices, setup.master)
        rc = rc or self._store.register_buffer(self._base, len(memory))
        if rc:
            raise OSError(f"Mooncake's setup returned {rc}")

    def call(self, ask: Ask) -> list[int]:
        """Do what is asked; a value for each name, below 0 where it failed."""
        pointers = [self._base + at for at in ask.at]
        if ask.verb == "has":
            return list(self._store.batch_is_exist(ask.names))
        if ask.verb == "read":
            return list(self._store.batch_get_into(ask.names, pointers, ask.sizes))
        if ask.verb == "write":
            return list(self._store.batch_put_from(ask.names, pointers, ask.sizes, self._config))
        if ask.verb == "replace":
            return list(self._store.batch_upsert_from(ask.names, pointers, ask.sizes, self._config))
        # Whoever looked for a value has a lease on it for seconds; a purge does not wait for that.
        return [self._store.remove(name, force=True) for name in ask.names]


def _own_address(master: str) -> str:
    """This host's address on the way to the master."""
    host, _, port = master.rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect((host, int(port)))
        return str(sock.getsockname()[0])


def _exactly(sock: socket.socket, size: int) -> bytes:
    """So many bytes; ends the process where kvtierd has gone."""
    out = bytearray()
    while len(out) < size:
        part = sock.recv(size - len(out))
        if not part:
            os._exit(0)  # threads may hang in the engine
        out += part
    return bytes(out)


def receive(sock: socket.socket, kind: type[Any]) -> Any:
    """The next frame."""
    (size,) = LENGTH.unpack(_exactly(sock, LENGTH.size))
    return msgspec.msgpack.decode(_exactly(sock, size), type=kind)


def main(argv: list[str]) -> NoReturn:
    """Serve until kvtierd goes."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    sock = socket.socket(fileno=int(argv[0]))
    memory = mmap.mmap(int(argv[1]), 0)
    pool, lock = ThreadPoolExecutor(THREADS), threading.Lock()

    def tell(number: int, values: list[int]) -> None:
        with lock:
            sock.sendall(frame(Told(number, values)))

    engine = Engine(receive(sock, Setup), memory)
    tell(0, [0])

    def work(ask: Ask) -> None:
        try:
            values = engine.call(ask)
        except Exception as exc:  # noqa: BLE001 - the others' calls go on
            print(f"{ask.verb}: {exc!r}", file=sys.stderr)  # noqa: T201 - the daemon's log
            values = [-1] * len(ask.names)
        tell(ask.number, values)

    while True:
        pool.submit(work, receive(sock, Ask))


if __name__ == "__main__":
    main(sys.argv[1:])
