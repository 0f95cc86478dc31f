"""Leaves by kind, and how soon each kind is used again, learnt from uses and from what was evicted too early."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from itertools import compress
from math import inf
from operator import ne
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np

from kvtier.policy.ages import EARLY, FADE, FAITH, STEPS, Waits
from kvtier.policy.ghosts import Ghosts
from kvtier.policy.loops import PATIENCE, Loops
from kvtier.policy.uses import Counting, Uses

SIZES: Final = (2, 4, 16, 64)
"""Nodes of fewer pages than the first, the second, ... are of different kinds."""
KINDS: Final = 15
_TAIL: Final = 0
_KEPT: Final = KINDS - 1
"""Not a kind: the lane of what stays while a loop goes on, of which nothing is heard."""
_LANES: Final = range(KINDS)
HEARD: Final = 5 * 1024
"""Numbers of waits that are learnt from at once, at most."""
FINE: Final = 64
"""Heads are compared by their ages at most this part of a turnover ago: what a lane is worth is looked up once."""
LAST: Final = 1e300
"""Worth more than all else that there is."""


class Stand(NamedTuple):
    """What a leaf is, its kind as a node; one object serves all that are alike."""

    kind: int
    tail: int
    """1: the last of its pages is the one that the first request for them ended in."""
    kept: bool
    """Whether it stays while a loop goes on."""


STANDS: Final = tuple(
    tuple(tuple(Stand(kind, tail, kept) for kind in _LANES) for tail in (0, 1)) for kept in (False, True)
)


class Gone(NamedTuple):
    """A page that was evicted."""

    kind: int
    since: float
    """Its age when it could go, in turnovers."""
    mark: float
    """Where the clock stood at its last use."""
    often: int
    """How often it had been used."""
    votes: int
    """What `votes` said when it went."""
    clock: float
    """Where the clock stood then."""


class ByKind(Counting):
    """Leaves stand in a lane for each kind, least recently used first; ages are in turnovers of the tier.

    A kind's chance to be used in the next moment is taken to fall with age as everything's does, times a multiple of
    its own: uses seen, those of evicted pages included, over what the ages waited through let expect. With a power of
    0 the victim is the least recently used, with higher ones kinds that are used more are kept longer.
    """

    lanes = KINDS
    powers: ClassVar[tuple[float, ...]] = (0.5,)

    def __init__(self, tier: int) -> None:
        super().__init__(tier)
        self.clock = 0.0
        self.heat = [1.0] * KINDS
        """Of each kind: its multiple."""
        self._scales = [[-1.0] * len(self.powers) for _ in range(KINDS)]
        """By kind and power: what an age is multiplied by before it is compared with those of others."""
        self._next = 0.0
        self._hits = np.zeros(KINDS)
        self._expected = np.zeros(KINDS)
        self._heard = array("d")
        self._ghosts: Ghosts[Gone] = Ghosts()
        self._loops = Loops()
        self._looked = 0.0
        """Where the clock stood when all heads were looked at."""
        self._marks: list[float] = []
        self._values: list[list[float]] = []

    def mark(self) -> float:
        """Copies that the tier has taken in."""
        return self.clock

    def age(self, mark: float) -> float:
        """Turnovers of the tier since then."""
        return (self.clock - mark) / max(self.size, 64)

    def kind(self, node: Any, count: int) -> int:
        """1-10: used once (of how many pages; after what few or many go on from); 11-13: used more often."""
        if count > 1 or node.parent is None:
            return 11 if count == 2 else 12 if count < 5 else 13
        many: bool = node.parent.parent is None or len(node.parent.children or ()) > 2
        return 1 + bisect_right(SIZES, node.pages) + (1 + len(SIZES)) * many

    # -- learning ----------------------------------------------------------------------------------------------

    def votes(self) -> int:
        """Noted with each page that is evicted: who chose it."""
        return 0

    def regret(self, votes: int, pages: int, after: float) -> None:
        """Pages were evicted too early, and asked for so many turnovers after that."""

    def _hear(self, kind: int, since: float, mark: float, pages: int, used: bool) -> None:
        """Pages waited, and were used or given up."""
        self._heard.extend((kind, since, (self.clock - mark) / max(self.size, 64), pages, used))
        if len(self._heard) >= HEARD:
            self._study()

    def _study(self) -> None:
        heard, self._heard = self._heard, array("d")
        if heard:
            self.study(Waits.of(heard))

    def study(self, waits: Waits) -> None:
        """Take note of some waits."""
        passed = np.log((np.maximum(waits.until, waits.since) + EARLY) / (waits.since + EARLY))
        self._expected += np.bincount(waits.kind, waits.pages * passed, KINDS)
        self._hits += np.bincount(waits.kind, waits.pages * waits.used, KINDS)

    def learn(self) -> None:
        """Take what was seen for what is to come."""
        rate = (self._hits.sum() + 1.0) / (self._expected.sum() + 1.0)
        faith = FAITH * self.size + 1.0
        self.heat = ((self._hits / rate + faith) / (self._expected + faith)).tolist()
        self._hits *= FADE
        self._expected *= FADE
        self._scales = [[-(heat**-power) for power in self.powers] for heat in self.heat]

    # -- what happens ------------------------------------------------------------------------------------------

    def gain(self, index: Any, node: Any, lo: int, hi: int, copies: int) -> None:
        """New pages, or ones that were evicted too early."""
        new = self.note(node) is None
        super().gain(index, node, lo, hi, copies)
        self.clock += copies
        self._ghosts.resize(self.size)
        known = self._ghosts.take(index, node, lo, hi)
        for gone in known:
            self._hear(gone.kind, gone.since, gone.mark, self._ghosts.scale, True)
            after = self.age(gone.clock)
            self.regret(gone.votes, self._ghosts.scale, after)
            if gone.often > 1:
                self._loops.back(self._ghosts.scale, after)
        if new:
            uses: Uses = node.notes[self.tier]
            if known and 2 * len(known) * self._ghosts.scale >= hi - lo:
                uses.count += max(gone.often for gone in known)
            uses.extra = STANDS[False][1][self.kind(node, uses.count)]
        if self.clock >= self._next:
            self._next = self.clock + max(64, self.size / STEPS)
            self._study()
            self.learn()
            self._loops.learn(self.size)
            self._marks = []

    def found(self, index: Any, node: Any, lo: int, hi: int, copies: int) -> None:
        """Count them; a note is made when somebody asks."""
        del index, node, lo, hi
        self.size += copies
        self.clock += copies

    def lose(self, index: Any, node: Any, lo: int, hi: int, copies: int) -> None:
        """What goes is waited for a while longer."""
        self.size -= copies
        uses = self.note(node)
        if uses is None or uses.extra is None:
            return
        kind, tail, kept = uses.extra
        if uses.count > 1:
            self._loops.went(copies)
        if kept:
            self._loops.left(copies)
        last = hi - tail
        if tail:
            if names := self._ghosts.sampled(index, node, last, hi):
                self._forget(self._ghosts.add(names, self._gone(uses, _TAIL)))
            uses.extra = STANDS[kept][0][kind]
        if lo < last and (names := self._ghosts.sampled(index, node, lo, last)):
            self._forget(self._ghosts.add(names, self._gone(uses, kind)))

    def _gone(self, uses: Uses, kind: int) -> Gone:
        return Gone(kind, uses.since, uses.mark, uses.count, self.votes(), self.clock)

    def _forget(self, gone: list[Gone]) -> None:
        """Nobody came for these; neighbours went together and have one mark."""
        at, scale = 0, self._ghosts.scale
        while at < len(gone):
            first, start = gone[at], at
            while at < len(gone) and gone[at] is first:
                at += 1
            self._hear(first.kind, first.since, first.mark, (at - start) * scale, False)

    def use(self, node: Any, now: float) -> None:
        """A leaf's wait is over; what is above it is no candidate while it lasts."""
        uses = self.uses(node)
        if uses.extra is not None and node.tier_leaf(self.tier):
            kind, tail, _ = uses.extra
            if tail:
                self._hear(_TAIL, uses.since, uses.mark, 1, True)
            if node.count[self.tier] > tail:
                self._hear(kind, uses.since, uses.mark, node.count[self.tier] - tail, True)
        super().use(node, now)
        self._stand(node, uses)
        uses.since = 0.0

    def _stand(self, node: Any, uses: Uses) -> None:
        """It was used more often by now; what stays does so while the loop goes on."""
        kept = self._stays(node)
        if kept and not self._loops.on:
            self._loops.left(node.count[self.tier])
        uses.extra = STANDS[kept and self._loops.on][0][self.kind(node, uses.count)]

    def fall(self, node: Any, parent: Any) -> None:
        """The parent may be a leaf from now on."""
        super().fall(node, parent)
        up = self.note(parent)
        if up is not None:
            self._stand(parent, up)
            up.since = self.age(up.mark)

    def split(self, upper: Any, lower: Any) -> None:
        """Both halves were used alike; the page that a request ended in stays below."""
        super().split(upper, lower)
        uses = self.note(upper)
        if uses is not None and uses.extra is not None:
            uses.extra = STANDS[uses.extra.kept][0][uses.extra.kind]

    def join(self, upper: Any, lower: Any) -> None:
        """The upper node's pages stay where the lower one's do."""
        super().join(upper, lower)
        self._loops.left(upper.count[self.tier] * (self._stays(upper) - self._stays(lower)))

    def _stays(self, node: Any) -> bool:
        uses = self.note(node)
        return uses is not None and uses.extra is not None and uses.extra.kept

    # -- what goes ---------------------------------------------------------------------------------------------

    def lane(self, node: Any) -> int:
        """Its kind; that page goes by itself, as a kind of its own."""
        uses = self.note(node)
        if uses is None:  # it was found; whatever stands in a lane has a note
            uses = Uses(self.clock, 1, 1)
            uses.extra = STANDS[False][1][self.kind(node, 1)]
            self.write(node, uses)
        stand: Stand | None = uses.extra
        if stand is None:
            return 1
        return _KEPT if stand.kept else _TAIL if stand.tail else stand.kind

    def spare(self, node: Any) -> bool:
        """In a loop a part stays of what came back before."""
        uses = self.note(node)
        if uses is None or uses.extra is None or uses.extra.kept or uses.count < 2:
            return False
        if not self._loops.keep(node.count[self.tier], self.size):
            return False
        uses.extra = STANDS[True][uses.extra.tail][uses.extra.kind]
        return True

    def share(self, node: Any) -> int:
        """That page alone, or a run."""
        uses = self.note(node)
        return 1 if uses is not None and uses.extra is not None and uses.extra.tail else super().share(node)

    def values(self, lane: int, age: float) -> list[float]:
        """By rule, what a head of that age is worth: the lowest goes first. For each power, how long it has waited."""
        wait = age + EARLY
        return [wait * scale for scale in self._scales[lane]]

    def chosen(self, heads: Sequence[Any | None]) -> list[int]:
        """The lane that each rule takes."""
        tier, clock = self.tier, self.clock
        marks = [head.notes[tier].mark if head else inf for head in heads]
        if clock - self._looked > self.size / FINE or not self._marks:
            self._looked = clock
            self._marks = [-1.0] * KINDS
            self._values = [[inf] * KINDS for _ in self.values(0, 0.0)]
        if marks != self._marks:
            self._look(marks)
        return [each.index(min(each)) for each in self._values]

    def _look(self, marks: list[float]) -> None:
        """See what the heads that are new are worth."""
        size = max(self.size, 64)
        for lane in compress(_LANES, map(ne, marks, self._marks)):
            mark = marks[lane]
            age = max(0.0, (self._looked - mark) / size)
            if lane == _KEPT and self._loops.on:
                values = [LAST if age < PATIENCE else -inf] * len(self._values)
            else:
                values = self.values(lane, age)
            for rule, value in zip(self._values, values, strict=True):
                rule[lane] = value if mark < inf else inf
        self._marks = marks
