"""Eviction policies: what one is, what several share, and how one is found."""

from kvtier.policy.base import Policy
from kvtier.policy.find import DEFAULT, every, load, path_of, summary_of
from kvtier.policy.ghosts import Ghosts

__all__ = ["DEFAULT", "Ghosts", "Policy", "every", "load", "path_of", "summary_of"]
