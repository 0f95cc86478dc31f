"""Operators' exports: a prefix or a cache as the bytes of a file, read page by page and verified on the way."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from math import inf
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtier import archive, wire
from kvtier.index import Node
from kvtier.mover import Urgency, Views, digest
from kvtier.store.cache import Cache
from kvtier.store.loads import Missing
from kvtier.store.parts import Parts
from kvtier.store.prompts import cache_of, held, resolve
from kvtier.store.runs import names_of
from kvtier.store.slices import sliced
from kvtier.store.visits import Visits
from kvtier.tiers.disk import DiskTier
from kvtier.types import NO_COPY, RUN_PAGES, Code, KvtierError, Tier

CHUNK_BYTES: Final = 1 << 20
"""Of the file in one reply: about a millisecond of the loop."""
RUN_BYTES: Final = 4 << 20
"""A run has no more, unless one page has."""


class Span(NamedTuple):
    """Pages [first, end) of the path to `node`; what goes on from them comes next, before all else."""

    node: Node
    first: int
    end: int


class Copy(NamedTuple):
    """One item to read: from host where `host` is not NO_COPY, else from disk."""

    item: archive.Item
    host: int
    disk: int


class Export:
    """One file on its way out; pages that are evicted meanwhile are left out, with what follows them."""

    def __init__(self, cache: Cache, spans: deque[Span]) -> None:
        self.cache = cache
        self.spans = spans
        self.total = sum(span.end - span.first for span in spans)
        self.pages = 0
        self.broken: float = inf
        """Where the last span with a page that could not be read ends: what goes on there has no parent in the file."""
        head = archive.header(cache.spec, cache.scope, cache.epoch)
        self.ready: deque[memoryview] = deque([memoryview(archive.record(archive.HEADER, head, 0, b""))])
        self.ended = False

    def take(self) -> bytes:
        """The next bytes of what is ready."""
        out: list[memoryview] = []
        left = CHUNK_BYTES
        while left and self.ready:
            part = self.ready.popleft()
            if len(part) > left:
                self.ready.appendleft(part[left:])
            out.append(part[:left])
            left -= len(out[-1])
        return b"".join(out)

    def end(self) -> None:
        """Everything was read."""
        last = archive.End(self.pages, self.total - self.pages)
        self.ready.append(memoryview(archive.record(archive.END, last, 0, self.cache.id)))
        self.ended = True


class Exports:
    """The verbs Export, ExportNext and ExportEnd."""

    def __init__(self, parts: Parts, visits: Visits) -> None:
        self.parts = parts
        self.visits = visits

    async def begin(self, msg: wire.Export) -> wire.Info:
        """Note the pages of a prompt's match, or of a whole cache. Raises bad_request, unknown, busy."""
        if self.parts.loading:
            raise KvtierError(Code.BUSY, "the catalogue is still being indexed")
        if msg.of.tokens or msg.of.request or msg.of.session or msg.of.chain or msg.of.keys:
            found = held(await resolve(self.parts.caches, self.parts.requests, msg.of))
            cache, most = found.cache, 1 if found.cache.spec.keyed else found.pages
            with self.parts.leased(cache, *found.nodes):
                await self._settle(cache)
                nodes = [node for last in found.nodes for node in cache.index.path(last)]
            spans = deque(Span(node, node.depth, min(node.end, most)) for node in nodes)
        else:
            cache = cache_of(self.parts.caches, msg.of.cache)
            await self._settle(cache)
            spans = deque([span async for span in sliced(_spans(cache))])
        if not spans:
            raise KvtierError(Code.UNKNOWN, "nothing of it is cached", "of")
        export = Export(cache, spans)
        number = self.visits.add(export, _nothing)
        size = export.total * sum(cache.item_bytes)
        return wire.Info({"export": number, "cache": cache.id.hex(), "pages": export.total, "bytes": size})

    async def _settle(self, cache: Cache) -> None:
        """Have in host what only a device has: it is read from there."""
        if self.parts.vram is not None:
            await self.parts.vram.settle([cache])

    async def next(self, msg: wire.ExportNext) -> wire.Chunk:
        """The file's next bytes. Raises unknown, busy."""
        with self.visits.using(msg.export, Export) as export:
            while not export.ready and not export.ended:
                await self._more(export)
            data = export.take()
        last = export.ended and not export.ready
        if last:
            self.visits.end(msg.export)
        return wire.Chunk(data, last)

    def end(self, msg: wire.ExportEnd) -> wire.Ok:
        """Give an export up."""
        self.visits.end(msg.export)
        return wire.Ok()

    async def _more(self, export: Export) -> None:
        """Read the next run, or note that there is none."""
        async for _ in sliced(itertools.repeat(None)):
            if not export.spans:
                export.end()
                return
            span = export.spans.popleft()
            if span.first >= min(span.end, export.broken):
                continue
            export.broken = inf
            index = export.cache.index
            node, at = index.locate(index.heir(span.node), span.first)
            if node.dead:
                continue
            end = min(span.end, node.depth + node.live, span.first + RUN_PAGES)
            if at >= node.live or end <= span.first:
                continue  # evicted, and so is all that follows
            with self.parts.leased(export.cache, node):
                done = await self._run(export, node, span.first, end)
            if done:
                export.spans.appendleft(span._replace(first=span.first + done))
                return
            export.broken = span.end

    async def _run(self, export: Export, node: Node, first: int, end: int) -> int:
        """Read pages [first, end) of a leased node, or the first few of them; how many it was."""
        cache = export.cache
        plan, pages = _plan(cache, node, first, end)
        payload = np.empty(sum(cache.item_bytes[copy.item.group] for copy in plan), np.uint8)
        bad = await self._read(cache, plan, payload)
        for copy, reason in bad:
            tier, handle = (Tier.DISK, copy.disk) if copy.host == NO_COPY else (Tier.HOST, copy.host)
            lost = Missing(node, copy.item.group, first + copy.item.page, tier, handle, copy.item.sum)
            self.parts.loads.lose(cache, lost, reason)
        if bad:
            pages = min(copy.item.page for copy, _ in bad)
            plan = [copy for copy in plan if copy.item.page < pages]
            payload = payload[: sum(cache.item_bytes[copy.item.group] for copy in plan)]
        if plan:
            keys, _, parent = names_of(cache, node, first, first + pages)
            run = archive.Run(parent, keys, tuple(copy.item for copy in plan))
            export.ready.append(memoryview(archive.record(archive.RUN, run, payload.nbytes, cache.id)))
            export.ready.append(memoryview(payload.data))
            export.pages += pages
        return pages if plan else 0

    async def _read(self, cache: Cache, plan: list[Copy], payload: NDArray[np.uint8]) -> list[tuple[Copy, str]]:
        """Fill the payload; the copies that are not what was stored, and why."""
        parts, at = [], 0
        for copy in plan:
            size = cache.item_bytes[copy.item.group]
            views = [] if copy.host == NO_COPY else cache.views(copy.item.group, copy.host)
            parts.append((copy, views, payload[at : at + size]))
            at += size
        said = await self.parts.mover.run(_fill, self.parts.disk, parts, urgency=Urgency.BACKGROUND)
        return [(copy, reason) for copy, reason in zip(plan, said, strict=True) if reason]


