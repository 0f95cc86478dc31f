"""Slabs that the file system has no room for, although `disk.bytes` promises it: set apart, and tried now and then.

Nothing is sick then: the tier goes on with the slabs that have room behind them, and evicts for what is new.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import Any, Final

from kvtier.tiers.cells import BLOCK, Cells
from kvtier.tiers.extentfile import Extents
from kvtier.tiers.lanecall import LaneCall
from kvtier.tiers.lanes import Lanes

log = logging.getLogger("kvtier.disk")

TRY_S: Final = 10.0
"""So long after there was no room for a slab the file system is asked again."""


class Backing:
    """Belongs to the tier's owner."""

    def __init__(self, cells: Cells, extents: Extents, lanes: Lanes, post: Callable[..., Any]) -> None:
        self._cells = cells
        self._extents = extents
        self._lanes = lanes
        self._post = post
        self._trying = False
        self._due = 0.0
        self.shortages = 0
        """How often a write met a slab without room behind it."""

    def lacks(self, slab: int) -> None:
        """There is no room behind a slab: nothing more goes there, nor where room would have to be found first.

        One write has failed for it, and those under way may. Without this each further slab would cost others.
        """
        cells = self._cells
        first = not cells.parked
        self.shortages += 1
        self._due = monotonic() + TRY_S
        if cells.is_parked(slab):
            return
        for each in {slab, *cells.stock()}:
            if each == slab or not self._extents.backed(each):
                cells.park(each)
        if first:
            log.warning(
                "the file system has no room for %d MiB of what disk.bytes promises: the tier goes on with the rest",
                cells.parked * BLOCK >> 20,
            )

    def look(self) -> None:
        """Something is to be written: ask for room behind one more slab, where that is due and few slabs are left.

        Room that was found is asked for again at once, so that the tier grows as fast as it is written to.
        """
        if self._trying or self._cells.stocked > 1 or monotonic() < self._due:
            return
        slab = self._cells.first_parked()
        if slab >= 0:
            self._trying = True
            call, ended = partial(self._extents.back, slab), partial(self._tried, slab)
            self._lanes.submit(LaneCall(call, self._post, ended), urgent=False)

    def _tried(self, slab: int, error: str) -> None:
        self._trying = False
        if error:
            self._due = monotonic() + TRY_S
        else:
            self._cells.unpark(slab)
