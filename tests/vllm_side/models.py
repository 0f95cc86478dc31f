"""Small seeded models in a folder: `models.py FOLDER KIND SEED`. Runs where vLLM does."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import transformers

COMMON = {
    "vocab_size": 300, "hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4,
    "max_position_embeddings": 1024, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
SLIDING, FULL = "sliding_attention", "full_attention"


def llama() -> torch.nn.Module:
    """Four layers of full attention."""
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**COMMON, num_hidden_layers=4, num_key_value_heads=4))


def gemma() -> torch.nn.Module:
    """Six layers of which four see 64 tokens: three KV cache groups in vLLM."""
    config = transformers.Gemma3TextConfig(
        **COMMON, num_hidden_layers=6, num_key_value_heads=2, head_dim=32, sliding_window=64,
        layer_types=[SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL],
    )  # fmt: skip
    return transformers.Gemma3ForCausalLM(config)


def main() -> None:
    """Make it, with weights so large that rounding does not choose its tokens."""
    folder, kind, seed = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    torch.manual_seed(seed)
    model = {"llama": llama, "gemma": gemma}[kind]().eval()
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.ndim == 2:
                tensor.mul_(4)
    model.save_pretrained(folder)


if __name__ == "__main__":
    main()
