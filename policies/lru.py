"""lru: the least recently used goes first."""

from __future__ import annotations

from kvtier.policy import Policy


class Lru(Policy[None]):
    """Policy as it is: a leaf's rank is the time of its last use."""
