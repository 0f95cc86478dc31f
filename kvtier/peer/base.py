"""What the store asks of a peer tier, whatever carries the bytes. Every implementation passes one suite of tests.

A peer's copy is a hint: it is looked for when a prompt is not all here, copied into this host's own slots, checked,
and from then on is a page like any other. Nothing is ever lost because a peer went away.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Protocol

import msgspec

from kvtier.identity import CacheSpec


class Shared(NamedTuple):
    """A cache as hosts know it that share it."""

    spec: CacheSpec
    scope: str
    """The trust scope here; other hosts may call theirs differently."""
    id: bytes
    """32 bytes: equal on two hosts exactly when spec and secret are."""


class Pick(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Items of one group, by their pages: int32 little-endian page numbers from the root."""

    group: int
    pages: bytes


class Place(NamedTuple):
    """Where one item goes or comes from: its slots, as writable uint8 views in order."""

    group: int
    page: int
    views: list[Any]


class Ahead(NamedTuple):
    """Items of leased pages or keys that a home mostly lacks, and their checksums."""

    places: Sequence[Place] = ()
    sums: Sequence[int] = ()


NOTHING: Final = Ahead()


class Move(NamedTuple):
    """A change among the hosts that homes are chosen from."""

    before: tuple[str, ...]
    """Who they were."""
    fresh: frozenset[str]
    """Who came back or was started again, and may have lost what it had, or missed what it was to get."""


class Source(Protocol):
    """A peer that has more of a path than this host. Used by one task; closed when done."""

    node: str
    pages: int
    """Leading pages of the path that it can serve."""

    async def fetch(self, places: Sequence[Place]) -> list[int | None]:
        """Fill the places; the xxh3-64 of each item that arrived and is what was stored, else None.

        Ends, however it ends, only when no byte is written into the places any more. Never raises OSError or
        TimeoutError: what did not come in time is None.
        """

    def close(self) -> None:
        """Let the peer go."""


class Sink(Protocol):
    """A home that lacks something of a path. Used by one task; closed when done."""

    node: str
    picks: tuple[Pick, ...]
    """What it takes next; empty when it has all."""
    stored: int
    """Pages that it serves of what went with the offer."""

    async def send(self, places: Sequence[Place], sums: Sequence[int]) -> int:
        """Give it the items (a prefix of what it picked, page by page); returns how many pages it serves of them.

        Ends only when no byte is read from the places any more. Raises KvtierError or OSError where it failed.
        """

    async def more(self) -> None:
        """Ask what it takes after that: changes `picks`."""

    def close(self) -> None:
        """Let the peer go."""


class PeerTier(Protocol):
    """Other hosts' copies."""

    keeps_all: bool
    """Whether homes are to have what only disk has here, too: a store that hosts share evicts what nobody asks for."""

    def start(self) -> None:
        """Begin to watch the peers; needs a running loop."""

    def shared(self, spec: CacheSpec, scope: str, epoch: int) -> Shared | None:
        """The cache as peers know it; None where it is not shared."""

    def worth(self, shared: Shared, keys: bytes, have: int) -> bool:
        """Whether some peer may have page `have` of the path: it is up and has not just said no. Never waits."""

    async def find(self, shared: Shared, keys: bytes, have: int) -> list[Source]:
        """Peers with more than `have` pages of the path, most first; asks its homes side by side, for one deadline."""

    async def depth(self, node: str, shared: Shared, keys: bytes) -> int:
        """How many leading pages of a path one peer has; 0 where it does not say within the deadline."""

    def answers(self) -> bool:
        """Whether any peer is up."""

    async def holders(self, shared: Shared, group: int, keys: list[bytes]) -> dict[bytes, list[str]]:
        """Keyed caches: which homes have each key, those that say so within one deadline."""

    async def source(self, node: str, shared: Shared, group: int, keys: bytes) -> Source | None:
        """Keyed caches: that peer for these (concatenated) keys, whose positions are the pages; None where it fails.

        Those that it does not have do not come; the others do.
        """

    def key_homes(self, shared: Shared, group: int, key: bytes) -> list[str]:
        """Keyed caches: peers that a key should be pushed to."""

    def known(self, node: str) -> bool:
        """Whether that is a peer's name."""

    def homes(self, shared: Shared, keys: bytes) -> list[tuple[str, int]]:
        """(peer, leading pages) that should be pushed of a path that was computed here."""

    def gave_up(self) -> None:
        """Something that was to be pushed is not tried again: who does not answer now gets it once that is over."""

    def moves(self) -> Move | None:
        """What changed among the homes since this was asked last; None: nothing."""

    def owed(self, shared: Shared, keys: bytes, move: Move, group: int = 0) -> bool:
        """Whether this host is to give a path (keyed caches: a key of `group`) to homes it has since that move."""

    async def offer(
        self, node: str, shared: Shared, keys: bytes, spare: tuple[Pick, ...], group: int = 0, ahead: Ahead = NOTHING
    ) -> Sink | None:
        """Tell a home of a path; `spare`: which items of window and state groups this host has. None: it refuses.

        Keyed caches: of keys of `group`, whose positions are the pages. `ahead` may go with the question; no byte of
        it is read once this has ended.
        """

    @property
    def name(self) -> str:
        """This host's own name among the peers."""

    async def forget(self, shared: Shared) -> None:
        """The cache was purged here: what a store that the fleet shares has of it is served to nobody any more."""

    async def weigh(self, shared: Shared, keys: bytes) -> dict[str, dict[str, int]]:
        """Per peer that answers within the deadline: the fields of a route.View but its name."""

    def preferred(self, shared: Shared, keys: bytes) -> list[str]:
        """All hosts, in the order in which a prompt that nobody has should go to them."""

    def status(self) -> list[dict[str, Any]]:
        """One row per peer, for people."""

    async def close(self) -> None:
        """Drop every connection."""
