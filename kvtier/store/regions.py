"""Verbs of regions: register an engine's own memory, load items into its rows, store its rows as items."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import numpy as np

from kvtier.index import Node
from kvtier.store.cache import Cache
from kvtier.store.commits import Commits
from kvtier.store.instance import Instance, Lease, Process
from kvtier.store.keyed import Keys, Rows, host_items
from kvtier.store.kvregions import KvRegions
from kvtier.store.loads import Missing
from kvtier.store.parts import Parts
from kvtier.store.reserve import OPEN, Reservation
from kvtier.store.slices import sliced
from kvtier.store.transfer import Fetch, Moved, Piece, fetch, move
from kvtier.tiers.region import Region
from kvtier.types import NO_COPY, Code, KvtierError, Tier, bad
from kvtier.wire import Load, Loaded, Ok, Register, Registered, Store, Stored, Unregister

MAX_ROWS = 1 << 16


class Source(NamedTuple):
    """Items to load: their cache, and per row the arena handle (or NO_COPY) and checksum."""

    cache: Cache
    handles: list[int]
    sums: list[int]


class Regions:
    """Engines' own host memory as source and destination."""

    def __init__(self, parts: Parts, keys: Keys, commits: Commits) -> None:
        self.parts = parts
        self.keys = keys
        self.commits = commits
        self.kv = KvRegions(parts, commits)
        """Those in device memory."""
        self.running: Counter[int] = Counter()
        """Transfers per region that has any."""

    def register(self, owner: Process, msg: Register, fd: int) -> Registered:
        """Map (or keep) the memory behind `fd`; raises bad_request for an fd that is not what was said.

        It takes the place of a region that the same session, `owner`, registered by that name.
        """
        instance = owner.instance
        if not msg.name or len(msg.name) > 128:
            raise bad("name", "1..128 characters", msg.name)
        same = [number for number, r in instance.regions.items() if r.owner is owner and r.name == msg.name]
        if len(instance.regions) - len(same) >= 64:
            raise KvtierError(Code.OVER_CAP, "an instance registers at most 64 regions")
        region = Region(fd, msg.offset, msg.stride, msg.rows, msg.name, owner)
        for old in same:
            self._let_go(instance, old)
        number = next(self.parts.numbers)
        instance.regions[number] = region
        return Registered(number, region.mapped)

    def unregister(self, process: Process, msg: Unregister) -> Ok | Awaitable[Ok]:
        """Forget a region that no transfer uses; waits until one in device memory is unmapped."""
        if msg.region in process.instance.kv:
            return self.kv.unregister(process.instance, msg.region)
        self._region(process, msg.region)
        if msg.region in self.running:
            raise KvtierError(Code.BUSY, f"{self.running[msg.region]} transfers run on it", "region")
        process.instance.regions.pop(msg.region).close()
        return Ok()

    def owner_gone(self, owner: Process) -> None:
        """A session is over, whatever its siblings do: let go of what it had registered."""
        self.kv.owner_gone(owner)
        regions = owner.instance.regions
        for number in [number for number, region in regions.items() if region.owner is owner]:
            self._let_go(owner.instance, number)

    def _let_go(self, instance: Instance, number: int) -> None:
        """Nothing new moves there; the last transfer that runs on it closes it."""
        region = instance.regions.pop(number)
        if number not in self.running:
            region.close()

    def _region(self, process: Process, number: int) -> Region:
        region = process.instance.regions.get(number)
        if region is None:
            raise KvtierError(Code.UNKNOWN, f"no region {number} here", "region")
        return region

    def _rows(self, process: Process, msg: Load | Store, cache: Cache) -> list[int]:
        """Row numbers of a transfer, all within the region; raises bad_request."""
        region = self._region(process, msg.region)
        if len(msg.rows) % 8 or len(msg.rows) > 8 * MAX_ROWS:
            raise bad("rows", f"at most {MAX_ROWS} int64 row numbers", len(msg.rows))
        rows = np.frombuffer(msg.rows, "<i8")
        if rows.size and (rows.min() < -1 or rows.max() >= region.rows):
            raise bad("rows", f"-1..{region.rows - 1}")
        if not 0 <= msg.group < cache.index.groups:
            raise bad("group", f"0..{cache.index.groups - 1}", msg.group)
        if cache.item_bytes[msg.group] > region.row_bytes:
            raise bad("region", f"rows of at least {cache.item_bytes[msg.group]} bytes", region.row_bytes)
        out: list[int] = rows.tolist()
        return out

    async def _move(
        self, process: Process, number: int, work: Callable[[Region], Awaitable[list[Moved]]]
    ) -> list[Moved]:
        """Keep the region while the work runs on it."""
        region = self._region(process, number)
        self.running[number] += 1
        try:
            return await work(region)
        finally:
            self.running[number] -= 1
            if not self.running[number]:
                del self.running[number]
                if number not in process.instance.regions:
                    region.close()

    # -- load ----------------------------------------------------------------------------------------------------

    async def load(self, process: Process, msg: Load) -> Loaded:
        """Copy verified items into rows. Ends only when the daemon writes there no more, also when cancelled."""
        if msg.region in process.instance.kv:
            return await self.kv.load(process, msg)
        if not msg.lease:
            return await self._load_keys(process, msg, self.parts.deadline(msg.wait_ms))
        lease = process.instance.leases.get(msg.lease)
        if lease is None:
            raise KvtierError(Code.UNKNOWN, f"no lease {msg.lease} here", "lease")
        rows = self._rows(process, msg, lease.cache)
        self._within(lease, msg, len(rows))
        for node in lease.nodes:
            lease.cache.index.lease(node)
        try:
            if len(lease.tiers) > 1:  # rows are copied from host
                away = self.parts.loads.missing(lease.cache, lease.nodes[0], [(msg.group, msg.first, len(rows))])
                await self.parts.loads.bring(lease.cache, away, self.parts.deadline(msg.wait_ms))
            source = self._leased(lease, msg, len(rows))
            done, wrong = await self._copy_out(process, msg, source, rows)
            self._lose(source, msg.group, [(lease.nodes[0], msg.first + at, at) for at in wrong])
            return Loaded(bytes(done))
        finally:
            self.keys.drop(process.instance, Lease(lease.cache, lease.nodes, lease.pages, 0))

    async def _load_keys(self, process: Process, msg: Load, deadline: float) -> Loaded:
        """The same by keys; what host has no room for goes from disk to its rows."""
        cache, names = self.keys.names(process, msg.cache, msg.group, msg.keys)
        rows = self._rows(process, msg, cache)
        if len(rows) != len(names):
            raise bad("rows", f"one row per key ({len(names)})", len(rows))
        await self.keys.look_up(cache, names)
        done = bytearray()
        while len(done) < len(names):
            first = len(done)
            try:
                held = self.keys.hold_rows(process.instance, cache, names[first:], msg.group)
            except KvtierError:
                if not first:
                    raise
                break  # others of the instance hold what it may
            try:
                done += await self._load_held(process, msg, held, rows[first : first + len(held.nodes)], deadline)
            finally:
                self.keys.drop(process.instance, held.lease)
        return Loaded(bytes(done).ljust(len(names), b"\0"))

    async def _load_held(self, process: Process, msg: Load, held: Rows, rows: list[int], deadline: float) -> bytearray:
        """The same of leading keys that are held."""
        cache, nodes, group = held.lease.cache, held.nodes, msg.group
        await self.parts.loads.bring(cache, held.away, deadline)
        late = {m.node for m in held.away if (m.tier, m.handle, group) in self.parts.loads.moving}
        source = Source(cache, *map(list, host_items(cache, nodes, group)))
        done, wrong = await self._copy_out(process, msg, source, rows)
        self._lose(source, group, [(node, 0, at) for at in wrong if (node := nodes[at]) is not None])
        await self._fetch(process, msg, cache, [None if node in late else node for node in nodes], rows, done)
        return done

    @staticmethod
    def _within(lease: Lease, msg: Load, count: int) -> None:
        """Raise bad_request unless a lease covers pages [first, first + count)."""
        if lease.cache.spec.keyed or msg.first < 0 or msg.first + count > lease.pages:
            raise bad("first", f"pages within the lease's {lease.pages}", msg.first)

    @staticmethod
    def _leased(lease: Lease, msg: Load, count: int) -> Source:
        """Items of pages [first, first + count)."""
        cache = lease.cache
        handles = cache.gather(lease.nodes[0], msg.group, msg.first, count, Tier.HOST)
        sums = cache.gather_sums(lease.nodes[0], msg.group, msg.first, count)
        return Source(cache, list(handles), list(sums))

    async def _copy_out(
        self, process: Process, msg: Load, source: Source, rows: list[int]
    ) -> tuple[bytearray, list[int]]:
        """Copy what host has; returns a byte per row, 1 where it was done, and where host's bytes were wrong."""
        cache, group, done = source.cache, msg.group, bytearray(len(rows))
        chosen = [at for at, row in enumerate(rows) if row >= 0 and source.handles[at] != NO_COPY]
        pieces = [
            Piece(rows[at], cache.views(group, source.handles[at]), source.sums[at]) async for at in sliced(chosen)
        ]
        size = cache.item_bytes[group]
        with self.parts.ways.busy.moving("host_to_region"):
            moved = await self._move(
                process, msg.region, lambda region: move(self.parts.mover, region, pieces, size, load=True)
            )
        wrong = []
        for at, result in zip(chosen, moved, strict=True):
            done[at] = not result.error
            if result.error:
                self.parts.counts[f"region_load_{result.error}"] += 1
                if result.error == "checksum":
                    wrong.append(at)
        self.parts.counts["bytes_host_to_region"] += sum(done) * size
        return done, wrong

    def _lose(self, source: Source, group: int, wrong: list[tuple[Node, int, int]]) -> None:
        """Drop host's copies that are not what was stored: (node, page, row)."""
        for node, page, at in wrong:
            lost = Missing(node, group, page, Tier.HOST, source.handles[at], source.sums[at])
            self.parts.loads.lose(source.cache, lost, "checksum")

    async def _fetch(
        self, process: Process, msg: Load, cache: Cache, nodes: list[Node | None], rows: list[int], done: bytearray
    ) -> None:
        """Read what is on disk and not in host into the rows that are not `done`."""
        disk, group = self.parts.disk, msg.group
        plan: dict[int, Missing] = {}
        for at, (row, node) in enumerate(zip(rows, nodes, strict=True)):
            if row >= 0 and not done[at] and node is not None and not cache.gone(node):
                handle, sums = cache.index.get(node, 0, Tier.DISK, group), node.sums[group]
                if handle != NO_COPY and sums is not None:
                    plan[at] = Missing(node, group, 0, Tier.DISK, handle, sums[0])
        if disk is None or not plan:
            return
        size, pieces = cache.item_bytes[group], [Fetch(rows[at], m.handle) for at, m in plan.items()]

        def work(region: Region) -> Awaitable[list[Moved]]:
            return fetch(self.parts.mover, region, disk, pieces, group, size)

        for (at, missing), result in zip(plan.items(), await self._move(process, msg.region, work), strict=True):
            done[at] = not result.error
            if result.error:
                self.parts.loads.lose(cache, missing, result.error)
            self.parts.counts["bytes_disk_to_region"] += size * done[at]

    async def _read(self, process: Process, number: int, pieces: list[Piece], size: int) -> list[Moved]:
        """Copy rows into slots of items of `size` bytes."""
        return await self._move(
            process, number, lambda region: move(self.parts.mover, region, pieces, size, load=False)
        )

    # -- store ---------------------------------------------------------------------------------------------------

    async def store(self, process: Process, msg: Store) -> Stored:
        """Copy rows in: under keys (then served at once), or into a reservation's slots (commit follows)."""
        if msg.region in process.instance.kv:
            return await self.kv.store(process, msg)
        if msg.reservation:
            return await self._into_reservation(process, msg)
        cache, names = self.keys.names(process, msg.cache, msg.group, msg.keys)
        rows = self._rows(process, msg, cache)
        if len(rows) != len(names) or not rows or min(rows) < 0:
            raise bad("rows", f"one row per key ({len(names)})", len(rows))
        _check_whole(process, cache)
        await self.keys.look_up(cache, names)
        got, short = await self.keys.slots(process.instance, cache, names, self.parts.deadline(msg.wait_ms))
        if cache.retired or process.instance.gone:
            cache.free_host(msg.group, got)
            return Stored(bytes(len(rows)), Code.UNKNOWN)
        reply = self.keys.fill(process, cache, names, msg.group, got, short)
        done = bytearray(b"\1" * reply.pages + bytes(len(rows) - reply.pages))
        res = process.instance.reservations.get(reply.reservation)
        if res is not None:
            done[: res.pages] = bytes(state != OPEN for state in res.state)
            res.writers = {process.ranks[cache.number].bit: process}  # nobody else was told where the slots are
            await self._read_rows(process, msg, res, rows, done)
        return Stored(bytes(done), reply.refused)

    async def _read_rows(
        self, process: Process, msg: Store, res: Reservation, rows: list[int], done: bytearray
    ) -> None:
        """Fill a keyed reservation from rows and serve what came in whole."""
        at = [n for n in range(res.pages) if res.state[n] == OPEN]
        pieces = [Piece(rows[n], res.cache.views(msg.group, res.handles[msg.group][n]), 0) for n in at]
        filled: list[int] = []
        size = res.cache.item_bytes[msg.group]
        res.hashing += 1
        try:
            for n, result in zip(at, await self._read(process, msg.region, pieces, size), strict=True):
                if not result.error:
                    res.sums[msg.group][n] = result.sum
                    filled.append(n)
        finally:
            res.hashing -= 1
            for n in filled:
                res.mark(process, n, 1)
                done[n] = not res.cache.gone(res.nodes[n])
            res.abandon()
            res.acks.add(process)
            res.committer = None  # its number was told to nobody: nor is what becomes durable
            answer = self.commits.complete(res, filled)
            assert not asyncio.iscoroutine(answer)
            self.parts.counts["bytes_region_to_host"] += len(filled) * size

    async def _into_reservation(self, process: Process, msg: Store) -> Stored:
        res = process.instance.reservations.get(msg.reservation)
        if res is None:
            raise KvtierError(Code.UNKNOWN, f"no reservation {msg.reservation} here", "reservation")
        if res.tier != Tier.HOST:
            raise bad("reservation", "one in host memory", msg.reservation)
        rows = self._rows(process, msg, res.cache)
        _check_whole(process, res.cache)
        if res.writers.get(process.ranks[res.cache.number].bit) is not process:
            raise bad("reservation", "one that this process writes")
        first = msg.first - res.start
        if first < 0 or first + len(rows) > res.pages:
            raise bad("first", f"pages within {res.start}..{res.start + res.pages - 1}", msg.first)
        handles = res.handles[msg.group][first : first + len(rows)]
        at = [n for n, row in enumerate(rows) if row >= 0 and handles[n] != NO_COPY and res.state[first + n] == OPEN]
        done = bytearray(handle == NO_COPY for handle in handles)
        cache, group = res.cache, msg.group
        res.hashing += 1
        res.filling.update(first + n for n in at)
        try:
            pieces = [Piece(rows[n], cache.views(group, handles[n]), 0) async for n in sliced(at)]
            moved = await self._read(process, msg.region, pieces, cache.item_bytes[group])
            for n, result in zip(at, moved, strict=True):
                done[n] = not result.error
        finally:
            res.hashing -= 1
            res.filling -= Counter(first + n for n in at)
            self.commits.settle(res)
        return Stored(bytes(done))


def _check_whole(process: Process, cache: Cache) -> None:
    """Raise bad_request for a process that holds a shard: a row would overwrite the other ranks' cells."""
    rank = process.ranks.get(cache.number)
    if rank is None or any(
        part.cells != group.layers * group.heads for part, group in zip(rank.slices, cache.spec.groups, strict=True)
    ):
        raise bad("region", "a process that holds whole items")