def _spans(cache: Cache) -> Iterator[Span]:
    """All that is served, parents first; the index may change between two of them.

    A node that is split is noted from the first page that it had, what is joined to the node below it is noted there.
    """
    for top in list((cache.index.root.children or {}).values()):
        stack = [(top, 0)]
        while stack:
            node, first = stack.pop()
            if not node.dead:
                if node.live:
                    yield Span(node, first, node.depth + node.live)
                first = node.end
            stack += [(child, first) for child in (node.children or {}).values()]


def _plan(cache: Cache, node: Node, first: int, end: int) -> tuple[list[Copy], int]:
    """The items of pages [first, end) that can be read, up to RUN_BYTES, and how many pages that is.

    It ends before a page without an item that each page needs: only a device has that, or nobody any more.
    """
    index = cache.index
    out: list[Copy] = []
    size = 0
    for page in range(first, end):
        size += sum(cache.item_bytes)
        if size > RUN_BYTES and page > first:
            return out, page - first
        at = page - node.depth
        copies = [
            [index.get(node, at, tier, group) for tier in (Tier.HOST, Tier.DISK)] for group in range(index.groups)
        ]
        if any(copies[group] == [NO_COPY, NO_COPY] for group in index.anchors):
            return out, page - first
        for group, (host, disk) in enumerate(copies):
            sums = node.sums[group]
            if sums is not None and (host != NO_COPY or disk != NO_COPY):
                out.append(Copy(archive.Item(page - first, group, sums[at]), host, disk))
    return out, end - first


def _fill(disk: DiskTier | None, parts: list[tuple[Copy, Views, NDArray[np.uint8]]]) -> list[str]:
    """In a worker thread: copy from host and check, read from disk what host lacks; per copy '' or what is wrong."""
    said = dict.fromkeys(range(len(parts)), "")
    away = []
    for number, (copy, views, target) in enumerate(parts):
        if not views:
            away.append(number)
            continue
        at = 0
        for view in views:
            np.copyto(target[at : at + view.size], view)
            at += view.size
        said[number] = "" if digest([target]) == copy.item.sum else "checksum"
    if away:
        assert disk is not None
        found = disk.read([(parts[n][0].disk, parts[n][0].item.group, [parts[n][2]]) for n in away])
        said.update(zip(away, found, strict=True))
    return list(said.values())


def _nothing(_export: Any) -> None:
    """An export holds nothing between two calls."""
