"""How right and how fast the planner is, beside other calculators.

    python bench/bench_sizing.py [--rivals] [--json FILE]

Bytes: 128Ki tokens of 22 checkpoints (bf16; DeepSeek-V4 fp8) against the reference count, which is the limit: a ratio
of 1 is right. With --rivals the configs are the published ones, without they are the built-in table's. Hits: the
one-pass curve against a brute LRU replay at one capacity. What rivals do otherwise, and who is right, is printed below
the table.
"""

from __future__ import annotations

import contextlib
import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from measure import OURS, Bench, RivalFailed, Samples, Target, interleave, skipped
from rival import Rival, Running

from kvtier.sizing.curve import Trace, hit_curve
from kvtier.sizing.families import read_config
from kvtier.sizing.models import expand, find
from kvtier.sizing.replay import lru_hits
from kvtier.sizing.traces import load_trace

TOKENS = 131_072
GIB = 2**30
TRACES = Path(__file__).resolve().parent.parent.parent / "shared" / "traces"
SPREAD = (998, 2_995, 9_996, 29_996, 49_996, 100_000)
CONFIGS = Rival("published configs", "aic", "sizing_configs.py", (("--no-deps", "aiconfigurator-core==0.12.0"),))
CALCULATORS = (
    Rival("kvfit 0.3.0", "kvfit", "sizing_kvfit.py", (("kvfit==0.3.0",),)),
    Rival(
        "kvcache-simulator 0.1.3", "kvcache-simulator", "sizing_kvcache_simulator.py", (("kvcache-simulator==0.1.3",),)
    ),
    Rival("hf-mem 0.5.6", "hf-mem", "sizing_hf_mem.py", (("hf-mem==0.5.6",),)),
)
SIMULATOR = CALCULATORS[1].name

REFERENCE = {
    "Meta-Llama-3.1-8B": (17_179_869_184, "llama-3.1-8b"),
    "Meta-Llama-3.1-70B": (42_949_672_960, "llama-3.1-70b"),
    "Qwen3-32B": (34_359_738_368, "qwen3-32b"),
    "DeepSeek-V3": (9_210_691_584, "deepseek-v3"),
    "DeepSeek-V3.2": (10_266_083_328, "deepseek-v3.2"),
    "Kimi-K2-Instruct": (9_210_691_584, "kimi-k2.5"),
    "Kimi-K3": (4_073_250_816, "kimi-k3"),
    "GLM-5": (13_127_122_944, "glm-5"),
    "GLM-5.2": (12_140_937_216, "glm-5.2"),
    "gpt-oss-120b": (4_836_556_800, ""),
    "Gemma-4-31B-IT-NVFP4": (11_576_279_040, "gemma-4-31b"),
    "Qwen3.5-27B": (8_743_878_656, "qwen3.5-27b"),
    "Qwen3.5-397B-A17B": (4_218_593_280, "qwen3.5-397b-a17b"),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": (854_388_736, ""),
    "Llama-4-Scout-17B-16E-Instruct": (7_650_410_496, ""),
    "MiniMax-M2.5": (33_285_996_544, "minimax-m2.5"),
    "MiniMax-M3": (18_018_729_984, "minimax-m3"),
    "MiMo-V2-Flash": (3_045_457_920, ""),
    "Step-3.7-Flash": (6_511_656_960, ""),
    "Llama-3_3-Nemotron-Super-49B-v1": (26_306_674_688, ""),
    "DeepSeek-V4-Flash": (463_834_112, "deepseek-v4-flash"),
    "Mixtral-8x22B-v0.1": (30_064_771_072, ""),
}
"""Checkpoint -> (bytes of 128Ki tokens, its name in kvcache-simulator's catalogue)."""

FP8 = ("DeepSeek-V4-Flash",)
"""Checkpoints whose KV is fp8 by design: rivals are asked for that."""

