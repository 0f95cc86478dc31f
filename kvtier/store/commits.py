"""Verbs commit and abort, and the end of reservations: finished, aborted, or left behind by a dead engine."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Iterable, Sequence

import numpy as np

from kvtier.index.node import on_path
from kvtier.mover import BATCH_BYTES, INLINE_BYTES, Urgency, digest
from kvtier.store.cache import Cache
from kvtier.store.durable import told_durable, watch_keys
from kvtier.store.instance import Instance, Process
from kvtier.store.parts import Parts
from kvtier.store.reserve import Reservation
from kvtier.types import Code, KvtierError, Tier, bad
from kvtier.waits import lasting
from kvtier.wire import Abort, Commit, Committed, Ok


class Commits:
    """Turns filled slots into served pages."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts

    @staticmethod
    def _known(process: Process, number: int) -> Reservation | None:
        """The open reservation, or None for one that is over; raises unknown."""
        res = process.instance.reservations.get(number)
        if res is None and number not in process.instance.finished:
            raise KvtierError(Code.UNKNOWN, f"no reservation {number} here", "reservation")
        return res

    def _find(self, process: Process, number: int) -> Reservation | None:
        """The same for a process that writes a shard of it."""
        res = self._known(process, number)
        if res is not None and res.cache.number not in process.ranks:
            raise KvtierError(Code.UNKNOWN, "this process has not opened the reservation's cache", "reservation")
        return res

    def commit(self, process: Process, msg: Commit) -> Committed | Awaitable[Committed]:
        """Count a process's shard of pages as written; replies after the checksum of those now complete."""
        if msg.keys and self.parts.loading:
            return lasting(asyncio.ensure_future(self._commit_absent(process, msg)))
        return self._commit(process, msg)

    async def _commit_absent(self, process: Process, msg: Commit) -> Committed:
        """The same once disk was asked for what is named: what it has is not stored again, with other bytes."""
        res = self._find(process, msg.reservation)
        if res is not None:
            _check_names(res, msg)
            index = res.cache.radix
            path = [
                *(node.edge for node in index.path(res.nodes[0])),
                msg.keys[(res.named - msg.named) * index.stride :],
            ]
            await self.parts.restore.path(res.cache, b"".join(path))
        reply = self._commit(process, msg)
        return reply if isinstance(reply, Committed) else await reply

    def _commit(self, process: Process, msg: Commit) -> Committed | Awaitable[Committed]:
        res = self._find(process, msg.reservation)
        if res is None:
            return Committed(process.instance.finished[msg.reservation])
        first = msg.first - res.start
        if first < 0 or msg.pages < 1 or first + msg.pages > res.pages:
            raise bad("first", f"pages within {res.start}..{res.start + res.pages - 1}", (msg.first, msg.pages))
        _check_names(res, msg)
        if res.filling and any(res.filling[at] for at in range(first, first + msg.pages)):
            raise KvtierError(Code.BUSY, "a Store still writes into these pages: commit them after its reply", "first")
        given = _given(process, res, msg)
        if msg.keys:
            self._name(res, msg)
        positions = res.mark(process, first, msg.pages)
        for group, sums in given:
            res.know(positions, group, first, sums)
        return self.complete(res, positions)

    def _name(self, res: Reservation, msg: Commit) -> None:
        """Pages that had no keys have some; a node for each of thousands would make each lease of the path slow."""
        res.name(msg.named, msg.keys, self.parts.now(), self.parts.unlease)
        index, node = res.cache.radix, res.nodes[0]
        if not self.parts.loading and not res.cache.gone(node) and index.crowded(node):
            index.join(node)

    def complete(self, res: Reservation, positions: Sequence[int]) -> Committed | Awaitable[Committed]:
        """Take the checksums of complete positions that are not known, and serve what can be served."""
        items = res.unsummed(positions)
        size = sum(res.cache.item_bytes[g] for g, _, _ in items)
        if size > INLINE_BYTES or (size and res.tier != Tier.HOST):
            res.hashing += 1
            return lasting(asyncio.ensure_future(self._sum_and_serve(res, positions, items)))
        for group, at, handle in items:
            res.sums[group][at] = digest(res.cache.views(group, handle))
        return self._serve(res, positions, good=True)

    async def _sum_and_serve(
        self, res: Reservation, positions: Sequence[int], items: list[tuple[int, int, int]]
    ) -> Committed:
        """The same in worker threads, whatever becomes of the request: the pages are complete and are served."""
        good = False
        try:
            await self._sum(res, items)
            good = True
        except KvtierError as exc:  # not busy, which would say that they are as they were
            raise KvtierError(Code.IO, f"pages that could not be summed are given up: {exc.message}") from exc
        finally:
            res.hashing -= 1
            reply = self._serve(res, positions, good=good)
        return reply

    async def _sum(self, res: Reservation, items: list[tuple[int, int, int]]) -> None:
        """Take checksums of items."""
        for group in {g for g, _, _ in items}:
            mine = [at for g, at, _ in items if g == group]
            handles = array("q", [h for g, _, h in items if g == group])
            if res.tier == Tier.HOST:
                found = await self._group_sums(res.cache, group, handles)
            else:
                found = await self.parts.copying.checksums(res.cache, group, handles, res.tier, Urgency.ENGINE)
            for at, value in zip(mine, found, strict=True):
                res.sums[group][at] = value

    async def _group_sums(self, cache: Cache, group: int, handles: array[int]) -> list[int]:
        """Checksums of items of one group."""
        mover, size = self.parts.mover, cache.item_bytes[group]
        if cache.shape.slots_per_item[group] > 1:
            return await mover.checksums([cache.views(group, h) for h in handles], size)
        blocks = cache.pool.blocks(group, handles, BATCH_BYTES)
        return await mover.row_checksums(blocks, cache.shape.slot_bytes[group], size)

    def _serve(self, res: Reservation, positions: Sequence[int], *, good: bool) -> Committed:
        """Publish what is complete, here and in reservations that waited for it."""
        before = res.next
        res.summed(positions, good=good)
        self._publish(res, positions)
        reply = Committed(res.published, res.waiting)
        self.settle(res)
        if not res.cache.spec.keyed:
            self._await(res)
            if res.next != before:
                self._wake(res)
        return reply

    def settle(self, res: Reservation) -> None:
        """End a reservation whose engine died meanwhile, or that has nothing left to do."""
        if res.instance.gone:
            self._end(res)
        else:
            self._finish(res)

    def _publish(self, res: Reservation, positions: Sequence[int]) -> None:
        if res.over:
            return
        now = self.parts.now()
        if res.cache.spec.keyed:
            for at in res.publish_keys(positions, now):
                self.parts.persist.offer(res.cache, res.nodes[at], 0, 1)
                if self.parts.peers is not None and not res.instance.guest:
                    self.parts.peers.pushes.offer(res.cache, res.nodes[at], 1, fresh=0)
            watch_keys(self.parts.persist, res)
            return
        first, end = res.publish(now)
        if first < end:
            vram = self.parts.vram
            if vram is not None and vram.state == "ready" and Tier.DEVICE in res.cache.pools:
                vram.demote.save(res.cache, res.nodes[0], first, end, told_durable(res))
            else:
                self.parts.persist.offer(res.cache, res.nodes[0], first, end, told_durable(res))
            if self.parts.peers is not None and not res.instance.guest:
                self.parts.peers.pushes.offer(res.cache, res.nodes[0], end, fresh=first)

    def _await(self, res: Reservation) -> None:
        """Remember it while it has complete pages that are not served."""
        if res.waiting and not res.over:
            self.parts.waiting.add(res)
        else:
            self.parts.waiting.discard(res)

    def _wake(self, res: Reservation) -> None:
        """Others' pages may follow what was just served."""
        for other in self._waiting(res):
            before = other.next
            self._publish(other, [])
            if other.next != before:
                self._finish(other)
                self._await(other)

    def _waiting(self, res: Reservation) -> list[Reservation]:
        """Other reservations of its cache that wait for a page, those that others wait for first."""
        found = [r for r in self.parts.waiting if r.cache is res.cache and r is not res]
        return sorted(found, key=lambda r: r.start)

    def _finish(self, res: Reservation) -> None:
        """End a reservation that is all served, or that can go no further and that nobody writes into."""
        if self._ended(res):
            self._end(res)

    def _ended(self, res: Reservation) -> bool:
        """Whether a reservation is over, giving up first what waits for a page that nobody will serve."""
        if res.over or res.hashing:
            return False
        if res.waiting and not res.cache.spec.keyed and not self._fed(res):
            res.abandon(complete=True)
        if res.kept:
            return False
        return res.settled or ((res.dead or res.stuck) and not res.writable)

    def _end(self, res: Reservation) -> None:
        """Its slots return; what waited for pages that it gave up ends too."""
        if res.over or res.hashing:
            return
        served = res.settled
        self.parts.end(res)
        if not served:
            for other in self._waiting(res):
                if self._ended(other):
                    self.parts.end(other)

    @staticmethod
    def _fed(res: Reservation) -> bool:
        """Whether the page before the next to serve is served or still reserved by somebody."""
        page = res.start + res.next
        if res.dead or page == 0:
            return not res.dead
        locate = res.cache.index.locate
        node, at = locate(res.nodes[0], page - 1)
        return at < node.live or any(
            r.start <= page - 1 < r.start + r.pages
            and r is not res
            and not r.stuck
            and (locate(r.nodes[0], page - 1)[0] is node or (r.named < page and on_path(node, r.nodes[0])))
            for r in res.cache.reservations
        )

    # -- giving up ---------------------------------------------------------------------------------------------

    def abort(self, process: Process, msg: Abort) -> Ok:
        """The process writes no more; when no other writer may either, the slots return.

        It may have come back, and not have opened the cache again.
        """
        res = self._known(process, msg.reservation)
        if res is not None:
            res.acks.add(process)
            self.give_up([res])
        return Ok()

    def give_up(self, reservations: Iterable[Reservation]) -> None:
        """Nobody fills more of them; they end when no process may write any more."""
        for res in reservations:
            res.abandon()
            self._finish(res)

    def process_gone(self, process: Process) -> None:
        """A dead process writes no more: what waited for its word may end, what only it could fill is given up."""
        for res in list(process.instance.reservations.values()):
            res.orphan()
            self._finish(res)

    def appointed(self, instance: Instance, cache: Cache) -> None:
        """A worker opened a cache: it is named in reservations that it is to write, before it may be lost again."""
        for res in [res for res in instance.reservations.values() if res.cache is cache]:
            res.decide()
            res.orphan()
            self._finish(res)

    def let_go(self, reservations: Iterable[Reservation]) -> None:
        """Every process that could write has ended: all slots return (those being summed when that ends)."""
        for res in reservations:
            res.abandon()
            self._end(res)


