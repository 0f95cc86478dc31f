"""Pages on their way between an engine's blocks and slots in host memory: two streams a direction, who waits for whom.

Small rows are first gathered into a staging buffer in device memory, so that the copy engine moves whole pages; while
one buffer is copied the next is filled. `direct` leaves staging out: kernels reach the slots themselves (over NVLink
C2C, or for small pages), which also serves ranks that have only some heads of a layer.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvtier.device.base import Buffer, Device, Event, Stream
from kvtier.device.layout import VECTOR, Plan
from kvtier.device.ops import SUM_FROM, blocks_of, moves, summed
from kvtier.types import Code, KvtierError, align_up, bad

Words = npt.NDArray[Any]
MOST_PAGES: Final = 512
"""Pages of one transfer."""
MOST_TRANSFERS: Final = 16
"""Transfers in flight."""
STAGE_ALIGN: Final = 256
CLOSE_S: Final = 10.0


FEW_BLOCKS: Final = 8
"""Thread blocks of a kernel that is to leave the GPU to others."""


class Way(enum.StrEnum):
    """How pages get between blocks and slots."""

    STAGED = "staged"
    """Gathered in device memory, then copied whole by the copy engine; or the reverse."""
    BATCHED = "batched"
    """The same, the copies of a batch in one call of the driver."""
    DIRECT = "direct"
    """Kernels reach the slots."""
    FEW = "few"
    """The same with few thread blocks."""


STAGING: Final = frozenset({Way.STAGED, Way.BATCHED})
Choose = Callable[[bool, int, int], Way]
"""(whether it is a load, bytes of a page, pages) -> the way."""


class Piece(NamedTuple):
    """Layers [l0, l1), and where they lie in a slot."""

    l0: int
    l1: int
    at: int
    bytes: int


class Stage:
    """One staging buffer, and the event after which it may be filled again."""

    def __init__(self, memory: Buffer) -> None:
        self.memory = memory
        self.free: Event | None = None


class Holder(Protocol):
    """Whoever holds slots, such as a lease or a reservation: gives them back when nothing touches them any more."""

    def busy_until(self, reached: Transfer) -> None:
        """The slots are read or written until then."""


class Transfer:
    """Pages in flight. Neither their slots nor their blocks may be touched before the event that says so."""

    def __init__(self, shuttle: Shuttle, row: int, count: int) -> None:
        self.layers: list[Event] = []
        """Load: the event after each piece of layers, for the stream that reads them."""
        self.read: Event | None = None
        """Store: after it the engine may write to its blocks again."""
        self.done: Event | None = None
        """After it all bytes are where they belong."""
        self.sums: Words | None = None
        """Once settled, where the shuttle sums: xxh3-64 of each slot as it was in device memory."""
        self._shuttle = shuttle
        self.row = row
        self._count = count

    def settled(self) -> bool:
        """Whether all is done; does not block."""
        if self.row >= 0 and self.done is not None and self.done.done:
            self._settle()
        return self.row < 0

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until all is done. Raises KvtierError(io) where the GPU fails or does not do it within `timeout_s`.

        The shuttle is sick then: the GPU may still touch the blocks and slots, so neither is to be used again.
        """
        if not self.synchronize(timeout_s):
            self._shuttle.sick = f"the GPU did not move {self._count} pages within {timeout_s} s"
            raise KvtierError(Code.IO, self._shuttle.sick)

    def synchronize(self, timeout_s: float | None = None) -> bool:
        """Block until nothing of it moves any more, or for so long; whether that came.

        True also of one that was interrupted while it was queued, once what was queued is over. Raises KvtierError(io).
        """
        if self.row < 0:
            return True
        try:
            reached = self._shuttle.drained(timeout_s) if self.done is None else self.done.synchronize(timeout_s)
        except KvtierError as exc:
            self._shuttle.sick = exc.message
            raise
        if reached:
            self._settle()
        return reached

    def _settle(self) -> None:
        row, self.row = self.row, -1
        if row >= 0:  # else another thread that waited for it was first
            self.sums = self._shuttle.give_back(self, row, self._count)


