"""What operators ask: status, caches, tree, check. Reads the store, changes nothing."""

from __future__ import annotations

import heapq
import itertools
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import psutil

from kvtier import wire
from kvtier.heat import Heat
from kvtier.identity import CHAIN_BYTES
from kvtier.index import Node
from kvtier.store.busy import rates
from kvtier.store.cache import Cache
from kvtier.store.checkup import Checkup
from kvtier.store.parts import Parts
from kvtier.store.prompts import cache_of
from kvtier.store.requests import MOST_REQUESTS
from kvtier.store.slices import popped, sliced
from kvtier.tiers.pool import SlotPool
from kvtier.tiers.slab import SlotState
from kvtier.types import Tier, bad

MOST_NODES = 10_000
"""Of one answer, which is encoded in one go."""
HEAT_OF = 3
"""Half-life that people are shown: 512 s."""


class Report:
    """Plain trees of names and values."""

    def __init__(self, parts: Parts, checkup: Checkup, version: str) -> None:
        self.parts = parts
        self.checkup = checkup
        self.version = version
        self.started = time.monotonic()

    def stat(self, msg: wire.Stat) -> wire.Info:
        """Counters that any engine may see."""
        del msg
        return wire.Info({"version": self.version, "counters": dict(self.parts.counts), "tiers": self._tiers()})

    def _tiers(self) -> dict[str, dict[str, object]]:
        host, disk = self.parts.host, self.parts.disk
        tiers: dict[str, dict[str, object]] = {
            "host": {"budget_bytes": host.budget_bytes, "used_bytes": host.used_bytes, "free_bytes": host.free_bytes}
        }
        if self.parts.vram is not None:
            tiers["device"] = self.parts.vram.report()
        if disk is not None:
            tiers["disk"] = {
                "capacity_bytes": disk.capacity_bytes,
                "used_bytes": disk.used_bytes,
                "free_bytes": disk.free_bytes,
                "state": disk.state,
                "sick": disk.failure,
                **disk.stats,
            }
        for name, link in self.parts.links.report().items():
            tiers[name] |= link
        return tiers

    def status(self, msg: wire.Status) -> wire.Info:
        """Everything about tiers, instances and counters."""
        del msg
        parts = self.parts
        instances = [
            {
                "instance": i.name,
                "scope": i.scope,
                "pids": [p.peer.pid for p in i.processes],
                "left": sum(p.left for p in i.processes),
                "leases": len(i.leases),
                "reservations": len(i.reservations),
                "held_bytes": i.held_bytes,
                "cap_bytes": i.cap_bytes,
                "regions": len(i.regions),
            }
            for i in parts.instances.values()
        ]
        return wire.Info(
            {
                "version": self.version,
                "pid": os.getpid(),
                "uptime_s": round(time.monotonic() - self.started, 1),
                "rss_bytes": psutil.Process().memory_info().rss,
                "disk_path": "" if parts.disk is None else str(parts.disk.path),
                "policy": parts.ways.policy_name,
                "policy_mistake": parts.ways.mistake,
                "tiers": self._tiers(),
                "caches": len(parts.caches),
                "pages": sum(c.index.pages for c in parts.caches.values()),
                "instances": instances,
                "quotas": parts.ways.quotas.report(),
                "moving": {
                    "running": parts.mover.running,
                    "waiting": parts.mover.waiting,
                    "disk_queue_pages": parts.persist.queued_pages,
                    "loads": len(parts.loads.moving),
                },
                "bytes_s": rates(parts.counts),
                "checked": self.checkup.last.data() if self.checkup.last else {},
                "slots": _states(parts.host.pools),
                "device_slots": _states([] if parts.vram is None else parts.vram.tier.pools),
                "peers": [] if parts.peers is None else parts.peers.tier.status(),
                "counters": dict(parts.counts),
            }
        )

    def metrics(self, msg: wire.Metrics) -> wire.Info:
        """Numbers for the HTTP port and `top`: sums only, nothing that grows with caches or engines."""
        del msg
        parts = self.parts
        held = list(parts.instances.values())
        caches = list(parts.caches.values())
        return wire.Info(
            {
                "version": self.version,
                "uptime_s": time.monotonic() - self.started,
                "rss_bytes": psutil.Process().memory_info().rss,
                "python_blocks": sys.getallocatedblocks(),
                "tiers": self._tiers(),
                "caches": len(caches),
                "pages": sum(c.index.pages for c in caches),
                "nodes": sum(c.index.nodes for c in caches),
                "instances": len(held),
                "leases": sum(len(i.leases) for i in held),
                "reservations": sum(len(i.reservations) for i in held),
                "held_bytes": sum(i.held_bytes for i in held),
                "peers": [] if parts.peers is None else parts.peers.tier.status(),
                "queues": {
                    "mover_jobs": parts.mover.running,
                    "disk_pages": parts.persist.queued_pages,
                    "loads": len(parts.loads.moving),
                    "pushes": 0 if parts.peers is None else parts.peers.pushes.waiting,
                    "repairs": 0 if parts.peers is None else int(parts.peers.repairs.walking),
                    "reservations_waiting": len(parts.waiting),
                },
                "eviction_batches": parts.persist.room.evictions.batches(),
                "checks": self.checkup.rounds,
                "checked": self.checkup.last.data() if self.checkup.last else {},
                "counters": dict(parts.counts),
            }
        )

    def caches(self, msg: wire.Caches) -> wire.Info:
        """One row per cache."""
        del msg
        return wire.Info({"caches": [_row(cache) for cache in self.parts.caches.values()]})

    async def tree(self, msg: wire.Tree) -> wire.Info:
        """Nodes of one cache, depth first; `left_off` says how many were not shown."""
        if not 1 <= msg.limit <= MOST_NODES or not 1 <= msg.depth <= 10_000 or msg.width < 1:
            asked = msg.limit, msg.depth, msg.width
            raise bad("limit", f"1..{MOST_NODES} nodes, a depth of 1..10000 and a width of at least 1", asked)
        cache = cache_of(self.parts.caches, msg.cache)
        rows: list[dict[str, Any]] = []
        stack = [(node, 0) for node in await _latest(cache.index.root, min(msg.width, msg.limit))]
        async for node, level in sliced(itertools.islice(popped(stack), msg.limit)):
            if node.dead:
                continue
            rows.append(_node(cache, node, level, self.parts.now()))
            if level + 1 < msg.depth:
                stack += [(child, level + 1) for child in await _latest(node, min(msg.width, msg.limit))]
        left_off = max(0, cache.index.nodes - len(rows))
        return wire.Info({"cache": _row(cache), "nodes": rows, "left_off": left_off})

    def requests(self, msg: wire.Requests) -> wire.Info:
        """Requests that engines gave an id, latest first. Raises bad_request."""
        if not 1 <= msg.limit <= MOST_REQUESTS:
            raise bad("limit", f"1..{MOST_REQUESTS}", msg.limit)
        rows = [
            {
                "request": path.request,
                "session": path.session,
                "cache": path.cache.id.hex(),
                "pages": (pages := len(path.keys) // path.cache.index.stride),
                "tokens": pages * path.cache.spec.page_tokens,
                "ago_s": round(time.time() - when, 1),
            }
            for path, when in itertools.islice(self.parts.requests.latest(msg.session), msg.limit)
        ]
        return wire.Info({"requests": rows})

    async def check(self, msg: wire.Check) -> wire.Info:
        """Broken invariants, and what is held while nobody is attached."""
        del msg
        return wire.Info((await self.checkup.round())._asdict())


async def _latest(node: Node, most: int) -> list[Node]:
    """Children of a node, the most recently used last."""
    found: list[tuple[float, int, Node]] = []
    async for number, child in sliced(enumerate(list((node.children or {}).values()))):
        if len(found) < most:
            heapq.heappush(found, (child.time, number, child))
        elif child.time > found[0][0]:
            heapq.heapreplace(found, (child.time, number, child))
    return [child for _, _, child in sorted(found)]


def _states(pools: Sequence[SlotPool]) -> dict[str, int]:
    """Slots of pools by state, those that are not free."""
    counted: Counter[str] = Counter()
    for counts in [counts for pool in pools for counts in pool.counts()]:
        counted.update({state.name.lower(): n for state, n in counts.items() if n and state != SlotState.FREE})
    return dict(counted)


def _row(cache: Cache) -> dict[str, Any]:
    return {
        "number": cache.number,
        "id": cache.id.hex(),
        "model": cache.spec.model,
        "revision": cache.spec.revision,
        "kv_dtype": cache.spec.kv_dtype,
        "adapter": cache.spec.adapter,
        "scope": cache.scope,
        "epoch": cache.epoch,
        "keyed": cache.spec.keyed,
        "page_tokens": cache.spec.page_tokens,
        "page_bytes": sum(cache.item_bytes),
        "retired": cache.retired,
        "nodes": cache.index.nodes,
        "pages": cache.index.pages,
        "tiers": {tier.name.lower(): count for tier in Tier if (count := cache.index.copies[tier])},
        "counters": dict(cache.counts),
    }


def _node(cache: Cache, node: Node, level: int, now: float) -> dict[str, Any]:
    row: dict[str, Any] = {
        "level": level,
        "first_page": node.depth,
        "pages": node.pages,
        "live": node.live,
        "leases": node.refs,
        "idle_s": round(now - node.time, 1),
        "heat": round(Heat.level(node, HEAT_OF, now), 3),
        "tiers": {tier.name.lower(): node.count[tier] for tier in Tier if node.count[tier]},
        "children": len(node.children or ()),
    }
    chain = node.chain or b""
    if len(chain) == CHAIN_BYTES * node.pages:
        row["chain"] = chain[-CHAIN_BYTES:].hex()
    if cache.spec.keyed:
        row["key"] = node.edge[1:].hex()
        row["group"] = node.edge[0]
    else:
        row["tokens"] = list(memoryview(node.edge[: min(32, len(node.edge) // 4 * 4)]).cast("i"))
    return row
