"""What lies where on disk: caches, runs and the state of every cell. Belongs to one thread and touches no file."""

from __future__ import annotations

import itertools
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from kvtier.tiers.cells import BLOCK, Cells, Layout, Span
from kvtier.tiers.layouts import packed_group, packed_layouts
from kvtier.tiers.move import Move
from kvtier.tiers.records import (
    PAGE_BITS,
    PAGE_MASK,
    CacheRecord,
    Change,
    Damaged,
    Item,
    Placed,
    Run,
    decode_number,
    encode_number,
    place,
    run_number,
    spans_of,
)
from kvtier.tiers.runrecord import decode_run, settle
from kvtier.types import Changed, Code, KvtierError


class Place(NamedTuple):
    """Where one item lies and the sum its bytes must have."""

    cells: Sequence[int]
    cell_bytes: int
    sum: int
    packed: bool = False


class Freed(NamedTuple):
    """A free on its way into the catalogue: the changes, and the ticket under which its cells wait."""

    ticket: int
    changes: list[Change]


class Ledger:
    """The runs in memory and the cells they hold: each cell is free, used by one run, or pending."""

    def __init__(self, cells: Cells, caches: dict[int, CacheRecord], next_cache: int) -> None:
        slab_bytes = cells.slab_blocks * BLOCK
        self.cells = cells
        self.caches = caches
        self.next_cache = next_cache
        self.next_run = 1
        self.runs: dict[int, Run] = {}
        self.of_cache: dict[int, set[int]] = {number: set() for number in caches}
        self._layouts = {number: record.layouts(slab_bytes) for number, record in caches.items()}
        self._writing: dict[int, list[Span]] = {}  # by run: cells of runs that are not durable yet
        self._coming: Counter[int] = Counter()  # by cache: how many of those
        self._pending: dict[int, list[Span]] = {}  # by ticket: cells whose free is not durable yet
        self._moving: dict[int, list[Span]] = {}  # by ticket: cells that something is being copied to
        self._doubtful: list[Span] = []  # pending too: cells that a failed commit may have named
        self._ticket = 0

    # -- caches -------------------------------------------------------------------------------------------------

    def add_cache(self, record: CacheRecord) -> int:
        """Give a cache a number that no other ever had."""
        number, self.next_cache = self.next_cache, self.next_cache + 1
        self.caches[number] = record
        self.of_cache[number] = set()
        self._layouts[number] = record.layouts(self.cells.slab_blocks * BLOCK)
        return number

    def drop_cache(self, number: int) -> None:
        """The cache takes no more runs; those it has are still to be freed. Raises unknown."""
        self.layouts(number)
        del self.caches[number], self._layouts[number]
        self._forget(number)

    @property
    def dropping(self) -> bool:
        """Whether a cache was dropped of which not all is freed."""
        return not self.of_cache.keys() <= self.caches.keys()

    def _forget(self, number: int) -> None:
        """Keep nothing of a cache that was dropped, once none of its runs is left and none is being written."""
        if number not in self.caches and not self.of_cache.get(number) and not self._coming[number]:
            self.of_cache.pop(number, None)
            del self._coming[number]

    def layouts(self, cache: int) -> tuple[Layout, ...]:
        """Cells of one item, per group; raises unknown."""
        if cache not in self.caches:
            raise KvtierError(Code.UNKNOWN, f"no cache {cache} on disk", "cache")
        return self._layouts[cache]

    # -- writing ------------------------------------------------------------------------------------------------

    def begin(self, cache: int, pages: int, items: Sequence[Item]) -> tuple[Run, list[Placed]] | None:
        """A new run with cells for all its items; None (and no change) where there is no room."""
        layouts = self.layouts(cache)
        placed: list[Placed] = []
        for group, layout in enumerate(layouts):
            own = sorted((item for item in items if item.group == group), key=lambda item: item.page)
            spans = self.cells.take(layout.blocks, len(own) * layout.parts)
            if spans is None:
                for part in placed:
                    self.cells.retire(part.spans)
                    self.cells.release(part.spans)
                return None
            present = sum(1 << item.page for item in own)
            placed.append(Placed(present, spans, array("Q", [item.sum for item in own])))
        run = Run.new(self.next_run, cache, pages, layouts)
        self.next_run += 1
        place(run, placed)
        self._writing[run.id] = [span for part in placed for span in part.spans]
        self._coming[cache] += 1
        return run, placed

    def repack(self, run: Run, sizes: dict[tuple[int, int], int]) -> list[Placed]:
        """Give packed items, of so many bytes by (page, group), smaller cells; whose there are none keep theirs.

        The cells that they leave were never named by anything and are free at once.
        """
        full = run.layouts
        run.layouts = packed_layouts(full)
        filed = {item: packed_group(run.layouts, item[1], size) for item, size in sizes.items()}
        groups: list[dict[int, list[int]]] = [{} for _ in run.layouts]
        for at, (parts, layout) in enumerate(zip(run.parts, full, strict=True)):
            for page in range(run.pages):
                if parts[page * layout.parts] >= 0:
                    groups[filed.get((page, at), at)][page] = list(
                        parts[page * layout.parts : (page + 1) * layout.parts]
                    )
        for at in range(run.groups, len(groups)):
            self._shrink(run, at, groups)
        sums = run.sums
        placed = [
            Placed(
                sum(1 << page for page in own),
                spans_of([cell for _, cells in sorted(own.items()) for cell in cells], layout),
                array("Q", [sums[at % run.groups][page] for page in sorted(own)]),
            )
            for at, (own, layout) in enumerate(zip(groups, run.layouts, strict=True))
        ]
        place(run, placed)
        self._writing[run.id] = [span for part in placed for span in part.spans]
        return placed

    def _shrink(self, run: Run, at: int, groups: list[dict[int, list[int]]]) -> None:
        """Swap the cells of the items filed under a packed group for cells of its size, or file them back."""
        own, group = groups[at], at % run.groups
        spans = self.cells.take(run.layouts[at].blocks, len(own)) if own else None
        if spans is None:
            groups[group] |= own
            own.clear()
            return
        left = spans_of([cell for cells in own.values() for cell in cells], run.layouts[group])
        self.cells.retire(left)
        self.cells.release(left)
        fresh = (cell for span in spans for cell in span.cell_list())
        for page in sorted(own):
            own[page] = [next(fresh)]

    def publish(self, run: Run) -> None:
        """The run is durable."""
        del self._writing[run.id]
        self._coming[run.cache] -= 1
        self.runs[run.id] = run
        self.of_cache[run.cache].add(run.id)

    def abandon(self, run: Run, *, doubtful: bool) -> None:
        """The run failed: its cells are free again, in doubt only after the next commit that works."""
        self._give_up(self._writing.pop(run.id), doubtful=doubtful)
        self._coming[run.cache] -= 1
        self._forget(run.cache)

    def _give_up(self, spans: list[Span], *, doubtful: bool) -> None:
        self.cells.retire(spans)
        if doubtful:
            self._doubtful += spans
        else:
            self.cells.release(spans)

    def settle_doubts(self) -> None:
        """A commit has worked: the catalogue certainly does not name what the failed ones before it did."""
        spans, self._doubtful = self._doubtful, []
        self.cells.release(spans)

    # -- freeing ------------------------------------------------------------------------------------------------

    def free(self, masks: Iterable[tuple[int, int]]) -> Freed | None:
        """Take pages (run, mask) out of their runs; None where none of them was stored."""
        spans: list[Span] = []
        changes: list[Change] = []
        for number, mask in masks:
            run = self.runs.get(number)
            if run is None or not (gone := mask & run.live):
                continue
            spans += run.spans(gone)
            run.live &= ~gone
            if run.live:
                run.trimmed = True
                changes.append(Change(b"live", run.key, encode_number(run.key, run.live)))
            else:
                self._delete(run, changes)
        if not changes:
            return None
        return Freed(self._retire(spans), changes)

    def _retire(self, spans: list[Span]) -> int:
        self.cells.retire(spans)
        ticket = self._take_ticket()
        self._pending[ticket] = spans
        return ticket

    def _take_ticket(self) -> int:
        self._ticket += 1
        return self._ticket

    def _delete(self, run: Run, changes: list[Change]) -> None:
        del self.runs[run.id]
        self.of_cache[run.cache].discard(run.id)
        self._forget(run.cache)
        changes.append(Change(b"runs", run.key, None))
        if run.trimmed:
            changes.append(Change(b"live", run.key, None))

    def freed(self, ticket: int) -> None:
        """The free is durable: its cells may be used again."""
        self.cells.release(self._pending.pop(ticket))

    # -- moving -------------------------------------------------------------------------------------------------

    def short(self, cache: int, items: Sequence[Item]) -> set[int]:
        """Sizes of cells, in blocks, of which these items need more than could be had."""
        need: Counter[int] = Counter()
        for item in items:
            layout = self.layouts(cache)[item.group]
            need[layout.blocks] += layout.parts
        return {size for size, count in need.items() if count > self.cells.room(size)} or {max(need)}

    def plan_move(self, run: Run, slab: int) -> Move | None:
        """New cells for what a run has in this slab; None where it has nothing there, or there is no room."""
        size, low = self.cells.size_in(slab), slab * self.cells.slab_blocks
        high = low + self.cells.slab_blocks
        places = [
            (group, at)
            for group, (parts, layout) in enumerate(zip(run.parts, run.layouts, strict=True))
            if layout.blocks == size
            for at, cell in enumerate(parts)
            if low <= cell < high and run.live >> at // layout.parts & 1
        ]
        spans = self.cells.take(size, len(places)) if places else None
        if spans is None:
            return None
        ticket = self._take_ticket()
        self._moving[ticket] = spans
        old = [run.parts[group][at] for group, at in places]
        return Move(ticket, run, places, old, [cell for span in spans for cell in span.cell_list()], size)

    def settle_move(self, move: Move) -> tuple[int, int]:
        """The move is durable and the run lies in its new cells.

        Two tickets for `freed`: of the cells it left, which reads begun before may still use, and of new cells
        whose pages were freed meanwhile, which the catalogue names until that is durable.
        """
        self._moving.pop(move.ticket)
        run = move.run
        parts = [array("q", each) for each in run.parts]
        cells = parts if run.cells is run.parts else [array("q", each) for each in run.cells]
        left: list[int] = []
        late: list[int] = []
        for (group, at), old, new in zip(move.places, move.old, move.new, strict=True):
            page, part = divmod(at, run.layouts[group].parts)
            if not run.live >> page & 1:
                late.append(new)
                continue
            left.append(old)
            parts[group][at] = new
            if not part:
                cells[group % run.groups][page] = new
        run.parts, run.cells = tuple(parts), tuple(cells)
        layout = Layout(move.size, 1, self.cells.slab_blocks)
        return self._retire(spans_of(left, layout)), self._retire(spans_of(late, layout))

    def abandon_move(self, move: Move, *, doubtful: bool) -> None:
        """The move failed: the run stays where it is."""
        self._give_up(self._moving.pop(move.ticket), doubtful=doubtful)

    # -- loading ------------------------------------------------------------------------------------------------

    def restore(
        self,
        key: bytes,
        run: Run | None,
        mask: bytes | None,
        cache: int = 0,
        parent: bytes = b"",
        first: bytes = b"",
    ) -> Run | None:
        """Let a parsed run be as it was; None where its cache is gone. Raises Damaged for one that cannot be right.

        With a cache given: None, too, where it is of another one, or below another parent, or begins with another page.
        """
        if (number := run_number(key) if run is None else run.id) >= self.next_run:
            self.next_run = number + 1
        if run is None:
            raise Damaged
        layouts = self._layouts.get(run.cache)
        if layouts is None:
            return None
        if cache and not (run.cache == cache and run.parent == parent and run.first_key(len(first)) == first):
            return None
        spans = settle(run, layouts)
        if mask is not None:
            run.live, run.trimmed = run.live & decode_number(key, mask), True
            spans = run.spans(run.live)
        if not run.live:
            raise Damaged
        for at, span in enumerate(spans):
            if not self.cells.mark(*span):
                for marked in spans[:at]:
                    self.cells.unmark(*marked)
                raise Damaged
        self.runs[number] = run
        self.of_cache[run.cache].add(number)
        return run

    def differs(self, key: bytes, value: bytes, mask: bytes | None) -> str:
        """How a record differs from the run in memory; '' where it does not. Raises Damaged."""
        run = self.runs.get(run_number(key))
        if run is None or run.key != key:
            return "is of no run"
        found = decode_run(key, value, run.layouts[: run.groups])
        if found.cache != run.cache:
            return "is of another cache"
        live = found.live if mask is None else decode_number(key, mask)
        if live != run.live or found.sums != run.sums:
            return "has other pages or sums"
        spread = [page for page in range(run.pages) if live >> page & 1]
        same = all(
            list(old[page * count : (page + 1) * count]) == list(new[page * count : (page + 1) * count])
            for old, new, (_, count, _) in zip(found.parts, run.parts, run.layouts, strict=True)
            for page in spread
        )
        return "" if same else "has other cells"

    # -- reading ------------------------------------------------------------------------------------------------

    def find(self, handle: int, group: int) -> Place | None:
        """Where an item lies; None where it is not stored. May be called from any thread."""
        run, page = self.runs.get(handle >> PAGE_BITS), handle & PAGE_MASK
        if run is None or not run.live >> page & 1:
            return None
        for at in range(group, len(run.layouts), run.groups):
            blocks, parts, _ = run.layouts[at]
            cells = run.parts[at][page * parts : page * parts + parts]
            if cells and cells[0] >= 0:
                return Place(cells, blocks * BLOCK, run.sums[group][page], packed=at >= run.groups)
        return None

    def check(self) -> list[str]:
        """Every disagreement between runs, cells and counts; empty when all is well."""
        return [line for step in self.checking() for line in step]

    def checking(self) -> Iterator[list[str]]:
        """The same in steps. Raises Changed as soon as something changed between two of them."""
        version = self._version()
        for step in itertools.chain(self.cells.checking(self._spans()), self._check_files()):
            yield step
            if self._version() != version:
                raise Changed

    def _version(self) -> tuple[int, ...]:
        """Differs whenever some cell or run has changed: run and ticket numbers are never given again."""
        counts = len(self.runs), len(self._writing), len(self._doubtful)
        return self.next_run, self.next_cache, self._ticket, *counts, self.cells.used, self.cells.pending

    def _spans(self) -> Iterator[tuple[int, Span]]:
        """Every span that is used (0) or pending (1)."""
        for run in list(self.runs.values()):
            yield from ((0, span) for span in run.spans(run.live))
        for spans in (*self._writing.values(), *self._moving.values()):
            yield from ((0, span) for span in spans)
        for spans in (*self._pending.values(), self._doubtful):
            yield from ((1, span) for span in spans)

    def _check_files(self) -> Iterator[list[str]]:
        """Runs under their numbers and in their caches."""
        for number, run in list(self.runs.items()):
            right = run.id == number and run.live and not run.live >> run.pages and number in self.of_cache[run.cache]
            yield [] if right else [f"run {number} is not what it is filed as"]
        if sum(map(len, self.of_cache.values())) != len(self.runs):
            yield ["runs by cache and runs differ"]
