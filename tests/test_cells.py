"""The cell allocator against a set of blocks, and the layout of items."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtier.tiers.cells import BLOCK, Cells, Span, layout_of

SLAB = 32 * BLOCK
SLABS = 6
SIZES = (1, 2, 3, 5)


def blocks(span: Span) -> set[int]:
    return set(range(span.first, span.first + span.total))


def apart_of(cells: Cells, slab: int) -> set[int]:
    """Blocks of a slab's free cells."""
    whole = SLAB // BLOCK
    size = cells.size_in(slab)
    end = slab * whole + (whole // size * size if size else whole)
    return {at for first, n in cells.gaps(slab) for at in range(first, first + n) if at < end}


class Model(RuleBasedStateMachine):
    """Every block is in exactly one of: taken by someone, waiting for its free, free."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = Cells(SLABS * SLAB, SLAB)
        self.used: list[tuple[int, list[Span]]] = []
        self.pending: list[list[Span]] = []
        self.parked: set[int] = set()
        self.held: set[int] = set()

    @rule(size=st.sampled_from(SIZES), count=st.integers(0, 40))
    def take(self, size: int, count: int) -> None:
        room = self.cells.room(size)
        spans = self.cells.take(size, count)
        assert (spans is None) == (count > room)
        if spans:
            assert sum(span.cells for span in spans) == count
            assert all(span.blocks == size for span in spans)
            assert not (self.parked | self.held) & {span.first // (SLAB // BLOCK) for span in spans}
            self.used.append((size, spans))

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def retire(self, data) -> None:
        at = data.draw(st.integers(0, len(self.used) - 1))
        _, spans = self.used.pop(at)
        self.cells.retire(spans)
        self.pending.append(spans)

    @precondition(lambda self: self.pending)
    @rule(data=st.data())
    def release(self, data) -> None:
        self.cells.release(self.pending.pop(data.draw(st.integers(0, len(self.pending) - 1))))

    @rule(slab=st.integers(0, SLABS - 1))
    def hold(self, slab: int) -> None:
        """Nothing is taken from a held slab, not even after unpark; one that is parked may be held, and stays so."""
        assert self.cells.hold(slab) == (slab not in self.held)
        self.held.add(slab)

    @precondition(lambda self: self.held)
    @rule()
    def let_go(self) -> None:
        self.cells.let_go(self.held.pop())

    @rule(slab=st.integers(0, SLABS - 1))
    def park(self, slab: int) -> None:
        self.cells.park(slab)
        self.parked.add(slab)

    @rule(slab=st.integers(0, SLABS - 1))
    def unpark(self, slab: int) -> None:
        self.cells.unpark(slab)
        self.parked.discard(slab)

    @precondition(lambda self: not self.pending and not self.parked and not self.held)
    @rule()
    def load_again(self) -> None:
        """A fresh allocator that is told what is used has exactly the same room."""
        again = Cells(SLABS * SLAB, SLAB)
        for _, spans in self.used:
            assert all(again.mark(*span) for span in spans)
        again.loaded()
        assert [again.room(size) for size in SIZES] == [self.cells.room(size) for size in SIZES]
        self.cells = again

    @invariant()
    def nothing_is_shared_or_lost(self) -> None:
        used = [span for _, spans in self.used for span in spans]
        pending = [span for spans in self.pending for span in spans]
        assert self.cells.check(used, pending) == []
        taken = [blocks(span) for span in used + pending]
        assert len(set().union(*taken)) == sum(map(len, taken))
        free = set()
        for slab in range(SLABS):
            gaps = [set(range(first, first + length)) for first, length in self.cells.gaps(slab)]
            free |= set().union(*gaps)
        assert not free & set().union(*taken)
        assert len(free) + sum(map(len, taken)) == SLABS * SLAB // BLOCK
        assert self.cells.used == sum(span.total for span in used)
        assert self.cells.pending == sum(span.total for span in pending)
        apart = self.parked - self.held
        assert self.cells.first_parked() == min(apart, default=-1)
        assert self.cells.parked == sum(len(apart_of(self.cells, slab)) for slab in apart)


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_an_empty_slab_serves_another_size():
    """No size strands space: when all its cells are free, a slab may be cut anew."""
    cells = Cells(2 * SLAB, SLAB)
    spans = cells.take(1, 64)
    assert cells.take(2, 1) is None
    cells.retire(spans)
    cells.release(spans)
    assert cells.room(2) == 32


def test_cells_of_one_call_lie_together():
    """A fresh slab is handed out in one span: one call to the disk."""
    cells = Cells(2 * SLAB, SLAB)
    assert cells.take(2, 16) == [Span(0, 2, 16)]
    assert cells.take(1, 5) == [Span(32, 1, 5)]


def test_low_addresses_are_filled_first():
    """First fit packs cells together, so that high slabs run empty."""
    cells = Cells(4 * SLAB, SLAB)
    spans = [cells.take(4, 8) for _ in range(4)]
    for part in (spans[2], spans[0]):
        cells.retire(part)
        cells.release(part)
    assert cells.take(4, 1) == [Span(0, 4, 1)]


def test_slabs_that_are_held_again_and_again_take_no_more_memory():
    """Each discard holds every slab once; what is free in them is found afterwards as before."""
    cells = Cells(SLABS * SLAB, SLAB)
    cells.take(2, 3)
    for _ in range(100):
        for slab in range(SLABS):
            assert cells.hold(slab)
        for slab in range(SLABS):
            cells.let_go(slab)
    assert len(cells._stock) + len(cells._classes[2].heap) <= 4 * SLABS + 2
    assert cells.take(2, 13) == [Span(6, 2, 13)]
    assert cells.take(1, 32 * (SLABS - 1)) is not None
    assert cells.room(1) == 0


@pytest.mark.parametrize(
    "span",
    [
        Span(-1, 1, 1),
        Span(1, 2, 1),
        Span(30, 2, 2),
        Span(SLABS * 32, 1, 1),
        Span(0, 33, 1),
        Span(0, 0, 1),
        Span(0, 1, 0),
    ],
)
def test_a_span_that_cannot_be_is_not_marked(span):
    """Records are not believed: outside the file, across slabs, off the grid, empty."""
    cells = Cells(SLABS * SLAB, SLAB)
    assert not cells.mark(*span)
    cells.loaded()
    assert cells.check([], []) == []


def test_cells_are_marked_once():
    """A second record that names the same cells, or cuts their slab differently, is refused."""
    cells = Cells(SLABS * SLAB, SLAB)
    assert cells.mark(0, 2, 4)
    assert not cells.mark(6, 2, 2)
    assert not cells.mark(16, 1, 1)
    cells.unmark(0, 2, 4)
    assert cells.mark(6, 2, 2)


def test_check_sees_what_is_wrong():
    """Lost cells, shared cells and wrong counts are each named."""
    cells = Cells(SLABS * SLAB, SLAB)
    (span,) = cells.take(1, 3)
    assert any("add up" in line for line in cells.check([], []))
    assert any("shares" in line for line in cells.check([span, span], []))
    assert any("counted" in line for line in cells.check([], [span]))
    assert any("another size" in line or "cells of" in line for line in cells.check([Span(64, 1, 1)], []))


@given(item=st.integers(1, 5 << 30), slab=st.sampled_from([1 << 16, 1 << 20, 64 << 20]))
def test_an_item_wastes_little(item, slab):
    """Cells hold the item, at most one block a part is padding, and sixteen cells fit any slab."""
    blocks_, parts, _ = layout_of(item, slab)
    assert blocks_ * parts * BLOCK >= item
    assert blocks_ * parts * BLOCK - item < (parts + 1) * BLOCK
    assert blocks_ * 16 <= max(slab // BLOCK, 16)
