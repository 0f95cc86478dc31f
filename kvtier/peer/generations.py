"""Which life of a cache a shared store is in: a number in the names of all its pages, so that a purge is one write.

It is kept under three names, which a Cluster of three has on three servers. Two of them must be known: then the highest
is the latest, whatever one lost server had or was started without. What two agree on the third is given, so that it has
nothing older to say once they are evicted; and what one says alone, of two that were, may be older than they: a new one
begins. Where there is none at all everybody begins a new one and all take the same.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets as random
import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from kvtier.peer.base import Shared
from kvtier.peer.shelf import GENERATION_BYTES, Shelf, generation_names

BELIEVED_S: Final = 1.0
"""So late others notice a purge."""
QUORUM: Final = 2
CLAIM_S: Final = 0.05
"""Who has begun to claim the names has them all by then."""
MOST_KNOWN: Final = 4096
COUNT_BYTES: Final = 4

_log = logging.getLogger("kvtier.peer")


class Book(Protocol):
    """Numbers by name that a crash does not lose: the disk tier's epochs."""

    def epoch(self, base_id: bytes) -> int:
        """The number; 0 where there is none."""

    def set_epoch(self, base_id: bytes, epoch: int, done: Callable[[str], None]) -> None:
        """Write it; `done` is called on the loop once it is durable, or with an error."""


class Generations:
    """Of every cache that this host uses. Owned by the loop thread."""

    def __init__(self, shelf: Shelf, book: Book | None = None) -> None:
        """`book`: where a purge that the store does not know yet is noted; None: in memory only."""
        self._book = book
        self.ended = 0
        """How often some cache was purged here: what was found before counts no more."""
        self._shelf = shelf
        self._known: dict[bytes, tuple[bytes, float, int]] = {}
        """Per cache: its generation, until when that is believed, in which life of the shelf it was read."""
        self._emptied: set[bytes] = set()
        """Caches that were purged here, which the store does not know yet."""
        self._begun: set[bytes] = set()
        """Those that it knows of, whatever the book says until that is written."""

    async def of(self, shared: Shared, until: float) -> bytes | None:
        """The cache's generation, begun where there is none; None where the store does not say."""
        if self._waits(shared) and not await self._renew(shared, until):
            return None
        known = self._known.get(shared.id)
        if known is not None and known[1] > time.monotonic() and known[2] == self._shelf.life:
            return known[0]
        ended, life = self.ended, self._shelf.life
        found = await self._read(shared, until)
        if found == b"":
            await self._shelf.claim(generation_names(shared), _after(b""), until)
            found = await self._read(shared, until)
        if not found or ended != self.ended:
            return None
        if known is not None and known[0] != found:
            self._shelf.counts["peer_restarts"] += 1
            _log.warning("a cache was purged in the shared store, or lost there: what is known of it is forgotten")
        if len(self._known) >= MOST_KNOWN:
            self._known.clear()  # they are read again
        self._known[shared.id] = found, time.monotonic() + BELIEVED_S, life
        return found

    async def _read(self, shared: Shared, until: float) -> bytes | None:
        """The highest there is, which those names get that have none; b'': there is none; None: it is not known."""
        names = generation_names(shared)
        raw = await self._shelf.peek(names, GENERATION_BYTES, until)
        if _alone(raw):
            await asyncio.sleep(CLAIM_S)
            raw = await self._shelf.peek(names, GENERATION_BYTES, until)
        if _alone(raw):
            await self._shelf.replace(names, _after(_best(raw)), until)
            raw = await self._shelf.peek(names, GENERATION_BYTES, until)
        if len(names) - raw.count(None) < QUORUM or _alone(raw):
            return None
        best = _best(raw)
        if best and b"" in raw:
            await self._shelf.claim(names, best, until)
        older = [name for name, value in zip(names, raw, strict=True) if value not in {None, b"", best}]
        if older and raw.count(best) >= QUORUM:
            await self._shelf.replace(older, best, until)
        return best

    async def end(self, shared: Shared) -> None:
        """The cache was purged: a new generation begins, at the latest when the store answers again."""
        self.ended += 1
        self._emptied.add(shared.id)
        self._begun.discard(shared.id)
        if not await self._renew(shared, until=time.monotonic() + BELIEVED_S):
            await self._note(shared)

    def _waits(self, shared: Shared) -> bool:
        """Whether the cache was purged here, in this life or an earlier one, which the store does not know yet."""
        if shared.id in self._emptied or self._book is None or shared.id in self._begun:
            return shared.id in self._emptied
        return self._book.epoch(_page(shared)) > 0

    async def _note(self, shared: Shared) -> None:
        """Write in the book that a purge waits for the store."""
        if self._book is not None:
            done: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            self._book.set_epoch(_page(shared), 1, lambda error: None if done.done() else done.set_result(error))
            if error := await done:
                _log.warning("that a purge waits for the shared store could not be noted: %s", error)

    async def _renew(self, shared: Shared, until: float) -> bool:
        """Begin another generation of a purged cache; False where the store does not do it now."""
        self._known.pop(shared.id, None)
        found = await self._read(shared, until)
        if found is not None:
            done = await self._shelf.replace(generation_names(shared), _after(found), until)
            if done.count(True) >= QUORUM:
                self._emptied.discard(shared.id)
                self._begun.add(shared.id)
                if self._book is not None and self._book.epoch(_page(shared)):
                    self._book.set_epoch(_page(shared), 0, lambda _: None)  # lost in a crash, it is purged once more
                return True
        _log.warning("a purge waits for the shared store; until then nothing of that cache is taken from it")
        return False


def _best(raw: Sequence[bytes | None]) -> bytes:
    """The highest generation that was said; b'': none."""
    return max((value for value in raw if value is not None and len(value) == GENERATION_BYTES), default=b"")


def _alone(raw: Sequence[bytes | None]) -> bool:
    """Whether one name has a generation and all others have none."""
    return bool(_best(raw)) and raw.count(b"") == len(raw) - 1


def _page(shared: Shared) -> bytes:
    """Where in the book it is noted of a cache that its purge waits."""
    return hashlib.sha256(b"kvtier purge that waits v1" + shared.id).digest()


def _after(generation: bytes) -> bytes:
    """A higher one, which nobody else begins."""
    count = int.from_bytes(generation[:COUNT_BYTES], "big") + 1
    return count.to_bytes(COUNT_BYTES, "big") + random.token_bytes(GENERATION_BYTES - COUNT_BYTES)
