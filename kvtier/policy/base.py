"""What an eviction policy is.

A policy is a file with one class derived from Policy; one object of it serves one tier of one pool. It ranks leaves:
a page is evicted after all that follow it, so that only the deepest node of a path is ever asked about. What is noted
of a node must be handed up when it goes (`fall`), because whoever used it used all that is above it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Final, Generic, TypeVar

from kvtier.types import RUN_PAGES

TURNS: Final = 8
"""The turnover is measured anew each time this part of it has passed."""

N = TypeVar("N")


class Policy(Generic[N]):
    """Least recently used, and the book-keeping that others need. N is what a policy notes of a node.

    Nodes have `time` (last use, in seconds), `depth` and `pages` (pages before and in it), `heat` and `parent`. Times
    only ever grow. Every method is called on one thread, costs at most some microseconds and does no I/O.
    """

    lanes: ClassVar[int] = 1
    """How many queues of leaves there are; `pick` says which one gives the next victim."""
    page_tokens: ClassVar[int] = 0
    """Tokens that a page stands for, where a trace says so; 0: what the cache's spec says."""

    def __init__(self, tier: int) -> None:
        self.tier = tier
        self.size = 0
        """Copies in the tier."""
        self.now = 0.0
        """The latest time heard of."""
        self.turnover_s = 0.0
        """Seconds in which the tier takes in as much as it holds; 0 while that is unknown."""
        self._taken = 0
        self._since = 0.0

    # -- notes -----------------------------------------------------------------------------------------------

    def note(self, node: Any) -> N | None:
        """What this policy has noted of a node."""
        notes: list[N | None] | None = node.notes
        return None if notes is None else notes[self.tier]

    def write(self, node: Any, note: N) -> None:
        """Note something of a node; it is kept as long as the node."""
        if node.notes is None:
            node.notes = [None] * 4
        node.notes[self.tier] = note

    # -- what happens ------------------------------------------------------------------------------------------

    def gain(self, index: Any, node: Any, lo: int, hi: int, copies: int) -> None:
        """`copies` copies of pages [lo, hi) of `node` arrived in the tier."""
        del index, lo, hi
        self.size += copies
        self._taken += copies
        self.now = max(self.now, node.time)
        if self._taken * TURNS >= self.size + 64:
            passed = self.now - self._since
            if self._since and passed > 0:
                measured = passed * self.size / self._taken
                self.turnover_s += (measured - self.turnover_s) / (4 if self.turnover_s else 1)
            self._taken, self._since = 0, self.now

    def found(self, index: Any, node: Any, lo: int, hi: int, copies: int) -> None:
        """The same for what was there already when the store started."""
        self.gain(index, node, lo, hi, copies)

    def lose(self, index: Any, node: Any, lo: int, hi: int, copies: int) -> None:
        """`copies` copies of pages [lo, hi) of `node` left the tier."""
        del index, node, lo, hi
        self.size -= copies

    def use(self, node: Any, now: float) -> None:
        """A logical request ended in `node`: it and all above were used. Polling does not count again."""
        del node
        self.now = max(self.now, now)

    def fall(self, node: Any, parent: Any) -> None:
        """Nothing at or below `node` is in the tier any more; it may come back, and fall again."""

    def split(self, upper: Any, lower: Any) -> None:
        """`upper` is a new node with the first pages of what `lower` was."""
        note = self.note(lower)
        if note is not None:
            self.write(upper, note)

    def join(self, upper: Any, lower: Any) -> None:
        """`lower` takes over the pages of its parent `upper`, which had no other child; it was used just now."""

    # -- what goes ---------------------------------------------------------------------------------------------

    def lane(self, node: Any) -> int:
        """The queue a leaf stands in: 0 to `lanes` - 1. It may change only in `use`, `gain`, `fall` and `spare`."""
        del node
        return 0

    def rank(self, index: Any, node: Any) -> float:
        """Where it stands there: the lowest goes first. It may fall only in `use`, `gain`, `fall` and `spare`."""
        del index
        time: float = node.time
        return time

    def pick(self, heads: Sequence[Any | None], now: float) -> int:
        """Which queue gives the next victim, given the first leaf of each; at least one is not None."""
        del now
        return next(lane for lane, head in enumerate(heads) if head is not None)

    def spare(self, node: Any) -> bool:
        """Whether a victim goes back, because what `lane` or `rank` say of it has just been changed."""
        del node
        return False

    def share(self, node: Any) -> int:
        """How many pages of a victim may go before it is ranked again: a run, or a good part of a long node."""
        part: int = node.pages // 8
        return max(RUN_PAGES, part)
