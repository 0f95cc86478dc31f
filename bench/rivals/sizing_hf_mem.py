"""hf-mem: bytes of a sequence from a config. Run by bench_sizing.py in a venv of its own."""

from hf_mem.safetensors.kv_cache import compute_safetensors_kv_cache_size
from lines import serve


class HfMem:
    """Its estimate of safetensors models, which unwraps multimodal configs before it calls this function."""

    def __init__(self, stack):
        del stack

    def size(self, config, name, tokens, fp8):
        """Bytes, or why not."""
        del name
        try:
            return float(
                compute_safetensors_kv_cache_size(
                    config.get("text_config", config), "F8_E4M3" if fp8 else "BF16", tokens
                )
            )
        except Exception as exc:  # noqa: BLE001 - whatever it says is its answer
            return type(exc).__name__


serve(HfMem)
