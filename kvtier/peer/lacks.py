"""What a peer (or the fleet's store) said a moment ago that it does not have: believed for a second, then forgotten."""

from __future__ import annotations

import time
from typing import Final

LACKS_S: Final = 1.0
"""So long a no is believed. Others may have given it the pages meanwhile."""
MAX_LACKS: Final = 1 << 16


class Lacks:
    """Names of pages, in the order in which they run out."""

    def __init__(self) -> None:
        self._until: dict[bytes, float] = {}

    def __len__(self) -> int:
        return len(self._until)

    def __contains__(self, name: bytes) -> bool:
        until = self._until.get(name)
        return until is not None and time.monotonic() < until

    def note(self, name: bytes) -> None:
        """It does not have that page. What ran out goes, and the oldest where there are too many."""
        now = time.monotonic()
        self._until.pop(name, None)
        while self._until:
            oldest = next(iter(self._until))
            if self._until[oldest] > now and len(self._until) < MAX_LACKS:
                break
            del self._until[oldest]
        self._until[name] = now + LACKS_S

    def clear(self) -> None:
        """Nothing is known of it any more."""
        self._until.clear()
