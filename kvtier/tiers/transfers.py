"""Bytes of one run to disk, and of a list of items back, as jobs for the lanes."""

from __future__ import annotations

import functools
import logging
import mmap
import threading
from collections.abc import Callable, Sequence
from itertools import count

import numpy as np
import xxhash

from kvtier import codec
from kvtier.tiers.cells import BLOCK
from kvtier.tiers.commits import Op, code_of, name_of
from kvtier.tiers.extentfile import Extents, Io, Piece, Scratch, join, pieces, share
from kvtier.tiers.lanes import Lanes
from kvtier.tiers.ledger import Place
from kvtier.tiers.records import Item, Run, View
from kvtier.types import Code, align_up

log = logging.getLogger("kvtier.disk")

GONE = "gone"
CHECKSUM = "checksum"


class _Part:
    """One vectored call of a transfer."""

    def __init__(self, io: Io, run: Callable[[Io], None], drop: Callable[[Io, str, str], None]) -> None:
        self._io = io
        self._run = run
        self._drop = drop

    def run(self) -> None:
        """Make the call. Whatever it raises (there may be no memory), the transfer goes on without it, and ends."""
        try:
            self._run(self._io)
        except Exception as caught:
            log.exception("a call for the disk tier failed")
            self._drop(self._io, Code.IO.value, name_of(caught))

    def drop(self) -> None:
        """The tier closes."""
        self._drop(self._io, Code.CLOSING.value, "")


