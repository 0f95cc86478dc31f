"""Leaves by kind, and how soon each kind is used again, learnt from uses and from what was evicted too early."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import groupby
from math import log
from typing import Any, ClassVar, Final, NamedTuple

from kvtier.policy.ages import EARLY, FADE, FAITH, STEPS
from kvtier.policy.ghosts import Ghosts
from kvtier.policy.uses import Counting, Uses

SIZES: Final = (2, 4, 16, 64)
"""Nodes of fewer pages than the first, the second, ... are of different kinds."""
KINDS: Final = 14
_TAIL: Final = 0


class Wait(NamedTuple):
    """Pages of a kind, from when they could go on."""

    kind: int
    since: float
    """Their age then, in turnovers."""
    mark: float
    """Where the clock stood at their last use."""
    often: int
    """How often they had been used."""
    tail: int
    """1: the last of them is the page that the first request for them ended in."""
    votes: int = 0
    """What `votes` said when they were evicted."""


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
        self._scales = [[1.0] * KINDS for _ in self.powers]
        self._next = 0.0
        self._hits = [0.0] * KINDS
        self._expected = [0.0] * KINDS
        self._ghosts: Ghosts[Wait] = Ghosts()

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

    def regret(self, wait: Wait, pages: int) -> None:
        """Pages were evicted too early."""

    def waited(self, wait: Wait, pages: float, *, used: bool) -> None:
        """Pages waited, and were used or given up."""
        passed = log((self.age(wait.mark) + EARLY) / (wait.since + EARLY)) if self.clock > wait.mark else 0.0
        self._expected[wait.kind] += pages * max(0.0, passed)
        self._hits[wait.kind] += pages * used

    def learn(self) -> None:
        """Take what was seen for what is to come."""
        rate = (sum(self._hits) + 1.0) / (sum(self._expected) + 1.0)
        faith = FAITH * self.size + 1.0
        for kind, hits in enumerate(self._hits):
            self.heat[kind] = (hits / rate + faith) / (self._expected[kind] + faith)
            self._hits[kind] *= FADE
            self._expected[kind] *= FADE
        self._scales = [[heat**power for heat in self.heat] for power in self.powers]

    # -- what happens ------------------------------------------------------------------------------------------

    def gain(self, index: Any, node: Any, lo: int, hi: int, copies: int) -> None:
        """New pages, or ones that were evicted too early."""
        new = self.note(node) is None
        super().gain(index, node, lo, hi, copies)
        self.clock += copies
        self._ghosts.resize(self.size)
        known = self._ghosts.take(index, node, lo, hi)
        for wait in known:
            self.waited(wait, self._ghosts.scale, used=True)
            self.regret(wait, self._ghosts.scale)
        if new:
            uses: Uses = node.notes[self.tier]
            if known and 2 * len(known) * self._ghosts.scale >= hi - lo:
                uses.count += max(wait.often for wait in known)
            uses.extra = Wait(self.kind(node, uses.count), 0.0, uses.mark, uses.count, 1)
        if self.clock >= self._next:
            self._next = self.clock + max(64, self.size / STEPS)
            self.learn()

    def lose(self, index: Any, node: Any, lo: int, hi: int, copies: int) -> None:
        """What goes is waited for a while longer."""
        super().lose(index, node, lo, hi, copies)
        uses = self.note(node)
        if uses is None or uses.extra is None:
            return
        kind, since, mark, often, tail, _ = uses.extra
        votes = self.votes()
        forgotten = []
        if tail:
            forgotten += self._ghosts.add(index, node, hi - 1, hi, Wait(_TAIL, since, mark, often, 0, votes))
            uses.extra = Wait(kind, since, mark, often, 0)
        if lo < hi - tail:
            forgotten += self._ghosts.add(index, node, lo, hi - tail, Wait(kind, since, mark, often, 0, votes))
        for _, same in groupby(forgotten, id):  # neighbours went together and have one mark
            marks = list(same)
            self.waited(marks[0], len(marks) * self._ghosts.scale, used=False)

    def use(self, node: Any, now: float) -> None:
        """A leaf's wait is over; what is above it is no candidate while it lasts."""
        uses = self.uses(node)
        if uses.extra is not None and node.tier_leaf(self.tier):
            wait: Wait = uses.extra
            if wait.tail:
                self.waited(wait._replace(kind=_TAIL), 1, used=True)
            if node.count[self.tier] > wait.tail:
                self.waited(wait, node.count[self.tier] - wait.tail, used=True)
        super().use(node, now)
        uses.extra = Wait(self.kind(node, uses.count), 0.0, uses.mark, uses.count, 0)

    def fall(self, node: Any, parent: Any) -> None:
        """The parent may be a leaf from now on."""
        super().fall(node, parent)
        up = self.note(parent)
        if up is not None:
            up.extra = Wait(self.kind(parent, up.count), self.age(up.mark), up.mark, up.count, 0)

    def split(self, upper: Any, lower: Any) -> None:
        """Both halves were used alike; the page that a request ended in stays below."""
        super().split(upper, lower)
        uses = self.note(upper)
        if uses is not None and uses.extra is not None:
            uses.extra = uses.extra._replace(tail=0)

    # -- what goes ---------------------------------------------------------------------------------------------

    def lane(self, node: Any) -> int:
        """Its kind; that page goes by itself, as a kind of its own."""
        uses = self.note(node)
        if uses is None or uses.extra is None:
            return 1
        wait: Wait = uses.extra
        return _TAIL if wait.tail else wait.kind

    def share(self, node: Any) -> int:
        """That page alone, or a run."""
        uses = self.note(node)
        return 1 if uses is not None and uses.extra is not None and uses.extra.tail else super().share(node)

    def coldest(self, heads: Sequence[Any | None]) -> list[int]:
        """For each power, the lane whose head has waited longest for its kind."""
        waits = []
        for lane, head in enumerate(heads):
            if head is not None:
                uses = self.note(head)
                waits.append((self.age(uses.mark if uses is not None else 0.0) + EARLY, lane))
        return [max([(wait / scale[lane], lane) for wait, lane in waits])[1] for scale in self._scales]
