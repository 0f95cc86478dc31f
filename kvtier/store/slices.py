"""Long work on the loop, cut into slices of about a millisecond so that engines are served between them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Final, TypeVar

from kvtier.index import Node

SLICE_S: Final = 1e-3

T = TypeVar("T")


async def sliced(items: Iterable[T], rest_s: float = 0.0, slice_s: float | None = None) -> AsyncIterator[T]:
    """The items; after each slice the loop has its turn, and at least `rest_s` seconds. They may change meanwhile."""
    slice_s = SLICE_S if slice_s is None else slice_s
    until = time.perf_counter() + slice_s
    for item in items:
        yield item
        if time.perf_counter() > until:
            await asyncio.sleep(rest_s)
            until = time.perf_counter() + slice_s


def popped(stack: list[T]) -> Iterator[T]:
    """Items of a stack that grows meanwhile."""
    while stack:
        yield stack.pop()


def leaves(tops: list[Node]) -> Iterator[Node]:
    """A leaf of some subtree (of siblings, which may be many), again and again until all of them were cut.

    So is what a match has made of their beginnings meanwhile: a node above one that it split, one that others were
    joined to.
    """
    first = tops[0].depth if tops else 0
    for top in popped(tops):  # to free so many at the end would take as long as to cut some thousands of them
        yield from _leaves(top)
        seen, beside = {top}, _beside(top, first)
        while beside:
            node = beside.pop()
            if node not in seen:
                seen.add(node)
                yield from _leaves(node)
                beside += _beside(node, first)


def _leaves(top: Node) -> Iterator[Node]:
    """The same of one, as it is."""
    stack = [top]
    while stack:
        node = stack[-1]
        if node.dead:
            stack.pop()
        elif node.children:
            stack += node.children.values()
        else:
            yield node


def _beside(gone: Node, first: int) -> list[Node]:
    """What may have pages from number `first` on that were in a node that is gone."""
    up = gone.parent
    above = [up] if up is not None and up.parent is not None and up.depth >= first else []
    return [*(gone.children or {}).values(), *above]
