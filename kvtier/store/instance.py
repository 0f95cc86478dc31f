"""Engine instances: who is attached, what each holds, and how much it may hold. Owned by the loop thread."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from kvtier.identity import CacheSpec, Slice
from kvtier.index import Hold, Node
from kvtier.store.polls import Polls
from kvtier.types import Code, KvtierError, Tier, bad
from kvtier.wire import Message, Open

if TYPE_CHECKING:
    from kvtier.store.cache import Cache
    from kvtier.store.kvregions import KvRegion
    from kvtier.store.reserve import Reservation
    from kvtier.tiers.region import Region

MAX_PATHS = 4096
MAX_PATH_BYTES = 256 << 20
MAX_KEYS = MAX_PATH_BYTES // 4
"""Bytes of the keys of one path."""
MAX_FINISHED = 4096
WHOLE = 1 << 63
"""The bit of processes that hold whole items (or, like a scheduler beside its workers, write none)."""


class Path:
    """A request handle: the page keys of one request so far. Pins nothing."""

    __slots__ = ("asked", "asked_bytes", "cache", "keys", "prefill", "request", "session", "used")

    def __init__(self, cache: Cache, request: str, session: str = "") -> None:
        self.cache = cache
        self.keys = b""
        self.request = request
        self.session = session
        self.prefill = 0.0
        """Tokens a second that the engine computes; 0: it did not say."""
        self.used = False
        """Whether the index has counted it."""
        self.asked: asyncio.Task[None] | None = None
        """The latest question to peers for the rest of it, and of how many bytes of keys."""
        self.asked_bytes = 0


class Lease:
    """A hold on a path (token caches: one node) or on several keyed nodes."""

    __slots__ = ("cache", "cost", "device_cost", "group", "hold", "nodes", "pages", "tiers")

    def __init__(
        self,
        cache: Cache,
        nodes: list[Node],
        pages: int,
        cost: int,
        group: int = 0,
        tiers: tuple[Tier, ...] = (Tier.HOST,),
        device_cost: int = 0,
    ) -> None:
        """`tiers`: where its holder reads, fastest first. Costs in bytes of host and of device memory."""
        self.cache = cache
        self.nodes = nodes
        self.pages = pages
        self.cost = cost
        self.device_cost = device_cost
        self.group = group
        self.tiers = tiers
        self.hold = Hold.READ


class Rank(NamedTuple):
    """Which shard of a cache one process holds, as a bit of its pages' marks."""

    bit: int
    slices: tuple[Slice, ...]
    worker: bool
    """Has a rank or slices: writes what others of its instance reserve."""


class Writer(NamedTuple):
    """The replica that writes a shard of reservations with numbers above `above`: earlier ones had another."""

    process: Process
    above: int


class Process:
    """One connected process of an instance."""

    __slots__ = ("born", "device", "ended", "events", "instance", "left", "notify", "peer", "ranks")

    def __init__(
        self, born: int, instance: Instance, peer: Any, notify: Callable[[Message], None], *, events: bool
    ) -> None:
        self.born = born
        """Numbers of leases and reservations that are lower were given before it joined."""
        self.events = events
        self.instance = instance
        self.peer = peer
        self.notify = notify
        self.ranks: dict[int, Rank] = {}
        """Cache number -> shard; a cache is usable by this process once it is here."""
        self.device = False
        """It has shown that it maps the device's memory."""
        self.left = False
        """Its connection is closed without Bye; it may still touch its slots until its pidfd says it ended."""
        self.ended = asyncio.Event()
        """Set when that says so, also while requests of it are in flight."""


