"""What both attachments to SGLang have in common: pools on caches of the weights of now, and what all can restore."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName

from kvtier.client import Cache, Client
from kvtier.engines.sglang import reload
from kvtier.engines.sglang.naming import engine_name
from kvtier.engines.sglang.pools import Pool
from kvtier.identity import CacheSpec

KV = str(PoolName.KV)


class Store:
    """An engine's pools by name. Thread-safe."""

    def __init__(self, extra: Mapping[str, Any]) -> None:
        """`extra`: `socket` (default as for every client), `scope`, `verify` (always, sample, never)."""
        self._engine = engine_name()
        self._client = Client(
            extra.get("socket"),
            instance=f"sglang-{self._engine}",
            scope=extra.get("scope", ""),
            verify=extra.get("verify", "always"),
        )
        self._pools: dict[str, Pool] = {}
        self._specs: dict[str, CacheSpec] = {}
        self._lock = threading.Lock()
        reload.watch()
        self._seen = reload.count()

    def has(self, name: str, memory: Any) -> bool:
        """Whether just this pool was added."""
        known = self._pools.get(name)
        return known is not None and known.memory is memory

    def add(self, name: str, spec: CacheSpec, make: Callable[[Cache], Pool]) -> None:
        """A pool, on the cache that its spec names."""
        self._specs[name] = spec
        self._pools[name] = make(self._client.open(self._after_changes(spec, self._seen)))

    def pool(self, name: Any) -> Pool:
        """The pool of that name, in the cache of the weights of now."""
        with self._lock:
            changes = reload.count()
            if self._seen != changes:
                opened = {
                    each: self._client.open(self._after_changes(self._specs[each], changes)) for each in self._pools
                }
                for each, pool in self._pools.items():
                    pool.cache = opened[each]
                self._seen = changes
        return self._pools[str(name)]

    def _after_changes(self, spec: CacheSpec, changes: int) -> CacheSpec:
        """The spec of KV that the weights of now have made: this engine's own, once they were changed in place."""
        if not changes:
            return spec
        revision = f"{spec.revision[:256]} changed {changes} times in {self._engine}"
        return msgspec.structs.replace(spec, revision=revision)

    def restorable(self, keys: Sequence[str], others: Sequence[Any]) -> tuple[dict[Any, int], set[int]]:
        """The longest prefix that each pool can restore, and the lengths, in pages, that all of them can.

        `others`: SGLang's transfers of the pools beside the KV's, which say what each must have.
        """
        pages = leading(self.pool(KV).exists(keys))
        hits: dict[Any, int] = {PoolName.KV: pages} if pages else {}
        lengths = set(range(1, pages + 1))
        for transfer in others:
            if transfer.hit_policy is PoolHitPolicy.BLOCK_GROUPS:
                continue  # such a pool has a verdict of its own, which never lowers the KV's; this one is a miss
            found = restored(self.pool(transfer.name).exists(keys[:pages]), transfer)
            if found:
                hits[transfer.name] = max(found)
            lengths &= found
        return hits, lengths

    def reset(self) -> None:
        """Forget the KV of this model, here and in every engine that shares it."""
        for name in self._pools:
            self.pool(name).cache.reset()

    def close(self) -> None:
        """Let go of the daemon."""
        self._client.close()


def leading(there: Sequence[bool]) -> int:
    """How many come before the first that is not there."""
    return there.index(False) if False in there else len(there)


def restored(there: Sequence[bool], transfer: Any) -> set[int]:
    """Lengths of prefixes, in pages, for which one pool has what its policy asks for."""
    if transfer.hit_policy is PoolHitPolicy.ALL_PAGES:
        return set(range(1, leading(there) + 1))
    window = max(1, len(transfer.keys or ()))
    return {end for end in range(1, len(there) + 1) if all(there[max(0, end - window) : end])}