LATENT = "it counts keys and values of every head; MLA keeps one latent of 576 elements for all"
WINDOWS = "it charges sliding and chunked layers their full length: the engine's allocation, not what is kept"
STATES = "it counts recurrent or attention-free layers as attention"
INDEX = "it counts index keys as 256 bytes (bf16); engines store 132 (fp8 with scales)"
ENTRY = "it counts 512 bytes an entry (no scales, no bf16 rope); SGLang's pool keeps 584"
REASONS: Mapping[str, Mapping[str, str]] = {
    "kvfit 0.3.0": dict.fromkeys(("DeepSeek-V3.2", "GLM-5", "GLM-5.2"), INDEX)
    | {"DeepSeek-V4-Flash": ENTRY, "MiniMax-M3": "it counts four index heads; SGLang's pool stores one: in doubt"},
    SIMULATOR: dict.fromkeys(("DeepSeek-V3.2", "GLM-5", "GLM-5.2"), INDEX) | {"DeepSeek-V4-Flash": ENTRY},
    "hf-mem 0.5.6": dict.fromkeys(
        ("DeepSeek-V3", "DeepSeek-V3.2", "Kimi-K2-Instruct", "GLM-5", "GLM-5.2", "DeepSeek-V4-Flash"), LATENT)
    | dict.fromkeys(("gpt-oss-120b", "Gemma-4-31B-IT-NVFP4", "Llama-4-Scout-17B-16E-Instruct", "MiMo-V2-Flash",
                     "Step-3.7-Flash"), WINDOWS)
    | dict.fromkeys(("Qwen3.5-27B", "Qwen3.5-397B-A17B", "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"), STATES)
    | {"Kimi-K3": f"{STATES}; {LATENT}", "MiniMax-M3": "it leaves out the index keys"},
}  # fmt: skip
"""Why a rival's number is another."""


def published(configs: Running | None, name: str) -> dict[str, Any]:
    """The checkpoint's own config, or the built-in table's."""
    return configs.ask("config", name=name) if configs else expand(find(name)["config"])


def sizes(bench: Bench, configs: Running | None, rivals: Mapping[str, Running]) -> list[str]:
    """A row for each checkpoint; returns what rivals do otherwise."""
    told = []
    for name, (reference, listed) in list(REFERENCE.items())[: 3 if bench.tiny else None]:
        config = published(configs, name)
        ours = read_config(config).payload(TOKENS)
        if ours != reference:
            told.append(f"{OURS}: {name}: {ours / reference:.4f}x the reference: a mistake here")
        samples: Samples = {OURS: [ours / GIB], "reference": [reference / GIB]}
        for rival, running in rivals.items():
            got = running.ask("size", config=config, name=listed, tokens=TOKENS, fp8=name in FP8)
            if isinstance(got, str):
                told.append(f"{rival}: {name}: no answer ({got})")
                continue
            samples[rival] = [got / GIB]
            if abs(got / reference - 1) > 1e-3:
                why = REASONS[rival].get(name, "not explained")
                told.append(f"{rival}: {name}: {got / reference:.2f}x; {why}")
        bench.add(f"128Ki tokens of {name}", "GiB", samples, limit="reference", target=Target("ratio", "<=", 1.0))
    return told


def made_up(bench: Bench) -> Trace:
    """Conversations that go on for a while and stop: about as many block references as the published hour."""
    dice = random.Random(bench.seed)
    parent, leaf, inputs, times = [-1], [], [], []
    live: list[int] = []
    while len(leaf) < (300 if bench.tiny else 12_000):
        if len(live) < 40 or dice.random() < 0.3:
            live.append(0)
        who = dice.randrange(len(live))
        for _ in range(dice.randrange(1, 24)):
            parent.append(live[who])
            live[who] = len(parent) - 1
        leaf.append(live[who])
        if dice.random() < 0.3:
            live[who] = live[-1]
            live.pop()
    trace = Trace("made-up conversations", 512, parent, leaf, inputs, [0] * len(leaf), times)
    inputs += [512 * len(trace.path(r)) + 100 for r in range(len(leaf))]
    times += [0.3 * r for r in range(len(leaf))]
    return trace


