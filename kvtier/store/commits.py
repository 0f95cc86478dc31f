"""Verbs commit and abort, and the end of reservations: finished, aborted, or left behind by a dead engine."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from kvtier.mover import INLINE_BYTES, digest
from kvtier.store.instance import Instance, Process
from kvtier.store.parts import Parts
from kvtier.store.reserve import Reservation
from kvtier.types import Code, KvtierError, bad
from kvtier.wire import Abort, Commit, Committed, Durable, Ok


class Commits:
    """Turns filled slots into served pages."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts

    def _find(self, process: Process, number: int) -> Reservation | None:
        """The open reservation, or None for one that is over; raises unknown."""
        res = process.instance.reservations.get(number)
        if res is None and number not in process.instance.finished:
            raise KvtierError(Code.UNKNOWN, f"no reservation {number} here", "reservation")
        if res is not None and res.cache.number not in process.ranks:
            raise KvtierError(Code.UNKNOWN, "this process has not opened the reservation's cache", "reservation")
        return res

    def commit(self, process: Process, msg: Commit) -> Committed | Awaitable[Committed]:
        """Count a process's shard of pages as written; replies after the checksum of those now complete."""
        res = self._find(process, msg.reservation)
        if res is None:
            return Committed(process.instance.finished[msg.reservation])
        first = msg.first - res.start
        if first < 0 or msg.pages < 1 or first + msg.pages > res.pages:
            raise bad("first", f"pages within {res.start}..{res.start + res.pages - 1}", (msg.first, msg.pages))
        positions = res.mark(process, first, msg.pages)
        return self.complete(process, res, positions)

    def complete(
        self,
        process: Process,
        res: Reservation,
        positions: list[int],
        *,
        sums: dict[tuple[int, int], int] | None = None,
    ) -> Committed | Awaitable[Committed]:
        """Take the checksums of complete positions (unless given) and serve what can be served."""
        items = res.items(positions)
        cost = sum(res.cache.item_bytes[g] for g, _, _ in items)
        if sums is None and cost <= INLINE_BYTES:
            sums = {(g, at): digest(res.cache.views(g, handle)) for g, at, handle in items}
        if sums is not None:
            return self._serve(process, res, positions, sums)
        return self._sum_and_serve(process, res, positions, items)

    async def _sum_and_serve(
        self, process: Process, res: Reservation, positions: list[int], items: list[tuple[int, int, int]]
    ) -> Committed:
        res.hashing += 1
        sums: dict[tuple[int, int], int] = {}
        try:
            for group in {g for g, _, _ in items}:
                mine = [(at, res.cache.views(group, h)) for g, at, h in items if g == group]
                found = await self.parts.mover.checksums([v for _, v in mine], res.cache.item_bytes[group])
                sums.update({(group, at): total for (at, _), total in zip(mine, found, strict=True)})
        finally:
            res.hashing -= 1
            reply = self._serve(process, res, positions if len(sums) == len(items) else [], sums)
        return reply

    def _serve(
        self, process: Process, res: Reservation, positions: list[int], sums: dict[tuple[int, int], int]
    ) -> Committed:
        """Publish what is complete, here and in reservations that waited for it."""
        res.summed(positions, sums)
        self._publish(process, res, positions)
        reply = Committed(res.published, res.waiting)
        self.settle(res)
        if not res.cache.spec.keyed:
            self._wake(process, res)
        return reply

    def settle(self, res: Reservation) -> None:
        """End a reservation whose engine died meanwhile, or that has nothing left to do."""
        if res.instance.gone:
            self._end(res)
        else:
            self._finish(res)

    def _publish(self, process: Process, res: Reservation, positions: list[int]) -> None:
        if res.over:
            return
        now = self.parts.now()
        if res.cache.spec.keyed:
            for at in res.publish_keys(positions, now):
                self.parts.persist.offer(res.cache, res.nodes[at], 0, 1)
            return
        first, end = res.publish(now)
        if first < end:
            self.parts.persist.offer(res.cache, res.nodes[0], first, end, _durable(process, res))

    def _wake(self, process: Process, res: Reservation) -> None:
        """Others' pages may follow what was just served, or never be served any more."""
        waiting = self.parts.waiting
        for other in [r for r in waiting if r.cache is res.cache and r is not res]:
            before = other.next
            self._publish(process, other, [])
            if other.next != before or other.over:
                self._finish(other)
        if res.waiting and not res.over:
            waiting.add(res)
        else:
            waiting.discard(res)

    def _finish(self, res: Reservation) -> None:
        """End a reservation that is all served, or that can go no further."""
        if res.over or res.hashing:
            return
        if res.settled or res.nodes[0].dead or (res.stuck and self._quiet(res)):
            self._end(res)

    def _end(self, res: Reservation) -> None:
        if res.over or res.hashing:
            return
        res.drop(self.parts.unlease, quarantine=False)
        self.parts.waiting.discard(res)
        res.instance.finish(res.number, res.published)
        for other in [r for r in self.parts.waiting if r.cache is res.cache and not r.hashing]:
            if not other.over and not self._fed(other):
                other.abandon()
                self._end(other)

    def _fed(self, res: Reservation) -> bool:
        """Whether the page before the next to serve is served or still reserved by somebody."""
        page = res.start + res.next
        if res.nodes[0].dead or page == 0:
            return not res.nodes[0].dead
        node, at = res.cache.index.locate(res.nodes[0], page - 1)
        if at < node.live:
            return True
        return any(
            not r.over and not r.stuck and r is not res and r.start <= page - 1 < r.start + r.pages
            for instance in self.parts.instances.values()
            for r in instance.reservations.values()
            if r.cache is res.cache
        )

    # -- giving up ---------------------------------------------------------------------------------------------

    def abort(self, process: Process, msg: Abort) -> Ok:
        """The process writes no more; when no other may either, the slots return."""
        res = self._find(process, msg.reservation)
        if res is not None:
            res.acks.add(process)
            res.abandon()
            if res.stuck and not self._quiet(res):
                return Ok()
            self._finish(res)
        return Ok()

    @staticmethod
    def _quiet(res: Reservation) -> bool:
        """Whether every process that could write into the reservation said that it will not."""
        writers = {p for p in res.instance.processes if res.cache.number in p.ranks}
        return writers <= res.acks

    def process_gone(self, process: Process) -> None:
        """A dead process writes no more: aborted reservations that waited for its word may end."""
        for res in list(process.instance.reservations.values()):
            self._finish(res)

    def instance_gone(self, instance: Instance) -> None:
        """Every process has ended: all slots return (those being summed when that ends)."""
        for res in list(instance.reservations.values()):
            res.abandon()
            self._end(res)


def _durable(process: Process, res: Reservation) -> Callable[[int], None] | None:
    """Tells the process that committed when its pages are on disk."""
    if not process.events:
        return None
    return lambda end: process.notify(Durable(res.number, end - res.start))
