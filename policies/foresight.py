"""foresight: what is worth least for its room goes first, as kinds and ages tell, unless heat did better lately."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvtier.policy import Ages, Ghosts, Voting, Wait, at_age

REMEMBERED = 2.0
"""Pages that are waited for after they were evicted, as a multiple of the tier's."""


class Foresight(Voting):
    """How the chance to be used falls with age is learnt too, and with it when waiting does not pay any more."""

    powers = (0.5,)
    rules = 2

    def __init__(self, tier: int) -> None:
        super().__init__(tier)
        self._ghosts: Ghosts[Wait] = Ghosts(REMEMBERED)
        self._ages = Ages(self.lanes)
        self._worth = self._ages.worth()

    def waited(self, wait: Wait, pages: float, *, used: bool) -> None:
        """Ages are learnt from the same."""
        super().waited(wait, pages, used=used)
        self._ages.wait(wait.kind, wait.since, self.age(wait.mark), pages, used=used)

    def learn(self) -> None:
        """Look ahead again."""
        super().learn()
        self._ages.learn(self.size)
        self._worth = self._ages.worth()

    def coldest(self, heads: Sequence[Any | None]) -> list[int]:
        """The lane whose head is worth least, and what heat would take."""
        values = []
        for lane, head in enumerate(heads):
            if head is not None:
                uses = self.note(head)
                age = self.age(uses.mark if uses is not None else 0.0)
                values.append((at_age(self._worth[lane], age), -age, lane))
        return [min(values)[2], *super().coldest(heads)]
