"""Turns changes of the indexes into events. On the loop thread: it copies keys and names pages, and nothing more.

A page is announced per tier that has it, under the tier's medium, when its first anchor group has a copy there. What
was announced under one medium is taken back under the same. Prompts of caches with a salt, an adapter or extras are
not announced: their tokens do not tell them apart.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from kvtier.identity import CHAIN_BYTES, CacheSpec
from kvtier.index import Index, Node
from kvtier.types import Tier, stretches

MEDIUMS: Final[Mapping[int, str]] = {Tier.DEVICE: "GPU", Tier.HOST: "CPU_PINNED", Tier.DISK: "DISK"}
FLUSH_S: Final = 0.005
SLICE_S: Final = 1e-3


class Stored(NamedTuple):
    """Consecutive pages that a tier has now: `parent` is the chain key before them, empty at the root."""

    medium: str
    parent: bytes
    chains: bytes
    keys: bytes
    page_tokens: int


class Removed(NamedTuple):
    """Pages that a tier has no more."""

    medium: str
    chains: bytes


class Cleared(NamedTuple):
    """Nothing that was said before holds; what holds follows."""


Event = Stored | Removed | Cleared


class Feed:
    """Collects events and hands them on in batches, in order. Owned by the loop thread."""

    def __init__(self, send: Callable[[float, list[Event]], None], model: str = "") -> None:
        """`send(when, events)` takes a batch; `model`: only that model's caches ("": all)."""
        self._send = send
        self._model = model
        self._batch: list[Event] = []
        self._timer: asyncio.TimerHandle | None = None
        self._indexes: list[Index] = []
        self._announcing: asyncio.Task[None] | None = None
        self._anew = False
        """Whether everything is to be announced once more, after what is being announced."""

    def tells(self, spec: CacheSpec) -> bool:
        """Whether a cache's pages are announced."""
        plain = not (spec.keyed or spec.extras or spec.salt or spec.adapter)
        return plain and (not self._model or spec.model == self._model)

    def follow(self, index: Index) -> None:
        """Announce what changes in an index from now on."""
        self._indexes.append(index)
        index.watch = self

    def drop(self, index: Index) -> None:
        """An index is forgotten; it is empty."""
        if index in self._indexes:
            self._indexes.remove(index)

    # -- changes -----------------------------------------------------------------------------------------------------

    def stored(self, index: Index, node: Node, tier: int, lo: int, hi: int) -> None:
        """Pages [lo, hi) of a node have a copy in the tier."""
        medium = MEDIUMS.get(tier)
        if medium is None or lo >= hi:
            return
        chains = index.chain_to(node, hi)
        if lo:
            parent = chains[(lo - 1) * CHAIN_BYTES : lo * CHAIN_BYTES]
        else:
            above = node.parent
            assert above is not None
            parent = b"" if above is index.root else index.chain_of(above)[-CHAIN_BYTES:]
        keys = node.edge[lo * index.stride : hi * index.stride]
        self._add(Stored(medium, parent, chains[lo * CHAIN_BYTES : hi * CHAIN_BYTES], keys, index.spec.page_tokens))

    def lost(self, index: Index, node: Node, tier: int, lo: int, hi: int) -> None:
        """Pages [lo, hi) of a node have no copy in the tier any more."""
        medium = MEDIUMS.get(tier)
        if medium is not None and lo < hi:
            self._add(Removed(medium, index.chain_to(node, hi)[lo * CHAIN_BYTES : hi * CHAIN_BYTES]))

    def _add(self, event: Event) -> None:
        self._batch.append(event)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(FLUSH_S, self.flush)

    def flush(self) -> None:
        """Hand on what has been collected."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._batch:
            batch, self._batch = self._batch, []
            self._send(time.time(), batch)

    # -- everything again --------------------------------------------------------------------------------------------

    def announce(self) -> None:
        """Say that nothing holds and then all that is cached, in slices; changes go on in between."""
        self._anew = True
        if self._announcing is None or self._announcing.done():
            self._announcing = asyncio.get_running_loop().create_task(self._announce_all())

    async def _announce_all(self) -> None:
        while self._anew:
            self._anew = False
            await self._announce()

    async def _announce(self) -> None:
        self._add(Cleared())
        inner = set[Node]()
        """Nodes that were told, whose children say so."""
        until = time.perf_counter() + SLICE_S
        for index in list(self._indexes):
            for node in index.walk():
                if time.perf_counter() > until:
                    self.flush()
                    await asyncio.sleep(0)
                    until = time.perf_counter() + SLICE_S
                if not node.dead:
                    for each in _untold(index, node, inner):
                        self._tell(index, each)

    def _tell(self, index: Index, node: Node) -> None:
        """Announce all copies of a node."""
        for tier in MEDIUMS:
            held = node.at[tier * index.groups + index.anchors[0]]
            if held is not None:
                for lo, hi in stretches(held):
                    self.stored(index, node, tier, lo, hi)


def _untold(index: Index, node: Node, inner: set[Node]) -> list[Node]:
    """The node, and those right above it that were not told: a node that is split gives its pages to a new parent."""
    found = [node]
    while (above := found[-1].parent) is not None and above is not index.root and above not in inner:
        found.append(above)
    inner.update(found[1:])
    if node.children:
        inner.add(node)
    return found[::-1]
