"""Reading items of a shared store, and writing them there: the Source and the Sink of a Depot."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import xxhash

from kvtier.peer.base import Pick, Place, Shared
from kvtier.peer.items import CHUNK_BYTES, chunk_pages, nbytes_of, picks_of
from kvtier.peer.shelf import HEAD, Head, Mark, Want, head_of, item_name, pieces

if TYPE_CHECKING:
    from kvtier.peer.depot import Depot

_log = logging.getLogger("kvtier.peer")


class Life(NamedTuple):
    """Of a cache in the store: its generation, and how many purges there had been here when that was read."""

    generation: bytes
    ended: int


class DepotSource:
    """What the store has of a path (or of keys). Has its turn at the store until it is closed."""

    def __init__(
        self,
        depot: Depot,
        shared: Shared,
        life: Life,
        named: list[Mark],
        pages: int,
        heads: dict[tuple[int, int], bytes],
    ) -> None:
        """`heads`: those that were read already, by (group, page)."""
        self.node = depot.shelf.name
        self.pages = pages
        self._depot = depot
        self._shared = shared
        self._life = life
        self._named = named
        self._read = heads
        self._open = True

    async def fetch(self, places: Sequence[Place]) -> list[int | None]:
        """See Source."""
        found = await self._fetch(places)
        return found if self._life.ended == self._depot.generations.ended else [None] * len(places)

    async def _fetch(self, places: Sequence[Place]) -> list[int | None]:
        """Read the heads, then the bytes; whatever is not what was stored is dropped in the store too."""
        depot, shelf = self._depot, self._depot.shelf
        names = [item_name(self._shared, self._life.generation, self._named[p.page], p.group) for p in places]
        heads = await self._heads(names, places)
        states = [xxhash.xxh3_64() for _ in places]
        wants: list[Want] = []
        owner: list[int] = []
        for at, head in enumerate(heads):
            if head is not None:
                mine = pieces(names[at], head, places[at], states[at])
                wants += mine
                owner += [at] * len(mine)
        done = await shelf.read(wants, depot.until(2 * sum(want.nbytes for want in wants))) if wants else []
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
            spoilt += [names[at], *(want.name for want, of in zip(wants, owner, strict=True) if of == at)]
        if spoilt:
            _log.warning("items of the shared store were not what was stored: %d values dropped there", len(spoilt))
            await shelf.drop(spoilt, depot.until())
        return out

    async def _heads(self, names: list[str], places: Sequence[Place]) -> list[Head | None]:
        """The heads of items that are there and are theirs."""
        depot = self._depot
        known = [self._read.get((place.group, place.page)) for place in places]
        raw = known if None not in known else await depot.shelf.peek(names, HEAD.size, depot.until())
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
        if self._open:
            self._open = False
            self._depot.leave()


class DepotSink:
    """What the store lacks of a path (or of keys)."""

    def __init__(
        self,
        depot: Depot,
        shared: Shared,
        generation: bytes,
        named: list[Mark],
        lacking: list[tuple[int, int]],
        *,
        life: int,
        unknown: int,
    ) -> None:
        """`life` of the shelf when the generation was read; `unknown`: items of which it did not say."""
        self.node = depot.shelf.name
        self.picks: tuple[Pick, ...] = ()
        self.stored = 0
        self._depot = depot
        self._shared = shared
        self._generation = generation
        self._named = named
        self._life = life
        self._unknown = unknown
        self._lacking = sorted(lacking, key=lambda item: (item[1], item[0]))
        """By page, so that what is there is always the beginning of something."""
        self._next()

    def _next(self) -> None:
        """Pick the next items."""
        spec = self._shared.spec
        largest = max((spec.groups[group].item_bytes for group, _ in self._lacking), default=1)
        most = max(1, CHUNK_BYTES // largest) if spec.keyed else chunk_pages(spec)
        pages = list(itertools.islice(dict.fromkeys(page for _, page in self._lacking), most))
        last = pages[-1] if pages else -1
        self.picks = picks_of(sorted(item for item in self._lacking if item[1] <= last))
        self._lacking = [item for item in self._lacking if item[1] > last]

    async def send(self, places: Sequence[Place], sums: Sequence[int]) -> int:
        """See Sink."""
        async with self._depot.turn() as mine:
            if not mine:
                raise OSError("too much is under way with the shared store")
            return await self._send(places, sums)

    async def _send(self, places: Sequence[Place], sums: Sequence[int]) -> int:
        """Write the bytes, then the heads."""
        depot, shelf, spec = self._depot, self._depot.shelf, self._shared.spec
        until = depot.until(2 * nbytes_of(spec, [(place.group, place.page) for place in places]))
        heads: list[Want] = []
        bodies: list[Want] = []
        owner: list[int] = []
        for at, (place, value) in enumerate(zip(places, sums, strict=True)):
            mark = self._named[place.page]
            head = Head(place.group, spec.groups[place.group].item_bytes, value, mark.echo)
            name = item_name(self._shared, self._generation, mark, place.group)
            heads.append(Want(name, [memoryview(head.pack())]))
            mine = pieces(name, head, place)
            bodies += mine
            owner += [at] * len(mine)
        # A head is written when its bytes are there: what has a head can be read, until the store evicts some of it.
        failed = {at for at, ok in zip(owner, await shelf.write(bodies, until), strict=True) if not ok}
        whole = [head for at, head in enumerate(heads) if at not in failed]
        done = await shelf.write(whole, until) if whole else []
        if failed or not all(done):
            if shelf.up and self._life == shelf.life:
                depot.refused()
            raise OSError("the shared store did not take all of it")
        if self._life != shelf.life:
            raise OSError("the shared store was away meanwhile: what was written may be of no generation")
        return len({place.page for place in places})

    async def more(self) -> None:
        """See Sink. Raises OSError at the end where something is left to be tried again."""
        self._next()
        if not self.picks and self._unknown:
            raise OSError(f"part of the shared store does not answer: {self._unknown} items were not given to it")

    def close(self) -> None:
        """See Sink."""
