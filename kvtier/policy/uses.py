"""What several policies note of a node: how often it was used, and the policy's own clock at the last use."""

from __future__ import annotations

from typing import Any

from kvtier.policy.base import Policy


class Uses:
    """Of a node: the mark of its last use, how often it was used, how many of those uses its parent has.

    `extra` and `since` are the policy's own. What a touch changes is kept here rather than in objects of its own: among
    many leaves each of these is a miss of the processor's caches.
    """

    __slots__ = ("count", "extra", "given", "mark", "since")

    def __init__(self, mark: float, count: int, given: int) -> None:
        self.mark = mark
        self.count = count
        self.given = given
        self.extra: Any = None
        self.since = 0.0


class Counting(Policy[Uses]):
    """Counts uses. Whoever used a node used all that is above it; each use is handed up once, when the node goes."""

    def mark(self) -> float:
        """What a use is marked with now: the time, unless a policy has another clock. It never falls."""
        return self.now

    def uses(self, node: Any) -> Uses:
        """What is noted of a node; a fresh note where there is none."""
        uses = self.note(node)
        if uses is None:
            uses = Uses(self.mark(), 0, 0)
            self.write(node, uses)
        return uses

    def gain(self, index: Any, node: Any, lo: int, hi: int, copies: int) -> None:
        """A new node counts as used once; that use was counted above it too."""
        super().gain(index, node, lo, hi, copies)
        if self.note(node) is None:
            self.write(node, Uses(self.mark(), 1, 1))

    def use(self, node: Any, now: float) -> None:
        """One more."""
        super().use(node, now)
        uses = self.uses(node)
        uses.count += 1
        uses.mark = self.mark()

    def fall(self, node: Any, parent: Any) -> None:
        """The parent was used whenever the node was."""
        uses = self.note(node)
        if uses is None:
            return
        up = self.note(parent)
        if up is None:
            up = Uses(uses.mark, 0, 0)
            self.write(parent, up)
        up.count += uses.count - uses.given
        up.mark = max(up.mark, uses.mark)
        uses.given = uses.count

    def split(self, upper: Any, lower: Any) -> None:
        """Both halves were used alike."""
        uses = self.note(lower)
        if uses is not None:
            above = Uses(uses.mark, uses.count, uses.given)
            above.extra, above.since = uses.extra, uses.since
            self.write(upper, above)
            uses.given = uses.count

    def join(self, upper: Any, lower: Any) -> None:
        """What was used as often as the upper node was, the lower one's uses among it."""
        Counting.fall(self, lower, upper)
        above = self.note(upper)
        if above is not None:
            uses = self.uses(lower)
            uses.count, uses.given = above.count, above.given


class Ageing(Counting):
    """Counting, with the highest rank that went so far for a clock: every eviction ages those that stay."""

    def __init__(self, tier: int) -> None:
        super().__init__(tier)
        self.age = 0.0

    def mark(self) -> float:
        """The age."""
        return self.age

    def lose(self, index: Any, node: Any, lo: int, hi: int, copies: int) -> None:
        """What goes sets the age."""
        super().lose(index, node, lo, hi, copies)
        if node.below[self.tier] == 0:
            self.age = max(self.age, self.rank(index, node))
