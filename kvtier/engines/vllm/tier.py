"""KvtierSecondaryTier: kvtier below vLLM's own host tier, which moves the bytes to and from the GPU.

    --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
      "kv_connector_extra_config": {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 8000000000,
        "secondary_tiers": [{"type": "KvtierSecondaryTier", "module_path": "kvtier.engines.vllm.tier"}]}}'

Stores go through vLLM's shared memory as a region: the daemon reads the rows, and what it has read is served only
after this process commits it. Loads are copied from the daemon's memory by a thread of this process. So either may be
given up at any moment: a daemon that hangs holds no row of vLLM's.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, ClassVar, Final

import numpy as np
from vllm import __version__ as vllm_version
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import LookupResult, Medium, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from kvtier.client import Client, Region
from kvtier.engines.vllm import reload
from kvtier.engines.vllm.formats import calling_config, changed, model_fingerprint, model_name, refuse_prefixes
from kvtier.engines.vllm.lookups import Lookups
from kvtier.engines.vllm.naming import Naming
from kvtier.engines.vllm.outcomes import outcome
from kvtier.identity import CacheSpec, GroupSpec
from kvtier.types import Kind, bad

THREADS: Final = 4
KEY_BYTES: Final = 36
"""vLLM's offload keys: a block hash of 32 bytes and a group of 4."""
STATES: Final = ("cache", "ssm_cache")
"""Settings that choose the types of recurrent states."""
BATCH: Final = 256
"""Keys in one request."""
LOAD_MS: Final = 5000
STORE_MS: Final = 500


