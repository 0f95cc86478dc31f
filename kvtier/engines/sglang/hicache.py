"""KvtierHiCache: kvtier below SGLang's hierarchical cache.

--enable-hierarchical-cache --hicache-storage-backend dynamic --hicache-storage-backend-extra-config
'{"backend_name": "kvtier", "module_path": "kvtier.engines.sglang.hicache", "class_name": "KvtierHiCache",
"interface_v1": 1}'

Pages are copied once each way, between HiCache's host memory and the daemon's, by this process: so a daemon that
hangs holds no memory of SGLang's. Ranks ask for their own shards; SGLang takes the least of their answers.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import msgspec
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolHitPolicy, PoolName, PoolTransferResult

from kvtier.client import Client
from kvtier.engines.sglang import reload
from kvtier.engines.sglang.formats import engine_name, spec_of
from kvtier.engines.sglang.pools import Pool
from kvtier.identity import CacheSpec
from kvtier.types import bad

KV = str(PoolName.KV)


class KvtierHiCache(HiCacheStorage):  # type: ignore[misc] # SGLang is not there when types are checked
    """Pages of HiCache's host pools under SGLang's own hashes, in caches that only equal engines share.

    Extra configuration beside what SGLang asks for: `socket` (default as for every client), `scope`, `verify` (always,
    sample, never), `fingerprint` (sample, exact, or the name of weights that are not on this host) and `media` (never:
    no request brings images or sound to a model that takes them).
    """

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        """Raises bad_request naming what about the engine cannot be shared."""
        del kwargs
        extra = dict(storage_config.extra_config or {})
        if not extra.get("interface_v1"):
            raise bad("interface_v1", "1 in --hicache-storage-backend-extra-config", extra.get("interface_v1"))
        self._config = storage_config
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

    # -- pools ---------------------------------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """The pool of the KV itself."""
        super().register_mem_pool_host(mem_pool_host)
        self._register(KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Another pool of a hybrid model, or the KV's once more."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._register(str(host_pool_name), host_pool)

    def _register(self, name: str, memory: Any) -> None:
        known = self._pools.get(name)
        if known is None or known.memory is not memory:
            self._specs[name] = spec_of(self._config, name, memory)
            self._pools[name] = Pool(memory, self._client.open(self._after_changes(self._specs[name], self._seen)))

    def _after_changes(self, spec: CacheSpec, changes: int) -> CacheSpec:
        """The spec of KV that the weights of now have made: this engine's own, once they were changed in place."""
        if not changes:
            return spec
        revision = f"{spec.revision[:256]} changed {changes} times in {self._engine}"
        return msgspec.structs.replace(spec, revision=revision)

    def _pool(self, name: Any) -> Pool:
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

    # -- KV ------------------------------------------------------------------------------------------------------

    def exists(self, key: str) -> bool:
        """Whether a page is there."""
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: Sequence[str], extra_info: Any = None) -> int:
        """How many leading pages are there."""
        del extra_info
        return leading(self._pool(KV).exists(keys))

    def batch_get_v1(self, keys: Sequence[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Copy verified pages into host memory; those after the first that is missing are not looked at."""
        del extra_info
        return self._pool(KV).load(keys, host_indices)

    def batch_set_v1(self, keys: Sequence[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Copy pages out of host memory; true for those that are served now."""
        del extra_info
        return self._pool(KV).store(keys, host_indices)

    # -- hybrid models -------------------------------------------------------------------------------------------

    def batch_exists_v2(
        self, keys: Sequence[str], pool_transfers: Any = None, extra_info: Any = None
    ) -> PoolTransferResult:
        """The prefixes that all pools can restore: every page of some, the trailing pages of others."""
        del extra_info
        pages = leading(self._pool(KV).exists(keys))
        hits: dict[Any, int] = {PoolName.KV: pages} if pages else {}
        restorable = set(range(1, pages + 1))
        for transfer in pool_transfers or ():
            if transfer.hit_policy is PoolHitPolicy.BLOCK_GROUPS:
                continue  # such a pool has a verdict of its own, which never lowers the KV's; this one is a miss
            there = self._pool(transfer.name).exists(keys[:pages])
            found = restored(there, transfer)
            if found:
                hits[transfer.name] = max(found)
            restorable &= found
        return PoolTransferResult(max(restorable, default=0), hits, sorted(restorable))

    def batch_get_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        """`batch_get_v1` for each pool."""
        del extra_info
        return {each.name: self._pool(each.name).load(each.keys or [], each.host_indices) for each in transfers}

    def batch_set_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        """`batch_set_v1` for each pool."""
        del extra_info
        return {each.name: self._pool(each.name).store(each.keys or [], each.host_indices) for each in transfers}

    # -- the rest ------------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Forget the KV of this model, here and in every engine that shares it: SGLang's operator asked for that."""
        for name in self._pools:
            self._pool(name).cache.reset()

    def close(self) -> None:
        """Let go of the daemon."""
        self._client.close()

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> None:
        """Never asked for: `interface_v1` moves pages in batches."""
        del key, target_location, target_sizes

    def batch_get(self, keys: Sequence[str], target_locations: Any = None, target_sizes: Any = None) -> list[None]:
        """Never asked for, as `get`."""
        del target_locations, target_sizes
        return [None] * len(keys)

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Never asked for, as `get`."""
        del key, value, target_location, target_sizes
        return False

    def batch_set(
        self, keys: Sequence[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Never asked for, as `get`."""
        del keys, values, target_locations, target_sizes
        return False


def leading(there: Sequence[bool]) -> int:
    """How many come before the first that is not there."""
    return there.index(False) if False in there else len(there)


def restored(there: Sequence[bool], transfer: Any) -> set[int]:
    """Lengths of prefixes, in pages, for which one pool has what its policy asks for."""
    if transfer.hit_policy is PoolHitPolicy.ALL_PAGES:
        return set(range(1, leading(there) + 1))
    window = max(1, len(transfer.keys or ()))
    return {end for end in range(1, len(there) + 1) if all(there[max(0, end - window) : end])}
