"""KvtierLinker: kvtier right below the KV that SGLang computes with, without a host tier of SGLang's.

--enable-unified-cache-external-linker --unified-cache-external-linker-backend dynamic
--unified-cache-external-linker-config '{"linker": "KvtierLinker",
"linker_module_path": "kvtier.engines.sglang.linker", "linker_extra_config": {}}'

SGLang ends a request whose load fails after it was begun. So nothing is begun that may fail: a load is copied and
verified, and all ranks have agreed that it is whole, before SGLang hears of it; else the request is computed.
"""

from __future__ import annotations

import functools
import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Final

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolName
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import LayerWiseLoadCounter, UnifiedCacheLinker
from sglang.srt.runtime_context import get_model, get_parallel
from sglang.srt.utils import get_device_module

from kvtier.client import Cache
from kvtier.engines.sglang import reload
from kvtier.engines.sglang.device import DevicePool, Sheets
from kvtier.engines.sglang.formats import linked_spec
from kvtier.engines.sglang.pools import Pool
from kvtier.engines.sglang.store import KV, Store
from kvtier.types import bad

LOOK_S: Final = 0.2
"""A look-up waits so long for the daemon: it is made between two steps of all requests."""
STALE_S: Final = 2.0
"""SGLang evicts nothing that waits to be stored: what has waited longer is let go."""
SETTINGS: Final = frozenset({"socket", "scope", "verify", "fingerprint", "media"})

Work = list[tuple[Pool, Cache, Any]]
"""Pools, the caches of when their pages were computed, and SGLang's transfers."""

_log = logging.getLogger("kvtier.sglang")


class KvtierLinker(UnifiedCacheLinker):  # type: ignore[misc] # SGLang is not there when types are checked
    """Pages of SGLang's device pools under its own hashes, in caches that only equal engines share.

    Extra configuration: `socket`, `scope`, `verify`, `fingerprint` and `media` as KvtierHiCache's.
    """

    def __init__(
        self, server_args: Any, params: Any, *, components: Any, extra_config: Mapping[str, Any] | None = None,
        forward_stream: Any = None,
    ) -> None:  # fmt: skip
        """Raises bad_request naming what about the engine cannot be shared."""
        del server_args, components  # the pools say it
        extra = dict(extra_config or {})
        if extra.keys() - SETTINGS:
            raise bad("linker_extra_config", ", ".join(sorted(SETTINGS)), sorted(extra.keys() - SETTINGS))
        self.forward_stream = forward_stream
        kvcache = params.token_to_kv_pool_allocator.get_kvcache()
        self.pools = sheets_of(kvcache, params)
        self._groups = _groups_of(params)
        config = _config_of(params, type(kvcache) is MLATokenToKVPool, extra)
        self._writes = config.is_storage_writer
        self._store = Store(extra)
        for name, memory in self.pools.items():
            spec = linked_spec(config, str(name), memory)
            self._store.add(str(name), spec, functools.partial(DevicePool, memory))
        self.layer_done_counter = LayerWiseLoadCounter(kvcache.layer_num)
        self._asker = ThreadPoolExecutor(1, "kvtier-lookup")
        self._asked: Future[list[int]] | None = None
        self._writer = ThreadPoolExecutor(1, "kvtier-offload")
        self._offloads: deque[Future[bool]] = deque()
        """Oldest first, as SGLang takes them."""

    # -- look-ups ------------------------------------------------------------------------------------------------

    def lookup(self, rid: str, transfers: list[Any]) -> list[int]:
        """Lengths of prefixes, in pages, that all pools can restore; none where the daemon does not say in time."""
        del rid
        if self._asked is not None and not self._asked.done():
            return []
        self._asked = self._asker.submit(self._restorable, transfers)
        try:
            return self._asked.result(LOOK_S)
        except Exception as exc:  # noqa: BLE001 - whatever it is, the request is computed
            _log.warning("a look-up came to nothing: %s", str(exc) or type(exc).__name__)
            return []

    def _restorable(self, transfers: Sequence[Any]) -> list[int]:
        """The same, in a thread."""
        keys = next(each.keys for each in transfers if str(each.name) == KV)
        _, lengths = self._store.restorable(keys, [each for each in transfers if str(each.name) != KV])
        return sorted(lengths)

    # -- loads ---------------------------------------------------------------------------------------------------

    def load(self, rid: str, transfers: list[Any]) -> bool:
        """Load now; whether every page is right on every rank. SGLang frees the slots and computes where not."""
        del rid
        if self.forward_stream is not None:  # what it has queued may still use the slots
            get_device_module().current_stream().wait_stream(self.forward_stream)
        try:
            good = all(all(self._store.pool(each.name).load(each.keys, each.device_indices)) for each in transfers)
        except Exception:  # noqa: BLE001 - other ranks wait for this one
            _log.exception("a load is given up")
            good = False
        verdict = torch.tensor([int(good)])
        for group in self._groups:
            torch.distributed.all_reduce(verdict, torch.distributed.ReduceOp.MIN, group=group)
        if not verdict.item():
            _log.warning("a load came to nothing: the request is computed")
        return bool(verdict.item())

    def start_layer_wise_loading(self) -> int:
        """Nothing is left to be done within the layers."""
        return -1

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """All was there before."""
        del counter_index
        return True

    def cancel_queued_load(self, rid: str) -> bool:
        """No load is under way, so none writes into slots that are given back."""
        del rid
        return True

    # -- offloads ------------------------------------------------------------------------------------------------

    def offload(self, transfers: list[Any], session_id: str | None = None) -> bool:
        """Have a thread store the pages of a node, which SGLang keeps until it hears of it."""
        del session_id
        pools = [(self._store.pool(each.name), each) for each in transfers]
        work = [(pool, pool.cache, each) for pool, each in pools]
        self._offloads.append(self._writer.submit(self._written, work, self.record_offload_ready(), time.monotonic()))
        return True  # on every rank, as their queues must be alike

    def _written(self, work: Work, ready: Sequence[Any], since: float) -> bool:
        """Whether all pages are served now, in the thread. Replicas of the rank that writes say yes."""
        if not self._writes:
            return True
        if time.monotonic() > since + STALE_S:
            return False
        for event in ready:
            event.synchronize()
        done = [pool.store(each.keys, each.device_indices, cache) for pool, cache, each in work]
        return all(map(all, done))

    def num_completed_offloads(self) -> int:
        """How many of the oldest are over."""
        return next((n for n, each in enumerate(self._offloads) if not each.done()), len(self._offloads))

    def pop_completed_offload(self) -> bool:
        """Whether the oldest went well."""
        over = self._offloads.popleft()
        if over.exception() is not None:
            _log.warning("an offload came to nothing: %s", over.exception())
        return over.exception() is None and over.result()

    # -- the rest ------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """SGLang has dropped its KV: what is under way ends, what is queued is not done."""
        running = [each for each in self._offloads if not each.cancel()]
        wait(running)
        self._offloads.clear()
        reload.flushed()

    def close(self) -> None:
        """Let go of everything."""
        self.reset()
        for pool in (self._writer, self._asker):
            pool.shutdown()
        self._store.close()


