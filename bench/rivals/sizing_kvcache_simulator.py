"""kvcache-simulator: bytes by its catalogue, hit rates by replay. Run by bench_sizing.py in a venv of its own."""

import time

from kvcache_sim.calculator import calculate_cache_size, load_models_data, models_by_id
from kvcache_sim.plan import build_execution_plan
from kvcache_sim.policies import simulate_ceiling, simulate_policy
from kvcache_sim.trace import parse_trace_file
from lines import serve


class Simulator:
    """The calculator behind the web page, and LRU in pure Python."""

    def __init__(self, stack):
        del stack
        self.data = load_models_data()
        self.models = models_by_id(self.data)

    def size(self, config, name, tokens, fp8):
        """Bytes with recurrent state, or why not."""
        del config
        model = self.models.get(name)
        if model is None:
            return "not listed"
        found = calculate_cache_size(
            model,
            tokens=tokens,
            precision="fp8_int8" if fp8 else "bf16_fp16",
            include_linear_attention_state=True,
            models_data=self.data,
        )
        return float(found.total_bytes)

    def load(self, path, warmup):
        """Read a trace, keep how it is to be measured."""
        self.plan = build_execution_plan(parse_trace_file(path), warmup_fraction=warmup)

    def hits(self, capacities):
        """[seconds, hit ratio at each capacity and without a bound]."""
        start = time.perf_counter()
        found = [simulate_policy(self.plan, "lru", c).hitRate for c in capacities]
        return [time.perf_counter() - start, *found, simulate_ceiling(self.plan).hitRate]


serve(Simulator)
