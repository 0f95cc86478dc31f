"""How the disk tier fares: counters, and the failure since which no write has worked."""

from __future__ import annotations

import threading
from collections import Counter
from time import monotonic
from typing import Final

RETRY_S: Final = 2.0
NAMES: Final = (
    "bytes_read", "bytes_written", "checksum_failures", "damaged_runs", "io_errors", "packed_bytes_saved",
    "runs_written", "set_aside",
    "write_errors",
)  # fmt: skip


class Health:
    """Counters may be raised from any thread; the rest belongs to the tier's owner."""

    def __init__(self, **first: int) -> None:
        self._counts: Counter[str] = Counter(dict.fromkeys(NAMES, 0) | first)
        self._lock = threading.Lock()
        self._since = 0.0
        self.reason = ""
        """Name of the failure, as ENOSPC; empty once a write has worked again."""

    def count(self, **more: int) -> None:
        """Raise counters."""
        with self._lock:
            self._counts.update(more)

    def counts(self) -> dict[str, int]:
        """All counters as they are now."""
        with self._lock:
            return dict(self._counts)

    def ail(self, reason: str) -> None:
        """A write failed, where a reason is given."""
        if reason:
            self.reason, self._since = reason, monotonic()

    def recover(self) -> None:
        """A write has worked."""
        self.reason = ""

    def due(self) -> bool:
        """Whether nothing failed lately: writes are worth a try."""
        return not self.reason or monotonic() - self._since > RETRY_S
