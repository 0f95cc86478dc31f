"""Several engines of vLLM's on one daemon, each a connector on both sides."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kvtier.demo.daemon import Daemon
from test_vllm_sure import TOKENS, Rank
from vllmstub import Request, adapters, config, paged
from weightkit import safetensors

torch = pytest.importorskip("torch")


def test_engines_that_were_given_one_name_keep_what_each_computes(daemon: Daemon, tmp_path: Path):
    """A configuration that two engines have names both alike: each writes its own pages all the same."""
    weights = safetensors(tmp_path / "model" / "m.safetensors", {"a": np.ones((4, 8), "<f4")}).parent
    transfer = SimpleNamespace(
        engine_id="copied", kv_load_failure_policy="recompute", kv_connector_extra_config={"socket": str(daemon.socket)}
    )
    with adapters("connector") as vllm:
        made = []
        for name in ("a", "b"):
            settings = config(weights, instance_id=name)
            settings.kv_transfer_config = transfer
            groups = paged(2, 4 * 16 * 4, 64, 4)
            head, worker = (
                vllm.connector.KvtierConnector(settings, role, groups) for role in vllm.connector.KVConnectorRole
            )
            blocks = torch.zeros(64, 2, 4, 16)
            worker.register_kv_caches({"layer": blocks})
            head.set_xfer_handshake_metadata({0: worker.get_handshake_metadata()})
            made.append((head, worker, Rank(head._scheduler, worker._worker, blocks)))
        try:
            for number, (_, _, rank) in enumerate(made, 100):
                assert rank.saves(Request(f"request {number}", [number, *TOKENS]))
        finally:
            for head, worker, _ in made:
                worker.shutdown()
                head.shutdown()
