"""The ledger of runs and cells: trimming, freeing and restoring in any order keep every cell accounted for."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtier.identity import GroupSpec
from kvtier.tiers.cells import BLOCK, Cells
from kvtier.tiers.disk import CacheRecord, Item
from kvtier.tiers.ledger import Ledger
from kvtier.tiers.runrecord import encode_run, parse
from kvtier.types import Kind
from tests.diskkit import spec

SLAB = 32 * BLOCK
CAPACITY = 10 * SLAB
GROUPS = (GroupSpec(Kind.FULL, 1, 1, 3001), GroupSpec(Kind.STATE, 1, 1, 9 * BLOCK))
RECORD = CacheRecord(b"c" * 32, b"b" * 32, "s", 0, spec(*GROUPS))


class Model(RuleBasedStateMachine):
    """A ledger beside the catalogue that its changes would make."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(Cells(CAPACITY, SLAB), {}, 1)
        self.cache = self.ledger.add_cache(RECORD)
        self.records: dict[bytes, bytes] = {}
        self.masks: dict[bytes, bytes] = {}
        self.live: dict[int, set[int]] = {}
        self.writing: list[tuple] = []
        self.freeing: list = []

    @rule(pages=st.integers(1, 12), data=st.data())
    def begin(self, pages: int, data) -> None:
        have = data.draw(st.sets(st.tuples(st.integers(0, pages - 1), st.integers(0, 1)), min_size=1))
        items = [Item(page, group, page * 2 + group, []) for page, group in sorted(have)]
        begun = self.ledger.begin(self.cache, pages, items)
        if begun is None:
            assert self.ledger.cells.total - self.ledger.cells.used - self.ledger.cells.pending < CAPACITY // BLOCK
            return
        run, placed = begun
        run.keys, run.chains, run.depth = bytes(16 * pages), bytes(16 * pages), run.id % 5
        self.writing.append((run, encode_run(run, placed), have))

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), ok=st.booleans(), doubtful=st.booleans())
    def settle(self, data, ok: bool, doubtful: bool) -> None:
        run, value, have = self.writing.pop(data.draw(st.integers(0, len(self.writing) - 1)))
        if not ok:
            self.ledger.abandon(run, doubtful=doubtful)
            return
        self.ledger.publish(run)
        self.records[run.key] = value
        self.live[run.id] = {page for page, _ in have}
        for page in range(run.pages):
            for group in range(2):
                place = self.ledger.find(run.id << 6 | page, group)
                assert (place is not None) == ((page, group) in have)
                assert place is None or place.sum == page * 2 + group

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data) -> None:
        run = data.draw(st.sampled_from(sorted(self.live)))
        gone = data.draw(st.sets(st.sampled_from(sorted(self.live[run])), min_size=1))
        freed = self.ledger.free([(run, sum(1 << page for page in gone))])
        self.live[run] -= gone
        if not self.live[run]:
            del self.live[run]
        assert all(self.ledger.find(run << 6 | page, group) is None for page in gone for group in range(2))
        self.freeing.append(freed)

    @precondition(lambda self: self.freeing)
    @rule()
    def freed(self) -> None:
        """Commits come in the order they were asked for."""
        freed = self.freeing.pop(0)
        for db, key, value in freed.changes:
            table = self.records if db == b"runs" else self.masks
            if value is None:
                table.pop(key, None)
            else:
                table[key] = value
        self.ledger.freed(freed.ticket)
        self.ledger.settle_doubts()

    @precondition(lambda self: not self.writing and not self.freeing)
    @rule()
    def restart(self) -> None:
        """What the catalogue says gives the same ledger."""
        self.ledger.settle_doubts()
        again = Ledger(Cells(CAPACITY, SLAB), {self.cache: RECORD}, 2)
        for key in sorted(self.records):
            assert again.restore(key, parse(key, self.records[key]), self.masks.get(key)) is not None
        again.cells.loaded()
        assert set(again.runs) == set(self.ledger.runs)
        assert again.cells.used == self.ledger.cells.used
        again.next_run = self.ledger.next_run
        self.ledger = again

    @invariant()
    def it_checks(self) -> None:
        assert self.ledger.check() == []


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
