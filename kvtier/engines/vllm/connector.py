"""KvtierConnector: vLLM's own paged KV, loaded from kvtier and saved to it.

--kv-transfer-config '{"kv_connector": "KvtierConnector",
"kv_connector_module_path": "kvtier.engines.vllm.connector", "kv_role": "kv_both",
"kv_load_failure_policy": "recompute"}'
"""

from __future__ import annotations

import logging
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvtier.client import Client
from kvtier.engines.vllm.messages import Done, Formats, Plan
from kvtier.engines.vllm.scheduler import Scheduler
from kvtier.engines.vllm.stats import Stats
from kvtier.engines.vllm.worker import Worker
from kvtier.types import Tier, bad

SOURCES = {
    Tier.DEVICE: CacheHitSource.DEVICE, Tier.HOST: CacheHitSource.HOST,
    Tier.PEER: CacheHitSource.P2P, Tier.DISK: CacheHitSource.DISK,
}  # fmt: skip

_log = logging.getLogger("kvtier.vllm")


class KvtierConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Scheduler and workers of one engine as one instance of kvtierd's.

    Extra configuration: `socket` (default as for every client), `scope`, `verify` (always, sample, never),
    `fingerprint` (sample, exact, or the name of weights that are not on this host), `copy` (auto, kernels, torch) and
    `device` (true: slots may be in the daemon's device tier).
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        if transfer.kv_load_failure_policy != "recompute":
            _log.warning("kv_load_failure_policy is not 'recompute': a page that is lost will fail its request")
        extra = transfer.kv_connector_extra_config or {}
        client = Client(
            extra.get("socket"),
            instance=f"vllm-{vllm_config.instance_id}-{transfer.engine_id}"[:128],  # one configuration may start many
            scope=extra.get("scope", ""),
            verify=extra.get("verify", "always"),
        )
        self._scheduler = self._worker = None
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = Scheduler(client, vllm_config.parallel_config.world_size)
        else:
            self._worker = Worker(
                client, vllm_config, kv_cache_config, extra.get("copy", "auto"), device=bool(extra.get("device", False))
            )

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str:
        """One run of bytes for a block of all layers; where the backend has none, its own layout is used."""
        del vllm_config
        return "BLHNC"

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache: what is not saved is computed again."""
        return False

    # -- workers -------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Learn where the KV lies."""
        self._rank.register(kv_caches)

    def get_handshake_metadata(self) -> Formats:
        """The cache that this worker's KV belongs to."""
        return self._rank.formats()

    def handle_preemptions(self, kv_connector_metadata: Plan) -> None:
        """A step begins, and blocks may be overwritten."""
        if kv_connector_metadata.fence:
            self._rank.fence()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Load what this step computes with."""
        del forward_context, kwargs
        self._rank.load(self._get_connector_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are whole before the forward pass begins."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Pages are saved whole after the forward pass."""

    def wait_for_save(self) -> None:
        """Begin to save the pages that this step has completed."""
        self._rank.save(self._get_connector_metadata())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Loads between steps that are over."""
        del finished_req_ids
        self._rank.between()
        received, failed = self._rank.take_received()
        return KVConnectorTransferResults(finished_recving=received, failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that this step was to compute with and that were not loaded."""
        return self._rank.take_bad_blocks()

    def build_connector_worker_meta(self) -> Done | None:
        """What the scheduler's side waits for."""
        return self._rank.take_done()

    # -- scheduler -----------------------------------------------------------------------------------------------

    def set_xfer_handshake_metadata(self, metadata: dict[int, Formats]) -> None:
        """The workers are there."""
        if not all(isinstance(each, Formats) for each in metadata.values()):
            raise bad("MultiConnector", "none beside KvtierConnector that shakes hands, as NixlConnector does")
        self._head.agree(list(metadata.values()))

    def on_new_request(self, request: Any) -> None:
        """Look it up while it waits."""
        self._head.begin(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens that can be loaded, and whether between steps."""
        return self._head.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Plan the load."""
        self._head.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[CacheHitSource, int]:
        """Tokens by the tier that they were in."""
        found = self._head.sources(request, num_external_tokens)
        return {SOURCES[tier]: tokens for tier, tokens in found.items() if tokens}

    def build_connector_meta(self, scheduler_output: Any) -> Plan:
        """What the workers do in this step."""
        return self._head.plan(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        """What the workers have told."""
        if connector_output.failed_recving:
            self._head.failed(connector_output.failed_recving)
        if connector_output.kv_connector_worker_meta is not None:
            self._head.heard(connector_output.kv_connector_worker_meta)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Nothing reads its blocks after its last step."""
        del block_ids
        self._head.finished(request.request_id)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Nothing reads its blocks after its last step."""
        del block_ids
        self._head.finished(request.request_id)
        return False, None

    def reset_cache(self) -> bool:
        """The weights have changed: `reset_prefix_cache(reset_connector=True)`; not where vLLM keeps KV of before.

        It asks this also where requests that run have kept it from forgetting its own blocks.
        """
        pool = getattr(self._kv_cache_manager, "block_pool", None)
        return self._head.reset(kept=len(getattr(pool, "cached_block_hash_to_block", ())) > 0)

    # -- both ----------------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> Stats | None:
        """Counters since the last call."""
        counts = (self._scheduler or self._rank).take_counts()
        return Stats(data=counts) if counts else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Stats:
        """Counters that were sent."""
        return Stats(data=data or {})

    def shutdown(self) -> None:
        """Let go of everything."""
        (self._scheduler or self._rank).close()

    @property
    def _rank(self) -> Worker:
        assert self._worker is not None
        return self._worker

    @property
    def _head(self) -> Scheduler:
        assert self._scheduler is not None
        return self._scheduler
