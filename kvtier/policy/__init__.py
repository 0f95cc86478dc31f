"""Eviction policies: what one is, what several share, and how one is found."""

from kvtier.policy.ages import Ages, Waits, at_age
from kvtier.policy.base import Policy
from kvtier.policy.find import DEFAULT, every, load, path_of, serving, summary_of
from kvtier.policy.foreseeing import Foreseeing
from kvtier.policy.ghosts import Ghosts
from kvtier.policy.kinds import ByKind
from kvtier.policy.uses import Ageing, Counting, Uses
from kvtier.policy.voting import Voting

__all__ = [
    "DEFAULT", "Ageing", "Ages", "ByKind", "Counting", "Foreseeing", "Ghosts", "Policy", "Uses", "Voting", "Waits",
    "at_age", "every", "load", "path_of", "serving", "summary_of",
]  # fmt: skip
