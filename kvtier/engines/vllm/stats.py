"""Counters of KvtierConnector in the form that vLLM collects."""

from __future__ import annotations

from collections import Counter

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats


class Stats(KVConnectorStats):  # type: ignore[misc]
    """Sums by name: tokens_hit, pages_loaded, pages_saved, loads_failed, saves_dropped and others."""

    def reset(self) -> None:
        """Begin again."""
        self.data: dict[str, int] = {}

    def aggregate(self, other: Stats) -> Stats:
        """The sums of both."""
        self.data = dict(Counter(self.data) + Counter(other.data))
        return self

    def reduce(self) -> dict[str, int | float]:
        """As they are."""
        return dict(self.data)

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not any(self.data.values())
