"""lfuda: the least often used goes first, and every eviction ages those that stay."""

from __future__ import annotations

from typing import Any

from kvtier.policy import Policy


class Uses:
    """Of a node: how often it was used, how many of those uses its parent has, and the age when it last was."""

    __slots__ = ("age", "count", "given")

    def __init__(self, age: float, count: int, given: int) -> None:
        self.age = age
        self.count = count
        self.given = given


class Lfuda(Policy[Uses]):
    """Rank = age of the tier at the last use + number of uses; the age is the rank of the last victim."""

    def __init__(self, tier: int) -> None:
        super().__init__(tier)
        self.age = 0.0

    def gain(self, index: Any, node: Any, lo: int, hi: int, copies: int) -> None:
        """A new page counts as used once; that use was counted above it too."""
        super().gain(index, node, lo, hi, copies)
        if self.note(node) is None:
            self.write(node, Uses(self.age, 1, 1))

    def use(self, node: Any, now: float) -> None:
        """One more."""
        super().use(node, now)
        uses = self.note(node)
        if uses is None:
            self.write(node, Uses(self.age, 1, 0))
        else:
            uses.count += 1
            uses.age = self.age

    def fall(self, node: Any, parent: Any) -> None:
        """The parent was used whenever the node was."""
        uses = self.note(node)
        if uses is None:
            return
        up = self.note(parent)
        if up is None:
            self.write(parent, Uses(uses.age, uses.count, 0))
        else:
            up.count += uses.count - uses.given
            up.age = max(up.age, uses.age)
        uses.given = uses.count

    def split(self, upper: Any, lower: Any) -> None:
        """Both halves were used alike."""
        uses = self.note(lower)
        if uses is not None:
            self.write(upper, Uses(uses.age, uses.count, uses.given))
            uses.given = uses.count

    def lose(self, index: Any, node: Any, lo: int, hi: int, copies: int) -> None:
        """What goes sets the age."""
        super().lose(index, node, lo, hi, copies)
        if node.below[self.tier] == 0:
            self.age = max(self.age, self.rank(index, node))

    def rank(self, index: Any, node: Any) -> float:
        """Age at the last use and number of uses."""
        del index
        uses = self.note(node)
        return 0.0 if uses is None else uses.age + uses.count
