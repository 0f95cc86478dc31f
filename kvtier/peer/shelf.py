"""What the peer tier asks of a store that the whole fleet shares (Redis, Mooncake), and how items lie in it.

An item is a head of 40 bytes under a name that follows from the cache's id, its generation, the chain key and the
group; and its bytes in pieces of at most 2 MiB under names that also have the item's checksum. So two hosts that
write different bytes for one page never mix, a head never names bytes of another writer, and an answer that belongs
to another name is found out by the echo in the head and the checksum of the whole.
"""

from __future__ import annotations

import base64
import hashlib
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple, Protocol

from kvtier.identity import CHAIN_BYTES
from kvtier.peer.base import Place, Shared

PIECE: Final = 2 << 20
"""Bytes of one value; a Redis slows down to a third with values of 32 MiB."""
GENERATION_BYTES: Final = 12
GENERATION_TAGS: Final = ("generation-ea", "generation-fa", "generation-px")
"""Three whose slots are in the middle of the thirds of a Redis Cluster."""
HEAD: Final = struct.Struct("<4sBxxxQQ16s")
MAGIC: Final = b"KVT1"


class Want(NamedTuple):
    """A value to read into views, or to write from them: exactly so many bytes."""

    name: str
    views: Sequence[memoryview]
    sum: Any = None
    """A hash that is given the bytes as they arrive; pieces of one item share it, in order."""

    @property
    def nbytes(self) -> int:
        """Bytes of the value."""
        return sum(len(view) for view in self.views)


class Shelf(Protocol):
    """A store of values by name. Nothing raises for what the store does: None is 'it did not say in time'.

    Every call ends by `until` (time.monotonic()), and only when no byte of a view is read or written any more.
    Whether servers answer, and when they are asked again, is the shelf's business.
    """

    name: str
    counts: Counter[str]
    peeks: bool
    """Whether `peek` costs no more than `has`: then heads are read when a path is looked for."""

    returns: int
    """How often a server answered again that had not."""

    @property
    def life(self) -> int:
        """Another number whenever a server was away meanwhile: it may have been started again, empty."""

    @property
    def up(self) -> bool:
        """Whether some of it answers."""

    def start(self) -> None:
        """Begin to watch the servers; needs a running loop."""

    async def has(self, names: Sequence[str], until: float) -> list[bool | None]:
        """Whether each value is there. A name decides its server by the part in braces."""

    async def peek(self, names: Sequence[str], most: int, until: float) -> list[bytes | None]:
        """Small values; b'' for those that are not there or longer than `most` bytes."""

    async def read(self, wants: Sequence[Want], until: float) -> list[bool | None]:
        """Fill the views; False: it is not there, or not of that length."""

    async def write(self, wants: Sequence[Want], until: float) -> list[bool]:
        """Store values, whether each is stored."""

    async def claim(self, names: Sequence[str], value: bytes, until: float) -> None:
        """Store a small value that does not expire under those of the names that have none."""

    async def replace(self, names: Sequence[str], value: bytes, until: float) -> list[bool]:
        """Store such a value under names whatever is there; where it is stored now."""

    async def drop(self, names: Sequence[str], until: float) -> bool:
        """Remove values; whether they are gone now."""

    def status(self) -> list[dict[str, Any]]:
        """One row per server, for people."""

    async def close(self) -> None:
        """Drop every connection."""


class Head(NamedTuple):
    """The first thing that is read of an item."""

    group: int
    nbytes: int
    sum: int
    echo: bytes

    def pack(self) -> bytes:
        """As it is stored."""
        return HEAD.pack(MAGIC, self.group, self.nbytes, self.sum, self.echo)


def head_of(raw: bytes) -> Head | None:
    """What is stored; None for bytes that are no head."""
    if len(raw) != HEAD.size:
        return None
    magic, *rest = HEAD.unpack(raw)
    return Head(*rest) if magic == MAGIC else None


class Mark(NamedTuple):
    """Names a page with all before it (or a key): what its name is made of, and what its head repeats."""

    chain: bytes
    echo: bytes


def marks(shared: Shared, keys: bytes) -> Iterator[Mark]:
    """Marks of consecutive pages from the root; of a keyed cache, of each key by itself."""
    stride, chain = shared.spec.stride, shared.id[:CHAIN_BYTES]
    for at in range(0, len(keys), stride):
        digest = hashlib.sha256(chain + keys[at : at + stride]).digest()
        yield Mark(digest[:CHAIN_BYTES], digest[CHAIN_BYTES:])
        if not shared.spec.keyed:
            chain = digest[:CHAIN_BYTES]


def generation_names(shared: Shared) -> list[str]:
    """Where the generation of a cache is kept."""
    return [f"kvt1:{_text(shared.id)}:{{{tag}}}" for tag in GENERATION_TAGS]


def item_name(shared: Shared, generation: bytes, mark: Mark, group: int) -> str:
    """Where the head of an item is kept: its pieces are on the same server, by the part in braces."""
    return f"kvt1:{_text(shared.id)}:{_text(generation)}:{{{_text(mark.chain)}}}:{group}"


def pieces(name: str, head: Head, place: Place, state: Any = None) -> list[Want]:
    """The values that an item's bytes are kept in, all of PIECE bytes but the last."""
    out: list[Want] = []
    views: list[memoryview] = []
    room = PIECE
    for view in place.views:
        left = memoryview(view).cast("B")
        while left:
            part, left = left[:room], left[room:]
            views.append(part)
            room -= len(part)
            if not room:
                out.append(Want(_piece_name(name, head, len(out)), views, state))
                views, room = [], PIECE
    if views:
        out.append(Want(_piece_name(name, head, len(out)), views, state))
    return out


def _piece_name(name: str, head: Head, number: int) -> str:
    return f"{name}:{head.sum:016x}:{number}"


def _text(raw: bytes) -> str:
    """Bytes as names have them."""
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()
