"""A connector of vLLM's that does nothing: what vLLM itself spends where it has any."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA


class EmptyConnector(KVConnectorBase_V1, SupportsHMA):
    """Finds nothing and saves nothing."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing."""

    def wait_for_save(self) -> None:
        """Nothing."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Nothing."""
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Nothing."""

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Nothing."""
        return KVConnectorMetadata()

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        """Nothing is kept."""
        return False, None

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, None]:
        """Nothing is kept."""
        return False, None
