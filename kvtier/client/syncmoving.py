"""Regions of the blocking client, and their transfers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvtier import wire
from kvtier.client.moving import HeldRegion, Moving, Source, Target
from kvtier.client.whole import Numbers

if TYPE_CHECKING:
    from kvtier.client.sync import Client


class Region(HeldRegion):
    """Memory of the engine's own; see Client.register."""

    def __init__(self, client: Client, name: str, message: wire.Register | wire.RegisterKv, fds: Sequence[int]) -> None:
        super().__init__(name, message, fds)
        self._client = client

    def start_load(
        self, source: Source, rows: Numbers, *, group: int = 0, first: int = 0, wait_ms: int = 10000
    ) -> Transfer:
        """Begin copying items into rows (-1 skips): of a lease from page `first` on, or of (cache, keys)."""
        return self._load(source, rows, group, first, wait_ms).in_hand()

    def load(self, source: Source, rows: Numbers, *, group: int = 0, first: int = 0, wait_ms: int = 10000) -> bytes:
        """Copy items into rows: one byte per row, 1 where its verified bytes are there.

        Where it ends without the daemon's word, `fenced` is true until the rows may be touched again.
        """
        return self._load(source, rows, group, first, wait_ms).finish()

    def _load(self, source: Source, rows: Numbers, group: int, first: int, wait_ms: int) -> Transfer:
        """Begin, the rows being fenced."""
        transfer = Transfer(self, rows, wait_ms)
        self._client.attempt(self._loading(transfer, source, group, first, wait_ms), None)
        return transfer

    def start_store(
        self, target: Target, rows: Numbers, *, group: int = 0, first: int = 0, wait_ms: int = 10000
    ) -> Transfer:
        """Begin copying rows into a reservation's pages from `first` on, or under (cache, keys), and commit them.

        Nothing is copied into a reservation that another process writes (`writes`).
        """
        return self._store(target, rows, group, first, wait_ms).in_hand()

    def store(self, target: Target, rows: Numbers, *, group: int = 0, first: int = 0, wait_ms: int = 10000) -> bytes:
        """Copy rows into the cache: one byte per row, 1 where the item is stored or was already."""
        return self._store(target, rows, group, first, wait_ms).finish()

    def _store(self, target: Target, rows: Numbers, group: int, first: int, wait_ms: int) -> Transfer:
        """Begin, the rows being fenced."""
        transfer = Transfer(self, rows, wait_ms)
        self._client.attempt(self._storing(transfer, target, group, first, wait_ms), None)
        return transfer

    def unregister(self) -> bool:
        """Let the daemon forget the region; False where it cannot be told or transfers still run."""
        return self._client.attempt(self._unregistering(), default=False)


class Transfer(Moving):
    """One load or store in flight; its rows are fenced until the daemon's word is there."""

    def __init__(self, region: Region, rows: Numbers, wait_ms: int) -> None:
        super().__init__(region, rows)
        self._client = region._client  # noqa: SLF001 - of the same module
        self._wait_s = wait_ms / 1000

    def wait(self, timeout_s: float) -> bytes | None:
        """One byte per row, or None while it is not done (`lost`: never will be)."""
        return self._client.attempt(self._waiting(), None, timeout_s - self._client.link.timeout_s)

    def cancel(self) -> bytes | None:
        """Stop; returns what was done once no byte moves any more, or None where the connection is lost first."""
        return self._client.attempt(self._cancelling(), None)

    def finish(self) -> bytes:
        """Wait as long as was asked for, then stop; what was done. Interrupted: the rows stay fenced until it ended."""
        try:
            done = self._client.attempt(self._waiting(), None, self._wait_s)
            if done is None:
                done = self.cancel()
        except BaseException:
            self._client.attempt(self._forsaking(), None)
            raise
        return done or bytes(len(self.rows))
