"""Small seeded models in a folder: `models.py FOLDER KIND SEED`. Runs where vLLM does."""

from __future__ import annotations

import json
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


def lfm2() -> torch.nn.Module:
    """Short convolutions between layers of full attention: a group of states and one of pages."""
    blocks = {"block_dim": 128, "block_ff_dim": 192, "block_multiple_of": 64, "block_ffn_dim_multiplier": 1.0}
    config = transformers.Lfm2Config(
        **COMMON, num_hidden_layers=4, num_key_value_heads=2, layer_types=["conv", FULL] * 2, conv_dim=128,
        conv_dim_out=128, block_auto_adjust_ff_dim=False, **blocks,
    )  # fmt: skip
    return transformers.Lfm2ForCausalLM(config)


def qwen3next() -> torch.nn.Module:
    """Gated delta nets between layers of full attention; vLLM's CPU build runs them in bfloat16.

    Its states are as large as those of grown models: four layers' take more than one slot of the daemon's, and vLLM's
    blocks have 544 tokens, so that a page is no smaller.
    """
    config = transformers.Qwen3NextConfig(
        **COMMON, num_hidden_layers=8, num_key_value_heads=4, head_dim=128, layer_types=["linear_attention", FULL] * 4,
        num_experts=2, num_experts_per_tok=1, moe_intermediate_size=32, shared_expert_intermediate_size=32,
        linear_num_key_heads=16, linear_num_value_heads=16, linear_key_head_dim=128, linear_value_head_dim=128,
    )  # fmt: skip
    return transformers.Qwen3NextForCausalLM(config)


def adapter(folder: Path) -> None:
    """A LoRA of the Llama's: rank 4 on the queries and values of each layer."""
    from safetensors.torch import save_file

    size, state = COMMON["hidden_size"], {}
    for layer in range(4):
        for part in ("q_proj", "v_proj"):
            name = f"base_model.model.model.layers.{layer}.self_attn.{part}"
            state[f"{name}.lora_A.weight"] = torch.randn(4, size)
            state[f"{name}.lora_B.weight"] = torch.randn(size, 4)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(state, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def main() -> None:
    """Make it, with weights so large that rounding does not choose its tokens."""
    folder, kind, seed = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    torch.manual_seed(seed)
    if kind == "adapter":
        adapter(folder)
        return
    model = {"llama": llama, "gemma": gemma, "lfm2": lfm2, "qwen3next": qwen3next}[kind]().eval()
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.ndim == 2:
                tensor.mul_(4)
    model.save_pretrained(folder)


if __name__ == "__main__":
    main()