class Shuttle:
    """Moves pages of one plan. One thread calls it; nothing here blocks but `close` and a transfer's `wait`.

    Any thread may wait for a transfer.
    """

    def __init__(
        self, device: Device, plan: Plan, *, stage_bytes: int = 8 << 20, stages: int = 2, pieces: int = 1,
        direct: bool = False, way: Way | Choose = Way.STAGED, sums: bool = False, stream: Stream | None = None,
    ) -> None:  # fmt: skip
        """Takes its memory, all or none: raises no_space.

        `pieces`: loads come layer by layer in so many parts. `sums`: also sum each slot (one piece, staged).

        `way`: of all transfers, or what chooses it for each (`Paths.way`); `direct` is short for that one.

        `stream`: where kernels run; the engine's own, for the least waiting, or streams of the shuttle's.
        """
        self.device = device
        self.plan = plan
        self.sick = ""
        """Why nothing is moved any more, once a transfer failed or was stuck."""
        self._chosen = Way.DIRECT if direct else way
        self.direct = self._chosen in {Way.DIRECT, Way.FEW} or not plan.whole_layers
        self._whole = _pieces(plan, 1)
        self._parts = _pieces(plan, max(1, min(pieces, plan.layers)))
        self._summed = sums
        size = self._whole[0].bytes if not self.direct else 0
        if sums and (self.direct or len(self._parts) > 1 or size < SUM_FROM or size % 8):
            raise bad("sums", f"staged pages in one piece, of at least {SUM_FROM} bytes and a multiple of 8", size)
        stage = max(stage_bytes, align_up(size, STAGE_ALIGN)) if not self.direct else 0
        self._gather, self._out = stream or device.stream(), device.stream()
        self._in, self._scatter = device.stream(urgent=True), stream or device.stream(urgent=True)
        self._down: list[Stage] = []
        self._up: list[Stage] = []
        with contextlib.ExitStack() as taken:
            self._sums = device.pin(8 * MOST_PAGES * MOST_TRANSFERS)
            taken.callback(self._sums.free)
            for each in (self._down, self._up) * (stages if stage else 0):
                each.append(Stage(device.take(stage)))
                taken.callback(each[-1].memory.free)
            taken.pop_all()
        self._rows = list(range(MOST_TRANSFERS))
        self._flying: list[Transfer] = []

    def store(self, ids: Words, slots: Words, after: Event | None = None, holder: Holder | None = None) -> Transfer:
        """The engine's blocks `ids` into slots at these addresses, after `after`. Raises bad_request, busy, io.

        `holder`: what holds the slots, which is told before anything is queued, so that it waits whatever happens.
        """
        ids, slots = self._checked(ids, slots, to_slots=True)
        with self._begun(len(slots), holder) as transfer:
            self._store(transfer, ids, slots, after)
        return transfer

    def load(self, ids: Words, slots: Words, after: Event | None = None, holder: Holder | None = None) -> Transfer:
        """Slots at these addresses into the engine's blocks `ids`, after `after`. Raises bad_request, busy, io.

        `holder` as for `store`.
        """
        ids, slots = self._checked(ids, slots, to_slots=False)
        with self._begun(len(slots), holder) as transfer:
            self._load(transfer, ids, slots, after)
        return transfer

    def _store(self, transfer: Transfer, ids: Words, slots: Words, after: Event | None) -> None:
        """Queue a store."""
        if after is not None:
            self._gather.wait(after)
        way = self._way(False, len(slots))
        stages, blocks = (self._down, 0) if way in STAGING else ([], FEW_BLOCKS * (way is Way.FEW))
        for piece, pages, stage in self._batches(self._whole, len(slots), stages):
            if stage is None:
                self._launch(ids, slots[pages], piece, self._gather, pages, blocks, to_slots=True)
                continue
            if stage.free is not None:
                self._gather.wait(stage.free)
            staged, places = self._places(stage, piece, pages)
            self._launch(ids, places, piece, self._gather, pages, to_slots=True)
            self._sum(staged, piece, transfer.row, pages, self._gather)
            self._out.wait(self._gather.record())
            self._copy(slots[pages] + np.uint64(piece.at), staged, piece, self._out, way)
            stage.free = self._out.record()
        transfer.read = self._gather.record()
        transfer.done = transfer.read if not stages else self._out.record()

    def _load(self, transfer: Transfer, ids: Words, slots: Words, after: Event | None) -> None:
        """Queue a load."""
        if after is not None:
            self._scatter.wait(after)
        last = self._parts[0]
        way = self._way(True, len(slots))
        stages, blocks = (self._up, 0) if way in STAGING else ([], FEW_BLOCKS * (way is Way.FEW))
        for piece, pages, stage in self._batches(self._parts, len(slots), stages):
            if piece is not last:
                transfer.layers.append(self._scatter.record())
                last = piece
            if stage is None:
                self._launch(ids, slots[pages], piece, self._scatter, pages, blocks, to_slots=False)
                continue
            if stage.free is not None:
                self._in.wait(stage.free)
            staged, places = self._places(stage, piece, pages)
            self._copy(staged, slots[pages] + np.uint64(piece.at), piece, self._in, way)
            self._scatter.wait(self._in.record())
            self._sum(staged, piece, transfer.row, pages, self._scatter)
            self._launch(ids, places, piece, self._scatter, pages, to_slots=False)
            stage.free = self._scatter.record()
        transfer.done = self._scatter.record()
        transfer.layers.append(transfer.done)

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Wait for what is in flight and give the memory back. Raises KvtierError(io).

        One that is sick, or is not done in `timeout_s`, keeps it: a stuck kernel may still write.
        """
        if self.sick:
            return
        if not self.drained(timeout_s):
            self.sick = f"what was in flight did not end within {timeout_s} s"
            raise KvtierError(Code.IO, self.sick)
        for memory in (*(stage.memory for stage in (*self._down, *self._up)), self._sums):
            memory.free()
        self._down, self._up = [], []

    def drained(self, timeout_s: float | None) -> bool:
        """Block until all that was queued is done, or for so long on each stream; whether it is."""
        streams = (self._gather, self._out, self._in, self._scatter)
        return all(stream.record().synchronize(timeout_s) for stream in streams)

    def give_back(self, transfer: Transfer, row: int, count: int) -> Words | None:
        """A transfer ended, which any thread may find: what its slots sum up to."""
        sums = self._sums.data.view(np.uint64)[row * MOST_PAGES : row * MOST_PAGES + count].copy()
        self._flying.remove(transfer)  # at once: a new list would lack what is begun meanwhile
        self._rows.append(row)
        return sums if self._summed else None

    def _checked(self, ids: Words, slots: Words, *, to_slots: bool) -> tuple[Words, Words]:
        """Blocks and slots that can be; raises bad_request before anything is queued."""
        slots = np.ascontiguousarray(slots, np.uint64)
        if not 1 <= len(slots) <= MOST_PAGES:
            raise bad("slots", f"1..{MOST_PAGES} pages", len(slots))
        if self._way(not to_slots, len(slots)) not in STAGING and (slots % np.uint64(VECTOR)).any():
            raise bad("slots", f"addresses at multiples of {VECTOR} bytes")
        return blocks_of(self.plan, ids, len(slots), to_slots=to_slots), slots

    @contextlib.contextmanager
    def _begun(self, count: int, holder: Holder | None) -> Iterator[Transfer]:
        """A new transfer. Raises io where the shuttle is sick, or busy.

        One of which some is queued and some is not is never done: nothing is moved after it.
        """
        if self.sick:
            raise KvtierError(Code.IO, self.sick)
        if not self._rows:  # of some, only an event was waited for
            for flying in tuple(self._flying):
                flying.settled()
        if not self._rows:
            raise KvtierError(Code.BUSY, f"{MOST_TRANSFERS} transfers are in flight")
        transfer = Transfer(self, self._rows.pop(), count)
        self._flying.append(transfer)
        try:
            if holder is not None:
                holder.busy_until(transfer)
            yield transfer
        except BaseException as exc:
            self.sick = exc.message if isinstance(exc, KvtierError) else f"interrupted: {type(exc).__name__}"
            raise

    def _batches(
        self, pieces: Sequence[Piece], count: int, stages: list[Stage]
    ) -> Iterator[tuple[Piece, slice, Stage | None]]:
        """Layers by layers, as many pages at once as a staging buffer holds."""
        for piece in pieces:
            most = stages[0].memory.bytes // align_up(piece.bytes, STAGE_ALIGN) if stages else count
            for first in range(0, count, most):
                stage = stages.pop(0) if stages else None
                if stage is not None:
                    stages.append(stage)
                yield piece, slice(first, min(first + most, count)), stage

    def _places(self, stage: Stage, piece: Piece, pages: slice) -> tuple[Words, Words]:
        """Where pages lie in a staging buffer, and where slots would begin whose `piece` lay there."""
        step = align_up(piece.bytes, STAGE_ALIGN)
        staged = np.uint64(stage.memory.address) + np.arange(pages.stop - pages.start, dtype=np.uint64) * np.uint64(
            step
        )
        return staged, staged - np.uint64(piece.at)

    def _way(self, load: bool, pages: int) -> Way:
        """How a transfer goes: sums are taken of what is staged, slices of layers are not staged."""
        way = self._chosen if isinstance(self._chosen, Way) else self._chosen(load, self._whole[0].bytes, pages)
        if self._summed and way not in STAGING:
            return Way.STAGED
        return Way.DIRECT if self.direct and way in STAGING else way

    def _launch(
        self, ids: Words, slots: Words, piece: Piece, stream: Stream, pages: slice, most: int = 0, *, to_slots: bool
    ) -> None:
        """The kernels of one batch."""
        per = self.plan.per
        blocks = np.asarray(ids)[pages.start * per : pages.stop * per]
        for op in moves(self.plan, slots, blocks, (piece.l0, piece.l1), to_slots=to_slots):
            self.device.launch(op, stream, most)

    def _sum(self, staged: Words, piece: Piece, row: int, pages: slice, stream: Stream) -> None:
        """Sum the slots of one batch."""
        if self._summed:
            out = self._sums.address + 8 * (MOST_PAGES * row + pages.start)
            self.device.launch(summed(staged, piece.bytes, out), stream)

    def _copy(self, targets: Words, sources: Words, piece: Piece, stream: Stream, way: Way) -> None:
        """Copy a piece of each page; neighbours on both sides at once."""
        size = np.uint64(piece.bytes)
        apart = (np.diff(targets) != size) | (np.diff(sources) != size)
        cuts = np.array([0, *(np.flatnonzero(apart) + 1), len(targets)])
        sizes = (np.diff(cuts) * piece.bytes).tolist()
        starts = targets[cuts[:-1]].tolist(), sources[cuts[:-1]].tolist()
        self.device.copies(*starts, sizes, stream, way is Way.BATCHED)


def _pieces(plan: Plan, count: int) -> list[Piece]:
    """The layers of a plan in so many parts."""
    cuts = [plan.layers * n // count for n in range(count + 1)]
    return [Piece(l0, l1, *plan.bytes_of(l0, l1)) for l0, l1 in itertools.pairwise(cuts)]
