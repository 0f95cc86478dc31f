"""kvfit: bytes of a sequence from a config. Run by bench_sizing.py in a venv of its own."""

from kvfit.architectures import estimate_cache
from lines import serve


class Kvfit:
    """Logical cache state, bf16 everywhere but where fp8 is asked for."""

    def __init__(self, stack):
        del stack

    def size(self, config, name, tokens, fp8):
        """Bytes, or why not."""
        del name
        precision = {"kv_bytes": 1.0, "index_bytes": 0.5} if fp8 else {}
        try:
            return float(estimate_cache(config, context_tokens=tokens, **precision).total_bytes)
        except Exception as exc:  # noqa: BLE001 - whatever it says is its answer
            return type(exc).__name__


serve(Kvfit)
