"""GPU memory of another process, by raw handles: who exports it, who has it mapped, and what to do where that fails.

A handle names a whole allocation; what is shared is a stretch of it. Handles travel as plain fields in frames of our
own, never pickled, and GPUs are named by uuid, since ordinals differ between processes. Memory from cudaMalloc is
shared by CUDA IPC handles; memory made of VMM chunks (sleep mode, expandable segments) by a descriptor over the socket.
"""

from __future__ import annotations

import threading
from typing import Any, Final, NamedTuple, Protocol

from kvtier.types import Code, KvtierError
from kvtier.wire import Exported

ADVICE: Final = (
    "engine and daemon must see the same GPU, run as the same user, and in containers share IPC and PID namespaces "
    "(--ipc=host --pid=host) with differing pids"
)


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