def _check_names(res: Reservation, msg: Commit) -> None:
    """Raise bad_request for keys that a reservation does not wait for, and for pages that have none."""
    stride, end = res.cache.index.stride, res.start + res.pages
    count, rest = divmod(len(msg.keys), stride)
    if rest or (count and not (res.running and 0 <= msg.named <= res.named and msg.named + count <= end)):
        raise bad("keys", f"page keys of a running reservation, from page {res.named} to {end}", (msg.named, count))
    if msg.first + msg.pages > max(res.named, msg.named + count):
        raise bad("first", f"pages whose keys are known: those before {res.named}", (msg.first, msg.pages))


def _given(process: Process, res: Reservation, msg: Commit) -> list[tuple[int, array[int]]]:
    """Checksums that a commit brings, by group; raises bad_request for those that its process cannot know."""
    if msg.sums and not res.whole(process):
        raise bad("sums", "none from a process that holds slices")
    found = []
    for each in msg.sums:
        if not 0 <= each.group < len(res.handles) or len(each.sums) != 8 * msg.pages:
            raise bad("sums", f"u64 of {msg.pages} pages of groups 0..{len(res.handles) - 1}", each.group)
        found.append((each.group, array("Q", np.frombuffer(each.sums, "<u8").tobytes())))
    return found
