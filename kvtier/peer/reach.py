"""How much of a path a shared store has: which pages follow each other, and where an engine can resume."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

import numpy as np

from kvtier.identity import CacheSpec
from kvtier.types import Kind

FIRST_LOOK: Final = 64
"""Pages that the first question is about; each further one is about four times as many, up to MOST_LOOK."""
MOST_LOOK: Final = 1024
Item = tuple[int, int]
Ask = Callable[[list[Item]], Awaitable[list[bool | None]]]
"""Which (group, page) items are there; None: it is not known."""


class Reach:
    """What is known of a path of `total` pages."""

    def __init__(self, spec: CacheSpec, total: int, ask: Ask) -> None:
        self._spec = spec
        self._ask = ask
        self._there = [np.zeros(total, bool) for _ in spec.groups]
        """Per group: which pages' items are there."""

    async def deepest(self, have: int) -> int | None:
        """The deepest boundary beyond `have` at which an engine can resume (`have`: none); None: it is not known."""
        spec, total = self._spec, len(self._there[0])
        groups = range(len(spec.groups))
        begin = {g: min(have, _first(spec, g, have + 1)) for g in groups}
        end, step = have, FIRST_LOOK
        while end < total:
            upto = min(total, end + step)
            items = [(g, at) for g in groups for at in range(begin[g], upto)]
            found = await self._ask(items)
            if any(there is None and at == have for (_, at), there in zip(items, found, strict=True)):
                return None  # silence about the first page is no no
            for (g, at), there in zip(items, found, strict=True):
                self._there[g][at] = bool(there)
            begin, step = dict.fromkeys(groups, upto), min(step * 4, MOST_LOOK)
            solid = min(self._run(g, have, upto) for g in anchors(spec))
            end = upto
            if solid < upto:
                end = solid
                break
        return next((at for at in range(end, have, -1) if self._resumes(at)), have)

    def _run(self, group: int, first: int, end: int) -> int:
        """Up to where pages from `first` on are all there."""
        holes = np.flatnonzero(~self._there[group][first:end])
        return first + int(holes[0]) if len(holes) else end

    def _resumes(self, pages: int) -> bool:
        """Whether every group's rule holds at that boundary."""
        return all(
            self._there[g][_first(self._spec, g, pages) : pages].all()
            for g, group in enumerate(self._spec.groups)
            if group.kind is not Kind.FULL
        )


def always(spec: CacheSpec) -> list[int]:
    """Groups of which every page of a path is kept."""
    return [g for g, group in enumerate(spec.groups) if group.kind is Kind.FULL] or anchors(spec)


def anchors(spec: CacheSpec) -> list[int]:
    """Groups whose pages must follow each other without a hole."""
    full = [g for g, group in enumerate(spec.groups) if group.kind is Kind.FULL]
    return full or [next(g for g, group in enumerate(spec.groups) if group.kind is Kind.WINDOW)]


def _first(spec: CacheSpec, group: int, pages: int) -> int:
    """The first page whose item resuming after `pages` pages reads."""
    rule, tokens = spec.groups[group], spec.page_tokens
    if rule.kind is Kind.STATE:
        return max(0, pages - 1)
    return max(0, pages * tokens - rule.window) // tokens if rule.kind is Kind.WINDOW else 0
