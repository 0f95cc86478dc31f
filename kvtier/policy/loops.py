"""Loops over more than a tier holds: what goes is asked for again soon, so that the least recently used is the worst.

In a loop nothing tells what goes from what stays, so that any part may stay and is hit each time around; what is taken
in for the rest goes soon. Benchmarks that go through their documents again and again are such loops. What was used once
only, such as the questions about them, is not looked at, and does not stay.
"""

from __future__ import annotations

from typing import Final

SOON: Final = 1.0
"""Turnovers within which pages of a loop are asked for again after they went."""
BEGIN: Final = 0.85
"""It is a loop where so much of what goes comes back so soon; in the traces of chats and agents it is 0.8 at most."""
END: Final = 0.5
"""It is over where no more does."""
FADE: Final = 0.5 ** (1 / 16)
"""Of the evidence, with every eighth of a turnover."""
PART: Final = 7 / 8
"""Of the tier, for what stays."""
PATIENCE: Final = 3.0
"""What stays and was not used for so many turnovers is not of the loop."""


class Loops:
    """Whether a tier sees one now, and what part of it stays."""

    __slots__ = ("_back", "_went", "kept", "on")

    def __init__(self) -> None:
        self.on = False
        self.kept = 0
        """Pages that were told to stay; where others came to their nodes or are joined with them, about so many."""
        self._went = self._back = 0.0

    def went(self, pages: int) -> None:
        """So many were evicted."""
        self._went += pages

    def back(self, pages: int, after: float) -> None:
        """So many that had been evicted were asked for again, so many turnovers after that."""
        if after <= SOON:
            self._back += pages

    def keep(self, pages: int, size: int) -> bool:
        """Whether these, which would go, are to stay."""
        if not self.on or self.kept + pages > PART * size:
            return False
        self.kept += pages
        return True

    def left(self, pages: int) -> None:
        """So many of what stayed went, or are like all others again (below 0: so many more stay)."""
        self.kept = max(0, self.kept - pages)

    def learn(self, size: int) -> None:
        """Each eighth of a turnover: see whether a loop began or ended."""
        if self._went >= size:
            self.on = self._back / self._went >= (END if self.on else BEGIN)
        self._went *= FADE
        self._back *= FADE
