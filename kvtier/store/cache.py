"""One cache: its identity, its index and the memory its shape shares. Owned by the loop thread."""

from __future__ import annotations

import itertools
from array import array
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvtier.heat import Heat
from kvtier.identity import CHAIN_BYTES, CacheSpec, base_id, cache_id, shape_of
from kvtier.index import Dropped, KeyedIndex, Node, Order, RadixIndex
from kvtier.tiers.pool import HostPool, SlotPool, Span
from kvtier.tiers.slab import SlotState
from kvtier.tiers.vram import on_device
from kvtier.types import NO_COPY, Tier

if TYPE_CHECKING:
    from kvtier.store.reserve import Reservation


class Cache:
    """KV of one format, in one trust scope, of one epoch."""

    def __init__(
        self,
        number: int,
        spec: CacheSpec,
        scope: str,
        epoch: int,
        pool: HostPool,
        orders: dict[int, Order],
        heat: Heat | None = None,
    ) -> None:
        self.number = number
        self.spec = spec
        self.scope = scope
        self.epoch = epoch
        self.base = base_id(spec, scope)
        self.id = cache_id(spec, scope, epoch)
        self.shape = shape_of(spec)
        self.item_bytes = tuple(g.item_bytes for g in spec.groups)
        self.pool = pool
        """Its slots in host memory."""
        self.pools: dict[int, SlotPool] = {Tier.HOST: pool}
        """Its slots by tier; in device memory once an engine of its scope maps that."""
        self.orders = orders
        """Who goes first, by tier; the index looks here, too."""
        root = self.id[:CHAIN_BYTES]
        self.index: RadixIndex | KeyedIndex
        self.index = (KeyedIndex if spec.keyed else RadixIndex)(spec, root, orders, heat)
        self.disk: int | None = None
        """The disk tier's number of this cache, once it has one."""
        self.retired = False
        """An old epoch: nothing matches and nothing is stored any more."""
        self.reservations: set[Reservation] = set()
        """Those that are not over."""
        self.dues = [0] * len(Tier)
        """Bytes by tier that are taken, or on their way, and no copies yet; one list for all caches of a quota."""
        self.own = 0
        """Leases of the daemon's own jobs, for which no engine answers."""
        self.counts: Counter[str] = Counter()
        self.used = 0.0
        """When an engine asked for something of it last; 0: not since the daemon began."""

    @property
    def last_used(self) -> float:
        """When it was used, as far as some of its beginnings say that were used before the daemon began."""
        beginnings = itertools.islice((self.index.root.children or {}).values(), 0 if self.used else 16)
        return max((node.time for node in beginnings), default=self.used)

    @property
    def radix(self) -> RadixIndex:
        """The index of a token cache."""
        assert isinstance(self.index, RadixIndex)
        return self.index

    @property
    def keyed(self) -> KeyedIndex:
        """The index of a keyed cache."""
        assert isinstance(self.index, KeyedIndex)
        return self.index

    def gone(self, node: Node) -> bool:
        """Whether nothing may be served from a node any more."""
        return self.retired or node.dead

    def slot_cost(self, group: int) -> int:
        """Arena bytes that one item of a group takes."""
        return self.shape.slot_bytes[group] * self.shape.slots_per_item[group]

    def views(self, group: int, handle: int) -> list[Any]:
        """The bytes of an item in the arena: one uint8 array per slot."""
        return self.pool.views(group, handle, self.item_bytes[group])

    def free(self, tier: int, group: int, handles: array[int] | list[int]) -> None:
        """Slots back to a tier's pool."""
        if handles:
            self.pools[tier].free(group, handles)

    def free_host(self, group: int, handles: array[int] | list[int]) -> None:
        """Slots back to the host pool."""
        self.free(Tier.HOST, group, handles)

    def spans(self, tier: int, group: int, handle: int) -> list[Span]:
        """Where the bytes of an item are, as a device takes it."""
        return self.pools[tier].spans(group, handle, self.item_bytes[group])

    def gather(self, node: Node, group: int, first: int, count: int, tier: int) -> array[int]:
        """Handles of pages [first, first + count) of the path to `node`, NO_COPY where there is none."""
        out = array("q", [NO_COPY]) * count
        self._collect(node, first, count, out, lambda n: n.at[tier * self.index.groups + group])
        return out

    def gather_sums(self, node: Node, group: int, first: int, count: int) -> array[int]:
        """Checksums of the same pages."""
        out = array("Q", bytes(8 * count))
        self._collect(node, first, count, out, lambda n: n.sums[group])
        return out

    @staticmethod
    def _collect(node: Node, first: int, count: int, out: array[int], held: Any) -> None:
        up: Node | None = node
        end = first + count
        while up is not None and up.end > first:
            lo, hi = max(up.depth, first), min(up.end, end)
            have = held(up)
            if lo < hi and have is not None:
                out[lo - first : hi - first] = have[lo - up.depth : hi - up.depth]
            up = up.parent

    def release(self, dropped: list[Dropped], disk: Any) -> None:
        """Give copies that left the index back to the tiers that own them."""
        for tier, group, handles in dropped:
            if tier in self.pools:
                self.pools[tier].free(group, handles)
            elif tier == Tier.DISK and disk is not None:
                disk.free(handles)

    def settle(self, tier: int, group: int, handles: array[int]) -> None:
        """Mark freshly filled slots as holding cached pages."""
        self.pools[tier].mark(group, handles, SlotState.CACHED)

    def offsets(self, group: int, handles: array[int]) -> bytes:
        """Slot addresses of the items in order as the wire has them, whatever memory each is in."""
        if self.shape.slots_per_item[group] == 1 or len(self.pools) == 1:
            return self.pool.offsets(group, handles).tobytes()
        pools = (self.pools[Tier.DEVICE if on_device(handle) else Tier.HOST] for handle in handles)
        return b"".join(pool.offsets(group, [handle]).tobytes() for pool, handle in zip(pools, handles, strict=True))

    def found(self, node: Node, group: int, first: int, count: int, tiers: Sequence[int]) -> array[int]:
        """Of each page of the path to `node` the handle in the first of `tiers` that has it."""
        out = self.gather(node, group, first, count, tiers[0])
        for tier in tiers[1:]:
            if NO_COPY not in out:
                break
            other = self.gather(node, group, first, count, tier)
            for at, handle in enumerate(out):
                if handle == NO_COPY:
                    out[at] = other[at]
        return out

    def readable(
        self, node: Node, group: int, first: int, count: int, tiers: Sequence[int]
    ) -> tuple[array[int], array[int]]:
        """The same, and the checksums."""
        return self.found(node, group, first, count, tiers), self.gather_sums(node, group, first, count)
