"""What every device can do. Nothing here is bound to CUDA; addresses are integers that kernels and copies take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy.typing as npt

from kvtier.device.ops import Op
from kvtier.wire import Exported


class Event(Protocol):
    """A place in a stream."""

    @property
    def done(self) -> bool:
        """Whether all work before it has ended."""

    def synchronize(self, timeout_s: float | None = None) -> bool:
        """Block until it has, or for so long; whether it has. Raises KvtierError(io) where the device failed."""


class Stream(Protocol):
    """Work that is done in order; work of different streams is in any order unless one waits for the other's event."""

    def record(self) -> Event:
        """An event after all work so far."""

    def wait(self, event: Event) -> None:
        """Work from here on begins after the event. Does not block."""

    def synchronize(self) -> None:
        """Block until all work so far has ended. Raises KvtierError(io) where the device failed."""


class Buffer(Protocol):
    """Memory that a device took; it goes when `free` is called, which must not be before work on it has ended."""

    @property
    def address(self) -> int:
        """What copies and operations take."""

    @property
    def bytes(self) -> int:
        """Its size."""

    def free(self) -> None:
        """Give it back."""


class Pinned(Buffer, Protocol):
    """Host memory that the device can reach."""

    @property
    def data(self) -> npt.NDArray[Any]:
        """The same bytes for the host: uint8."""


class Shared(NamedTuple):
    """Device memory that other processes may map, and how they are told of it."""

    memory: Buffer
    exported: Exported
    fd: int
    """Goes along to whoever maps it; -1 where a handle is enough. Closed by whoever took the memory."""


class Facts(NamedTuple):
    """What a device is."""

    name: str
    uuid: bytes
    """16 bytes; the same in every process whatever CUDA_VISIBLE_DEVICES says."""
    processors: int
    compute: int
    """Such as 90 for sm_90; 0 for the CPU."""
    driver: int = 0
    """The driver's version."""
    batches: bool = False
    """Whether many copies can be one call of the driver."""
    reaches: bool = False
    """Whether kernels reach host memory that is not pinned, as over NVLink C2C."""
    pci: str = ""
    """Its address on the PCI bus; empty: it is not there."""


class Device(Protocol):
    """One GPU, or the CPU in its place."""

    facts: Facts

    def stream(self, *, urgent: bool = False) -> Stream:
        """A new stream; an urgent one goes first where both could."""

    def adopt(self, handle: int) -> Stream:
        """A stream that the engine made, by its raw handle."""

    def take(self, size: int) -> Buffer:
        """Device memory. Raises KvtierError(no_space)."""

    def share(self, size: int) -> Shared:
        """Device memory for other processes too. Raises KvtierError(no_space), or io."""

    def attach(self, what: Exported, fd: int, owner: object) -> Buffer:
        """Map a stretch of another process's memory, by its descriptor where it has no handle; `free` unmaps it.

        `owner`: the same for what one process shares at once, and no other's.
        Raises bad_request, or io with advice. Work on it must have ended before it is freed.
        """

    def pin(self, size: int) -> Pinned:
        """Pinned host memory. Raises KvtierError(no_space)."""

    def register(self, data: npt.NDArray[Any]) -> None:
        """Pin memory that is there already, such as an arena. Raises KvtierError(io)."""

    def unregister(self, data: npt.NDArray[Any]) -> None:
        """Undo `register`."""

    def copy(self, target: int, source: int, size: int, stream: Stream) -> None:
        """Copy bytes, between any two places that the device can reach."""

    def copies(
        self,
        targets: Sequence[int],
        sources: Sequence[int],
        sizes: Sequence[int],
        stream: Stream,
        batched: bool = False,
    ) -> None:
        """Many copies, which may be done in any order; `batched`: in one call of the driver, where it has that."""

    def launch(self, op: Op, stream: Stream, blocks: int = 0) -> None:
        """Do an operation, by at most so many thread blocks (0: as many as help)."""

    def compile(self, ops: Sequence[Op]) -> None:
        """Compile ahead what these operations need, so that the first one is not slow."""
