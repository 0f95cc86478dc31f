"""What can be read off a disk tier at any time: its state, sizes and counters."""

from __future__ import annotations

from kvtier.tiers.backing import Backing
from kvtier.tiers.catalogue import Catalogue
from kvtier.tiers.cells import BLOCK, Cells
from kvtier.tiers.commits import Commits
from kvtier.tiers.health import Health
from kvtier.tiers.ledger import Ledger
from kvtier.tiers.records import CacheRecord
from kvtier.tiers.relocate import Relocator


class Gauges:
    """The readings; DiskTier owns what they are read off."""

    _backing: Backing
    _catalogue: Catalogue
    _cells: Cells
    _commits: Commits
    _health: Health
    _ledger: Ledger
    _relocator: Relocator
    _closing: bool
    _loaded: bool
    _queued: int
    _queue_bytes: int

    @property
    def state(self) -> str:
        """loading, ready, sick or closing."""
        if self._closing:
            return "closing"
        if not self._loaded:
            return "loading"
        return "sick" if self._health.reason else "ready"

    @property
    def failure(self) -> str:
        """Name of the last failure (as ENOSPC) since which no write worked; empty when well."""
        return self._health.reason

    @property
    def sick(self) -> str:
        """The same, but empty when it is due for a try."""
        return "" if self._health.due() else self._health.reason

    @property
    def capacity_bytes(self) -> int:
        """Size of the extent file: never exceeded."""
        return self._cells.total * BLOCK

    @property
    def used_bytes(self) -> int:
        """Bytes of cells that hold, or are about to hold, items."""
        return self._cells.used * BLOCK

    @property
    def freeing_bytes(self) -> int:
        """Bytes freed, and free once that is durable."""
        return self._cells.pending * BLOCK

    @property
    def making_room(self) -> bool:
        """Whether a slab is being emptied: what was refused for want of room may fit after `flush`."""
        return self._relocator.busy

    @property
    def free_bytes(self) -> int:
        """Bytes neither used nor pending, where the file system has room for them."""
        return self.room_bytes - self.used_bytes - self.freeing_bytes

    @property
    def room_bytes(self) -> int:
        """What of the capacity the file system has room for, as far as it is known."""
        return self.capacity_bytes - self._cells.parked * BLOCK

    @property
    def shortages(self) -> int:
        """How often a write met with no room on the file system."""
        return self._backing.shortages

    @property
    def stats(self) -> dict[str, int]:
        """Counters since the tier was opened, and present sizes."""
        counts = self._health.counts()
        counts["queued_bytes"] = self._queued
        counts["commits"] = self._commits.commits
        counts["slabs_emptied"] = self._relocator.slabs
        counts["runs"] = len(self._ledger.runs)
        counts["parked_bytes"] = self._cells.parked * BLOCK
        counts["catalogue_bytes"] = self._catalogue.used_bytes
        return counts

    def queue_full(self, nbytes: int) -> bool:
        """Whether a write of this size must wait for others to become durable."""
        return self._queued > 0 and self._queued + nbytes > self._queue_bytes

    def caches(self) -> dict[int, CacheRecord]:
        """The caches that have, or may get, runs here."""
        return dict(self._ledger.caches)

    def check(self) -> list[str]:
        """Every disagreement between runs, cells and counts; empty when all is well. Loading must have ended."""
        return self._ledger.check()
