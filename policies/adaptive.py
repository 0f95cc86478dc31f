"""adaptive: as heat, but how far what was learnt is trusted follows from what was evicted too early."""

from __future__ import annotations

from kvtier.policy import Voting


class Adaptive(Voting):
    """Of the powers the one acts that had the smallest share of its votes regretted."""

    powers = (0.5, 1.0, 2.0)
    rules = 3
