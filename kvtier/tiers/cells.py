"""Which cells of the extent file are free: slabs of equal cells, first fit, freed cells held back.

Pure bookkeeping in blocks of 4 KiB; nothing here touches a file. A slab serves one cell size at a time and
returns to the common stock once its last cell is free, so no size can strand space for ever.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Collection, Iterable, Iterator
from typing import Final, NamedTuple

from kvtier.types import PAGE_ALIGN, align_up

BLOCK: Final = PAGE_ALIGN
CELLS_PER_SLAB_MIN: Final = 16


class Span(NamedTuple):
    """Consecutive cells: first block in the file, blocks of one cell, number of cells."""

    first: int
    blocks: int
    cells: int

    @property
    def total(self) -> int:
        """Blocks of the whole span."""
        return self.blocks * self.cells

    def cell_list(self) -> range:
        """The first block of each cell."""
        return range(self.first, self.first + self.total, self.blocks)


class Layout(NamedTuple):
    """How one item lies on disk: `parts` cells of `blocks` blocks each."""

    blocks: int
    parts: int
    slab: int
    """Blocks of one slab: cells on either side of its end are never one span."""


def layout_of(item_bytes: int, slab_bytes: int) -> Layout:
    """The cells of an item: one, or several equal ones where one would waste much of a slab."""
    blocks = align_up(item_bytes) // BLOCK
    slab = slab_bytes // BLOCK
    parts = -(-blocks // max(slab // CELLS_PER_SLAB_MIN, 1))
    return Layout(-(-blocks // parts), parts, slab)


class _Class:
    """Slabs that serve one cell size."""

    __slots__ = ("free", "heap", "per_slab")

    def __init__(self, per_slab: int) -> None:
        self.per_slab = per_slab
        self.free = 0  # cells, without those in parked slabs
        self.heap: list[int] = []  # slabs that may have a free cell; stale entries fall out when they surface


class Cells:
    """The allocator of one extent file.

    Every block is free, used, or pending (freed by a transaction that is not durable yet). The caller moves
    spans used -> pending -> free; `release` alone makes cells allocatable again.
    """

    def __init__(self, capacity_bytes: int, slab_bytes: int) -> None:
        self.slab_blocks = slab_bytes // BLOCK
        self.slabs = capacity_bytes // slab_bytes
        self.used = 0
        self.pending = 0
        self._size = [0] * self.slabs  # blocks per cell; 0 while the slab is in the common stock
        self._mask = [0] * self.slabs  # bit i: cell i is free
        self._classes: dict[int, _Class] = {}
        self._stock = list(range(self.slabs))
        self._stocked = self.slabs  # slabs in stock and not parked
        self._parked: set[int] = set()
        self._idle = 0  # free blocks of those of them that nobody holds
        self._held: dict[int, bool] = {}  # those of them that somebody works on -> whether they stay parked after it

    @property
    def total(self) -> int:
        """All blocks."""
        return self.slabs * self.slab_blocks

    @property
    def parked(self) -> int:
        """Free blocks that cannot be used now because the file system has no room behind them."""
        return self._idle

    @property
    def stocked(self) -> int:
        """Slabs that serve no size and can be taken from."""
        return self._stocked

    def stock(self) -> list[int]:
        """Those and the parked ones that serve no size."""
        return [slab for slab, size in enumerate(self._size) if not size]

    def is_parked(self, slab: int) -> bool:
        """Whether nothing is taken from a slab: parked, or held."""
        return slab in self._parked

    def first_parked(self) -> int:
        """The lowest slab that is parked and that nobody holds; -1 where none is."""
        return min(self._parked - self._held.keys(), default=-1)

    def _free_in(self, slab: int) -> int:
        """Free blocks of a slab."""
        size = self._size[slab]
        return size * self._mask[slab].bit_count() if size else self.slab_blocks

    def room(self, blocks: int) -> int:
        """How many cells of this size could be taken now."""
        per_slab = self.slab_blocks // blocks
        have = self._classes.get(blocks)
        return (have.free if have else 0) + self._stocked * per_slab

    def take(self, blocks: int, count: int) -> list[Span] | None:
        """Take `count` cells, lowest addresses first; None (and no change) where there is no room."""
        if count > self.room(blocks):
            return None
        kind = self._classes.setdefault(blocks, _Class(self.slab_blocks // blocks))
        spans: list[Span] = []
        while count:
            slab = self._slab_with_room(blocks, kind)
            count -= self._take_from(slab, kind, count, spans)
        return spans

    def _slab_with_room(self, blocks: int, kind: _Class) -> int:
        """The lowest slab of the class with a free cell, or a fresh one from the stock."""
        heap = kind.heap
        while heap:
            slab = heap[0]
            if self._size[slab] == blocks and self._mask[slab] and slab not in self._parked:
                return slab
            heapq.heappop(heap)
        slab = heapq.heappop(self._stock)
        while self._size[slab] or slab in self._parked:  # stale: in use by now, or back with unpark()
            slab = heapq.heappop(self._stock)
        self._stocked -= 1
        self._size[slab] = blocks
        self._mask[slab] = (1 << kind.per_slab) - 1
        kind.free += kind.per_slab
        heapq.heappush(heap, slab)
        return slab

    def _take_from(self, slab: int, kind: _Class, count: int, spans: list[Span]) -> int:
        """Take up to `count` cells of one slab; returns how many."""
        mask, blocks = self._mask[slab], self._size[slab]
        base, taken = slab * self.slab_blocks, 0
        while mask and taken < count:
            start = (mask & -mask).bit_length() - 1
            tail = mask >> start
            length = min(((tail + 1) & ~tail).bit_length() - 1, count - taken)
            mask ^= ((1 << length) - 1) << start
            spans.append(Span(base + start * blocks, blocks, length))
            taken += length
        self._mask[slab] = mask
        kind.free -= taken
        self.used += taken * blocks
        return taken

    def retire(self, spans: Iterable[Span]) -> None:
        """Used cells become pending: no longer named in memory, maybe still named by the durable catalogue."""
        for span in spans:
            self.used -= span.total
            self.pending += span.total

    def release(self, spans: Iterable[Span]) -> None:
        """Pending cells become free: the transaction that freed them is durable, or none ever named them."""
        for span in spans:
            self.pending -= span.total
            self._give_back(span)

    def _give_back(self, span: Span) -> None:
        slab, at = divmod(span.first, self.slab_blocks)
        bits = ((1 << span.cells) - 1) << (at // span.blocks)
        mask = self._mask[slab]
        assert self._size[slab] == span.blocks, f"slab {slab} serves another size"
        assert not mask & bits, f"cells of {span} are free already"
        kind = self._classes.get(span.blocks) or _Class(self.slab_blocks // span.blocks)  # none yet while loading
        parked = slab in self._parked
        before = self._free_in(slab)
        self._mask[slab] = mask | bits
        if not parked:
            kind.free += span.cells
        if (mask | bits).bit_count() == kind.per_slab:
            self._restock(slab, kind, parked)
        elif not mask:
            self._list(kind.heap, slab)
        if parked and slab not in self._held:
            self._idle += self._free_in(slab) - before

    def _restock(self, slab: int, kind: _Class, parked: bool) -> None:
        """A slab without used cells goes back to the stock."""
        self._size[slab] = self._mask[slab] = 0
        if parked:
            return  # unpark() stocks it
        kind.free -= kind.per_slab
        self._stocked += 1
        self._list(self._stock, slab)

    def _list(self, heap: list[int], slab: int) -> None:
        """Let a slab be found; it may be listed still from before."""
        if len(heap) > 2 * self.slabs:
            heap[:] = sorted(set(heap))
        heapq.heappush(heap, slab)

    def mark(self, first: int, blocks: int, cells: int) -> bool:
        """While loading: a record names these cells. False (and no change) if they cannot be its cells."""
        slab, at = divmod(first, self.slab_blocks)
        if first < 0 or slab >= self.slabs or blocks < 1 or cells < 1 or at % blocks:
            return False
        per_slab, at, size = self.slab_blocks // blocks, at // blocks, self._size[slab]
        if at + cells > per_slab or size not in (0, blocks):
            return False
        bits = (1 << cells) - 1
        mask = self._mask[slab] if size else (1 << per_slab) - 1
        if mask >> at & bits != bits:
            return False
        self._size[slab] = blocks
        self._mask[slab] = mask ^ bits << at
        self.used += blocks * cells
        return True

    def unmark(self, first: int, blocks: int, cells: int) -> None:
        """While loading: take back a mark of a record that turned out damaged."""
        slab, at = divmod(first, self.slab_blocks)
        self._mask[slab] |= ((1 << cells) - 1) << (at // blocks)
        self.used -= blocks * cells

    def loaded(self) -> None:
        """After the last mark: what no record named is free."""
        self._classes.clear()
        self._stock.clear()
        for slab, blocks in enumerate(self._size):
            per_slab = self.slab_blocks // blocks if blocks else 0
            if not blocks or self._mask[slab].bit_count() == per_slab:
                self._size[slab] = self._mask[slab] = 0
                self._stock.append(slab)
                continue
            kind = self._classes.setdefault(blocks, _Class(per_slab))
            kind.free += self._mask[slab].bit_count()
            kind.heap.append(slab)
        self._stocked = len(self._stock)

    def park(self, slab: int) -> None:
        """The file system has no room behind this slab: take nothing more from it until `unpark`."""
        if slab in self._parked:
            if slab in self._held:
                self._held[slab] = True
            return
        self._parked.add(slab)
        self._idle += self._free_in(slab)
        if blocks := self._size[slab]:
            self._classes[blocks].free -= self._mask[slab].bit_count()
        else:
            self._stocked -= 1

    def hold(self, slab: int) -> bool:
        """Take nothing more from this slab until `let_go`; False where somebody works on it already."""
        if slab in self._held:
            return False
        parked = slab in self._parked
        self.park(slab)
        self._held[slab] = parked
        self._idle -= self._free_in(slab)
        return True

    def let_go(self, slab: int) -> None:
        """Take from a slab again that was held, unless the file system has no room behind it."""
        stays = self._held.pop(slab)
        self._idle += self._free_in(slab)
        if not stays:
            self._offer(slab)

    def unpark(self, slab: int) -> None:
        """Offer a parked slab again; one that somebody holds once it is let go of."""
        if slab in self._held:
            self._held[slab] = False
        elif slab in self._parked:
            self._offer(slab)

    def _offer(self, slab: int) -> None:
        """Take from this parked slab again."""
        self._parked.discard(slab)
        self._idle -= self._free_in(slab)
        if blocks := self._size[slab]:
            self._classes[blocks].free += self._mask[slab].bit_count()
            self._list(self._classes[blocks].heap, slab)
        else:
            self._stocked += 1
            self._list(self._stock, slab)

    def sparse(self, wanted: Collection[int], but: Collection[int] = ()) -> int:
        """The emptiest slab whose cells would all fit elsewhere in its class, of a class not wanted; -1 if none.

        Slabs in `but` are passed over.
        """
        spare = {size for size, kind in self._classes.items() if size not in wanted and kind.free >= kind.per_slab}
        best, least = -1, self.slab_blocks
        for slab, size in enumerate(self._size) if spare else ():
            if size in spare and slab not in self._parked and slab not in but:
                used = self.slab_blocks // size - self._mask[slab].bit_count()
                if used * size < least:
                    best, least = slab, used * size
        return best

    def gaps(self, slab: int) -> list[tuple[int, int]]:
        """(first block, blocks) of everything free in a slab, neighbours joined; pending cells are not free.

        What is behind the last cell is nobody's, and has what lay there when the slab served another size.
        """
        base, size = slab * self.slab_blocks, self._size[slab]
        if not size:
            return [(base, self.slab_blocks)]
        out, at, mask = [], 0, self._mask[slab]
        while mask:
            skip = (mask & -mask).bit_length() - 1
            mask >>= skip
            length = ((mask + 1) & ~mask).bit_length() - 1
            at += skip
            out.append((base + at * size, length * size))
            at += length
            mask >>= length
        if rest := self.slab_blocks % size:
            out.append((base + self.slab_blocks - rest, rest))
        return out

    def classes(self) -> list[dict[str, int]]:
        """Per size of cells: bytes of one, slabs, cells free and taken (used or pending)."""
        rows = {size: {"cell_bytes": size * BLOCK, "slabs": 0, "taken": 0, "free": 0} for size in self._size if size}
        for size, mask in zip(self._size, self._mask, strict=True):
            if size:
                row, free = rows[size], mask.bit_count()
                row["slabs"] += 1
                row["free"] += free
                row["taken"] += self.slab_blocks // size - free
        return [rows[size] for size in sorted(rows)]

    def size_in(self, slab: int) -> int:
        """Blocks of one cell of this slab; 0 while it serves none."""
        return self._size[slab]

    def check(self, used: Iterable[Span], pending: Iterable[Span]) -> list[str]:
        """What disagrees with the spans known to be used and pending: shared cells, lost cells, wrong counts."""
        spans = itertools.chain(((0, span) for span in used), ((1, span) for span in pending))
        return [line for step in self.checking(spans) for line in step]

    def checking(self, spans: Iterable[tuple[int, Span]]) -> Iterator[list[str]]:
        """The same in steps, of spans that are used (0) or pending (1); nothing may change between two steps."""
        taken: dict[int, int] = {}
        blocks = [0, 0]
        for which, span in spans:
            wrong: list[str] = []
            slab, at = divmod(span.first, self.slab_blocks)
            bits = ((1 << span.cells) - 1) << (at // span.blocks)
            if self._size[slab] != span.blocks:
                wrong.append(f"{span} lies in a slab of cells of {self._size[slab]} blocks")
            if taken.get(slab, 0) & bits:
                wrong.append(f"{span} shares cells with another span")
            taken[slab] = taken.get(slab, 0) | bits
            blocks[which] += span.total
            yield wrong
        for slab, size in enumerate(self._size):
            full = (1 << self.slab_blocks // size) - 1 if size else 0
            free, named = self._mask[slab], taken.get(slab, 0)
            right = free ^ named == full and not free & named
            yield [] if right else [f"slab {slab}: free cells and named cells do not add up to all cells"]
        if blocks != [self.used, self.pending]:
            yield [f"counted {blocks} blocks used and pending, expected {[self.used, self.pending]}"]
        yield self._check_counts()

    def _check_counts(self) -> list[str]:
        free: dict[int, int] = {}
        stocked = idle = 0
        for slab, size in enumerate(self._size):
            if slab in self._parked:
                idle += 0 if slab in self._held else self._free_in(slab)
                continue
            if size:
                free[size] = free.get(size, 0) + self._mask[slab].bit_count()
            else:
                stocked += 1
        wrong = [
            f"class of {size} blocks counts {kind.free} free cells, has {free.get(size, 0)}"
            for size, kind in self._classes.items()
            if kind.free != free.get(size, 0)
        ]
        if stocked != self._stocked:
            wrong.append(f"{self._stocked} slabs counted in stock, {stocked} are there")
        if idle != self._idle:
            wrong.append(f"{self._idle} free blocks counted in parked slabs, {idle} are there")
        return wrong
