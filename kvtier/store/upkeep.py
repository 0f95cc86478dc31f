"""Operators' verbs about the disk tier: usage, scrub, verify, compact, purge with the bytes discarded."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

from kvtier import wire
from kvtier.store.cache import Cache
from kvtier.store.checkup import Checkup
from kvtier.store.operate import Operate
from kvtier.store.parts import Parts
from kvtier.store.prompts import cache_of
from kvtier.store.scrub import Scrub
from kvtier.store.slices import sliced
from kvtier.store.told import flushed, told
from kvtier.tiers.disk import DiskTier
from kvtier.types import NO_COPY, Code, KvtierError, Tier, bad

MOST_WRONG = 100
"""So many disagreements are named; the rest is counted."""
TRIES = 3
"""What changes while it is compared is compared again, so often: wrong is what is so each time."""


class Upkeep:
    """The `disk` verbs. All refuse with bad_request where there is no disk tier, and with busy while it loads."""

    def __init__(self, parts: Parts, operate: Operate, scrub: Scrub, checkup: Checkup) -> None:
        self.parts = parts
        self.operate = operate
        self.scrub = scrub
        self.checkup = checkup

    def _disk(self) -> DiskTier:
        """The tier, ready to be looked at."""
        if self.parts.disk is None:
            raise bad("disk", "a daemon with a disk tier")
        if self.parts.loading:
            raise KvtierError(Code.BUSY, "the catalogue is still being indexed")
        return self.parts.disk

    async def usage(self, msg: wire.DiskUsage) -> wire.Info:
        """Sizes, fragmentation, and what each cache holds."""
        del msg
        disk = self._disk()
        out: dict[str, Any] = {
            "capacity_bytes": disk.capacity_bytes,
            "used_bytes": disk.used_bytes,
            "freeing_bytes": disk.freeing_bytes,
            "free_bytes": disk.free_bytes,
            "state": disk.state,
            **disk.upkeep.usage(),
        }
        rows = []
        for cache in [c for c in self.parts.caches.values() if c.disk is not None]:
            runs = disk.upkeep.runs_of(cache.disk or 0)
            pages = size = 0
            async for run in sliced(runs):
                more, held = disk.upkeep.held(run)
                pages, size = pages + more, size + held
            row = {"id": cache.id.hex(), "model": cache.spec.model, "scope": cache.scope, "runs": len(runs)}
            rows.append({**row, "pages": pages, "disk_bytes": size})
        return wire.Info({**out, "caches": rows})

    # -- reading everything again ----------------------------------------------------------------------------------

    async def read_all(self, msg: wire.DiskScrub) -> wire.Info:
        """Re-read every copy on disk now; what is not what was stored is dropped and counted. Raises unknown."""
        self._disk()
        deadline = self.parts.deadline(msg.wait_ms)
        caches = [cache_of(self.parts.caches, msg.cache)] if msg.cache else None
        before = self._lost()
        copies = size = 0
        complete = True
        async for batch in self.scrub.batches((Tier.DISK,), caches):
            if asyncio.get_running_loop().time() > deadline:
                complete = False
                break
            more, read = await self.scrub.check(batch)
            copies, size = copies + more, size + read
        lost = self._lost() - before
        return wire.Info({"copies": copies, "read_bytes": size, "lost": lost, "healthy": complete})

    def _lost(self) -> int:
        """Copies on disk that were not what was stored, so far."""
        return sum(count for name, count in self.parts.counts.items() if name.startswith("load_"))

    # -- comparing -------------------------------------------------------------------------------------------------

    async def verify(self, msg: wire.DiskVerify) -> wire.Info:
        """Compare catalogue, cells and indexes with each other; changes nothing."""
        del msg
        disk = self._disk()
        wrong: list[str] | None = None
        for _ in range(TRIES):
            await flushed(disk)
            records, found = await self._records(disk)
            found += (await self.checkup.round()).broken
            pages, strays = await self._named(disk)
            wrong = [line for line in found + strays if wrong is None or line in wrong]
            if not wrong:
                break
        assert wrong is not None
        counts = {"records": records, "copies": pages, "wrong": len(wrong), "first": wrong[:MOST_WRONG]}
        return wire.Info({**counts, "healthy": not wrong})

    @staticmethod
    async def _records(disk: DiskTier) -> tuple[int, list[str]]:
        """Every record of the catalogue against the runs in memory."""
        after, total, wrong = b"", 0, list[str]()
        async for _ in sliced(itertools.repeat(None)):
            after, count, found = disk.upkeep.compare(after)
            total += count
            wrong += found
            if not after:
                break
        return total, wrong

    async def _named(self, disk: DiskTier) -> tuple[int, list[str]]:
        """Every disk copy that an index names against what is stored."""
        copies, wrong = 0, list[str]()
        for cache in list(self.parts.caches.values()):
            async for node in sliced(cache.index.walk()):
                for group in range(cache.index.groups):
                    held, sums = node.at[Tier.DISK * cache.index.groups + group], node.sums[group]
                    for at, handle in enumerate(held or ()):
                        if handle != NO_COPY and not node.dead:
                            copies += 1
                            if sums is None or disk.upkeep.sum_of(handle, group) != sums[at]:
                                where = f"cache {cache.id.hex()[:12]} page {node.depth + at} group {group}"
                                wrong.append(f"{where}: not what the disk tier has stored")
        return copies, wrong

    # -- room and secrecy ------------------------------------------------------------------------------------------

    async def compact(self, msg: wire.DiskCompact) -> wire.Info:
        """Gather free cells into whole slabs and write the catalogue without its free pages. Raises io, no_space."""
        del msg
        disk = self._disk()
        before = disk.upkeep.usage()
        await told(disk.upkeep.compact)
        after = disk.upkeep.usage()
        names = ("slabs_in_use", "scattered_bytes", "catalogue_bytes")
        return wire.Info({name: {"before": before[name], "after": after[name]} for name in names})

    async def purge(self, msg: wire.DiskPurge) -> wire.Info:
        """Empty caches as Remove and Purge do, then make their bytes on disk unreadable, durably.

        Pages that engines hold are not discarded yet: `held` of them; ask again. Raises bad_request, unknown, io.
        """
        disk = self._disk()
        if msg.cache and (msg.scope or msg.adapter or msg.salt):
            raise bad("cache", "a cache, or a scope, an adapter or a salt")
        caches = [cache_of(self.parts.caches, msg.cache)] if msg.cache else self._fitting(msg)
        done = await self.operate.empty(caches)
        if self.parts.freeing:
            await asyncio.wait(self.parts.freeing)  # older epochs
        size = 0

        def discard(ended: Callable[[str], None]) -> None:
            def end(error: str, gone: int) -> None:
                nonlocal size
                size = gone
                ended(error)

            disk.upkeep.discard(end)

        try:
            await told(discard)
        except KvtierError as exc:
            raise KvtierError(exc.code, f"emptied, but not all bytes are discarded, ask again: {exc.message}") from None
        return wire.Info({**done, "discarded_bytes": size, "healthy": not done["held"]})

    def _fitting(self, msg: wire.DiskPurge) -> list[Cache]:
        return self.operate.fitting(msg.scope, msg.adapter, msg.salt)
