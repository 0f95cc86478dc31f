"""A vLLM engine that does what it is told by JSON lines; runs in the venv that has vLLM, never in the tests' own.

Each line is {"do": name, ...} (engine_side/orders.py). `start` builds the engine.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from typing import Any

from orders import serve

os.environ.update(
    TORCH_COMPILE_DISABLE="1", OMP_NUM_THREADS="1", VLLM_CPU_KVCACHE_SPACE="1", HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1", VLLM_ENABLE_V1_MULTIPROCESSING=os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING", "0"),
)  # fmt: skip


class Engine:
    """One LLM; each public method is a thing that can be told."""

    asked = 0
    inside: dict[str, list[float]]
    """While it is clocked: seconds in each method of the connector: by the clock, and of the processor."""
    connectors: dict[bool, list[Any]] | None = None
    """The scheduler's and the worker's, as `attach` changes them."""

    def __init__(self) -> None:
        self.inside = {}

    def start(self, model: str, **options: Any) -> dict[str, Any]:
        """Build the engine."""
        from vllm import LLM

        defaults = {
            "skip_tokenizer_init": True, "dtype": "float32", "block_size": 32, "enforce_eager": True,
            "max_model_len": 512, "disable_log_stats": False,
        }  # fmt: skip
        self.llm = LLM(model, **(defaults | options))
        return {}

    def attach(self, on: bool) -> dict[str, Any]:
        """From now on the connector is the engine's own, or an empty one in its place, between two requests."""
        from empty import EmptyConnector
        from vllm.distributed.kv_transfer import kv_transfer_state
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

        scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
        if self.connectors is None:
            config = self.llm.llm_engine.vllm_config, scheduler.kv_cache_config
            empty = [EmptyConnector(config[0], role, config[1]) for role in KVConnectorRole]
            own = [scheduler.connector, kv_transfer_state.get_kv_transfer_group()]
            self.connectors = {True: own, False: empty}
        scheduler.connector, kv_transfer_state._KV_CONNECTOR_AGENT = self.connectors[on]
        return {}

    def clock(self, on: bool) -> dict[str, Any]:
        """Note how long the connector's own methods take, by the clock and of this thread's processor, or do not."""
        from importlib import import_module

        if on == bool(self.inside):
            return {}

        transfer = self.llm.llm_engine.vllm_config.kv_transfer_config
        ours = transfer.kv_connector_module_path
        module = import_module(ours or "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector")
        kind = getattr(module, transfer.kv_connector)
        for name, method in list(vars(kind).items()):
            if on and callable(method) and not name.startswith("_"):
                setattr(kind, name, self._clocked(name, method))
            elif not on and name in self.inside:
                setattr(kind, name, method.__wrapped__)
        self.inside = self.inside if on else {}
        return {}

    def _clocked(self, name: str, method: Any) -> Any:
        spent = self.inside[name] = [0.0, 0.0]

        def clocked(*args: Any, **more: Any) -> Any:
            began, ran = time.perf_counter(), time.thread_time()
            try:
                return method(*args, **more)
            finally:
                spent[0] += time.perf_counter() - began
                spent[1] += time.thread_time() - ran

        return functools.wraps(method)(clocked)

    def first_token(self, prompt: list[int], tokens: int = 2) -> dict[str, Any]:
        """How long a prompt's first token takes, how much of that was the connector's, what was loaded, and all tokens.

        The request goes on for `tokens` tokens, as any but a prefill-only one does.
        """
        from vllm import SamplingParams

        engine, params = self.llm.llm_engine, SamplingParams(max_tokens=tokens, temperature=0, detokenize=False)
        taken = self._taken()
        self.asked += 1
        engine.add_request(f"first-{self.asked}", {"prompt_token_ids": prompt}, params)
        found: dict[str, Any] = {}
        while engine.has_unfinished_requests():
            out = next(iter(engine.step()), None)
            if out is not None and not found:
                found = taken() | {"cached": out.num_cached_tokens}
        return found | {"tokens": list(out.outputs[0].token_ids)}

    def together(self, prompts: list[list[int]], tokens: int = 8) -> dict[str, Any]:
        """How long requests that come at once take until the last has all its tokens, and the connector's part."""
        from vllm import SamplingParams

        engine = self.llm.llm_engine
        params = SamplingParams(max_tokens=tokens, temperature=0, detokenize=False, ignore_eos=True)
        taken, cached = self._taken(), 0
        for prompt in prompts:
            self.asked += 1
            engine.add_request(f"together-{self.asked}", {"prompt_token_ids": prompt}, params)
        while engine.has_unfinished_requests():
            cached += sum(out.num_cached_tokens for out in engine.step() if out.finished)
        return taken() | {"cached": cached}

    def _taken(self) -> Callable[[], dict[str, Any]]:
        """Gives the seconds since this call, by the clock and of this thread, and how much was the connector's."""
        before, began, ran = self._spent(), time.perf_counter(), time.thread_time()

        def taken() -> dict[str, Any]:
            wall, cpu = time.perf_counter() - began, time.thread_time() - ran
            now = self._spent()
            parts = {name: [a - b for a, b in zip(now[name], before[name], strict=True)] for name in before}
            inside = [sum(part[at] for part in parts.values()) for at in (0, 1)]
            return {"s": wall, "cpu_s": cpu, "inside_s": inside[0], "inside_cpu_s": inside[1], "parts": parts}

        return taken

    def _spent(self) -> dict[str, list[float]]:
        return {name: list(spent) for name, spent in self.inside.items()}

    def generate(
        self, prompts: list[list[int]], tokens: int = 8, salts: list[str] | None = None, lora: str | None = None,
        number: int = 1, in_place: bool = False,
    ) -> list[dict[str, Any]]:  # fmt: skip
        """Greedy continuations with logprobs."""
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=tokens, temperature=0, detokenize=False, logprobs=0, ignore_eos=True)
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        for each, salt in zip(inputs, salts or (), strict=False):
            each["cache_salt"] = salt
        request = None
        if lora:
            from vllm.lora.request import LoRARequest

            request = LoRARequest(f"adapter-{number}", number, lora, load_inplace=in_place)
        outs = self.llm.generate(inputs, params, use_tqdm=False, lora_request=request)
        return [
            {
                "tokens": list(out.outputs[0].token_ids),
                "logprobs": [next(iter(step.values())).logprob for step in out.outputs[0].logprobs],
                "reason": out.outputs[0].finish_reason,
                "cached": out.num_cached_tokens,
            }
            for out in outs
        ]

    def metrics(self) -> dict[str, float]:
        """Counters and gauges of vLLM's, with their labels but the engine's and the model's."""
        out = {}
        for metric in self.llm.get_metrics():
            labels = {k: v for k, v in sorted(metric.labels.items()) if k not in {"engine", "model_name"}}
            if hasattr(metric, "value"):
                out[f"{metric.name}{labels or ''}"] = metric.value
        return out

    def reset(self, connector: bool = False) -> bool:
        """Forget vLLM's own prefix cache, and tell the connector or not."""
        return self.llm.reset_prefix_cache(reset_connector=connector)

    def settle(self) -> dict[str, Any]:
        """A step that computes nothing: connectors hear of requests that have ended."""
        self.llm.llm_engine.engine_core.get_output()
        return {}

    def scale(self, layer: int, by: float) -> dict[str, Any]:
        """Change weights in place: those of one layer's first norm."""
        self.llm.apply_model(_Scale(layer, by))
        return {}

    def reload(self, model: str) -> dict[str, Any]:
        """Have the workers load other weights in place, and tell the engine's caches nothing."""
        self.llm.collective_rpc("reload_weights", kwargs={"weights_path": model})
        return {}

    def abort(self, prompts: list[list[int]], aborted: int, steps: int, tokens: int = 8) -> list[list[int]]:
        """Begin all, end the first `aborted` of them after some steps; what the others gave."""
        from vllm import SamplingParams

        engine = self.llm.llm_engine
        params = SamplingParams(max_tokens=tokens, temperature=0, detokenize=False, ignore_eos=True)
        names = [f"abort-{number}" for number in range(len(prompts))]
        for name, prompt in zip(names, prompts, strict=True):
            engine.add_request(name, {"prompt_token_ids": prompt}, params)
        found: dict[str, list[int]] = {}
        step = 0
        while engine.has_unfinished_requests():
            found |= {out.request_id: list(out.outputs[0].token_ids) for out in engine.step() if out.finished}
            step += 1
            if step == steps:
                engine.abort_request(names[:aborted])
        return [tokens for name, tokens in sorted(found.items()) if name in names[aborted:]]

    def layout(self) -> dict[str, Any]:
        """How the KV lies."""
        config = self.llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config
        return {"groups": len(config.kv_cache_groups), "layout": config.kv_cache_layout, "blocks": config.num_blocks}


class _Scale:
    """What is run on the model in the worker."""

    def __init__(self, layer: int, by: float) -> None:
        self.layer, self.by = layer, by

    def __call__(self, model: Any) -> None:
        model.model.layers[self.layer].input_layernorm.weight.data.mul_(self.by)


if __name__ == "__main__":
    serve(Engine())