def timed(call: Callable[[], object]) -> Callable[[], float]:
    """Seconds of a call."""

    def run() -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    return run


def traces(bench: Bench) -> Iterator[Trace]:
    """A made-up trace, and the published ones where they are."""
    yield made_up(bench)
    for name in ("mooncake_conversation", "mooncake_synthetic"):
        path = TRACES / f"{name}.npz.zst"
        if path.is_file():
            yield load_trace([path])
        else:
            skipped(name, f"no {path.name} in ../shared/traces")


def curves(bench: Bench, simulator: Running | None) -> None:
    """How long the whole curve takes against one replay, and that both say the same."""
    for trace in traces(bench):
        curve = hit_curve(trace)
        capacity = len(curve.hits) // 10
        if lru_hits(trace, capacity) != curve.hits[capacity]:
            raise AssertionError("the curve is not what a replay finds")
        subjects = {
            OURS: timed(lambda t=trace: hit_curve(t)),
            "replay at one capacity": timed(lambda t=trace, c=capacity: lru_hits(t, c)),
        }
        case = f"curve of {curve.references:,} references: {trace.name}"
        samples = interleave(subjects, bench.rounds(5))
        if simulator:
            with simulated(simulator, trace) as hits:
                samples[f"{SIMULATOR}, six capacities"] = [hits[0]]
                rows(bench, trace, hits)
        bench.add(case, "s", samples, limit="replay at one capacity", target=Target("value", "<=", 2.0))


@contextlib.contextmanager
def simulated(simulator: Running, trace: Trace) -> Iterator[list[float]]:
    """[seconds, hits at six capacities, ceiling] of the last half of a trace by kvcache-simulator."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.jsonl"
        with path.open("w") as out:
            for r, tokens in enumerate(trace.input_tokens):
                line = {"timestamp": trace.time_s[r] * 1000, "input_length": tokens, "hash_ids": trace.path(r)}
                out.write(json.dumps(line | {"block_size": trace.block_tokens}) + "\n")
        simulator.ask("load", path=str(path), warmup=0.5)
        yield simulator.ask("hits", capacities=list(SPREAD))  # 0 where it leaves a capacity out: never full


def rows(bench: Bench, trace: Trace, hits: list[float]) -> None:
    """Hit ratios of the last half, side by side."""
    half = hit_curve(trace, warmup=0.5)
    for capacity, theirs in zip((*SPREAD, len(half.hits)), hits[1:], strict=True):
        name = f"{capacity:,} blocks" if capacity in SPREAD else "no bound"
        if not theirs:
            continue
        samples: Samples = {OURS: [half.ratio(capacity)], SIMULATOR: [theirs]}
        bench.add(f"hits of the last half, {name}: {trace.name}", "hit ratio", samples)


def start(bench: Bench, stack: contextlib.ExitStack, rival: Rival) -> Running | None:
    """A rival's process, where it was asked for and runs."""
    if not bench.rivals:
        return None
    try:
        return stack.enter_context(Running(rival))
    except RivalFailed as exc:
        skipped(rival.name, exc)
        return None


def main() -> None:
    """Run every measurement."""
    bench = Bench("sizing", "How right and how fast the planner is.")
    with contextlib.ExitStack() as stack:
        if not bench.rivals:
            skipped("kvfit, kvcache-simulator, hf-mem, published configs", "not asked for (--rivals)")
        configs = start(bench, stack, CONFIGS)
        running = {rival.name: got for rival in CALCULATORS if (got := start(bench, stack, rival))}
        told = sizes(bench, configs, running)
        curves(bench, running.get(SIMULATOR))
    bench.finish()
    if SIMULATOR in running:
        told.append(f"{SIMULATOR}: finds a little more: the last part of a prompt counts as reusable there")
    for line in told:
        print(line)


if __name__ == "__main__":
    main()
