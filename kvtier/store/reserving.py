"""The verb reserve of token caches: slots for pages of a path, in host or in device memory."""

from __future__ import annotations

from array import array
from collections.abc import Awaitable
from contextlib import AbstractContextManager
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtier.index.node import LOCAL
from kvtier.store.cache import Cache
from kvtier.store.instance import MAX_KEYS, Path, Process
from kvtier.store.parts import Parts
from kvtier.store.reserve import SETTLED, Reservation
from kvtier.store.space import Space
from kvtier.types import NO_COPY, Code, Kind, Tier, bad
from kvtier.wire import MAX_BODY, Items, Reserve, Reserved, Want

Mask = NDArray[np.bool_]
MOST_RUNNING = 1 << 16
"""Pages without keys of one request: a number is asked for at no cost, and each is looked at."""

MOST_TOLD = MAX_BODY - (1 << 16)
"""Bytes of a reply that say where items are: a larger one would be refused once its slots were granted."""


class Ask(NamedTuple):
    """One request for slots."""

    process: Process
    path: Path
    msg: Reserve
    wanted: list[Mask]
    """Per group, which of the pages are asked for."""
    space: Space


class Reserving:
    """Reservations over radix caches."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts

    def reserve(self, process: Process, msg: Reserve) -> Reserved | Awaitable[Reserved]:
        """Slots for pages of a path; waits only when room must be made."""
        path = process.instance.path(msg.handle)
        cache = path.cache
        stride = cache.index.stride
        total = MAX_KEYS // stride if msg.running else len(path.keys) // stride
        if msg.running and msg.pages > MOST_RUNNING:
            raise bad("pages", f"at most {MOST_RUNNING} running pages", msg.pages)
        if msg.pages < 1 or msg.start < 0 or msg.start + msg.pages > total:
            raise bad("pages", f"a range within the {total} pages of the handle", (msg.start, msg.pages))
        wanted = _wanted(cache, msg)
        deadline = self.parts.deadline(msg.wait_ms)
        if cache.retired:
            return Reserved(0, 0, refused=Code.UNKNOWN)
        self.parts.opened(process, cache.number)  # a sibling's handle says nothing of which shard this one holds
        space = self._space(process, cache, msg)
        if space is None or not space.memory.budget_bytes:
            return Reserved(0, 0, refused=Code.NO_SPACE)
        ask = Ask(process, path, msg, wanted, space)
        absent = self._lacking(cache, path.keys, msg.start, wanted)
        fits = self._fits(ask, absent)
        lack = [mask[:fits] for mask in absent]
        needs = [int(mask.sum()) for mask in lack]
        if space.allowance.free(cache, needs):
            got = [cache.pools[space.tier].alloc(g, n) if n else array("q") for g, n in enumerate(needs)]
            if all(len(have) == n for have, n in zip(got, needs, strict=True)):
                return self._fill(ask, got, "", absent)
            space.give_back(cache, got)
        groups: list[int] = np.nonzero(np.stack(lack, axis=1))[1].tolist()  # page by page
        return self._reserve_later(ask, groups, deadline)

    def _space(self, process: Process, cache: Cache, msg: Reserve) -> Space | None:
        """Where the slots come from: host, too, where the device has failed. Raises bad_request.

        None where an engine would compute in a device's slots and there is none (any more) for this cache.
        """
        if not msg.device:
            return self.parts.space
        if not process.device:
            raise bad("device", "a process that said UseDevice")
        vram = self.parts.vram
        if vram is not None and vram.state == "ready" and Tier.DEVICE in cache.pools:
            return vram.space
        return None if msg.running else self.parts.space

    async def _reserve_later(self, ask: Ask, groups: list[int], deadline: float) -> Reserved:
        cache, space = ask.path.cache, ask.space
        keep = partial(self._kept, ask)
        got = await self.parts.patience.take(space, cache, groups, ask.process.instance, deadline, keep)
        if cache.retired or ask.process.instance.gone:
            space.give_back(cache, got)
            return Reserved(0, 0, refused=Code.UNKNOWN)
        if self._space(ask.process, cache, ask.msg) is not space:  # the device failed meanwhile
            space.give_back(cache, got)
            return Reserved(0, 0, refused=Code.NO_SPACE)
        whole = sum(map(len, got)) == len(groups)
        short = "" if whole else space.allowance.short(cache, groups)
        return self._fill(ask, got, short, self._lacking(cache, ask.path.keys, ask.msg.start, ask.wanted))

    def _kept(self, ask: Ask) -> AbstractContextManager[None]:
        """Let no room be made of what only this tier has of the path itself: pages are of no use without their first.

        Those that a slower tier has make room as others do: a prompt may be larger than the tier.
        """
        cache, msg = ask.path.cache, ask.msg
        node, end = cache.radix.deepest(ask.path.keys[: (msg.start + msg.pages) * cache.index.stride])
        return ask.space.keeping(node, end)

    @staticmethod
    def _fits(ask: Ask, lack: list[Mask]) -> int:
        """How many leading pages are within the instance's cap, and are told of in one reply."""
        cost = sum(m.astype(np.int64) * ask.path.cache.slot_cost(g) for g, m in enumerate(lack))
        within = int(np.searchsorted(np.cumsum(cost), ask.process.instance.room(ask.space.tier), side="right"))
        return min(within, MOST_TOLD // (8 * sum(ask.path.cache.shape.slots_per_item)))

    @staticmethod
    def _lacking(cache: Cache, keys: bytes, start: int, wanted: list[Mask]) -> list[Mask]:
        """Per group and page: wanted and not cached."""
        pages = len(wanted[0])
        index = cache.radix
        node, end = index.deepest(keys[: (start + pages) * index.stride])
        have = max(0, end - start)
        out = []
        for group, mask in enumerate(wanted):
            lack = mask.copy()
            if have:
                for tier in LOCAL:
                    held = np.frombuffer(cache.gather(node, group, start, have, tier), np.int64)
                    lack[:have] &= held == NO_COPY
            out.append(lack)
        return out

    def _fill(self, ask: Ask, got: list[array[int]], short: str, lack: list[Mask]) -> Reserved:
        """Make the reservation of as many leading pages as the slots cover; `lack`: which items are absent now."""
        process, path, msg, _, space = ask
        cache, index = path.cache, path.cache.radix
        known = len(path.keys) // index.stride
        if index.known(path.keys[: msg.start * index.stride]) < min(msg.start, known):
            space.give_back(cache, got)
            return Reserved(0, 0, refused=Code.UNKNOWN)
        granted = self._fits(ask, lack)
        refused = "" if granted == msg.pages else str(Code.OVER_CAP)
        for group, mask in enumerate(lack):
            covered = int(np.searchsorted(np.cumsum(mask), len(got[group]), side="right"))
            if covered < granted:
                granted, refused = covered, short or str(Code.NO_SPACE)
        handles = []
        for group, mask in enumerate(lack):
            row = np.full(granted, NO_COPY, np.int64)
            used = int(mask[:granted].sum())
            row[mask[:granted]] = got[group][:used]
            handles.append(array("q", row.tobytes()))
            cache.free(space.tier, group, got[group][used:])
        if not granted:
            return Reserved(0, 0, refused=refused or Code.NO_SPACE)
        node = index.extend(path.keys[: (msg.start + granted) * index.stride], self.parts.now())
        index.lease(node)
        named = min(known, msg.start + granted) if msg.running else -1
        res = Reservation(next(self.parts.numbers), cache, process, [node], msg.start, handles, space.tier, named=named)
        items = tuple(Items(g, msg.start, granted, cache.offsets(g, row)) for g, row in enumerate(handles))
        there = ~np.logical_or.reduce([mask[:granted] for mask in lack])
        res.state[:] = (there * np.uint8(SETTLED)).tobytes()
        self.parts.admit(res)
        space.ahead(cache.pools[space.tier])
        return Reserved(res.number, granted, items, refused, res.writes, named)


def _wanted(cache: Cache, msg: Reserve) -> list[Mask]:
    """Per group, which of the pages are asked for; raises bad_request."""
    out = [np.full(msg.pages, g.kind is not Kind.STATE) for g in cache.spec.groups]
    for want in msg.wants:
        if not 0 <= want.group < len(out):
            raise bad("wants.group", f"0..{len(out) - 1}", want.group)
        if want.group in cache.index.anchors:
            raise bad("wants.group", "a group that is not stored for every page anyway", want.group)
        out[want.group] = _pages_mask(want, msg)
    return out


def _pages_mask(want: Want, msg: Reserve) -> Mask:
    if len(want.pages) % 4:
        raise bad("wants.pages", "int32 page numbers", len(want.pages))
    at = np.frombuffer(want.pages, "<i4").astype(np.int64) - msg.start
    if at.size and (at.min() < 0 or at.max() >= msg.pages):
        raise bad("wants.pages", f"pages {msg.start}..{msg.start + msg.pages - 1}")
    mask = np.zeros(msg.pages, dtype=bool)
    mask[at] = True
    return mask
