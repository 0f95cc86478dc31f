"""KvtierHiCache: kvtier below SGLang's hierarchical cache.

--enable-hierarchical-cache --hicache-storage-backend dynamic --hicache-storage-backend-extra-config
'{"backend_name": "kvtier", "module_path": "kvtier.engines.sglang.hicache", "class_name": "KvtierHiCache",
"interface_v1": 1}'

Pages are copied once each way, between HiCache's host memory and the daemon's, by this process: so a daemon that
hangs holds no memory of SGLang's. Ranks ask for their own shards; SGLang takes the least of their answers.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolTransferResult

from kvtier.engines.sglang.formats import spec_of
from kvtier.engines.sglang.pools import Pool
from kvtier.engines.sglang.store import KV, Store, leading
from kvtier.types import bad


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
        self._store = Store(extra)

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
        if not self._store.has(name, memory):
            self._store.add(name, spec_of(self._config, name, memory), functools.partial(Pool, memory))

    # -- KV ------------------------------------------------------------------------------------------------------

    def exists(self, key: str) -> bool:
        """Whether a page is there."""
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: Sequence[str], extra_info: Any = None) -> int:
        """How many leading pages are there."""
        del extra_info
        return leading(self._store.pool(KV).exists(keys))

    def batch_get_v1(self, keys: Sequence[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Copy verified pages into host memory; those after the first that is missing are not looked at."""
        del extra_info
        return self._store.pool(KV).load(keys, host_indices)

    def batch_set_v1(self, keys: Sequence[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Copy pages out of host memory; true for those that are served now."""
        del extra_info
        return self._store.pool(KV).store(keys, host_indices)

    # -- hybrid models -------------------------------------------------------------------------------------------

    def batch_exists_v2(
        self, keys: Sequence[str], pool_transfers: Any = None, extra_info: Any = None
    ) -> PoolTransferResult:
        """The prefixes that all pools can restore: every page of some, the trailing pages of others."""
        del extra_info
        hits, lengths = self._store.restorable(keys, pool_transfers or ())
        return PoolTransferResult(max(lengths, default=0), hits, sorted(lengths))

    def batch_get_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        """`batch_get_v1` for each pool."""
        del extra_info
        return {each.name: self._store.pool(each.name).load(each.keys or [], each.host_indices) for each in transfers}

    def batch_set_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        """`batch_set_v1` for each pool."""
        del extra_info
        return {each.name: self._store.pool(each.name).store(each.keys or [], each.host_indices) for each in transfers}

    # -- the rest ------------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Forget the KV of this model, here and in every engine that shares it: SGLang's operator asked for that."""
        self._store.reset()

    def close(self) -> None:
        """Let go of the daemon."""
        self._store.close()

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
