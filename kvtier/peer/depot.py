"""The peer tier on a store that the whole fleet shares: no homes, everybody writes to it and reads from it.

Who computes a page writes it behind, after the commit; who misses it asks within the same request. What the store
does is a hint, as with peers: whatever is missing, late, of another length, of another name or not what was written
is a miss from that page on. A cache's generation, a random number beside its pages, is part of every name: whoever
finds none makes one, so a purge makes one and nothing written before is ever found again.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets as random
import time
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import xxhash

from kvtier.identity import CacheSpec
from kvtier.peer.base import Pick, Place, Shared, Sink, Source
from kvtier.peer.direct import MIN_BYTES_S
from kvtier.peer.items import CHUNK_BYTES, chunk_pages, items_of, nbytes_of, picks_of
from kvtier.peer.secrets import Secrets
from kvtier.peer.shelf import (
    GENERATION_BYTES,
    HEAD,
    PIECE,
    Head,
    Mark,
    Shelf,
    Want,
    flat,
    generation_name,
    head_of,
    item_name,
    marks,
    pieces,
)  # fmt: skip
from kvtier.types import Kind

LACKS_S: Final = 1.0
"""So long the store's no is believed. Others may have given it the pages meanwhile."""
MAX_LACKS: Final = 1 << 16
GENERATION_S: Final = 1.0
"""So long a cache's generation is believed: so late others notice a purge."""
FIRST_LOOK: Final = 64
"""Pages that the first question is about; each further one is about four times as many."""
SLICE: Final = 256
"""Pages that are named without letting the loop go."""

_log = logging.getLogger("kvtier.peer")


