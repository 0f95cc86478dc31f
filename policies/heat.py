"""heat: what is least likely to be used soon goes first; how likely pages of a kind are is learnt as they are used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvtier.policy import ByKind


class Heat(ByKind):
    """Kinds that are used more are kept longer, by the root of how much more."""

    def pick(self, heads: Sequence[Any | None], now: float) -> int:
        """The coldest head."""
        del now
        return self.chosen(heads)[0]
