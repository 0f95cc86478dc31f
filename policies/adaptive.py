"""adaptive: rules from heat's to foresight's vote on what goes; the one acts that was wrong the least often lately."""

from __future__ import annotations

from kvtier.policy import Foreseeing


class Adaptive(Foreseeing):
    """What is worth least for its room, or what heat would take, with kinds trusted a little, wholly or twice over."""

    powers = (0.5, 1.0, 2.0)
