"""Eviction policies: what one is, what several share, and how one is found."""

from kvtier.policy.base import Policy
from kvtier.policy.find import DEFAULT, every, load, path_of, summary_of
from kvtier.policy.ghosts import Ghosts
from kvtier.policy.kinds import ByKind, Wait
from kvtier.policy.uses import Ageing, Counting, Uses

__all__ = [
    "DEFAULT", "Ageing", "ByKind", "Counting", "Ghosts", "Policy", "Uses", "Wait", "every", "load", "path_of",
    "summary_of",
]  # fmt: skip
