"""What `kvtierctl try vllm` runs in vLLM's venv: one prompt in a fresh engine; prints what came from kvtier as JSON.

`trial.py SOCKET MODEL`, MODEL a folder; where it does not exist a small seeded one is made there.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

TOKENS = 1000
"""Length of the prompt; its last whole page but one token is what a second engine can load."""

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCH_COMPILE_DISABLE": "1"}
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")


def attach(socket: str) -> dict[str, Any]:
    """What --kv-transfer-config takes."""
    return {
        "kv_connector": "KvtierConnector", "kv_connector_module_path": "kvtier.engines.vllm.connector",
        "kv_role": "kv_both", "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"socket": socket},
    }  # fmt: skip


def small(folder: Path) -> None:
    """A Llama with seeded weights: its words mean nothing, its KV is as good as any."""
    import torch  # noqa: PLC0415
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000, hidden_size=512, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=2048,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


def main() -> None:
    """Generate one token twice: for another prompt, to be warm, and for the prompt."""
    socket, model = sys.argv[1], Path(sys.argv[2])
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints goes elsewhere
    if not model.exists():
        small(model)
    from vllm import LLM, SamplingParams  # noqa: PLC0415

    llm = LLM(
        str(model), skip_tokenizer_init=True, block_size=32, enforce_eager=True, max_model_len=1024,
        kv_transfer_config=attach(socket),
    )  # fmt: skip
    params = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
    llm.generate([{"prompt_token_ids": [5] * 30}], params, use_tqdm=False)
    prompt = [(i * i) % 900 + 50 for i in range(TOKENS)]
    began = time.perf_counter()
    answer = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)[0]
    took = time.perf_counter() - began
    # A thread commits what a step has saved, and later steps hear of it: an engine that ends at once takes it along.
    time.sleep(2)
    llm.generate([{"prompt_token_ids": [6] * 30}], params, use_tqdm=False)
    time.sleep(2)
    out.write(json.dumps({"prompt": TOKENS, "hit": answer.num_cached_tokens, "ttft_s": took}) + "\n")
    out.close()


if __name__ == "__main__":
    main()
