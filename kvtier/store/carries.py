"""What the carrier's thread queues on the device, and what it makes of it. Each is called there."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from kvtier.device.base import Device, Stream
from kvtier.device.layout import Sheet
from kvtier.device.ops import SUM_FROM, Move, summed
from kvtier.device.shuttle import FEW_BLOCKS, STAGING, Way
from kvtier.tiers.pool import Span
from kvtier.types import PAGE_ALIGN, KvtierError

if TYPE_CHECKING:
    from kvtier.store.carrier import Carrier

Pairs = Sequence[tuple[Sequence[Span], Sequence[Span]]]
MOVED: Final = 1 << 16
"""Slots that one kernel copies."""


def copy(pairs: Pairs, carrier: Carrier, stream: Stream) -> None:
    """Queue copies, slot by slot, the way that is fastest for so many of that size; copied neighbours go at once."""
    spans = [both for source, target in pairs for both in zip(source, target, strict=True)]
    way = carrier.way_of(spans[0][1], len(spans)) if spans else Way.STAGED
    if way not in STAGING and all(carrier.on_device(a.address) != carrier.on_device(b.address) for a, b in spans):
        _by_kernels(spans, way, carrier, stream)
        return
    targets: list[int] = []
    sources: list[int] = []
    sizes: list[int] = []
    for ours, theirs in spans:
        if targets and targets[-1] + sizes[-1] == theirs.address and sources[-1] + sizes[-1] == ours.address:
            sizes[-1] += ours.bytes
            continue
        sources.append(ours.address)
        targets.append(theirs.address)
        sizes.append(ours.bytes)
    carrier.device.copies(targets, sources, sizes, stream, way is Way.BATCHED)


def _by_kernels(spans: Sequence[tuple[Span, Span]], way: Way, carrier: Carrier, stream: Stream) -> None:
    """Kernels that reach host memory copy slots, as blocks of one row each that lie in device memory."""
    most = FEW_BLOCKS * (way is Way.FEW)
    for up in (False, True):
        mine = [both for both in spans if carrier.on_device(both[1].address) == up]
        for size in {ours.bytes for ours, _ in mine}:
            alike = [(b, a) if up else (a, b) for a, b in mine if a.bytes == size]
            for at in range(0, len(alike), MOVED):
                _move(alike[at : at + MOVED], size, carrier.base, carrier.device, stream, most, to_slots=not up)


def _move(
    pairs: Sequence[tuple[Span, Span]], size: int, base: int, device: Device, stream: Stream, most: int, *,
    to_slots: bool,
) -> None:  # fmt: skip
    """Queue one kernel: (in device memory, in host memory)."""
    ids = np.array([(there.address - base) // PAGE_ALIGN for there, _ in pairs], np.int64)
    slots = np.array([here.address for _, here in pairs], np.uint64)
    sheet = Sheet(1, 1, size, PAGE_ALIGN, size, size, size, int(ids.max()) + 1, "", (base,), (0,), (0,), (0,))
    device.launch(Move(sheet, 0, 1, slots, ids, 1, to_slots), stream, most)


def nothing(_carrier: Carrier) -> None:
    """A copy has no result."""


def summable(size: int) -> bool:
    """Whether devices sum items of that size."""
    return size >= SUM_FROM and size % 8 == 0


def add_up(slots: npt.NDArray[np.uint64], size: int, carrier: Carrier, stream: Stream) -> None:
    """Queue the kernel that sums slots."""
    carrier.device.launch(summed(slots, size, carrier.scratch.address), stream)


def read(count: int, carrier: Carrier) -> list[int]:
    """What it found."""
    return [int(value) for value in carrier.scratch.data[: 8 * count].view(np.uint64)]


def fetch(piece: Span, carrier: Carrier, stream: Stream) -> None:
    """Queue a copy to the scratch memory."""
    carrier.device.copies([carrier.scratch.address], [piece.address], [piece.bytes], stream)


def put(where: Span, data: bytes, carrier: Carrier, stream: Stream) -> None:
    """Queue a copy of bytes by way of the scratch memory."""
    carrier.scratch.data[: len(data)] = np.frombuffer(data, np.uint8)
    carrier.device.copies([where.address], [carrier.scratch.address], [len(data)], stream)


def update(state: xxhash.xxh3_64, size: int, carrier: Carrier) -> None:
    """Add what is there now to a sum."""
    state.update(carrier.scratch.data[:size].data)


def tell(future: asyncio.Future[Any], result: Any) -> None:
    """Give the loop a result, or an error, of a batch."""

    def deliver() -> None:
        if future.done():
            return
        if isinstance(result, KvtierError):  # a refusal says enough; its frames have this batch: a cycle
            future.set_exception(result.with_traceback(None))
        elif isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)

    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
        future.get_loop().call_soon_threadsafe(deliver)
