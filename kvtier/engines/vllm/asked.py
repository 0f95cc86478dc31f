"""What the scheduler's side of the connector remembers of one request."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Final

from kvtier.client import Lease, Path, Reservation
from kvtier.engines.vllm.media import Shown
from kvtier.engines.vllm.messages import Load, Weights
from kvtier.types import Tier

FRESH_S: Final = 0.01
"""A match that is so old is not asked for again: most requests are looked up as soon as they are announced."""


@dataclass
class Asked:
    """One request of the engine's, and what is going on for it."""

    request: Any
    path: Path
    shown: Shown
    """Its images and sound."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held by the thread that asks the daemon about the path."""
    keyed: int = 0
    """Pages whose keys the path has."""
    matched: float = 0.0
    """When the daemon was asked last (time.monotonic)."""
    warming: Future[None] | None = None
    """The first match; None before it is asked for."""
    lookup: Future[Lease] | None = None
    lease: Lease | None = None
    plan: tuple[int, int] = (0, 0)
    """Pages [first, end) that are being loaded."""
    reserving: Future[Reservation] | None = None
    wants: list[tuple[int, list[int]]] = field(default_factory=list)
    """(group, pages) of that reservation, for groups that do not keep every page."""
    saved: int = 0
    """Pages before this one are stored, or on their way."""
    loads: bool = True
    """False after a load failed: the next answer is that there is nothing."""
    saves: bool = True
    """False where its KV must not be stored."""
    weights: Weights | None = None
    """The LoRA adapter that its keys were made of."""
    sources: dict[Tier, int] = field(default_factory=dict)
    """Pages of the match by tier."""
    over: bool = False
    """Whether the request has ended: a match would make a new path, which nobody closes."""

    def stale(self, pages: int) -> bool:
        """Whether so many pages are to be matched (again) before anything is said of them."""
        return pages > self.keyed or time.monotonic() > self.matched + FRESH_S

    @property
    def goes_on(self) -> bool:
        """Whether the request will have steps after this one, unless it ends of itself."""
        return bool(self.request.num_output_tokens + 1 < (self.request.max_tokens or 1))


def tiers_of(path: Path) -> dict[Tier, int]:
    """Pages of a match by tier, root first."""
    out: dict[Tier, int] = {}
    for segment in path.segments:
        out[Tier(segment.tier)] = out.get(Tier(segment.tier), 0) + segment.pages
    return out


def loaded_from(asked: Asked, size: int) -> dict[Tier, int]:
    """Tokens of the load that is planned by the tier that the pages were in."""
    (first, end), at, out = asked.plan, 0, Counter[Tier]()
    for tier, pages in asked.sources.items():
        out[tier] += max(0, min(end, at + pages) - max(first, at)) * size
        at += pages
    return dict(out)


def given(output: Any, loads: Sequence[Load]) -> list[Sequence[int]]:
    """Blocks that a step gives to requests or loads into, those that requests share with others among them."""
    tables = [new.block_ids for new in output.scheduled_new_reqs]
    tables += [rows for rows in output.scheduled_cached_reqs.new_block_ids if rows is not None]
    return [row for table in (*tables, *(load.blocks for load in loads)) for row in table]
