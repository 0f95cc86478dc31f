"""Real llama.cpp for tests: where its Python is, models to run, and a context that is told what to do."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import vllmkit
from kvtier.engines.llamatrial import LAYERS, small

ROOT = vllmkit.ROOT
PYTHON = Path(os.environ.get("KVTIER_LLAMACPP_PYTHON", ROOT / ".venv-llamacpp" / "bin" / "python"))
PAGE = 64
WIDTH = 128

needs_llamacpp = pytest.mark.skipif(
    not PYTHON.exists(), reason=f"no llama-cpp-python at {PYTHON}: `make engines`, or set KVTIER_LLAMACPP_PYTHON"
)


class Engine(vllmkit.Engine):
    """A Llama in a process of its own; a context manager that ends it."""

    def __init__(self, log: Path, model: Path, socket: Path | None, **options: Any) -> None:
        self.log = log
        side = ROOT / "tests" / "llamacpp_side" / "engine.py"
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                [PYTHON, side], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
                env=vllmkit.environment(PYTHONPATH=vllmkit.paths(ROOT)), start_new_session=True,
            )  # fmt: skip
        try:
            self.tell("start", model=str(model), socket=None if socket is None else str(socket), **options)
        except BaseException:
            self.kill()
            raise


def make_model(path: Path, seed: int = 0) -> Path:
    """A Llama with seeded weights, as a GGUF file without a tokenizer."""
    pytest.importorskip("gguf")
    return small(path, WIDTH, seed)


def make_adapter(path: Path, seed: int) -> Path:
    """A LoRA of the model's keys, of rank 4."""
    gguf = pytest.importorskip("gguf")
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 8.0)
    for layer in range(LAYERS):
        name = f"blk.{layer}.attn_k.weight"
        writer.add_tensor(f"{name}.lora_a", rng.standard_normal((4, WIDTH)).astype(np.float32))
        writer.add_tensor(f"{name}.lora_b", rng.standard_normal((WIDTH // 2, 4)).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
