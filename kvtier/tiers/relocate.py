"""Empties a sparse slab of one cell size so that another size can use it: cells are copied, renamed, then given back.

A copy is named by the catalogue before the old cell is let go, and the old cell is let go only after the commit is
durable and the reads that may still use it have ended. Whoever needs the room waits for `flush`.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Collection, Iterator
from functools import partial
from time import monotonic
from typing import Any, Final

import lmdb
import numpy as np

from kvtier.tiers.catalogue import Catalogue
from kvtier.tiers.cells import BLOCK
from kvtier.tiers.commits import Commits, Op, code_of, name_of
from kvtier.tiers.extentfile import IO_BYTES, Extents, Io
from kvtier.tiers.lanes import Lanes
from kvtier.tiers.ledger import Ledger
from kvtier.tiers.move import Move
from kvtier.tiers.records import Change, Damaged, Run, View
from kvtier.tiers.runrecord import decode_run, encode_run
from kvtier.tiers.transfers import Reads
from kvtier.types import Code

SCAN: Final = 64
"""Runs looked at, cell by cell, before the owner's thread is given back: less than a millisecond."""
REST_S: Final = 30.0
"""A slab that could not be emptied is left alone for so long."""


class Copying:
    """A move's bytes, as one job: a few calls' worth at a time, one after the other."""

    def __init__(self, op: Op, move: Move, extents: Extents, end: Callable[[Op], None]) -> None:
        self._op = op
        self._move = move
        self._extents = extents
        self._end = end

    def run(self) -> None:
        """Copy all cells."""
        size = self._move.size * BLOCK
        at_once = max(IO_BYTES // size, 1)
        pairs = list(zip(self._move.old, self._move.new, strict=True))
        try:
            buffer: View = np.frombuffer(mmap.mmap(-1, at_once * size), np.uint8)
            for at in range(0, len(pairs), at_once):
                some = [(old, new, buffer[n * size :][:size]) for n, (old, new) in enumerate(pairs[at : at + at_once])]
                for old, _, view in some:
                    self._extents.read(Io(old * BLOCK, [view], size, frozenset()))
                for _, new, view in some:
                    self._extents.back(new * BLOCK // self._extents.slab_bytes)
                    self._extents.write(Io(new * BLOCK, [view], size, frozenset()))
        except (OSError, MemoryError) as error:
            self._op.error, self._op.reason = code_of(error), name_of(error)
        self._end(self._op)

    def drop(self) -> None:
        """The tier closes."""
        self._op.error = Code.CLOSING.value
        self._end(self._op)


class Relocator:
    """At most one slab is being emptied at a time; all of it runs on the owner's thread but the copying."""

    def __init__(
        self,
        ledger: Ledger,
        catalogue: Catalogue,
        extents: Extents,
        lanes: Lanes,
        reads: Reads,
        commits: Commits,
        post: Callable[..., Any],
    ) -> None:
        self._ledger = ledger
        self._catalogue = catalogue
        self._extents = extents
        self._lanes = lanes
        self._reads = reads
        self._commits = commits
        self._post = post
        self._slab = -1
        self._moves = 0  # cells of how many runs have not been given back yet
        self._scan: Iterator[Run] | None = None
        self._closing = False
        self._waiting: list[Callable[[], None]] = []
        self._failed: dict[int, float] = {}  # slab that could not be emptied -> until when it is left alone
        self.slabs = 0
        """Slabs worked on so far."""

    @property
    def busy(self) -> bool:
        """Whether a slab is being emptied, and will be empty one day."""
        return self._slab >= 0 and not self._closing

    def make_room(self, sizes: Collection[int]) -> None:
        """Begin to empty a slab for cells of these sizes, unless one is being emptied or none is worth it."""
        now = monotonic()
        self._failed = {slab: until for slab, until in self._failed.items() if until > now}
        if self._closing or self.busy or (slab := self._ledger.cells.sparse(sizes, self._failed)) < 0:
            return
        self._slab = slab
        self._ledger.cells.hold(slab)
        self._scan = iter(list(self._ledger.runs.values()))
        self._step()

    def after(self, call: Callable[[], None]) -> None:
        """Call once no slab is being emptied, or will ever be."""
        if not self.busy:
            call()
        else:
            self._waiting.append(call)

    def close(self) -> None:
        """Begin nothing more, and wake who waits."""
        self._closing = True
        self._wake()

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            call()

    def _step(self) -> None:
        """Look at the next few runs, and begin the first move found; its end comes back here."""
        if self._closing or self._scan is None:
            return
        for _ in range(SCAN):
            run = next(self._scan, None)
            if run is None:
                self._scan = None
                self._finish()
                return
            if run.live and self._begin(run):
                return
        self._post(self._step)

    def _begin(self, run: Run) -> bool:
        """Start to move what a run has in the slab; False where it has nothing there, or cannot be moved."""
        move = self._ledger.plan_move(run, self._slab)
        if move is None:
            return False
        try:
            value = self._catalogue.run(run.key)
            stored = decode_run(run.key, value or b"", run.layouts[: run.groups])
        except (Damaged, lmdb.Error, OSError):
            stored = None
        if stored is None or stored.cache != run.cache:
            self._ledger.abandon_move(move, doubtful=False)
            return False
        op = Op([Change(b"runs", run.key, encode_run(stored, move.placed()))], keep=False)
        op.finish = partial(self._moved, move, op)
        op.size, op.ready, op.urgent = len(move.old) * move.size * BLOCK, False, True
        self._moves += 1
        self._commits.submit(op)
        self._lanes.submit(Copying(op, move, self._extents, self._commits.ready), urgent=False)
        return True

    def _moved(self, move: Move, op: Op, error: str) -> None:
        """A move has ended; go on with the next run."""
        if error:
            self._ledger.abandon_move(move, doubtful=op.doubtful)
            self._moves -= 1
        else:
            left, late = self._ledger.settle_move(move)
            self._moves += 1
            self._reads.after_present(partial(self._tell, left))
            self._commits.submit(Op([], partial(self._late, late)))
        self._step()

    def _tell(self, ticket: int) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._post(self._left, ticket)

    def _left(self, ticket: int) -> None:
        """No read uses the old cells any more."""
        self._ledger.freed(ticket)
        self._moves -= 1
        self._finish()

    def _late(self, ticket: int, error: str) -> None:
        """What was freed while it moved is durably free."""
        if not error:
            self._ledger.freed(ticket)
        self._moves -= 1
        self._finish()

    def _finish(self) -> None:
        """Once nothing is left to do: offer the slab, and wake who waits for it."""
        if self._moves or self._scan is not None or self._slab < 0:
            return
        slab, self._slab = self._slab, -1
        self._ledger.cells.let_go(slab)
        if self._ledger.cells.size_in(slab):
            self._failed[slab] = monotonic() + REST_S
        self.slabs += 1
        self._wake()
