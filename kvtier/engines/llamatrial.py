"""What `kvtierctl try llamacpp` runs: one prompt in a fresh process; prints what came from kvtier as JSON.

`llamatrial.py SOCKET MODEL`, MODEL a GGUF file; where it is not there a small seeded one is made there.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, Final

import numpy as np

TOKENS: Final = 1000
HEADS: Final = 4
LAYERS: Final = 3
VOCABULARY: Final = 300


def small(path: Path, width: int = 512, seed: int = 0) -> Path:
    """A Llama with seeded weights and no tokenizer: its words mean nothing, its KV is as good as any."""
    import gguf  # noqa: PLC0415

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("small")
    writer.add_context_length(2048)
    writer.add_embedding_length(width)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(2 * width)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS // 2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(width // HEADS)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("no_vocab")
    for name, tensor in _tensors(width, seed):
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _tensors(width: int, seed: int) -> list[tuple[str, Any]]:
    """Weights so large that rounding does not choose the model's tokens."""
    rng, ones = np.random.default_rng(seed), np.ones(width, np.float32)
    parts = {
        "attn_q": (width, width), "attn_k": (width // 2, width), "attn_v": (width // 2, width),
        "attn_output": (width, width), "ffn_gate": (2 * width, width), "ffn_up": (2 * width, width),
        "ffn_down": (width, 2 * width),
    }  # fmt: skip
    out = [("output_norm.weight", ones)]
    shapes = {"token_embd.weight": (VOCABULARY, width), "output.weight": (VOCABULARY, width)}
    for layer in range(LAYERS):
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in parts.items()}
        out += [(f"blk.{layer}.{name}.weight", ones) for name in ("attn_norm", "ffn_norm")]
    scale = 4 / np.sqrt(width)
    return out + [(name, (rng.standard_normal(shape) * scale).astype(np.float32)) for name, shape in shapes.items()]


def main() -> None:
    """Generate one token."""
    from llama_cpp import Llama  # noqa: PLC0415

    from kvtier.client import Client  # noqa: PLC0415
    from kvtier.engines.llamacpp import attach  # noqa: PLC0415

    socket, model = sys.argv[1], Path(sys.argv[2])
    if not model.exists():
        small(model)
    llm = Llama(str(model), n_ctx=2048, verbose=False)
    prompt = [(i * i) % 200 + 10 for i in range(TOKENS)]
    with Client(socket) as client:
        kv = attach(llm, client=client)
        began = time.perf_counter()
        tokens = llm.generate(prompt)
        next(tokens)
        took = time.perf_counter() - began
        tokens.close()
    sys.stdout.write(json.dumps({"prompt": TOKENS, "hit": kv.last.hit_tokens, "ttft_s": took}) + "\n")


if __name__ == "__main__":
    main()