class Instance:
    """One engine: its processes share leases, reservations, regions and caps."""

    guest = False
    """Whether it stands for other hosts: what it brings is not pushed on."""

    def __init__(self, name: str, scope: str, cap_bytes: int, device_cap: int = 0) -> None:
        self.name = name
        self.scope = scope
        self.cap_bytes = cap_bytes
        self.held_bytes = 0
        self.device_cap = device_cap
        self.device_held = 0
        """The same of device memory."""
        self.gone = False
        """All its processes are gone: what still runs for it must hand out nothing more."""
        self.processes: set[Process] = set()
        self.paths: OrderedDict[int, Path] = OrderedDict()
        self.path_bytes = 0
        self.leases: dict[int, Lease] = {}
        self.reservations: dict[int, Reservation] = {}
        self.finished: OrderedDict[int, int] = OrderedDict()
        """Pages published of reservations that are over: a late commit of a replica is no error."""
        self.over: dict[int, int] = {}
        """Cache number -> the latest of its parted reservations that is over: its slots may be anybody's."""
        self.polls = Polls()
        self.regions: dict[int, Region] = {}
        self.kv: dict[int, KvRegion] = {}
        """Its processes' own paged KV in device memory."""
        self.shards: dict[int, list[Rank]] = {}
        """Cache number -> the distinct shards seen; a page is complete when they cover it."""
        self.writers: dict[tuple[int, int], Writer] = {}
        """(cache number, shard bit) -> the one of its replicas that writes: two would race, the slower into slots that
        were served and given away meanwhile."""

    def only(self, pid: int) -> Process:
        """The one session of a pid, for a client that does not say which session it is; raises unknown, bad_request."""
        found = [process for process in self.processes if process.peer.pid == pid and not process.left]
        if not found:
            raise KvtierError(Code.UNKNOWN, f"not attached to instance {self.name}: send hello first", "instance")
        if len(found) > 1:
            raise bad("session", f"its session, where {len(found)} have pid {pid} to this daemon")
        return found[0]

    def charge(self, cost: int) -> None:
        """Count bytes against the cap; raises over_cap."""
        if cost and self.held_bytes + cost > self.cap_bytes:
            raise KvtierError(
                Code.OVER_CAP, f"instance {self.name} holds {self.held_bytes} bytes of its cap of {self.cap_bytes}"
            )
        self.held_bytes += cost

    def room(self, tier: int = Tier.HOST) -> int:
        """Bytes of a tier that may still be held."""
        if tier == Tier.DEVICE:
            return self.device_cap - self.device_held
        return self.cap_bytes - self.held_bytes

    def held(self, tier: int) -> int:
        """Bytes of a tier that are held."""
        return self.device_held if tier == Tier.DEVICE else self.held_bytes

    def hold(self, tier: int, cost: int) -> None:
        """Count bytes of a tier that are held, or (less than 0) are not any more."""
        if tier == Tier.DEVICE:
            self.device_held += cost
        else:
            self.held_bytes += cost

    def add_path(self, number: int, path: Path, keys: bytes) -> None:
        """Remember a request with `keys` more; the longest unused ones are forgotten beyond the bounds."""
        if len(path.keys) + len(keys) > MAX_KEYS:
            raise KvtierError(Code.OVER_CAP, f"a path has at most {MAX_KEYS} bytes of keys", "keys")
        path.keys += keys
        self.paths[number] = path
        self.path_bytes += len(keys)
        while len(self.paths) > MAX_PATHS or self.path_bytes > MAX_PATH_BYTES:
            _, old = self.paths.popitem(last=False)
            self.path_bytes -= len(old.keys)

    def path(self, number: int) -> Path:
        """The request of a handle; raises unknown."""
        path = self.paths.get(number)
        if path is None:
            raise KvtierError(Code.UNKNOWN, f"no request handle {number} here (forgotten or foreign)", "handle")
        self.paths.move_to_end(number)
        return path

    def forget(self, number: int) -> None:
        """Drop a handle, if it is still known."""
        path = self.paths.pop(number, None)
        if path is not None:
            self.path_bytes -= len(path.keys)

    def finish(self, res: Reservation) -> None:
        """Remember how a reservation ended."""
        self.reservations.pop(res.number, None)
        self.finished[res.number] = res.published
        if res.parted:
            self.over[res.cache.number] = max(res.number, self.over.get(res.cache.number, 0))
        if len(self.finished) > MAX_FINISHED:
            self.finished.popitem(last=False)

    def join_shard(self, cache: Cache, msg: Open) -> Rank:
        """The shard a process declares, checked against the others of the instance; WHOLE without slices.

        Equal slices are replicas of one shard: one copy is stored, and one of them writes it.
        """
        slices = msg.slices or tuple(Slice(0, g.layers, 0, g.heads) for g in cache.spec.groups)
        check_slices(cache.spec, msg, slices)
        if not msg.slices and msg.rank < 0:
            return Rank(WHOLE, slices, worker=False)
        return self._shard(cache.number, slices, whole=not msg.slices)

    def _shard(self, cache: int, slices: tuple[Slice, ...], *, whole: bool) -> Rank:
        """The shard of a worker among those that are known of a cache. Raises bad_request."""
        if any((bit == WHOLE) != whole for bit in self.working(cache)):
            raise bad("slices", "slices where the instance's other ranks have them, none where they have none", slices)
        if whole:
            return Rank(WHOLE, slices, worker=True)
        known = self.shards.setdefault(cache, [])
        for rank in known:
            if rank.slices == slices:
                return rank
            if any(a.overlaps(b) for a, b in zip(rank.slices, slices, strict=True)):
                raise bad("slices", "slices that equal or do not overlap those of the instance's other ranks", slices)
        if len(known) >= 63:
            raise bad("slices", "at most 63 distinct shards an instance")
        rank = Rank(1 << len(known), slices, worker=True)
        known.append(rank)
        return rank

    def working(self, cache: int) -> set[int]:
        """Shard bits of a cache that a worker which is still there writes."""
        return {bit for (number, bit), w in self.writers.items() if number == cache and w.process in self.processes}

    def appoint(self, process: Process, cache: int, newest: int) -> int:
        """Let a worker write its shard if nobody does. Above which reservation number it writes, -1: not at all.

        `newest` is higher than every number given so far: what an earlier writer may still write stays its own. The
        first to come writes what is open; of what is over it may hear late, when others have the slots.
        """
        rank = process.ranks[cache]
        if not rank.worker:
            return -1
        now = self.writers.get((cache, rank.bit))
        if now is None or now.process.left or now.process not in self.processes:
            waiting = [] if now else [res.number for res in self.reservations.values() if res.cache.number == cache]
            above = max(self.over.get(cache, 0), min(waiting) - 1) if waiting else newest
            now = self.writers[cache, rank.bit] = Writer(process, above)
        return now.above if now.process is process else -1

    def inherit(self, old: int, new: int, rank: Rank) -> Rank:
        """The workers of a cache write the same shards of its next epoch; the one that a worker of the old has there.

        Others may have opened it already, in another order: a bit says there what they hold. Raises bad_request.
        """
        for each in [*self.shards.get(old, ()), *([rank] if rank.bit == WHOLE else [])]:
            with contextlib.suppress(KvtierError):  # it is cut up differently there, which those who open it hear of
                again = self._shard(new, each.slices, whole=each.bit == WHOLE)
                if (old, each.bit) in self.writers:
                    self.writers.setdefault((new, again.bit), self.writers[old, each.bit])
        return self._shard(new, rank.slices, whole=rank.bit == WHOLE) if rank.worker else rank

    def in_use(self, caches: Mapping[int, Cache]) -> set[int]:
        """Numbers of the caches that it has open; old epochs end where all is let go and a newer one is open."""
        held = {res.cache.number for res in self.reservations.values()}
        for process in self.processes:
            newest: dict[bytes, int] = {}
            for cache in map(caches.__getitem__, process.ranks):
                newest[cache.base] = max(cache.epoch, newest.get(cache.base, 0))
            for cache in [caches[number] for number in process.ranks]:
                if cache.retired and cache.epoch < newest[cache.base] and cache.number not in held:
                    del process.ranks[cache.number]
        used = {number for process in self.processes for number in process.ranks}
        self.shards = {number: ranks for number, ranks in self.shards.items() if number in used}
        self.over = {number: latest for number, latest in self.over.items() if number in used}
        self.writers = {(number, bit): w for (number, bit), w in self.writers.items() if number in used}
        return used

    def complete_mask(self, cache: Cache) -> int:
        """Bits of the shards that together cover every cell; 0 while some are missing."""
        known = self.shards.get(cache.number, ())
        for number, group in enumerate(cache.spec.groups):
            if not known or sum(rank.slices[number].cells for rank in known) != group.layers * group.heads:
                return 0
        mask = 0
        for rank in known:
            mask |= rank.bit
        return mask


def check_slices(spec: CacheSpec, msg: Open, slices: tuple[Slice, ...]) -> None:
    """Raise bad_request when a declared shard does not fit the spec."""
    if not 1 <= msg.world <= 64:
        raise bad("world", "1..64", msg.world)
    if not -1 <= msg.rank < msg.world:
        raise bad("rank", f"-1..{msg.world - 1}", msg.rank)
    if len(slices) != len(spec.groups):
        raise bad("slices", f"one slice per group ({len(spec.groups)})", len(slices))
    for number, (part, group) in enumerate(zip(slices, spec.groups, strict=True)):
        if not (0 <= part.l0 < part.l1 <= group.layers and 0 <= part.h0 < part.h1 <= group.heads):
            raise bad(f"slices[{number}]", f"a slice of {group.layers} layers x {group.heads} heads", part)
