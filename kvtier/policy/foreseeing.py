"""Voting, with a rule beside heat's that knows how the chance to be used falls with age."""

from __future__ import annotations

from typing import Final

from kvtier.policy.ages import Ages, Waits, at_age
from kvtier.policy.ghosts import Ghosts
from kvtier.policy.kinds import Gone
from kvtier.policy.voting import Voting

REMEMBERED: Final = 2.0
"""Pages that are waited for after they were evicted, as a multiple of the tier's."""


class Foreseeing(Voting):
    """Rule 0 takes what is worth least for its room, the others what heat would take with each of the powers."""

    def __init__(self, tier: int) -> None:
        self._ages = Ages(self.lanes)
        self._worth = self._ages.worth()
        super().__init__(tier)
        self._ghosts: Ghosts[Gone] = Ghosts(REMEMBERED)

    def study(self, waits: Waits) -> None:
        """Ages are learnt from the same."""
        super().study(waits)
        self._ages.wait(waits)

    def learn(self) -> None:
        """Look ahead again."""
        super().learn()
        self._ages.learn(self.size)
        self._worth = self._ages.worth()

    def values(self, lane: int, age: float) -> list[float]:
        """What it is worth, or how old it is past all hope, and what heat makes of it."""
        return [at_age(self._worth[lane], age) or -age, *super().values(lane, age)]
