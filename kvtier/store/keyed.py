"""Verbs of keyed caches: exists, acquire and reserve by opaque key."""

from __future__ import annotations

import functools
from array import array
from collections.abc import Awaitable
from typing import NamedTuple

from kvtier.index import Node
from kvtier.store.cache import Cache
from kvtier.store.instance import Instance, Lease, Process
from kvtier.store.loads import Brought, Missing
from kvtier.store.parts import Parts
from kvtier.store.reserve import SETTLED, Reservation
from kvtier.types import NO_COPY, Code, Presence, Tier, bad
from kvtier.wire import MAX_ASKED, MAX_KEYS, Acquired, AcquireKeys, Existence, Exists, Items, Reserved, ReserveKeys


class Rows(NamedTuple):
    """Keys on their way into an engine's own memory."""

    lease: Lease
    nodes: list[Node | None]
    """By key; None for one that is not there."""
    away: list[Missing]
    """What is to be brought to host first."""


class Keys:
    """Existence, leases and reservations per key."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts

    def names(
        self, process: Process, number: int, group: int, keys: bytes, most: int = MAX_KEYS
    ) -> tuple[Cache, list[bytes]]:
        """The cache and the index names of concatenated keys; raises bad_request or unknown."""
        cache = self.parts.opened(process, number)
        if not cache.spec.keyed:
            raise bad("cache", "a keyed cache (this one has tokens: use match)", number)
        if not 0 <= group < cache.index.groups:
            raise bad("group", f"0..{cache.index.groups - 1}", group)
        size = cache.spec.key_bytes
        if len(keys) % size or len(keys) > size * most:
            raise bad("keys", f"1..{most} keys of {size} bytes", len(keys))
        return cache, [cache.keyed.name(group, keys[at : at + size]) for at in range(0, len(keys), size)]

    def exists(self, process: Process, msg: Exists) -> Existence | Awaitable[Existence]:
        """One Presence byte per key; while the catalogue loads, after looking each up there."""
        cache, names = self.names(process, msg.cache, msg.group, msg.keys, MAX_ASKED)
        if self.parts.loading:
            return self._exist_later(process, cache, names, msg)
        return self._exist(process, cache, names, msg)

    async def look_up(self, cache: Cache, names: list[bytes]) -> None:
        """Index what disk has of these keys, while the catalogue loads."""
        if self.parts.loading:
            await self.parts.restore.keys(cache, [name[1:] for name in names])

    async def _exist_later(self, process: Process, cache: Cache, names: list[bytes], msg: Exists) -> Existence:
        await self.look_up(cache, names)
        return self._exist(process, cache, names, msg)

    def _exist(self, process: Process, cache: Cache, names: list[bytes], msg: Exists) -> Existence:
        found = cache.keyed.find
        states = bytes(_presence(cache, found(name), msg.group) for name in names)
        if names and process.instance.polls.first(cache.number, names, self.parts.now()):
            self._count(cache, states)
            self.parts.ways.curves.note(cache, names)
        peers = self.parts.peers
        if peers is not None and Presence.MISS in states and (shared := peers.shared(cache)) is not None:
            states = peers.keys.look(cache, shared, names, states)
        return Existence(states)

    def _count(self, cache: Cache, states: bytes) -> None:
        """Count what one request found."""
        cache.counts["keys_asked"] += len(states)
        cache.counts["keys_hit"] += len(states) - states.count(Presence.MISS) - states.count(Presence.PENDING)
        self.parts.counts["keys_asked"] += len(states)
        for tier in (Tier.DEVICE, Tier.HOST, Tier.DISK):
            self.parts.counts[f"keys_hit_{tier.name.lower()}"] += states.count(Presence[tier.name])

    # -- acquire -------------------------------------------------------------------------------------------------

    def acquire(self, process: Process, msg: AcquireKeys) -> Acquired | Awaitable[Acquired]:
        """Lease the keys that are there; waits only when some must come from disk."""
        cache, names = self.names(process, msg.cache, msg.group, msg.keys)
        deadline = self.parts.deadline(msg.wait_ms)
        if self.parts.loading:
            return self._acquire_later(process.instance, cache, names, msg.group, deadline)
        return self._acquire(process.instance, cache, names, msg.group, deadline)

    async def _acquire_later(
        self, instance: Instance, cache: Cache, names: list[bytes], group: int, deadline: float
    ) -> Acquired:
        await self.look_up(cache, names)
        reply = self._acquire(instance, cache, names, group, deadline)
        return reply if isinstance(reply, Acquired) else await reply

    def _acquire(
        self, instance: Instance, cache: Cache, names: list[bytes], group: int, deadline: float
    ) -> Acquired | Awaitable[Acquired]:
        if not self.parts.host.budget_bytes:  # nothing can be where an engine could read it
            nowhere: list[Node | None] = [None] * len(names)
            return self._grant(instance, Lease(cache, [], len(names), 0, group), nowhere)
        peers = self.parts.peers
        if peers is not None and (away := peers.keys.wanted(cache, names)):
            return self._acquire_away(instance, cache, names, away, deadline)
        return self._acquire_here(instance, cache, names, group, deadline)

    async def _acquire_away(
        self, instance: Instance, cache: Cache, names: list[bytes], away: dict[str, list[bytes]], deadline: float
    ) -> Acquired:
        """Let peers' keys come first. Every name has its group in front."""
        peers = self.parts.peers
        shared = None if peers is None else peers.shared(cache)
        if peers is not None and shared is not None:
            await peers.keys.bring(cache, shared, away, deadline)
        if instance.gone:
            return Acquired(0, 0)
        reply = self._acquire_here(instance, cache, names, names[0][0], deadline)
        return reply if isinstance(reply, Acquired) else await reply

    def _acquire_here(
        self, instance: Instance, cache: Cache, names: list[bytes], group: int, deadline: float
    ) -> Acquired | Awaitable[Acquired]:
        """Lease what is here now."""
        lease, nodes = self.hold(instance, cache, names, group)
        if not self.missing(cache, nodes, group):
            return self._grant(instance, lease, nodes)
        self.drop(instance, lease)  # a coroutine that is cancelled before it begins could not give it back
        return self._load(instance, cache, names, group, deadline)

    def hold(self, instance: Instance, cache: Cache, names: list[bytes], group: int) -> tuple[Lease, list[Node | None]]:
        """Lease what is there of the keys.

        The leading ones where the cap does not allow all; raises over_cap where it allows none.
        """
        each = cache.slot_cost(group) if self.parts.host.budget_bytes else 0  # without host nothing takes a slot
        fits = max(1, instance.room() // each) if each else len(names)
        nodes: list[Node | None] = []
        held: list[Node] = []
        for name in names:
            node = cache.keyed.find(name)
            if node is not None and node.live and len(held) < fits:
                held.append(node)
                nodes.append(node)
            else:
                nodes.append(None)
        cost = len(held) * each
        instance.charge(cost)
        self._lease(instance, cache, names, held)
        return Lease(cache, held, len(names), cost, group), nodes

    def hold_rows(self, instance: Instance, cache: Cache, names: list[bytes], group: int) -> Rows:
        """Lease what is there of the leading keys for a copy into an engine's own memory.

        Only what is in host, and what the cap has room to bring there, counts against the cap: all else goes from disk
        to its row. Ends before the first key that is in host alone and that the cap has no room for; raises over_cap
        where that is the first of all.
        """
        each = cache.slot_cost(group) if self.parts.host.budget_bytes else 0
        room = max(0, instance.room()) // each if each else 0
        nodes: list[Node | None] = []
        here = 0
        for name in names:
            node = cache.keyed.find(name)
            node = None if node is None or not node.live else node
            if node is not None and cache.index.get(node, 0, Tier.HOST, group) != NO_COPY:
                if here < room:
                    here += 1
                elif cache.index.get(node, 0, Tier.DISK, group) == NO_COPY:
                    break
            nodes.append(node)
        if names and not nodes:
            instance.charge(each)  # says that not even one is within the cap
        away = self.missing(cache, nodes, group)[: room - here]
        cost = (here + len(away)) * each
        instance.charge(cost)
        held = self._lease(instance, cache, names[: len(nodes)], [node for node in nodes if node is not None])
        return Rows(Lease(cache, held, len(nodes), cost, group), nodes, away)

    def _lease(self, instance: Instance, cache: Cache, names: list[bytes], held: list[Node]) -> list[Node]:
        """Hold and use these nodes, the deepest first so that the root is the warmest."""
        instance.polls.used(cache.number, names)
        now = self.parts.now()
        for node in reversed(held):
            cache.index.use(node, now)
            cache.index.lease(node)
            now += 1e-9
        return held

    def drop(self, instance: Instance, lease: Lease) -> None:
        """Undo hold."""
        instance.hold(Tier.HOST, -lease.cost)
        instance.hold(Tier.DEVICE, -lease.device_cost)
        for node in lease.nodes:
            self.parts.unlease(lease.cache, node, lease.hold)

    def missing(self, cache: Cache, nodes: list[Node | None], group: int) -> list[Missing]:
        """Held keys that are on disk and not in host."""
        out = []
        for node in nodes:
            if node is not None:
                out += self.parts.loads.missing(cache, node, [(group, 0, 1)])
        return out

    async def _load(
        self, instance: Instance, cache: Cache, names: list[bytes], group: int, deadline: float
    ) -> Acquired:
        with self.parts.patience.turn(cache.pool, Tier.HOST, instance, deadline) as turn:
            while True:
                lease, nodes = self.hold(instance, cache, names, group)
                try:
                    brought = await self.parts.loads.bring(cache, self.missing(cache, nodes, group), deadline)
                except BaseException:
                    self.drop(instance, lease)
                    raise
                lacking = len(self.missing(cache, nodes, group)) * cache.slot_cost(group)
                never = self.parts.space.allowance.never(cache, lease.cost)
                if brought is not Brought.SHORT or not lacking or never:
                    return self._grant(instance, lease, nodes)
                turn.quietly(functools.partial(self.drop, instance, lease))
                if not await turn.again(lacking):
                    lease, nodes = self.hold(instance, cache, names, group)
                    return self._grant(instance, lease, nodes)

    def _grant(self, instance: Instance, lease: Lease, nodes: list[Node | None]) -> Acquired:
        """Register the lease and say where its items are; a key without a host copy gets -1."""
        cache, group = lease.cache, lease.group
        handles, sums = host_items(cache, nodes, group)
        number = 0
        if lease.nodes:
            number = next(self.parts.numbers)
            instance.leases[number] = lease
        offsets = cache.pool.offsets(group, handles).tobytes()
        cache.counts["pages_leased"] += len(lease.nodes)
        return Acquired(number, len(nodes), (Items(group, 0, len(nodes), offsets, sums.tobytes()),))

    # -- reserve ---------------------------------------------------------------------------------------------------

    def reserve(self, process: Process, msg: ReserveKeys) -> Reserved | Awaitable[Reserved]:
        """Slots for keys that are not there; waits only when room must be made, or while the catalogue loads."""
        cache, names = self.names(process, msg.cache, msg.group, msg.keys)
        if not names:
            raise bad("keys", "at least one key")
        deadline = self.parts.deadline(msg.wait_ms)
        if self.parts.loading:
            return self._reserve_absent(process, cache, names, deadline)
        return self._reserve(process, cache, names, deadline)

    async def _reserve_absent(self, process: Process, cache: Cache, names: list[bytes], deadline: float) -> Reserved:
        """The same once disk was asked: what it has is not computed, nor stored with other bytes, again."""
        await self.look_up(cache, names)
        reply = self._reserve(process, cache, names, deadline)
        return reply if isinstance(reply, Reserved) else await reply

    def _reserve(
        self, process: Process, cache: Cache, names: list[bytes], deadline: float
    ) -> Reserved | Awaitable[Reserved]:
        if cache.retired:
            return Reserved(0, 0, refused=Code.UNKNOWN)
        if not self.parts.host.budget_bytes:
            return Reserved(0, 0, refused=Code.NO_SPACE)
        need, mine = self.lack(process.instance, cache, names), names[0][0]
        fits = self.parts.space.allowance.fits(cache, [need * (group == mine) for group in range(cache.index.groups)])
        got = cache.pool.alloc(mine, need) if fits else array("q")
        if len(got) == need:
            return self.fill(process, cache, names, mine, got, "")
        cache.free_host(mine, got)
        return self._reserve_later(process, cache, names, mine, deadline)

    async def _reserve_later(
        self, process: Process, cache: Cache, names: list[bytes], group: int, deadline: float
    ) -> Reserved:
        got, short = await self.slots(process.instance, cache, names, deadline)
        if cache.retired or process.instance.gone:
            cache.free_host(group, got)
            return Reserved(0, 0, refused=Code.UNKNOWN)
        return self.fill(process, cache, names, group, got, short)

    async def slots(
        self, instance: Instance, cache: Cache, names: list[bytes], deadline: float
    ) -> tuple[array[int], str]:
        """Slots for the absent keys, or for as many as there is room for by the deadline, and why there are no more."""
        space, group = self.parts.space, names[0][0]
        wanted = [group] * self.lack(instance, cache, names)
        got = await self.parts.patience.take(space, cache, wanted, instance, deadline)
        whole = len(got[group]) == len(wanted)
        return got[group], "" if whole else space.allowance.short(cache, wanted)

    @staticmethod
    def lack(instance: Instance, cache: Cache, names: list[bytes]) -> int:
        """How many slots to allocate: absent keys, within the cap. Every name has its group in front."""
        absent = sum(1 for name in names if (node := cache.keyed.find(name)) is None or not node.live)
        return min(absent, instance.room() // cache.slot_cost(names[0][0])) if names else 0

    def fill(
        self, process: Process, cache: Cache, names: list[bytes], group: int, got: array[int], short: str
    ) -> Reserved:
        """Make the reservation of as many leading keys as the slots cover."""
        now, instance = self.parts.now(), process.instance
        instance.polls.used(cache.number, names)
        row: list[int] = []
        used = 0
        refused = ""
        for name in names:
            node = cache.keyed.find(name)
            if node is not None and node.live:
                row.append(NO_COPY)
            elif used < len(got) and instance.held_bytes + (used + 1) * cache.slot_cost(group) <= instance.cap_bytes:
                row.append(got[used])
                used += 1
            else:
                refused = short or Code.OVER_CAP
                break
        cache.free_host(group, got[used:])
        if not row:
            return Reserved(0, 0, refused=refused)
        nodes = [cache.keyed.ensure(name, now) for name in names[: len(row)]]
        for node in nodes:
            cache.index.lease(node)
        handles = [array("q", [NO_COPY]) * len(row) for _ in range(cache.index.groups)]
        handles[group] = array("q", row)
        res = Reservation(next(self.parts.numbers), cache, process, nodes, 0, handles)
        res.state[:] = bytes(SETTLED if handle == NO_COPY else 0 for handle in row)
        offsets = cache.pool.offsets(group, handles[group]).tobytes()
        self.parts.admit(res)
        return Reserved(res.number, len(row), (Items(group, 0, len(row), offsets),), refused, res.writes)


def host_items(cache: Cache, nodes: list[Node | None], group: int) -> tuple[array[int], array[int]]:
    """Host handle and checksum per key, NO_COPY and 0 where there is none."""
    handles, sums = array("q"), array("Q")
    for node in nodes:
        handle = NO_COPY if node is None or cache.gone(node) else cache.index.get(node, 0, Tier.HOST, group)
        kept = None if handle == NO_COPY or node is None else node.sums[group]
        handles.append(handle)
        sums.append(0 if kept is None else kept[0])
    return handles, sums


def _presence(cache: Cache, node: Node | None, group: int) -> Presence:
    if node is None:
        return Presence.MISS
    for tier, answer in ((Tier.DEVICE, Presence.DEVICE), (Tier.HOST, Presence.HOST), (Tier.DISK, Presence.DISK)):
        if node.live and cache.index.get(node, 0, tier, group) != NO_COPY:
            return answer
    return Presence.PENDING if node.refs else Presence.MISS
