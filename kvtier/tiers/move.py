"""A run's cells on their way out of a slab."""

from __future__ import annotations

from array import array
from typing import NamedTuple

from kvtier.tiers.records import Placed, Run, spans_of


class Move(NamedTuple):
    """Cells of one run on their way out of a slab."""

    ticket: int
    run: Run
    places: list[tuple[int, int]]
    """(group, index among the run's cells of that group) of each."""
    old: list[int]
    new: list[int]
    size: int
    """Blocks of one cell."""

    def placed(self) -> list[Placed]:
        """The run's cells and sums as they will be, for its record."""
        parts = [array("q", cells) for cells in self.run.parts]
        for (group, at), cell in zip(self.places, self.new, strict=True):
            parts[group][at] = cell
        out: list[Placed] = []
        for at, (cells, layout) in enumerate(zip(parts, self.run.layouts, strict=True)):
            sums = self.run.sums[at % self.run.groups]
            pages = [page for page in range(len(cells) // layout.parts) if cells[page * layout.parts] >= 0]
            present = sum(1 << page for page in pages)
            out.append(Placed(present, spans_of(cells, layout), array("Q", [sums[page] for page in pages])))
        return out
