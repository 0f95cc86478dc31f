"""Which tier serves which part of a match."""

from __future__ import annotations

import numpy as np

from kvtier.index import Node
from kvtier.store.cache import Cache
from kvtier.types import NO_COPY, Tier
from kvtier.wire import Segment


def segments(cache: Cache, node: Node, pages: int, *, device: bool = False) -> tuple[Segment, ...]:
    """Which tier serves which part of a match best, by the first anchor group; `device`: to a reader of its memory."""
    out: list[Segment] = []
    group = cache.index.anchors[0]
    if not pages:
        return ()
    for each in cache.index.path(node):
        live = min(each.pages, pages - each.depth)
        everywhere = each.pages * cache.index.groups
        quick = device and each.count[Tier.DEVICE]
        if not quick and (
            each.count[Tier.HOST] == everywhere or not (each.count[Tier.HOST] or each.count[Tier.DEVICE])
        ):
            _append(out, Tier.HOST if each.count[Tier.HOST] else Tier.DISK, live)
            continue
        tiers = np.full(live, Tier.DISK)
        for tier in (Tier.HOST, Tier.DEVICE) if device else (Tier.DEVICE, Tier.HOST):
            if each.count[tier] and (held := each.handles(tier, group)) is not None:
                tiers[held[:live] != NO_COPY] = tier
        for at in np.flatnonzero(np.diff(tiers, prepend=-1)):
            end = int(np.append(np.flatnonzero(np.diff(tiers[at:])) + 1, live - at)[0])
            _append(out, int(tiers[at]), end)
    return tuple(out)


def _append(out: list[Segment], tier: int, pages: int) -> None:
    """Add pages to the last segment, or begin one."""
    if out and out[-1].tier == tier:
        pages += out.pop().pages
    out.append(Segment(int(tier), pages))
