"""Real llama.cpp for tests: where its Python is, models to run, and a context that is told what to do."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import vllmkit

ROOT = vllmkit.ROOT
PYTHON = Path(os.environ.get("KVTIER_LLAMACPP_PYTHON", ROOT / ".venv-llamacpp" / "bin" / "python"))
PAGE = 64
EMBED, HEADS, KV_HEADS, FEED, VOCAB, LAYERS = 128, 4, 2, 192, 300, 3

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
                env=vllmkit.environment(PYTHONPATH=str(ROOT)), start_new_session=True,
            )  # fmt: skip
        try:
            self.tell("start", model=str(model), socket=None if socket is None else str(socket), **options)
        except BaseException:
            self.kill()
            raise


def make_model(path: Path, seed: int = 0) -> Path:
    """A Llama with seeded weights, as a GGUF file without a tokenizer."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(2048)
    writer.add_embedding_length(EMBED)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(EMBED // HEADS)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("no_vocab")
    for name, tensor in weights(seed):
        writer.add_tensor(name, tensor)
    return _written(writer, path)


def weights(seed: int) -> list[tuple[str, np.ndarray]]:
    """Tensors so large that rounding does not choose the model's tokens."""
    rng, ones = np.random.default_rng(seed), np.ones(EMBED, np.float32)
    narrow = EMBED // HEADS * KV_HEADS
    shapes = {
        "attn_q": (EMBED, EMBED), "attn_k": (narrow, EMBED), "attn_v": (narrow, EMBED), "attn_output": (EMBED, EMBED),
        "ffn_gate": (FEED, EMBED), "ffn_up": (FEED, EMBED), "ffn_down": (EMBED, FEED),
    }  # fmt: skip
    out = [("output_norm.weight", ones)]
    named = {"token_embd.weight": (VOCAB, EMBED), "output.weight": (VOCAB, EMBED)}
    for layer in range(LAYERS):
        named |= {f"blk.{layer}.{name}.weight": shape for name, shape in shapes.items()}
        out += [(f"blk.{layer}.{name}.weight", ones) for name in ("attn_norm", "ffn_norm")]
    return out + [(name, (rng.standard_normal(shape) * 0.35).astype(np.float32)) for name, shape in named.items()]


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
        writer.add_tensor(f"{name}.lora_a", rng.standard_normal((4, EMBED)).astype(np.float32))
        writer.add_tensor(f"{name}.lora_b", rng.standard_normal((EMBED // HEADS * KV_HEADS, 4)).astype(np.float32))
    return _written(writer, path)


def _written(writer: Any, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