class Depot:
    """A PeerTier whose one peer is the store. Owned by the loop thread."""

    def __init__(
        self,
        shelf: Shelf,
        secrets: Secrets,
        *,
        name: str = "this host",
        deadline_s: float = 0.2,
    ) -> None:
        """`deadline_s`: of one question; bytes have their time at 32 MiB/s too."""
        self.shelf = shelf
        self.name = name
        self.deadline_s = deadline_s
        self.counts = shelf.counts
        self._secrets = secrets
        self._lacks: dict[bytes, float] = {}
        self._generations: dict[bytes, tuple[bytes, float]] = {}
        self._emptied: set[bytes] = set()
        """Caches that were purged here and have no new generation in the store yet."""
        self.purges = 0
        """How often some cache was purged here: what was found before counts no more."""
        self._life = 0

    def start(self) -> None:
        """See PeerTier."""
        self.shelf.start()

    def shared(self, spec: CacheSpec, scope: str, epoch: int) -> Shared | None:
        """See PeerTier."""
        return self._secrets.shared(spec, scope, epoch)

    def until(self, nbytes: int = 0) -> float:
        """By when something with so many bytes is over."""
        return time.monotonic() + self.deadline_s + nbytes / MIN_BYTES_S

    # -- generations -----------------------------------------------------------------------------------------------

    async def generation(self, shared: Shared, until: float) -> bytes | None:
        """The cache's generation in the store, made where there is none; None where the store does not say."""
        if shared.id in self._emptied and not await self._renew(shared, until):
            return None
        known = self._generations.get(shared.id)
        if known is not None and known[1] > time.monotonic() and self._life == self.shelf.life:
            return known[0]
        name, purges = generation_name(shared), self.purges
        (found,) = await self.shelf.peek([name], GENERATION_BYTES, until)
        if found == b"":
            await self.shelf.claim(name, random.token_bytes(GENERATION_BYTES), until)
            (found,) = await self.shelf.peek([name], GENERATION_BYTES, until)
        if found is None or len(found) != GENERATION_BYTES or purges != self.purges:
            return None
        if known is not None and known[0] != found:
            self.counts["peer_restarts"] += 1
            _log.warning("the shared store was emptied of a cache: what is known of it is forgotten")
            self._lacks.clear()
        self._life = self.shelf.life
        self._generations[shared.id] = found, time.monotonic() + GENERATION_S
        return found

    async def forget(self, shared: Shared) -> None:
        """See PeerTier: another generation begins, at the latest when the store answers again."""
        self.purges += 1
        self._emptied.add(shared.id)
        await self._renew(shared, self.until())

    async def _renew(self, shared: Shared, until: float) -> bool:
        """End the generation of a purged cache; False where the store does not do it now."""
        self._generations.pop(shared.id, None)
        if await self.shelf.drop([generation_name(shared)], until):
            self._emptied.discard(shared.id)
        return shared.id not in self._emptied

    # -- reading ---------------------------------------------------------------------------------------------------

    def worth(self, shared: Shared, keys: bytes, have: int) -> bool:
        """See PeerTier."""
        until = self._lacks.get(_page_name(shared, keys, have))
        return self.shelf.up and (until is None or until <= time.monotonic())

    def _note_lack(self, shared: Shared, keys: bytes, have: int) -> None:
        """The store does not have that page."""
        if len(self._lacks) >= MAX_LACKS:
            self._lacks.pop(next(iter(self._lacks)))
        name = _page_name(shared, keys, have)
        self._lacks.pop(name, None)
        self._lacks[name] = time.monotonic() + LACKS_S

    async def find(self, shared: Shared, keys: bytes, have: int) -> list[Source]:
        """See PeerTier."""
        self.counts["peer_asked"] += 1
        until = self.until()
        named = await _marks(shared, keys)
        generation = await self.generation(shared, until)
        if generation is None:
            return []
        pages = await _Reach(self, shared, generation, named).deepest(have, until)
        if pages is None:
            return []
        if pages <= have:
            self._note_lack(shared, keys, have)
            return []
        return [DepotSource(self, shared, generation, named, pages)]

    # -- keys ------------------------------------------------------------------------------------------------------

    def answers(self) -> bool:
        """See PeerTier."""
        return self.shelf.up

    def key_homes(self, shared: Shared, group: int, key: bytes) -> list[str]:  # noqa: ARG002 - there is one
        """See PeerTier."""
        return [self.shelf.name]

    async def holders(self, shared: Shared, group: int, keys: list[bytes]) -> dict[bytes, list[str]]:
        """See PeerTier."""
        self.counts["peer_asked"] += 1
        until = self.until()
        named = await _marks(shared, b"".join(keys))
        generation = await self.generation(shared, until)
        if generation is None:
            return {}
        found = await self.shelf.has([item_name(shared, generation, mark, group) for mark in named], until)
        return {key: [self.shelf.name] for key, there in zip(keys, found, strict=True) if there}

    async def source(self, node: str, shared: Shared, group: int, keys: bytes) -> Source | None:  # noqa: ARG002
        """See PeerTier."""
        generation = await self.generation(shared, self.until())
        if generation is None:
            return None
        return DepotSource(self, shared, generation, await _marks(shared, keys), len(keys) // shared.spec.stride)

    # -- writing ---------------------------------------------------------------------------------------------------

    def known(self, node: str) -> bool:
        """See PeerTier."""
        return node == self.shelf.name

    def homes(self, shared: Shared, keys: bytes) -> list[tuple[str, int]]:
        """See PeerTier: everything goes to the store."""
        return [(self.shelf.name, len(keys) // shared.spec.stride)]

    async def offer(
        self, node: str, shared: Shared, keys: bytes, spare: tuple[Pick, ...], group: int = 0
    ) -> Sink | None:
        """See PeerTier."""
        if node != self.shelf.name or not self.shelf.up:
            return None
        until = self.until()
        named = await _marks(shared, keys)
        generation = await self.generation(shared, until)
        if generation is None:
            return None
        pages = len(named)
        full = [group] if shared.spec.keyed else _always(shared.spec)
        items = sorted({*((g, at) for g in full for at in range(pages)), *items_of(shared.spec, spare, pages)})
        there = await self.shelf.has([item_name(shared, generation, named[at], g) for g, at in items], until)
        if None in there:
            return None
        lacking = [item for item, has in zip(items, there, strict=True) if not has]
        return DepotSink(self, shared, generation, named, lacking)

    # -- routing ---------------------------------------------------------------------------------------------------

    async def weigh(self, shared: Shared, keys: bytes) -> dict[str, dict[str, int]]:  # noqa: ARG002
        """See PeerTier: hosts that share a store do not know each other."""
        return {}

    def preferred(self, shared: Shared, keys: bytes) -> list[str]:  # noqa: ARG002
        """See PeerTier."""
        return [self.name]

    def status(self) -> list[dict[str, Any]]:
        """See PeerTier."""
        return self.shelf.status()

    async def close(self) -> None:
        """See PeerTier."""
        await self.shelf.close()


class _Reach:
    """How much of a path the store has."""

    def __init__(self, depot: Depot, shared: Shared, generation: bytes, named: list[Mark]) -> None:
        self._depot = depot
        self._shared = shared
        self._generation = generation
        self._named = named
        self._there: dict[int, np.ndarray] = {}
        """Per group: which pages' items are there; True for pages that were not asked about only where they need not
        be."""

    async def deepest(self, have: int, until: float) -> int | None:
        """The deepest boundary beyond `have` at which an engine can resume (`have`: none); None: it does not say."""
        spec, total = self._shared.spec, len(self._named)
        groups = range(len(spec.groups))
        self._there = {g: np.zeros(total, bool) for g in groups}
        begin = {g: min(have, _first(spec, g, have + 1)) for g in groups}
        end, step = have, FIRST_LOOK
        while end < total:
            upto = min(total, end + step)
            items = [(g, at) for g in groups for at in range(begin[g], upto)]
            names = [item_name(self._shared, self._generation, self._named[at], g) for g, at in items]
            found = await self._depot.shelf.has(names, until)
            if None in found and self._blind(items, found, have):
                return None
            for (g, at), there in zip(items, found, strict=True):
                self._there[g][at] = bool(there)
            begin, step = dict.fromkeys(groups, upto), step * 4
            solid = min(self._run(g, have, upto) for g in _anchors(spec))
            end = upto
            if solid < upto:
                end = solid
                break
        return next((at for at in range(end, have, -1) if self._resumes(at)), have)

    def _blind(self, items: list[tuple[int, int]], found: list[bool | None], have: int) -> bool:
        """Whether nothing is known of the first page: then the store's silence is no no."""
        return any(there is None and at == have for (_, at), there in zip(items, found, strict=True))

    def _run(self, group: int, first: int, end: int) -> int:
        """Up to where pages from `first` on are all there."""
        holes = np.flatnonzero(~self._there[group][first:end])
        return first + int(holes[0]) if len(holes) else end

    def _resumes(self, pages: int) -> bool:
        """Whether every group's rule holds at that boundary."""
        spec = self._shared.spec
        return all(
            self._there[g][_first(spec, g, pages) : pages].all()
            for g, group in enumerate(spec.groups)
            if group.kind is not Kind.FULL
        )


class DepotSource:
    """What the store has of a path (or of keys)."""

    def __init__(self, depot: Depot, shared: Shared, generation: bytes, named: list[Mark], pages: int) -> None:
        self.node = depot.shelf.name
        self.pages = pages
        self._depot = depot
        self._shared = shared
        self._generation = generation
        self._named = named
        self._purges = depot.purges

    async def fetch(self, places: Sequence[Place]) -> list[int | None]:
        """See Source."""
        found = await self._fetch(places)
        return found if self._purges == self._depot.purges else [None] * len(places)

    async def _fetch(self, places: Sequence[Place]) -> list[int | None]:
        """Read the heads, then the bytes; whatever is not what was stored is dropped in the store too."""
        depot, shelf = self._depot, self._depot.shelf
        names = [item_name(self._shared, self._generation, self._named[p.page], p.group) for p in places]
        heads = await self._heads(names, places)
        states = [xxhash.xxh3_64() for _ in places]
        wants: list[Want] = []
        owner: list[int] = []
        for at, head in enumerate(heads):
            if head is not None:
                mine = pieces(names[at], head, places[at], states[at])
                wants += mine
                owner += [at] * len(mine)
        done = await shelf.read(wants, depot.until(sum(want.nbytes for want in wants))) if wants else []
        failed = {at: ok for at, ok in zip(owner, done, strict=True) if not ok}
        out: list[int | None] = [None] * len(places)
        spoilt: list[str] = []
        for at, head in enumerate(heads):
            if head is None or (at in failed and failed[at] is None):
                continue
            value = None if at in failed else states[at].intdigest()
            if value == head.sum:
                out[at] = value
                continue
            depot.counts["peer_torn" if at in failed else "peer_checksum"] += 1
            spoilt.append(names[at])
        if spoilt:
            _log.warning("%d items of the shared store were not what was stored: dropped there", len(spoilt))
            await shelf.drop(spoilt, depot.until())
        return out

    async def _heads(self, names: list[str], places: Sequence[Place]) -> list[Head | None]:
        """The heads of items that are there and are theirs."""
        depot = self._depot
        raw = await depot.shelf.peek(names, HEAD.size, depot.until())
        out: list[Head | None] = []
        wrong = []
        for name, found, place in zip(names, raw, places, strict=True):
            head = head_of(found) if found else None
            size, mark = self._shared.spec.groups[place.group].item_bytes, self._named[place.page]
            good = head is not None and (head.group, head.nbytes, head.echo) == (place.group, size, mark.echo)
            out.append(head if good else None)
            if found and not good:
                wrong.append(name)
        if wrong:
            depot.counts["peer_mismatch"] += len(wrong)
            _log.warning("%d heads in the shared store belong to something else: dropped there", len(wrong))
            await depot.shelf.drop(wrong, depot.until())
        return out

    def close(self) -> None:
        """See Source."""


class DepotSink:
    """What the store lacks of a path (or of keys)."""

    def __init__(
        self, depot: Depot, shared: Shared, generation: bytes, named: list[Mark], lacking: list[tuple[int, int]]
    ) -> None:
        self.node = depot.shelf.name
        self.picks: tuple[Pick, ...] = ()
        self._depot = depot
        self._shared = shared
        self._generation = generation
        self._named = named
        self._lacking = sorted(lacking, key=lambda item: (item[1], item[0]))
        """By page, so that what is there is always the beginning of something."""
        self._next()

    def _next(self) -> None:
        """Pick the next items."""
        spec = self._shared.spec
        most = max(1, CHUNK_BYTES // spec.groups[0].item_bytes) if spec.keyed else chunk_pages(spec)
        pages = list(itertools.islice(dict.fromkeys(page for _, page in self._lacking), most))
        last = pages[-1] if pages else -1
        self.picks = picks_of(sorted(item for item in self._lacking if item[1] <= last))
        self._lacking = [item for item in self._lacking if item[1] > last]

    async def send(self, places: Sequence[Place], sums: Sequence[int]) -> int:
        """See Sink."""
        depot, shelf, spec = self._depot, self._depot.shelf, self._shared.spec
        until = depot.until(2 * nbytes_of(spec, [(place.group, place.page) for place in places]))
        heads: list[Want] = []
        bodies: list[Want] = []
        for place, value in zip(places, sums, strict=True):
            mark = self._named[place.page]
            head = Head(place.group, PIECE, spec.groups[place.group].item_bytes, value, mark.echo)
            name = item_name(self._shared, self._generation, mark, place.group)
            heads.append(Want(name, [flat(head.pack())]))
            bodies += pieces(name, head, place)
        # A head is written when its bytes are there: what has a head can be read, until the store evicts some of it.
        if not all(await shelf.write(bodies, until)) or not all(await shelf.write(heads, until)):
            raise OSError("the shared store did not take all of it")
        return len({place.page for place in places})

    async def more(self) -> None:
        """See Sink."""
        self._next()

    def close(self) -> None:
        """See Sink."""


async def _marks(shared: Shared, keys: bytes) -> list[Mark]:
    """Marks of a path's pages, or of keys, a slice at a time."""
    out: list[Mark] = []
    source = marks(shared, keys)
    while part := list(itertools.islice(source, SLICE)):
        out += part
        await asyncio.sleep(0)
    return out


def _page_name(shared: Shared, keys: bytes, page: int) -> bytes:
    """Names page `page` of a path with all before it, in this process."""
    return xxhash.xxh3_128_digest(shared.id + keys[: (page + 1) * shared.spec.stride])


def _always(spec: CacheSpec) -> list[int]:
    """Groups of which every page of a path is kept."""
    return [g for g, group in enumerate(spec.groups) if group.kind is Kind.FULL] or _anchors(spec)


def _anchors(spec: CacheSpec) -> list[int]:
    """Groups whose pages must follow each other without a hole."""
    full = [g for g, group in enumerate(spec.groups) if group.kind is Kind.FULL]
    return full or [next(g for g, group in enumerate(spec.groups) if group.kind is Kind.WINDOW)]


def _first(spec: CacheSpec, group: int, pages: int) -> int:
    """The first page whose item resuming after `pages` pages reads."""
    rule, tokens = spec.groups[group], spec.page_tokens
    if rule.kind is Kind.STATE:
        return max(0, pages - 1)
    return max(0, pages * tokens - rule.window) // tokens if rule.kind is Kind.WINDOW else 0