def sheets_of(kvcache: Any, params: Any) -> dict[Any, Sheets]:
    """The pools of an engine's KV by SGLang's names; raises bad_request for those whose bytes nobody here knows."""
    if params.mtp_draft_device_pools or params.sidecar_draft_device_pools:
        raise bad("speculative decoding", "off: the draft's KV is not kept")
    if type(kvcache) is SWAKVPool:
        parts = {PoolName.KV: kvcache.full_kv_pool, PoolName.SWA: kvcache.swa_kv_pool}
    else:
        parts = {PoolName.KV: kvcache}
    return {name: Sheets(_buffers(pool), params.page_size) for name, pool in parts.items()}


def _buffers(pool: Any) -> list[Any]:
    """The tensors of a pool, a page's tokens in a row in each."""
    if type(pool) is MHATokenToKVPool and pool.kv_cache_layout == "nhd" and pool.k_scale_buffer is None:
        return [*pool.k_buffer, *pool.v_buffer]
    if type(pool) is MLATokenToKVPool and pool.kv_scale_buffer is None and not pool.layer_shard_enabled:
        return list(pool.kv_buffer)
    known = "MHATokenToKVPool (NHD), MLATokenToKVPool, or SWAKVPool of such, without scales"
    raise bad("kv pool", known, type(pool).__name__)


def _groups_of(params: Any) -> list[Any]:
    """The ranks that decide together, as SGLang's tree has them."""
    world = torch.distributed.get_world_size
    near = [each for each in (params.attn_cp_cache_group, params.attn_tp_cache_group) if each is not None]
    many = [each for each in near if world(group=each) > 1]
    whole = params.tp_cache_group
    return many or ([whole] if whole is not None and world(group=whole) > 1 else [])


def _config_of(params: Any, replicated: bool, extra: dict[str, Any]) -> Any:
    """Which shard this process holds, as SGLang tells its storages."""
    parallel = get_parallel()
    for field, size in (("pp_size", params.pp_size), ("dcp_size", parallel.attn_dcp_size)):
        if size != 1:
            raise bad(field, "1 (not supported yet)", size)
    group = params.attn_tp_cache_group or params.tp_cache_group
    there = group is not None and torch.distributed.is_initialized()
    return HiCacheStorageConfig(
        tp_rank=torch.distributed.get_rank(group=group) if there else 0,
        tp_size=torch.distributed.get_world_size(group=group) if there else 1,
        pp_rank=0, pp_size=1, attn_cp_rank=params.attn_cp_rank, attn_cp_size=params.attn_cp_size,
        is_mla_model=replicated, enable_storage_metrics=False, is_page_first_layout=False,
        model_name=get_model().model_path, extra_config=extra,
    )  # fmt: skip