class KvtierSecondaryTier(SecondaryTierManager):  # type: ignore[misc] # vLLM is not there when types are checked
    """Chunks of vLLM's host tier under their own keys, in a cache that only equal engines share."""

    medium: ClassVar[Any] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        *,
        socket: str | None = None,
        scope: str = "",
        verify: Any = "always",
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        config = offloading_spec.config
        self._client = Client(socket, instance=f"vllm-{config.engine_id}"[:128], scope=scope, verify=verify)
        self._rows = np.asarray(primary_kv_view).view(np.uint8)
        vllm_config = calling_config()
        self._cache = self._client.open(spec_of(config, vllm_config, self._rows.shape[1]))
        self._naming = Naming(vllm_config)
        self._changed = False
        reload.watch_orders()
        self._writes = reload.count()
        self._quiet = False
        """Nothing has been computed since vLLM's last reset."""
        self._region = self._registered(config.engine_id)
        self._pool = ThreadPoolExecutor(THREADS, "kvtier")
        self._lookups = self._empty_lookups()
        self._jobs: dict[Future[JobResult], tuple[Any, bool]] = {}
        """vLLM's job, and whether it loads."""

    def _registered(self, engine_id: str) -> Region | None:
        """The host tier of vLLM as a region; None where it is not the one file that it was."""
        name = f"/dev/shm/vllm_offload_{engine_id}.mmap"  # noqa: S108 - vLLM's name for it
        rows, stride = self._rows.shape
        try:
            fd = os.open(name, os.O_RDWR)
        except OSError:
            return None
        try:
            if os.fstat(fd).st_size != rows * stride:
                return None
            return self._client.register(name[-128:], fd, 0, stride, rows)
        finally:
            os.close(fd)

    # -- lookups -------------------------------------------------------------------------------------------------

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        """Chunks as they come."""
        self._naming.show(req_context)
        return RequestOffloadingContext()

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        """Whether a chunk is there; RETRY while the daemon was not asked yet or somebody is writing it."""
        if self._stale():
            return LookupResult.MISS
        if not self._naming.ready(req_context):
            return LookupResult.RETRY
        name = self._naming.name(key, req_context)
        found = False if name is None else self._lookups.get(name, req_context.req_id)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def on_schedule_end(self, context: Any) -> None:
        """Ask for this step's keys."""
        del context
        self._quiet = False
        self._lookups.flush()

    def on_request_finished(self, req_context: Any) -> None:
        """Forget what it asked for."""
        self._lookups.forget(req_context.req_id)

    def _stale(self) -> bool:
        """Whether weights were written and vLLM was not reset, neither since nor right before."""
        if self._quiet:
            self._writes = reload.count()
        return reload.count() != self._writes

    def _empty_lookups(self) -> Lookups:
        return Lookups(lambda keys: self._pool.submit(self._exists, keys))

    def _exists(self, keys: list[bytes]) -> bytes:
        """Presence of keys; in a thread."""
        return b"".join(self._cache.exists(0, b"".join(part)) for part in batches(keys))

    # -- jobs ----------------------------------------------------------------------------------------------------

    def submit_store(self, job_metadata: Any) -> None:
        """Begin to store rows."""
        self._begin(self._store, job_metadata, load=False)

    def submit_load(self, job_metadata: Any) -> None:
        """Begin to load rows."""
        self._begin(self._load, job_metadata, load=True)

    def _begin(self, work: Callable[[Any, list[int]], JobResult], job: Any, *, load: bool) -> None:
        """Have a thread do a job."""
        rows = [int(row) for row in job.chunk_ids]
        self._jobs[self._pool.submit(work, job, rows)] = (job, load)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Jobs that are over; what could not be loaded is a miss from now on."""
        out = []
        for future in [future for future in self._jobs if future.done()]:
            job, load = self._jobs.pop(future)
            result = outcome(future, JobResult(job.job_id, success=False))
            if load and not result.success:
                lost = [key for key in job.keys if key not in set(result.successful_keys or ())]
                self._lookups.gone(self._naming.names(lost, job.req_context))
            out.append(result)
        return out

    def has_pending_work(self) -> bool:
        """Whether jobs run that the engine is to hear of."""
        return bool(self._jobs)

    def drain_jobs(self) -> None:
        """On a reset of vLLM's: what is under way ends, and this engine's chunks are its own from now on.

        It does so when weights change, to what nobody can say, and tells a tier no more than this.
        """
        wait(self._jobs)
        self._writes, self._quiet = reload.count(), True
        if self._changed:
            self._cache.reset()
        else:
            self._changed = True
            self._cache = self._client.open(changed(self._cache.spec, secrets.token_hex(16)))
        self._lookups = self._empty_lookups()

    def shutdown(self) -> None:
        """Let go of everything."""
        self._naming.close()
        self._pool.shutdown(cancel_futures=True)
        self._client.close()
        self._rows = np.empty((0, 0), np.uint8)  # vLLM unmaps them

    # -- in threads ----------------------------------------------------------------------------------------------

    def _load(self, job: Any, rows: list[int]) -> JobResult:
        """Copy and verify; what is right is kept also where some is missing."""
        began, good = time.monotonic(), []
        for part in batches(list(zip(job.keys, self._naming.names(job.keys, job.req_context), rows, strict=True))):
            with self._cache.acquire_keys(0, b"".join(name for _, name, _ in part), wait_ms=LOAD_MS) as lease:
                good += [key for at, (key, _, row) in enumerate(part) if lease.read(0, at, self._rows[row])]
        moved = len(good) * self.block_size_bytes
        return JobResult(job.job_id, len(good) == len(rows), good, time.monotonic() - began, moved)

    def _store(self, job: Any, rows: list[int]) -> JobResult:
        """Reserve, let the daemon read the rows, and commit what it has read."""
        began, stored = time.monotonic(), 0
        if self._stale() or not self._naming.sure(job.req_context):
            return JobResult(job.job_id, success=False)
        for part in batches(list(zip(self._naming.names(job.keys, job.req_context), rows, strict=True))):
            with self._cache.reserve_keys(0, b"".join(name for name, _ in part), wait_ms=STORE_MS) as held:
                if held.pages and all(self._written(held, [row for _, row in part[: held.pages]])):
                    held.commit()
                    stored += held.pages
        moved = stored * self.block_size_bytes
        return JobResult(job.job_id, stored == len(rows), None, time.monotonic() - began, moved)

    def _written(self, held: Any, rows: list[int]) -> bytes:
        """One byte per row, 1 where it is in its slot."""
        if self._region is not None:
            return self._region.store(held, rows, wait_ms=STORE_MS)
        return bytes(held.view(0, at) is None or held.write(0, at, self._rows[row]) for at, row in enumerate(rows))


def spec_of(config: Any, vllm_config: Any, row_bytes: int) -> CacheSpec:
    """The keyed cache of an engine's chunks; raises bad_request naming what about it cannot be shared."""
    refuse_prefixes(vllm_config.model_config)
    if not vllm_config.cache_config.enable_prefix_caching:  # vLLM's own doing where attention is not causal
        raise bad("enable_prefix_caching", "on: it is off where a prefix's KV is not that of its tokens alone")
    if vllm_config.lora_config is not None:
        raise bad("enable_lora", "off, or KvtierConnector: chunk keys do not say which weights an adapter has")
    attention = getattr(vllm_config.attention_config, "backend", None)
    device = current_platform.get_device_name()
    layout = {
        "groups": [[group.tokens_per_block, group.layer_names] for group in config.groups],
        "chunk": [config.cache.blocks_per_chunk, config.cache.tokens_per_hash, config.worker_kv_bytes_per_block],
        "ranks": [config.parallel.tp_size, config.parallel.pp_size, config.parallel.pcp_size, config.parallel.dcp_size],
        "layout": [config.canonical_layout, config.replicated_layout, config.kv_cache_layout],
        "states": [
            str(getattr(vllm_config.cache_config, f"mamba_{kind}dtype", None)) for kind in ("cache_", "ssm_cache_")
        ],
        "hash": vllm_config.cache_config.prefix_caching_hash_algo,
    }
    digest = hashlib.sha256(json.dumps(layout, sort_keys=True).encode()).hexdigest()
    return CacheSpec(
        model=model_name(vllm_config),
        fingerprint=model_fingerprint(vllm_config),
        kv_dtype=f"{vllm_config.cache_config.cache_dtype}/{config.model.dtype}".replace("torch.", ""),
        page_tokens=config.groups[0].tokens_per_block * config.cache.blocks_per_chunk,
        groups=(GroupSpec(Kind.FULL, 1, 1, row_bytes),),
        revision=str(vllm_config.model_config.revision or ""),
        layout=f"vllm chunks {digest}",
        backend=f"vllm {vllm_version} {device} {attention or 'auto'}",
        key_bytes=KEY_BYTES,
    )


def batches(items: list[Any]) -> list[list[Any]]:
    """Parts of at most BATCH items."""
    return [items[at : at + BATCH] for at in range(0, len(items), BATCH)]
