"""Keys of a running reservation's pages, which come as their tokens are known, and what the daemon was told of them."""

from __future__ import annotations

from kvtier import wire
from kvtier.types import bad


class Names:
    """Sent with each commit until one was answered: what an interrupted one carried may be known there or not."""

    def __init__(self, named: int, stride: int) -> None:
        self.named = named
        """Pages of the path, from the root, whose keys are known here."""
        self._told = named
        self._stride = stride
        self._keys = b""

    def add(self, keys: bytes, end: int) -> None:
        """The keys of the next pages, which are before page `end`. Raises bad_request."""
        pages, rest = divmod(len(keys), self._stride)
        if rest or self.named + pages > end:
            raise bad("keys", f"whole page keys, up to page {end}", len(keys))
        self.named += pages
        self._keys += keys

    def unsaid(self) -> tuple[bytes, int]:
        """Keys that the daemon may not know, and the page that they begin at."""
        return (self._keys, self._told) if self._keys else (b"", 0)

    def said(self, message: wire.Commit) -> None:
        """A commit was answered."""
        known = max(self._told, message.named + len(message.keys) // self._stride)
        self._told, self._keys = known, self._keys[(known - self._told) * self._stride :]