class Writing:
    """The payload of one run; as a job it cuts itself into calls and makes the first of them."""

    def __init__(
        self, op: Op, run: Run, items: Sequence[Item], extents: Extents, lanes: Lanes, end: Callable[[Op], None]
    ) -> None:
        self.op = op
        self.items = items
        self.unbacked = -1
        """A slab that the file system had no room for."""
        self._run = run
        self._extents = extents
        self._lanes = lanes
        self._end = end
        self._left = 1
        self._lock = threading.Lock()

    def run(self) -> None:
        """Plan the calls, share them out, make the first."""
        try:
            ios = self._plan()
        except (OSError, MemoryError) as caught:  # no memory for what is not aligned
            self._settle(Code.IO.value, name_of(caught))
            return
        self._left = len(ios)
        first, *rest = [_Part(io, self._write, self._cancel) for io in ios]
        for part in rest:
            self._lanes.submit(part, urgent=False)
        first.run()

    def _plan(self) -> list[Io]:
        scratch = Scratch()
        parts: list[Piece] = []
        for item in self.items:
            blocks, each, _ = self._run.layouts[item.group]
            cells = self._run.parts[item.group][item.page * each : item.page * each + each]
            rest = each * blocks * BLOCK - sum(align_up(view.size) for view in item.views)
            views = [*item.views, _zeros(rest)] if rest else item.views  # else what lay there before would stay
            parts.extend(pieces(views, cells, blocks * BLOCK, 0, scratch))
        scratch.fill()
        return join(parts)

    def drop(self) -> None:
        """The tier closes before anything was written."""
        self._settle(Code.CLOSING.value)

    def _cancel(self, _io: Io, error: str, reason: str) -> None:
        self._settle(error, reason)

    def _write(self, io: Io) -> None:
        if self.op.error:
            self._settle("")
            return
        slab_blocks = self._extents.slab_bytes // BLOCK
        slab = -1
        try:
            for slab in range(io.offset // BLOCK // slab_blocks, (io.offset + io.size - 1) // BLOCK // slab_blocks + 1):
                self._extents.back(slab)
            slab = -1
            self._extents.write(io)
        except OSError as error:
            self.unbacked = slab if code_of(error) == Code.NO_SPACE else self.unbacked
            self._settle(code_of(error), name_of(error))
        else:
            self._settle("")

    def _settle(self, error: str, reason: str = "") -> None:
        with self._lock:
            self._left -= 1
            if error and not self.op.error:
                self.op.error, self.op.reason = error, reason
            last = self._left == 0
        if last:
            self._end(self.op)


@functools.lru_cache(8)
def _zeros(size: int) -> View:
    """As many, at an aligned address, which nobody writes: most items of a group lack as much."""
    return np.frombuffer(mmap.mmap(-1, size), np.uint8)


class Reading:
    """A list of items on their way back; the thread that asks makes one of the calls itself and waits for the rest."""

    def __init__(self, places: Sequence[Place | None], views: Sequence[Sequence[View]], extents: Extents) -> None:
        self._places = places
        self._views = views
        self._extents = extents
        self._results = ["" if place else GONE for place in places]
        self._scratch = [Scratch() for _ in places]
        self._frames: dict[int, View] = {}  # of packed items
        self._left = [0] * len(places)  # calls that have not ended, per item
        self._open = 0
        self._lock = threading.Lock()
        self._done = threading.Event()

    def run(self, lanes: Lanes) -> list[str]:
        """Read everything; per item an empty string or what went wrong."""
        parts = [piece for at in range(len(self._places)) for piece in self._pieces(at)]
        ios = join(parts, share(sum(part.view.size for part in parts)))
        self._open = len(ios)
        for io in ios:
            for at in io.owners:
                self._left[at] += 1
        calls = [_Part(io, self._read, self._cancel) for io in ios]
        for call in calls[1:]:
            lanes.submit(call, urgent=True)
        if calls:
            calls[0].run()
            self._done.wait()
        return self._results

    def _pieces(self, at: int) -> list[Piece]:
        if not (place := self._places[at]):
            return []
        views = self._views[at]
        if place.packed:
            views = [self._frames.setdefault(at, np.frombuffer(mmap.mmap(-1, place.cell_bytes), np.uint8))]
        return list(pieces(views, place.cells, place.cell_bytes, at, self._scratch[at]))

    def _cancel(self, io: Io, error: str, _reason: str) -> None:
        self._settle(io, error)

    def _read(self, io: Io) -> None:
        try:
            self._extents.read(io)
        except OSError:
            if len(io.owners) > 1:
                self._read_apart(io)
                return
            self._settle(io, Code.IO.value)
        else:
            self._settle(io, "")

    def _read_apart(self, io: Io) -> None:
        """A joined call failed: each item by itself, so that one bad block costs one item."""
        for at in io.owners:
            error = ""
            for alone in join(self._pieces(at)):
                try:
                    self._extents.read(alone)
                except OSError:
                    error = Code.IO.value
            with self._lock:
                self._results[at] = self._results[at] or error
        self._settle(io, "")

    def _settle(self, io: Io, error: str) -> None:
        with self._lock:
            whole = []
            for at in io.owners:
                self._left[at] -= 1
                self._results[at] = self._results[at] or error
                if not self._left[at]:
                    whole.append(at)
        for at in whole:
            self._verify(at)
        with self._lock:
            self._open -= 1
            last = not self._open
        if last:
            self._done.set()

    def _verify(self, at: int) -> None:
        """Compare the bytes of one item with the sum they were stored under."""
        place = self._places[at]
        if self._results[at] or not place:
            return
        self._scratch[at].spill()
        if place.packed:
            try:
                codec.unpack(self._frames.pop(at), self._views[at])
            except codec.Unpackable:
                self._results[at] = CHECKSUM
                return
        if digest(self._views[at]) != place.sum:
            self._results[at] = CHECKSUM


def digest(views: Sequence[View]) -> int:
    """xxh3-64 over the views, one behind the other."""
    if len(views) == 1:
        return xxhash.xxh3_64_intdigest(views[0].data)
    state = xxhash.xxh3_64()
    for view in views:
        state.update(view.data)
    return state.intdigest()


class Reads:
    """Reads under way: none begins once closing, and closing waits for those that have."""

    def __init__(
        self,
        find: Callable[[int, int], Place | None],
        extents: Extents,
        lanes: Lanes,
        tally: Callable[..., None],
    ) -> None:
        self._find = find
        self._extents = extents
        self._lanes = lanes
        self._tally = tally
        self._changed = threading.Condition()
        self._numbers = count()
        self._under_way: set[int] = set()
        self._waiting: list[tuple[set[int], Callable[[], None]]] = []
        self._closing = False

    def read(self, reqs: Sequence[tuple[int, int, Sequence[View]]]) -> list[str]:
        """Fill each (handle, group, views) with its item; blocks."""
        with self._changed:
            if self._closing:
                return [Code.CLOSING.value] * len(reqs)
            number = next(self._numbers)
            self._under_way.add(number)
        try:
            places = [self._find(handle, group) for handle, group, _ in reqs]
            results = Reading(places, [views for _, _, views in reqs], self._extents).run(self._lanes)
        finally:
            self._end(number)
        sizes = [sum(view.size for view in views) for _, _, views in reqs]
        size = sum(size for error, size in zip(results, sizes, strict=True) if not error)
        self._tally(bytes_read=size, checksum_failures=results.count(CHECKSUM), io_errors=results.count(Code.IO.value))
        return results

    def _end(self, number: int) -> None:
        with self._changed:
            self._under_way.discard(number)
            for reads, _ in self._waiting:
                reads.discard(number)
            over = [call for reads, call in self._waiting if not reads]
            self._waiting = [waiting for waiting in self._waiting if waiting[0]]
            self._changed.notify_all()
        for call in over:
            call()

    def after_present(self, call: Callable[[], None]) -> None:
        """Call, from some thread, once every read that is under way now has ended."""
        with self._changed:
            reads = set(self._under_way)
            if reads:
                self._waiting.append((reads, call))
        if not reads:
            call()

    def close(self, timeout_s: float) -> bool:
        """Let no read begin and wait for the last to end; False where one is still under way at the deadline."""
        with self._changed:
            self._closing = True
            return self._changed.wait_for(lambda: not self._under_way, timeout_s)
